"""Hints of a follower: why an update trained nothing, and returns that do not move."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from policy.algorithms.ppo import PPOConfig
from policy.training.hints import PATIENCE, Hints
from policy.training.settings import FollowSettings
from policy.training.train_live import follow
from storage.experience.sample_batch import SampleBatch
from tests.policy.training.live_log import declare, part, write


def episodes(returns: list[float], first: int, source: str = "on_policy") -> SampleBatch:
    """Episodes of two steps each, whose second one earns the return."""
    count = 2 * len(returns)
    last = np.arange(count) % 2 == 1
    return SampleBatch(
        stream=np.full(count, "s", object),
        episode_ordinal=first + np.arange(count) // 2,
        agent_id=np.full(count, "", object),
        t=np.arange(count) % 2,
        rewards=np.where(last, np.repeat(returns, 2), 0.0),
        terminateds=last,
        truncateds=np.zeros(count, np.bool_),
        source=np.full(count, source, object),
    )


def after(earlier: list[float], later: list[float]) -> str:
    hints = Hints()
    for number, returns in enumerate((earlier, later)):
        batch = episodes(returns, first=1000 * number)
        hints.read(batch.slice(0, 3))  # an episode may be cut anywhere
        hints.read(batch.slice(3, None))
        hints.read(episodes([1e9], 500, source="logged"))
        for _ in range(PATIENCE // 2):
            hints.updated(1, {})
    return hints.text


def test_a_return_that_does_not_move_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """With both means; not one that rises, and not by the rewards of others."""
    noise = np.linspace(-2, 2, 20)
    text = after((20 + noise).tolist(), (20.1 - noise).tolist())
    assert f"not moved for {PATIENCE} updates: 20.1 per episode (n=20), before 20 (n=20)" in text
    assert text in caplog.text
    assert after((20 + noise).tolist(), (23 + noise).tolist()) == ""
    assert after([1.0] * 4, [1.0] * 4) == "", "four episodes are too few"


def test_updates_without_rows_give_their_reason_again_and_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """At the first, second, fourth and eighth in a row; one that trains ends it."""
    hints = Hints()
    for _ in range(9):
        hints.updated(0, {"not_on_policy": 7})
    assert len(caplog.records) == 4
    assert hints.text == (
        "the last 9 updates had no row to learn from (left out: not_on_policy: 7)"
    )
    hints.updated(3, {})
    assert hints.text == ""
    hints.updated(0, {})
    assert "the last 1 update had no row to learn from (left out: none)" in caplog.text


def test_a_follower_says_why_an_update_trained_nothing(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the reasons of its own, such as rows that are too old."""
    write(root, *(part(i) for i in range(20)))
    reports: list[dict[str, float]] = []
    with caplog.at_level(logging.WARNING):
        follow(
            root,
            "default",
            PPOConfig(epochs=1),
            FollowSettings(steps_per_update=100, max_lag=0),
            stop=lambda: len(reports) >= 2,
            on_update=reports.append,
        )
    text = "the last 1 update had no row to learn from (left out: stale: 100)"
    assert text in caplog.text
    assert [m["rows"] for m in reports] == [100, 0]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return declare(tmp_path)
