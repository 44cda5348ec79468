"""Every algorithm gives a learner metrics of one shape, and errors that name columns."""

import logging
import math

import numpy as np
import pytest
import torch

from benchmarks.ppo_cartpole import CartPoles
from policy.algorithms.bandit import BanditConfig
from policy.algorithms.base import minibatches
from policy.algorithms.learner import Learner
from policy.algorithms.ppo import PPOConfig
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.networks.policy import Policy
from storage.experience.sample_batch import SampleBatch
from storage.spaces.descriptors import Box, Discrete

PLAYED = PolicySpec(Box((4,)), Discrete(2), ModuleSpec(hidden=(8,)))
DECIDED = PolicySpec(Box((2,)), Discrete(3, 1), ModuleSpec(hidden=(8,)))


def changed(batch, **columns):
    return SampleBatch({**batch, **columns})


@pytest.fixture(scope="module")
def played():
    """16 rows of CartPole that PPO can learn from."""
    return CartPoles(2, 5).play(Policy(PLAYED, seed=5).to_numpy(version=1), 8)


def ppo_batches(played):
    """Batches without usable rows: no batch, no rows, only logged ones, only ones without
    propensity.
    """
    return [
        SampleBatch(),
        played.slice(0, 0),
        changed(played, source=np.full(played.count, "logged", object)),
        changed(played, action_logp=np.full(played.count, np.nan)),
    ]


def test_the_metrics_of_ppo_have_one_shape_whatever_the_batch(played):
    """An update without a usable row gives the same names, with NaN for values that need rows."""
    learner = Learner(Policy(PLAYED, seed=0), PPOConfig(epochs=1), seed=0)
    whole = learner.update(played)
    assert whole["rows"] == played.count
    for batch in ppo_batches(played):
        found = learner.update(batch)
        assert list(found) == list(whole)
        assert (found["rows"], found["left_out"]) == (0, batch.count)
        assert all(math.isnan(found[name]) for name in learner.algorithm.metric_names)


@pytest.mark.parametrize("objective", ["ips", "snips", "dr"])
def test_the_metrics_of_the_bandit_have_one_shape_whatever_the_batch(bandit_log, objective):
    """The same for a single row, which DR cannot cross-fit: it is left out and counted."""
    config = BanditConfig(objective=objective, epochs=1)
    learner = Learner(Policy(DECIDED, seed=0), config, seed=0)
    whole, unknown, alone = bandit_log(8), bandit_log(4), bandit_log(1)
    unknown.logp[:] = np.nan
    names = list(learner.update(whole.batch()))
    for batch in (SampleBatch(), unknown.batch(), alone.batch()):
        assert list(learner.update(batch)) == names
    assert learner.counts.excluded.get("alone", 0) == (1 if objective == "dr" else 0)


def test_minibatches_are_as_many_as_asked_for():
    """Each pass has every row once, and ends with what is left; the last pass may be cut."""
    rng = np.random.default_rng(0)
    found = [one.tolist() for one in minibatches(10, 4, 5, rng, torch.device("cpu"))]
    assert [len(one) for one in found] == [4, 4, 2, 4, 4]
    assert sorted(row for one in found[:3] for row in one) == list(range(10))


def test_a_learner_says_once_that_nothing_can_be_learned(played, caplog):
    """A batch of logged rows alone warns with the reason. The next such batch does not, unless rows
    were trained on in between."""
    learner = Learner(Policy(PLAYED, seed=0), PPOConfig(epochs=1), seed=0)
    logged = changed(played, source=np.full(played.count, "logged", object))
    with caplog.at_level(logging.WARNING, "headrace.learner"):
        for batch in (logged, logged, played, logged):
            learner.update(batch)
    assert [record.getMessage() for record in caplog.records] == [
        "none of 16 rows can be learned from: not_on_policy: 16"
    ] * 2


def test_a_batch_without_its_columns_is_refused_by_their_names(played, bandit_log):
    """The error is not a KeyError of the first one: it lists the missing and the present
    columns.
    """
    learner = Learner(Policy(PLAYED, seed=0), PPOConfig(), seed=0)
    batch = played.select([name for name in played if name not in ("source", "new_obs")])
    with pytest.raises(ValueError, match=r"ppo: .* the columns \['source', 'new_obs'\], got only"):
        learner.update(batch)
    learner = Learner(Policy(DECIDED, seed=0), BanditConfig(), seed=0)
    batch = bandit_log(3).batch()
    with pytest.raises(ValueError, match=r"bandit: .* the columns \['rewards'\], got only"):
        learner.update(batch.select([name for name in batch if name != "rewards"]))
