"""Planted broken builds. Each names the scenarios that have to catch it, and the symptoms.

    @mutant(crash="lost")
    def ack_before_commit(patch: Patch) -> None:
        '''An answer is sent before its commit.'''
        patch.method(LoopJournal, "durable", ...)

A mutant is planted in a process: by `launcher` in a collector and its shard writer, by `applied()`
in the scenario's own. A mutant whose target does not exist (any more) is an error, not a no-op.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

FILES = (
    "planted",
    "planted_acting",
    "planted_attack",
    "planted_disk",
    "planted_process",
    "planted_spool",
    "planted_tracks",
    "planted_weights",
    "planted_compaction",
    "loop.planted_edge",
    "loop.planted_weights",
    "loop.planted_learning",
)
"""The modules of this folder that register mutants; those that load most come last."""

DELAY_SECONDS = 0.2

Plant: TypeAlias = Callable[["Patch"], None]


class MutantError(Exception):
    """A mutant that cannot be planted would prove nothing."""


@dataclass
class Patch:
    """Replaces methods and functions, and restores them.

    `delay`: how long a planted fault keeps its window open in a process that is killed at random; a
    simulation needs none.
    """

    delay: float = 0.0
    _undo: list[tuple[Any, str, Any]] = field(default_factory=list)

    def replace(self, owner: Any, name: str, broken: Callable[..., Any]) -> Callable[..., Any]:
        """Replace a class's method or a module's function by `broken`; return the original."""
        original = vars(owner).get(name)
        if original is None:
            raise MutantError(f"{owner.__name__} has no {name}: the mutant must follow the code")
        self._undo.append((owner, name, original))
        setattr(owner, name, broken)
        sound: Callable[..., Any] = original
        return sound

    def original(self, owner: Any, name: str) -> Callable[..., Any]:
        """The current method or function, for a mutant that calls it."""
        if name not in vars(owner):
            raise MutantError(f"{owner.__name__} has no {name}: the mutant must follow the code")
        sound: Callable[..., Any] = vars(owner)[name]
        return sound

    def wait(self, times: float = 1.0) -> None:
        if self.delay:
            threading.Event().wait(times * self.delay)

    def undo(self) -> None:
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)


@dataclass(frozen=True)
class Mutant:
    """A broken build: `symptoms` are scenario -> the kind of fault that it must show there, or
    several kinds of which it must show one."""

    name: str
    text: str
    symptoms: Mapping[str, str | tuple[str, ...]]
    plant: Plant

    def symptoms_of(self, scenario: str) -> frozenset[str]:
        """The kinds of fault of which the scenario must report one; empty if none is named."""
        kinds = self.symptoms.get(scenario, ())
        return frozenset([kinds] if isinstance(kinds, str) else kinds)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        patch = Patch()
        try:
            self.plant(patch)
            yield
        finally:
            patch.undo()


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """The build as it is."""
    yield


_REGISTERED: dict[str, Mutant] = {}


def mutant(**symptoms: str | tuple[str, ...]) -> Callable[[Plant], Plant]:
    """Register a mutant under its function's name."""

    def register(plant: Plant) -> Plant:
        name = plant.__name__.replace("_", "-")
        if name in _REGISTERED:
            raise MutantError(f"{name}: expected one broken build of that name, got a second")
        _REGISTERED[name] = Mutant(name, (plant.__doc__ or "").strip(), symptoms, plant)
        return plant

    return register


def every() -> Mapping[str, Mutant]:
    """All mutants by name."""
    for file in FILES:
        importlib.import_module(f"tests.faults.{file}")
    return _REGISTERED


def find(name: str) -> Mutant:
    """The mutant of that name. Raises SystemExit, which names the others.

    Loads no more files than it takes: a collector needs no torch.
    """
    for file in FILES:
        importlib.import_module(f"tests.faults.{file}")
        if name in _REGISTERED:
            return _REGISTERED[name]
    raise SystemExit(f"mutant: expected one of {', '.join(_REGISTERED)}, got {name!r}")
