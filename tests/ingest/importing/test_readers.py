"""Files as blocks: each cell is read back as written, with its row number."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ingest.importing.cells import RAW
from ingest.importing.readers import BLOCK_BYTES, Problem, open_file

CELL = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r"), max_size=8)


@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=8))
def test_csv_cells_are_those_of_the_file(rows: list[tuple[str, str]]) -> None:
    """Any text is read back as written, row by row."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerows([("a", "b"), *rows])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log.csv")
        path.write_bytes(text.getvalue().encode())
        assert cells(path, "b", "a") == [(b or None, a or None) for a, b in rows]


def cells(path: Path, *columns: str) -> list[tuple[object, ...]]:
    """All rows, numbered from 1."""
    found: list[tuple[object, ...]] = []
    for block in open_file(path)[1](columns):
        assert not block.problems
        first = len(found) + 1
        assert block.numbers.tolist() == list(range(first, first + len(block.table)))
        found += zip(*(block.table[name].to_pylist() for name in columns), strict=True)
    return found


JSON = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | CELL | st.just(0.5)


@given(st.lists(st.tuples(JSON, JSON), min_size=1, max_size=8))
def test_json_cells_are_texts_with_every_digit(rows: list[tuple[Any, Any]]) -> None:
    """A text comes without its quotes, anything else as its JSON, whatever other rows have."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log.jsonl")
        path.write_text("".join(json.dumps({"a": a, "b": b}) + "\n" for a, b in rows))
        found = cells(path, "a", "b")
    as_text = [
        tuple(c if c is None or isinstance(c, str) else json.dumps(c) for c in row) for row in rows
    ]
    assert found == as_text


def test_a_name_with_dots_is_a_key_or_a_path(tmp_path: Path) -> None:
    """The key has precedence; a number of any size keeps its digits, a whole one its form."""
    path = tmp_path / "log.jsonl"
    path.write_text('{"c": {"u": 18446744073709551616}, "c.d": 2.0, "~/": [1, 2.5]}\n')
    large = tmp_path / "large.jsonl"
    large.write_text('{"a": 9007199254740993.0}\n')  # a float, whose digits are lost already
    assert cells(large, "a") == [("9007199254740992.0",)]
    assert cells(path, "c.u", "c.d", "~/", RAW + "c") == [
        ("18446744073709551616", "2", "[1,2.5]", '{"u":18446744073709551616}')
    ]


def test_a_line_that_is_no_object_costs_itself(tmp_path: Path) -> None:
    """Blank lines are skipped; the other lines are numbered, including later ones."""
    path = tmp_path / "log.jsonl"
    path.write_text('{"a": 1}\n\n[2]\n{"a": "x"}\nnot json\n{"a": 5, "b": {"c": []}}')
    blocks = list(open_file(path)[1](["a"]))
    assert [cell for block in blocks for cell in block.table["a"].to_pylist()] == ["1", "x", "5"]
    assert [number for block in blocks for number in block.numbers.tolist()] == [1, 3, 5]
    problems = [problem for block in blocks for problem in block.problems]
    assert [problem.number for problem in problems] == [2, 4]
    assert problems[0].reason == "row: expected a JSON object, got [2]"


def test_bytes_that_are_no_text_stay_bytes(tmp_path: Path) -> None:
    """They are faults of their rows where they are read; a row with too few fields is a problem."""
    path = tmp_path / "log.csv"
    path.write_bytes(b"\xef\xbb\xbfa,b\n1,x\n2,\xff\n3\n4,y\n")
    (block,) = open_file(path)[1](["a", "b"])
    assert block.table.to_pydict() == {"a": ["1", "2", "4"], "b": [b"x", b"\xff", b"y"]}
    assert block.numbers.tolist() == [1, 2, 4]
    assert block.problems == [Problem(3, "row: expected 2 fields, got 1")]


def test_a_line_of_json_that_is_no_text_costs_itself(tmp_path: Path) -> None:
    """Whichever of its values it is, and whether the column is read or not."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": "x", "b": 1}\n{"a": "\xff", "b": 2}\n{"a": "y", "b": 3}\n')
    for column, cells in (("a", ["x", "y"]), ("b", ["1", "3"])):
        (block,) = open_file(path)[1]([column])
        assert block.table[column].to_pylist() == cells
        assert [problem.number for problem in block.problems] == [2]


def test_numbers_of_rows_go_on_from_block_to_block(tmp_path: Path) -> None:
    """Skipped rows are counted at their place, in a file of several blocks."""
    path, count = tmp_path / "log.csv", 3 * BLOCK_BYTES // 20
    path.write_text("a,b\n" + "".join(f"{n},{'x' * 20}\n" for n in range(1, count)) + "z\n7,\n")
    blocks = list(open_file(path)[1](["a"]))
    assert len(blocks) > 2
    numbers = np.concatenate([block.numbers for block in blocks])
    assert numbers.tolist() == [*range(1, count), count + 1]
    assert [problem for block in blocks for problem in block.problems] == [
        Problem(count, "row: expected 2 fields, got 1")
    ]
