"""A shard's footer as our writer makes it, found in its bytes without Arrow.

Arrow is slow for this, and must not get bytes that may be damaged: it raises any error for them, or
ends the process.
"""

from __future__ import annotations

import re

from storage.shards.names import ShardDamaged
from storage.shards.schema import ShardMetadata

_PAIR = re.compile(rb"\x18[\x00-\x7f](headrace\.\w+)\x18([\x80-\xff]*)([\x00-\x7f])")
_TS = re.compile(  # in Parquet's ColumnMetaData, in Thrift's compact protocol
    rb"\x19\x18\x02ts\x15.\x16([\x80-\xff]*[\x00-\x7f])(?:[\x16\x26\x46][\x80-\xff]*[\x00-\x7f])+"
    rb"[\x1c\x3c]\x18\x08(.{8})\x18\x08(.{8})",
    re.DOTALL,
)


def footer_bytes(tail: bytes) -> int:
    """The size of the footer at the end of a Parquet file, with the 8 bytes after it; 0 for none.

    `tail`: at least the last 8 bytes of the file.
    """
    return 8 + int.from_bytes(tail[-8:-4], "little") if tail[-4:] == b"PAR1" else 0


def own_footer(tail: bytes, where: str) -> tuple[ShardMetadata, list[int]] | None:
    """(metadata, the smallest and largest `ts` of each row group) at the end of a file.

    None unless all of the footer is in `tail` in our writer's form, and the rows of its row groups
    add up to those of its metadata. Raises nothing, whatever the bytes are.
    """
    size = footer_bytes(tail)
    if not 8 < size <= len(tail):
        return None
    footer = tail[-size:-8]
    metadata = _pairs(footer, where)
    chunks = _TS.findall(footer)
    if metadata is None or sum(_varint(rows) >> 1 for rows, _, _ in chunks) != metadata.rows:
        return None
    edges = [edge for _, most, least in chunks for edge in (least, most)]
    return metadata, [int.from_bytes(edge, "little", signed=True) for edge in edges]


def _pairs(footer: bytes, where: str) -> ShardMetadata | None:
    """Parse our pairs in a footer; None unless they have the form that our writer makes."""
    pairs = {}
    for match in _PAIR.finditer(footer):
        size = _varint(match[2] + match[3])
        pairs[match[1]] = footer[match.end() : match.end() + size]
    try:
        return ShardMetadata.from_footer(pairs, where)
    except ShardDamaged:
        return None


def _varint(data: bytes) -> int:
    value = 0
    for byte in reversed(data):
        value = value << 7 | byte & 127
    return value
