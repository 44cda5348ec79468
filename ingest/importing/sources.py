"""The sources of an import: files and folders, databases, tables in memory.

A source is one or more units, read one after another. A unit that can be read only once, such as a
query or a reader, is kept in a temporary database if several passes are needed, and so is the
result of a statement over the source.

A file that several passes read has to stay as it is: from the second pass on, its size, times and
inode are compared with those before the first one, after each block and before the block is used.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib
import itertools
import json
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa

from ingest.importing.cells import RAW, json_of
from ingest.importing.engine import FILE, ROW, KeptRows
from ingest.importing.options import ImportOptions
from ingest.importing.readers import (
    BLOCK_ROWS,
    Blocks,
    OpenFile,
    Problem,
    SourceBlock,
    has_end,
    is_json,
    is_readable,
    kinds,
    numbered,
    open_file,
    read_to_end,
    stream_bytes,
)
from ingest.protocol.errors import ImportFailed

_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


class Unit(Protocol):
    """Consecutive rows, numbered from 1. `once`: they can be read only once."""

    label: str
    once: bool

    def names(self) -> list[str]:
        """The names of its columns. Raises ImportFailed."""

    def digest(self) -> str | None:
        """A digest of its content, None if that is not known before it is read."""

    def blocks(self, columns: Sequence[str]) -> Blocks:
        """Its rows. Raises ImportFailed."""


def open_source(source: Any, query: str | None) -> list[Unit]:
    """The units of an import's source. Raises ImportFailed."""
    if isinstance(source, (str, Path)):
        text = str(source)
        if "://" in text or query is not None:
            if query is None:
                raise ImportFailed(f"{_public(text)}: expected a query with a database's URL")
            if "://" not in text:
                raise ImportFailed(f"query: expected a database's URL as the source, got {text}")
            return [_QueryUnit(text, query)]
        return files_of(Path(source))
    if query is not None:
        raise ImportFailed("query: expected a database's URL as the source, got a table")
    return [_table_unit(source)]


def require_whole(units: Sequence[Unit]) -> None:
    """Read the files to their ends, except plain text. Raises ImportFailed if one is not whole."""
    for unit in units:
        if isinstance(unit, FileUnit):
            unit.require_whole()


@contextlib.contextmanager
def _before_sending() -> Generator[None]:
    """Say in a failure that nothing was sent."""
    try:
        yield
    except ImportFailed as error:
        raise ImportFailed(f"{error}; nothing of it was sent") from error


def place_of(unit: Unit) -> str | None:
    """The path of a file in the folder that is imported; None for any other unit."""
    return unit.place if isinstance(unit, FileUnit) else None


def require_columns(unit: Unit, columns: Sequence[str], *, others: bool = False) -> None:
    """Raise ImportFailed that names the columns that are missing and those that exist.

    Raises it also for two columns of one name. `others`: whether it is one of several units.
    """
    names = unit.names()
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ImportFailed(f"{unit.label}: expected unique column names, got {twice} twice")
    missing = [name for name in columns if name not in names and name.split(".")[0] not in names]
    if missing:
        text = f"{unit.label}: no column {', '.join(map(repr, missing))}; it has {', '.join(names)}"
        if others:
            text += (
                "; where only some files have a column, --sql 'SELECT * FROM source' has those of "
                "all, with nulls in the others"
            )
        raise ImportFailed(text)


# --- files -----------------------------------------------------------------------------------


def files_of(path: Path) -> list[Unit]:
    """A file; or those in a folder, or that match a pattern, whose suffixes are known."""
    root, matches = path, [path]
    if not path.exists() and glob.has_magic(str(path)):
        at = next(at for at, part in enumerate(path.parts) if glob.has_magic(part))
        root = Path(*path.parts[:at])
        matches = [*root.glob(str(Path(*path.parts[at:])))]
    elif not path.is_dir():
        return [FileUnit(path, path.name)]
    within = (file for match in matches for file in (match, *match.rglob("*")))
    found: list[Unit] = []
    for file in sorted({*within}):
        inner = file.relative_to(root)
        if any(part.startswith((".", "_")) for part in inner.parts) or not file.is_file():
            continue
        if is_readable(file):
            pairs = (part.partition("=") for part in inner.parts[:-1] if "=" in part)
            hive = {name: unquote(value) for name, _, value in pairs}
            found.append(FileUnit(file, str(inner), hive, inner.as_posix()))
    if not found:
        where = "in it" if root == path else "that match"
        raise ImportFailed(f"{path}: expected files of {kinds()} {where}, got none")
    return found


