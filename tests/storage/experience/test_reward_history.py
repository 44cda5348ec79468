"""A history of rewards: exact sums, in slots that stay few however long it goes on."""

from __future__ import annotations

import numpy as np
import pytest

from storage.experience.reward_history import (
    BEFORE,
    FEWEST,
    LEVELS,
    OTHERS,
    SLOT_VERSIONS,
    Moments,
    RewardHistory,
)

DAY = 86_400


def count(history: RewardHistory, seconds: list[int], version: int, value: float = 1.0) -> None:
    micros = np.array(seconds, np.int64) * 1_000_000
    size = micros.size
    history.add("rewards", micros, np.full(size, version), np.full(size, value))


def test_moments() -> None:
    values = np.array([1.0, 4.0, 7.0])
    history = RewardHistory()
    history.add("rewards", np.zeros(3, np.int64), np.zeros(3, np.int64), values)
    found = history.total(0, "rewards")
    assert (found.mean, found.variance) == (pytest.approx(4.0), pytest.approx(9.0))
    assert np.isnan(Moments(1, 1.0, 1.0).variance)


def test_each_level_has_all_or_its_latest_slots() -> None:
    """Three years, a value each hour: totals are exact, each level has its latest slots, and only
    a level that has dropped none is whole."""
    history = RewardHistory()
    for day in range(3 * 365):
        count(history, [day * DAY + hour * 3600 for hour in range(24)], day // 400)
    assert [len(level) for level in history.levels] == [most for _, most in LEVELS]
    assert [history.is_whole(at) for at in range(4)] == [False] * 4
    assert max(history.levels[0]) == (3 * 365 * DAY - 3600) // 60
    assert sum(history.total(version, "rewards").n for version in range(3)) == 3 * 365 * 24
    young = RewardHistory()
    count(young, [0, 3600 * 5], 1)
    assert [young.is_whole(at) for at in range(4)] == [True] * 4
    count(young, [60 * one for one in range(1, 300)], 1)
    assert [young.is_whole(at) for at in range(4)] == [False, True, True, True]
    assert RewardHistory.from_json(young.to_json()) == young


def test_a_share_of_the_slots_is_kept_where_there_are_many_policies() -> None:
    history = RewardHistory()
    count(history, [60 * one for one in range(200)], 1)
    history.share = 0.01
    count(history, [60 * 200], 1)
    assert len(history.levels[0]) == FEWEST, "of a history that was longer before, too"


def test_versions_of_a_slot_are_few_and_what_came_before_stays_apart() -> None:
    history = RewardHistory()
    for version in (-7, *range(100)):
        count(history, [0], version)
    (slot,) = history.levels[0].values()
    assert len(slot) == SLOT_VERSIONS + 1, "and the others"
    assert slot[BEFORE].rewards.n == 1
    assert slot[OTHERS].rewards.n + sum(one >= 0 for one in slot) == 100


def test_the_largest_rewards_leave_a_readable_file() -> None:
    history = RewardHistory()
    count(history, [0] * 10, 1, 1.7e308)
    count(history, [0], 1, float("nan"))
    assert RewardHistory.from_json(history.to_json()).total(1, "rewards").n == 11


def test_a_copy_stays_as_it_was() -> None:
    history = RewardHistory()
    count(history, [0], 1)
    history.note_counted("s", 3)
    copied, before = history.copied(), history.to_json()
    assert copied == history
    count(history, [0, DAY], 1)
    history.note_counted("s", 4)
    assert copied.to_json() == before
