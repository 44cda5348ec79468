"""A collector on an in-memory journal and writer, with scripted faults."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingest.collector.collector import Collector
from ingest.collector.part_feed import Tap
from ingest.episodes.sealed_parts import Limits
from ingest.protocol import messages as wire
from ingest.protocol.errors import CollectorFailed, Refusal
from storage.declarations.declaration import PolicyDeclaration
from storage.errors import JournalFailed
from storage.experience.episode import Part
from storage.experience.part_columns import PartColumns, each_part
from storage.journal.memory_journal import MemoryJournal
from storage.shards.names import ShardInfo, ShardWriteError
from storage.shards.unrecorded_shards import FoundPart, FoundShard

WAIT_SECONDS = 60.0


@dataclass
class Fault:
    """The `kind` of fault at the `at`-th commit of all, before or `after` it took effect."""

    at: int
    kind: type[Exception] = JournalFailed
    after: bool = False
    commits: int = 0
    struck: bool = False

    def commit(self, change: Callable[[], None], on_strike: Callable[[], None]) -> None:
        self.commits += 1
        if self.commits != self.at:
            change()
            return
        if self.after:
            change()
        self.struck = True
        on_strike()
        raise self.kind(f"commit {self.at} fails")


class FaultyJournal(MemoryJournal):
    """A MemoryJournal with a fault; `writer` dies with the process when it is fatal."""

    fault = Fault(0)
    writer: MemoryWriter | None = None

    def commit(self, *args: Any, **kwargs: Any) -> None:
        self.fault.commit(lambda: MemoryJournal.commit(self, *args, **kwargs), self._strike)

    def _strike(self) -> None:
        if self.writer is not None and self.fault.kind is JournalFailed:
            self.writer.dead = True

    @classmethod
    def after_crash(cls, journal: MemoryJournal) -> FaultyJournal:
        found = cls()
        found._content = journal.crash()._content
        return found


@dataclass
class MemoryShard:
    """The collector's record of a shard."""

    path: Path
    digest: str
    rows: int
    nbytes: int
    parts: list[Part]


