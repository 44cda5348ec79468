"""Tracks: what an episode of several agents is to a collector.

An agent's run through an episode is a *track*: it is started, numbered, judged, cut, sealed and
counted like an episode of its own, in the stream of its own policy. Its name is the pair
(episode id, agent id), which no episode of one agent has, whatever either is called. `Whole` is
what the tracks of one episode have in common.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

Name: TypeAlias = str | tuple[str, str]
"""An episode of one agent by its id, or a track."""


UNSAMPLED = "unsampled:"
"""Begins the id of an episode that its client left out of its sample: nothing of it is logged."""


def name_of(event: Any) -> Name:
    """The name of what has `episode_id` and `agent_id`: an event, a call, an answer."""
    agent: str | None = event.agent_id
    episode: str = event.episode_id
    return episode if agent is None else (episode, agent)


def name_in(episode_id: str, agent_id: str | None) -> Name:
    """The name of an agent's track, or of the episode without one."""
    return episode_id if agent_id is None else (episode_id, agent_id)


def label(name: Name) -> str:
    """A name as messages say it."""
    return name if isinstance(name, str) else f"{name[0]}, agent {name[1]}"


def label_of(event: Any) -> str:
    """The name of an event as messages say it."""
    return label(name_of(event))


@dataclass
class Whole:
    """An episode of several agents: its client instance, who is in it, how it stands.

    `ended` are agents whose tracks are over, as far as they are remembered, and `acted` those of
    all that took a step. `agents` is how many of these there are in all once an end has told it,
    `stopped` the agent whose track was abandoned or broken, and the whole episode with it. `seen`
    is the running time of the latest event. `arms` is what each policy's first track was assigned
    to by a canary: those that join it are of the same arm, whatever is on by then.
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
        """Whether every agent that it ever had is known, so that no other may join."""
        return 0 <= self.agents <= len(self.open) + len(self.ended)

    @property
    def has_all_acted(self) -> bool:
        """Whether as many agents acted as an end told, so that no other may begin to."""
        return 0 <= self.agents <= len(self.acted)
