"""Broken builds around time, shutdown, locks and memory."""

from __future__ import annotations

import time
from typing import Any

from ingest.collector.collector import Collector
from ingest.collector.writer_thread import Sealer
from ingest.episodes.assembler import EpisodeAssembler
from ingest.episodes.sealed_parts import Sealed
from ingest.server.supervisor import PAUSE_SECONDS, Deaths
from storage.system.files import FileLock
from tests.faults.mutants import Patch, mutant


@mutant(drain="slow")
def drain_waits_for_the_writer(patch: Patch) -> None:
    """A shard writer that does not respond delays the shutdown."""
    patch.replace(Sealer, "kill", lambda self: None)


@mutant(crash="slow")
def every_death_is_one_of_many(patch: Patch) -> None:
    """A supervisor pauses after every death, not only after many in a row, and for longer."""
    patch.replace(Deaths, "pause", lambda self, now: 3 * PAUSE_SECONDS)


@mutant(two_collectors="unclear")
def lock_ignored(patch: Patch) -> None:
    """Every request for a lock succeeds: only SQLite still refuses, without naming the holder."""
    patch.replace(FileLock, "acquire", lambda self, **how: True)


@mutant(clock=("late", "refused"))
def wall_clock(patch: Patch) -> None:
    """Timeouts follow the wall clock: open episodes end at once, or parts wait for years."""
    begin = patch.original(Collector, "__init__")

    def broken(self: Collector, *given: Any, **named: Any) -> None:
        begin(self, *given, **named, clock=time.time)

    patch.replace(Collector, "__init__", broken)


@mutant(slow_writer="grew")
def no_back_pressure(patch: Patch) -> None:
    """The number of parts that wait for their shard has no limit."""
    begin = patch.original(Collector, "__init__")

    def broken(self: Collector, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        self._max_pending = 2**40

    patch.replace(Collector, "__init__", broken)


@mutant(soak="blocks")
def state_left_per_episode(patch: Patch) -> None:
    """A few bytes are kept for every episode."""
    release = patch.original(EpisodeAssembler, "release")
    kept: list[str] = []

    def broken(self: EpisodeAssembler, sealed: Sealed) -> Any:
        kept.append(f"episode {sealed.key}")
        return release(self, sealed)

    patch.replace(EpisodeAssembler, "release", broken)
