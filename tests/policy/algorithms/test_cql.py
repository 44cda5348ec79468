"""Conservative Q-learning: targets, caution, and a policy that acts close to its best."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest

from policy.algorithms.base import default_rule
from policy.algorithms.cql import CQLConfig
from policy.algorithms.learner import Learner
from policy.inference.action_rule import GREEDY, SAMPLE, ActionRule
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.networks.policy import Policy
from policy.training.train import acting_spec
from storage.experience.sample_batch import SampleBatch
from storage.spaces.descriptors import Box, Discrete

LINEAR = ModuleSpec(hidden=(), value_head=False)


def rows(obs, actions, rewards, terminateds, new_obs):
    """Transitions; terminated ones have no next state."""
    ended = np.asarray(terminateds, np.bool_)
    return SampleBatch(
        obs=np.asarray(obs, np.float32),
        actions=np.asarray(actions, np.int64),
        rewards=np.asarray(rewards, np.float64),
        terminateds=ended,
        truncateds=np.zeros(len(ended), np.bool_),
        new_obs=np.asarray(new_obs, np.float32),
        has_new_obs=~ended,
    )


def test_values_are_those_of_the_bellman_equation() -> None:
    """Two states in sequence: without the conservative term, Q is r + gamma max Q."""
    spec = PolicySpec(Box((2,)), Discrete(2), LINEAR)
    first, second = [1.0, 0.0], [0.0, 1.0]
    log = rows(
        [first, first, second, second] * 64,
        [0, 1, 0, 1] * 64,
        [0.0, 0.0, 1.0, 2.0] * 64,
        [False, True, True, True] * 64,
        [second, first, first, first] * 64,
    )
    config = CQLConfig(alpha=0.0, gamma=0.5, epochs=100, lr=0.05, minibatch=64, target_every=20)
    learner = Learner(Policy(spec), config)
    metrics = learner.update(log)
    module, observed = learner.policy.module, learner.policy.observe(np.eye(2, dtype=np.float32))
    values = module.dist_inputs(observed).detach().numpy()
    np.testing.assert_allclose(values, [[1.0, 0.0], [1.0, 2.0]], atol=0.05)
    assert metrics["td_error"] < 0.05


def test_an_action_that_was_never_logged_is_not_the_best() -> None:
    """With the conservative term, an action that was never logged has a value below that of the
    logged ones."""
    spec, n = PolicySpec(Box((1,)), Discrete(3), LINEAR), 512
    obs = np.random.default_rng(0).normal(size=(n, 1))
    log = rows(obs, np.arange(n) % 2, np.full(n, -1.0), np.ones(n), np.zeros((n, 1)))
    learner = Learner(Policy(spec), CQLConfig(epochs=60, lr=0.02))
    learner.update(log)
    values = learner.policy.module.dist_inputs(learner.policy.observe(obs.astype(np.float32)))
    assert (values.argmax(dim=1) < 2).all()


def test_rows_without_what_follows_are_left_out() -> None:
    """Rows without a next observation are left out and counted by reason; a batch without that
    column is refused by the column's name.
    """
    spec = PolicySpec(Box((1,)), Discrete(2), LINEAR)
    learner = Learner(Policy(spec), CQLConfig(epochs=1))
    log = rows(np.zeros((4, 1)), [0, 1, 0, 1], np.ones(4), [0, 0, 1, 1], np.zeros((4, 1)))
    log["has_new_obs"] = np.array([True, False, False, False])
    learner.update(log)
    assert learner.counts.excluded == {"no_next_obs": 1}
    with pytest.raises(ValueError, match="new_obs"):
        learner.update(log.select(["obs", "actions", "rewards", "terminateds", "has_new_obs"]))
    with pytest.raises(ValueError, match="Discrete"):
        CQLConfig().build(Policy(PolicySpec(Box((1,)), Box((1,)))))


def test_rows_beyond_float32_are_left_out() -> None:
    """A reward, an observation or a following one that float32 cannot hold costs its own row, not
    the update. What follows a terminated row is not read.
    """
    spec = PolicySpec(Box((1,), "float64"), Discrete(2), LINEAR)
    learner = Learner(Policy(spec), CQLConfig(epochs=1))
    log = rows(np.zeros((8, 1)), [0, 1] * 4, np.ones(8), [0, 1] * 4, np.zeros((8, 1)))
    obs, following = np.zeros((8, 1)), np.zeros((8, 1))
    log["rewards"][0] = obs[3] = following[[4, 5]] = 1e39
    changed = {"obs": obs, "new_obs": following, "has_new_obs": np.ones(8, np.bool_)}
    metrics = learner.update(SampleBatch({**log, **changed}))
    assert learner.counts.excluded == {"not_finite": 3}
    assert metrics["rows"] == 5


def played(act, episodes: int, seed: int) -> tuple[list[tuple], list[float]]:
    """(transitions, returns) of CartPole by `act(obs)`, at most 500 steps an episode."""
    env, found, returns = gymnasium.make("CartPole-v1"), [], []
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed + episode)
        over, total = False, 0.0
        while not over:
            action = act(obs)
            following, reward, terminated, truncated, _ = env.step(action)
            found.append((obs, action, reward, terminated, following))
            obs, over, total = following, terminated or truncated, total + float(reward)
        returns.append(total)
    return found, returns


def test_a_published_q_network_acts_epsilon_greedy_and_near_its_best() -> None:
    """Sampling by the softmax of its values fails at once, where the greedy policy balances for
    long.
    """
    rng = np.random.default_rng(3)

    def logging(obs: np.ndarray) -> int:
        steady = int(obs[2] + obs[3] > 0)
        return steady if rng.random() < 0.7 else 1 - steady

    log, _ = played(logging, 120, seed=0)
    config = CQLConfig(epochs=20, alpha=0.5)
    declared = PolicySpec(Box((4,)), Discrete(2), ModuleSpec(hidden=(64, 64), value_head=False))
    spec = acting_spec(declared, config)
    assert spec.action_rule == default_rule(config) == ActionRule("epsilon_greedy", epsilon=0.05)
    learner = Learner(Policy(spec, seed=1), config, seed=1)
    learner.update(rows(*zip(*log, strict=True)))
    weights = learner.policy.get_weights()

    def mean_return(rule: ActionRule) -> float:
        policy = NumpyPolicy(replace(spec, action_rule=rule), weights)
        draw = np.random.default_rng(5)
        probs = lambda obs: policy.probabilities(obs[None].astype(np.float32))[0]  # noqa: E731
        _, returns = played(lambda obs: int(draw.random() < probs(obs)[1]), 6, seed=1000)
        return float(np.mean(returns))

    best, published, softmax = map(mean_return, (GREEDY, spec.action_rule, SAMPLE))
    assert best > 200
    assert published > 0.8 * best
    assert softmax < 0.5 * best
