"""The declared range is a promise about all rows, and its width is a price."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.policy.judging.test_evaluate_verdicts import (
    STREAM,
    judged,
    log_episodes,
    probabilities,
    stored,
)


def drawn(root: Path, n: int, odd: dict[int, float]) -> str:
    """n decisions of reward 0 or 1, with the `odd` rewards; the candidate was trained on a half."""
    rng = np.random.default_rng(4)
    actions = rng.integers(4, size=(n, 1))
    rewards = (rng.random((n, 1)) < np.where(actions == 0, 0.7, 0.5)).astype(float)
    for row, reward in odd.items():
        rewards[row] = reward
    log_episodes(root, rng.normal(size=(n, 1, 2)), actions, rewards, np.full((n, 1), 0.25))
    return stored(root, probabilities(0.97, 0.01, 0.01, 0.01), {STREAM: [(0, n // 2 - 1)]})


@pytest.mark.parametrize("row", [7, 3999])
def test_a_reward_outside_the_range_fails_wherever_it_is(tmp_path: Path, row: int) -> None:
    """Row 7 was trained on, row 3,999 would be judged by."""
    digest = drawn(tmp_path, 4000, {row: 1.5})
    found = judged(tmp_path, digest, split="all", reward_range=(0.0, 1.0)).judgement
    (check,) = (one for one in found.diagnostics if one.name == "rewards_outside_range")
    assert (found.verdict, check.passed, check.value) == ("cannot tell", False, 1)
    assert "from 0 to 1.5: fix the range" in check.sentence
    held = judged(tmp_path, digest, split="all", reward_range=(0.0, 2.0)).judgement
    assert held.verdict == "better"


def test_a_range_that_is_much_too_wide_says_what_it_costs(tmp_path: Path) -> None:
    digest = drawn(tmp_path, 4000, {})
    wide = judged(tmp_path, digest, split="all", reward_range=(0.0, 1000.0)).judgement
    assert wide.verdict == "cannot tell"
    (reason,) = (one for one in wide.reasons if "1,000 times as wide" in one)
    ends = reason.partition("it would be about ")[2].partition(";")[0].split(" .. ")
    exact = judged(tmp_path, digest, split="all", reward_range=(0.0, 1.0)).judgement
    assert [float(end) for end in ends] == pytest.approx(exact.comparisons[0].interval, abs=0.05)
    assert any(one.name == "wide_range" for one in wide.diagnostics)
