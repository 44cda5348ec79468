"""A tap: who wants parts as soon as they are durable, without waiting for their shard.

A part's ordinal is its place among the parts of its stream in the order of the journal's rows. So
it is known when the part is sealed, a replay gives it the same one, and it is durable as soon as
the row that sealed the part is: that is when the collector offers it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from storage.experience.episode import Part


class Tap(Protocol):
    """Gets every durable part, with its ordinals, at least once; called on the collector's loop."""

    @property
    def full(self) -> bool:
        """Whether no more events may be taken until somebody has read."""

    def offer(self, stream: str, canonical_json: str, parts: Sequence[Part]) -> None:
        """Parts of consecutive ordinals that a restart would find again, until they are written."""

    def written(self, stream: str, first: int, last: int) -> None:
        """The shard of these ordinals is in its place."""


class Taps:
    """Several taps as one; each passes by what is not for it."""

    def __init__(self, taps: Iterable[Tap]) -> None:
        self._taps = tuple(taps)

    @property
    def full(self) -> bool:
        return any(tap.full for tap in self._taps)

    def offer(self, stream: str, canonical_json: str, parts: Sequence[Part]) -> None:
        for tap in self._taps:
            tap.offer(stream, canonical_json, parts)

    def written(self, stream: str, first: int, last: int) -> None:
        for tap in self._taps:
            tap.written(stream, first, last)
