"""A scenario: an invariant, sizes, and a function from a trial to a verdict.

A scenario is a module of this folder that defines `SCENARIO` and is listed in `NAMES`. It runs once
on the unmodified build, where its invariant must hold, and once for every broken build that names
it (see `mutants`), where it must find that build's symptom.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tests.collector_process import PLAIN
from tests.faults.mutants import Mutant, unbroken

NAMES = (
    "crash",
    "decisions",
    "damage",
    "power_loss",
    "syscalls",
    "full_disk",
    "network",
    "drain",
    "clock",
    "slow_writer",
    "two_collectors",
    "moved_root",
    "soak",
    "simulation",
    "restore",
    "publishing",
    "compaction",
    "maintenance",
    "spool_kills",
    "spool_disk",
)
"""The modules that define a SCENARIO, in the order in which they run."""

LOOP = (
    "trainer_kills",
    "publish_kills",
    "publishers",
    "damaged_shards",
    "damaged_checkpoints",
    "starved",
    "weights_power_loss",
    "whole_restore",
    "two_trainers",
    "trainer_under_up",
    "keyed_retries",
    "loop_kills",
)
"""The scenarios of tests/faults/loop: from the log to live weights, with a trainer."""

ATTACKS = (
    "json_bodies",
    "msgpack_bodies",
    "long_texts",
    "arrow_streams",
    "raw_sockets",
    "floods",
    "costly_bodies",
    "schema",
)
"""The scenarios of tests/attack, which `make attack` runs."""

SHOWN = 5
"""The number of faults of each kind that a report shows."""


@dataclass(frozen=True)
class Trial:
    """One run of a scenario. `size` is in the scenario's own unit.

    `deadline` (of `time.monotonic`) is when a quick run begins no more work; its counts show how
    far it came.
    """

    seed: int
    folder: Path
    size: int
    mutant: Mutant | None = None
    deadline: float = float("inf")
    symptoms: frozenset[str] = frozenset()  # the kinds of fault that the broken build must show

    @property
    def program(self) -> tuple[str, ...]:
        """The words that start the collector, instead of `-m` PLAIN for a broken build."""
        if self.mutant is None:
            return ("-m", PLAIN)
        return ("-m", "tests.faults.launcher", self.mutant.name, PLAIN)

    def planted(self) -> AbstractContextManager[None]:
        """Apply the broken build to this process for the duration of the block."""
        return unbroken() if self.mutant is None else self.mutant.applied()

    @property
    def in_time(self) -> bool:
        return time.monotonic() < self.deadline

    def is_caught(self, verdict: Verdict) -> bool:
        """Whether a broken build has shown its symptom, so that the run may stop."""
        return not self.symptoms.isdisjoint(verdict.faults)

    def goes_on(self, done: float, verdict: Verdict) -> bool:
        """Whether a scenario that has done this much should do more."""
        return done < self.size and self.in_time and not self.is_caught(verdict)


@dataclass
class Verdict:
    """The counts, and each kind of violation found, with a few examples."""

    counts: dict[str, float] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.faults

    def count(self, name: str, more: float = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + more

    def require(self, holds: bool, kind: str, text: object) -> None:
        """Note a violation of this kind unless the condition holds."""
        if not holds:
            found = self.faults.setdefault(kind, [])
            if len(found) < SHOWN:
                found.append(str(text)[:300])


Run: TypeAlias = Callable[[Trial], Verdict]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """`quick`, `long` and `planted` are sizes: of the two targets, and of a run that only has to
    find a planted fault. `seconds`: when a quick run stops adding."""

    name: str
    law: str
    unit: str
    quick: int
    long: int
    planted: int
    run: Run
    seconds: float = 45.0


def load(name: str) -> Scenario:
    """The scenario of that name. Raises SystemExit, which names the others."""
    every = (*NAMES, *LOOP, *ATTACKS)
    if name not in every:
        sys.exit(f"scenario: expected one of {', '.join(every)}, got {name!r}")
    folder = {**dict.fromkeys(ATTACKS, "attack"), **dict.fromkeys(LOOP, "faults.loop")}
    module = f"tests.{folder.get(name, 'faults')}.{name}"
    scenario: Scenario = importlib.import_module(module).SCENARIO
    return scenario
