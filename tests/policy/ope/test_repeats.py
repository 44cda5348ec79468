"""Copies of episodes are found, and natural repetition is not."""

import math

import numpy as np
import pytest

from policy.ope.judgement import Judged
from policy.ope.repeats import Fingerprints, Repeats, _beyond, _dispersion, fingerprints


def log(rng, n, *, contexts=None, actions=5, steps=1):
    flat = rng.normal(size=(n * steps, 2))
    if contexts is not None:
        flat = rng.integers(contexts, size=(n * steps, 1)).astype(np.float64)
    return {
        "rewards": (rng.random(n * steps) < 0.3).astype(np.float64),
        "lengths": np.full(n, steps),
        "behaviour_logp": np.full(n * steps, -math.log(actions)),
        "flat": flat,
        "taken": rng.integers(actions, size=n * steps),
        "times": rng.integers(10**9, size=n).astype(np.float64),
    }


def chosen(given, rows, **other):
    """The episodes of these numbers."""
    n, steps = len(given["lengths"]), int(given["lengths"][0])
    cells = (np.asarray(rows)[:, None] * steps + np.arange(steps)).ravel()
    return {
        name: values[rows] if len(values) == n and name in ("lengths", "times") else values[cells]
        for name, values in given.items()
    } | other


def checked(given, units=None, blocks=3):
    repeats, n = Repeats(), len(given["lengths"])
    for rows in np.array_split(np.arange(n), blocks):
        data = Judged(**chosen(given, rows))
        repeats.add(fingerprints(data), None if units is None else units[rows])
    return repeats.check()


def hashes(*numbers):
    return np.array(numbers, np.uint64)


def test_what_chance_predicts_is_the_sum_of_earlier_propensities():
    """Observation 1: actions a, b, a, a with .5, .3, .5, .5: chances 0, .5, .8, .8; two repeat.

    Observation 2 comes once.
    """
    context, drawn = hashes(1, 1, 2, 1, 1), hashes(10, 11, 12, 10, 10)
    found = Fingerprints(
        context=context,
        drawn=drawn,
        whole=hashes(10, 11, 12, 10, 99),  # the last has another reward
        times=hashes(0, 0, 0, 0, 0),
        probability=np.array([0.5, 0.3, 0.5, 0.5, 0.5]),
        one_step=True,
    )
    repeated, excess = _beyond(found)
    assert repeated == 1
    assert excess == pytest.approx(1 - 0.5 - 0.8 - 0.8)


def test_the_variance_of_counts_is_pearsons():
    """Counts 60 and 40 with .5 each, in one observation: 2 * 10^2 / 50 = 4, one degree."""
    taken = np.repeat([0, 1], [600, 400])
    found = Fingerprints(
        context=np.zeros(1000, np.uint64),
        drawn=taken.astype(np.uint64),
        whole=taken.astype(np.uint64),
        times=np.zeros(1000, np.uint64),
        probability=np.full(1000, 0.5),
        one_step=True,
    )
    assert _dispersion(found) == pytest.approx(40.0)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("same_time", [True, False])
def test_copies_are_counted_and_their_origin_is_named(same_time, steps):
    """A twentieth of 2,000 episodes is there twice, with the same times or with others."""
    rng = np.random.default_rng(0)
    given = log(rng, 2000, steps=steps)
    twice = chosen(given, np.r_[np.arange(2000), np.arange(100)])
    if not same_time:
        twice["times"] = rng.integers(10**9, size=2100).astype(np.float64)
    found = checked(twice)
    assert not found.passed
    assert found.value == pytest.approx((1 - 5.0**-steps) * 100 / 2100)
    assert found.sentence.startswith("100 episodes of 2,100 repeat")
    assert ("--name" in found.sentence) is same_time


def test_few_contexts_repeat_by_nature():
    """10 observations, 5 actions, 2 rewards: all of 5,000 episodes repeat, and none is a copy."""
    found = checked(log(np.random.default_rng(1), 5000, contexts=10))
    assert found.passed
    assert found.value == 0.0


def test_copies_among_few_contexts_show_in_the_variance():
    """Each of 2,000 episodes is there four times, with other times."""
    rng = np.random.default_rng(1)
    rows = np.tile(np.arange(2000), 4)
    given = log(rng, 2000, contexts=10)
    found = checked(chosen(given, rows, times=rng.integers(10**9, size=8000).astype(np.float64)))
    assert not found.passed
    assert "as if each episode was in the log" in found.sentence


def test_what_a_unit_repeats_is_its_own():
    """A user with the same observation and one draw in ten episodes; others share nothing."""
    given = chosen(log(np.random.default_rng(2), 500), np.repeat(np.arange(500), 10))
    units = np.repeat(np.arange(500), 10)
    assert checked(given, units).passed
    assert not checked(given).passed
    assert not checked(given, np.arange(5000)).passed


def test_a_share_of_contexts_finds_the_same(monkeypatch):
    """Copies share their observation, so a sample of observations has whole groups."""
    monkeypatch.setattr("policy.ope.repeats.MOST_KEPT", 1000)
    given = log(np.random.default_rng(3), 4000)
    assert checked(given).passed
    found = checked(chosen(given, np.r_[np.arange(4000), np.arange(2000)]), blocks=9)
    assert found.value == pytest.approx(0.8 / 3, abs=0.05)


def test_too_many_episodes_with_one_observation_are_not_tested(monkeypatch):
    """No share of a single observation is small enough, and the sentence says so."""
    monkeypatch.setattr("policy.ope.repeats.MOST_KEPT", 1000)
    given = log(np.random.default_rng(4), 2000, contexts=1)
    found = checked(chosen(given, np.tile(np.arange(2000), 2)))
    assert found.sentence == "not tested: too many episodes begin with equal observations"
