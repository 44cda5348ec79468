"""A spool as calls and the sending thread share it, with a thread that writes.

A call passes its events on and waits until they are on disk, for at most `max_wait`. If the disk
takes longer, the call returns and its events are *unwritten*: they are in memory, in order, within
the queue's bounds, and are written as soon as the disk answers. While a write has taken longer than
HANG_SECONDS, no call waits.

Two locks: `lock` is the queue's; the disk is never accessed with it. `disk` is held during work on
the spool, and acquired first. Logging calls never acquire it. The sending thread does not wait for
it while a write hangs (`try_disk`), with two exceptions: a new client instance has to be on disk
before it is used, and the segments of earlier processes are taken up.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from ingest.delivery.spool import Spool, SpoolSegment, encoded
from ingest.protocol.agent_names import Name, name_of
from ingest.protocol.errors import BufferFull, ClientError
from ingest.protocol.messages import Event, Start
from storage.wording import counted

log = logging.getLogger("headrace.client")

HANG_SECONDS = 1.0
CLOSE_SECONDS = 1.0
"""Seconds that `close` waits for the disk, twice at most."""

FEWEST = 1_000
"""The number of events that may be unwritten even if `max_pending` is smaller."""

LOOK_SECONDS = 1.0
"""Seconds between looks whether all files are still there; a write looks at its own."""

RETRY_SECONDS = 0.1
"""Seconds between attempts to write events whose call has returned."""


@dataclass(eq=False)
class Entry:
    """Events of one call that are to be written.

    Once they are on disk it has their `indices` (in the queue; -1: only on disk), and an `error` if
    they could not be written.
    """

    events: Sequence[Event]
    size: int
    contents: list[tuple[int, bytes]]
    since: float = field(default_factory=time.monotonic)
    indices: Sequence[int] = ()
    error: BufferFull | None = None
    is_late: bool = False  # its call has returned

    @property
    def is_settled(self) -> bool:
        return bool(self.indices) or self.error is not None


class Queue(Protocol):
    """The queue of the events that are on disk; functions are called with `lock` held.

    `changed` is notified when a call's events are written or have failed. `own_threads` must not
    wait.
    """

    lock: threading.RLock
    changed: threading.Condition
    own_threads: set[int]
    max_events: int
    max_bytes: int
    patience: float

    def number(self, events: Sequence[Event]) -> Callable[[], None]:
        """Number the starts; return a function that undoes it."""

    def has_room(self, count: int, size: int) -> bool:
        """Whether a number of events and bytes fits into the queue."""

    def enter_spooled(self, events: Sequence[Event], size: int, left: bool) -> Sequence[int]:
        """Queue written events, or leave them on disk; return their indices."""

    def full(self) -> BufferFull:
        """The error of a full spool."""


class SharedSpool:
    """Writes events, and notes which of them were judged, in the order of the calls."""

    def __init__(self, files: Spool, queue: Queue) -> None:
        self.files = files
        self.disk = threading.Lock()
        self.count = 0  # events that are not on disk yet
        self.max_wait = queue.patience
        self._max_events, self._max_bytes = max(queue.max_events, FEWEST), queue.max_bytes
        self._bytes = 0
        self._queue, self._lock = queue, queue.lock
        self._work = threading.Condition(queue.lock)
        self._entries: deque[Entry] = deque()
        self._judged: list[Event] = []
        self._on_disk = 0
        self._busy_since: float | None = None
        self._looked = 0.0
        self._trouble: BufferFull | None = None  # why late events are still not written
        self._logged_hang = False
        self._closed = False
        self.taking_up = False  # segments of earlier processes are being searched
        self._is_reading = False  # what is read is counted nowhere until it is queued
        self._thread: threading.Thread | None = None

    # --- with the lock held, or to read single values ----------------------------------------

    def put(self, events: Sequence[Event], size: int) -> Sequence[int]:
        """Have events written, wait for that, and return their indices (-1 without one yet).

        Raises BufferFull, with nothing stored, if the disk, the spool or the memory for unwritten
        events is full, and SpaceError for values that cannot be encoded.
        """
        entry = Entry(events, size, list(map(encoded, events)))
        deadline = entry.since + self.max_wait
        if not self._has_room(len(events), size):
            self._await(lambda: self._has_room(len(events), size), self._patience())
        if self._trouble is not None:
            raise self._trouble
        if self._closed:
            raise ClientError("the client is closed")
        if not self._has_room(len(events), size):
            raise BufferFull(
                f"{self.files.directory}: {counted(self.count, 'event')} ({self._bytes} bytes) "
                f"waiting for the disk; the client holds at most {self._max_events} and "
                f"{self._max_bytes} bytes"
            )
        self._ensure_running()
        count = len(events)
        self.count += count
        self._bytes += size
        self._entries.append(entry)
        self._work.notify()
        if not entry.is_settled:
            left = min(self._patience(), deadline - time.monotonic())
            self._await(lambda: entry.is_settled, max(0.0, left))
        if entry.error is not None:
            raise entry.error
        entry.is_late = not entry.indices
        return entry.indices or [-1] * len(events)

    def _await(self, ready: Callable[[], bool], seconds: float) -> None:
        if threading.get_ident() not in self._queue.own_threads:
            self._queue.changed.wait_for(ready, seconds)

    def _has_room(self, count: int, size: int) -> bool:
        if not self.count:
            return True
        return self.count + count <= self._max_events and self._bytes + size <= self._max_bytes

    @property
    def hangs(self) -> bool:
        """Whether a write has taken longer than HANG_SECONDS, so that calls do not wait."""
        since = self._busy_since
        return since is not None and time.monotonic() - since >= HANG_SECONDS

    def _patience(self) -> float:
        """The seconds that a call waits for the disk."""
        if not self.hangs:
            return self.max_wait
        if not self._logged_hang:
            self._logged_hang = True
            log.warning("%s: the disk does not answer; events wait in memory", self.files.directory)
        return 0.0

    def _ensure_running(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headrace-spool", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # no more threads, or the interpreter ends
                self._thread = None
                raise ClientError(f"the spool's thread cannot be started: {error}") from error

    def note(self, events: Collection[Event]) -> None:
        """Have it noted on disk that events were judged."""
        found = list(filter(self.files.is_spooled, events))
        if found:
            self._judged += found
            with contextlib.suppress(ClientError):  # then they are sent again, and recognised
                self._ensure_running()
            self._work.notify()

    @property
    def outside(self) -> int:
        """The number of events that are not in the queue: not written yet, or only on disk."""
        return self.files.unread + self.count

    @property
    def counts(self) -> tuple[int, int, int]:
        """(waiting events on disk, their bytes on disk, events not written yet)."""
        with self._lock:
            stranded = self.files.stranded
            return self.waiting - stranded, self.files.nbytes, self.count + stranded

    def is_unwritten(self, ids: Collection[Name] | None = None) -> bool:
        """Whether any events, or any of these episodes, are not on disk yet."""
        if not self.count:
            return False
        return ids is None or any(name_of(event) in ids for event in self.unwritten)

    def has_unread(self, *, own: bool = False) -> bool:
        """Whether events are only on disk; `own`: only those that this process has logged."""
        is_left = self.files.own_unread if own else self.taking_up or self.files.unread
        return bool(is_left or self._is_reading)

    @property
    def waiting(self) -> int:
        """The number of unacknowledged events on disk, including notes not written yet."""
        return self._on_disk - len(self._judged)

    @property
    def unwritten(self) -> Iterator[Event]:
        return (event for entry in list(self._entries) for event in entry.events)

    @property
    def newest(self) -> Entry | None:
        return self._entries[-1] if self._entries else None

    @property
    def oldest_since(self) -> float | None:
        return self._entries[0].since if self._entries else None

    # --- with `disk`, mostly in the sending thread -------------------------------------------

    @contextlib.contextmanager
    def try_disk(self) -> Iterator[bool]:
        """Acquire `disk` for the sending thread; yield False, without it, while a write hangs."""
        is_held = self.disk.acquire(blocking=False)
        while not (is_held or self.hangs):
            is_held = self.disk.acquire(timeout=RETRY_SECONDS)
        try:
            yield is_held
        finally:
            if is_held:
                self.disk.release()

    def read(self, most: int, enter: Callable[[Sequence[tuple[Event, str | None]]], None]) -> bool:
        """Have about `most` events that are only on disk queued, from one read.

        `enter` is called with the queue's lock held, with the result of `Spool.read`. Returns False
        if the disk hangs.
        """
        with self.try_disk() as is_held:
            if is_held:
                self._is_reading = True
                try:
                    found = self.files.read(most)
                    with self._lock:
                        self._count_waiting()
                        enter(found)
                finally:
                    self._is_reading = False
        return is_held

    def note_instance(self, instance: str, segment: SpoolSegment | None = None) -> None:
        """Use an instance from now on, or only for the segment of an earlier process.

        Raises BufferFull if that cannot be written to disk.
        """
        with self.try_disk() as is_held:
            if not is_held:
                raise BufferFull(f"{self.files.directory}: the disk does not answer")
            try:
                (segment or self.files).note_instance(instance)
            except OSError as error:
                raise BufferFull(f"{self.files.directory}: {error}") from error

    def take_up(self) -> list[SpoolSegment]:
        """Deliver the segments of earlier processes too; return those without an instance."""
        segments = self.files.find()
        with self.disk:
            self.files.taken_up += segments
            with self._lock:
                self._count_waiting()
        return [segment for segment in list(self.files.taken_up) if segment.instance is None]

    def _count_waiting(self) -> None:
        """Count the events on disk after work on it. With both locks held."""
        self._on_disk = self.files.waiting

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        self._queue.own_threads.add(threading.get_ident())
        try:
            self._work_off()
        finally:
            self._queue.own_threads.discard(threading.get_ident())

    def _work_off(self) -> None:
        while (found := self._next()) is not None:
            count, judged = found
            with self.disk:
                try:
                    self.files.done(judged)
                except Exception:  # the events are sent again, and recognised
                    log.exception("%s: acknowledgements cannot be recorded", self.files.directory)
                with self._lock:
                    del self._judged[: len(judged)]
                    self._count_waiting()
                    entries = list(islice(self._entries, count))
                if not entries or time.monotonic() - self._looked >= LOOK_SECONDS:
                    self._replace_gone()
                if entries and not self._write(entries) and len(entries) > 1:
                    for entry in entries:  # one of them may fit
                        if not self._write([entry]) and entry.is_late:
                            break
            self._rest()

    def _replace_gone(self) -> None:
        self._looked = time.monotonic()
        try:
            self.files.replace_gone()
        except Exception as error:  # any error: the thread must continue; the next call raises it
            log.debug("%s: %s", self.files.directory, error)

    def _next(self) -> tuple[int, list[Event]] | None:
        """(number of entries to write, judged events to note); None at the end.

        Without either once a second, to look after the files.
        """
        with self._lock:
            while not (self._entries or self._judged):
                if self._closed:
                    return None
                # a finalizer in this thread may bring work
                if not self._work.wait(LOOK_SECONDS) and self.files.waiting:
                    break
            if self._closed and self._trouble is not None:
                return None
            self._busy_since = time.monotonic()
            return len(self._entries), list(self._judged)

    def _write(self, entries: Sequence[Entry]) -> bool:
        """Write the oldest entries; return whether they are on disk. With `disk` held."""
        events = [event for entry in entries for event in entry.events]
        with self._lock:
            take_back = self._queue.number(events)
            size = sum(entry.size for entry in entries)
            left = bool(self.files.own_unread) or not self._queue.has_room(len(events), size)
        contents = [
            encoded(event) if isinstance(event, Start) else content
            for entry in entries
            for event, content in zip(entry.events, entry.contents, strict=True)
        ]
        error: BufferFull | None = None
        try:
            written = self.files.append(events, left=left, contents=contents)
        except Exception as cause:  # any error: the thread must continue
            error, written = BufferFull(f"{self.files.directory}: {cause}"), False
            error.__cause__ = cause
        with self._lock:
            self._count_waiting()
            if written:
                for entry in entries:
                    entry.indices = self._queue.enter_spooled(entry.events, entry.size, left)
                    self._remove(entry)
                self._recovered()
            else:
                take_back()
                if len(entries) == 1:
                    self._fail(entries[0], error or self._queue.full())
            self._queue.changed.notify_all()
        return written

    def _fail(self, entry: Entry, error: BufferFull) -> None:
        """Have the entry's call raise `error`, or try again if the call has returned."""
        if not entry.is_late:
            entry.error = error
            self._remove(entry)
            return
        if self._trouble is None:
            waits = counted(self.count, "event waits", "events wait")
            log.warning("%s; %s in memory for the disk", error, waits)
        self._trouble = error
        for waiting in [one for one in list(self._entries) if not one.is_late]:
            waiting.error = error
            self._remove(waiting)

    def _remove(self, entry: Entry) -> None:
        self._entries.remove(entry)
        count = len(entry.events)
        self.count -= count
        self._bytes -= entry.size

    def _recovered(self) -> None:
        if self._logged_hang or self._trouble is not None:
            log.warning("%s: writing events to disk resumed", self.files.directory)
        self._logged_hang, self._trouble = False, None

    def _rest(self) -> None:
        with self._lock:
            self._busy_since = None
            if self._trouble is not None:
                self._work.wait(RETRY_SECONDS)

    # --- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Write the remaining events, stop, and release the segments to the next process.

        If the disk hangs, they are released when this process ends.
        """
        if self._stop() and self.disk.acquire(timeout=CLOSE_SECONDS):
            try:
                self._replace_gone()
                self.files.close()
            finally:
                self.disk.release()

    def _stop(self) -> bool:
        """Write the remaining events; return whether the thread has ended."""
        with self._lock:
            self._closed = True
            self._work.notify()
        if self._thread is None:
            return True
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive() or self._entries:
            lost = counted(self.count, "event was", "events were")
            log.error("%s: %s not written", self.files.directory, lost)
        return not self._thread.is_alive()