@dataclass
class MemoryWriter:
    """Shards in memory. It adopts a shard of the same ordinals, as the real writer does."""

    shards: dict[tuple[str, int, int], MemoryShard] = field(default_factory=dict)
    dead: bool = False
    full: bool = False
    gate: threading.Event | None = None
    dense: bool = True  # a plan whose rows were damaged has gaps
    adopted: int = 0
    conflicts: int = 0  # the same ordinals with other content

    def start(self) -> None: ...
    def check(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...

    def write(
        self, stream: str, canonical_json: str, parts: Sequence[Part | PartColumns]
    ) -> MemoryShard:
        if self.dead:
            raise ShardWriteError("the writer was killed")
        if self.gate is not None:
            self.gate.wait(WAIT_SECONDS)
        if self.full:
            raise ShardWriteError("no space", errno.ENOSPC)
        parts = list(each_part(parts))
        first, last = parts[0].ordinal, parts[-1].ordinal
        if self.dense and [part.ordinal for part in parts] != list(range(first, last + 1)):
            raise ValueError("ordinals are not dense")
        known = self.shards.get((stream, first, last))
        if known is not None:
            self.adopted += 1
            self.conflicts += known.parts != list(parts)
            return known
        shard = MemoryShard(
            Path(stream) / f"{first}-{last}.parquet",
            "0" * 64,
            sum(part.steps for part in parts),
            sum(part.nbytes for part in parts),
            list(parts),
        )
        self.shards[stream, first, last] = shard
        return shard

    @property
    def parts(self) -> list[Part]:
        return [part for shard in self.shards.values() for part in shard.parts]


@dataclass(frozen=True)
class MemoryShelf:
    """The shards of a writer, as seen by a journal that may have been restored."""

    writer: MemoryWriter

    def ends(self, collector_id: str) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for stream, _, last in self.writer.shards:
            if stream.rpartition("-")[0] == collector_id:
                found[stream] = max(last + 1, found.get(stream, 0))
        return found

    def later(
        self, known: Mapping[str, int], since: int
    ) -> tuple[Sequence[FoundShard], Mapping[str, int]]:
        """Like `later_shards`; every other life that wrote here counts as later."""
        found, ends = list[FoundShard](), dict[str, int]()
        for (stream, first, last), shard in sorted(self.writer.shards.items()):
            if first >= known.get(stream, 0):
                found.append(found_shard(stream, first, last, shard))
                ends[stream] = last + 1
        return found, ends


def found_shard(stream: str, first: int, last: int, shard: MemoryShard) -> FoundShard:
    """The data that reading a shard's file would give."""
    info = ShardInfo(
        shard.path, stream, first, last, shard.digest, shard.rows, len(shard.parts), shard.nbytes
    )
    return FoundShard(
        info,
        tuple(
            FoundPart(
                episode_id=part.episode_id,
                agent_id=part.agent_id,
                part=part.part,
                t0=part.t0,
                steps=part.steps,
                received=part.received_ts,
                ended=part.ended,
                is_track=bool(part.env_t),
            )
            for part in shard.parts
        ),
    )


@dataclass
class Simulation:
    """A collector that is restarted after a crash, and a client that sends until acknowledged.

    Time advances only when a script says so.
    """

    policies: Mapping[str, PolicyDeclaration]
    fault: Fault = field(default_factory=lambda: Fault(0))
    limits: Limits | None = None
    tap: Tap | None = None
    now: float = 0.0
    max_pending: int = 256_000_000
    writer: MemoryWriter = field(default_factory=MemoryWriter)
    journal: FaultyJournal = field(default_factory=FaultyJournal)
    restarts: int = 0

    async def begin(self) -> None:
        while True:
            self.writer.dead = False
            self.journal.fault, self.journal.writer = self.fault, self.writer
            try:
                self.collector = Collector(
                    self.journal,
                    self.writer,
                    self.policies,
                    limits=self.limits,
                    tap=self.tap,
                    max_pending=self.max_pending,
                    retry_seconds=0.0,
                    clock=lambda: self.now,
                    wall=lambda: 1_000,
                )
            except JournalFailed:
                self.journal = FaultyJournal.after_crash(self.journal)
                continue
            self.collector.start()
            return

    async def crash(self) -> None:
        """Like SIGKILL: all memory is lost."""
        self.restarts += 1
        self.writer.dead = True
        self.collector.journal.fail(CollectorFailed("killed"))
        await self.collector.drain()
        self.journal = FaultyJournal.after_crash(self.journal)
        await self.begin()

    async def retry(self, action: Callable[[], Any]) -> Any:
        """Repeat a request until it is acknowledged, over crashes and full disks."""
        while True:
            try:
                reply, row = action()
                await self.collector.journal.durable(row)
            except CollectorFailed:
                await self.crash()
            except Refusal as refusal:
                if refusal.code not in ("disk_full", "busy"):
                    raise
                await asyncio.sleep(0)
            else:
                return reply

    async def register(self) -> str:
        reply = await self.retry(lambda: self.collector.register(wire.Register()))
        instance: str = reply.instance
        return instance

    async def send(self, instance: str, events: Iterable[wire.Event]) -> wire.EventsReply:
        batch = wire.Batch(instance=instance, events=list(events))
        reply: wire.EventsReply = await self.retry(lambda: self.collector.accept(batch))
        return reply

    async def advance(self, seconds: float) -> None:
        """Advance the clock, and wait until the resulting work is on disk and in shards."""
        self.now += seconds
        self.collector.tick()
        await self.idle()

    async def idle(self) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while self.collector.journal.failure is None and (
                self.collector.sealing.in_flight or self.collector.journal.rebuilding
            ):
                await asyncio.sleep(0)
        if self.collector.journal.failure is not None:
            await self.crash()

    async def finish(self) -> None:
        """Drain, also after a crash within the draining."""
        for _ in range(9):
            await self.collector.drain()
            if not self.writer.dead and self.journal.plans() == []:
                return
            self.restarts += 1
            self.journal = FaultyJournal.after_crash(self.journal)
            await self.begin()
        raise TimeoutError(f"plans are never fulfilled: {self.journal.plans()}")


def numbered(name: str, start: int, *, steps: int, **given: Any) -> list[wire.Event]:
    """An episode of `box:2` and `discrete:3` from its start to its end; reward t at step t."""
    policy_id = given.pop("policy_id", "default")
    final = given.pop("final", None)
    actions = [
        wire.LogAction(episode_id=name, seq=t + 1, obs=[float(t), 0.0], action=t % 3, reward=t)
        for t in range(steps)
    ]
    end = wire.End(episode_id=name, seq=steps + 1, obs=final)
    return [wire.Start(episode_id=name, start=start, policy_id=policy_id), *actions, end]
