"""The hours until a disk is full, from looks at a disk that fills at a known rate."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

from ingest.collector.collector import Collector
from ingest.collector.stores import stores_in_memory
from ingest.server.disk_space import LEAST_LOOKS, MOST_LOOKS, DiskSpace
from ingest.server.routes import Routes
from ingest.status.answers import status_document
from storage.declarations.declaration import PolicyDeclaration
from storage.spaces.descriptors import Box, Discrete

MINUTE = 60.0
BOX, CHOICE = Box(shape=(1,)), Discrete(2)


def test_hours_left_follow_the_present_rate() -> None:
    """1 GB per hour and 30 GB: 30 hours; then 10 GB per hour; then nothing. No rate before ten
    looks, and none of a disk that cannot be read."""
    now, free = 0.0, 30e9

    def read(folder: Path) -> int:
        if folder.name == "shards":
            raise FileNotFoundError(folder)
        return int(free)

    disks = DiskSpace(Path("root"), free=read, clock=lambda: now)

    def fill(looks: int, rate: float) -> float:
        nonlocal now, free
        for _ in range(looks):
            disks.look()
            now += MINUTE
            free -= rate / 60
        assert disks.free().keys() == disks.hours_left().keys() == {"journal"}
        return disks.hours_left()["journal"]

    assert fill(LEAST_LOOKS - 1, 1e9) == math.inf
    assert math.isclose(fill(1, 1e9), 29.85, rel_tol=1e-6)
    assert 1.9 < fill(60, 10e9) < 3.5  # mostly the later rate
    assert fill(MOST_LOOKS, 0.0) == math.inf
    free = 40e9
    assert fill(1, 0.0) == math.inf


def test_the_page_names_a_disk_that_is_full_within_a_day() -> None:
    """At 2 GB per hour, 50 GB are no news, and 40 GB are."""
    free, now = 60e9, [0.0]

    async def needs() -> list[str]:
        kept = stores_in_memory({"default": PolicyDeclaration(observation=BOX, action=CHOICE)})
        collector = Collector(kept.journal, kept.writer, kept.policies)
        document = status_document(Routes(collector, kept.live, disks=disks)._facts())
        return [one["text"] for one in document["answers"]["needs"]]

    def fill(least: float) -> list[str]:
        nonlocal free
        while free > least:
            free -= 2e9 / 60
            now.append(now[-1] + 60.0)
            disks.look()
        return asyncio.run(needs())

    disks = DiskSpace(Path("root"), free=lambda folder: int(free), clock=lambda: now[-1])
    assert fill(50e9) == []
    assert fill(40e9) == [
        f"The disk of {name}/ will be full in 20.0 hours at the present rate."
        for name in ("journal", "shards")
    ]
