"""Each check of a log finds the fault that it is for, and lets a sound log pass."""

import math

import numpy as np
import pytest

from policy.ope.diagnostics import (
    Support,
    at_least,
    at_most,
    effective_sample_size,
    largest_share,
    mean_weight,
    reward_events,
)


def supported(flat, taken, probs, start=0, names=()):
    """(actions, near the observation), the same from one block as from several."""
    found = []
    for pieces in (1, 7):
        support = Support(probs.shape[1], 1, start=start, names=names)
        for rows in np.array_split(np.arange(len(taken)), pieces):
            support.add(flat[rows], taken[rows], [probs[rows]])
        found.append(support.checks(0))
    one, other = found
    assert [c.value for c in other] == pytest.approx([c.value for c in one])
    return one


def test_an_action_without_rows_is_named():
    """The check depends on the action's share of the candidate's steps; a very small share is only
    reported."""
    taken = np.array([0, 1, 1, 3] * 50)
    found, _ = supported(np.zeros((200, 0)), taken, np.tile([0.1, 0.2, 0.6, 0.1], (200, 1)), 5)
    assert not found.passed
    assert found.value == pytest.approx(0.6)
    assert "action 7 (60.0% of steps)" in found.sentence
    names = ("bed", "lamp", "sofa", "rug")
    named, _ = supported(
        np.zeros((200, 0)), taken, np.tile([0.1, 0.2, 0.6, 0.1], (200, 1)), 0, names
    )
    assert "not in the 200 judged steps: 'sofa' (60.0% of steps)" in named.sentence
    trace = np.tile([0.1, 0.8, 0.005, 0.095], (200, 1))
    assert supported(np.zeros((200, 0)), taken, trace)[0].passed


def near(flat, taken, probs):
    return supported(flat, taken, probs)[1]


def test_support_is_asked_for_near_the_observation():
    """Every action was logged, but each in one half of the space; the candidate takes the other."""
    rng, n = np.random.default_rng(0), 2000
    flat = rng.normal(size=(n, 3))
    right = flat[:, 1] > 0
    taken = rng.integers(2, size=n) + 2 * right
    flat[:, 1] *= 5
    own, other = (
        np.where(side[:, None], [0.05, 0.05, 0.45, 0.45], [0.45, 0.45, 0.05, 0.05])
        for side in (right, ~right)
    )
    assert supported(flat, taken, other)[0].passed
    assert near(flat, taken, other).value > 0.7
    assert not near(flat, taken, other).passed
    assert near(flat, taken, own).value < 0.2
    mixed = rng.integers(4, size=n)
    assert near(flat, mixed, other).value == 0
    assert near(np.zeros((n, 0)), mixed, other).passed
    assert near(np.repeat([[0.0], [1.0]], [n - 300, 300], axis=0), mixed, other).passed


def test_the_mean_weight_is_1_or_the_log_is_not_what_it_says():
    """Missing support and propensities that are too high or too low fail; a sound log of any length
    passes.
    """
    rng, n = np.random.default_rng(1), 2000
    sound = rng.choice([3.0, 1 / 3], p=[0.25, 0.75], size=n)
    assert mean_weight(sound, 4.0).passed
    for wrong, word in ((sound * 0.6, "never does"), (sound * 1.5, "too low")):
        found = mean_weight(wrong, 4.0)
        assert not found.passed
        assert word in found.sentence
    assert mean_weight(sound, math.inf).passed
    # Greedy: equal weights, the full effective sample size, a mean of .01.
    assert not mean_weight(np.full(n, 0.01), 1.0 + 1e-3).passed


def test_a_sound_log_passes_the_mean_weight():
    """Of 3,000 sound logs, some with heavy weights, no more are refused than by chance."""
    rng, refused = np.random.default_rng(2), 0
    for number in range(3000):
        floor = (0.25, 0.02)[number % 2]
        ratios = np.where(rng.random(500) < floor, 0.9 / floor, 0.1 / (1 - floor))
        refused += not mean_weight(ratios, 1 / floor).passed
    assert refused <= 5  # at most .0004 each: more than 5 has a probability below .001


def test_events_are_what_differs_from_the_most_common_return():
    """Weighted by Kish; all episodes where no return occurs twice."""
    returns = np.array([0.0] * 90 + [-1.0] * 10)
    weights = np.ones(100)
    assert reward_events(returns, weights, threshold=30).value == 10
    assert not reward_events(returns, weights, threshold=30).passed
    assert "about 200 more episodes" in reward_events(returns, weights, threshold=30).sentence
    weights[90:95] = 0
    assert reward_events(returns, weights, threshold=None).value == 5
    assert reward_events(np.arange(100.0), np.ones(100), threshold=30).value == 100
    none = reward_events(np.zeros(100), np.ones(100), threshold=30)
    assert (none.value, none.passed) == (0, False)


def test_too_few_effective_episodes_say_how_many_more():
    """In units, rounded to two digits; no number is given without any weight."""
    weights = np.array([1.0] * 20 + [0.0] * 80)
    few = effective_sample_size(weights, 100.0, "episodes")
    assert (few.value, few.passed) == (20.0, False)
    assert "got 20.0: it needs about 400 more episodes, or use a canary" in few.sentence
    assert few.missing == 400
    enough = effective_sample_size(weights, 20.0, "episodes")
    assert (enough.passed, enough.missing) == (True, None)
    none = effective_sample_size(np.zeros(9), 1.0, "values of tag:user")
    assert none.sentence.endswith("got 0.0: it needs more values of tag:user, or use a canary")
    assert none.missing is None


def test_one_number_must_not_decide():
    """A share of the sum above the threshold; a sum of zero has no share."""
    assert not largest_share("x", np.array([1.0, 1, 1, 9]), 0.5, "weight").passed
    assert largest_share("x", np.array([1.0, 1, 1, 1]), 0.5, "weight").passed
    assert largest_share("x", np.zeros(4), 0.5, "weight").value == 0


def test_a_nan_passes_nothing():
    """The same for a threshold of NaN."""
    assert not at_most("x", math.nan, 1.0, "").passed
    assert not at_least("x", math.nan, 1.0, "").passed
    assert not at_least("x", 5.0, math.nan, "").passed
    assert at_most("x", math.nan, None, "").to_dict()["value"] is None
