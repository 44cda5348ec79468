"""Episodes as flat arrays: refused input, and the place that the message names."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from policy.ope import estimators
from policy.ope.episodes import Episodes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": [1.0, np.nan, 0.0]}, r"rewards: .*finite.*nan in episode 1, step 0"),
        ({"rewards": [1.0, 2.0]}, r"rewards: expected shape \(3,\).*\(2,\)"),
        ({"rewards": ["a", "b", "c"]}, "rewards: expected numbers"),
        ({"lengths": [1, 2.0]}, "lengths: expected integers"),
        ({"lengths": [3, 0]}, "at least 1 step, got 0 for episode 1"),
        ({"behaviour_logp": [-1.0, -1.0, 0.1]}, r"behaviour_logp.*0\.1 in episode 1, step 1"),
        ({"behaviour_logp": [-1.0, -np.inf, -1.0]}, r"behaviour_logp.*-inf in episode 1, step 0"),
        ({"target_logp": [np.nan, -1.0, -1.0]}, r"target_logp.*nan in episode 0, step 0"),
        ({"target_logp": [-1.0, -1.0, 0.1]}, r"target_logp.*0\.1 in episode 1, step 1"),
        ({"q": [0.0, 0.0, np.inf]}, r"q: .*inf in episode 1, step 1"),
        ({"v": [0.0]}, r"v: expected shape"),
        ({"pass_prob": [0.5, 0.0]}, r"pass_prob: .*\(0, 1\], got 0\.0 in episode 1"),
        ({"pass_prob": [-0.2, 0.5]}, r"pass_prob: .*-0\.2 in episode 0"),
        ({"pass_prob": [0.5, 7.0]}, r"pass_prob: .*7\.0 in episode 1"),
        ({"pass_prob": [np.nan, 0.5]}, r"pass_prob: .*nan in episode 0"),
        ({"pass_prob": [0.5] * 3}, r"pass_prob: expected shape \(2,\), one number an episode"),
        ({"units": [0]}, r"units: expected integers \(2,\), one an episode, .*\(1,\)"),
        ({"units": [0.2, 0.7]}, r"units: expected integers \(2,\), .*float64"),
        ({"ended": ["terminated"]}, "ended: expected 2 words"),
        ({"ended": ["terminated", "done"]}, "'done' in episode 1"),
        ({"ended": ["terminated"] * 2, "leave_out": ["brocken"]}, "leave_out.*brocken"),
    ],
)
def test_bad_columns_are_refused_with_their_place(change: dict[str, Any], message: str) -> None:
    """The error says what was expected, what came, and in which episode and step."""
    good: dict[str, Any] = {
        "rewards": [1.0, 2.0, 0.0],
        "lengths": [1, 2],
        "behaviour_logp": [-1.0, -1.0, 1e-7],
        "target_logp": [-1.0, -np.inf, 0.0],
        "q": [0.0, 0.0, 0.0],
        "v": [0.0, 0.0, 0.0],
    }
    assert Episodes.from_flat(**good).n == 2
    with pytest.raises(ValueError, match=message):
        Episodes.from_flat(**{**good, **change})


def test_episodes_of_a_unit_follow_each_other() -> None:
    """A unit that comes again would count as another sample."""
    columns: dict[str, Any] = {"lengths": [1, 2, 1, 1, 1], "rewards": np.zeros(6)}
    assert Episodes.from_flat(**columns, units=[7, 7, 3, 0, 0]).unit_starts.tolist() == [0, 2, 3]
    with pytest.raises(ValueError, match=r"units: .* follow each other, got 7 again in episode 3"):
        Episodes.from_flat(**columns, units=[7, 7, 3, 7, 3])
    assert Episodes.from_flat([], lengths=[], units=[], pass_prob=[]).n == 0


def test_densities_may_exceed_one() -> None:
    """A density of a continuous action has no upper bound; a probability has."""
    columns: dict[str, Any] = {"lengths": [1], "behaviour_logp": [0.5], "target_logp": [0.7]}
    with pytest.raises(ValueError, match="behaviour_logp"):
        Episodes.from_flat([2.0], **columns)
    episodes = Episodes.from_flat([2.0], **columns, densities=True)
    assert estimators.ips(episodes).value == pytest.approx(2 * math.exp(0.2))


@pytest.mark.parametrize(
    ("behaviour", "target", "message"),
    [
        ([0.5, 0.0], [0.5, 0.5], r"behaviour_prob.*\(0, 1\].*0\.0 in episode 1, step 0"),
        ([1.5, 0.5], [0.5, 0.5], r"behaviour_prob.*1\.5 in episode 0"),
        ([0.5, 0.5], [0.5, -0.1], r"target_prob.*-0\.1 in episode 1"),
        ([0.5, 0.5], [np.nan, 0.1], r"target_prob.*nan in episode 0"),
        ([0.5], [0.5, 0.1], r"behaviour_prob: expected shape \(2,\)"),
    ],
)
def test_bad_probabilities_are_refused(
    behaviour: list[float], target: list[float], message: str
) -> None:
    """A propensity is in (0, 1]; a target probability in [0, 1]."""
    with pytest.raises(ValueError, match=message):
        Episodes.one_step([1.0, 0.0], behaviour_prob=behaviour, target_prob=target)


def test_ragged_lists_must_match() -> None:
    """A column of another shape names its episode."""
    with pytest.raises(ValueError, match="v of episode 1: expected shape"):
        Episodes.from_ragged([[1.0], [1.0, 2.0]], v=[[1.0], [1.0]])
    with pytest.raises(ValueError, match="q: expected 2 episodes, got 1"):
        Episodes.from_ragged([[1.0], [1.0, 2.0]], q=[[1.0]])
