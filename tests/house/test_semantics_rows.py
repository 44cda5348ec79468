"""Every row of the API's semantics has a test that names it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.house.semantics_rows import ROWS

TESTS = Path(__file__).parents[1]
MARK = "Row: "


def named_rows(file: Path) -> dict[str, list[str]]:
    """Row -> the tests in the file whose docstrings name it."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            text = " ".join((ast.get_docstring(node) or "").split())
            for row in text.split(MARK)[1:]:
                found.setdefault(row.strip(), []).append(node.name)
    return found


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_held_where_it_is_said(row: str) -> None:
    """The files that a row lists each have a test whose docstring ends with the row's name."""
    for file in ROWS[row][1]:
        assert named_rows(TESTS / f"{file}.py").get(row), f"{file} names no test for {row!r}"


def test_no_test_names_a_row_that_there_is_not() -> None:
    """A misspelt row would hold nothing."""
    named = {row for file in TESTS.glob("*/test_*.py") for row in named_rows(file)}
    assert named - set(ROWS) == set()


def test_what_was_dropped_is_told() -> None:
    """Two rows are dropped, each with an error that names what replaces it."""
    assert [row for row, (kind, _) in ROWS.items() if kind == "D"] == [
        "max_concurrent",
        "tf_session_creator, tf paths, import_policy_model_from_h5",
    ]
    assert {kind for kind, _ in ROWS.values()} == {"K", "M", "D"}
