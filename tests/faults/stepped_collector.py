"""A collector whose threads, disk and clock are stepped by the test, so that a seed replays.

The journal's thread, the sealer's thread and the delivery of their results are explicit steps; a
crash may come at any point where a disk would have been touched.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from queue import Empty
from random import Random
from typing import Any

from ingest.collector.collector import Collector
from ingest.episodes.sealed_parts import Limits
from storage.declarations.declaration import PolicyDeclaration
from storage.errors import JournalFull
from storage.experience.episode import Part
from storage.experience.part_columns import PartColumns, each_part
from storage.journal.memory_journal import MemoryJournal
from storage.journal.records import Journal
from tests.ingest.simulated_collector import MemoryShard, MemoryWriter

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Crash(BaseException):
    """SIGKILL: a BaseException, which error handlers do not catch."""


class Points:
    """The numbers of the points where the process dies, and of the commits that find no space."""

    def __init__(self, crashes: set[int], full: set[int]) -> None:
        self.crashes, self.full = crashes, full
        self.reached = 0
        self.commits = 0

    def reach(self) -> None:
        self.reached += 1
        if self.reached in self.crashes:
            raise Crash

    def commit(self) -> None:
        self.commits += 1
        if self.commits in self.full:
            raise JournalFull("simulated: no space")


class SteppedJournal(MemoryJournal):
    points: Points

    def commit(self, *args: Any, **given: Any) -> None:
        self.points.reach()
        self.points.commit()
        super().commit(*args, **given)
        self.points.reach()

    def renew_collector_id(self, fresh: str, **given: Any) -> None:
        self.points.reach()
        super().renew_collector_id(fresh, **given)
        self.points.reach()

    @classmethod
    def found(cls, left: MemoryJournal | None, points: Points) -> SteppedJournal:
        journal = cls()
        journal.points = points
        if left is not None:
            journal._content = left.crash()._content
        return journal


class SteppedWriter(MemoryWriter):
    """Shards in memory, with a crash before and after each."""

    points: Points

    def write(
        self, stream: str, canonical_json: str, parts: Sequence[Part | PartColumns]
    ) -> MemoryShard:
        self.points.reach()
        parts = list(each_part(parts))
        ordinals = [part.ordinal for part in parts]
        if self.dense and ordinals != list(range(ordinals[0], ordinals[0] + len(parts))):
            self.conflicts += 1  # a refused plan would be retried forever
            self.dense = False
        shard = super().write(stream, canonical_json, parts)
        self.points.reach()
        return shard


class _Promise:
    """What a request awaits. An error that is never retrieved is ignored."""

    def __init__(self) -> None:
        self._done = False
        self._error: Exception | None = None

    def done(self) -> bool:
        return self._done

    def set_result(self, _: None) -> None:
        self._done = True

    def set_exception(self, error: Exception) -> None:
        self._done, self._error = True, error

    def __await__(self) -> Generator[_Promise, None, None]:
        if not self._done:
            yield self
        if self._error is not None:
            raise self._error


class _Loop(asyncio.AbstractEventLoop):
    """The part of an event loop that the collector uses: later calls join the deliveries."""

    def __init__(self, deliveries: deque[Call], clock: Callable[[], float]) -> None:
        self._deliveries = deliveries
        self._clock = clock

    def time(self) -> float:
        return self._clock()

    def create_future(self) -> Any:
        return _Promise()

    def call_later(self, after: float, function: Callable[..., Any], *args: Any, **_: Any) -> Any:
        self._deliveries.append((function, args))

    def call_soon_threadsafe(self, function: Callable[..., Any], *args: Any, **_: Any) -> Any:
        self._deliveries.append((function, args))

    def is_closed(self) -> bool:
        return False


class World:
    """A machine: its disk outlives the collector that runs on it. Time advances only on request."""

    def __init__(
        self,
        policies: Mapping[str, PolicyDeclaration],
        chance: Random,
        points: Points,
        limits: Limits | None = None,
    ) -> None:
        self.policies, self.chance, self.points, self.limits = policies, chance, points, limits
        self.now = 0.0
        self.starts = 0
        self.writer = SteppedWriter()
        self.writer.points = points
        self.journal: Journal = SteppedJournal.found(None, points)
        self.start()

    def find_journal(self) -> Journal:
        """The journal that a start finds after the last process."""
        if not isinstance(self.journal, MemoryJournal):
            raise TypeError("a journal on a disk is found by its own world")
        return SteppedJournal.found(self.journal, self.points)

    def start(self) -> None:
        """Start processes on the files of the last one, until one survives its start."""
        while True:
            self.starts += 1
            self.deliveries: deque[Call] = deque()
            try:
                self.journal = self.find_journal()
                self.collector = Collector(  # whose threads never start
                    self.journal,
                    self.writer,
                    self.policies,
                    limits=self.limits,
                    retry_seconds=0.0,
                    loop=_Loop(self.deliveries, lambda: self.now),
                    clock=lambda: self.now,
                    wall=lambda: 1_000 + int(self.now),
                )
                self.collector._resume()
                assert self.collector.damage.lost_state == ()  # no kill loses any of it
                return
            except (Crash, JournalFull):
                continue

    def commit(self) -> None:
        """The journal's thread commits some of the waiting rows, as one group."""
        waiting = self.collector.journal.committer._tasks
        group = []
        for _ in range(self.chance.randint(1, max(1, waiting.qsize()))):
            try:
                group.append(waiting.get_nowait())
            except Empty:
                break
        self.collector.journal.committer._commit([task for task in group if task is not None])

    def seal(self, *, writer_dies: bool = False) -> None:
        """The sealer's thread writes a plan; a writer that dies after its rename is restarted."""
        sealer = self.collector.sealer
        try:
            job = sealer._jobs.get_nowait()
        except Empty:
            return
        if job is not None:
            if writer_dies:
                self.writer.write(job.plan.stream, job.canonical_json, job.parts)
            sealer._seal(job)

    def deliver(self) -> None:
        """Deliver one result to the loop."""
        if self.deliveries:
            function, args = self.deliveries.popleft()
            function(*args)

    @property
    def busy(self) -> bool:
        collector = self.collector
        waiting = (collector.journal.committer._tasks, collector.sealer._jobs)
        return bool(self.deliveries) or any(queue.qsize() for queue in waiting)

    def pump(self) -> None:
        """Run until nothing is in flight."""
        while self.busy:
            self.commit()
            self.seal()
            self.deliver()

    def finish(self) -> None:
        """Free the disk; open episodes are abandoned, ended ones go to shards."""
        self.points.full.clear()
        for _ in range(3):
            self.pass_time(60.0)
            self.pump()
        self.collector.sealing.settle(all_rows=True)
        self.pump()

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        if self.collector.journal.rebuilding is None:
            self.collector.tick()


class Answer:
    """An accepted request that waits until its row is durable."""

    def __init__(self, reply: Any, durable: Coroutine[Any, Any, None]) -> None:
        self.reply = reply
        self._durable = durable
        self._waits_for: _Promise | None = None
        self._left = False
        self._go_on()

    def poll(self) -> bool:
        """Whether the answer has been sent. Raises the request's refusal."""
        if self._waits_for is not None and self._waits_for.done():
            self._go_on()
        return self._left

    def _go_on(self) -> None:
        try:
            self._waits_for = self._durable.send(None)
        except StopIteration:
            self._left = True

    def drop(self) -> None:
        """The connection is gone."""
        self._durable.close()
