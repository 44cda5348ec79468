"""How many bytes the client puts into one request, learned from what went through."""

from __future__ import annotations

BATCH_BYTES = 2_000_000
"""Aimed at: the disk syncs once for it, and 30 s are enough on 0.6 Mbit/s. A proxy that takes less
(nginx by default 1 MiB) refuses the first one."""

LEAST_BYTES = 16_384
PATIENCE = 64  # requests that go through before a larger one is tried


class BatchSize:
    """The size to cut batches at. `most` bounds it; one larger event goes alone.

    A refusal halves it, and it stays so: whatever refused it, a proxy or a limit of the collector,
    would refuse the next batch too. It grows again slowly, because the limit may have gone.
    """

    def __init__(self, most: int) -> None:
        self.nbytes = most
        self._most = most
        self._passed = 0

    def bound(self, most: int) -> None:
        """Never beyond so many bytes: what the collector says that it takes."""
        self._most = min(self._most, most)
        self.nbytes = min(self.nbytes, self._most)

    def refused(self, nbytes: int) -> int:
        """A batch of so many bytes was too large; how many to try now."""
        self.nbytes = min(self.nbytes, max(LEAST_BYTES, nbytes // 2))
        self._passed = 0
        return self.nbytes

    def passed(self) -> None:
        """A batch went through."""
        if self.nbytes == self._most:
            return
        self._passed += 1
        if self._passed >= PATIENCE:
            self.nbytes = min(self._most, 2 * self.nbytes)
            self._passed = 0
