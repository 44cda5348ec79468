"""Every algorithm learns under masks: what is forbidden is never chosen, and no number is NaN."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policy.algorithms.bandit import BanditConfig
from policy.algorithms.bc import BCConfig
from policy.algorithms.by_name import algorithm
from policy.algorithms.cql import CQLConfig
from policy.algorithms.dm import DMConfig
from policy.algorithms.iql import IQLConfig
from policy.algorithms.learner import Learner
from policy.algorithms.marwil import MARWILConfig
from policy.algorithms.ppo import PPOConfig
from policy.algorithms.torchrl import to_tensordict
from policy.inference.action_rule import SAMPLE
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.networks.policy import Policy
from policy.training.train import acting_spec
from storage.experience.sample_batch import SampleBatch
from storage.spaces.descriptors import Box, Dict, Discrete, MultiBinary

SPEC = PolicySpec(
    Dict({"action_mask": MultiBinary((4,)), "x": Box((1,))}),
    Discrete(4),
    ModuleSpec(hidden=(16,)),
    observation_filter="MeanStdFilter",
)
ALGORITHMS = [
    BanditConfig(objective="ips", updates=150),
    BanditConfig(objective="snips", updates=300),
    BanditConfig(objective="dr", updates=150),
    DMConfig(updates=300),
    CQLConfig(updates=300),
    BCConfig(updates=150),
    MARWILConfig(updates=300),
    IQLConfig(updates=600),
    PPOConfig(epochs=4, minibatch=125, lr=5e-3),
]


def masks(rng, rows):
    """Each allows at least one option; option 0, which earns most, one time in two."""
    found = rng.integers(0, 2, (rows, 4)).astype(np.int8)
    found[np.arange(rows), rng.integers(0, 4, rows)] = 1
    return found


def decisions(rows: int, seed: int) -> SampleBatch:
    """Uniform draws among what is allowed; option i earns 1 - i / 4."""
    rng = np.random.default_rng(seed)
    mask = masks(rng, rows)
    probs = mask / mask.sum(axis=1, keepdims=True)
    actions = (rng.random((rows, 1)) >= probs.cumsum(axis=1)).sum(axis=1)
    x = rng.normal(size=(rows, 1)).astype(np.float32)
    dist_inputs = np.where(mask == 1, 0.0, -1e30).astype(np.float32)
    return SampleBatch(
        {
            "obs.action_mask": mask,
            "obs.x": x,
            "new_obs.action_mask": masks(rng, rows),
            "new_obs.x": x,
            "has_new_obs": np.ones(rows, np.bool_),
            "actions": actions,
            "rewards": 1 - actions / 4,
            "terminateds": np.ones(rows, np.bool_),
            "truncateds": np.zeros(rows, np.bool_),
            "action_logp": np.log(probs[np.arange(rows), actions]),
            "action_dist_inputs": dist_inputs,
            "policy_version": np.ones(rows, np.int64),
            "ended": np.full(rows, "terminated", object),
            "cut": np.zeros(rows, np.bool_),
            "source": np.full(rows, "on_policy", object),
            "t": np.zeros(rows, np.int64),
            "stream": np.full(rows, "s", object),
            "ordinal": np.arange(rows),
            "episode_ordinal": np.arange(rows),
            "agent_id": np.full(rows, "", object),
        }
    )


def acted_by(policy: NumpyPolicy, batch: SampleBatch) -> SampleBatch:
    """The same observations, with actions of a policy."""
    columns = {"action_mask": batch["obs.action_mask"], "x": batch["obs.x"]}
    acted = policy.act(policy.flatten(columns), np.random.default_rng(9))
    actions = acted.columns[""]
    return SampleBatch(
        {
            **batch,
            "actions": actions,
            "rewards": 1 - actions / 4,
            "action_logp": acted.logp,
            "action_dist_inputs": acted.dist_inputs,
        }
    )


@pytest.mark.parametrize("config", ALGORITHMS, ids=lambda one: f"{type(one).__name__}")
def test_an_algorithm_learns_among_what_is_allowed(config):
    """The best allowed option is the most probable; BC alone only copies the log."""
    policy = Policy(acting_spec(SPEC, config), seed=3)
    learner = Learner(policy, config, seed=5)
    rows = 1_000
    batch = decisions(rows, 1)
    for _ in range(12 if isinstance(config, PPOConfig) else 1):
        if isinstance(config, PPOConfig):  # it learns from its own actions alone
            batch = acted_by(policy.to_numpy(version=1), batch)
        found = learner.update(batch)
    assert found["rows"] == rows
    assert all(np.isfinite(value) for value in found.values()), found
    twin, test = policy.to_numpy(version=1), decisions(500, 2)
    columns = {"action_mask": test["obs.action_mask"], "x": test["obs.x"]}
    flat = twin.flatten(columns)
    assert twin.probabilities(flat)[columns["action_mask"] == 0].max() == 0.0
    best = columns["action_mask"].argmax(axis=1)
    acted = twin.act(flat, np.random.default_rng(1), explore=False).columns[""]
    assert not SPEC.action_mask.forbidden(columns, acted).any()
    if not isinstance(config, BCConfig):
        assert (acted == best).mean() > 0.9
    assert replace(policy.spec, action_rule=SAMPLE) == SPEC


@pytest.mark.parametrize("name", ["dr", "dm", "bc", "marwil", "iql", "cql", "torchrl:dqn"])
def test_rows_that_masks_make_useless_are_left_out_and_counted(name):
    """One impossible row, as of a policy without masks, takes nothing from the others."""
    config = algorithm(name, updates=3)
    learner, batch = Learner(Policy(acting_spec(SPEC, config), seed=3), config), decisions(90, 1)
    mask, following = batch["obs.action_mask"].copy(), batch["new_obs.action_mask"].copy()
    mask[0], mask[1, batch["actions"][1]] = 0, 0
    following[:3] = 0
    terminated = np.arange(90) != 2
    changes = {"obs.action_mask": mask, "new_obs.action_mask": following, "terminateds": terminated}
    reads_next = "new_obs" in config.columns
    found = learner.update(
        SampleBatch(
            {
                name: column
                for name, column in {**batch, **changes, "truncateds": ~terminated}.items()
                if reads_next or not name.startswith("new_obs")
            }
        )
    )
    after = {"no_next_action": 1} if reads_next else {}
    assert learner.counts.excluded == {"forbidden_action": 2} | after
    assert found["rows"] == 88 - len(after)
    if reads_next:
        assert len(to_tensordict(SPEC, SampleBatch({**batch, **changes}))) == 87
    assert all(np.isfinite(value) for value in found.values()), found


@pytest.mark.parametrize("name", ["iql", "torchrl:sac"])
def test_critics_of_places_refuse_a_scorer(name):
    space = Dict({"action_mask": MultiBinary((4,)), "candidates": Box((4, 2), ragged=True)})
    spec = PolicySpec(space, Discrete(4), ModuleSpec(kind="scorer"))
    with pytest.raises(ValueError, match=f"{name}: expected a policy without candidates"):
        algorithm(name).build(Policy(spec))
