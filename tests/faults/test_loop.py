"""A short loop under faults: its trainer is killed, at random and at calls; a shard is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.loop import damaged_shards, publish_kills, trainer_kills
from tests.faults.loop.running_loop import Loop
from tests.faults.scenario import Trial, Verdict

CALLS = (9, 24, 31, 40)  # of a start, of a candidate, of its checkpoint, of its version


@pytest.mark.long
def test_a_loop_survives_kills_and_a_damaged_shard(tmp_path: Path) -> None:
    """Law: acknowledged = trained once + excluded by name + unread, and each lineage is true."""
    verdict = Verdict()
    with Loop(Trial(7, tmp_path, 1)) as loop:
        for number in range(4):
            trainer_kills.kill_one(loop, loop.chance, verdict, early=not number)
        for call in CALLS:
            publish_kills.strike(loop, call, verdict, after=call % 2 == 0)
        before = loop.live_version()
        trainer = loop.start_trainer()
        assert loop.wait_for_version(before)
        damaged = damaged_shards.damage(loop, trainer.pid)
        assert damaged
        before = loop.live_version()
        assert loop.wait_for_version(before)
        loop.judge(verdict, damaged=tuple(damaged))
    assert verdict.faults == {}
    assert verdict.counts["trained"] > 0
    assert verdict.counts["versions"] > 2
