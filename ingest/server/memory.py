"""Memory that goes back to the system once those are gone whom it was for.

The C library keeps what lies between blocks that are in use. After a crowd of bodies, open episodes
or parts that would be many times what is needed from then on, so it is asked to give it back.
"""

from __future__ import annotations

import asyncio

from ingest.collector.collector import Collector
from ingest.web.limits import Budget
from storage.system.memory import return_memory

LOOK_SECONDS = 1.0

MUCH = 2_000_000
"""Bytes that are worth asking for."""


class Ebb:
    """Whether a sum of bytes has fallen from much to less than half of it."""

    def __init__(self) -> None:
        self._peak = 0

    def fell(self, most: int, now: int) -> bool:
        """`most`: of all bytes since the last look; `now`: of these. Asks once for each time."""
        self._peak = max(self._peak, most, now)
        if self._peak < MUCH or now > self._peak // 2:
            return False
        self._peak = now
        return True


class MemoryWatch:
    """Looks after the memory of a collector and of its requests' bodies."""

    def __init__(self, collector: Collector, bodies: Budget) -> None:
        self._collector, self._bodies, self._ebb = collector, bodies, Ebb()

    async def follow(self) -> None:
        """Give back what is free, each time that much is, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            kept = self._collector.sealing.pending_bytes + self._collector.assembler.open_bytes
            if self._ebb.fell(kept + self._bodies.peak(), kept + self._bodies.held):
                return_memory()
