"""Memory: whether the limits fit into it, and what is returned after a load peak.

The C library keeps free memory between blocks that are in use. After a peak of bodies, open
episodes or parts this can be many times what is needed, so the library is asked to return it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator

from ingest.collector.collector import Collector
from ingest.web.limits import Budget, ServerLimits
from storage.system.memory import MemoryCap, memory_caps, return_memory

log = logging.getLogger("headrace.server")

LOOK_SECONDS = 1.0

MUCH = 2_000_000
"""Bytes that a peak must have for memory to be returned after it."""


SPARE = 20_000_000
"""Bytes left free for connections, metrics and whatever else has no limit of its own."""
WRITER = 250_000_000
"""Bytes of the shard writer, which is in the same control group but has an address space of its
own."""


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

    def __init__(self, collector: Collector, bodies: Budget, limits: ServerLimits) -> None:
        self._collector, self._bodies, self._ebb = collector, bodies, Ebb()
        self._limits = limits

    async def follow(self) -> None:
        """Say once if the limits exceed the memory; return freed memory after each peak."""
        for text in shortages(self._limits, memory_caps()):
            log.warning("%s", text)
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            kept = self._collector.sealing.pending_bytes + self._collector.assembler.open_bytes
            if self._ebb.fell(kept + self._bodies.peak(), kept + self._bodies.held):
                return_memory()


def shortages(limits: ServerLimits, caps: Iterable[MemoryCap]) -> Iterator[str]:
    """A text for the tightest cap that is below what a collector at these limits may take."""
    rooms = {
        cap: cap.size - cap.used - SPARE - (WRITER if cap.name == "cgroup" else 0) for cap in caps
    }
    cap = min(rooms, key=lambda cap: rooms[cap], default=None)
    if cap is None or limits.memory <= rooms[cap]:
        return
    proposed = limits.within(max(rooms[cap], 0) * 19 // 20).words(limits)  # usage varies a little
    yield (
        f"the limits of bodies, open episodes and pending parts allow {limits.memory / 1e6:,.0f} "
        f"MB, but {cap.name} ({cap.size / 1e6:,.0f} MB) leaves {max(rooms[cap], 0) / 1e6:,.0f} MB "
        "for them: under load the collector may be killed. Give it more memory, or start it with "
        + " ".join(f"--limit {word}" for word in proposed)
    )
