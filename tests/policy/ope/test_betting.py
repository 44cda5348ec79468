"""The betting bound keeps its error, finds its root, and never looks ahead."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.ope import betting
from policy.ope.betting import betting_interval, wealth_against
from policy.ope.columns import column_of, whole


@pytest.mark.parametrize("sequence", [False, True])
def test_each_end_fails_no_more_often_than_promised(sequence):
    """Rare events, 400 repetitions: Clopper-Pearson at 99.9 % would detect an error of .05."""
    rng, failed = np.random.default_rng(1), 0
    for _ in range(400):
        values = (rng.random(500) < 0.02).astype(np.float64)
        low, high = betting_interval(values, limits=(0.0, 1.0), error=0.05, sequence=sequence)
        failed += (low > 0.02) + (high < 0.02)
    assert failed <= 60  # of 800 ends at 5 %: more has a probability below .001


def test_a_sequence_may_be_looked_at_after_every_number():
    """Of 400 fair walks with 300 looks each, few ever reach the bound; of unfair ones, most do."""
    rng, ever = np.random.default_rng(2), {0.5: 0, 0.6: 0}
    for _ in range(400):
        for chance in ever:
            values = rng.choice([-1.0, 1.0], p=[1 - chance, chance], size=300)
            low, _ = betting_interval(values, limits=(-1.0, np.inf), error=0.05, sequence=True)
            ever[chance] += low > 0
    assert ever[0.5] <= 34  # of 400 at 5 %: more has a probability below .001
    assert ever[0.6] > 100


@given(
    st.lists(st.floats(-1, 2), min_size=2, max_size=40),
    st.floats(0.001, 0.4),
    st.booleans(),
)
@settings(deadline=None, max_examples=200)
def test_the_ends_are_where_the_wealth_is_just_not_enough(numbers, error, sequence):
    """Just below the lower end the bet is won, just above it is not; the upper end is the mirror
    image.
    """
    values = np.array(numbers)
    low, high = betting_interval(values, limits=(-1.0, 2.0), error=error, sequence=sequence)
    threshold = math.log(1 / error)
    if not sequence:
        assert low <= values.mean() <= high
    if low > -1.0 + 1e-6:
        column = column_of(values)
        bets = betting._bets(column, -1.0, error, sequence)
        below, above = (
            betting._log_wealth(column, bets, low + step, -1.0, sequence) for step in (-1e-6, 1e-6)
        )
        if not sequence:
            above = wealth_against(values, low + 1e-6, least=-1.0, error=error)
        assert below >= threshold - 1e-9 >= above - 2e-9
    turned = betting_interval(-values, limits=(-2.0, 1.0), error=error, sequence=sequence)
    assert turned == pytest.approx((-high, -low), abs=1e-9)


def test_bets_know_the_past_alone():
    """No stake depends on its own number or on a later one."""
    values = np.random.default_rng(3).normal(size=50).clip(-3, 3)
    other = values.copy()
    other[30] = 2.9
    for sequence in (False, True):
        one, two = (
            whole(betting._bets(column_of(given), -3.0, 0.05, sequence))
            for given in (values, other)
        )
        assert (one[:31] == two[:31]).all()
        assert (one[31:] != two[31:]).any()


def test_an_end_without_a_limit_has_no_bound():
    """The lower bound needs only the lower limit of the numbers, the upper bound only the upper
    one."""
    values = np.random.default_rng(4).random(500)
    both = betting_interval(values, limits=(0.0, 1.0), error=0.025)
    low, high = betting_interval(values, limits=(0.0, math.inf), error=0.025)
    assert (low, high) == (both[0], math.inf)
    assert betting_interval(values, limits=(-math.inf, 1.0), error=0.025) == (-math.inf, both[1])
    assert betting_interval(np.empty(0), limits=(0.0, 1.0), error=0.025) == (-math.inf, math.inf)


def test_a_wide_range_costs_width_and_never_truth():
    """With limits a thousand times too wide, the interval is wider and still contains the mean."""
    values = (np.random.default_rng(5).random(2000) < 0.5).astype(np.float64)
    narrow = betting_interval(values, limits=(0.0, 1.0), error=0.025)
    wide = betting_interval(values, limits=(-1000.0, 1000.0), error=0.025)
    assert wide[0] < narrow[0] < 0.5 < narrow[1] < wide[1]
    assert wide[0] > -1000.0


@pytest.mark.parametrize(
    ("limits", "error", "text"),
    [((0.0, 0.5), 0.1, "numbers in"), ((1.0, 0.0), 0.1, "low < high"), ((0.0, 1.0), 1.0, "(0, 1)")],
)
def test_what_does_not_fit_is_refused(limits, error, text):
    """Numbers beyond their limits would make the bound wrong, and raise an error."""
    with pytest.raises(ValueError, match=text.replace("(", r"\(").replace(")", r"\)")):
        betting_interval(np.array([0.2, 0.7]), limits=limits, error=error)
