"""How long to wait before the next try after failures: longer each time, up to a limit."""

from __future__ import annotations

__all__ = ["Backoff"]


FIRST_SECONDS, MOST_SECONDS = 0.5, 30.0


class Backoff:
    """Delays in seconds that double, from the first to the longest; `reset` after a success."""

    def __init__(self) -> None:
        self.tries = 0

    def failed(self) -> float:
        """Count a failure, and return the seconds to wait before the next try."""
        seconds = min(FIRST_SECONDS * 2.0 ** min(self.tries, 60), MOST_SECONDS)
        self.tries += 1
        return seconds

    def reset(self) -> None:
        self.tries = 0
