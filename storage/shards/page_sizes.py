"""The memory that reading a shard takes, computed before any page is decoded.

A file of 442 kB can decode to 810 MB. The limit applies to the sizes in the footer; Arrow uses
those in the headers of the pages, so both have to agree.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa

from storage.shards.names import ShardDamaged

MOST_GROUP_BYTES = 256_000_000
"""The largest size of a decoded row group; the writer creates groups of 8 MB, or of one row."""

MOST_SHARD_BYTES, MOST_EXPANSION = 512_000_000, 100
"""The largest size of a decoded shard: the larger of this many bytes and this multiple of the
file's size."""

_PLAIN, _RLE, _CODED = 0, 3, (2, 8)  # Parquet's numbers of encodings
_KNOWN = (_PLAIN, _RLE, *_CODED)


def check_size(
    content: bytes | memoryview, footer: Any, schema: pa.Schema, names: Sequence[str]
) -> None:
    """Check that the memory for reading columns of a file is within limits. Raises ShardDamaged.

    The sizes in the footer have to agree with the headers of the pages. `schema` is how Arrow reads
    the file. A value of fixed size counts with its decoded size. In a column with a dictionary,
    every text counts as if it were the whole dictionary, unless the column is read as a dictionary.
    """
    total, places = 0, _places(schema, footer)
    columns = [(index, name, width) for name in names for index, width in places[name]]
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        size = 0
        for index, name, width in columns:
            chunk = group.column(index)
            size += check_pages(content, chunk, name, width) + group.num_rows * width
        if size > MOST_GROUP_BYTES:
            raise ShardDamaged(
                f"row group {number}: expected at most {MOST_GROUP_BYTES} bytes, it decodes to "
                f"{size}"
            )
        total += size
    most = max(MOST_SHARD_BYTES, MOST_EXPANSION * len(content))
    if total > most:
        raise ShardDamaged(f"expected at most {most} bytes, it decodes to {total}")


Places: TypeAlias = dict[str, list[tuple[int, int]]]
_last: tuple[pa.Schema, Any, Places] | None = None  # shards of one stream have the same columns


def _places(schema: pa.Schema, footer: Any) -> Places:
    """Column name -> (index, decoded bytes per row) of its column chunks.

    0 bytes per row stand for the size of the pages.
    """
    global _last
    known = _last
    if known is not None and footer.schema.equals(known[1]) and schema.equals(known[0]):
        return known[2]
    places: Places = {}
    for index in range(footer.num_columns):
        name = footer.schema.column(index).path.partition(".list.")[0]
        if name in schema.names:
            kind = schema.field(name).type
            width = 12 if pa.types.is_dictionary(kind) else _width(kind)
            places.setdefault(name, []).append((index, width))
    _last = schema, footer.schema, places
    return places


def _width(kind: pa.DataType) -> int:
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _width(kind.value_type)
    return max(1, int(kind.bit_width) // 8) if pa.types.is_primitive(kind) else 0


def check_pages(content: bytes | memoryview, chunk: Any, name: str, width: int) -> int:
    """The bytes of a column chunk's pages. Raises ShardDamaged unless the footer agrees.

    For texts and bytes (`width` 0), plus the most that its dictionary can expand to.
    """
    has_dictionary = chunk.dictionary_page_offset is not None
    at = chunk.dictionary_page_offset if has_dictionary else chunk.data_page_offset
    end, size, values, dictionary = at + chunk.total_compressed_size, 0, 0, 0
    while at < end and values < chunk.num_values:
        page = read_page_header(content, at)
        if page.kind not in (_DATA, _DICTIONARY) or page.encoding not in _KNOWN:
            raise ShardDamaged(f"{name}: expected pages of Headrace's writer, got {page}")
        if page.kind == _DICTIONARY:
            dictionary = page.size
        size += page.header + page.size
        values += page.values if page.kind == _DATA else 0
        at += page.header + page.stored
    if size > chunk.total_uncompressed_size or at > end:
        raise ShardDamaged(
            f"{name}: the footer says {chunk.total_uncompressed_size} bytes, its pages {size}"
        )
    return size + (0 if width else 4 * values + dictionary * values)


_DATA, _DICTIONARY = 0, 2


class Page(msgspec.Struct, frozen=True, gc=False):
    """The content of a page's header; sizes in bytes."""

    kind: int
    header: int
    size: int  # of its content, decompressed
    stored: int
    values: int
    encoding: int


_VARINT = rb"([\x80-\xff]*[\x00-\x7f])"
_STATISTICS = (  # of 8-byte integers
    rb"\x18\x08.{8}\x18\x08.{8}\x16[\x80-\xff]*[\x00-\x7f]"
    rb"\x28\x08.{8}\x18\x08.{8}(?:[\x11\x12][\x11\x12])?"
)
_USUAL = re.compile(
    rb"\x15([\x00\x04])\x15%b\x15%b(?:\x15%b[\x1c\x3c]|[\x2c\x4c])\x15%b\x15([\x00-\x10])"
    rb"(?:\x12|\x15\x06\x15\x06(?:\x1c(?:%b)?\x00)?)\x00\x00"
    % (_VARINT, _VARINT, _VARINT, _VARINT, _STATISTICS),
    re.DOTALL,
)


def read_page_header(content: bytes | memoryview, at: int) -> Page:
    """Parse Parquet's PageHeader, a struct in Thrift's compact protocol, at an offset of a file."""
    usual = _USUAL.match(content, at)
    if usual is None:
        return _any_page_header(content, at)
    kind, size, stored, _, values, encoding = usual.groups()
    return Page(
        kind[0] >> 1, usual.end() - at, _int(size), _int(stored), _int(values), encoding[0] >> 1
    )


def _int(varint: bytes) -> int:
    """A number of a header, which is never negative."""
    value = 0
    for byte in reversed(varint):
        value = value << 7 | byte & 127
    return value >> 1


def _any_page_header(content: bytes | memoryview, at: int) -> Page:
    """Parse a page header in any form, as with statistics of the page. Raises ShardDamaged."""
    # 100 times the enclosing struct's field number, plus the own one -> value
    found: dict[int, int] = {}
    begin, number = at, 0
    outer: list[int] = []
    try:
        while True:
            byte = content[at]
            at += 1
            if not byte:  # the end of a struct
                if not outer:
                    break
                number = outer.pop()
                continue
            if byte < 16:
                number, at = _varint(content, at)
                number >>= 1
            else:
                number += byte >> 4
            wire = byte & 15
            if 4 <= wire <= 6:
                value = content[at]
                at += 1
                if value > 127:
                    value, at = _varint(content, at - 1)
                if len(outer) < 2:
                    place = number + 100 * outer[0] if outer else number
                    found[place] = (value >> 1) ^ -(value & 1)
            elif wire == 12:
                outer.append(number)
                number = 0
            elif wire == 8:
                value, at = _varint(content, at)
                at += value
            elif wire > 2:
                break
    except IndexError:
        found.clear()
    kind, size, stored = (found.get(field, -1) for field in (1, 2, 3))
    holds = 700 if kind == _DICTIONARY else 500
    values, encoding = found.get(holds + 1, -1), found.get(holds + 2, -1)
    if min(kind, size, stored, values) < 0:
        raise ShardDamaged(f"byte {begin}: expected the header of a page of version 1")
    return Page(kind, at - begin, size, stored, values, encoding)


def _varint(content: bytes | memoryview, at: int) -> tuple[int, int]:
    """(value, the offset after it)."""
    value = shift = 0
    while True:
        byte = content[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
