"""An off-policy follower: each row once, and after a restart the replay that it had."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy.algorithms.learner import Learner
from policy.algorithms.torchrl import DQNConfig
from policy.inference.weight_store import WeightStore
from policy.training.replaying import _newest, refill
from policy.training.settings import FollowSettings
from policy.training.train import acting_spec, new_policy
from policy.training.train_live import follow
from tests.policy.training.live_log import SPEC, STREAM, declare, part, write

CONFIG = DQNConfig(updates_per_row=0.05, replay=150)
ACTING = acting_spec(SPEC, CONFIG)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return declare(tmp_path)


def run(root: Path, updates: int, reads: int = 300) -> tuple[Any, list[dict[str, float]]]:
    reports: list[dict[str, float]] = []
    asked = iter(range(reads))
    result = follow(
        root,
        "default",
        CONFIG,
        FollowSettings(steps_per_update=100),
        spec=ACTING,
        on_update=reports.append,
        stop=lambda: len(reports) >= updates or next(asked, None) is None,
    )
    return result, reports


def test_a_resumed_follower_replays_the_rows_it_was_trained_on(root: Path) -> None:
    """No row twice in the lineage; the replay gets the latest rows again, from the shards."""
    write(root, *(part(i) for i in range(20)))
    first, _ = run(root, 2)
    write(root, *(part(20 + i) for i in range(10)))
    second, reports = run(root, 1)
    assert (first.rows_trained, second.rows_trained, second.version) == (200, 300, 4)
    assert np.isfinite(reports[0]["loss"])
    assert WeightStore(root, "default").lineage(4)[STREAM].ranges() == [(0, 29)]


def test_a_replay_whose_rows_are_gone_is_filled_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not at every read while no client acts."""
    write(root, *(part(i) for i in range(10)))
    run(root, 1)
    for shard in root.glob("shards/*/*.parquet"):
        shard.unlink()
    with caplog.at_level(logging.INFO):
        run(root, 1, reads=3)
    assert caplog.text.count("the replay has 0 rows") == 1


def test_the_replay_is_filled_with_the_latest_rows_but_those_not_trained_on(root: Path) -> None:
    """As many as fit, oldest first, and none that the lineage names as untrained."""
    write(root, *(part(i) for i in range(20)))
    learner = Learner(new_policy(ACTING, 0), CONFIG)
    learner.go_on_from(learner.policy.get_weights(), {STREAM: [[0, 17]]})
    refill(learner, root, "default", lambda: {STREAM: [[17, 8, 2]]})
    replay = learner.algorithm.replay  # type: ignore[attr-defined]
    expected = np.concatenate(
        [np.frombuffer(part(i).obs, np.float32).reshape(10, 4) for i in range(18)]
    )[:-2]
    np.testing.assert_array_equal(replay.rows["observation"].numpy(), expected[-150:])
    assert (replay.added, learner.counts.rows_trained) == (0, 0)
    refill(learner, root, "default", dict)
    assert len(replay) == 150


def test_no_more_parts_are_read_than_can_be_needed() -> None:
    """Each part has a row at least, so the latest ones suffice, over gaps."""
    assert _newest([[0, 4], [10, 19]], 12) == [[3, 4], [10, 19]]
    assert _newest([[0, 4], [10, 19]], 3) == [[17, 19]]
