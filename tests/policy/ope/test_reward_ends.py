"""Every reward of a log is held against the range; a range that is much too wide is named."""

from __future__ import annotations

import numpy as np

from policy.ope.reward_ends import RewardEnds


def ends(limits: tuple[float, float] | None, *rewards: float) -> RewardEnds:
    found = RewardEnds(limits)
    for reward in rewards:
        found.add(np.array([reward, reward]))
    found.add(np.empty(0))
    return found


def test_a_reward_outside_fails_and_is_counted() -> None:
    (found,) = ends((0.0, 1.0), 0.5, 1.5, -1.0).checks()
    assert (found.name, found.value, found.passed) == ("rewards_outside_range", 4, False)
    assert "from -1 to 1.5: fix the range" in found.sentence
    (held,) = ends((0.0, 1.0), 0.0, 1.0).checks()
    assert held.passed
    assert ends(None, 5.0).checks() == []


def test_a_range_ten_times_too_wide_is_named() -> None:
    held, note = ends((0.0, 1000.0), 0.0, 1.0).checks()
    assert held.passed
    assert (note.name, note.passed, note.threshold, note.value) == ("wide_range", True, None, 1000)
    assert note.sentence == (
        "the declared range, 0 to 1000, is 1,000 times as wide as the rewards of the log, 0 to 1"
    )
    assert len(ends((0.0, 9.0), 0.0, 1.0).checks()) == 1
    assert len(ends((0.0, 1000.0), 1.0).checks()) == 1, "one reward has no width"
