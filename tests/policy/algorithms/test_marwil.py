"""MARWIL: the loss of its formula, and a policy that prefers the better logged actions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from policy.algorithms.learner import Learner
from policy.algorithms.marwil import MARWIL, MARWILConfig
from policy.algorithms.offline import Transitions
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.networks.policy import Policy
from storage.experience.sequences import fragment_ends
from storage.spaces.descriptors import Box, Discrete
from tests.policy.algorithms.steps import corridor, log_of

SMALL = ModuleSpec(hidden=(8,), value_head=False)
DISCRETE = PolicySpec(Box((2,)), Discrete(2), SMALL)
CONTINUOUS = PolicySpec(Box((2,)), Box((1,)), SMALL)


@pytest.mark.parametrize("spec", [DISCRETE, CONTINUOUS])
def test_it_prefers_the_better_of_random_actions(spec: PolicySpec) -> None:
    """With beta it moves to the right; without, it imitates moves to both sides."""
    log = corridor(1600, continuous=spec is CONTINUOUS)
    better = Learner(Policy(spec), MARWILConfig(updates=400, lr=3e-3))
    better.update(log)
    acted = better.policy.to_numpy().act(log["obs"], np.random.default_rng(0), explore=False)
    assert (np.ravel(acted.columns[""]) > 0).mean() > 0.95


def test_without_beta_it_imitates() -> None:
    """Every weight is 1, so moves to both sides stay as likely as in the log."""
    log = corridor(1600)
    imitating = Learner(Policy(DISCRETE), MARWILConfig(updates=200, beta=0.0))
    assert imitating.update(log)["mean_weight"] == 1.0
    chances = imitating.policy.to_numpy().probabilities(log["obs"])[:, 1]
    assert chances.mean() == pytest.approx(0.5, abs=0.05)


def test_the_loss_is_that_of_the_formula() -> None:
    """Weights, clipped, times the log-likelihood, and the error of V, computed in numpy."""
    log = corridor(64)
    algorithm = MARWIL(Policy(DISCRETE, seed=3), MARWILConfig(beta=2.0, weight_clip=1.5))
    rows = Transitions.of(algorithm.policy, log)
    rng = np.random.default_rng(0)
    advantages, targets = rng.normal(size=(2, 64))
    values = torch.nn.Linear(2, 1).double()
    v = log["obs"] @ values.weight.detach().numpy()[0] + values.bias.item()
    found = algorithm._loss(
        rows, torch.tensor(advantages), torch.tensor(targets), lambda x: values(x.double())[:, 0]
    )
    weights = np.minimum(np.exp(2.0 * advantages), 1.5)
    assert (weights == 1.5).any()
    logp = algorithm.policy.to_numpy().logp(log["obs"], log["actions"])
    value_loss = np.square(v - targets).mean()
    assert float(found["value_loss"].detach()) == pytest.approx(value_loss, abs=1e-6)
    expected = -(weights * logp).mean() + value_loss
    assert float(found["loss"].detach()) == pytest.approx(expected, abs=1e-6)


def test_advantages_are_those_of_gae_in_units_of_their_size() -> None:
    """Two episodes: one terminated, one cut off, which goes on from V of its next observation."""
    log = log_of(np.zeros((4, 2)), [0, 1, 0, 1], [1, 2, 3, 4], [0, 1, 0, 0], np.zeros((4, 2)))
    config = MARWILConfig(gamma=0.5, lam=1.0)
    algorithm = MARWIL(Policy(DISCRETE), config)
    ends = fragment_ends(log["t"], log["episode_ordinal"])
    rows = Transitions.of(algorithm.policy, log)
    advantages, targets = algorithm._advantages(rows, ends, lambda x: torch.full((len(x),), 10.0))
    returns = np.array([1 + 0.5 * 2, 2, 3 + 0.5 * (4 + 0.5 * 10), 4 + 0.5 * 10])
    np.testing.assert_allclose(targets.numpy(), returns)
    size = np.sqrt(np.square(returns - 10).mean())
    np.testing.assert_allclose(advantages.numpy(), (returns - 10) / size, rtol=1e-6)


def test_rewards_of_another_scale_give_the_same_policy() -> None:
    """Rewards in cents: the returns' standard deviation is the unit."""
    log, cents = corridor(400), corridor(400)
    cents["rewards"] = cents["rewards"] * 100
    one, other = (Learner(Policy(DISCRETE), MARWILConfig(updates=50)) for _ in range(2))
    one.update(log)
    other.update(cents)
    for name, weights in one.policy.get_weights().items():
        np.testing.assert_allclose(weights, other.policy.get_weights()[name], atol=1e-4)
