"""Tables of records: CSV, JSON lines and Parquet, read row by row in bounded memory.

A row that cannot be read is a Record that says why; the rest of the file is read all the same.
CSV and JSON lines are read as text, row by row, and not by inferred column types: one odd value
must cost one row, and its line must be known.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec

from ingest.protocol.errors import ReplayError

_LOOKED_AT = 1_000  # JSON lines in which a column must occur to exist
_BATCH_ROWS = 8_192


class Record(NamedTuple):
    """One data row: `number` from 1, the `line` where it begins (text files), and its cells.

    `cells` are in the order of the columns asked for; a cell is None where there is nothing.
    A row that cannot be read has a `problem`, and no cells.
    """

    number: int
    line: int | None
    cells: Sequence[Any]
    problem: str = ""


class Table(Protocol):
    """A file of records. `rows`: how many there are, None if only reading tells."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def rows(self) -> int | None: ...

    def records(self, columns: Sequence[str]) -> Iterator[Record]: ...


def open_table(path: Path) -> Table:
    """The table of a file, by its suffix. Raises ReplayError if it cannot be read or is empty."""
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise ReplayError(f"{path}: expected a file of {', '.join(_KINDS)}")
    try:
        if path.stat().st_size == 0:
            raise ReplayError(f"{path} is empty")
        return kind(path)
    except OSError as error:
        raise ReplayError(f"{path}: cannot be read: {error.strerror or error}") from error


def require_columns(path: Path, table: Table, columns: Sequence[str]) -> None:
    """Raise ReplayError that names the columns that are missing and those that exist."""
    missing = [name for name in dict.fromkeys(columns) if name not in table.names]
    if missing:
        raise ReplayError(
            f"{path}: no column {', '.join(map(repr, missing))}; it has {', '.join(table.names)}"
        )


class CsvTable:
    """Comma-separated values with a header; a quoted field may hold line ends."""

    rows = None

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._open() as file:
            try:
                self.names = next(csv.reader(file), [])
            except csv.Error as error:
                raise ReplayError(f"{path}: expected a CSV header: {error}") from error
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise ReplayError(f"{path}: expected different column names, got {twice} twice")

    def _open(self) -> Any:
        # Bytes that are not UTF-8 reach the row that holds them, instead of ending the file.
        return self._path.open(encoding="utf-8-sig", errors="surrogateescape", newline="")

    def records(self, columns: Sequence[str]) -> Iterator[Record]:
        places, width = [self.names.index(name) for name in columns], len(self.names)
        with self._open() as file:
            rows, number = csv.reader(file), 0
            next(rows, None)
            while True:
                line = rows.line_num + 1
                try:
                    row = next(rows, None)
                except csv.Error as error:
                    number += 1
                    yield Record(number, line, (), f"row: expected CSV, got {error}")
                    continue
                if row is None:
                    return
                if row:
                    number += 1
                    yield _csv_record(row, number, line, places, width)


def _csv_record(
    row: list[str], number: int, line: int, places: Sequence[int], width: int
) -> Record:
    if len(row) != width:
        return Record(number, line, (), f"row: expected {width} fields, got {len(row)}")
    return Record(number, line, [row[place] or None for place in places])


class JsonLinesTable:
    """One JSON object a line; blank lines are passed over."""

    rows = None

    def __init__(self, path: Path) -> None:
        self._path = path
        names: dict[str, None] = {}
        with path.open("rb") as file:
            for _, _, found in islice(_objects(file), _LOOKED_AT):
                if isinstance(found, dict):
                    names.update(dict.fromkeys(found))
        if not names:
            raise ReplayError(f"{path}: expected a JSON object in each line, got none")
        self.names = list(names)

    def records(self, columns: Sequence[str]) -> Iterator[Record]:
        with self._path.open("rb") as file:
            for number, line, found in _objects(file):
                if isinstance(found, dict):
                    yield Record(number, line, [found.get(name) for name in columns])
                else:
                    yield Record(number, line, (), f"row: expected a JSON object, got {found}")


def _objects(file: BinaryIO) -> Iterator[tuple[int, int, dict[str, Any] | str]]:
    """(row number, line, the object or what is wrong with it)."""
    number = 0
    decode = msgspec.json.Decoder().decode
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        number += 1
        try:
            found = decode(text)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            yield number, line, str(error)
            continue
        yield number, line, found if isinstance(found, dict) else f"{found!r:.80}"


class ParquetTable:
    """A Parquet file; timestamps become integers of microseconds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._arrow = importlib.import_module("pyarrow")  # only for Parquet: an optional extra
        self._parquet = importlib.import_module("pyarrow.parquet")
        try:
            with self._parquet.ParquetFile(path) as file:
                self.names: Sequence[str] = file.schema_arrow.names
                self.rows: int | None = file.metadata.num_rows
        except (self._arrow.ArrowException, OSError) as error:
            raise ReplayError(f"{path}: expected Parquet: {error}") from error

    def records(self, columns: Sequence[str]) -> Iterator[Record]:
        number = 0
        try:
            with self._parquet.ParquetFile(self._path) as file:
                wanted = list(dict.fromkeys(columns))
                for batch in file.iter_batches(_BATCH_ROWS, columns=wanted):
                    cells = {name: self._cells(batch.column(name)) for name in wanted}
                    for row in zip(*(cells[name] for name in columns), strict=True):
                        number += 1
                        yield Record(number, None, row)
        except (self._arrow.ArrowException, OSError) as error:
            text = f"{self._path}: damaged after row {number}: {error}"
            raise ReplayError(text) from error

    def _cells(self, column: Any) -> list[Any]:
        arrow = self._arrow
        if arrow.types.is_timestamp(column.type) or arrow.types.is_date(column.type):
            column = column.cast(arrow.timestamp("us"), safe=False).cast(arrow.int64())
        found: list[Any] = column.to_pylist()
        return found


_KINDS: dict[str, Callable[[Path], Table]] = {
    ".csv": CsvTable,
    ".jsonl": JsonLinesTable,
    ".ndjson": JsonLinesTable,
    ".json": JsonLinesTable,
    ".parquet": ParquetTable,
    ".pq": ParquetTable,
}
