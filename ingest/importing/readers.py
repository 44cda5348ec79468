"""Files as blocks of rows: CSV, JSON lines, Parquet and Arrow IPC, in bounded memory.

Cells of CSV and of JSON lines are read as text, so that an odd value costs only its row. In a block
where a text is not UTF-8, its column has bytes. A row that cannot be read is a problem with its
number; the other rows are still read. Memory holds one CSV block, Parquet page or record batch at a
time.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ingest.columns.arrow_kinds import is_bytes
from ingest.importing.engine import BAD, LINE, json_names, json_rows
from ingest.protocol.errors import ImportFailed
from storage.wording import counted

BLOCK_BYTES = 4_000_000
BLOCK_ROWS = 65_536
PAGE_BYTES = 64_000_000
"""About the most bytes of a column that are decoded at a time only to check its pages."""
_NAMED = 100
"""The most lines that are no JSON objects whose text is looked up for its message."""

_COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
_ARROW_FILE = b"ARROW1"


class Problem(NamedTuple):
    """A row that could not be read: its number, the reason, its file if it is not the unit's."""

    number: int
    reason: str
    label: str | None = None


@dataclass
class SourceBlock:
    """Consecutive rows: their columns, and their numbers in the file, from 1."""

    table: Any  # pyarrow.Table
    numbers: NDArray[np.int64]
    problems: list[Problem] = field(default_factory=list)


Blocks: TypeAlias = Iterator[SourceBlock]


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


def has_end(path: Path) -> bool:
    """Whether a file's format tells where it ends: plain text may end after any row."""
    suffix, compression = _suffix(path)
    return suffix in _KINDS and (compression is not None or _KINDS[suffix][1] in (_parquet, _arrow))


def is_json(path: Path) -> bool:
    """Whether a file has JSON lines."""
    return _KINDS[_suffix(path)[0]][1] is _json


def read_to_end(path: Path) -> None:
    """Decode a file that `has_end` to its end, and check the checksums that it has.

    Raises ImportFailed for one that is damaged or breaks off.
    """
    suffix, compression = _suffix(path)
    kind, opened = _KINDS[suffix]
    with readable(path, kind):
        if opened is _parquet:
            opened(path, compression)  # refuses a compressed one
            _read_pages(path)
        elif opened is _arrow:
            _read_messages(path, compression)
        else:
            with _stream(path, compression) as stream:
                while stream.read(BLOCK_BYTES):
                    pass


OpenedFile: TypeAlias = tuple[list[str], Callable[[Sequence[str]], Blocks]]
"""The names of a file's columns, and a function from some of them to the file's rows."""
OpenFile: TypeAlias = Callable[[Path], OpenedFile]


def open_file(path: Path) -> OpenedFile:
    """Open a file by its suffix. Raises ImportFailed."""
    suffix, compression = _suffix(path)
    if suffix not in _KINDS:
        raise ImportFailed(f"{path}: expected a file of {kinds()}, optionally with .gz or .zst")
    kind, opened = _KINDS[suffix]
    with readable(path, kind):
        if path.stat().st_size == 0:
            raise ImportFailed(f"{path} is empty")
        return opened(path, compression)


