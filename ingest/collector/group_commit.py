"""Group commit: a thread commits journal rows, and the event loop waits for them.

`Committer` is the only thread that writes the journal. Everything submitted during a sync goes into
the next transaction, so one sync serves all waiting requests; there is no timer. `LoopJournal` is
the event loop's side: the submitted rows, the durable ones, the waiting requests, and the reaction
to a failed write.

Each submission belongs to an *epoch*. After a failed write, all submissions of the epoch that are
not durable are dropped, and a new epoch begins with reading the state back from the journal.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from ingest.collector.recovery import Recovered
from ingest.histogram import Histogram
from ingest.protocol.errors import CollectorFailed, Refusal, disk_full
from storage.errors import JournalFull
from storage.journal.records import Journal, Plan, ShardRecord

log = logging.getLogger("headrace.collector")

T = TypeVar("T")
Notify = Callable[..., Any]

FULL_SECONDS = 60.0
"""How long the disk counts as full after a write without space, if none succeeds."""


class Transaction(msgspec.Struct, frozen=True):
    """Changes of the journal other than rows, made in one transaction; see `Journal.commit`."""

    plan: Plan | None = None
    record: ShardRecord | None = None
    put: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    delete: Iterable[str] = ()
    drop_rows: Iterable[int] = ()


class Task(msgspec.Struct, frozen=True):
    """One submission: a row, a transaction, or a job to run between transactions.

    `done` is called through `notify` with the job's result, or None.
    """

    epoch: int
    row: tuple[int, bytes] | None = None
    transaction: Transaction | None = None
    job: Callable[[Journal], Any] | None = None
    done: Callable[[Any], None] | None = None


class Committer:
    """The thread that uses the journal from `start` until it has stopped.

    It calls, through `notify`: `on_durable(row)` when all rows up to `row` are on disk;
    `on_full(error)` when the disk is full and the epoch has ended; `on_failed(error)` when the
    journal can no longer be used.
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
        self.latency = Histogram()  # seconds of commits of rows

    def start(self) -> None:
        self._thread.start()

    def submit(self, task: Task) -> None:
        """Queue a task; tasks are done in the order of their submission."""
        self._tasks.put(task)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Commit what was submitted, then close the journal.

        Returns at once; `running` becomes False when it is done.
        """
        self._tasks.put(None)
        if self._thread.ident is None:
            self._journal.close()

    def _run(self) -> None:
        try:
            while self._commit_next():
                continue
        except Exception as error:  # after any error the journal's state is unknown
            self._notify(self._on_failed, error)
        finally:
            self._journal.close()

    def _commit_next(self) -> bool:
        """Commit the waiting tasks; False after the last. While it waits it refers to no rows."""
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
        """Commit rows; return False if their epoch has ended, as with a full disk."""
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
    """The event loop's side of the journal: submissions become durable later, in order.

    Rows up to `durable_row` are on disk. A caller that waits for a later row gets one result: it is
    durable, or the reason why it will not be. If the disk is full, or the state in memory is wrong
    (`rebuild`), the epoch ends: rows that are not durable are dropped, and functions `guard`ed in
    that epoch do nothing from then on. Then `recover` reads the journal in its thread, and
    `take_up` gets the result; until then events are refused with `rebuilding`. A `failure` is
    permanent.
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
        self._asking: set[asyncio.Future[Any]] = set()
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
        self._full_at = -math.inf  # when the disk had no space for the latest write
        self.failure: Exception | None = None
        self.failed = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether the disk had no space for the latest write, less than a minute ago."""
        return self._loop.time() - self._full_at < FULL_SECONDS

    @property
    def is_usable(self) -> bool:
        """Whether submissions can become durable: no failure, and no rebuilding."""
        return self.rebuilding is None and self.failure is None

    # --- submitting --------------------------------------------------------------------------

    def append(self, blob: bytes) -> int:
        """Submit a row; return its number, which `durable_row` will reach."""
        self.submitted_row += 1
        self.committer.submit(Task(self.epoch, row=(self.submitted_row, blob)))
        return self.submitted_row

    def transact(self, change: Transaction, then: Callable[[], None]) -> None:
        """Submit a change; `then` is called once it is durable, unless the epoch ends first."""
        done = self.guard(lambda _: then())
        self.committer.submit(Task(self.epoch, transaction=change, done=done))

    async def ask(self, job: Callable[[Journal], T]) -> T:
        """Run a short job on the journal's thread, after earlier submissions; return its result.

        Raises Refusal or CollectorFailed as `durable` does, if the epoch ends before, and Refusal
        while the state is rebuilt: what the caller knows may not be in the journal.
        """
        if self.failure is not None:
            raise CollectorFailed(str(self.failure))
        if self.rebuilding is not None:
            raise replace(self.rebuilding)
        answer: asyncio.Future[T] = self._loop.create_future()
        self._asking.add(answer)
        answer.add_done_callback(self._asking.discard)

        def tell(found: T) -> None:
            if not answer.done():  # else the caller does not wait any more, or has an error
                answer.set_result(found)

        self.committer.submit(Task(self.epoch, job=job, done=tell))
        return await answer

    def guard(self, function: Callable[[T], None]) -> Callable[[T], None]:
        """Wrap a function so that it does nothing after the current epoch."""
        epoch = self.epoch

        def run(value: T) -> None:
            if epoch == self.epoch:
                function(value)

        return run

    # --- waiting -----------------------------------------------------------------------------

    async def durable(self, row: int) -> None:
        """Wait until journal row `row` is on disk.

        Raises Refusal (disk_full) if it will not be, CollectorFailed if the journal has failed.
        """
        if self.failure is not None or row > self.durable_row:
            await self.when_durable(row)

    def when_durable(self, row: int) -> asyncio.Future[None]:
        """`durable` as a future, which is completed even if nobody awaits it yet."""
        future = self._loop.create_future()

        def complete(lost: Exception | None) -> None:
            if future.done():  # the caller has stopped waiting
                return
            if lost is None:
                future.set_result(None)
            else:
                future.set_exception(lost)

        self.tell(row, complete)
        return future

    def tell(self, row: int, callback: Callable[[Exception | None], None]) -> None:
        """Call `callback` with None once a row is on disk, or with the error if it will not be."""
        if self.failure is not None:
            callback(CollectorFailed(str(self.failure)))
        elif row <= self.durable_row:
            callback(None)
        else:
            self._waiting.append((row, callback))

    # --- what the threads report -------------------------------------------------------------

    def notify(self, function: Callable[..., Any], *args: Any) -> None:
        """Run a function on the loop, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.call, function, *args)

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function that a thread reports with; an error in it stops the collector."""
        try:
            function(*args)
        except Exception as error:
            log.exception("an internal error: the collector stops")
            self.fail(error)

    def _on_durable(self, row: int) -> None:
        self.durable_row, self._full_at = row, -math.inf
        waiting = self._waiting
        while waiting and waiting[0][0] <= row:
            waiting.popleft()[1](None)

    def _on_full(self, error: Exception) -> None:
        log.error("journal: %s; refusing events until there is space", error)
        self._full_at = self._loop.time()
        self._lose(disk_full())
        self.rebuild(disk_full(), after=self._retry_seconds)

    def rebuild(self, meanwhile: Refusal, *, after: float = 0.0) -> None:
        """Discard the state, and read it back from the journal after `after` seconds.

        Until then requests are refused with `meanwhile`.
        """
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
        """Mark the journal as failed: nothing becomes durable from now on."""
        if self.failure is None:
            self.failure = error
        self._lose(CollectorFailed(str(error)))
        self.failed.set()

    def _lose(self, error: Exception) -> None:
        while self._waiting:
            self._waiting.popleft()[1](error)
        for answer in self._asking:
            if not answer.done():
                answer.set_exception(error)
