"""Return freed memory to the operating system after a load peak.

The C library keeps free memory between blocks that are in use. After a peak of bodies, open
episodes or parts this can be many times what is needed, so the library is asked to return it.
"""

from __future__ import annotations

import asyncio

from ingest.collector.collector import Collector
from ingest.web.limits import Budget
from storage.system.memory import return_memory

LOOK_SECONDS = 1.0

MUCH = 2_000_000
"""Bytes that a peak must have for memory to be returned after it."""


class Ebb:
    """Detects that a sum of bytes has fallen from above `MUCH` to less than half."""

    def __init__(self) -> None:
        self._peak = 0

    def fell(self, most: int, now: int) -> bool:
        """`most`: the peak since the last call; `now`: the current sum. True once per peak."""
        self._peak = max(self._peak, most, now)
        if self._peak < MUCH or now > self._peak // 2:
            return False
        self._peak = now
        return True


class MemoryWatch:
    """Watches the memory of a collector and of its requests' bodies."""

    def __init__(self, collector: Collector, bodies: Budget) -> None:
        self._collector, self._bodies, self._ebb = collector, bodies, Ebb()

    async def follow(self) -> None:
        """Return freed memory after each peak, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            kept = self._collector.sealing.pending_bytes + self._collector.assembler.open_bytes
            if self._ebb.fell(kept + self._bodies.peak(), kept + self._bodies.held):
                return_memory()
