"""Read the Arrow stream of a bulk request into a table that is no larger than its body.

Arrow also has compressed buffers, dictionaries, views and runs, which let kilobytes expand to
terabytes when they are read. Shard columns need none of these, so anything that can expand is
refused before it is read: compression by the header of each message, types by the schema, rows by
their declared number. Dictionaries of strings, which data frames produce, are converted to strings;
a column may expand to `MAX_EXPANDED` times the body.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import msgspec

from ingest.columns.arrow_kinds import is_list, load_arrow
from ingest.protocol.errors import Refusal

MAX_ROWS = 1_000_000
MAX_EXPANDED = 4

LONG_METADATA = 8_192
"""Metadata of more bytes than this is not cached."""

VALUES = ("obs", "actions", "final_obs")
"""The columns that may hold lists."""

# Positions of tables and fields of Arrow's Message.fbs in their flatbuffer.
_HEADER_TYPE, _HEADER = 1, 2
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
_DATA = 1  # of a dictionary batch: its record batch
_LENGTH, _COMPRESSION = 0, 3  # of a record batch


class ArrowBatches(msgspec.Struct, frozen=True):
    """A stream's rows as they came; only `table_of` validates them.

    If the stream had dictionaries, the rows are validated and the dictionaries are strings.
    """

    schema: Any  # pyarrow.Schema
    batches: list[Any]  # of pyarrow.RecordBatch
    rows: int


def read_table(body: bytes) -> Any:
    """Return the pyarrow.Table of a stream. Raises Refusal."""
    return table_of(read_batches(body))


def read_batches(body: bytes) -> ArrowBatches:
    """Return the rows of a stream. Raises Refusal."""
    arrow = load_arrow()
    with _malformed(arrow):
        messages = _plain_messages(arrow, body)
        schema, has_dictionaries = _schema_of(messages[0])
        if has_dictionaries:
            with arrow.ipc.open_stream(body) as stream:  # the stream reader resolves dictionaries
                table = stream.read_all()
            table = _decoded(table, MAX_EXPANDED * len(body))
            schema, batches = table.schema, table.to_batches()
        else:
            batches = [arrow.ipc.read_record_batch(message, schema) for message in messages[1:]]
    return ArrowBatches(schema, batches, sum(batch.num_rows for batch in batches))


def table_of(stream: ArrowBatches) -> Any:
    """Return the rows of a stream as a pyarrow.Table, after validating every value.

    Raises Refusal for a stream that is inconsistent.
    """
    arrow = load_arrow()
    with _malformed(arrow):
        table = arrow.Table.from_batches(stream.batches, stream.schema)
        table.validate(full=True)
    return table


@contextlib.contextmanager
def _malformed(arrow: Any) -> Iterator[None]:
    """Convert Arrow's errors about a malformed stream to a refusal."""
    try:
        yield
    except Refusal:
        raise
    except (arrow.ArrowException, OSError, ValueError, MemoryError, struct.error) as error:
        raise Refusal("malformed", f"expected an Arrow stream: {error!s:.300}") from error


def _schema_of(message: Any) -> tuple[Any, bool]:
    """The schema of a stream's first message, and whether it has dictionaries. Raises Refusal.

    The latest schemas are cached, because senders of small requests repeat theirs.
    """
    encoded = message.metadata.to_pybytes()
    return (_known_schema if len(encoded) <= LONG_METADATA else _read_schema)(encoded)


def _read_schema(encoded: bytes) -> tuple[Any, bool]:
    arrow = load_arrow()
    framed = b"\xff\xff\xff\xff" + struct.pack("<i", len(encoded)) + encoded
    schema = arrow.ipc.read_schema(arrow.py_buffer(framed))
    for field in schema:
        _require_type(arrow, field.name, field.type)
    return schema, any(arrow.types.is_dictionary(field.type) for field in schema)


_known_schema = lru_cache(maxsize=64)(_read_schema)


@cache
def _plain_kinds() -> frozenset[int]:
    """Numbers, strings and bytes; not times, for whose values Arrow would load pandas."""
    arrow = load_arrow()
    texts = [arrow.string(), arrow.large_string(), arrow.binary(), arrow.large_binary()]
    whole = [arrow.int8(), arrow.int16(), arrow.int32(), arrow.int64()]
    natural = [arrow.uint8(), arrow.uint16(), arrow.uint32(), arrow.uint64()]
    floating = [arrow.float16(), arrow.float32(), arrow.float64()]
    return frozenset(kind.id for kind in (*texts, *whole, *natural, *floating, arrow.bool_()))


