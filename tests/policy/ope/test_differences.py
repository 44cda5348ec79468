"""The differences have the right mean, and their limits hold for every row."""

import math

import numpy as np
import pytest

from policy.ope.columns import column_of, whole
from policy.ope.differences import (
    Scores,
    bounded_per_decision,
    one_step_limit,
    one_step_values,
    per_decision_terms,
)

MU, CANDIDATE, BAR = (np.array(p) for p in ([0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1]))
MEANS = np.array([0.2, 0.5, 0.9])


@pytest.mark.parametrize("against", ["bar", "log", "known log"])
@pytest.mark.parametrize("limits", [None, (0.0, 1.0)])
def test_one_step_is_unbiased_whatever_the_model_says(against, limits):
    """The exact mean over all actions and rewards is the difference, with a wrong q."""
    actions, rewards = np.repeat(np.arange(3), 2), np.tile([0.0, 1.0], 3)
    chance = MU[actions] * np.where(rewards == 1, MEANS[actions], 1 - MEANS[actions])
    wrong = np.array([0.9, -0.4, 0.3])
    bar = BAR if against == "bar" else MU
    q = wrong if limits is None else wrong.clip(*limits)
    known = None if against == "log" else np.full(6, bar @ q)
    values = one_step_values(
        rewards,
        (CANDIDATE / MU)[actions],
        (BAR / MU)[actions] if against == "bar" else None,
        Scores(q[actions], np.full(6, CANDIDATE @ q), known),
    )
    most = one_step_limit(limits, 5.0, known=known is not None)
    assert chance @ values == pytest.approx((CANDIDATE - bar) @ MEANS)
    assert (np.abs(values) <= most).all()
    assert math.isfinite(most) == (limits is not None)


@pytest.mark.parametrize("known_v", [None, 0.0, 1.0])
@pytest.mark.parametrize("bar_weight", [None, 0.0, 8.0])
def test_one_step_limits_hold_at_every_corner(known_v, bar_weight):
    """The extremes that reward, weight, q and v can reach together."""
    if bar_weight is not None and known_v is None:
        known_v = 0.5
    for reward in (0.0, 1.0):
        for weight in (0.0, 8.0):
            for q in (0.0, 1.0):
                for v in (0.0, 1.0):
                    scores = Scores(
                        np.array([q]),
                        np.array([v]),
                        None if known_v is None else np.array([known_v]),
                    )
                    values = one_step_values(
                        np.array([reward]),
                        np.array([weight]),
                        None if bar_weight is None else np.array([bar_weight]),
                        scores,
                    )
                    most = one_step_limit((0.0, 1.0), 8.0, known=known_v is not None)
                    assert abs(values[0]) <= most


def episodes(rng, n, lengths):
    size = int(lengths.sum())
    taken = rng.integers(2, size=size)
    starts = np.cumsum(lengths) - lengths
    ratios = np.where(taken == 0, 1.6, 0.4)
    weights = np.concatenate(
        [np.cumprod(ratios[a : a + b]) for a, b in zip(starts, lengths, strict=True)]
    )
    return taken, weights


def per_decision_differences(rewards, weights, lengths, *, gamma=1.0, limits, largest_weight):
    """Against the logging policy, with each end as an array."""
    values, apart = per_decision_terms(rewards, weights, None, lengths, gamma)
    found = bounded_per_decision(
        column_of(values),
        column_of(apart),
        (lengths.min(), lengths.max()),
        gamma=gamma,
        reward_range=limits,
        largest_weight=largest_weight,
        against_log=True,
    )
    return found, values, whole(found.lower), whole(found.upper)


@pytest.mark.parametrize("limits", [(0.0, 1.0), (-1.0, 0.0), (-1.0, 1.0), (2.0, 3.0)])
def test_per_decision_limits_hold_and_all_have_one_mean(limits):
    """Equally long episodes: the ends' numbers differ, their exact means do not."""
    steps, low_high = 3, np.array(limits)
    grid = np.stack(np.meshgrid(*[[0, 1]] * (2 * steps), indexing="ij"), -1).reshape(-1, 2 * steps)
    taken, high = grid[:, :steps].ravel(), grid[:, steps:].ravel()
    rewards = low_high[high]
    ratios = np.where(taken == 0, 1.6, 0.4).reshape(-1, steps)
    chance = (0.5**steps) * np.where(
        high.reshape(-1, steps) == 1, 0.7 - 0.4 * taken.reshape(-1, steps),
        0.3 + 0.4 * taken.reshape(-1, steps),
    ).prod(axis=1)  # fmt: skip
    found, *numbers = per_decision_differences(
        rewards,
        np.cumprod(ratios, axis=1).ravel(),
        np.full(len(grid), steps),
        gamma=0.9,
        limits=limits,
        largest_weight=2.0,
    )
    own = np.array([0.8, 0.2]) @ [0.7, 0.3] - 0.5
    expected = own * (low_high[1] - low_high[0]) * sum(0.9**t for t in range(steps))
    for values in numbers:
        assert chance @ values == pytest.approx(expected)
    assert found.least <= numbers[1].min()
    assert numbers[2].max() <= found.most


def test_the_candidates_side_needs_no_largest_weight():
    """Fifty steps with weights of any size: against the logging policy both ends have a limit."""
    lengths = np.full(20, 50)
    taken, weights = episodes(np.random.default_rng(0), 20, lengths)
    found, *_ = per_decision_differences(
        (taken == 0).astype(float), weights, lengths, limits=(0.0, 1.0), largest_weight=math.inf
    )
    assert (found.least, found.most) == pytest.approx((-50, 50), rel=1e-5)
    uneven = np.array([50] * 19 + [20])
    taken, weights = episodes(np.random.default_rng(0), 20, uneven)
    found, values, lower, _ = per_decision_differences(
        (taken == 0).astype(float), weights, uneven, limits=(0.0, 1.0), largest_weight=math.inf
    )
    assert found.most == math.inf
    assert (lower == values).all()
