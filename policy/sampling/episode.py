"""An episode as callbacks and policy mapping functions see it while a worker plays it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from policy.sampling.metrics import RolloutMetrics

__all__ = ["RolloutEpisode"]


class RolloutEpisode:
    """One episode of one env copy.

    Attributes: `episode_id`, a random one, because estimators split by it; `env_id`; `length` in
    env steps; `total_reward` and `agent_rewards` ((agent id, policy id) -> sum), before any
    clipping; `worker`; for the user's own use `user_data`, `custom_metrics` (name -> number),
    `hist_data` (name -> list of numbers) and `media`: metrics hand them out when the episode ends.
    """

    def __init__(
        self,
        env_id: Any,
        policy_of: Callable[[Any, RolloutEpisode], str],
        *,
        worker: Any = None,
        episode_id: str | None = None,
    ) -> None:
        self.episode_id = uuid.uuid4().hex if episode_id is None else episode_id
        self.env_id = env_id
        self.worker = worker
        self.length = 0
        self.total_reward = 0.0
        self.agent_rewards: dict[tuple[Any, str], float] = {}
        self.user_data: dict[str, Any] = {}
        self.custom_metrics: dict[str, float] = {}
        self.hist_data: dict[str, list[float]] = {}
        self.media: dict[str, Any] = {}
        self._policy_of = policy_of
        self._policies: dict[Any, str] = {}
        self._last: dict[Any, tuple[Any, Any, Mapping[str, Any]]] = {}

    def policy_for(self, agent_id: Any) -> str:
        """The id of the agent's policy: asked for once, when it appears, and bound from then on."""
        if agent_id not in self._policies:
            self._policies[agent_id] = self._policy_of(agent_id, self)
        return self._policies[agent_id]

    def get_agents(self) -> list[Any]:
        """The agents that appeared so far."""
        return list(self._policies)

    def last_observation_for(self, agent_id: Any) -> Any:
        """The agent's newest observation, raw; None before its first."""
        return self._last.get(agent_id, (None, None, {}))[0]

    def last_action_for(self, agent_id: Any) -> Any:
        """The agent's newest action; None before its first."""
        return self._last.get(agent_id, (None, None, {}))[1]

    def last_info_for(self, agent_id: Any) -> Mapping[str, Any]:
        """The info that came with the agent's newest observation."""
        return self._last.get(agent_id, (None, None, {}))[2]

    # what a sampler notes

    def note(self, agent_id: Any, obs: Any, action: Any, info: Mapping[str, Any]) -> None:
        self._last[agent_id] = (obs, action, info)

    def add_reward(self, agent_id: Any, reward: float) -> None:
        key = (agent_id, self.policy_for(agent_id))
        self.agent_rewards[key] = self.agent_rewards.get(key, 0.0) + reward
        self.total_reward += reward

    def metrics(self, perf_stats: Mapping[str, float]) -> RolloutMetrics:
        """What is said of it when it has ended."""
        return RolloutMetrics(
            length=self.length,
            reward=self.total_reward,
            agent_rewards=dict(self.agent_rewards),
            custom_metrics=dict(self.custom_metrics),
            perf_stats=dict(perf_stats),
            hist_data={name: list(values) for name, values in self.hist_data.items()},
            media=dict(self.media),
        )
