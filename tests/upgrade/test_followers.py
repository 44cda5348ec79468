"""A follower goes on from the checkpoint of an earlier release, and trains on each row once."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy.inference.weight_store import WeightStore
from policy.training.settings import FollowSettings
from policy.training.train_live import follow
from storage.experience.range_set import RangeSet
from tests.collector_process import CollectorProcess
from tests.upgrade.fixture import BUILDS, steps_in_shards, unpacked, verified

EACH = 40
"""The `--steps-per-update` of the fixture."""


@pytest.mark.parametrize("build", BUILDS)
def test_a_follower_goes_on_from_its_checkpoint(
    tmp_path: Path, build: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its counts, versions and lineage continue: no row is lost or trained on again."""
    facts, root = unpacked(tmp_path, "follower", build), tmp_path / "root"
    more = (facts["in_shards"] - facts["rows_trained"]) // EACH
    reports: list[dict[str, float]] = []
    result = follow(
        root,
        settings=FollowSettings(steps_per_update=EACH),
        stop=lambda: len(reports) >= more,
        on_update=reports.append,
    )
    assert "no checkpoint" not in caplog.text
    assert not list(root.glob("**/*damaged*"))
    assert result.updates == facts["updates"] + more
    assert result.version == facts["version"] + more
    assert result.rows_trained == facts["rows_trained"] + more * EACH
    assert claimed(root, result.version) == result.rows_trained
    with CollectorProcess(root) as collector:
        assert collector.get("/v1/episodes/open")[1]["state"] == "open"
        assert collector.stop() == 0
    assert verified(root) == facts["acknowledged"]
    assert set(steps_in_shards(root).values()) == {1}


def claimed(root: Path, version: int) -> int:
    """The rows that a version's lineage has: 5 a part, without those that were left out."""
    store = WeightStore(root, "default")
    lineage: dict[str, RangeSet] = store.lineage(version)
    left_out = sum(count for runs in store.untrained(version).values() for *_, count in runs)
    return 5 * sum(map(len, lineage.values())) - left_out
