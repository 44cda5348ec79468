"""Environments with action masks, in RLlib's and PettingZoo's forms: what is sent is allowed."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from policy.worker.rollout_worker import RolloutWorker
from storage.spaces.descriptors import SpaceError

ACTIONS, STEPS = 5, 8


class MaskedEnv(gym.Env):
    """Allows other actions at each step, and stops at any other one.

    `config`: form of the mask; whether a step allows nothing.
    """

    action_space = gym.spaces.Discrete(ACTIONS)

    def __init__(self, config):
        self.none_at = config.get("none_at", -1)
        forms = {
            "binary": gym.spaces.MultiBinary(ACTIONS),
            "bytes": gym.spaces.Box(0, 1, (ACTIONS,), np.int8),
            "floats": gym.spaces.Box(0.0, 1.0, (ACTIONS,), np.float32),
        }
        mask = forms[config.get("form", "binary")]
        self.dtype = mask.dtype
        self.observation_space = gym.spaces.Dict(
            {"action_mask": mask, "x": gym.spaces.Box(-1, 1, (2,), np.float32)}
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._seen(), {}

    def _seen(self):
        mask = self.np_random.integers(0, 2, ACTIONS)
        mask[self.np_random.integers(0, ACTIONS)] = 1
        if self.t in (self.none_at, STEPS):  # nothing is left to do at the end
            mask[:] = 0
        self.mask = mask.astype(self.dtype)
        return {"action_mask": self.mask, "x": np.zeros(2, np.float32)}

    def step(self, action):
        if not self.mask[action]:
            raise RuntimeError(f"action {action} was forbidden")
        self.t += 1
        return self._seen(), float(action), self.t == STEPS, False, {}


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("form", ["binary", "bytes", "floats"])
def test_a_worker_sends_allowed_actions_and_learns(form, copies):
    """Also with a filter, which leaves the mask as it is, and after updates."""
    settings = {"observation_filter": "MeanStdFilter", "policy_config": {"seed": 3}}
    with RolloutWorker(
        MaskedEnv,
        env_config={"form": form},
        num_envs=copies,
        rollout_fragment_length=96,
        **settings,
    ) as worker:
        for _ in range(3):
            batch = worker.sample()
            allowed = batch["obs.action_mask"] != 0
            assert allowed[np.arange(batch.count), batch["actions"]].all()
            assert np.isfinite(batch["action_logp"]).all()
            stats = worker.learn_on_batch(batch)["learner_stats"]
            assert np.isfinite(stats["loss"])


def test_an_environment_that_allows_nothing_is_named():
    with (
        RolloutWorker(MaskedEnv, env_config={"none_at": 3}, rollout_fragment_length=20) as worker,
        pytest.raises(SpaceError, match="action_mask: expected at least one allowed"),
    ):
        worker.sample()
