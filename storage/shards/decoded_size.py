"""The memory that reading a shard takes, estimated from its footer before any page is decoded.

A file of 442 kB can decode to 810 MB. The footer is trusted: who can forge one that matches the
file's digest can write under `shards/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from storage.shards.names import ShardDamaged

MOST_GROUP_BYTES = 256_000_000
"""The largest size of a decoded row group; the writer creates groups of 8 MB, or of one row."""

MOST_SHARD_BYTES, MOST_EXPANSION = 512_000_000, 100
"""The largest size of a decoded shard: the larger of this many bytes and this multiple of the
file's size."""


def check_size(
    file_bytes: int, footer: pq.FileMetaData, schema: pa.Schema, names: Sequence[str]
) -> None:
    """Check that the memory for reading columns of a file is within limits. Raises ShardDamaged.

    `schema` is how Arrow reads the file. A row counts with the decoded size of its numbers, a row
    group also with the size of its decompressed pages.
    """
    total = 0
    for number, size in enumerate(group_bytes(footer, schema, names)):
        if size > MOST_GROUP_BYTES:
            raise ShardDamaged(
                f"row group {number}: expected at most {MOST_GROUP_BYTES} bytes, it decodes to "
                f"{size}"
            )
        total += size
    most = max(MOST_SHARD_BYTES, MOST_EXPANSION * file_bytes)
    if total > most:
        raise ShardDamaged(f"expected at most {most} bytes, it decodes to {total}")


def group_bytes(footer: pq.FileMetaData, schema: pa.Schema, names: Sequence[str]) -> Iterator[int]:
    """The bytes that columns of each row group decode to; nothing without columns."""
    kinds = [(schema.get_field_index(name), schema.field(name).type) for name in names]
    lists = [(at, _width(kind.value_type)) for at, kind in kinds if pa.types.is_list(kind)]
    row_bytes = sum(_width(kind) for _, kind in kinds)
    for number in range(footer.num_row_groups if names else 0):
        group = footer.row_group(number)
        inside = sum(group.column(at).num_values * width for at, width in lists)
        yield int(group.total_byte_size + group.num_rows * row_bytes + inside)


def _width(kind: pa.DataType) -> int:
    """The decoded bytes of a value of fixed size, and of a list's offset; 0 for texts and bytes."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _width(kind.value_type)
    if pa.types.is_dictionary(kind) or pa.types.is_list(kind):
        return 4
    return max(1, int(kind.bit_width) // 8) if pa.types.is_primitive(kind) else 0
