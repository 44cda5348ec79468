"""A collector that commits and never acknowledges: `python -m`, with the arguments of `ingest`."""

from __future__ import annotations

import runpy
import sys

from ingest.collector.collector import Collector


async def never(self: Collector, row: int) -> None:
    await self._loop.create_future()


if __name__ == "__main__":
    Collector.durable = never  # type: ignore[method-assign]  # that is the point
    sys.argv[0] = "ingest"
    runpy.run_module("ingest", run_name="__main__")
