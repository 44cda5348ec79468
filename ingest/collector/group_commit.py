"""The journal's two sides: the thread that commits, and the event loop that runs ahead of it.

`Committer` is the one thread that writes the journal. Whatever was submitted while a sync ran goes
into the next transaction, so that one sync serves all that waited for it; there is no timer.
`LoopJournal` is what the event loop knows of it: the rows that were submitted, those on disk,
who waits for one, and what happens when a write fails.

After a failed write everything submitted before the failure was noticed is dropped: each submission
carries the *epoch* it was made in, and a new epoch begins with reading the state back from the
journal.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from ingest.collector.recovery import Recovered
from ingest.histogram import Histogram
from ingest.protocol.errors import CollectorFailed, Refusal, disk_full
from storage.errors import JournalFull
from storage.journal.sqlite_journal import Journal, Plan, ShardRecord

log = logging.getLogger("headrace.collector")

T = TypeVar("T")
Notify = Callable[..., Any]


class Transaction(msgspec.Struct, frozen=True):
    """What changes together, beside rows."""

    plan: Plan | None = None
    record: ShardRecord | None = None
    put: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    delete: Iterable[str] = ()
    drop_rows: Iterable[int] = ()


class Task(msgspec.Struct, frozen=True):
    """One submission: a row, a transaction, or a job to run between transactions.

    `done` gets the job's result, or None, through `notify`.
    """

    epoch: int
    row: tuple[int, bytes] | None = None
    transaction: Transaction | None = None
    job: Callable[[Journal], Any] | None = None
    done: Callable[[Any], None] | None = None


class Committer:
    """Owns the journal from `start` to `close`.

    `on_durable(row)` tells that all rows up to it are on disk; `on_full(error)` that the disk is
    full and the epoch is over; `on_failed(error)` that the journal can no longer be used. All three
    run through `notify`.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        notify: Notify,
        on_durable: Callable[[int], None],
        on_full: Callable[[Exception], None],
        on_failed: Callable[[Exception], None],
    ) -> None:
        self._journal = journal
        self._notify = notify
        self._on_durable = on_durable
        self._on_full = on_full
        self._on_failed = on_failed
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="headrace-journal", daemon=True)
        self._broken_epoch = -1
        self.latency = Histogram()  # of commits of rows

    def start(self) -> None:
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Have a task done after all that were submitted before it."""
        self._tasks.put(task)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Commit what was submitted, then close the journal.

        Returns at once; `running` is False when it is done.
        """
        self._tasks.put(None)
        if self._thread.ident is None:
            self._journal.close()

    def _run(self) -> None:
        try:
            while self._commit_next():
                continue
        except Exception as error:  # whatever it is, the journal's state is no longer known
            self._notify(self._on_failed, error)
        finally:
            self._journal.close()

    def _commit_next(self) -> bool:
        """Commit what waits; False when that was the last. Who waits for it holds no rows."""
        group = [self._tasks.get()]
        while not self._tasks.empty():
            group.append(self._tasks.get())
        self._commit([task for task in group if task is not None])
        return None not in group

    def _commit(self, group: list[Task]) -> None:
        rows: list[tuple[int, bytes]] = []
        for task in group:
            if task.epoch <= self._broken_epoch:
                continue
            if task.row is not None:
                rows.append(task.row)
                continue
            if self._rows(rows, task.epoch):
                self._other(task)
            rows = []
        if rows:
            self._rows(rows, group[-1].epoch)

    def _rows(self, rows: list[tuple[int, bytes]], epoch: int) -> bool:
        """Commit rows; answers whether the epoch still stands."""
        if epoch <= self._broken_epoch:
            return False
        if not rows:
            return True
        began = time.perf_counter()
        try:
            self._journal.commit(rows)
        except JournalFull as error:
            self._full(epoch, error)
            return False
        self.latency.observe(time.perf_counter() - began)
        self._notify(self._on_durable, rows[-1][0])
        return True

    def _other(self, task: Task) -> None:
        change, result = task.transaction, None
        try:
            if change is not None:
                self._journal.commit(
                    plan=change.plan,
                    record=change.record,
                    put=change.put,
                    delete=change.delete,
                    drop_rows=change.drop_rows,
                )
            elif task.job is not None:
                result = task.job(self._journal)
        except JournalFull as error:
            self._full(task.epoch, error)
            return
        if task.done is not None:
            self._notify(task.done, result)

    def _full(self, epoch: int, error: Exception) -> None:
        self._broken_epoch = epoch
        self._notify(self._on_full, error)


