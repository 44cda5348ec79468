"""Categories of a log's columns: the numbering of each column's values.

For spaces that declare no names, the numbering is in a JSON file that all imports of the policy are
given, `{column: [value, ...]}`; the index of a value is its code. The first import writes it and
later ones read it, so that a code has the same meaning in every log.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow.compute as pc

from ingest.importing.cells import texts_of
from ingest.importing.sources import Unit, require_columns
from ingest.protocol.errors import ImportFailed
from storage.system.files import FileLock, replace_file

BOOLEANS = ("true", "false")
"""The names of booleans, in whatever case a text has them."""
MOST = 10_000
"""The most distinct values of a column of categories; more suggest a mistake in the options."""

Value: TypeAlias = str | int
Categories: TypeAlias = dict[str, list[Value]]


def learn_categories(
    units: Iterable[Unit], columns: Sequence[str], also: Mapping[str, str]
) -> Categories:
    """The distinct values of each column in all units: sorted, as numbers if all are integers.

    Booleans are "true" and "false", also those of texts such as "True".

    `also`: column -> another column with the same kind of values. Raises ImportFailed for a column
    that is missing or has more than MOST values.
    """
    found: dict[str, set[str]] = {name: set() for name in columns}
    for unit in units:
        require_columns(unit, columns)
        pairs = {(name, one) for name in columns for one in (name, also.get(name, name))}
        for block in unit.blocks(sorted({one for _, one in pairs})):
            for name, one in pairs:
                texts = texts_of(block.table[one].combine_chunks())
                found[name].update(pc.unique(texts.drop_null()).to_pylist())
                if len(found[name]) > MOST:
                    raise ImportFailed(
                        f"{unit.label}: column {name}: expected at most {MOST} categories, got more"
                    )
    return {name: _sorted(set(map(_plain, texts))) for name, texts in found.items()}


def category(value: Value) -> str:
    """The text by which a value is looked up: 3 and "3" are the same category."""
    return str(value)


def spelled_as(names: Sequence[str], texts: Any) -> Any:
    """Texts of categories, with true and false as `names` spell them.

    CSV may have "True" and Parquet a boolean for the same value. A text that is a name stays, and
    so does one that could be two names.
    """
    for boolean in BOOLEANS:
        spelled = [name for name in names if name.lower() == boolean]
        if len(spelled) == 1:
            same = pc.equal(pc.utf8_lower(texts), boolean)
            texts = pc.if_else(same, spelled[0], texts)
    return texts


def _plain(text: str) -> Value:
    if text.lower() in BOOLEANS:
        return text.lower()
    try:
        number = int(text)
    except ValueError:
        return text
    return number if str(number) == text else text


def _sorted(values: Iterable[Value]) -> list[Value]:
    listed = list(values)
    if all(isinstance(value, int) for value in listed):
        return sorted(listed)
    return sorted(map(str, listed))


def load_categories(path: Path) -> Categories:
    """Read a file of categories. Raises ImportFailed for any other."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ImportFailed(f"{path}: expected a file of categories: {error}") from error
    if not isinstance(document, dict) or not all(map(_is_numbering, document.values())):
        raise ImportFailed(
            f"{path}: expected {{column: [value, ...]}} with unique strings or integers"
        )
    return document


def _is_numbering(values: Any) -> bool:
    if not isinstance(values, list):
        return False
    fine = all(isinstance(value, (str, int)) for value in values)
    return fine and len(set(map(category, values))) == len(values)


def _add_categories(path: Path, learned: Categories) -> Categories:
    """Add columns to the file, and return what it then has: another import's columns stay.

    Raises ImportFailed if the file cannot be written.
    """
    try:
        with FileLock(path.with_name(f".{path.name}.lock")):
            saved = load_categories(path) if path.exists() else {}
            if not learned.keys() <= saved.keys():
                saved = learned | saved
                replace_file(path, json.dumps(saved, indent=1).encode() + b"\n")
            return saved
    except OSError as error:
        raise ImportFailed(
            f"{path}: the categories cannot be kept there ({error.strerror}); name another file "
            f"with --categories"
        ) from error


def known_categories(
    units: Sequence[Unit],
    columns: Sequence[str],
    also: Mapping[str, str],
    path: Path | str,
    *,
    save: bool,
) -> Categories:
    """The categories of these columns: from the file at `path`, learned for columns not in it.

    `also`: as in `learn_categories`. `save`: whether to add learned ones to the file. If several
    imports add a column at the same time, the first one's values hold for all.
    """
    path = Path(path)
    saved = load_categories(path) if path.exists() else {}
    missing = [name for name in columns if name not in saved]
    if missing:
        learned = learn_categories(units, missing, also)
        saved = _add_categories(path, learned) if save else saved | learned
    return {name: saved[name] for name in columns}
