"""Log lines of one kind, so many a second at most: what a stranger can cause must not fill a disk.

Those beyond are counted, and the next line tells how many. Time is an argument, in seconds of a
clock that never jumps.
"""

from __future__ import annotations

import logging

from ingest.access.tokens import Allowance
from ingest.protocol.agent_names import Name, label

log = logging.getLogger("headrace.collector")

BROKEN_RATE = 10.0
"""Broken episodes that have a line of their own a second, at most."""


class FewLines:
    """Whether a line is written. `rate`: a second, and at once after a quiet time."""

    def __init__(self, rate: float, *, since: float = 0.0) -> None:
        self._allowance = Allowance(rate, since=since)
        self._untold = 0

    def take(self, now: float) -> int | None:
        """How many were kept back before this line; None: it is kept back, too."""
        if self._allowance.wait(now) > 0.0:
            self._untold += 1
            return None
        self._allowance.charge(1)
        untold, self._untold = self._untold, 0
        return untold

    def rest(self, now: float) -> int:
        """How many were kept back, 0 until there is room for a line that says so."""
        if not self._untold or self._allowance.wait(now) > 0.0:
            return 0
        return self.take(now) or 0


class BrokenLines:
    """The lines of episodes that break: an import may break as many as it has rows."""

    def __init__(self) -> None:
        self._few = FewLines(BROKEN_RATE)

    def tell(self, name: Name, cause: str, now: float) -> None:
        """One is broken."""
        untold = self._few.take(now)
        if untold is not None:
            self._say(untold)
            log.warning("episode %s is broken: %s", label(name), cause)

    def rest(self, now: float) -> None:
        """Say how many had no line, once there is room for that."""
        self._say(self._few.rest(now))

    def _say(self, untold: int) -> None:
        if untold:
            log.warning("%d more episodes are broken, for which there is no line", untold)