@contextmanager
def readable(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        raise ImportFailed(f"{path}: expected {kind}: {error!s:.300}") from error
    except UnicodeDecodeError as error:  # in a header
        raise ImportFailed(f"{path}: expected {kind} in UTF-8, got other bytes") from error
    except OSError as error:
        raise ImportFailed(f"{path}: cannot be read: {error.strerror or error}") from error


def stream_of(path: Path) -> Any:
    """The bytes of a file, decompressed."""
    return _stream(path, _suffix(path)[1])


def _stream(path: Path, compression: str | None) -> Any:
    return pa.input_stream(str(path), compression=compression)


# --- CSV -------------------------------------------------------------------------------------


def _csv(path: Path, compression: str | None) -> OpenedFile:
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
        odd: list[Problem] = []

        def skip(row: Any) -> str:
            text = f"row: expected {row.expected_columns} fields, got {row.actual_columns}"
            odd.append(Problem(row.number - 1, text))  # Arrow's numbers count the header
            return "skip"

        last = 0
        with readable(path, "CSV"), closing(reader(columns, skip)) as batches:
            for batch in batches:
                numbers = _numbers(last, batch.num_rows, odd)
                last = int(numbers[-1]) if len(numbers) else last
                # the reader is a block ahead: rows skipped in that block come later
                before = [problem for problem in odd if problem.number < last]
                odd[:] = odd[len(before) :]
                made = {name: plain(batch.column(name)) for name in batch.schema.names}
                yield SourceBlock(pa.table(made), numbers, before)
        if odd:
            nothing = pa.table({name: pa.nulls(0) for name in columns})
            yield SourceBlock(nothing, np.zeros(0, np.int64), list(odd))

    with closing(reader([], lambda _: "skip")) as opened:
        return opened.schema.names, blocks


def _numbers(last: int, count: int, odd: Sequence[Problem]) -> NDArray[np.int64]:
    """The numbers of the `count` rows after `last`, without those of the odd rows."""
    skipped = np.array([problem.number for problem in odd], np.int64)
    numbers = np.arange(last + 1, last + 1 + count + len(skipped), dtype=np.int64)
    return numbers[~np.isin(numbers, skipped)][:count]


# --- JSON lines ------------------------------------------------------------------------------


def _json(path: Path, compression: str | None) -> OpenedFile:
    names = json_names(path)
    if not names:
        raise ImportFailed(f"{path}: expected a JSON object in each line, got none")

    def blocks(columns: Sequence[str]) -> Blocks:
        with readable(path, "JSON lines"):
            rows, read = _lines(path, compression), 0
            for batch in json_rows(path, columns, names):
                read += batch.num_rows
                bad = batch.column(BAD).to_numpy(zero_copy_only=False)
                numbers = batch.column(LINE).to_numpy()
                table = pa.Table.from_batches([batch]).select(list(columns))
                reasons = _reasons(path, compression, numbers[bad])
                if bad.any():
                    table = table.filter(pa.array(~bad))
                yield SourceBlock(table, numbers[~bad], reasons)
            if read < rows:  # more, if a program has appended some meanwhile
                text = f"expected {counted(rows, 'row')}, as it has lines, read {read}"
                raise ImportFailed(f"{path}: {text}")

    return names, blocks


def _lines(path: Path, compression: str | None) -> int:
    """The number of lines that are not blank."""
    count, rest = 0, b""
    with _stream(path, compression) as stream:
        while data := stream.read(BLOCK_BYTES):
            lines = (rest + data).split(b"\n")
            rest = lines.pop()
            count += len(lines) - sum(map(bytes.isspace, lines)) - lines.count(b"")
    return count + bool(rest.strip())


def _reasons(path: Path, compression: str | None, rows: NDArray[np.int64]) -> list[Problem]:
    """Why rows are no objects; only the first have their text looked up."""
    if not len(rows):
        return []
    text = "row: expected a JSON object"
    wanted, found, number = {*rows[:_NAMED].tolist()}, {}, 0
    with _stream(path, compression) as stream:
        for line in io.BufferedReader(stream):
            if not line.strip():
                continue
            number += 1
            if number in wanted:
                found[number] = _object(line)
            if len(found) == len(wanted):
                break
    return [
        Problem(row, f"{text}, got {found[row]}" if row in found else text) for row in rows.tolist()
    ]


def _object(line: bytes) -> str:
    """What a line is instead of an object."""
    try:
        return f"{msgspec.json.decode(line)!r:.80}"
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        return str(error)


# --- Parquet and Arrow -----------------------------------------------------------------------


def _parquet(path: Path, compression: str | None) -> OpenedFile:
    if compression is not None:
        raise ImportFailed(
            f"{path}: expected Parquet without .gz or .zst: it compresses its own pages"
        )

    def blocks(columns: Sequence[str]) -> Blocks:
        with readable(path, "Parquet"), opened() as file:
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


def _arrow(path: Path, compression: str | None) -> OpenedFile:
    def blocks(columns: Sequence[str]) -> Blocks:
        with readable(path, "Arrow IPC"), _stream(path, compression) as stream:
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
            made = pa.table({name: plain(column_of(piece, name)) for name in columns})
            numbers = np.arange(number + 1, number + 1 + piece.num_rows, dtype=np.int64)
            number += piece.num_rows
            yield SourceBlock(made, numbers)


def stream_bytes(table: Any) -> bytes:
    """A table as an Arrow stream of one batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table.combine_chunks())
    return bytes(sink.getvalue())


def column_of(batch: Any, name: str) -> Any:
    """A column, or the field of a structure that a name with dots stands for."""
    if name in batch.schema.names:
        return batch.column(name)
    first, *path = name.split(".")
    return pc.struct_field(batch.column(first), path)


def plain(column: Any) -> Any:
    """A column without extensions, dictionaries, views, runs; bytes as text if all are UTF-8."""
    types, kind = pa.types, column.type
    if isinstance(kind, pa.BaseExtensionType):
        return plain(column.storage)
    if types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(column))
    if types.is_dictionary(kind):
        return plain(column.dictionary).take(column.indices)
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return pa.array(column.to_pylist(), pa.large_list(kind.value_type))  # a cast may fail
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


_KINDS: Mapping[str, tuple[str, Callable[[Path, str | None], OpenedFile]]] = {
    **dict.fromkeys((".csv", ".tsv"), ("CSV", _csv)),
    **dict.fromkeys((".jsonl", ".ndjson", ".json", ".dsjson"), ("JSON lines", _json)),
    **dict.fromkeys((".parquet", ".pq"), ("Parquet", _parquet)),
    **dict.fromkeys((".arrow", ".arrows", ".feather"), ("Arrow IPC", _arrow)),
}
