"""Progress reports of long-running work."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Progress", "no_progress"]


class Progress(Protocol):
    """Called while long work runs, with what is done, how much, and of how much (None: unknown)."""

    def __call__(self, what: str, done: int, total: int | None, /) -> None: ...


def no_progress(what: str, done: int, total: int | None, /) -> None:
    """A `Progress` that does nothing."""
