"""Lost episodes that depend on the action are found, and equal ones are not."""

import math
from dataclasses import replace

import numpy as np
import pytest

from policy.ope.columns import MemoryColumn
from policy.ope.judgement import Bar, Judged, Rules, TargetPolicy, judge
from policy.ope.lost_episodes import LostEpisodes


def episodes(taken, lost, units=None):
    n = len(taken)
    return Judged(
        rewards=np.zeros(n),
        lengths=np.ones(n, np.int64),
        behaviour_logp=np.full(n, math.log(0.5)),
        flat=np.zeros((n, 1)),
        taken=np.asarray(taken),
        lost=np.asarray(lost, np.bool_),
        units=units,
    )


def checked(data, weights, most=1.0):
    found = LostEpisodes(MemoryColumn)
    found.add(data, weights, None)
    return found.check("lost_by_action", "the log", (-1.0, most), lambda a: f"action {a}")


def test_the_share_of_a_policy_is_weighted():
    """Of 8 episodes 3 are lost, with weights 1.8, 1.8 and .2: (.8 + .8 - .8) / 8 = +10 %."""
    taken, lost = np.array([0, 0, 0, 0, 1, 1, 1, 1]), [1, 1, 0, 0, 1, 0, 0, 0]
    found = checked(episodes(taken, lost), np.where(taken == 0, 1.8, 0.2))
    assert found.value == pytest.approx(0.1)
    assert found.passed
    assert found.sentence.startswith("3 episodes (37.50%) abandoned or broken; by weight")


def test_a_lost_episode_stands_for_those_that_were_not_logged():
    """As above; the last lost one was logged with .5: (.8 + .8 - 2 * .8) / 9 = 0."""
    taken, lost = np.array([0, 0, 0, 0, 1, 1, 1, 1]), [1, 1, 0, 0, 1, 0, 0, 0]
    chances = np.array([1, 1, 1, 1, 0.5, 1, 1, 1])
    data = replace(episodes(taken, lost), pass_prob=chances)
    assert checked(data, np.where(taken == 0, 1.8, 0.2)).value == pytest.approx(0.0)


@pytest.mark.parametrize("side", [0, 1])
def test_losses_after_one_action_are_found_both_ways(side):
    """40 lost episodes all have the candidate's action, or the other; the sentence names it."""
    taken = np.arange(4000) % 2
    lost = (taken == side) & (np.arange(4000) < 80)
    found = checked(episodes(taken, lost), np.where(taken == 0, 1.8, 0.2))
    assert not found.passed
    assert f"(most after action {side}: 2.0%)" in found.sentence
    assert found.value == pytest.approx((0.8 if side == 0 else -0.8) * 0.01)


def test_equal_losses_pass():
    """Half of the lost episodes have each action."""
    taken = np.arange(4000) % 2
    assert checked(episodes(taken, np.arange(4000) < 200), np.where(taken == 0, 1.8, 0.2)).passed


def test_units_are_counted_and_not_their_episodes():
    """One user's 40 lost episodes are one number, which shows nothing."""
    taken, units = np.zeros(80, np.int64), np.repeat([0, 1], 40)
    lost, weights = units == 0, np.full(80, 1.8)
    assert checked(episodes(taken, lost, units), weights).passed
    assert not checked(episodes(taken, lost), weights).passed


def test_a_lost_episode_of_several_steps_counts_to_the_longest_length():
    """With equal lengths a constant reward changes no difference, also if an episode was cut.

    So the weights do not widen the candidate's side of the bound, and it is found to be better.
    """
    rng, n = np.random.default_rng(0), 400
    lengths = np.full(n, 3)
    lengths[7] = 1
    lost = np.arange(n) == 7
    taken = rng.integers(2, size=lengths.sum())
    probs = np.array([0.6, 0.4])
    data = Judged(
        rewards=np.where(np.repeat(lost, lengths), 0.0, -(taken == 1).astype(float)),
        lengths=lengths,
        behaviour_logp=np.full(taken.size, math.log(0.5)),
        flat=np.zeros((taken.size, 1)),
        taken=taken,
        lost=lost,
    )
    candidate = TargetPolicy(np.log(probs[taken]), np.broadcast_to(probs, (taken.size, 2)))
    rules = Rules(reward_range=(-1.0, 0.0))
    (found,) = judge(data, candidate, [Bar("log")], rules).comparisons
    # of unequal lengths it would be -(2 + 4 + 8)
    assert found.limits[0] == pytest.approx(-3, rel=1e-5)
    assert found.verdict == "better"
