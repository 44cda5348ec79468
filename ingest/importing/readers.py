"""Files as blocks of rows: CSV, JSON lines, Parquet and Arrow IPC, in bounded memory.

CSV cells are read as text, and each block of JSON lines may have other types than the one before,
so that an odd value costs only its row. In a block where a text is not UTF-8, its column has bytes.
A row that cannot be read is a problem with its number; the other rows are still read. Memory holds
one CSV block, Parquet page or record batch at a time.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ingest.importing.cells import is_bytes, json_of
from ingest.protocol.errors import ImportFailed

BLOCK_BYTES = 4_000_000
BLOCK_ROWS = 65_536
PAGE_BYTES = 64_000_000
"""About the most bytes of a column that are decoded at a time only to check its pages."""

_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
_ARROW_FILE = b"ARROW1"


@dataclass
class SourceBlock:
    """Consecutive rows: their columns, and their numbers in the file, from 1.

    `problems`: the number and the reason of each row that could not be read.
    """

    table: Any  # pyarrow.Table
    numbers: NDArray[np.int64]
    problems: list[tuple[int, str]] = field(default_factory=list)


Blocks: TypeAlias = Iterator[SourceBlock]
"""The result of a file's `blocks(columns)`; without columns, all are read."""


def kinds() -> str:
    return ", ".join(_KINDS)


def is_readable(path: Path) -> bool:
    """Whether a file's suffixes are known."""
    return _suffix(path)[0] in _KINDS


def _suffix(path: Path) -> tuple[str, str | None]:
    """The suffix that gives a file's format, and its compression."""
    compression = _COMPRESSED.get(path.suffix.lower())
    name = path.with_suffix("") if compression else path
    return name.suffix.lower(), compression


def file_names(path: Path) -> list[str]:
    """The names of a file's columns. Raises ImportFailed."""
    return _open(path)[0]


def file_blocks(path: Path, columns: Sequence[str]) -> Blocks:
    """The rows of a file. Raises ImportFailed."""
    return _open(path)[1](columns)


def has_end(path: Path) -> bool:
    """Whether a file's format tells where it ends: plain text may end after any row."""
    suffix, compression = _suffix(path)
    return compression is not None or _KINDS[suffix][1] in (_parquet, _arrow)


def read_to_end(path: Path) -> None:
    """Decode a file that `has_end` to its end, and check the checksums that it has.

    Raises ImportFailed for one that is damaged or breaks off.
    """
    suffix, compression = _suffix(path)
    kind, opened = _KINDS[suffix]
    with _readable(path, kind):
        if opened is _parquet:
            _read_pages(path)
        elif opened is _arrow:
            _read_messages(path, compression)
        else:
            with _stream(path, compression) as stream:
                while stream.read(BLOCK_BYTES):
                    pass


_OpenedFile: TypeAlias = tuple[list[str], Callable[[Sequence[str]], Blocks]]


def _open(path: Path) -> _OpenedFile:
    suffix, compression = _suffix(path)
    if suffix not in _KINDS:
        raise ImportFailed(f"{path}: expected a file of {kinds()}, optionally with .gz or .zst")
    kind, opened = _KINDS[suffix]
    with _readable(path, kind):
        if path.stat().st_size == 0:
            raise ImportFailed(f"{path} is empty")
        return opened(path, compression)