class FileUnit:
    """A file, with the columns in its folders' names (`country=DE`).

    `place` is its path in the folder that is imported; `opened` opens it, by default by its suffix.
    """

    once = False

    def __init__(
        self,
        path: Path,
        label: str,
        hive: Mapping[str, str] | None = None,
        place: str | None = None,
        opened: OpenFile = open_file,
    ) -> None:
        self.label, self.place, self.path, self._open = label, place, path, opened
        self._hive = {name: None if v == _HIVE_NULL else v for name, v in (hive or {}).items()}
        self._state: tuple[int, ...] | None = None  # before the first pass

    @property
    def has_json(self) -> bool:
        """Whether it has lines of JSON."""
        return self._open is open_file and is_json(self.path)

    def names(self) -> list[str]:
        own = self._open(self.path)[0]
        return [*own, *(name for name in self._hive if name not in own)]

    def require_whole(self) -> None:
        """Read the file to its end, unless it is plain text. Raises ImportFailed."""
        if has_end(self.path):
            self._begin()
            with _before_sending():
                read_to_end(self.path)

    def digest(self) -> str | None:
        self._begin()
        try:
            with self.path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise self._unreadable(error) from error
        return f"{content} {sorted(self._hive.items())}"

    def blocks(self, columns: Sequence[str]) -> Blocks:
        raw = self.has_json
        own = [n for n in columns if n not in self._hive and (raw or not n.startswith(RAW))]
        require_same = self._begin()
        try:
            for block in self._open(self.path)[1](own):
                for name in columns:
                    if name in self._hive:
                        value = pa.scalar(self._hive[name], pa.string())
                        values = pa.repeat(value, len(block.table))
                        block.table = block.table.append_column(name, values)
                require_same()
                yield block
        except ImportFailed:
            require_same()  # a change explains the other errors
            raise
        require_same()

    def _begin(self) -> Callable[[], None]:
        """Begin a pass; return a check that the file is as it was before the first pass.

        In the first pass there is nothing to compare with. Raises ImportFailed.
        """
        if self._state is None:
            self._state = self._now()
            return lambda: None
        self._require_same()
        return self._require_same

    def _require_same(self) -> None:
        if self._now() != self._state:
            text = "expected the file as it was when its import began, but it has changed since"
            raise ImportFailed(f"{self.path}: {text}")

    def _now(self) -> tuple[int, ...]:
        """Device, inode, size and times; a change of the content changes one of them."""
        try:
            now = os.stat(self.path)
        except OSError as error:
            raise self._unreadable(error) from error
        return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns

    def _unreadable(self, error: OSError) -> ImportFailed:
        return ImportFailed(f"{self.path}: cannot be read: {error.strerror or error}")


# --- tables in memory --------------------------------------------------------------------------


def _table_unit(source: Any) -> Unit:
    """A unit for a table or a reader. Raises ImportFailed for other objects."""
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if not isinstance(source, (pa.Table, pa.RecordBatchReader)):
        if hasattr(source, "to_pandas") or not hasattr(source, "iloc"):
            source = _from_stream(source)
        else:
            try:
                source = pa.Table.from_pandas(source, preserve_index=False)
            except (pa.ArrowException, ValueError, TypeError, AttributeError) as error:
                raise ImportFailed(f"source: expected plain columns: {error!s:.300}") from error
    return _TableUnit(source)


def _from_stream(source: Any) -> Any:
    if not hasattr(source, "__arrow_c_stream__"):
        raise ImportFailed(
            "source: expected a path, a database's URL, or a table of pandas, polars or pyarrow, "
            f"got {type(source).__name__}"
        )
    reader = pa.RecordBatchReader.from_stream(source)
    return reader if type(source).__name__.endswith("Reader") else reader.read_all()


