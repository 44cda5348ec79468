"""The assembler's output: parts that are ready for a shard, and the memory of ended episodes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from ingest.episodes.idempotency import MAX_KEYS
from ingest.episodes.journal_events import Ended
from ingest.episodes.open_episode import Carry, OpenEpisode
from ingest.protocol.agent_names import Name, label, name_in
from ingest.protocol.errors import Refusal, completed
from storage.experience.endings import UNOBSERVED
from storage.experience.episode import Part
from storage.experience.part_columns import PartColumns
from storage.experience.step_columns import UNKNOWN_VERSION


class Finished(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What is remembered of an ended episode, so that late events get the right answer."""

    episode_id: str
    key: int
    instance: str
    start: int
    next_seq: int
    how: str
    cause: str = ""
    agent_id: str | None = None  # for tracks
    agents: int = -1  # the number of tracks of the whole episode, if its end ended this one
    policy_id: str = ""  # its rules; "": known from shards only
    schema_id: str = ""
    version: int = UNKNOWN_VERSION  # that acted last
    acted: int = 0  # when its last action came, microseconds; 0: unknown

    @property
    def name(self) -> Name:
        """The episode, or the agent's track of it."""
        return name_in(self.episode_id, self.agent_id)

    @classmethod
    def of(cls, episode: OpenEpisode, ended: Ended) -> Finished:
        """What is remembered of an episode with this end."""
        started = episode.started
        return cls(
            started.episode_id,
            started.key,
            started.instance,
            started.start,
            episode.next_seq,
            ended.how,
            ended.cause,
            started.agent_id,
            ended.agents,
            started.policy_id,
            started.schema_id,
            episode.policy_version[-1] if episode.policy_version else UNKNOWN_VERSION,
            episode.received_ts[-1] if episode.received_ts else 0,
        )

    @property
    def has_steps(self) -> bool:
        """Whether it has, or may have, steps: the start and the end alone are two numbers."""
        return self.next_seq != 2

    @property
    def client_seq(self) -> int:
        """The first sequence number that was not acknowledged to the client."""
        return self.next_seq - (self.how in UNOBSERVED)

    def refusal(self) -> Refusal:
        """The refusal of events after the end."""
        name, subject = self.episode_id, label(self.name)
        if self.how == "abandoned":
            nobody = "no event came"
            if self.agent_id is not None:
                subject = f"{name} with all of its agents"
                nobody = f"no event of any agent came (this is one of agent {self.agent_id})"
            text = (
                f"Episode {subject} was abandoned: {nobody} within its episode_timeout. "
                f"Continue with start_episode(continues={name!r})."
            )
            return Refusal("abandoned", text, episode_id=name, agent_id=self.agent_id)
        if self.how == "broken":
            text = f"Episode {subject} is broken: {self.cause}"
            return Refusal("broken", text, episode_id=name, agent_id=self.agent_id)
        return completed(name, self.agent_id)


class Sealed(msgspec.Struct, frozen=True):
    """A part that is ready for a shard, or an episode that ended without steps (`part` None).

    Columns have all parts of several episodes, whose keys count from `key`; `ended` are these.
    """

    key: int
    part: Part | PartColumns | None
    rows: tuple[int, ...]  # the journal rows that it needs
    finished: Finished | None = None  # set for an episode's last part
    carry: Carry | None = None  # set for all other parts
    ended: list[Finished] = []

    @property
    def number(self) -> int:
        """The part's number, -1 for an end without steps, -1 - N for columns of N parts."""
        if isinstance(self.part, PartColumns):
            return -1 - self.part.count
        return -1 if self.part is None else self.part.part

    @property
    def all_finished(self) -> list[Finished]:
        """The episodes that end with it."""
        return self.ended if self.finished is None else [self.finished]

    def split(self) -> list[Sealed]:
        """Columns as their parts."""
        if not isinstance(self.part, PartColumns):
            return [self]
        found, at = [], 0
        for part in self.part.parts():
            last = self.ended[at] if part.ended is not None else None
            found.append(Sealed(self.key + at, part, self.rows, finished=last))
            at += last is not None
        return found


def steps_of(sealed: Iterable[Sealed]) -> int:
    """The steps of parts that were sealed."""
    return sum(item.part.steps for item in sealed if item.part is not None)


def parts_of_entry(number: int) -> int:
    """How many parts an entry of a plan stands for, by its `Sealed.number`."""
    return max(1, -1 - number)


@dataclass(frozen=True)
class Limits:
    """Limits of what is remembered. Counts, not times, so that memory is independent of traffic."""

    open_episodes: int = 100_000
    finished: int = 100_000
    instances: int = 4_096
    imports: int = 100_000
    keys: int = MAX_KEYS  # Idempotency-Keys of single calls
