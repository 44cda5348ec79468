"""A tap: who wants parts as soon as they are durable, without waiting for their shard.

A part's ordinal is its place among the parts of its stream in the order of the journal's rows. So
it is known when the part is sealed, a replay gives it the same one, and it is durable as soon as
the row that sealed the part is: that is when the `DurableGate` lets it through.
"""

from __future__ import annotations

from collections import deque
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


class DurableGate:
    """Holds parts back until the journal row that sealed them is on disk."""

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self._held: deque[tuple[int, str, str, list[Part]]] = deque()

    def hold(self, row: int, stream: str, canonical_json: str, parts: list[Part]) -> None:
        self._held.append((row, stream, canonical_json, parts))

    def open(self, durable: int) -> None:
        """Let through what rows up to `durable` sealed."""
        held = self._held
        while held and held[0][0] <= durable:
            _, stream, canonical_json, parts = held.popleft()
            self._tap.offer(stream, canonical_json, parts)

    def forget(self) -> None:
        """The state is read back from the journal: what was durable of this comes again."""
        self._held.clear()
