"""One shard with the rows of several: checked before, written by row groups, compared afterwards.

At any time one of the old shards and one row group are in memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from storage.objects.interface import Objects
from storage.objects.ranged import RangedFile
from storage.shards.content import check_footer
from storage.shards.names import ShardDamaged, ShardName, ShardWriteError
from storage.shards.schema import (
    ShardMetadata,
    arrow_footer,
    coded_schema,
    metadata_for,
    with_defaults,
)
from storage.shards.shard import parquet_writer, read_shard
from storage.verify.shard_check import CheckedShard, check_shard

__all__ = ["MergedShard", "merge"]

ROW_GROUP_BYTES = 8_000_000
MOST_DECODED = 256_000_000
"""Decoded bytes of a merged shard, half of what readers accept. They decode whole shards."""


class MergedShard(NamedTuple):
    """A finished file that is not in its place yet, and the shards whose rows it has."""

    path: Path
    name: ShardName
    metadata: ShardMetadata
    old: tuple[ShardName, ...]


def merge(
    shards: Objects, stream: str, names: Sequence[ShardName], damaged: dict[str, str]
) -> MergedShard | None:
    """Write a shard with the rows of the first shards of `names`: those that fit and are intact.

    The ordinals of `names` are adjacent. Returns None if fewer than two shards fit; the caller goes
    on after `names[0]`. A damaged shard is the last one that is looked at, and noted in `damaged`.
    Raises OSError, and ShardWriteError for a file that has other rows.
    """
    path = shards.staging(f"{stream}/{names[0].first:012}-{names[-1].last:012}")
    try:
        found = _write(path, _checked(shards, stream, names, damaged))
        if len(found) < 2:
            path.unlink(missing_ok=True)
            return None
        old = tuple(names[: len(found)])
        metadata, schema = _sum_of(found)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        with pq.ParquetFile(path, page_checksum_verification=True) as merged:
            stored = ShardMetadata.from_footer(merged.schema_arrow.metadata, str(path))
            check_footer(merged.schema_arrow, stored, stream, metadata.first, metadata.last)
            rows = (merged.read_row_group(n) for n in range(merged.num_row_groups))
            known = (read_shard(RangedFile(shards, f"{stream}/{name}")) for name in old)
            _compare(path, rows, known, schema.remove_metadata())
        name = ShardName(metadata.first, metadata.last, digest[:16])
        return MergedShard(path, name, metadata, old)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _checked(
    shards: Objects, stream: str, names: Sequence[ShardName], damaged: dict[str, str]
) -> Iterator[CheckedShard]:
    """The shards, checked as `verify` checks them, until one does not fit or is damaged."""
    nbytes, spaces = 0, None
    for name in names:
        place = f"{stream}/{name}"
        try:
            found = check_shard(RangedFile(shards, place), name)
        except ShardDamaged as error:
            damaged[place] = str(error)
            return
        nbytes += found.nbytes
        if nbytes > MOST_DECODED or spaces not in (None, found.metadata.spaces):
            return
        spaces = found.metadata.spaces
        yield found


def _write(path: Path, shards: Iterator[CheckedShard]) -> list[ShardMetadata]:
    """Write the rows of the shards and a footer; return the footers of the shards."""
    found: list[ShardMetadata] = []
    held: list[pa.Table] = []
    writer, waiting, schema = None, 0.0, None

    def flush() -> None:
        nonlocal writer, waiting
        table = pa.concat_tables(held).unify_dictionaries().combine_chunks()
        if writer is None:
            writer = parquet_writer(path, table.schema, table)
        writer.write_table(table, row_group_size=len(table))
        held.clear()
        waiting = 0.0

    try:
        for shard in shards:
            found.append(shard.metadata)
            schema = _sum_of(found[:1])[1]
            table = _with_schema(shard.table, coded_schema(schema).remove_metadata())
            row_bytes = max(1.0, shard.nbytes / len(table))
            step = max(1, int(ROW_GROUP_BYTES / row_bytes))
            for at in range(0, len(table), step):
                held.append(table.slice(at, step))
                waiting += row_bytes * len(held[-1])
                if waiting >= ROW_GROUP_BYTES:
                    flush()
        if held:
            flush()
        if writer is not None:
            writer.add_key_value_metadata(arrow_footer(_sum_of(found)[1]))
    finally:
        if writer is not None:
            writer.close()
    return found


def _sum_of(found: Sequence[ShardMetadata]) -> tuple[ShardMetadata, pa.Schema]:
    """The footer and schema of a shard with the rows of these, which follow each other."""
    return metadata_for(
        found[0].stream,
        found[0].spaces,
        _joined([pair for one in found for pair in one.ranges]),
        rows=sum(one.rows for one in found),
        parts=sum(one.parts for one in found),
    )


def _joined(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ascending ranges, with adjacent ones joined."""
    joined: list[tuple[int, int]] = []
    for first, last in ranges:
        if joined and joined[-1][1] + 1 == first:
            first = joined.pop()[0]
        joined.append((first, last))
    return tuple(joined)


def _with_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    table = with_defaults(table, schema.names)
    return pa.Table.from_arrays([table.column(name) for name in schema.names], schema=schema)


def _compare(
    path: Path, written: Iterator[pa.Table], old: Iterator[pa.Table], schema: pa.Schema
) -> None:
    """Check that the written rows are those of the old shards. Raises ShardWriteError."""
    rest = schema.empty_table()
    for table in old:
        wanted, at = _with_schema(table, schema), 0
        while at < len(wanted):
            if not len(rest):
                rest = _with_schema(next(written, rest), schema)
            count = min(len(rest), len(wanted) - at)
            if not count or not rest.slice(0, count).equals(wanted.slice(at, count)):
                raise ShardWriteError(f"{path}: expected the rows of the shards that it replaces")
            rest, at = rest.slice(count), at + count
    if len(rest) or next(written, None) is not None:
        raise ShardWriteError(f"{path}: expected the rows of the shards that it replaces, got more")
