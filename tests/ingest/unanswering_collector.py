"""A plain collector that commits and never acknowledges: `python -m`, with its arguments."""

from __future__ import annotations

import runpy
import sys

from ingest.collector.collector import Collector
from tests.collector_process import PLAIN


async def never(self: Collector, row: int) -> None:
    await self._loop.create_future()


if __name__ == "__main__":
    Collector.durable = never  # type: ignore[method-assign]  # that is the point
    sys.argv[0] = PLAIN
    runpy.run_module(PLAIN, run_name="__main__")