@contextmanager
def _readable(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        raise ImportFailed(f"{path}: expected {kind}: {error!s:.300}") from error
    except UnicodeDecodeError as error:  # in a header
        raise ImportFailed(f"{path}: expected {kind} in UTF-8, got other bytes") from error
    except OSError as error:
        raise ImportFailed(f"{path}: cannot be read: {error.strerror or error}") from error


def _stream(path: Path, compression: str | None) -> Any:
    return pa.input_stream(str(path), compression=compression)


# --- CSV -------------------------------------------------------------------------------------


def _csv(path: Path, compression: str | None) -> _OpenedFile:
    parse = {"delimiter": "\t" if ".tsv" in path.suffixes else ",", "newlines_in_values": True}

    def reader(columns: Sequence[str], skip: Any) -> Any:
        return pyarrow.csv.open_csv(
            _stream(path, compression),
            pyarrow.csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
            pyarrow.csv.ParseOptions(**parse, invalid_row_handler=skip),
            pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(columns, pa.binary()),
                include_columns=list(columns),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )

    def blocks(columns: Sequence[str]) -> Blocks:
        odd: list[tuple[int, str]] = []

        def skip(row: Any) -> str:
            text = f"row: expected {row.expected_columns} fields, got {row.actual_columns}"
            odd.append((row.number - 1, text))  # Arrow's numbers count the header
            return "skip"

        last = 0
        with _readable(path, "CSV"), closing(reader(columns, skip)) as batches:
            for batch in batches:
                numbers = _numbers(last, batch.num_rows, odd)
                last = int(numbers[-1]) if len(numbers) else last
                # the reader is a block ahead: rows skipped in that block come later
                before = [problem for problem in odd if problem[0] < last]
                odd[:] = odd[len(before) :]
                made = {name: _flat(batch.column(name)) for name in batch.schema.names}
                yield SourceBlock(pa.table(made), numbers, before)
        if odd:
            yield SourceBlock(_nothing(columns), np.zeros(0, np.int64), list(odd))

    with closing(reader([], lambda _: "skip")) as opened:
        return opened.schema.names, blocks


def _numbers(last: int, count: int, odd: Sequence[tuple[int, str]]) -> NDArray[np.int64]:
    """The numbers of the `count` rows after `last`, without those of the odd rows."""
    skipped = np.array([number for number, _ in odd], np.int64)
    numbers = np.arange(last + 1, last + 1 + count + len(skipped), dtype=np.int64)
    return numbers[~np.isin(numbers, skipped)][:count]


def _nothing(columns: Sequence[str]) -> Any:
    return pa.table({name: pa.nulls(0) for name in columns})


# --- JSON lines ------------------------------------------------------------------------------


def _json(path: Path, compression: str | None) -> _OpenedFile:
    def blocks(columns: Sequence[str]) -> Blocks:
        number, read = 0, _JsonReader(columns)
        with _readable(path, "JSON lines"), _stream(path, compression) as stream:
            for text in _lines(stream):
                block = read.block(text, number)
                number += len(block.numbers) + len(block.problems)
                yield block

    with _stream(path, compression) as stream:
        first = next(_lines(stream), b"")
        found = [_object(line) for line in first.splitlines() if line.strip()]
        names = dict.fromkeys(name for row in found if isinstance(row, dict) for name in row)
    if not names:
        raise ImportFailed(f"{path}: expected a JSON object in each line, got none")
    return list(names), blocks


def _lines(stream: Any) -> Iterator[bytes]:
    """Yield chunks of bytes that end at a line's end."""
    rest = b""
    while data := stream.read(BLOCK_BYTES):
        whole, end, tail = data.rpartition(b"\n")
        if end:
            yield rest + whole + end
            rest = tail
        else:
            rest += data
    if rest:
        yield rest + b"\n"


class _JsonReader:
    """Reads blocks of lines as tables: with pyarrow, or line by line if that fails."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._schema: Any = None  # of the previous block

    def block(self, text: bytes, before: int) -> SourceBlock:
        lines = text.count(b"\n")
        try:  # pyarrow does not check
            text.decode()
        except UnicodeDecodeError:
            return self._one_by_one(text, before)
        table = self._read(text, self._schema) if self._schema is not None else None
        table = self._infer(text) if table is None else table
        if table is None or table.num_rows != lines:
            return self._one_by_one(text, before)
        self._schema = table.schema
        return SourceBlock(table, np.arange(before + 1, before + 1 + lines, dtype=np.int64))

    def _infer(self, text: bytes) -> Any:
        table = self._read(text, None)
        if table is None:
            return None
        wanted = [name for name in self._columns if name in table.column_names]
        fields = [table.schema.field(name) for name in wanted]
        # times stay texts: the column may be a tag, or a later block may have other texts
        plain = [
            pa.field(one.name, pa.string() if pa.types.is_timestamp(one.type) else one.type)
            for one in fields
        ]
        table = table.select(wanted) if fields == plain else self._read(text, pa.schema(plain))
        for name in self._columns:
            if table is not None and name not in table.column_names:
                table = table.append_column(name, pa.nulls(table.num_rows))
        return table

    def _read(self, text: bytes, schema: Any) -> Any:
        behaviour = "infer" if schema is None else "ignore"
        parse = pyarrow.json.ParseOptions(
            explicit_schema=schema, unexpected_field_behavior=behaviour
        )
        try:
            read = pyarrow.json.ReadOptions(block_size=len(text) + 1)
            return pyarrow.json.read_json(io.BytesIO(text), read, parse)
        except (pa.ArrowException, UnicodeDecodeError):
            return None

    def _one_by_one(self, text: bytes, before: int) -> SourceBlock:
        rows, numbers, problems, number = [], [], list[tuple[int, str]](), before
        for line in text.split(b"\n"):
            if not line.strip():
                continue
            number += 1
            found = _object(line)
            if isinstance(found, dict):
                rows.append([found.get(name) for name in self._columns])
                numbers.append(number)
            else:
                problems.append((number, f"row: expected a JSON object, got {found}"))
        cells = list(zip(*rows, strict=True)) if rows else [()] * len(self._columns)
        made = dict(zip(self._columns, map(array_of, cells), strict=True))
        return SourceBlock(pa.table(made), np.array(numbers, np.int64), problems)


def _object(line: bytes) -> dict[str, Any] | str:
    """The object of a line, or an error text."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return str(error)
    return found if isinstance(found, dict) else f"{found!r:.80}"


def array_of(cells: Sequence[Any]) -> Any:
    """Cells as a pyarrow.Array; as texts, or their bytes, if types differ, with lists as JSON."""
    kinds = set(map(type, cells)) - {type(None)}
    if len(kinds) <= 1 or kinds == {int, float}:
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


# --- Parquet and Arrow -----------------------------------------------------------------------


def _parquet(path: Path, compression: str | None) -> _OpenedFile:
    if compression is not None:
        raise ImportFailed(
            f"{path}: expected Parquet without .gz or .zst: it compresses its own pages"
        )

    def blocks(columns: Sequence[str]) -> Blocks:
        with _readable(path, "Parquet"), opened() as file:
            yield from numbered(file.iter_batches(BLOCK_ROWS, columns=list(columns)), columns)

    def opened() -> Any:  # page by page: a row group may be the whole file
        return pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)

    with opened() as file:
        return list(file.schema_arrow.names), blocks


