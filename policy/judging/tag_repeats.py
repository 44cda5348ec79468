"""Which tag has values that come again and again, so that episodes may not be independent.

found = TagRepeats()
found.add(block.tags)
found.most()          # ("user", 20.0)
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

LEAST_REPEATS = 5.0
LEAST_VALUES = 30
"""Fewer values name groups, such as countries, rather than units."""
MOST_VALUES = 10_000  # counted of each tag; of more, those with a share of all hashes
HASHES = 1 << 32


class TagRepeats:
    """The episodes of each value of each tag, or of a share of the values by their hash."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}
        self._limits: dict[str, int] = {}

    def add(self, tags: Mapping[str, Sequence[str | None]]) -> None:
        """Add n episodes: tag -> values (n,)."""
        for tag, values in tags.items():
            counts, limit = self._counts.setdefault(tag, {}), self._limits.setdefault(tag, HASHES)
            for value in values:
                if value is not None and zlib.crc32(value.encode()) < limit:
                    counts[value] = counts.get(value, 0) + 1
            while len(counts) > MOST_VALUES:
                self._limits[tag] = limit = limit // 2
                counts = {v: n for v, n in counts.items() if zlib.crc32(v.encode()) < limit}
                self._counts[tag] = counts

    def most(self) -> tuple[str, float] | None:
        """The tag whose values repeat most, with the mean number of episodes per value."""
        found = [
            (sum(counts.values()) / len(counts), tag)
            for tag, counts in self._counts.items()
            if len(counts) >= LEAST_VALUES
        ]
        repeats, tag = max(found, default=(0.0, ""))
        return (tag, repeats) if repeats >= LEAST_REPEATS else None
