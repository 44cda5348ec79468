"""Grouping: each row is returned once, with its whole episode, ordered by the episodes' ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ingest.importing.grouping as grouping
from ingest.importing.grouping import EPISODE, NUMBER, UNIT, by_episode, joined
from ingest.importing.readers import Blocks, SourceBlock
from ingest.importing.sources import open_source
from ingest.protocol.errors import ImportFailed


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


@given(st.lists(st.lists(KEYS, max_size=6), max_size=6))
def test_every_row_comes_once_with_its_whole_episode(blocks: list[list[int | None]]) -> None:
    """Each row comes once with its whole episode, whatever rows lie in between and wherever blocks
    end. Rows without a key stand alone."""
    rows = [key for block in blocks for key in block]
    found: list[tuple[str | None, int]] = []
    for chunk in by_episode([Pieces(blocks)], ["e"], "e"):
        keys, numbers = chunk.table[EPISODE].to_pylist(), chunk.table[NUMBER].to_pylist()
        found += zip(keys, numbers, strict=True)
    assert sorted(number for _, number in found) == list(range(1, len(rows) + 1))
    assert all(key == (None if (own := rows[n - 1]) is None else str(own)) for key, n in found)
    named = [(key, number) for key, number in found if key is not None]
    order = {key: max(n for own, n in named if own == key) for key, _ in named}
    assert named == sorted(named, key=lambda row: (order[row[0]], row[1]))


def test_blocks_of_several_kinds_are_joined_as_texts() -> None:
    """A number in one block of JSON lines and a text in the next are both kept."""
    tables = [pa.table({"a": [1]}), pa.table({"a": ["x"]}), pa.table({"a": [None]})]
    assert joined(tables)["a"].to_pylist() == ["1", "x", None]
    assert joined([pa.table({"a": [1]}), pa.table({"a": [0.5]})])["a"].to_pylist() == [1.0, 0.5]


def test_a_row_that_only_its_key_can_be_read_of_moves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow skips what JSON lacks in a column that it need not read; all episodes stay whole."""
    monkeypatch.setattr("ingest.importing.readers.BLOCK_BYTES", 400)
    notes = ['"text"'] * 100
    notes[41] = notes[99] = "NaN"
    lines = [f'{{"e": {row // 2}, "n": {note}}}' for row, note in enumerate(notes)]
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    found, problems = [], []
    for chunk in by_episode(open_source(tmp_path, None), ["e", "n"], "e"):
        units, numbers = chunk.table[UNIT].to_pylist(), chunk.table[NUMBER].to_pylist()
        found += zip(units, numbers, chunk.table[EPISODE].to_pylist(), strict=True)
        problems += [(problem.unit, problem.number) for problem in chunk.problems]
    assert problems == [(0, 42), (0, 100), (1, 42), (1, 100)]
    assert [row[:2] for row in sorted(found, key=lambda row: row[2] or "")] == [
        (unit, number)
        for key in sorted(map(str, range(50)))
        for unit in (0, 1)
        for number in (2 * int(key) + 1, 2 * int(key) + 2)
        if number not in (42, 100)
    ]


def test_bytes_stay_bytes_beside_texts() -> None:
    """A block that is not UTF-8 is joined with others, also of another type; nothing is lost."""
    odd = pa.table({"a": [b"\xff"]})
    assert joined([pa.table({"a": ["x"]}), odd])["a"].to_pylist() == [b"x", b"\xff"]
    assert joined([pa.table({"a": [1]}), odd])["a"].to_pylist() == [b"1", b"\xff"]


def test_rows_too_far_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting rows are bounded: the source has to be sorted."""
    monkeypatch.setattr(grouping, "HELD_BYTES", 1_000)
    table = pa.table({"e": [*range(1_000), *range(1_000)]})
    units = open_source(table, None)
    monkeypatch.setattr("ingest.importing.sources.BLOCK_ROWS", 100)
    with pytest.raises(ImportFailed, match=r"episodes are so far apart .* sort the source by e"):
        list(by_episode(units, ["e"], "e"))
