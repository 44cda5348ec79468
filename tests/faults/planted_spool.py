"""Broken builds of the client's spool."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from ingest.delivery import spool, spool_frames
from ingest.delivery.outbox import Outbox
from ingest.delivery.shared_spool import Entry, SharedSpool
from ingest.delivery.spool import Spool, SpoolSegment
from ingest.delivery.spool_frames import framed
from ingest.protocol.messages import Event
from tests.faults.mutants import Patch, mutant


@mutant(spool_kills=("lost", "left"))
def spool_forgotten(patch: Patch) -> None:
    """A process does not deliver the spooled events of earlier ones."""
    patch.replace(Spool, "find", lambda self: [])


@mutant(spool_kills="lost")
def spool_written_late(patch: Patch) -> None:
    """A call returns before its event is on disk; the next call writes both."""
    append = patch.original(SpoolSegment, "append")
    waiting: list[bytes] = []

    def late(self: SpoolSegment, contents: Any, events: Sequence[Event], **given: Any) -> int:
        numbered = enumerate(contents, self._next)
        waiting.extend(framed(kind, data, at, self.notes) for at, (kind, data) in numbered)
        first: int = append(self, (), events, **given)
        if len(waiting) > 40:
            self._write(b"".join(waiting))
            waiting.clear()
        return first

    patch.replace(SpoolSegment, "append", late)


@mutant(spool_kills="lost")
def spool_done_too_far(patch: Patch) -> None:
    """Events after the judged ones are noted as judged, too: after a kill, no process delivers
    them."""
    done = patch.original(SpoolSegment, "done")

    def further(self: SpoolSegment, numbers: Any) -> None:
        numbers = list(numbers)
        done(self, [*numbers, *(n for n in (max(numbers, default=-2) + 1,) if 0 <= n < self._next)])

    patch.replace(SpoolSegment, "done", further)


@mutant(spool_disk="lost")
def spool_never_synced(patch: Patch) -> None:
    """A call returns before a sync, despite `spool_sync`."""
    patch.replace(spool, "_sync", lambda fd: None)


@mutant(spool_kills="waited")
def flow_control_waits_for_everybody(patch: Patch) -> None:
    """An action after steps of its own process also waits for those of earlier processes."""
    drained = patch.original(Outbox, "drained")

    def everybody(self: Outbox, *given: Any, own: bool = False, **options: Any) -> bool:
        found: bool = drained(self, *given, **options)
        return found

    patch.replace(Outbox, "drained", everybody)


@mutant(spool_disk="held")
def spool_waits_for_its_disk(patch: Patch) -> None:
    """A call waits for the disk without a limit."""
    patch.replace(SharedSpool, "_patience", lambda self: 60.0)
    original = patch.original(SharedSpool, "put")

    def put(self: SharedSpool, *given: Any) -> Any:
        self.max_wait = 60.0
        return original(self, *given)

    patch.replace(SharedSpool, "put", put)


@mutant(spool_disk="lost")
def spool_late_events_forgotten(patch: Patch) -> None:
    """Events whose call did not wait are never written."""
    write = patch.original(SharedSpool, "_write")

    def forget(self: SharedSpool, entries: Sequence[Entry]) -> bool:
        with self._lock:
            for entry in [entry for entry in entries if entry.is_late]:
                entry.indices = [-1] * len(entry.events)
                self._remove(entry)
        rest = [entry for entry in entries if not entry.indices]
        written: bool = not rest or write(self, rest)
        return written

    patch.replace(SharedSpool, "_write", forget)


@mutant(spool_disk="uncounted")
def spool_ends_at_damage(patch: Patch) -> None:
    """Reading a file of a spool ends at a damaged event, and the rest is removed with it."""
    patch.replace(spool_frames, "behind_damage", lambda data, at: None)
    patch.replace(spool_frames, "is_torn", lambda rest: True)
    patch.replace(spool, "behind_damage", lambda data, at: None)
    patch.replace(spool, "is_torn", lambda rest: True)


@mutant(spool_disk=("not_raised", "lost"))
def spool_full_unsaid(patch: Patch) -> None:
    """A write that fails on a full disk counts as done."""
    write = patch.original(SpoolSegment, "_write")

    def quiet(self: SpoolSegment, *given: Any, **options: Any) -> None:
        with contextlib.suppress(OSError):
            write(self, *given, **options)

    patch.replace(SpoolSegment, "_write", quiet)


@mutant(spool_kills="doubled")
def spool_sent_anew(patch: Patch) -> None:
    """The episodes of an adopted segment are sent as new ones, even if acknowledged."""
    scan = patch.original(SpoolSegment, "_scan")
    entered = patch.original(SpoolSegment, "_entered")

    def anew(self: SpoolSegment) -> None:
        scan(self)
        self.instance, self.lacks_notes = None, False

    def renamed(self: SpoolSegment, *given: Any) -> list[tuple[int, Event]]:
        found: list[tuple[int, Event]] = entered(self, *given)
        for _, event in found:
            if self.is_foreign:
                event.episode_id += "-again"
        return found

    def noted(self: SpoolSegment, numbers: Any) -> None:
        numbers = list(numbers)
        if self.is_foreign or len(self._done) + len(numbers) >= self._next:
            original(self, numbers)

    patch.replace(SpoolSegment, "_scan", anew)
    patch.replace(SpoolSegment, "_entered", renamed)
    original = patch.replace(SpoolSegment, "done", noted)
