"""The arguments of an episode's calls, checked and by agent.

An episode of one agent has plain values, which become a mapping of one. Clients of a collector and
environments in a worker's process check their arguments here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ingest.delivery.declarations import ClientPolicy
from ingest.delivery.events import encode_info, number, propensity
from storage.experience.episode import ALL_AGENTS, DEFAULT_AGENT

ByAgent: TypeAlias = Mapping[Any, Any]

LoggedBytes: TypeAlias = tuple[bytes, float | None, float | None]
"""An action in canonical bytes, with its propensity or the logarithm, if known."""


@dataclass(frozen=True)
class Arguments:
    """The arguments of one kind of episode. `only`: the key of its agent, without mappings."""

    has_one: bool = False
    only: str | None = None

    def by_agent(self, episode_id: str, name: str, value: Any) -> ByAgent:
        """A value by agent. Raises ValueError unless it is a mapping or the episode has one."""
        if self.has_one:
            return {self.only: value}
        if not isinstance(value, Mapping):
            raise ValueError(
                f"Episode {episode_id}: {name}: expected a mapping by agent, got {value!r:.80}"
            )
        return value

    def where(self, episode_id: str, agent: Any) -> str:
        """The name of an agent's part of the episode, for messages."""
        return episode_id if self.has_one else f"{episode_id}, agent {agent}"

    def observe(
        self, episode_id: str, policy_of: Callable[[Any], ClientPolicy], values: ByAgent
    ) -> dict[Any, bytes]:
        """Canonical bytes of observations by agent. Raises ValueError."""
        return {
            agent: policy_of(agent).observe(self.where(episode_id, agent), value)
            for agent, value in values.items()
        }

    def actions(
        self,
        episode_id: str,
        policy_of: Callable[[Any], ClientPolicy],
        action: Any,
        prob: Any,
        logp: Any,
        *,
        acting: Collection[Any] | None = None,
    ) -> dict[Any, LoggedBytes]:
        """Actions and propensities by agent, of the `acting` ones if known. Raises ValueError."""
        given = self.by_agent(episode_id, "action", action)
        if acting is not None:
            require_actions(episode_id, acting, given)
        probs, logps = (
            {} if value is None else self.by_agent(episode_id, name, value)
            for name, value in (("action_prob", prob), ("action_logp", logp))
        )
        if others := (probs.keys() | logps.keys()) - given.keys():
            raise ValueError(
                f"Episode {episode_id}: expected propensities of acting agents only, got some of "
                f"{named(others)}"
            )
        found = {}
        for agent, value in given.items():
            where, policy = self.where(episode_id, agent), policy_of(agent)
            known = probs.get(agent), logps.get(agent)
            if known != (None, None):
                known = propensity(where, *known, has_densities=policy.has_densities)
            found[agent] = policy.encode_action(where, value), *known
        return found

    def returns(
        self, episode_id: str, reward: Any, info: Any, done: Any, truncated: Any
    ) -> tuple[dict[Any, float], dict[Any, Any], dict[Any, bool]]:
        """Rewards, encoded infos, and the ended agents -> whether truncated. Raises ValueError."""
        if self.has_one and (isinstance(reward, Mapping) or (done, truncated) != (None, None)):
            raise ValueError(
                f"Episode {episode_id}: expected one reward, because the episode has one agent; to "
                "log several, start it with policy_id={agent: policy}, or with a client that has a "
                "policy_mapping_fn"
            )
        rewards = self.by_agent(episode_id, "reward", reward if self.has_one else reward or {})
        infos = self.by_agent(episode_id, "info", info) if info else {}
        return (
            {a: number(self.where(episode_id, a), "reward", paid) for a, paid in rewards.items()},
            {a: encode_info(self.where(episode_id, a), one) for a, one in infos.items() if one},
            {} if self.has_one else _ended(episode_id, done, truncated),
        )


ONE, HERE, SEVERAL = Arguments(True), Arguments(True, DEFAULT_AGENT), Arguments()
"""Of one agent at a collector, whose track has no agent id; of one at a worker; of several."""


def by_episode(episode_id: str | Sequence[str], observation: Any) -> dict[str, Any]:
    """The observations of a get_action by episode. Raises ValueError."""
    if isinstance(episode_id, str):
        return {episode_id: observation}
    if not isinstance(observation, Mapping) or set(observation) != set(episode_id):
        raise ValueError("get_action: expected a mapping from the given ids to observations")
    return {name: observation[name] for name in episode_id}


def require_actions(episode_id: str, acting: Collection[Any], given: Collection[Any]) -> None:
    """Raise ValueError unless the given actions are those of the agents that act."""
    if set(given) != set(acting):
        raise ValueError(
            f"Episode {episode_id}: expected actions of the agents {named(acting)}, got "
            f"{named(given)}"
        )


def require_going_on(episode_id: str, ended: Collection[Any]) -> None:
    """Raise ValueError if these agents, which have had their last observation, have another."""
    if ended:
        raise ValueError(
            f"Episode {episode_id}: expected no observations of ended agents, got some of "
            f"{named(ended)}"
        )


def acting_of(episode_id: str, obs: Collection[Any], gone: Collection[Any]) -> list[Any]:
    """The observed agents that have not ended. Raises ValueError if there is none."""
    acting = [agent for agent in obs if agent not in gone]
    if not acting:
        raise ValueError(
            f"Episode {episode_id}: expected the observation of an agent that has not ended, got "
            f"{named(obs)}"
        )
    return acting


def named(agents: Iterable[Any]) -> list[str]:
    """Agents for messages."""
    return sorted(map(str, agents))


def _ended(episode_id: str, done: Any, truncated: Any) -> dict[Any, bool]:
    """The agents that have ended -> whether they were truncated (False if they are in both)."""
    gone = {
        agent: cut
        for name, ends, cut in (
            ("multiagent_truncated_dict", truncated, True),
            ("multiagent_done_dict", done, False),
        )
        for agent, over in SEVERAL.by_agent(episode_id, name, ends or {}).items()
        if over
    }
    if ALL_AGENTS in gone:
        raise ValueError(f"Episode {episode_id}: end_episode ends the episode of all agents")
    return gone
