"""How long to wait before the next try after failures: longer each time, up to a limit."""

from __future__ import annotations

import random
from dataclasses import dataclass

RETRY_FOR = 60.0
"""Seconds for which a job retries a shard that cannot be read."""
LONGEST_RETRY_AFTER = 60.0
_CHANCE = random.SystemRandom()  # does not change the program's random state


@dataclass(frozen=True)
class Backoff:
    """Delays in seconds that double from the first to the longest, with jitter.

    Jitter spreads processes that failed at the same time: half of a delay is fixed, half random.
    """

    first: float = 0.5
    longest: float = 30.0

    def delay(self, failures: int, retry_after: float | None = None) -> float:
        """Seconds to wait after `failures` failures in a row (1, 2, ...).

        A Retry-After of up to a minute is extended by up to a tenth, never shortened.
        """
        ceiling = min(self.longest, self.first * 2.0 ** min(failures - 1, 30))
        own = ceiling * (0.5 + 0.5 * _CHANCE.random())
        if retry_after is None:
            return own
        asked = min(retry_after, LONGEST_RETRY_AFTER)
        return max(own, asked * (1.0 + 0.1 * _CHANCE.random()))
