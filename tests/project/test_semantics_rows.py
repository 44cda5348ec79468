"""Every row of the API's semantics has a test that names it."""

from __future__ import annotations

import ast
from itertools import islice
from pathlib import Path

import pytest

from tests.project.semantics_rows import ROWS

TESTS = Path(__file__).parents[1]
MARK = "Row: "
# The text with the rows; it is stored outside the repository, and not on a user's machine.
SEMANTICS = TESTS.parents[1] / "shared" / "SEMANTICS.md"
SECTIONS = {"1": 22, "2": 34, "3": 19}  # how many rows each section of it has


def named_rows(file: Path) -> dict[str, list[str]]:
    """Row -> the tests in the file whose docstrings name it."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            text = " ".join((ast.get_docstring(node) or "").split())
            for row in text.split(MARK)[1:]:
                found.setdefault(row.strip(), []).append(node.name)
    return found


def rows_of(text: str) -> dict[str, dict[str, str]]:
    """Section -> row -> its kind, of the tables of a Markdown text."""
    found: dict[str, dict[str, str]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").partition(".")[0]
        cells = [cell.strip() for cell in line.split("|")[1:]]
        if len(cells) > 3 and cells[0] not in ("item", "method", "---"):
            found.setdefault(section, {})[cells[0]] = cells[2][0]
    return found


def required_rows() -> dict[str, dict[str, str]]:
    """The required rows: those of the text if it exists, else a placeholder for each."""
    if SEMANTICS.exists():
        return rows_of(SEMANTICS.read_text())
    kinds = iter([(row, kind) for row, (kind, _) in ROWS.items()])
    return {section: dict(islice(kinds, rows)) for section, rows in SECTIONS.items()}


def test_no_row_is_missing_and_none_is_made_up() -> None:
    """The rows are those of the text, in its order and with its kinds; without the text, only their
    number is checked."""
    sections = required_rows()
    assert {section: len(rows) for section, rows in sections.items()} == SECTIONS
    assert [(row, kind) for row, (kind, _) in ROWS.items()] == [
        one for rows in sections.values() for one in rows.items()
    ]


def test_tables_are_read_by_section() -> None:
    """Table heads and rules are not rows."""
    table = "| item | means | K/M/D |\n| --- | --- | --- |\n| a(b) | c | K+ | d |\n"
    found = rows_of(f"# x\n## 1. One\n{table}## 2. Two\n{table.replace('K+', 'M: as e')}")
    assert found == {"1": {"a(b)": "K"}, "2": {"a(b)": "M"}}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_held_where_it_is_said(row: str) -> None:
    """The files that a row lists each have a test whose docstring ends with the row's name."""
    for file in ROWS[row][1]:
        assert named_rows(TESTS / f"{file}.py").get(row), f"{file} names no test for {row!r}"


def test_no_test_names_a_row_that_there_is_not() -> None:
    """No test names an unknown row."""
    named = {row for file in TESTS.glob("*/test_*.py") for row in named_rows(file)}
    assert named - set(ROWS) == set()


def test_what_was_dropped_is_told() -> None:
    """Two rows are dropped, each with an error that names what replaces it."""
    assert [row for row, (kind, _) in ROWS.items() if kind == "D"] == [
        "max_concurrent",
        "tf_session_creator, tf paths, import_policy_model_from_h5",
    ]
    assert {kind for kind, _ in ROWS.values()} == {"K", "M", "D"}
