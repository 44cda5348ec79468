"""The one thread that writes the journal: group commit.

Whatever was submitted while a sync ran goes into the next transaction, so that one sync serves all
that waited for it; there is no timer. Results come back through `notify`, which runs a function on
the collector's own thread.

After a failed write everything submitted before the failure was noticed is dropped: each submission
carries the *epoch* it was made in, and the collector begins a new epoch once it has rebuilt its
state from the journal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from ingest.histogram import Histogram
from storage.errors import JournalFull
from storage.journal.sqlite_journal import Journal, Plan, ShardRecord

T = TypeVar("T")
Notify = Callable[..., Any]


class Transaction(msgspec.Struct, frozen=True):
    """What changes together, beside rows."""

    plan: Plan | None = None
    record: ShardRecord | None = None
    put: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    delete: Iterable[str] = ()
    drop_rows: Iterable[int] = ()


class _Task(msgspec.Struct, frozen=True):
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
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="headrace-journal", daemon=True)
        self._broken_epoch = -1
        self.latency = Histogram()  # of commits of rows
        self.epoch = 0
        self.next_row = journal.last_row + 1

    def start(self) -> None:
        self._thread.start()

    def append(self, blob: bytes) -> int:
        """Submit a row; answers its number, which `on_durable` will reach."""
        row = self.next_row
        self.next_row = row + 1
        self._tasks.put(_Task(self.epoch, row=(row, blob)))
        return row

    def transact(self, transaction: Transaction, done: Callable[[None], None]) -> None:
        """Submit a change; `done(None)` runs through `notify` once it is durable."""
        self._tasks.put(_Task(self.epoch, transaction=transaction, done=done))

    def call(self, job: Callable[[Journal], T], done: Callable[[T], None]) -> None:
        """Run `job` on the journal between transactions; `done` gets its result."""
        self._tasks.put(_Task(self.epoch, job=job, done=done))

    def new_epoch(self) -> None:
        """Drop whatever was submitted so far and is not committed; submissions count again."""
        self.epoch += 1

    def restart_rows(self, last_row: int) -> None:
        """Number rows from the journal's own end again."""
        self.next_row = last_row + 1

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

    def _commit(self, group: list[_Task]) -> None:
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

    def _other(self, task: _Task) -> None:
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
