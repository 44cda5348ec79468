"""Broken builds around commits, recovery, sealing and damage."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from msgspec.structs import replace

import storage.shards.shard
from ingest.collector import adoption, recovery
from ingest.collector.adoption import _Adoption
from ingest.collector.collector import Collector
from ingest.collector.group_commit import LoopJournal
from ingest.collector.recovery import Recovered
from ingest.collector.sealing import Sealing
from ingest.collector.writer_thread import Sealer, SealJob
from ingest.episodes.assembler import EpisodeAssembler
from ingest.episodes.judge import Judge
from ingest.episodes.open_episode import OpenEpisode
from ingest.episodes.sealed_parts import Sealed
from ingest.protocol import messages as wire
from ingest.server.rank_routes import Ranker
from storage.journal.database import HighWater
from storage.journal.records import Journal
from storage.journal.sqlite_journal import SqliteJournal
from storage.shards.digests import digest_of
from storage.shards.schema import ShardMetadata
from storage.shards.shard import ShardWriter
from tests.faults.mutants import Patch, mutant

# --- acknowledging -----------------------------------------------------------------------------


@mutant(crash="lost", simulation="lost")
def ack_before_commit(patch: Patch) -> None:
    """An answer is sent before its commit, which is slow."""
    commit = patch.original(SqliteJournal, "commit")

    def slow(self: SqliteJournal, *args: Any, **given: Any) -> None:
        patch.wait()
        commit(self, *args, **given)

    async def durable(self: LoopJournal, row: int) -> None:
        return

    patch.replace(SqliteJournal, "commit", slow)
    patch.replace(LoopJournal, "durable", durable)


@mutant(crash=("refused", "lost"))
def ranked_before_commit(patch: Patch) -> None:
    """A ranking is answered before its commit, which is slow."""
    commit, logs = patch.original(SqliteJournal, "commit"), patch.original(Ranker, "_log")

    def slow(self: SqliteJournal, *args: Any, **given: Any) -> None:
        patch.wait()
        commit(self, *args, **given)

    def at_once(self: Ranker, *args: Any) -> int:
        logs(self, *args)
        return -1

    patch.replace(SqliteJournal, "commit", slow)
    patch.replace(Ranker, "_log", at_once)


@mutant(crash="doubled", network="refused", simulation="doubled")
def no_dedup(patch: Patch) -> None:
    """A retry counts as new; answers are slow, so that kills cut them off."""
    judge = patch.original(Judge, "judge")
    durable = patch.original(LoopJournal, "durable")

    def unnumbered(
        self: Judge, instance: str | None, event: wire.Event, *args: Any, **given: Any
    ) -> Any:
        if not isinstance(event, wire.Start):
            event = msgspec.structs.replace(event, seq=None)
        return judge(self, instance, event, *args, **given)

    async def slow(self: LoopJournal, row: int) -> None:
        await durable(self, row)
        if patch.delay:
            await asyncio.sleep(patch.delay)

    patch.replace(Judge, "judge", unnumbered)
    patch.replace(LoopJournal, "durable", slow)


@mutant(simulation="hole")
def unjournaled_time_out(patch: Patch) -> None:
    """An episode is abandoned in memory, but not in the journal."""

    def apply_due(self: Collector, now: float) -> None:
        row = self._row()
        row.number -= 1
        for event in self.assembler.tick(now):
            row.apply(event)
        self.sealing.add(now)

    patch.replace(Collector, "_apply_due", apply_due)


# --- sealing -----------------------------------------------------------------------------------


@mutant(crash="lost")
def shard_recorded_before_renamed(patch: Patch) -> None:
    """A shard is recorded, and its rows are dropped, before it has its final name."""
    write = patch.original(Sealer, "_write")

    def seal(self: Sealer, job: SealJob) -> bool:
        steps = sum(part.steps for part in job.parts)
        shard = SimpleNamespace(path=Path("none.parquet"), digest="0" * 64, rows=steps, nbytes=1)
        self._notify(job.done, shard)
        patch.wait(3)
        return write(self, job) is not None

    patch.replace(Sealer, "_seal", seal)


@mutant(crash="lost", simulation="lost")
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
    """A shard is written piece by piece under its final name."""

    def place(self: ShardWriter, name: str, data: bytes, metadata: ShardMetadata) -> None:
        path = Path(f"{self.directory}/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            patch.wait(5)
            file.write(data[len(data) // 2 :])

    patch.replace(ShardWriter, "_place", place)


@mutant(simulation="leaked")
def leaked_state_per_episode(patch: Patch) -> None:
    """The place where an episode was cut is kept after its end, in memory and in the journal."""
    carry = patch.original(Sealing, "_carry")

    def kept(
        self: Sealing, item: Sealed, owner: str, put: dict[str, bytes], delete: list[str]
    ) -> None:
        if item.carry is not None:
            carry(self, item, owner, put, delete)

    patch.replace(Sealing, "_carry", kept)


@mutant(simulation="doubled")
def cuts_forgotten(patch: Patch) -> None:
    """The place where a long episode was cut is neither journaled nor counted."""
    carry = patch.original(Sealing, "_carry")

    def unwritten(
        self: Sealing, item: Sealed, owner: str, put: dict[str, bytes], delete: list[str]
    ) -> None:
        carry(self, item, owner, {}, delete)
        self._carried.clear()

    patch.replace(Sealing, "_carry", unwritten)


@mutant(simulation="hole")
def plans_forgotten(patch: Patch) -> None:
    """A start ignores the plans of an earlier run, and makes new ones."""

    def match(journal: Journal, assembler: EpisodeAssembler, found: Recovered) -> None:
        found.waiting, assembler.sealed = assembler.sealed, []

    patch.replace(recovery, "_match_plans", match)


# --- damage ------------------------------------------------------------------------------------


@mutant(damage="unnoticed")
def digest_not_checked(patch: Patch) -> None:
    """A shard is adopted and read without a check of its digest."""

    def trust(path: Path, data: bytes) -> str:
        return digest_of(data)

    patch.replace(storage.shards.shard, "check_digest", trust)


@mutant(damage="wrong")
def row_checksum_not_checked(patch: Patch) -> None:
    """A journal row is replayed without a check of its checksum."""

    def pages(self: SqliteJournal) -> Iterator[tuple[int, bytes | None]]:
        yield from self._db.execute("SELECT number, blob FROM rows ORDER BY number").fetchall()

    patch.replace(SqliteJournal, "_pages", pages)


@mutant(damage="silent")
def high_water_ignored(patch: Patch) -> None:
    """Rows that are missing at the journal's end are not noticed."""
    patch.replace(HighWater, "read", lambda self: 0)


