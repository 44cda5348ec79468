"""ExternalMultiAgentEnv: an `ExternalEnv` for several agents.

    actions = env.get_action(episode, {"left": obs, "right": obs})       # a dict by agent
    env.log_returns(episode, {"left": 1.0}, multiagent_done_dict={"left": True})
    env.end_episode(episode, {"right": obs})

An agent joins with its first observation and leaves when it is done, or with the episode. A call
contains only the agents that it concerns.
"""

from __future__ import annotations

from typing import Any

from ingest.client.episode_calls import PolicyMapping
from ingest.client.policy_client import PolicyClient
from ingest.embedded.external_env import ExternalEnv


class ExternalMultiAgentEnv(ExternalEnv):
    """An ExternalEnv whose values are dicts by agent: observations, actions, rewards and so on.

    Args:
        action_space: of all agents, or a mapping agent -> space if they differ. With a collector,
            its policies' spaces apply.
        observation_space: the same.
        collector: a collector's address, or a PolicyClient with a `policy_mapping_fn`.
        policy_mapping_fn: for an address, see PolicyClient; by default all agents have the
            collector's only policy. A worker has its own mapping.

    The others are those of ExternalEnv.
    """

    one_agent = False

    def __init__(
        self,
        action_space: Any,
        observation_space: Any,
        max_concurrent: int | None = None,
        *,
        collector: str | PolicyClient | None = None,
        policy_mapping_fn: PolicyMapping | None = None,
        action_timeout: float = 300.0,
        max_pending: int = 100_000,
    ) -> None:
        if policy_mapping_fn is not None and not isinstance(collector, str):
            raise ValueError(
                "policy_mapping_fn: expected one only with a collector's address, because a worker "
                "or a PolicyClient has its own"
            )
        self._mapping = policy_mapping_fn or _default_policy
        super().__init__(
            action_space,
            observation_space,
            max_concurrent,
            collector=collector,
            action_timeout=action_timeout,
            max_pending=max_pending,
        )

    def _connect(self, address: str) -> PolicyClient:
        return PolicyClient(address, policy_mapping_fn=self._mapping)


def _default_policy(agent: str) -> None:
    """The client's default policy, which is the collector's only one."""
