"""The differences have the right mean, and their limits hold for every row."""

import math

import numpy as np
import pytest

from policy.ope.columns import column_of, whole
from policy.ope.differences import (
    Differences,
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
    values, *apart = per_decision_terms(rewards, weights, None, lengths, gamma)
    to_end, last = map(column_of, apart)
    found = bounded_per_decision(
        column_of(values),
        (to_end, last),
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
    found, values, lower, upper = per_decision_differences(
        (taken == 0).astype(float), weights, uneven, limits=(0.0, 1.0), largest_weight=math.inf
    )
    assert (found.least, found.most) == pytest.approx((-50, 50), rel=1e-5)
    assert (lower == values).all()
    assert upper.max() <= found.most
    assert not found.in_order, "a longer episode would change the numbers of this one"


def test_an_early_end_earns_nothing_up_to_the_horizon():
    """Worked by hand: lengths 1 and 3, gamma 1/2, weights 2; then 3, 3 and 1. Less a constant of 1.

    The short episode: 1 * 2 - 1 * 1 = 1 earned; apart (2 - 1) * (1 + 1/2 + 1/4) = 1.75.
    The long one: (3 - 1) * 0 + (3 - 1) / 2 * 1 + 0 = 1; apart 2 + 1 + 0 = 3.
    """
    found, values, lower, upper = per_decision_differences(
        np.array([1.0, 0.0, 1.0, 1.0]),
        np.array([2.0, 3.0, 3.0, 1.0]),
        np.array([1, 3]),
        gamma=0.5,
        limits=(0.0, 1.0),
        largest_weight=3.0,
    )
    assert values.tolist() == lower.tolist() == [1.0, 1.0]
    assert upper.tolist() == [-0.75, -2.0]
    assert found.most == pytest.approx(1.75, rel=1e-5)


def test_a_margin_is_subtracted_from_every_number():
    """By hand: differences 1 and 3, the bar earns 2 and 4; 10 % of that is 0.2 and 0.4."""
    values = np.array([1.0, 3.0])
    plain = Differences("ips", values, values, -5.0, values, 5.0, furthest=5.0)
    found = plain.beyond(0.1, column_of(np.array([2.0, 4.0])), (0.0, 10.0))
    assert whole(column_of(found.lower)) == pytest.approx([0.8, 2.6])
    assert (found.least, found.most, found.furthest) == (-6.0, 5.0, 6.0)
    assert found.margin == pytest.approx(0.3)


@pytest.mark.parametrize("limits", [(0.0, 1.0), (-1.0, 0.0), (-2.0, 1.0), (-2.0, -1.0), (1.0, 2.0)])
def test_limits_hold_with_early_ends(limits):
    """Every pattern of rewards at either limit and of actions, for lengths 1 to 3."""
    for lengths in (np.array([1, 3]), np.array([2, 3])):
        size = int(lengths.sum())
        for code in range(4**size):
            bits = code >> np.arange(2 * size) & 1
            ratios = np.where(bits[:size] == 0, 1.6, 0.4)
            weights = np.concatenate(
                [np.cumprod(ratios[: lengths[0]]), np.cumprod(ratios[lengths[0] :])]
            )
            rewards = np.array(limits)[bits[size:]]
            found, _, lower, upper = per_decision_differences(
                rewards, weights, lengths, limits=limits, largest_weight=1.6
            )
            assert lower.min() >= found.least
            assert upper.max() <= found.most
