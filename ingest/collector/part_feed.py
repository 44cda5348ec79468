"""Taps: they receive parts as soon as these are durable, before their shards are written.

A part's ordinal is its position among its stream's parts, in the order of the journal's rows. So it
is known when the part is sealed, and a replay gives the same one. The collector offers the part
when the row that sealed it is durable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from storage.experience.episode import Part


class Tap(Protocol):
    """Receives every durable part with its ordinal, at least once, on the collector's loop."""

    @property
    def full(self) -> bool:
        """Whether the collector must not accept events until parts have been read."""

    def offer(self, stream: str, canonical_json: str, parts: Sequence[Part]) -> None:
        """Receive parts with consecutive ordinals. After a restart, parts come again until they are
        in shards."""

    def written(self, stream: str, first: int, last: int) -> None:
        """Note that the shard with these ordinals is written."""


class Taps:
    """Several taps as one. Each ignores the streams that are not its own."""

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