class _TableUnit:
    """A pyarrow.Table, or a pyarrow.RecordBatchReader, which is read once."""

    label = "table"

    def __init__(self, table: Any) -> None:
        self.once = isinstance(table, pa.RecordBatchReader)
        self._table = table

    def names(self) -> list[str]:
        return list(self._table.schema.names)

    def digest(self) -> str | None:
        if self.once:
            return None
        whole = hashlib.sha256()
        table = self._table.replace_schema_metadata()
        for at in range(0, len(table), BLOCK_ROWS):  # independent of the table's chunks
            whole.update(stream_bytes(table.slice(at, BLOCK_ROWS)))
        return whole.hexdigest()

    def blocks(self, columns: Sequence[str]) -> Blocks:
        batches = self._table if self.once else self._table.to_batches(BLOCK_ROWS)
        try:
            yield from numbered(iter(batches), _without_raw(columns))
        except Exception as error:  # of any type: a reader's batches may come from any code
            text = f"{type(error).__name__}: {error!s:.300}"
            raise ImportFailed(f"{self.label}: cannot be read: {text}") from error


def _without_raw(columns: Sequence[str]) -> list[str]:
    return [name for name in columns if not name.startswith(RAW)]


# --- databases ---------------------------------------------------------------------------------


def _public(url: str) -> str:
    """A URL as messages show it: without credentials and parameters."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"


class _QueryUnit:
    """The rows of a query, by SQLAlchemy or an ADBC driver, in the order of the query."""

    once = True

    def __init__(self, url: str, query: str) -> None:
        self._url, self._query, self.label = url, query, "query"
        self._open: Generator[Any, None, None] | None = None
        self._first: Any = None

    def names(self) -> list[str]:
        self._begin()
        return list(self._first.schema.names)

    def digest(self) -> str | None:
        return hashlib.sha256(f"{_public(self._url)}\n{self._query}".encode()).hexdigest()

    def blocks(self, columns: Sequence[str]) -> Blocks:
        self._begin()
        if self._open is None:
            return
        try:
            batches = itertools.chain([self._first], self._open)
            yield from numbered(batches, _without_raw(columns))
        except Exception as error:
            raise self._failed(error) from error
        finally:
            self._open.close()

    def _begin(self) -> None:
        if self._first is not None:
            return
        try:
            adbc = self._url.startswith("adbc+")
            self._open = (self._by_adbc if adbc else self._by_sqlalchemy)()
            self._first = next(self._open)
        except ModuleNotFoundError as error:
            if error.name == "sqlalchemy":
                raise
            text = f"needs {error.name}, a driver of its database, which is not installed"
            raise ImportFailed(f"{_public(self._url)}: {text}") from error
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> ImportFailed:
        # a driver's error may have any type; only its first line names the cause
        first = (str(error).splitlines() or [type(error).__name__])[0]
        return ImportFailed(f"{_public(self._url)}: {first:.300}")

    def _by_sqlalchemy(self) -> Generator[Any, None, None]:
        import sqlalchemy  # noqa: PLC0415 - the extra `sql`

        engine = sqlalchemy.create_engine(self._url)
        try:
            with engine.connect().execution_options(stream_results=True) as connection:
                result = connection.execute(sqlalchemy.text(self._query))
                names = list(result.keys())
                yield pa.RecordBatch.from_arrays([pa.nulls(0)] * len(names), names)
                for rows in result.partitions(BLOCK_ROWS // 4):
                    columns = [array_of(cells) for cells in zip(*rows, strict=True)]
                    yield pa.RecordBatch.from_arrays(columns, names)
        finally:
            engine.dispose()

    def _by_adbc(self) -> Generator[Any, None, None]:
        name, _, rest = self._url.removeprefix("adbc+").partition(":")
        driver = importlib.import_module(f"adbc_driver_{name}.dbapi")
        # SQLite's driver takes a path, others the URL under their own name
        where = rest.removeprefix("///") if name == "sqlite" else f"{name}:{rest}"
        with driver.connect(where) as connection, connection.cursor() as cursor:
            cursor.execute(self._query)
            reader = cursor.fetch_record_batch()
            yield pa.RecordBatch.from_pylist([], reader.schema)
            yield from reader


def array_of(cells: Sequence[Any]) -> Any:
    """Cells as a pyarrow.Array; as texts, or their bytes, if types differ, with lists as JSON."""
    kinds = set(map(type, cells)) - {type(None)}
    exact = kinds != {int, float} or all(abs(one) < 2**53 for one in cells if type(one) is int)
    if len(kinds) <= 1 or (kinds == {int, float} and exact):
        with contextlib.suppress(pa.ArrowException, OverflowError):
            return pa.array(cells)
    texts = [_plain(cell) for cell in cells]
    if bytes in kinds:
        return pa.array([cell.encode() if isinstance(cell, str) else cell for cell in texts])
    return pa.array(texts, pa.string())


def _plain(cell: Any) -> str | bytes | None:
    if cell is None or isinstance(cell, (str, bytes)):
        return cell
    return json_of(cell) if isinstance(cell, (bool, list, dict)) else str(cell)


# --- rows that are kept ------------------------------------------------------------------------


class KeptUnit:
    """Rows in a table of a temporary database, which can be read repeatedly."""

    once = False

    def __init__(self, label: str, digest: str | None, rows: KeptRows) -> None:
        self.label, self.rows, self._digest = label, rows, digest
        self.problems: list[Problem] = []

    @classmethod
    def of(cls, unit: Unit, columns: Sequence[str], connection: Any) -> KeptUnit:
        """Keep the rows of a unit that can be read only once. Raises ImportFailed."""
        rows = KeptRows(connection, columns)
        with _before_sending():
            for block in unit.blocks(columns):
                rows.add(block.table)
        return cls(unit.label, unit.digest(), rows)

    @classmethod
    def every(
        cls, units: Sequence[Unit], connection: Any, more: Sequence[str] = (), *, raw: bool = False
    ) -> Self:
        """Keep all rows of some units with all columns, and `file` and `row` where they are from.

        `more`: columns that are null if the units lack them; `raw`: values of JSON stay JSON.
        Raises ImportFailed.
        """
        names = list(dict.fromkeys(name for unit in units for name in unit.names()))
        known = {name.lower() for name in names}
        names += [name for name in more if name.lower() not in known]
        own = [name for name in (FILE, ROW) if name not in names]
        rows, problems = KeptRows(connection, [*names, *own]), list[Problem]()
        for unit in units:
            there = unit.names()
            for block in unit.blocks([RAW + name if raw else name for name in there]):
                found = dict(zip(there, block.table.columns, strict=True))
                count = len(block.table)
                lacking = pa.nulls(count, pa.string() if raw else pa.null())
                found |= {name: lacking for name in names if name not in found}
                marks = {FILE: pa.repeat(unit.label, count), ROW: pa.array(block.numbers)}
                found |= {name: marks[name] for name in own}
                rows.add(pa.table(found))
                problems += [problem._replace(label=unit.label) for problem in block.problems]
        made = cls("rows", json.dumps([unit.digest() for unit in units]), rows)
        made.problems = problems
        return made

    def select(self, sql: str, order: Sequence[str | None]) -> None:
        """Replace the rows by the result of a statement. Raises ImportFailed if it has none."""
        with _before_sending():
            self.rows.replace(sql, [name for name in order if name])
            if not self.rows.rows:
                raise ImportFailed("sql: expected rows, got a result that has no rows")
        self.label = "result of the SQL"

    @classmethod
    def selected(cls, units: Sequence[Unit], options: ImportOptions, connection: Any) -> KeptUnit:
        """The result of the option `sql` over all rows of some units. Raises ImportFailed."""
        made = cls.every(units, connection)
        unknown = sorted({*options.types} - {*made.rows.columns})
        if unknown:
            raise ImportFailed(f"types: expected columns of the source, got {unknown}")
        made.rows.show(options.types)
        order = (options.episode, options.step, options.time, FILE, ROW)
        made.select(str(options.sql), order)
        return made

    def names(self) -> list[str]:
        return self.rows.columns

    def digest(self) -> str | None:
        return self._digest

    def blocks(self, columns: Sequence[str]) -> Blocks:
        if self.problems:
            nothing = pa.table({name: pa.nulls(0) for name in columns})
            yield SourceBlock(nothing, np.zeros(0, np.int64), self.problems)
        columns = [name for name in columns if name[: len(RAW)] != RAW or name in self.names()]
        number = 1
        for table in self.rows.select(columns):
            numbers = np.arange(number, number + len(table), dtype=np.int64)
            number += len(table)
            yield SourceBlock(table, numbers)
