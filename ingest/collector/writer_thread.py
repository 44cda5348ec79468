"""The thread that hands planned parts to the shard writer and waits for their shard.

It knows no state: it gets a plan with its parts and answers the written shard. A writer process
that died is started again and the same plan is written once more; the writer adopts a shard that it
finds complete. A disk that is full, or any other failed write, is tried again until it works. Only
a root that is not at its place any more ends the collector: nothing that is written then is its.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import msgspec

from storage.errors import FolderMoved, StorageError
from storage.experience.episode import Part
from storage.journal.sqlite_journal import Plan

log = logging.getLogger("headrace.collector")

RETRY_SECONDS = 0.5
CHECK_SECONDS = 1.0
"""So often a writer without work looks whether its folders are still in their places."""


class WrittenShard(Protocol):
    """What the collector records of a shard."""

    @property
    def path(self) -> Path: ...
    @property
    def digest(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class Writer(Protocol):
    """Writes one shard per call; `start` may be called again after a failure.

    `write` and `check` raise FolderMoved when a shard would not be where its journal is.
    """

    def start(self) -> None: ...
    def check(self) -> None: ...
    def write(self, stream: str, canonical_json: str, parts: Sequence[Part]) -> WrittenShard: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


class SealJob(msgspec.Struct, frozen=True):
    """A durable plan, the parts that it covers (with ordinals), and the spaces they are in."""

    plan: Plan
    canonical_json: str
    parts: Sequence[Part]
    done: Callable[[WrittenShard], None]


class Sealer:
    """Runs one writer. `failures` counts writes that had to be tried again.

    `on_moved(error)` tells, through `notify`, that nothing more can be written;
    `on_written(stream, parts)` is called in this thread.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        notify: Callable[..., Any],
        on_moved: Callable[[Exception], None],
        on_written: Callable[[str, Sequence[Part]], None] = lambda stream, parts: None,
    ) -> None:
        self._writer = writer
        self._notify = notify
        self._on_moved, self._on_written = on_moved, on_written
        self._jobs: SimpleQueue[SealJob | None] = SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-sealer", daemon=True)
        self.failures = 0
        self.last_error: str | None = None

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: SealJob) -> None:
        self._jobs.put(job)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Finish what was submitted, unless it fails: then it waits for the next start.

        Returns at once; `running` is False when it is done.
        """
        self._closing.set()
        self._jobs.put(None)

    def kill(self) -> None:
        """Give up on the writer, as on one that does not answer: its plan is durable."""
        self._writer.kill()

    def _run(self) -> None:
        self._try(self._writer.start)
        try:
            while self._seal_next():
                continue
        except FolderMoved as error:
            self._notify(self._on_moved, error)
        finally:
            self._writer.close()

    def _seal_next(self) -> bool:
        """Seal the next job; False when that was the last, or waits for the next start.

        Who waits for a job holds none: its parts are megabytes.
        """
        job = self._next()
        return job is not None and self._seal(job)

    def _next(self) -> SealJob | None:
        """The next job; None when there will be none. Raises FolderMoved."""
        while True:
            try:
                return self._jobs.get(timeout=CHECK_SECONDS)
            except Empty:
                self._try(self._writer.check)

    def _seal(self, job: SealJob) -> bool:
        """Write a plan's shard, then tell; answers False when it waits for the next start."""
        shard = self._write(job)
        if shard is not None:
            self._on_written(job.plan.stream, job.parts)
            self._notify(job.done, shard)
        return shard is not None

    def _write(self, job: SealJob) -> WrittenShard | None:
        while True:
            try:
                return self._writer.write(job.plan.stream, job.canonical_json, job.parts)
            except FolderMoved:
                raise
            except Exception as error:  # nothing may end this thread: shards would just stop
                self.failures += 1
                self.last_error = repr(error)
                unknown = not isinstance(error, (StorageError, OSError))
                plan = job.plan
                text = "shard %s-%s of %s: %s; trying again"
                log.warning(text, plan.first, plan.last, plan.stream, error, exc_info=unknown)
            if self._closing.wait(RETRY_SECONDS):
                return None
            self._try(self._writer.start)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except FolderMoved:
            raise
        except (StorageError, OSError) as error:
            self.last_error = str(error)
            log.warning("shard writer: %s", error)
