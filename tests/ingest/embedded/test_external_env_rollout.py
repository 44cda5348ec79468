"""A RolloutWorker samples programs of this package through the protocol alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ingest.embedded.external_env import ExternalEnv
from ingest.embedded.external_multi_agent_env import ExternalMultiAgentEnv
from ingest.protocol.errors import ServingStopped
from policy.worker.rollout_worker import RolloutWorker
from storage.experience.multi_agent_batch import MultiAgentBatch

OBSERVATION, ACTION = gym.spaces.Box(-100, 100, (2,), np.float32), gym.spaces.Discrete(3)


def see(i: int, t: int) -> np.ndarray:
    return np.array([i, t], np.float32)


class Shop(ExternalEnv):
    """Episode i has i steps of reward i; odd steps are logged; every fifth is not for training."""

    def run(self) -> None:
        for i in range(12):
            episode = self.start_episode(training_enabled=i % 5 != 0)
            for t in range(i):
                if t % 2:
                    self.log_action(episode, see(i, t), 1, action_prob=0.5)
                else:
                    self.get_action(episode, see(i, t))
                self.log_returns(episode, float(i))
            self.end_episode(episode, see(i, i) if i % 3 else None, truncated=i % 2 == 0)


class Duel(ExternalMultiAgentEnv):
    """Two agents, of which the second acts in every other step."""

    def run(self) -> None:
        for i in range(6):
            episode = self.start_episode()
            for t in range(4):
                both = {"a": see(i, t), "b": see(i, t)}
                self.get_action(episode, both if t % 2 else {"a": see(i, t)})
                self.log_returns(episode, {"a": 1.0})
            self.end_episode(episode, {"a": see(i, 4), "b": see(i, 4)})


def sampled(make: Callable[..., Any], **options: Any) -> list[Any]:
    """Every batch of a worker, with one or a few episodes each, until the program has ended."""
    worker = RolloutWorker(
        make, rollout_fragment_length=1, batch_mode="complete_episodes", seed=1, **options
    )
    found = []
    try:
        while True:
            found.append(worker.sample())
    except ServingStopped as stopped:
        if stopped.__cause__ is not None:
            raise
    worker.stop()
    return found


def test_a_rollout_worker_has_every_step_of_a_program() -> None:
    """All steps of the episodes for training, with their rewards and propensities."""
    batches = sampled(lambda context: Shop(ACTION, OBSERVATION))
    rows = [row for batch in batches for row in batch.rows()]
    steps = [(int(row["obs"][0]), int(row["obs"][1]), row["rewards"]) for row in rows]
    assert steps == [(i, t, float(i)) for i in range(12) if i % 5 for t in range(i)]
    for row in rows:
        i, t = row["obs"].astype(int).tolist()
        if t % 2:
            assert row["actions"] == 1
            assert row["action_logp"] == pytest.approx(np.log(0.5))
        assert row["terminateds"] == (t == i - 1 and i % 2 == 1)
        assert row["truncateds"] == (t == i - 1 and i % 2 == 0)


def test_a_rollout_worker_counts_env_steps_and_agent_steps_of_a_program() -> None:
    """A step of the environment is one in which any agent acted."""
    batches = sampled(
        lambda context: Duel(ACTION, OBSERVATION),
        policy={name: (None, OBSERVATION, ACTION, {}) for name in ("p", "q")},
        policy_mapping_fn=lambda agent, *_: "p" if agent == "a" else "q",
    )
    whole = MultiAgentBatch.concat_samples(batches)
    assert (whole.env_steps(), whole.agent_steps()) == (24, 36)
    assert whole["p"]["rewards"].tolist() == [1.0] * 24
    assert whole["q"]["obs"][:, 1].tolist() == [1.0, 3.0] * 6


def test_a_horizon_of_a_worker_on_a_program_is_a_value_error() -> None:
    """Programs cannot be reset: the error is raised when the worker is created."""
    with pytest.raises(ValueError, match=r"Setting episode horizon requires reset\(\) support"):
        RolloutWorker(lambda context: Shop(ACTION, OBSERVATION), episode_horizon=5)


def test_several_policies_of_a_program_with_one_agent_are_refused() -> None:
    """The same holds for any environment that is not a multi-agent one."""
    with pytest.raises(ValueError, match="2 policies, but the environment is not a multi-agent"):
        RolloutWorker(
            lambda context: Shop(ACTION, OBSERVATION),
            policy={"p": None, "q": None},
            policy_mapping_fn=lambda agent: "p",
        )
