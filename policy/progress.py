"""How long work tells how far it is."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Progress", "no_progress"]


class Progress(Protocol):
    """Called as long work goes on: what is done, how far, of how much (None: not known)."""

    def __call__(self, what: str, done: int, total: int | None, /) -> None: ...


def no_progress(what: str, done: int, total: int | None, /) -> None:
    """For those who do not want to know."""
