"""The number of bytes per request, adapted to what the collector and proxies accept."""

from __future__ import annotations

BATCH_BYTES = 2_000_000
"""The initial size: one sync of the disk per 2 MB, and 30 s suffice at 0.6 Mbit/s. A proxy with a
lower limit (nginx by default 1 MiB) refuses the first batch."""

LEAST_BYTES = 16_384
PATIENCE = 64  # requests that go through before a larger one is tried


class BatchSize:
    """The largest size of a batch, at most `most` bytes; a larger event is sent alone.

    A refusal halves it, because the same proxy or collector would refuse the next batch too. It
    grows slowly after that, because the limit may have been lifted.
    """

    def __init__(self, most: int) -> None:
        self.nbytes = most
        self._most = most
        self._passed = 0

    def bound(self, most: int) -> None:
        """Set the upper bound to `most` bytes, the collector's limit."""
        self._most = min(self._most, most)
        self.nbytes = min(self.nbytes, self._most)

    def refused(self, nbytes: int) -> int:
        """Note that a batch of `nbytes` was too large; return the size to try next."""
        self.nbytes = min(self.nbytes, max(LEAST_BYTES, nbytes // 2))
        self._passed = 0
        return self.nbytes

    def passed(self) -> None:
        """Note that a batch was accepted."""
        if self.nbytes == self._most:
            return
        self._passed += 1
        if self._passed >= PATIENCE:
            self.nbytes = min(self._most, 2 * self.nbytes)
            self._passed = 0
