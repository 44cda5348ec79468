"""A comparison has one error over all looks, and marks an approximate verdict."""

import json
import math

import numpy as np
import pytest

from policy.ope.comparison import compare, skewed_t_interval
from policy.ope.differences import Differences


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
    """The first spends four fifths, one sequence for all later ones the rest."""
    values = np.random.default_rng(1).uniform(-1, 1, 200)
    first, second, third = (
        compare(made(values, 1.0), bar="it", error=0.025, looks=looks) for looks in range(3)
    )
    assert first.error + second.error == pytest.approx(0.025)
    assert third.error == second.error
    assert (first.bound, second.bound) == ("betting", "sequence")
    spent = sum(compare(made(values), bar="it", error=0.025, looks=n).error for n in range(30))
    assert spent == pytest.approx(0.025)


@pytest.mark.parametrize("limit", [3.0, math.inf])
def test_what_is_missing_would_be_enough(limit):
    """In most repetitions, the stated number of further episodes of the same kind is sufficient."""
    rng = np.random.default_rng(2)

    def drawn(n):
        return made(rng.choice([-1.0, 1.0], p=[0.46, 0.54], size=n), limit)

    few = compare(drawn(300), bar="it", error=0.025)
    while few.verdict != "cannot tell" or not 0.06 < few.difference < 0.1:
        few = compare(drawn(300), bar="it", error=0.025)
    n = 300 + few.missing
    told = [compare(drawn(n), bar="it", error=0.025).verdict == "better" for _ in range(100)]
    assert 0.6 < np.mean(told) < 0.97


def test_no_difference_is_no_number():
    """If the candidate equals the bar, no number of episodes would decide."""
    found = compare(made(np.zeros(50), 1.0), bar="it", error=0.025)
    assert (found.verdict, found.missing) == ("cannot tell", None)


def test_a_number_beyond_reach_is_no_number():
    """A limit that long episodes multiply needs more episodes than anybody logs."""
    values = np.random.default_rng(2).normal(0.1, 1.0, size=300)
    assert compare(made(values, 1e3), bar="it", error=0.025).missing is not None
    found = compare(made(values, 1e18), bar="it", error=0.025)
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
