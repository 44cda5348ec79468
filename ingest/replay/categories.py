"""Categories of a log's columns: which number stands for which value.

What a log declares has them as names in its spaces. For spaces that were declared without, the
numbering is kept in a JSON file beside the log, `{column: [value, ...]}`; the place of a value
is its code. It is written by the first import and used by later ones, so that the logs of two
logging policies mean the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ingest.protocol.errors import ReplayError
from ingest.replay.record_files import open_table, require_columns

MOST = 10_000
"""Different values that a column of categories may have; more are a mistake in the options."""

Value: TypeAlias = str | int
Categories: TypeAlias = dict[str, list[Value]]


def learn_categories(paths: Iterable[Path], columns: Sequence[str]) -> Categories:
    """The distinct values of each column in all files: sorted, as numbers if all are integers.

    Raises ReplayError for a column that is missing or has more than MOST values.
    """
    found: dict[str, dict[str, Value]] = {name: {} for name in columns}
    for path in paths:
        table = open_table(path)
        require_columns(path, table, columns)
        for record in table.records(columns):
            for name, cell in zip(columns, record.cells, strict=not record.problem):
                if cell not in (None, "") and not isinstance(cell, (list, dict)):
                    found[name].setdefault(category(cell), _plain(cell))
                    if len(found[name]) > MOST:
                        raise ReplayError(
                            f"{path}: column {name}: expected at most {MOST} categories, got more"
                        )
    return {name: _sorted(values) for name, values in found.items()}


def category(cell: Any) -> str:
    """The text by which a cell is looked up: 3, 3.0 and "3" are the same category."""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)
    return str(cell)


def _plain(cell: Any) -> Value:
    text = category(cell)
    try:
        number = int(text)
    except ValueError:
        return text
    return number if str(number) == text else text


def _sorted(values: Mapping[str, Value]) -> list[Value]:
    if all(isinstance(value, int) for value in values.values()):
        return sorted(values.values())
    return sorted(values)


def load_categories(path: Path) -> Categories:
    """The categories of a file. Raises ReplayError unless it is what `save_categories` writes."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ReplayError(f"{path}: expected a file of categories: {error}") from error
    if not isinstance(document, dict) or not all(map(_is_numbering, document.values())):
        raise ReplayError(
            f"{path}: expected {{column: [value, ...]}} with different texts or integers"
        )
    return document


def _is_numbering(values: Any) -> bool:
    if not isinstance(values, list):
        return False
    fine = all(isinstance(value, (str, int)) for value in values)
    return fine and len(set(map(category, values))) == len(values)


def save_categories(path: Path, categories: Categories) -> None:
    """Write the file whole or not at all. Raises ReplayError where that is not possible."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(json.dumps(categories, indent=1) + "\n")
        draft.replace(path)
    except OSError as error:
        raise ReplayError(
            f"{path}: the categories cannot be kept there ({error.strerror}); name another file "
            f"with --categories"
        ) from error


def known_categories(data: Path, columns: Sequence[str], path: Path) -> Categories:
    """The categories of these columns: of the file at `path`, and learned where it has none."""
    if not columns:
        return {}
    saved = load_categories(path) if path.exists() else {}
    missing = [name for name in columns if name not in saved]
    if missing:
        saved |= learn_categories([data], missing)
        save_categories(path, saved)
    return {name: saved[name] for name in columns}