class LoopJournal:
    """The journal as the event loop sees it: what is submitted is on disk later, in that order.

    Rows up to `durable_row` are on disk; whoever waits for a later one gets one answer, that it is
    or why it will not be. When the disk is full, or the state in memory is wrong (`rebuild`), the
    epoch ends: what is not durable is dropped, and nothing `guard`ed in that epoch runs any more.
    Until `take_up` has got what the journal holds, as `recover` reads it in the journal's thread,
    events are refused with `rebuilding`. A `failure` is for good.
    """

    def __init__(
        self,
        journal: Journal,
        *,
        loop: asyncio.AbstractEventLoop,
        recover: Callable[[Journal], Recovered],
        take_up: Callable[[Recovered], None],
        retry_seconds: float,
    ) -> None:
        self._loop, self._retry_seconds = loop, retry_seconds
        self._recover, self._take_up = recover, take_up
        self._waiting: deque[tuple[int, Callable[[Exception | None], None]]] = deque()
        self.committer = Committer(
            journal,
            notify=self.notify,
            on_durable=self._on_durable,
            on_full=self._on_full,
            on_failed=self.fail,
        )
        self.submitted_row = self.durable_row = journal.last_row
        self.epoch = 0
        self.rebuilding: Refusal | None = None
        self.rebuilds = 0
        self.failure: Exception | None = None
        self.failed = asyncio.Event()

    @property
    def is_usable(self) -> bool:
        """Whether anything that is submitted now may become durable."""
        return self.rebuilding is None and self.failure is None

    # --- submitting --------------------------------------------------------------------------

    def append(self, blob: bytes) -> int:
        """Submit a row; answers its number, which `durable_row` will reach."""
        self.submitted_row += 1
        self.committer.submit(Task(self.epoch, row=(self.submitted_row, blob)))
        return self.submitted_row

    def transact(self, change: Transaction, then: Callable[[], None]) -> None:
        """Submit a change; `then` runs once it is durable, unless the epoch ended before."""
        done = self.guard(lambda _: then())
        self.committer.submit(Task(self.epoch, transaction=change, done=done))

    async def ask(self, job: Callable[[Journal], T]) -> T:
        """Run a short job on the journal, after all that was submitted so far."""
        if self.failure is not None:
            raise CollectorFailed(str(self.failure))
        answer: asyncio.Future[T] = self._loop.create_future()

        def tell(found: T) -> None:
            if not answer.done():  # nobody waits any more
                answer.set_result(found)

        self.committer.submit(Task(self.epoch, job=job, done=tell))
        return await answer

    def guard(self, function: Callable[[T], None]) -> Callable[[T], None]:
        """The function as long as this epoch lasts; nothing from then on."""
        epoch = self.epoch

        def run(value: T) -> None:
            if epoch == self.epoch:
                function(value)

        return run

    # --- waiting -----------------------------------------------------------------------------

    async def durable(self, row: int) -> None:
        """Wait until journal row `row` is on disk.

        Raises Refusal (disk_full) when it will not be, CollectorFailed when the journal is gone.
        """
        if self.failure is not None or row > self.durable_row:
            await self.when_durable(row)

    def when_durable(self, row: int) -> asyncio.Future[None]:
        """The same as a future, which hears from here on what becomes of the row."""
        future = self._loop.create_future()

        def told(lost: Exception | None) -> None:
            if future.done():  # nobody waits any more
                return
            if lost is None:
                future.set_result(None)
            else:
                future.set_exception(lost)

        self.tell(row, told)
        return future

    def tell(self, row: int, told: Callable[[Exception | None], None]) -> None:
        """Call `told` with None once a row is on disk, or with the error when it will not be."""
        if self.failure is not None:
            told(CollectorFailed(str(self.failure)))
        elif row <= self.durable_row:
            told(None)
        else:
            self._waiting.append((row, told))

    # --- what the threads report -------------------------------------------------------------

    def notify(self, function: Callable[..., Any], *args: Any) -> None:
        """Run a function on the loop, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.call, function, *args)

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """What the threads report must not get lost in an error: then the collector is over."""
        try:
            function(*args)
        except Exception as error:
            log.exception("the collector cannot go on")
            self.fail(error)

    def _on_durable(self, row: int) -> None:
        self.durable_row = row
        waiting = self._waiting
        while waiting and waiting[0][0] <= row:
            waiting.popleft()[1](None)

    def _on_full(self, error: Exception) -> None:
        log.error("journal: %s; refusing events until there is room", error)
        self._lose(disk_full())
        self.rebuild(disk_full(), after=self._retry_seconds)

    def rebuild(self, meanwhile: Refusal, *, after: float = 0.0) -> None:
        """Throw the state away and read it back from the journal; requests hear `meanwhile`."""
        self.rebuilding = meanwhile
        self.rebuilds += 1
        self.epoch += 1
        task = Task(self.epoch, job=self._recover, done=self.guard(self._rebuilt))
        self._loop.call_later(after, self.committer.submit, task)

    def _rebuilt(self, recovered: Recovered) -> None:
        self.submitted_row = self.durable_row = recovered.last_row
        self.rebuilding = None
        self._take_up(recovered)

    def fail(self, error: Exception) -> None:
        """Nothing that waits becomes durable any more, nor anything that comes."""
        if self.failure is None:
            self.failure = error
        self._lose(CollectorFailed(str(error)))
        self.failed.set()

    def _lose(self, error: Exception) -> None:
        while self._waiting:
            self._waiting.popleft()[1](error)
