"""The end of a log is compared with the whole."""

import numpy as np
import pytest

from policy.ope.columns import MemoryColumn
from policy.ope.drift import ContextDrift, Drift


def checks(values, times=None, units=None, *, better=True, **more):
    drift = Drift(1, MemoryColumn)
    for rows in np.array_split(np.arange(len(values)), 3):
        drift.add(
            [values[rows]],
            None if times is None else times[rows],
            None if units is None else units[rows],
        )
    return {one.name: one for one in drift.checks(0, str, better=better, **more)}


def steps(n=2000, now=-0.5):
    """+.5 in the first four fifths, `now` in the last, with a spread of 1."""
    values = np.where(np.arange(n) < 0.8 * n, 0.5, now)
    return values + np.where(np.arange(n) % 2, 1.0, -1.0)


def test_another_sign_refuses_what_is_better():
    """The mean and the trend are those of the last fifth; for another verdict it only informs."""
    found = checks(steps())
    assert not found["last_fifth"].passed
    assert found["last_fifth"].value == pytest.approx(-0.5)
    assert found["trend"].value == pytest.approx(-1.0)
    assert found["trend"].passed
    assert checks(steps(), better=False)["last_fifth"].passed


def test_a_smaller_gain_is_a_trend_only():
    """It is still better."""
    found = checks(steps(now=0.1))
    assert found["last_fifth"].passed
    assert found["trend"].sentence.startswith("the difference went from +0.5 to +0.1")
    assert set(checks(steps(now=0.5))) == {"last_fifth"}


def test_the_last_fifth_is_compared_with_the_margin():
    """-.5 is not worse by more than .7; a log of which every second episode was kept says so."""
    assert checks(steps(), margin=-0.7)["last_fifth"].passed
    assert not checks(steps(), margin=-0.3)["last_fifth"].passed
    found = checks(2 * steps(), margin=-0.7, by=2.0)["last_fifth"]
    assert (found.value, found.passed) == (pytest.approx(-0.5), True)


def test_times_count_before_the_order():
    """The log of a second collector follows the first one's, with the same times."""
    values, times = steps(), np.arange(2000.0)
    order = np.r_[0:2000:2, 1:2000:2]
    assert not checks(values[order], times[order])["last_fifth"].passed
    assert checks(values[order])["last_fifth"].value != pytest.approx(-0.5)


def test_a_unit_is_one_number():
    """Half of 400 late episodes are of one user, who is one of 201."""
    values = np.r_[np.ones(1600), np.full(200, -1.0), np.ones(200)]
    units = np.r_[np.arange(1600), np.full(200, 1600), np.arange(1601, 1801)]
    assert checks(values, units=units)["last_fifth"].value == pytest.approx(199 / 201)
    assert checks(values)["last_fifth"].value == pytest.approx(0.0)


def test_short_logs_are_not_parted():
    """99 episodes in the last fifth are too few."""
    assert checks(steps(n=495)) == {}


def test_a_feature_that_moves_is_noted():
    """The third feature goes from 0 to 1 with a spread of 1; blocks of any size."""
    rng = np.random.default_rng(0)
    flat = rng.normal(size=(20_000, 3))
    flat[16_000:, 2] += 1.0
    for blocks in (1, 9):
        contexts = ContextDrift()
        for block in np.array_split(flat, blocks):
            contexts.add(block)
        (note,) = contexts.check()
        assert note.passed
        assert note.sentence.startswith("feature 2 of the observations moved by ")
    calm = ContextDrift()
    calm.add(flat[:16_000])
    assert calm.check() == []
    calm.add_later(flat[16_000:, :])
    (note,) = calm.check()
    assert note.sentence.startswith("feature 2 of the observations moved by ")
    assert note.value == pytest.approx(1.0, abs=0.1)
