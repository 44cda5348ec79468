"""Small environments in which every number is known."""

from __future__ import annotations

import gymnasium as gym
import numpy as np


class CountEnv(gym.Env):
    """Observes [t] and earns t + 1 a step; terminated (or truncated) after `length` steps.

    `context`: length (5), truncated (False), fails: t -> how often a step at t raises, shared by
    all copies with the same dict; made: a list to which every instance adds itself.
    """

    observation_space = gym.spaces.Box(0, 1000, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, context=None):
        self.context = dict(context or {})
        self.length = self.context.get("length", 5)
        self.t = 0
        self.seeds = []
        self.closed = False
        self.actions = []
        self.context.get("made", []).append(self)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        if self.context.get("fail_resets", []):
            raise self.context["fail_resets"].pop()
        self.t = 0
        return np.array([0], np.float32), {}

    def step(self, action):
        self.actions.append(action)
        fails = self.context.get("fails", {})
        if fails.get(self.t, 0) > 0:
            fails[self.t] -= 1
            raise OSError  # without arguments: its text is empty
        self.t += 1
        over = self.t >= self.length
        cut = bool(self.context.get("truncated", False))
        obs = np.array([self.t], np.float32)
        return obs, float(self.t), over and not cut, over and cut, {"t": self.t}

    def close(self):
        self.closed = True


class LimitedEnv(CountEnv):
    """The same with its own limit on the steps of an episode."""

    spec = gym.envs.registration.EnvSpec("Limited-v0", max_episode_steps=50)


class BoxEnv(CountEnv):
    """Takes actions of [-0.1, 0.1]^2 and records them."""

    action_space = gym.spaces.Box(-0.1, 0.1, (2,), np.float32)


class DictEnv(CountEnv):
    """Observes a Dict of a Discrete and a Box."""

    observation_space = gym.spaces.Dict(
        {"gear": gym.spaces.Discrete(3), "speed": gym.spaces.Box(0, 100, (2,), np.float32)}
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._seen(), {}

    def _seen(self):
        return {"gear": self.t % 3, "speed": np.full(2, self.t, np.float32)}

    def step(self, action):
        _, *rest = super().step(action)
        return (self._seen(), *rest)


class AgentsEnv:
    """Agents a and b; b joins at step 2 and leaves at step 4; the episode lasts 6 steps.

    Each earns 1 a step. `context`: forget_last leaves b out of the last observations.
    """

    possible_agents = ("a", "b")
    observation_space = gym.spaces.Box(0, 1000, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, context=None):
        self.context = dict(context or {})
        self.agents = []
        self.t = 0

    def reset(self, seed=None):
        self.t, self.agents = 0, ["a"]
        return {"a": np.array([0], np.float32)}, {}

    def step(self, actions):
        if set(actions) != set(self.agents):
            raise ValueError(f"expected actions of {self.agents}, got {actions}")
        self.t += 1
        acted = list(self.agents)
        if self.t == 2:
            self.agents.append("b")
        over = self.t >= 6
        leaves = self.t == 4
        seen = {agent: np.array([self.t], np.float32) for agent in self.agents}
        if over and self.context.get("forget_last"):
            del seen["a"]
        terminated = {agent: agent == "b" and leaves for agent in self.agents}
        if leaves:
            self.agents.remove("b")
        rewards = dict.fromkeys(acted, 1.0)
        return seen, rewards, terminated | {"__all__": over}, {"__all__": False}, {}
