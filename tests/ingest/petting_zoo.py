"""PettingZoo environments played by a PolicyClient: in parallel and in turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from pettingzoo import AECEnv

from headrace import PolicyClient


def play_parallel(env: Any, client: PolicyClient, *, seed: int, steps: int) -> int:
    """Play one episode of `steps` steps of a parallel environment; count its agents' actions.

    Only agents that acted have rewards and an end: one that joins and leaves without acting never
    existed.
    """
    observations, _ = env.reset(seed=seed)
    episode = client.start_episode()
    acted: set[str] = set()
    count = 0
    for step in range(steps):
        env.max_cycles = 0 if step == steps - 1 else steps
        actions = client.get_action(episode, observations)
        acted |= actions.keys()
        count += len(actions)
        observations, rewards, terminations, truncations, _ = env.step(actions)
        client.log_returns(
            episode,
            {agent: rewards[agent] for agent in actions},
            multiagent_done_dict=_of(acted, terminations),
            multiagent_truncated_dict=_of(acted, truncations),
        )
        going_on = acted | set(env.agents)
        observations = {a: seen for a, seen in observations.items() if a in going_on}
    client.end_episode(episode, _of(acted, observations))
    return count


def _of(agents: set[str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {agent: value for agent, value in values.items() if agent in agents}


def play_turns(env: Any, client: PolicyClient) -> int:
    """Play one episode of a turn-based environment; count its turns."""
    env.reset()
    episode = client.start_episode()
    acted: set[str] = set()
    for agent in env.agent_iter():
        observation, reward, terminated, truncated, _ = env.last()
        if agent in acted:
            client.log_returns(episode, {agent: reward})
        if terminated or truncated:
            env.step(None)
            continue
        acted.add(agent)
        env.step(client.get_action(episode, {agent: observation})[agent])
    client.end_episode(episode, {agent: env.observe(agent) for agent in acted})
    return int(env.turns)


class Nim(AECEnv[str, np.ndarray, int]):
    """Two players take one or two from a pile by turns; the one who takes the last wins.

    `left` sees the pile and its remainder modulo 3, `right` also the last move: each has its own
    space.
    """

    metadata = {"name": "nim_v0", "render_modes": []}  # noqa: RUF012  as the base class has it

    def __init__(self, pile: int = 7) -> None:
        super().__init__()
        self._start = pile
        self.possible_agents = ["left_0", "right_0"]
        self._seen = {
            agent: gym.spaces.Box(0, pile, (size,), np.float32)
            for agent, size in (("left_0", 2), ("right_0", 3))
        }
        self._takes = {agent: gym.spaces.Discrete(2) for agent in self.possible_agents}

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return self._seen[agent]

    def action_space(self, agent: str) -> gym.Space[Any]:
        return self._takes[agent]

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = list(self.possible_agents)
        self.agent_selection = "left_0"
        self._pile, self._taken, self.turns = self._start, 0, 0
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, Any] = {agent: {} for agent in self.agents}

    def observe(self, agent: str) -> np.ndarray:
        seen = [self._pile, self._pile % 3, self._taken]
        return np.array(seen[: self._seen[agent].shape[0]], np.float32)

    def step(self, action: int | None) -> None:
        player = self.agent_selection
        if self.terminations[player]:
            self._was_dead_step(action)
            return
        other = "right_0" if player == "left_0" else "left_0"
        self._cumulative_rewards[player] = 0.0
        self._taken = min(self._pile, 1 + int(action or 0))
        self._pile -= self._taken
        self.turns += 1
        self._clear_rewards()
        if not self._pile:
            self.rewards = {player: 1.0, other: -1.0}
            self.terminations = dict.fromkeys(self.agents, True)
        self.agent_selection = other
        self._accumulate_rewards()
