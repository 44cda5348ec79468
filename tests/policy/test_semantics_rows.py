"""Every row of the worker's semantics has a test that names it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.policy.semantics_rows import ROWS

HERE = Path(__file__).parent
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
        assert named_rows(HERE / f"{file}.py").get(row), f"{file} names no test for {row!r}"


def test_no_test_names_a_row_that_there_is_not() -> None:
    """A misspelt row would hold nothing."""
    named = {row for file in HERE.glob("test_*.py") for row in named_rows(file)}
    assert named - set(ROWS) == set()


def test_only_what_is_of_tensorflow_was_dropped() -> None:
    """One row is dropped; every other is kept or modernised."""
    assert [row for row, (kind, _) in ROWS.items() if kind == "D"] == [
        "tf_session_creator, tf paths, import_policy_model_from_h5"
    ]
    assert {kind for kind, _ in ROWS.values()} == {"K", "M", "D"}
