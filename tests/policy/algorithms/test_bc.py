"""Behavioural cloning: the log-likelihood, and a policy like the one that logged."""

from __future__ import annotations

import numpy as np
import pytest

from policy.algorithms.bc import BCConfig
from policy.algorithms.learner import Learner
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.networks.policy import Policy
from storage.spaces.descriptors import Box, Dict, Discrete
from tests.policy.algorithms.steps import corridor, log_of

SPEC = PolicySpec(Box((2,)), Discrete(2), ModuleSpec(hidden=(8,), value_head=False))


def test_the_loss_is_the_mean_negative_log_likelihood() -> None:
    """The first step's loss is that of the initial policy, computed by numpy's twin."""
    log = corridor(32)
    learner = Learner(Policy(SPEC, seed=2), BCConfig(updates=1, minibatch=32))
    expected = -learner.policy.to_numpy().logp(log["obs"], log["actions"]).mean()
    assert learner.update(log)["loss"] == pytest.approx(expected, abs=1e-6)


def test_it_imitates_the_log_and_not_the_rewards() -> None:
    """Four of five logged actions are 0, and rewards prefer 1: the policy takes 0 as often."""
    log = corridor(2000)
    log["actions"] = (np.random.default_rng(1).random(2000) < 0.2).astype(np.int64)
    learner = Learner(Policy(SPEC), BCConfig(updates=400, lr=1e-2))
    learner.update(log)
    probabilities = learner.policy.to_numpy().probabilities(log["obs"])
    assert probabilities[:, 0].mean() == pytest.approx(0.8, abs=0.03)


def test_it_imitates_other_spaces_and_leaves_out_what_is_not_finite() -> None:
    """A Dict of a choice and a number; a NaN action costs its row."""
    action = Dict({"a": Discrete(3), "b": Box((1,))})
    spec = PolicySpec(Box((1,)), action, ModuleSpec(hidden=(), value_head=False))
    count = 600
    log = log_of(
        np.ones((count, 1)), np.zeros(count), np.zeros(count), np.ones(count), np.ones(count)
    )
    numbers = np.random.default_rng(0).normal(2.0, 0.5, size=(count, 1)).astype(np.float32)
    numbers[7] = np.nan
    log["actions.a"], log["actions.b"] = np.full(count, 2), numbers
    learner = Learner(Policy(spec), BCConfig(updates=600, lr=0.02))
    learner.update(log)
    assert learner.counts.excluded == {"not_finite": 1}
    acted = learner.policy.to_numpy().act(np.ones((500, 1)), np.random.default_rng(0))
    assert (acted.columns["a"] == 2).mean() > 0.97
    assert acted.columns["b"].mean() == pytest.approx(2.0, abs=0.1)
    assert acted.columns["b"].std() == pytest.approx(0.5, abs=0.1)
