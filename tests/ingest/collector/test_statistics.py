"""Totals of events that clients report as dropped, kept over a restart."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from ingest.collector import statistics
from ingest.collector.statistics import DROPPED, LATE, CountsRecord, DroppedByClients, LateRewards
from ingest.protocol.messages import Dropped
from storage.declarations.dropped_steps import Lost, dropped_steps
from storage.declarations.late_rewards import LateReward


def test_totals_of_an_instance_count_once() -> None:
    """A repeated report adds nothing, even after a restart."""
    dropped = DroppedByClients()
    for totals in (Dropped(episodes=1, steps=5), Dropped(episodes=1, steps=5), Dropped(steps=9)):
        dropped.note("one", totals)
    dropped.note("two", Dropped())
    assert (dropped.episodes, dropped.steps) == (1, 9)
    assert dropped.totals() == {"one": Lost(0, 9)}
    later = DroppedByClients()
    later.restore(dropped.totals())
    later.note("one", Dropped(episodes=0, steps=9))
    assert later.steps == 9


def test_the_record_follows_and_is_taken_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reports reach the file; a collector that starts again continues from it."""
    monkeypatch.setattr(statistics, "_WRITE_SECONDS", 0.01)

    async def await_record(dropped: DroppedByClients, steps: int, total: int) -> None:
        following = asyncio.create_task(
            CountsRecord(dropped, DROPPED, tmp_path, lambda: "c").follow()
        )
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


def test_a_late_reward_counts_once_and_over_a_restart(tmp_path: Path) -> None:
    """A retry of the same event adds nothing; the numbers before a restart are added."""
    late, kind = LateRewards(), LateReward("default", 1, "a minute", 0)
    for reward in (("e", 0, "r1"), ("e", 0, "r1"), ("e", 0, "r2")):
        late.note(reward, kind)
    assert late.totals() == {kind: 2}
    LATE.say(tmp_path, "c", late.totals())
    again = LateRewards()
    again.restore(LATE.read(tmp_path, "c"))
    again.note(("e", 0, "r3"), kind)
    assert again.totals() == {kind: 3}


def test_with_many_kinds_actions_are_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file does not grow without bound."""
    monkeypatch.setattr(statistics, "_KINDS", 2)
    late = LateRewards()
    for action in range(5):
        late.note((action,), LateReward("default", 1, "a minute", action))
    assert sorted(late.totals().values()) == [1, 1, 3]
