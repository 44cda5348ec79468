"""Count durations for a scrape: a few comparisons and one addition per observation."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds of the buckets in seconds; a last bucket has no bound."""


class Histogram:
    """Durations by bucket. One thread observes; any other may read."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, number of durations up to it), cumulative as in Prometheus."""
        names = [*map(str, BOUNDS), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))
