"""How long to wait before the next try after failures: longer each time, up to a limit."""

from __future__ import annotations

__all__ = ["Backoff"]


class Backoff:
    """Delays in seconds that double from `first` up to `most`; call `reset` after a success."""

    def __init__(self, first: float = 0.5, most: float = 30.0) -> None:
        self._first, self._most = first, most
        self.tries = 0

    def failed(self) -> float:
        """Count a failure, and return the seconds to wait before the next try."""
        seconds = min(self._first * 2.0 ** min(self.tries, 60), self._most)
        self.tries += 1
        return seconds

    def reset(self) -> None:
        self.tries = 0
