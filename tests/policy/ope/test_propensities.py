"""Wrong propensities are found in every cell, and right ones pass."""

import math

import numpy as np
import pytest

from policy.ope.propensities import ActionCells, Propensities, _WealthTable


def test_a_check_can_be_made_again():
    """It has the same result, also of pooled actions and of units."""
    taken = np.r_[np.repeat(np.arange(1, 101), 20), np.zeros(18_000, np.int64)]
    logp = np.where(taken == 0, math.log(0.9), math.log(0.001 / 20))
    for units in (None, np.arange(taken.size)):
        found = Propensities()
        cells = ActionCells(taken[:, None], np.zeros(101), str)
        found.add(logp, cells, units)
        assert found.check() == found.check()
        assert not found.check().passed


def checked(taken, logp, actions, blocks=1, units=None, tags=None):
    found = Propensities()
    for rows in np.array_split(np.arange(len(taken)), blocks):
        cells = ActionCells(taken[rows][:, None], np.zeros(actions), lambda a: f"action {a}")
        own = None if tags is None else {"app": [tags[row] for row in rows]}
        found.add(logp[rows], cells, None if units is None else units[rows], own)
    return found.check()


def test_the_wealth_is_that_of_its_formula():
    """Two steps of propensity .25, of which one took the action: mean of (1 + 3 s)(1 - s)."""
    table = _WealthTable(1)
    table.grow(1, 1)
    none = np.zeros(2, np.int64)
    table.add(none, none[:1], none[:1], np.array([4.0]))
    stakes = 0.5 ** np.arange(1.0, 15.0)
    assert table.wealth()[0, 0] == pytest.approx(math.log(((1 + 3 * stakes) * (1 - stakes)).mean()))


def test_the_wealth_of_sampled_steps_has_smaller_bets():
    """The event has half of the other row's weight: mean of (1 + 3 s / 2) (1 - s), mean 2 / 1.5."""
    table, none = _WealthTable(1), np.zeros(2, np.int64)
    table.grow(1, 1)
    weights = np.array([0.5, 1.0]), np.array([0.5])
    table.add(none, none[:1], none[:1], np.array([4.0]), weights)
    stakes = 0.5 ** np.arange(1.0, 15.0)
    expected = math.log(((1 + 1.5 * stakes) * (1 - stakes)).mean())
    assert table.wealth()[0, 0] == pytest.approx(expected)
    assert (table.sums[0, 0, 0], table.weight[0]) == (2.0, 1.5)


@pytest.mark.parametrize("blocks", [1, 7])
def test_a_propensity_that_is_too_low_is_named(blocks):
    """The first action is taken in 70 % with .25 written: its mean is 2.8."""
    taken = np.random.default_rng(0).choice(4, p=[0.7, 0.1, 0.1, 0.1], size=4000)
    found = checked(taken, np.full(4000, math.log(0.25)), 4, blocks)
    assert not found.passed
    assert found.value == pytest.approx(2.8, abs=0.1)
    assert "for action 0, where at most 1 was expected" in found.sentence


def test_right_propensities_of_rare_actions_pass():
    """One step of probability 1e-4 in 2,000 is no proof."""
    taken, probs = np.r_[np.zeros(1999, np.int64), 1], np.array([0.9999, 1e-4])
    assert checked(taken, np.log(probs[taken]), 2).passed


def test_actions_with_few_events_are_pooled():
    """Each of 100 actions comes 20 times, written with a twentieth of its probability."""
    taken = np.r_[np.repeat(np.arange(1, 101), 20), np.zeros(18_000, np.int64)]
    logp = np.where(taken == 0, math.log(0.9), math.log(0.001 / 20))
    order = np.random.default_rng(0).permutation(taken.size)
    found = checked(taken[order], logp[order], 101)
    assert "100 actions with few events together" in found.sentence
    assert found.value == pytest.approx(20)


def test_a_part_of_the_log_is_found():
    """In the last tenth the propensity is too low; in the whole log the mean is 1.08."""
    rng, n = np.random.default_rng(1), 20_000
    share = np.where(np.arange(n) >= 18_000, 0.45, 0.25)
    taken = np.where(rng.random(n) < share, 0, rng.integers(1, 4, size=n))
    found = checked(taken, np.full(n, math.log(0.25)), 4, blocks=3)
    assert not found.passed
    assert "action 0 in part" in found.sentence


def test_a_tag_is_found():
    """One app of five writes .25 and means .4."""
    rng, n = np.random.default_rng(1), 20_000
    tags = ["old" if i % 5 == 0 else None if i % 5 == 1 else "new" for i in range(n)]
    share = np.array([0.4 if tag == "old" else 0.25 for tag in tags])
    taken = np.where(rng.random(n) < share, 0, rng.integers(1, 4, size=n))
    assert (
        "action 0 with app=old"
        in checked(taken, np.full(n, math.log(0.25)), 4, 3, None, tags).sentence
    )


def test_a_tag_of_early_blocks_only_is_found():
    """One app writes .25 and means .5, before later blocks bring other cells and units."""
    rng, n = np.random.default_rng(2), 4000
    early = np.where(rng.random(n) < 0.5, 0, rng.integers(1, 4, size=n))
    later = rng.integers(6, size=5 * n)
    for units in (None, np.arange(6 * n)):
        found = Propensities()
        for rows, taken, actions, tags in (
            (slice(0, n), early, 4, {"app": ["old"] * n}),
            (slice(n, 6 * n), later, 6, None),
        ):
            cells = ActionCells(taken[:, None], np.zeros(actions), lambda a: f"action {a}")
            logp = np.full(taken.size, -math.log(actions))
            found.add(logp, cells, None if units is None else units[rows], tags)
        assert "action 0 with app=old" in found.check().sentence


def test_thousands_of_actions_are_tested_in_the_whole_log_only():
    """5,000 actions, with a tag: the first is taken in half of the steps, written with .0002."""
    taken = np.r_[np.zeros(2000, np.int64), np.arange(3000)]
    found = checked(taken, np.full(5000, -math.log(5000)), 5000, tags=["a"] * 5000)
    assert not found.passed
    assert "for action 0, where at most 1 was expected" in found.sentence
    assert checked(taken[2000:], np.full(3000, -math.log(5000)), 5000, tags=["a"] * 3000).passed


def test_one_draw_for_all_steps_of_a_unit_passes_by_unit():
    """2,000 users with one draw each: wrong as 40,000 draws, right as 2,000."""
    taken = np.repeat(np.random.default_rng(3).integers(4, size=2000), 20)
    logp, units = np.full(40_000, math.log(0.25)), np.repeat(np.arange(2000), 20)
    assert not checked(taken, logp, 4).passed
    tags = [f"v{unit % 3}" for unit in units]
    assert checked(taken, logp, 4, 5, units, tags).passed
    wrong = np.where(np.random.default_rng(4).random(40_000) < 0.2, 0, taken)
    assert not checked(wrong, logp, 4, 5, units, tags).passed


def test_an_action_that_is_not_always_possible_is_noted():
    """Half of the log has two of four actions: their means are .5 there, which is no fault."""
    rng, n = np.random.default_rng(5), 20_000
    half = np.arange(n) % 2 == 0
    taken = np.where(half, rng.integers(2, size=n), rng.integers(4, size=n))
    found = checked(taken, np.where(half, math.log(0.5), math.log(0.25)), 4)
    assert found.passed
    assert "of steps it could not be taken, or its propensities are too high" in found.sentence
