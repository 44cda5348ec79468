"""The direct method: modelled rewards, which need no propensities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policy.algorithms.dm import DMConfig
from policy.algorithms.learner import Learner
from policy.inference.action_rule import ActionRule
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.networks.policy import Policy
from policy.training.train import acting_spec
from storage.spaces.descriptors import Box, Discrete

SPEC = PolicySpec(Box((2,)), Discrete(3, 1), ModuleSpec(hidden=(16,), value_head=False))


def test_it_models_the_reward_of_each_action(bandit_log: Any) -> None:
    """0.9 for the best action, nothing for the others; the best one is chosen."""
    log = bandit_log(4000)
    log.logp[:] = np.nan
    learner = Learner(Policy(SPEC), DMConfig(updates=1000, lr=1e-2))
    metrics = learner.update(log.batch())
    assert (metrics["rows"], metrics["left_out"]) == (4000, 0)
    fresh = bandit_log(500, seed=1).obs
    fresh = fresh[np.abs(fresh[:, 0]) > 0.3]
    modelled = learner.policy.to_numpy().dist_inputs(fresh)
    best = np.where(fresh[:, 0] > 0, 0, 2)
    rows = np.arange(len(fresh))
    assert modelled[rows, best].mean() == pytest.approx(0.9, abs=0.06)
    assert abs(modelled[rows, 1]).mean() < 0.06
    assert (modelled.argmax(axis=1) == best).mean() > 0.98


def test_a_part_that_fits_only_its_own_rows_is_not_kept(bandit_log: Any) -> None:
    """Few rows and many updates: the error on the inner split stays below that of learning on."""
    log = bandit_log(150).batch()
    log["rewards"] = np.random.default_rng(0).normal(size=150)
    wide = PolicySpec(Box((2,)), Discrete(3, 1), ModuleSpec(hidden=(64, 64)))
    config = DMConfig(updates=1000, inner_share=0.5, lr=1e-2)
    metrics = Learner(Policy(wide), config).update(log)
    assert metrics["inner_loss"] < 1.5


def test_rows_that_are_no_whole_decision_are_excluded(bandit_log: Any) -> None:
    """Several steps, abandoned, not finite: one reason each."""
    log = bandit_log(40)
    log.ended[0] = "abandoned"
    batch = log.batch()
    batch["t"] = np.where(np.arange(40) == 20, 1, 0)
    batch["rewards"][30] = np.nan
    learner = Learner(Policy(SPEC), DMConfig(updates=2))
    learner.update(batch)
    assert learner.counts.excluded == {"abandoned": 1, "not_one_step": 1, "not_finite": 1}


def test_its_policies_act_epsilon_greedily_between_listed_actions() -> None:
    """Rewards are no logits; a Box has no list of actions."""
    assert acting_spec(SPEC, DMConfig()).action_rule == ActionRule("epsilon_greedy", epsilon=0.05)
    with pytest.raises(ValueError, match="dm: expected a Discrete action space"):
        DMConfig().build(Policy(PolicySpec(Box((2,)), Box((1,)))))
