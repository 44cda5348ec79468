"""Grouping: each row is returned once, with its whole episode, ordered by the episodes' ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.importing.engine import Workspace
from ingest.importing.grouping import (
    EPISODE,
    NUMBER,
    UNIT,
    Chunk,
    all_rows,
    by_episode,
    joined,
    within,
)
from ingest.importing.options import ImportOptions
from ingest.importing.readers import Blocks, SourceBlock
from ingest.importing.sources import open_source


class Pieces:
    """A unit with given blocks."""

    label, once = "pieces", False

    def __init__(self, blocks: Sequence[Sequence[Any]]) -> None:
        self._blocks = blocks

    def names(self) -> list[str]:
        return ["e"]

    def digest(self) -> str | None:
        return None

    def blocks(self, columns: Sequence[str]) -> Blocks:
        before = 0
        for keys in self._blocks:
            numbers = pa.array(range(before + 1, before + 1 + len(keys)), pa.int64())
            before += len(keys)
            yield SourceBlock(pa.table({"e": pa.array(keys)}), numbers.to_numpy())


KEYS = st.none() | st.integers(0, 5)


@settings(max_examples=25)  # each opens a database
@given(st.lists(st.lists(KEYS, max_size=6), max_size=6))
def test_every_row_comes_once_with_its_whole_episode(blocks: list[list[int | None]]) -> None:
    """Each row comes once with its whole episode, whatever rows lie in between and wherever blocks
    end. Rows without a key stand alone."""
    rows = [key for block in blocks for key in block]
    found: list[tuple[str | None, int]] = []
    with Workspace() as space:
        for chunk in by_episode(all_rows([Pieces(blocks)], ["e"]), "e", None, space):
            keys, numbers = chunk.table[EPISODE].to_pylist(), chunk.table[NUMBER].to_pylist()
            found += zip(keys, numbers, strict=True)
    assert sorted(number for _, number in found) == list(range(1, len(rows) + 1))
    assert all(key == (None if (own := rows[n - 1]) is None else str(own)) for key, n in found)
    named = [(key, number) for key, number in found if key is not None]
    order = {key: max(n for own, n in named if own == key) for key, _ in named}
    assert named == sorted(named, key=lambda row: (order[row[0]], row[1]))


def test_a_line_that_cannot_be_read_moves_no_other(tmp_path: Path) -> None:
    """It is a problem of its file; all episodes stay whole, across files."""
    lines = [f'{{"e": {row // 2}}}' for row in range(100)]
    lines[41] = lines[99] = "no object"
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    found, problems = [], []
    with Workspace() as space:
        for chunk in by_episode(all_rows(open_source(tmp_path, None), ["e"]), "e", None, space):
            units, numbers = chunk.table[UNIT].to_pylist(), chunk.table[NUMBER].to_pylist()
            found += zip(units, numbers, chunk.table[EPISODE].to_pylist(), strict=True)
            problems += [(problem.label, problem.number) for problem in chunk.problems]
    assert problems == [("a.jsonl", 42), ("a.jsonl", 100), ("b.jsonl", 42), ("b.jsonl", 100)]
    assert [row[:2] for row in sorted(found, key=lambda row: row[2] or "")] == [
        (unit, number)
        for key in sorted(map(str, range(50)))
        for unit in (0, 1)
        for number in (2 * int(key) + 1, 2 * int(key) + 2)
        if number not in (42, 100)
    ]


def test_chunks_end_between_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the database returns a few rows at a time; an episode may be longer than that."""
    monkeypatch.setattr("ingest.importing.engine.BATCH_ROWS", 7)
    keys = [number // 3 % 40 for number in range(1_000)] + [99] * 20
    with Workspace() as space:
        chunks = list(by_episode(all_rows([Pieces([keys])], ["e"]), "e", None, space))
    found = [sorted({*chunk.table[EPISODE].to_pylist()}) for chunk in chunks]
    assert len(chunks) > 1
    assert len([key for some in found for key in some]) == len({*keys})
    assert sum(len(chunk.table) for chunk in chunks) == len(keys)


def test_joined_tables_keep_every_cell() -> None:
    """Where types differ, a column becomes text, or bytes if a text is not UTF-8."""
    first = pa.table({"x": ["a"], "r": [1.5], "n": [1]})
    second = pa.table({"x": [b"\xff"], "r": ["2.0"], "n": [2]})
    found = joined([first, second]).to_pydict()
    assert found == {"x": [b"a", b"\xff"], "r": ["1.5", "2.0"], "n": [1, 2]}


@pytest.mark.parametrize(
    ("more", "early", "late"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7], [5, 6, 7]),  # b, c and d are reported as invalid
        ({"missing": "drop"}, [1, 2, 3, 4, 7], [5, 6, 7]),  # the row of d is dropped
        ({"default": {"t": "2"}}, [1, 2, 3, 4, 5, 6, 7], []),
    ],
)
def test_an_episode_that_lacks_a_time_is_stored_in_one_period(
    more: Any, early: list[int], late: list[int]
) -> None:
    """Whatever stands for the absent time; one that cannot be stored may be counted in both."""
    table = pa.table(
        {
            NUMBER: [1, 2, 3, 4, 5, 6, 7],
            EPISODE: ["a", "a", "b", "b", "c", "c", "d"],
            "t": [1, 9, None, 3, 8, None, None],
        }
    )
    given = {"source": "log", "observation": ["o"], "action": ["a"], "reward": "r", "time": "t"}
    for period, numbers in (({"until": 5}, early), ({"since": 5}, late)):
        options = ImportOptions(**(given | more | period))
        (chunk,) = within(iter([Chunk(table, [])]), options)
        assert chunk.table[NUMBER].to_pylist() == numbers
