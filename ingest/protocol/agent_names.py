"""Tracks: how a collector handles an episode of several agents.

An agent's run through an episode is a *track*. A track is started, numbered, judged, cut, sealed
and counted like an episode, in the stream of its own policy. Its name is the pair (episode id,
agent id), so it never equals the name of an episode with one agent. `Whole` is the state that the
tracks of one episode share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

Name: TypeAlias = str | tuple[str, str]
"""The id of an episode with one agent, or (episode id, agent id) of a track."""


UNSAMPLED = "unsampled:"
"""Prefix of the id of an episode that its client does not sample: nothing of it is logged."""


def name_of(event: Any) -> Name:
    """The name of an event, a call or an answer: anything with `episode_id` and `agent_id`."""
    agent: str | None = event.agent_id
    episode: str = event.episode_id
    return episode if agent is None else (episode, agent)


def name_in(episode_id: str, agent_id: str | None) -> Name:
    """The name of an agent's track, or of the episode if `agent_id` is None."""
    return episode_id if agent_id is None else (episode_id, agent_id)


def label(name: Name) -> str:
    """A name as text for messages."""
    return name if isinstance(name, str) else f"{name[0]}, agent {name[1]}"


def label_of(event: Any) -> str:
    """The name of an event as text for messages."""
    return label(name_of(event))


@dataclass
class Whole:
    """An episode of several agents: its client instance, its agents, its state.

    `open` are the agents with open tracks, `ended` those whose tracks have ended and are still
    remembered, `acted` all that took a step. `agents` is the number of agents that acted, once an
    end has given it (-1 before). `stopped` is the agent whose track was abandoned or broken, which
    ended the whole episode. `seen` is the running time of the latest event, in seconds. `arms` maps
    a policy to the canary arm of its first track; later tracks of the policy get the same arm.
    """

    instance: str
    open: dict[str, None] = field(default_factory=dict)
    ended: dict[str, None] = field(default_factory=dict)
    acted: set[str] = field(default_factory=set)
    agents: int = -1
    stopped: str | None = None
    seen: float = field(default=0.0, compare=False)
    arms: dict[str, str] = field(default_factory=dict, compare=False)

    @property
    def is_complete(self) -> bool:
        """Whether all agents of the episode are known, so that no other can join."""
        return 0 <= self.agents <= len(self.open) + len(self.ended)

    @property
    def has_all_acted(self) -> bool:
        """Whether all agents that an end announced have acted, so that no other can begin to."""
        return 0 <= self.agents <= len(self.acted)
