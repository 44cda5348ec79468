"""Rate limits of log lines, so that callers cannot fill the disk with them.

Lines over the limit are counted, and the next line gives the number. Times are in seconds of a
monotonic clock.
"""

from __future__ import annotations

import logging

from ingest.access.tokens import Allowance
from ingest.protocol.agent_names import Name, label
from storage.wording import counted

log = logging.getLogger("headrace.collector")

BROKEN_RATE = 10.0
"""Lines about broken episodes per second, at most."""


class FewLines:
    """Decides whether a line is written. `rate`: lines per second, and the largest burst."""

    def __init__(self, rate: float, *, since: float = 0.0) -> None:
        self._allowance = Allowance(rate, since=since)
        self._untold = 0

    def take(self, now: float) -> int | None:
        """How many lines were withheld before this one; None if this one is withheld too."""
        if self._allowance.wait(now) > 0.0:
            self._untold += 1
            return None
        self._allowance.charge(1)
        untold, self._untold = self._untold, 0
        return untold

    def rest(self, now: float) -> int:
        """How many lines were withheld; 0 while the rate does not allow a line about them."""
        if not self._untold or self._allowance.wait(now) > 0.0:
            return 0
        return self.take(now) or 0


class BrokenLines:
    """Log lines about broken episodes; an import can break as many episodes as it has rows."""

    def __init__(self) -> None:
        self._few = FewLines(BROKEN_RATE)

    def tell(self, name: Name, cause: str, now: float) -> None:
        """Log that episode `name` is broken, if the rate allows it."""
        untold = self._few.take(now)
        if untold is not None:
            self._say(untold)
            log.warning("episode %s is broken: %s", label(name), cause)

    def rest(self, now: float) -> None:
        """Log how many broken episodes had no line, if the rate allows it."""
        self._say(self._few.rest(now))

    def _say(self, untold: int) -> None:
        if untold:
            broken = counted(untold, "more episode is", "more episodes are")
            log.warning("%s broken (not logged individually)", broken)
