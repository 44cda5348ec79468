"""One shard with the rows of others: checked before, written by row groups, compared afterwards.

It has the rows of several shards, or those of one without some of its parts. At any time one of the
old shards and one row group are in memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from storage.experience.range_set import RangeSet
from storage.objects.interface import Objects
from storage.objects.ranged import RangedFile
from storage.reading.ledger import Ledger
from storage.shards.content import check_footer
from storage.shards.digests import digest_of_written
from storage.shards.names import ShardDamaged, ShardName, ShardWriteError
from storage.shards.schema import (
    CODED,
    ShardMetadata,
    coded_schema,
    metadata_for,
    with_defaults,
)
from storage.shards.shard import parquet_writer, read_shard
from storage.shards.stored_tables import in_file, in_memory
from storage.verify.shard_check import CheckedShard, check_shard

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
    return _rewrite(shards, stream, names, _checked(shards, stream, names, damaged), 2, RangeSet())


def reduce(
    shards: Objects, stream: str, name: ShardName, without: RangeSet, damaged: dict[str, str]
) -> MergedShard | None:
    """Write a shard with the rows of another, except some parts; at least one part is left.

    No dictionary, statistic or page of the new file has a value that only those parts had. Returns
    None for a damaged shard, which is noted in `damaged`. Raises as `merge` does.
    """
    found = (_without(one, without) for one in _checked(shards, stream, [name], damaged))
    return _rewrite(shards, stream, [name], found, 1, without)


def _rewrite(
    shards: Objects,
    stream: str,
    names: Sequence[ShardName],
    checked: Iterator[CheckedShard],
    least: int,
    without: RangeSet,
) -> MergedShard | None:
    """Write the checked shards, which are the first of `names`; None if fewer than `least` are."""
    path = shards.staging(f"{stream}/{names[0].first:012}-{names[-1].last:012}")
    try:
        found = _write(path, checked)
        if len(found) < least:
            path.unlink(missing_ok=True)
            return None
        old = tuple(names[: len(found)])
        metadata, schema = _sum_of(found)
        with path.open("rb+") as file:
            os.fsync(file.fileno())
        digest = digest_of_written(path)
        with pq.ParquetFile(path, page_checksum_verification=True) as merged:
            stored = ShardMetadata.from_footer(merged.schema_arrow.metadata, str(path))
            check_footer(merged.schema_arrow, stored, stream, metadata.first, metadata.last)
            groups = range(merged.num_row_groups)
            rows = (in_memory(merged.read_row_group(n), stored) for n in groups)
            known = (
                kept_rows(read_shard(RangedFile(shards, f"{stream}/{name}")), without)
                for name in old
            )
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


def kept_rows(table: pa.Table, without: RangeSet) -> pa.Table:
    """The rows of a table that are not of these ordinals."""
    if not without:
        return table
    ordinals = table.column("ordinal").to_numpy()
    gone = Ledger({"": without}).contains("", ordinals)
    return table.filter(pa.array(~gone))


def _without(shard: CheckedShard, without: RangeSet) -> CheckedShard:
    """A shard without some parts. Its texts get new dictionaries: filtering keeps the old ones."""
    table = kept_rows(shard.table, without)
    for name in (name for name in CODED if name in table.column_names):
        at, texts = table.column_names.index(name), table.column(name)
        plain = texts.cast(texts.type.value_type) if pa.types.is_dictionary(texts.type) else texts
        table = table.set_column(at, name, plain.dictionary_encode())
    ranges = RangeSet(shard.metadata.ranges).difference(without)
    parts = len(
        table.select(["ordinal", "agent_id"]).group_by(["ordinal", "agent_id"]).aggregate([])
    )
    metadata = replace(shard.metadata, ranges=tuple(ranges.ranges()), rows=len(table), parts=parts)
    nbytes = shard.nbytes * len(table) // max(1, len(shard.table))
    return CheckedShard(shard.digest, metadata, table, nbytes)


def _write(path: Path, shards: Iterator[CheckedShard]) -> list[ShardMetadata]:
    """Write the rows of the shards and a footer; return the footers of the shards."""
    found: list[ShardMetadata] = []
    held: list[pa.Table] = []
    writer, waiting, schema = None, 0.0, None

    def flush() -> None:
        nonlocal writer, waiting
        joined = pa.concat_tables(held).unify_dictionaries().combine_chunks()
        table = in_file(joined, found[0].specs)
        if writer is None:
            writer = parquet_writer(path, table)
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
            writer.add_key_value_metadata(_sum_of(found)[0].to_footer())
    finally:
        if writer is not None:
            writer.close()
    return found


def _sum_of(found: Sequence[ShardMetadata]) -> tuple[ShardMetadata, pa.Schema]:
    """The footer and schema of a shard with the rows of these, which follow each other."""
    return metadata_for(
        found[0].stream,
        found[0].spaces,
        tuple(RangeSet([pair for one in found for pair in one.ranges]).ranges()),
        rows=sum(one.rows for one in found),
        parts=sum(one.parts for one in found),
    )


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
