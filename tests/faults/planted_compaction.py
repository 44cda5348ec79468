"""Broken builds of compaction, and of readers beside it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from storage.maintenance import merging, plans, search
from storage.reading.ledger import Ledger
from storage.reading.listing import ShardFile
from storage.reading.loading import LoadedShard
from storage.reading.shard_reader import ShardReader
from storage.reading.sources import ShardChoice
from storage.shards.replacements import FOLDER, REPLACED, MadeShard
from storage.shards.schema import metadata_for
from tests.faults.mutants import Patch, mutant


@mutant(compaction="read_twice")
def ledger_by_file_name(patch: Patch) -> None:
    """A reader counts the files that it has read instead of the ordinals."""
    take = patch.original(ShardReader, "_take_shard")

    def by_name(self: ShardReader, found: LoadedShard) -> None:
        known, self._ledger = self._ledger, Ledger()
        take(self, found)
        self._ledger = known.union(self._ledger)

    def wanted(self: ShardChoice, shards: list[ShardFile], taken: Ledger) -> list[ShardFile]:
        return shards

    patch.replace(ShardReader, "_take_shard", by_name)
    patch.replace(ShardChoice, "wanted", wanted)


@mutant(compaction=("read_twice", "verify", "differs"))
def ordinals_given_up(patch: Patch) -> None:
    """A compacted shard numbers its parts from the end of the stream."""
    shaped = patch.original(merging, "_with_schema")
    sum_of = patch.original(merging, "_sum_of")
    more = 1_000_000

    def renumbered(table: pa.Table, schema: pa.Schema) -> pa.Table:
        table = shaped(table, schema)
        for name in ("ordinal", "episode_ordinal"):
            at = table.column_names.index(name)
            if pc.min(table[name]).as_py() < more:
                table = table.set_column(at, table.schema.field(at), pc.add(table[name], more))
        return table

    def moved(found: Any) -> Any:
        metadata = sum_of(found)[0]
        ranges = tuple((first + more, last + more) for first, last in metadata.ranges)
        return metadata_for(
            *(metadata.stream, metadata.spaces, ranges), rows=metadata.rows, parts=metadata.parts
        )

    patch.replace(merging, "_with_schema", renumbered)
    patch.replace(merging, "_sum_of", moved)


@mutant(compaction="gone", maintenance="gone")
def a_grace_period_of_zero(patch: Patch) -> None:
    """A replaced shard is deleted at once."""
    set_aside = patch.original(plans._Application, "_set_aside")

    def deleted(self: Any, stream: str, name: str, *given: str) -> None:
        set_aside(self, stream, name, *given)
        self._shards.delete(f"{stream}/{name}{REPLACED}")

    patch.replace(plans._Application, "_set_aside", deleted)


@mutant(compaction="differs", maintenance="differs")
def a_lost_final_observation(patch: Patch) -> None:
    """A compacted shard lacks the final observations, and nothing compares it with the old ones."""
    writer_of = patch.original(merging, "parquet_writer")

    def lossy(path: Any, first: pa.Table) -> Any:
        writer = writer_of(path, first)
        write = writer.write_table

        def without(table: pa.Table, **given: Any) -> None:
            at = table.column_names.index("final_obs")
            field = table.schema.field(at)
            write(table.set_column(at, field, pa.nulls(len(table), field.type)), **given)

        writer.write_table = without
        return writer

    patch.replace(merging, "parquet_writer", lossy)
    patch.replace(merging, "_compare", lambda *given: None)


@mutant(compaction="verify")
def unrecorded_replacement(patch: Patch) -> None:
    """The record of a compacted shard is where nobody looks for it."""
    lost: Any = property(lambda self: f"{FOLDER}/lost.json")
    patch.replace(MadeShard, "place", lost)


@mutant(maintenance=("verify", "kept"))
def a_tombstone_without_its_rows(patch: Patch) -> None:
    """An erasure records which rows are gone, and leaves them where they are."""
    replace = patch.original(plans._Application, "_replace")

    def recorded(self: Any, stream: str, old: Any, found: Any, *removed: Any) -> None:
        if removed and self._plan.command == "erase":
            found, self._set_aside = None, lambda *given: None
        replace(self, stream, old, found, *removed)
        vars(self).pop("_set_aside", None)

    patch.replace(plans._Application, "_replace", recorded)


@mutant(maintenance="unproven")
def a_proof_of_raw_bytes(patch: Patch) -> None:
    """Names are looked for in the bytes of files only."""
    patch.replace(search._Search, "_decode", lambda *given: None)
