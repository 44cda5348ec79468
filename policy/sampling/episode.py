"""An episode in progress, as callbacks and policy mapping functions see it."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from policy.sampling.metrics import RolloutMetrics
from storage.spaces.descriptors import Space

if TYPE_CHECKING:
    from policy.algorithms.trainable_policy import TrainablePolicy  # needs torch


class SamplingWorker(Protocol):
    """The worker that samples, as callbacks and creators of inputs and outputs may rely on it."""

    env: Any
    policies: dict[str, TrainablePolicy]
    policies_to_train: list[str]
    excluded: Counter[str]

    def descriptors(self) -> dict[str, tuple[Space, Space]]: ...


class RolloutEpisode:
    """One episode of one env copy.

    Attributes: `episode_id`, random, because estimators split by it; `env_id`; `length` in env
    steps; `total_reward` and `agent_rewards` ((agent id, policy id) -> sum), unclipped; `worker`.
    For the user: `user_data`, `custom_metrics` (name -> number), `hist_data` (name -> list of
    numbers) and `media`, which the metrics contain when the episode ends.
    """

    def __init__(
        self,
        env_id: Any,
        policy_of: Callable[[Any, RolloutEpisode], str],
        *,
        worker: SamplingWorker | None = None,
    ) -> None:
        self.episode_id = uuid.uuid4().hex
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
        """The id of the agent's policy, which is chosen when the agent appears and then stays."""
        if agent_id not in self._policies:
            self._policies[agent_id] = self._policy_of(agent_id, self)
        return self._policies[agent_id]

    def get_agents(self) -> list[Any]:
        """The agents that have appeared."""
        return list(self._policies)

    def last_observation_for(self, agent_id: Any) -> Any:
        """The agent's latest observation, unprocessed; None before the first."""
        return self._last.get(agent_id, (None, None, {}))[0]

    def last_action_for(self, agent_id: Any) -> Any:
        """The agent's latest action; None before the first."""
        return self._last.get(agent_id, (None, None, {}))[1]

    def last_info_for(self, agent_id: Any) -> Mapping[str, Any]:
        """The info of the agent's latest observation."""
        return self._last.get(agent_id, (None, None, {}))[2]

    # for samplers

    def note(self, agent_id: Any, obs: Any, action: Any, info: Mapping[str, Any]) -> None:
        self._last[agent_id] = (obs, action, info)

    def add_reward(self, agent_id: Any, reward: float) -> None:
        key = (agent_id, self.policy_for(agent_id))
        self.agent_rewards[key] = self.agent_rewards.get(key, 0.0) + reward
        self.total_reward += reward

    def metrics(self, perf_stats: Mapping[str, float]) -> RolloutMetrics:
        """The metrics of the episode at its end."""
        return RolloutMetrics(
            length=self.length,
            reward=self.total_reward,
            agent_rewards=dict(self.agent_rewards),
            custom_metrics=dict(self.custom_metrics),
            perf_stats=dict(perf_stats),
            hist_data={name: list(values) for name, values in self.hist_data.items()},
            media=dict(self.media),
        )
