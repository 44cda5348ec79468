"""The thread that passes planned parts to the shard writer and waits for their shards.

It has no state: it gets a plan with its parts and reports the written shard. A writer process that
died is started again, and writes the same plan again; a complete shard that exists is used. Failed
writes, as on a full disk, are tried again until they succeed. Only a root that is no longer at its
path stops the collector, because files written then are not part of the root.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import msgspec

from storage.errors import FolderMoved, StorageError
from storage.experience.episode import Part
from storage.experience.part_columns import PartColumns
from storage.journal.records import Plan
from storage.shards.names import ShardInfo

log = logging.getLogger("headrace.collector")

RETRY_SECONDS = 0.5
CHECK_SECONDS = 1.0
"""Seconds between an idle writer's checks that its folders are still at their paths."""


class Writer(Protocol):
    """Writes one shard per call; `start` may be called again after a failure.

    `write` and `check` raise FolderMoved if the shard folder is no longer under the journal's root.
    """

    def start(self) -> None: ...
    def check(self) -> None: ...
    def write(
        self, stream: str, canonical_json: str, parts: Sequence[Part | PartColumns]
    ) -> ShardInfo: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


class SealJob(msgspec.Struct, frozen=True):
    """A durable plan, its parts (with ordinals), and their spaces as canonical JSON."""

    plan: Plan
    canonical_json: str
    parts: Sequence[Part | PartColumns]
    done: Callable[[ShardInfo], None]


class Sealer:
    """Runs one writer. `failures` counts failed writes, which are tried again.

    `on_moved(error)` is called through `notify` when nothing more can be written;
    `on_written(stream, parts)` is called in this thread.
    """

    def __init__(
        self,
        writer: Writer,
        *,
        notify: Callable[..., Any],
        on_moved: Callable[[Exception], None],
        on_written: Callable[[str, Sequence[Part | PartColumns]], None] = lambda stream, parts: (
            None
        ),
    ) -> None:
        self._writer = writer
        self._notify = notify
        self._on_moved, self._on_written = on_moved, on_written
        self._jobs: SimpleQueue[SealJob | None] = SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-sealer", daemon=True)
        self.failures = 0

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: SealJob) -> None:
        self._jobs.put(job)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """Finish the submitted jobs. Failed ones are done after the next start of a collector.

        Returns at once; `running` becomes False when it is done.
        """
        self._closing.set()
        self._jobs.put(None)

    def kill(self) -> None:
        """Kill a writer that does not answer. No data is lost: its plan is durable."""
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
        """Seal the next job; False after the last one, or if it must wait for the next start.

        While it waits it refers to no job, because parts can be megabytes.
        """
        job = self._next()
        return job is not None and self._seal(job)

    def _next(self) -> SealJob | None:
        """The next job; None after the last one. Raises FolderMoved."""
        while True:
            try:
                return self._jobs.get(timeout=CHECK_SECONDS)
            except Empty:
                self._try(self._writer.check)

    def _seal(self, job: SealJob) -> bool:
        """Write and report a plan's shard; return False if it must wait for the next start."""
        shard = self._write(job)
        if shard is not None:
            self._on_written(job.plan.stream, job.parts)
            self._notify(job.done, shard)
        return shard is not None

    def _write(self, job: SealJob) -> ShardInfo | None:
        while True:
            try:
                return self._writer.write(job.plan.stream, job.canonical_json, job.parts)
            except FolderMoved:
                raise
            except Exception as error:  # any error: without this thread no shard is written
                self.failures += 1
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
        except Exception as error:  # any error: without this thread no shard is written
            unknown = not isinstance(error, (StorageError, OSError))
            log.warning("shard writer: %s", error, exc_info=unknown)
