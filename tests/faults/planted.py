"""Broken builds around commits, recovery, sealing and damage."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from ingest import wire
from ingest.assembler import EpisodeAssembler
from ingest.collector import Collector
from ingest.sealer import Sealer, SealJob
from ingest.sealing import Sealing
from storage.journal import SqliteJournal
from storage.shards import ShardMetadata, ShardWriter
from tests.faults.mutants import Patch, mutant

# --- acknowledging -----------------------------------------------------------------------------


@mutant(crash="lost")
def ack_before_commit(patch: Patch) -> None:
    """An answer leaves before its commit, which takes its time."""
    commit = patch.original(SqliteJournal, "commit")

    def slow(self: SqliteJournal, *args: Any, **given: Any) -> None:
        patch.wait()
        commit(self, *args, **given)

    async def durable(self: Collector, row: int) -> None:
        return

    patch.replace(SqliteJournal, "commit", slow)
    patch.replace(Collector, "durable", durable)


@mutant(crash="doubled", network="refused")
def no_dedup(patch: Patch) -> None:
    """A retry is taken for something new; answers take their time, so that kills cut them off."""
    judge = patch.original(EpisodeAssembler, "judge")
    durable = patch.original(Collector, "durable")

    def unnumbered(
        self: EpisodeAssembler, instance: str | None, event: wire.Event, *args: Any, **given: Any
    ) -> Any:
        if not isinstance(event, wire.Start):
            event = msgspec.structs.replace(event, seq=None)
        return judge(self, instance, event, *args, **given)

    async def slow(self: Collector, row: int) -> None:
        await durable(self, row)
        if patch.delay:
            await asyncio.sleep(patch.delay)

    patch.replace(EpisodeAssembler, "judge", unnumbered)
    patch.replace(Collector, "durable", slow)


# --- sealing -----------------------------------------------------------------------------------


@mutant(crash="lost")
def shard_recorded_before_renamed(patch: Patch) -> None:
    """A shard is recorded, and its rows are dropped, before it is in its place."""
    write = patch.original(Sealer, "_write")

    def seal(self: Sealer, job: SealJob) -> bool:
        steps = sum(part.steps for part in job.parts)
        shard = SimpleNamespace(path=Path("none.parquet"), digest="0" * 64, rows=steps, nbytes=1)
        self._notify(job.done, shard)
        patch.wait(3)
        return write(self, job) is not None

    patch.replace(Sealer, "_seal", seal)


@mutant(crash="lost")
def rows_dropped_before_recorded(patch: Patch) -> None:
    """A plan already drops the journal rows of its parts."""
    plan = patch.original(Sealing, "_plan")
    write = patch.original(Sealer, "_write")

    def early(self: Sealing, stream: str) -> None:
        rows = sorted({row for item in self._ready[stream].parts for row in item.rows})
        transact = self._transact
        self._transact = lambda change, then: transact(replace(change, drop_rows=rows), then)
        try:
            plan(self, stream)
        finally:
            self._transact = transact

    def slow(self: Sealer, job: SealJob) -> Any:
        patch.wait()
        return write(self, job)

    patch.replace(Sealing, "_plan", early)
    patch.replace(Sealer, "_write", slow)


@mutant(crash="partial")
def partial_shard_left(patch: Patch) -> None:
    """A shard is written under its final name, bit by bit."""

    def place(
        self: ShardWriter, folder: Path, name: str, data: bytes, metadata: ShardMetadata
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            patch.wait(5)
            file.write(data[len(data) // 2 :])

    patch.replace(ShardWriter, "_place", place)
