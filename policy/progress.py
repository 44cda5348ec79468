"""Progress reports of long-running work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

OnPart: TypeAlias = Callable[[int, Mapping[str, float]], None]
"""Called with the number of updates and their latest metrics, at each tenth of a training."""


class Progress(Protocol):
    """Called while long work runs, with what is done, how much, and of how much (None: unknown)."""

    def __call__(self, what: str, done: int, total: int | None, /) -> None: ...


def no_progress(what: str, done: int, total: int | None, /) -> None:
    """A `Progress` that does nothing."""


def no_part(done: int, metrics: Mapping[str, float], /) -> None:
    """An `OnPart` that does nothing."""