def _plain_messages(arrow: Any, body: bytes) -> list[Any]:
    """A stream's messages, at least one, as views into the body.

    Refuses compressed messages, and more rows than a request may have.
    """
    rows, messages = 0, []
    stream, read = arrow.BufferReader(body), arrow.ipc.read_message
    while True:
        try:
            message = read(stream)
        except EOFError:
            break
        messages.append(message)
        metadata = message.metadata.to_pybytes()
        short = len(metadata) <= LONG_METADATA
        batch = (_known_batch if short else _record_batch)(metadata)
        if batch is None:
            continue
        length, compressed = batch
        if compressed:
            raise Refusal("unsupported_media", "expected an uncompressed Arrow stream")
        rows += max(0, length)
        if rows > MAX_ROWS:
            raise Refusal("too_large", f"expected at most {MAX_ROWS:,} rows, got {rows} or more")
    if not messages:
        raise ValueError("it has no schema")
    return messages


def _record_batch(metadata: bytes) -> tuple[int, bool] | None:
    """(rows, whether compressed) of a message with rows; None for a schema. Raises struct.error.

    Arrow verifies the flatbuffer before it returns the message.
    """
    (message,) = struct.unpack_from("<I", metadata, 0)
    at = _field(metadata, message, _HEADER_TYPE)
    kind = metadata[at] if at else 0
    header = _table(metadata, message, _HEADER)
    if kind == _DICTIONARY_BATCH and header:
        header = _table(metadata, header, _DATA)
    elif kind != _RECORD_BATCH:
        return None
    if not header:
        return None
    at = _field(metadata, header, _LENGTH)
    length = struct.unpack_from("<q", metadata, at)[0] if at else 0
    rows = length if kind == _RECORD_BATCH else 0
    return rows, bool(_field(metadata, header, _COMPRESSION))


_known_batch = lru_cache(maxsize=64)(_record_batch)


def _field(buffer: bytes, table: int, number: int) -> int:
    """The position of a table's field, 0 if it is absent."""
    vtable = table - struct.unpack_from("<i", buffer, table)[0]
    (size,) = struct.unpack_from("<H", buffer, vtable)
    place = 4 + 2 * number
    offset = struct.unpack_from("<H", buffer, vtable + place)[0] if place < size else 0
    return table + offset if offset else 0


def _table(buffer: bytes, table: int, number: int) -> int:
    """The position of the table that a field refers to, 0 if it is absent."""
    at = _field(buffer, table, number)
    return at + struct.unpack_from("<I", buffer, at)[0] if at else 0


def _require_type(arrow: Any, name: str, kind: Any) -> None:
    """Refuse types whose values may share or repeat bytes."""
    if kind.id in _plain_kinds():
        return
    types = arrow.types
    value = kind
    many = name.partition(".")[0] in VALUES
    while many and is_list(value):
        value = value.value_type
        if types.is_fixed_size_list(value) and not value.list_size:  # any number fits into a body
            text = f"expected lists of values, got {kind!s:.100}"
            raise Refusal("invalid", text, f"$.{name[:100]}")
    if types.is_dictionary(kind):
        value = kind.value_type
        fine = types.is_string(value) or types.is_large_string(value)
    else:
        fine = value.id in _plain_kinds() or (kind == value and types.is_null(value))
    if not fine:
        text = f"expected numbers, strings, bytes or lists of them, got {kind!s:.100}"
        raise Refusal("invalid", text, f"$.{name[:100]}")


def _decoded(table: Any, most: int) -> Any:
    """Replace dictionaries of strings in a table by strings.

    A dictionary may contain a null, and the dictionaries of several batches may have more values
    than the type of their indices can count. Refuses a column whose repeated strings exceed `most`
    bytes.
    """
    table.validate(full=True)
    arrow, compute = load_arrow(), load_arrow().compute
    for at, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if not arrow.types.is_dictionary(column.type):
            continue
        size = 0
        for chunk in column.chunks:
            lengths = compute.binary_length(chunk.dictionary)
            size += compute.sum(compute.take(lengths, chunk.indices)).as_py() or 0
        if size > most:
            text = f"expected at most {most} bytes, got {size} after decoding its dictionary"
            raise Refusal("too_large", text, f"$.{name[:100]}")
        table = table.set_column(at, name, column.cast(column.type.value_type))
    return table
