"""Laws of the differences: their mean is the difference, and their limits hold for every row."""

import math

import numpy as np
import pytest

from policy.ope.differences import Scores, one_step_differences, per_decision_differences

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
    found = one_step_differences(
        rewards,
        (CANDIDATE / MU)[actions],
        (BAR / MU)[actions] if against == "bar" else None,
        Scores(q[actions], np.full(6, CANDIDATE @ q), known),
        reward_range=limits,
        largest_weight=5.0,
    )
    assert chance @ found.values == pytest.approx((CANDIDATE - bar) @ MEANS)
    assert (found.values >= found.least).all()
    assert (found.values <= found.most).all()
    assert math.isfinite(found.most) == (limits is not None)


@pytest.mark.parametrize("known_v", [None, 0.0, 1.0])
@pytest.mark.parametrize("bar_weight", [None, 0.0, 8.0])
def test_one_step_limits_hold_at_every_corner(known_v, bar_weight):
    """The worst that reward, weight, q and v may be together."""
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
                    found = one_step_differences(
                        np.array([reward]),
                        np.array([weight]),
                        None if bar_weight is None else np.array([bar_weight]),
                        scores,
                        reward_range=(0.0, 1.0),
                        largest_weight=8.0,
                    )
                    assert found.least <= found.values[0] <= found.most


def episodes(rng, n, lengths):
    size = int(lengths.sum())
    taken = rng.integers(2, size=size)
    starts = np.cumsum(lengths) - lengths
    ratios = np.where(taken == 0, 1.6, 0.4)
    weights = np.concatenate(
        [np.cumprod(ratios[a : a + b]) for a, b in zip(starts, lengths, strict=True)]
    )
    return taken, weights


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
    found = per_decision_differences(
        rewards,
        np.cumprod(ratios, axis=1).ravel(),
        None,
        np.full(len(grid), steps),
        gamma=0.9,
        reward_range=limits,
        largest_weight=2.0,
    )
    own = np.array([0.8, 0.2]) @ [0.7, 0.3] - 0.5
    expected = own * (low_high[1] - low_high[0]) * sum(0.9**t for t in range(steps))
    for values in (found.values, found.lower, found.upper):
        assert chance @ values == pytest.approx(expected)
    assert found.least <= found.lower.min()
    assert found.upper.max() <= found.most


def test_the_candidates_side_needs_no_largest_weight():
    """Fifty steps by weights of any size: against the logging policy both ends have a limit."""
    lengths = np.full(20, 50)
    taken, weights = episodes(np.random.default_rng(0), 20, lengths)
    found = per_decision_differences(
        (taken == 0).astype(float), weights, None, lengths,
        reward_range=(0.0, 1.0), largest_weight=math.inf,
    )  # fmt: skip
    assert (found.least, found.most) == pytest.approx((-50, 50), rel=1e-5)
    uneven = np.array([50] * 19 + [20])
    taken, weights = episodes(np.random.default_rng(0), 20, uneven)
    found = per_decision_differences(
        (taken == 0).astype(float), weights, None, uneven,
        reward_range=(0.0, 1.0), largest_weight=math.inf,
    )  # fmt: skip
    assert found.most == math.inf
    assert (found.lower == found.values).all()
