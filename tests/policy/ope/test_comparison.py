"""A comparison has one error over all looks, and marks an approximate verdict."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from policy.ope.betting import numbers_needed
from policy.ope.columns import column_of
from policy.ope.comparison import compare, skewed_t_interval
from policy.ope.differences import Differences, bounded_per_decision, per_decision_terms


def made(values, limit=math.inf):
    return Differences("dr", values, values, -limit, values, limit)


def test_the_verdict_is_the_side_of_zero():
    """Above, below, across; with limits by betting, without them by Student's t."""
    noise = np.random.default_rng(0).uniform(-1, 1, 4000)
    for shift, verdict in ((0.2, "better"), (-0.2, "worse"), (0.0, "cannot tell")):
        for limit, bound in ((2.0, "betting"), (math.inf, "student")):
            found = compare(made(noise - noise.mean() + shift, limit), bar="it", error=0.025)
            assert (found.verdict, found.bound) == (verdict, bound)
            assert found.approximate == (bound == "student")
            json.dumps(found.to_dict(), allow_nan=False)


def test_all_looks_together_keep_the_error():
    """The first spends four fifths. One sequence for all later ones spends half of the rest, so
    that looks of another kind, which end it, have the other half."""
    values = np.random.default_rng(1).uniform(-1, 1, 200)
    first, second, third = (
        compare(made(values, 1.0), bar="it", error=0.025, looks=looks) for looks in range(3)
    )
    assert (first.error, second.error) == pytest.approx((0.8 * 0.025, 0.1 * 0.025))
    assert third.error == second.error
    others = sum(compare(made(values), bar="it", error=0.025, looks=n).error for n in range(2, 30))
    assert first.error + second.error + others == pytest.approx(0.025)
    assert (first.bound, second.bound) == ("betting", "sequence")
    spent = sum(compare(made(values), bar="it", error=0.025, looks=n).error for n in range(30))
    assert spent == pytest.approx(0.025)


@pytest.mark.parametrize("looks", [0, 2])
@pytest.mark.parametrize(
    ("limit", "in_order"), [(1.0, True), (1.0, False), (3.0, True), (20.0, True), (math.inf, True)]
)
def test_what_is_missing_is_enough_for_the_next_look(limit, in_order, looks):
    """If the difference stays, the next look, with its own error and bound, tells in about 4 of 5
    cases: of 100 logs, 66 or more with 99.9 %."""
    rng, outcomes = np.random.default_rng(2), []

    def drawn(n, mean):
        return rng.choice([-1.0, 1.0], p=[(1 - mean) / 2, (1 + mean) / 2], size=n)

    def looked(values, number):
        log = Differences("ips", values, values, -limit, values, limit, in_order)
        return compare(log, bar="it", error=0.025, looks=number)

    while len(outcomes) < 100:
        values = drawn(300, 0.08)
        few = looked(values, looks)
        if few.verdict == "cannot tell" and 0.05 < few.difference < 0.12:
            more = drawn(few.missing, few.difference)
            outcomes.append(looked(np.concatenate([values, more]), looks + 1).verdict == "better")
    assert np.mean(outcomes) >= 0.66


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("cost", [False, True])
def test_what_is_missing_allows_for_rare_events(sign, cost):
    """Rare gains and rare costs have another number at the same spread. Both are enough."""
    rng, outcomes = np.random.default_rng(3), []

    def drawn(n, mean):
        weights = 4.0 * (rng.random(n) < 0.25)
        rate = 0.04 + (-mean if cost else mean) / 0.75
        events = rng.random(n) < np.where(weights > 0, rate, 0.04)
        return (weights - 1) * np.where(events, -1.0 if cost else 1.0, 0.0)

    while len(outcomes) < 100:
        values = drawn(2000, sign * 0.01)
        few = compare(made(values, 4.0), bar="it", error=0.025)
        if few.verdict == "cannot tell" and 0.005 < sign * few.difference < 0.02:
            log = np.concatenate([values, drawn(few.missing, few.difference)])
            found = compare(made(log, 4.0), bar="it", error=0.025, looks=1)
            outcomes.append(found.verdict == ("better" if sign > 0 else "worse"))
    assert np.mean(outcomes) >= 0.66


@pytest.mark.long
@pytest.mark.parametrize(("range_", "effect"), [((-1.0, 0.0), 0.3), ((0.0, 1.0), -0.3)])
def test_what_is_missing_allows_for_several_steps(range_, effect):
    """Ten steps: the bound uses adjusted rewards, whose mean has the same expectation as that of
    the measured ones, but is another number with another spread."""
    steps, rng, outcomes = 10, np.random.default_rng(4), []
    expected = 0.2 * effect * steps

    def drawn(n):
        """The candidate takes the first of two actions with 0.7; it earns `effect` more."""
        taken = rng.random(n * steps) < 0.5
        high = rng.random(n * steps) < np.where(taken, 0.5 + effect, 0.5)
        weights = np.where(taken, 1.4, 0.6).reshape(n, steps).cumprod(axis=1).ravel()
        rewards = np.where(high, range_[1], range_[0])
        return np.stack(per_decision_terms(rewards, weights, None, np.full(n, steps), 1.0))

    def looked(terms, looks):
        values, to_end, last = map(column_of, terms)
        found = bounded_per_decision(
            values,
            (to_end, last),
            (steps, steps),
            gamma=1.0,
            reward_range=range_,
            largest_weight=2.0,
            against_log=True,
        )
        return compare(found, bar="it", error=0.025, looks=looks)

    while len(outcomes) < 100:
        terms = drawn(500)
        few = looked(terms, 0)
        if few.missing is not None and abs(few.difference / expected - 1) < 0.15:
            log = np.concatenate([terms, drawn(few.missing)], axis=1)
            outcomes.append(looked(log, 1).verdict == ("better" if effect > 0 else "worse"))
    assert np.mean(outcomes) >= 0.66