@mutant(damage="reused")
def numbers_reused(patch: Patch) -> None:
    """Rows missing at the end are reported, but their numbers are given again."""

    def count(self: SqliteJournal) -> None:
        missing = max(0, self._high_water.read() - self._last_row)
        self._damage = replace(self._damage, missing_rows=missing)

    patch.replace(SqliteJournal, "_count_missing_rows", count)


@mutant(damage="loop")
def malformed_not_set_aside(patch: Patch) -> None:
    """An unreadable journal stays in its place, so that every start fails on it."""
    patch.replace(SqliteJournal, "_set_aside", lambda self, reason: None)


@mutant(simulation="wrong")
def keys_of_late_rewards_forgotten(patch: Patch) -> None:
    """A reward for a named step counts each time that it is sent."""
    reward = patch.original(OpenEpisode, "reward_step")

    def forgotten(self: OpenEpisode, *event: Any) -> Any:
        new = reward(self, *event)
        self.reward_ids.clear()
        return new

    patch.replace(OpenEpisode, "reward_step", forgotten)


@mutant(simulation="wrong")
def rows_of_late_rewards_not_needed(patch: Patch) -> None:
    """A journal row with a reward for a named step is dropped while its part is not recorded."""
    reward = patch.original(OpenEpisode, "reward_step")

    def unneeded(self: OpenEpisode, *event: Any) -> bool:
        rows = list(self.rows)
        reward(self, *event)
        self.rows = rows
        self.late_rows.clear()
        return False

    patch.replace(OpenEpisode, "reward_step", unneeded)


# --- backups -----------------------------------------------------------------------------------


@mutant(restore="doubled")
def stored_parts_sealed_again(patch: Patch) -> None:
    """Steps that `adopt` found in shards are written once more."""
    keep = patch.original(_Adoption, "_keep")
    patch.replace(_Adoption, "_keep", lambda self, item, *, stored: keep(self, item, stored=False))


@mutant(restore="doubled")
def ids_of_later_shards_forgotten(patch: Patch) -> None:
    """An adopting journal counts retried episodes as new, although they are in shards."""
    patch.replace(_Adoption, "_over", lambda self, known: {})


@mutant(restore="doubled")
def open_episodes_not_compared(patch: Patch) -> None:
    """An open episode is closed without a look for its steps in shards."""
    patch.replace(adoption, "_next", lambda episode, there: None)


@mutant(restore="lost")
def steps_of_the_backup_given_up(patch: Patch) -> None:
    """`adopt` counts steps of the journal as stored that no shard has."""
    keep = patch.original(_Adoption, "_keep")
    patch.replace(_Adoption, "_keep", lambda self, item, *, stored: keep(self, item, stored=True))