def _read_pages(path: Path) -> None:
    """Decode all pages of a Parquet file, a column at a time."""
    with pq.ParquetFile(
        path, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
    ) as file:
        found = file.metadata
        size = sum(found.row_group(at).total_byte_size for at in range(found.num_row_groups))
        rows = max(1, min(BLOCK_ROWS, found.num_rows * PAGE_BYTES // max(1, size)))
        for name in file.schema_arrow.names:
            for _ in file.iter_batches(rows, columns=[name]):
                pass


def _arrow(path: Path, compression: str | None) -> _OpenedFile:
    def blocks(columns: Sequence[str]) -> Blocks:
        with _readable(path, "Arrow IPC"), _stream(path, compression) as stream:
            yield from numbered(batches(stream)[1], columns)

    def batches(stream: Any) -> tuple[Any, Iterator[Any]]:
        if compression is None and _begins(path) == _ARROW_FILE:
            file = pa.ipc.open_file(str(path))
            return file.schema, (file.get_batch(at) for at in range(file.num_record_batches))
        opened = pa.ipc.open_stream(stream)
        return opened.schema, opened

    with _stream(path, compression) as stream:
        return list(batches(stream)[0].names), blocks


def _read_messages(path: Path, compression: str | None) -> None:
    """Decode all record batches of an Arrow file, or of a stream up to its end marker."""
    if compression is None and _begins(path) == _ARROW_FILE:
        file = pa.ipc.open_file(str(path))
        for at in range(file.num_record_batches):
            file.get_batch(at)
        return
    with _stream(path, compression) as stream:
        messages = _Latest(stream)
        for _ in pa.ipc.open_stream(messages):
            pass
        if not messages.data:  # without the marker the stream just ends, as does a part of it
            raise ImportFailed(f"{path}: expected an Arrow stream with its end marker, got none")
        while rest := stream.read(BLOCK_BYTES):
            if rest.strip(b"\0"):
                raise ImportFailed(f"{path}: expected nothing after the end marker, got more bytes")


class _Latest(io.RawIOBase):
    """A stream that keeps what was read from it last."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.data = stream, b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        self.data = self._stream.read(size)
        return self.data


def _begins(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(len(_ARROW_FILE))


def numbered(batches: Iterator[Any], columns: Sequence[str]) -> Blocks:
    """Record batches as blocks of plain columns."""
    number = 0
    for batch in batches:
        for at in range(0, batch.num_rows, BLOCK_ROWS):
            piece = batch.slice(at, BLOCK_ROWS)
            made = pa.table({name: _flat(piece.column(name)) for name in columns})
            numbers = np.arange(number + 1, number + 1 + piece.num_rows, dtype=np.int64)
            number += piece.num_rows
            yield SourceBlock(made, numbers)


def _flat(column: Any) -> Any:
    """A column without dictionaries, views and runs; bytes as text, if all of them are UTF-8."""
    types, kind = pa.types, column.type
    if types.is_run_end_encoded(kind):
        return _flat(pc.run_end_decode(column))
    if types.is_dictionary(kind):
        return _flat(column.dictionary).take(column.indices)
    large = types.is_large_string(kind) or types.is_large_binary(kind) or types.is_string_view(kind)
    if not (large or types.is_string(kind) or is_bytes(kind)):
        return column
    if types.is_string_view(kind):
        column = column.cast(pa.large_string())
    found = column.cast(pa.large_binary() if large else pa.binary())
    try:  # Arrow checks texts only where they come from bytes
        return found.cast(pa.large_string() if large else pa.string())
    except pa.ArrowInvalid:
        return found


_KINDS: Mapping[str, tuple[str, Callable[[Path, str | None], _OpenedFile]]] = {
    **dict.fromkeys((".csv", ".tsv"), ("CSV", _csv)),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), ("JSON lines", _json)),
    **dict.fromkeys((".parquet", ".pq"), ("Parquet", _parquet)),
    **dict.fromkeys((".arrow", ".arrows", ".feather"), ("Arrow IPC", _arrow)),
}