@pytest.mark.parametrize("sizes", [(-0.5, 4.0), (-4.0, 0.5), (-1.0, 1.0)])
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_missing_follows_the_numbers_that_decide(sizes, sign):
    """A gain is decided by `lower`, a loss by `upper`. Numbers of two sizes, rare ones or not, need
    what the bets on these sizes need; mean, variance and skewness show them."""
    rate = round(200 * (0.1 - sizes[0]) / (sizes[1] - sizes[0])) / 200
    deciding = np.repeat(sizes, (round(200 * (1 - rate)), round(200 * rate)))
    other = np.tile([-3.0, 3.02], 100)
    lower, upper = (deciding, other) if sign > 0 else (other, -deciding)
    log = Differences("pdis", sign * other, lower, -5.0, upper, 5.0)
    found = compare(log, bar="it", error=0.025)
    needed = numbers_needed(sizes, (1 - rate, rate), least=-5.0, error=0.025 * 0.1, sequence=True)
    assert (found.verdict, found.unknown) == ("cannot tell", "")
    assert found.missing == pytest.approx(needed - 200, rel=0.06)  # rounded up to two digits


def test_a_value_that_the_range_excludes_has_no_number():
    """The mean of few numbers may be further out than any difference of two policies."""
    values = np.array([10.0, -1.0, -1.0, 4.0])
    found = compare(replace(made(values, 20.0), furthest=1.0), bar="it", error=0.025)
    assert (found.verdict, found.difference, found.interval) == ("cannot tell", 3.0, (-1, 1))
    assert (found.missing, found.unknown) == (None, "the reward range excludes this value")


def test_the_limits_make_an_interval_wide_also_if_the_range_cuts_it():
    """Whether they do is a property of the numbers and their limits."""
    values = np.tile([-1.0, 1.2], 10)
    for furthest in (math.inf, 1.0):
        for limit, wide in ((50.0, True), (1.2, False)):
            log = replace(made(values, limit), furthest=furthest)
            assert compare(log, bar="it", error=0.025).limited == wide


def test_a_difference_that_only_the_measured_rewards_show_has_no_number():
    """The numbers that decide have another mean, by chance on the other side of zero."""
    values = np.tile([-1.0, 1.1], 50)
    log = Differences("pdis", values, values - 0.1, -2.0, values, 2.0)
    found = compare(log, bar="it", error=0.025)
    assert (found.verdict, found.missing) == ("cannot tell", None)
    assert found.unknown == "the adjusted rewards that the bound uses do not show it yet"


def test_equal_differences_need_what_their_limit_alone_asks():
    """Equal numbers have no spread; the limit alone decides how many are needed."""
    found = compare(made(np.full(5, 0.1), 1.0), bar="it", error=0.025)
    assert found.verdict == "cannot tell"
    assert 10 < found.missing < 1000


def test_no_difference_is_no_number():
    """If the candidate equals the bar, no number of episodes would decide."""
    found = compare(made(np.zeros(50), 1.0), bar="it", error=0.025)
    assert (found.verdict, found.missing) == ("cannot tell", None)


def test_a_number_beyond_reach_is_no_number():
    """A limit that long episodes multiply needs more episodes than anybody logs."""
    values = np.random.default_rng(2).normal(0.1, 1.0, size=300)
    assert compare(made(values, 1e6), bar="it", error=0.025).missing is not None
    found = compare(made(values, 1e8), bar="it", error=0.025)
    assert (found.verdict, found.missing) == ("cannot tell", None)


def test_hall_mends_what_skewness_does_to_students_t():
    """Rare costs: the plain t's upper side misses far more often than its level."""
    rng, missed = np.random.default_rng(3), {"plain": 0, "hall": 0}
    for _ in range(4000):
        values = -(rng.random(1000) < 0.03).astype(np.float64)
        missed["hall"] += skewed_t_interval(values, 0.025)[0] > -0.03
        half = 1.9623 * values.std(ddof=1) / math.sqrt(1000)
        missed["plain"] += values.mean() - half > -0.03
    assert missed["plain"] > 160 > 131 >= missed["hall"]  # of 4,000 at 2.5 %: 131 is P = .001
    assert skewed_t_interval(np.ones(1), 0.025) == (-math.inf, math.inf)
    symmetric = np.tile([-1.0, 1.0], 50)
    low, high = skewed_t_interval(symmetric, 0.025)
    assert (low, high) == pytest.approx((-0.19941, 0.19941), abs=1e-4)


def test_numbers_that_change_between_looks_have_no_sequence():
    """With growing units or interleaved streams, each look spends a share of the error."""
    values = np.random.default_rng(4).uniform(-1, 1, 200)
    moved = Differences("ips", values, values, -1.0, values, 1.0, in_order=False)
    found = [compare(moved, bar="it", error=0.025, looks=looks) for looks in range(30)]
    assert {one.bound for one in found} == {"betting"}
    assert sum(one.error for one in found) == pytest.approx(0.025)
