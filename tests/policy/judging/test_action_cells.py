"""Right propensities of every kind of action have cells of mean 1."""

import math

import numpy as np
import pytest

from policy.judging.action_cells import cells_of
from policy.ope.propensities import Propensities
from storage.spaces.descriptors import Box, Dict, Discrete, MultiBinary, MultiDiscrete

N = 20_000


def draws(kind, rng):
    """(space, columns, log propensities) of actions drawn evenly."""
    if kind == "discrete":
        return Discrete(3, 5), {"": rng.integers(5, 8, N)}, -math.log(3)
    if kind == "several":
        several = np.stack([rng.integers(2, size=N), rng.integers(1, 4, N)], axis=1)
        return MultiDiscrete((2, 3), (0, 1)), {"": several}, -math.log(6)
    if kind == "binary":
        return MultiBinary((2,)), {"": rng.integers(2, size=(N, 2))}, -math.log(4)
    if kind == "box":
        return Box((2,), low=-1, high=3), {"": rng.uniform(-1, 3, (N, 2))}, -math.log(16)
    both = Dict((("a", Discrete(2)), ("b", Box((), low=0, high=2))))
    return both, {"a": rng.integers(2, size=N), "b": rng.uniform(0, 2, N)}, -math.log(4)


@pytest.mark.parametrize("kind", ["discrete", "several", "binary", "box", "both"])
def test_even_actions_have_means_of_one(kind):
    """And with propensities of half the size they are refused, with a mean of 2."""
    space, columns, logp = draws(kind, np.random.default_rng(0))
    cells = cells_of(space, columns)
    for half in (False, True):
        found = Propensities()
        found.add(np.full(N, logp - math.log(2) * half), cells)
        check = found.check()
        assert check.passed is not half
        assert check.value == pytest.approx(2.0 if half else 1.0, abs=0.06)


def test_cells_have_names():
    """Of the action, the position and value, or the part of a range."""
    assert cells_of(Discrete.of(["a", "b"]), {"": np.zeros(1)}).name(1) == "'b'"
    assert cells_of(Discrete(3, 5), {"": np.full(1, 5)}).name(2) == "action 7"
    assert cells_of(MultiDiscrete((2, 3), (0, 1)), {"": np.ones((1, 2))}).name(3) == "[1] = 2"
    assert cells_of(Box((2,), low=-1, high=3), {"": np.ones((1, 2))}).name(6) == "[1] in 1..2"


def test_numbers_without_bounds_have_no_cells():
    """Nothing is known of the volume of their parts."""
    assert cells_of(Box((1,)), {"": np.zeros((1, 1))}) is None


def test_an_action_outside_its_box_is_in_no_cell():
    """The upper bound itself is in the last one."""
    cells = cells_of(Box((), low=0, high=1), {"": np.array([-0.1, 0.0, 1.0, 1.1])})
    assert cells.numbers[:, 0].tolist() == [-1, 0, 3, -1]
