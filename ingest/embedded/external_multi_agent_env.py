"""ExternalMultiAgentEnv: an `ExternalEnv` for several agents.

    actions = env.get_action(episode, {"left": obs, "right": obs})       # a dict by agent
    env.log_returns(episode, {"left": 1.0}, multiagent_done_dict={"left": True})
    env.end_episode(episode, {"right": obs})

An agent joins with its first observation and leaves when it is done, or with the episode. A call
contains only the agents that it concerns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ingest.client.multi_agent import PolicyMapping, by_agent, ended_agents
from ingest.client.policy_client import PolicyClient
from ingest.delivery.declarations import ClientPolicy
from ingest.delivery.events import number
from ingest.embedded.exchange import Exchange
from ingest.embedded.external_env import (
    EpisodesHere,
    ExternalEnv,
    descriptor,
    logged_action,
    open_episode,
    own_decision,
    own_info,
)
from storage.experience.episode import DEFAULT_POLICY
from storage.spaces.descriptors import Space

__all__ = ["ExternalMultiAgentEnv"]


class ExternalMultiAgentEnv(ExternalEnv):
    """An ExternalEnv whose observations, actions, rewards and infos are dicts by agent.

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

    def _in_process(self) -> EpisodesHere:
        return _CheckedCalls(self._exchange, self.observation_space, self.action_space)

    def _agents(self, observation: Any) -> Iterable[Any] | None:
        return observation if isinstance(observation, Mapping) else None

    def get_action(
        self, episode_id: str | Sequence[str], observation: Mapping[Any, Any]
    ) -> dict[Any, Any]:
        """Return the policy's actions by agent, for all observed agents that continue."""
        return dict(super().get_action(episode_id, observation))

    def log_action(
        self,
        episode_id: str,
        observation: Mapping[Any, Any],
        action: Mapping[Any, Any],
        *,
        action_prob: Any = None,
        action_logp: Any = None,
        policy_version: int = -1,
    ) -> None:
        """Record actions that the program chose; propensities are mappings by agent too."""
        super().log_action(
            episode_id,
            observation,
            action,
            action_prob=action_prob,
            action_logp=action_logp,
            policy_version=policy_version,
        )

    def log_returns(
        self,
        episode_id: str,
        reward: Any,
        info: Mapping[Any, Mapping[str, Any]] | None = None,
        multiagent_done_dict: Mapping[Any, bool] | None = None,
        *,
        multiagent_truncated_dict: Mapping[Any, bool] | None = None,
    ) -> None:
        """Add rewards to the agents' latest actions: `{agent: reward}`.

        `multiagent_done_dict` contains the agents that have ended, `multiagent_truncated_dict`
        those that a limit cut off. These may have one more, final observation, and then no longer
        act. `end_episode` ends all agents.
        """
        self._episodes.log_returns(
            episode_id,
            reward,
            info,
            multiagent_done_dict,
            multiagent_truncated_dict=multiagent_truncated_dict,
        )

    def end_episode(
        self,
        episode_id: str,
        observation: Mapping[Any, Any] | None = None,
        *,
        truncated: bool = False,
    ) -> None:
        """End the episode of all agents, with any final observations."""
        super().end_episode(episode_id, observation, truncated=truncated)


class _CheckedCalls:
    """The five calls of several agents, which it checks and passes to an exchange."""

    def __init__(self, exchange: Exchange, observation_space: Any, action_space: Any) -> None:
        self._exchange = exchange
        self._spaces = observation_space, action_space
        self._policies: dict[Any, ClientPolicy] = {}
        self._shared: ClientPolicy | None = None
        if not any(is_by_agent(space) for space in self._spaces):
            obs_space, act_space = map(descriptor, self._spaces)
            self._shared = ClientPolicy(DEFAULT_POLICY, obs_space, act_space)

    def start_episode(self, episode_id: str | None = None, training_enabled: bool = True) -> str:
        return open_episode(self._exchange, episode_id, training_enabled)

    def get_action(self, episode_id: str, observation: Any) -> Any:
        seen, key = self._observe(episode_id, observation)
        return self._exchange.ask(episode_id, seen, key)

    def own_action(self, episode_id: str, agent: Any, action: Any) -> Any:
        policy = self._policy(episode_id, agent)
        return own_decision(policy, f"{episode_id}, agent {agent}", action)

    def log_action(
        self,
        episode_id: str,
        observation: Any,
        action: Any,
        *,
        action_prob: Any = None,
        action_logp: Any = None,
        policy_version: int = -1,
    ) -> None:
        seen, _ = self._observe(episode_id, observation)
        given = by_agent(episode_id, "action", action)
        probs, logps = (
            by_agent(episode_id, "propensity", p) if p is not None else {}
            for p in (action_prob, action_logp)
        )
        logged = {}
        for agent, value in given.items():
            where = f"{episode_id}, agent {agent}"
            policy = self._policy(episode_id, agent)
            data = policy.encode_action(where, value)
            own = policy.action.decode(data)
            logged[agent] = logged_action(
                where, own, probs.get(agent), logps.get(agent), policy_version
            )
        self._exchange.tell(episode_id, seen, logged)

    def log_returns(
        self,
        episode_id: str,
        reward: Any,
        info: Any = None,
        multiagent_done_dict: Mapping[Any, bool] | None = None,
        *,
        multiagent_truncated_dict: Mapping[Any, bool] | None = None,
    ) -> None:
        rewards = {
            agent: number(f"{episode_id}, agent {agent}", "reward", amount)
            for agent, amount in by_agent(episode_id, "reward", reward).items()
        }
        infos = {
            agent: own_info(f"{episode_id}, agent {agent}", agent_info)
            for agent, agent_info in by_agent(episode_id, "info", info or {}).items()
            if agent_info
        }
        gone = ended_agents(episode_id, multiagent_done_dict, multiagent_truncated_dict)
        self._exchange.reward(episode_id, rewards, infos, gone)

    def end_episode(
        self, episode_id: str, observation: Any = None, *, truncated: bool = False
    ) -> None:
        seen = {} if observation is None else self._observe(episode_id, observation)[0]
        self._exchange.end(episode_id, seen, truncated=bool(truncated))

    def _observe(self, episode_id: str, observation: Any) -> tuple[dict[Any, Any], Any]:
        """Copies of the values by agent, and a key to compare them."""
        seen, key = {}, {}
        for agent, value in by_agent(episode_id, "obs", observation).items():
            policy = self._policy(episode_id, agent)
            key[agent] = policy.observe(f"{episode_id}, agent {agent}", value)
            seen[agent] = policy.observation.decode(key[agent])
        return seen, key

    def _policy(self, episode_id: str, agent: Any) -> ClientPolicy:
        """The codecs of an agent, created at its first observation. Raises ValueError."""
        policy = self._shared or self._policies.get(agent)
        if policy is None:
            obs_space, act_space = (_space_of(episode_id, agent, s) for s in self._spaces)
            policy = self._policies[agent] = ClientPolicy(DEFAULT_POLICY, obs_space, act_space)
        return policy


def _default_policy(agent: str) -> None:
    """The client's default policy, which is the collector's only one."""


def is_by_agent(space: Any) -> bool:
    """Whether spaces are given by agent; gymnasium's Dict space is a mapping, too."""
    return isinstance(space, Mapping) and not hasattr(space, "contains")


def _space_of(episode_id: str, agent: Any, space: Any) -> Space:
    if not is_by_agent(space):
        return descriptor(space)
    if agent not in space:
        raise ValueError(
            f"Episode {episode_id}: expected an agent of {sorted(map(str, space))}, got {agent!r}"
        )
    return descriptor(space[agent])
