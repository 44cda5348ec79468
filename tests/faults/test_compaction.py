"""A short run of the scenario `compaction`: SIGKILL beside a collector and a follower."""

from __future__ import annotations

from pathlib import Path

from tests.faults import compaction
from tests.faults.scenario import Trial


def test_killed_compactions_lose_and_double_nothing(tmp_path: Path) -> None:
    """Law: each acknowledged step is stored once, and read once by a reader that follows."""
    verdict = compaction.run(Trial(7, tmp_path, 2))
    assert verdict.faults == {}
    assert verdict.counts["applications"] >= 4
    assert verdict.counts["new_shards"] > 0
    assert verdict.counts["followed"] > 200
