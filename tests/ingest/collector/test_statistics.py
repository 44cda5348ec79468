"""Totals of events that clients report as dropped, kept over a restart."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from ingest.collector import statistics
from ingest.collector.statistics import DroppedByClients, DroppedRecord
from ingest.protocol.messages import Dropped
from storage.declarations.dropped_steps import Lost, dropped_steps


def test_totals_of_an_instance_count_once() -> None:
    """A repeated report adds nothing, even after a restart."""
    dropped = DroppedByClients()
    for totals in (Dropped(episodes=1, steps=5), Dropped(episodes=1, steps=5), Dropped(steps=9)):
        dropped.note("one", totals)
    dropped.note("two", Dropped())
    assert (dropped.episodes, dropped.steps) == (1, 9)
    assert dropped.by_instance() == {"one": Lost(0, 9)}
    later = DroppedByClients()
    later.restore(dropped.by_instance())
    later.note("one", Dropped(episodes=0, steps=9))
    assert later.steps == 9


def test_the_record_follows_and_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports reach the file; a collector that starts again continues from it."""
    monkeypatch.setattr(statistics, "_WRITE_SECONDS", 0.01)

    async def await_record(dropped: DroppedByClients, steps: int, total: int) -> None:
        following = asyncio.create_task(DroppedRecord(dropped, tmp_path, lambda: "c").follow())
        await asyncio.sleep(0)
        dropped.note("one", Dropped(episodes=1, steps=steps))
        async with asyncio.timeout(60):
            while dropped_steps(tmp_path) != Lost(1, total):
                await asyncio.sleep(0.01)
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following

    asyncio.run(await_record(DroppedByClients(), 5, 5))
    again = DroppedByClients()
    asyncio.run(await_record(again, 7, 7))
    assert again.steps == 7
