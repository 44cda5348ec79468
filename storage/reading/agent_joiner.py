"""Joining the tracks of multi-agent episodes: which are whole, which wait, and for how long.

A track is one agent's run through an episode, whole in itself. Tracks belong together by
(collector, eps_id); a track that ended with its episode tells how many there are. Time is an
argument here: seconds on a clock that only goes forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from storage.experience.sample_batch import AGENT_ID, ENV_T, EPISODE_ORDINAL, EPS_ID, SampleBatch
from storage.reading.batching import join_rows

__all__ = ["JointEpisode", "Ready", "Track", "TrackJoiner", "rows_by_policy"]

Key: TypeAlias = tuple[str, str]
"""(collector, eps_id)."""


@dataclass(slots=True)
class Track:
    """One agent's rows in the order of time. `agents`: how many tracks there are, -1 if untold."""

    policy_id: str
    stream: str
    rows: SampleBatch
    alone: bool  # a single-agent episode
    agents: int
    stopped: bool  # abandoned or broken
    received: int  # when the collector had its last step, microseconds since the epoch

    @property
    def episode(self) -> Key:
        return self.stream.rpartition("-")[0], str(self.rows[EPS_ID][0])

    @property
    def agent_id(self) -> str:
        return str(self.rows[AGENT_ID][0])

    @property
    def identity(self) -> tuple[str, str, int]:
        """(policy, stream, episode_ordinal): by what it is found in the shards again."""
        return self.policy_id, self.stream, int(self.rows[EPISODE_ORDINAL][0])


@dataclass(slots=True)
class JointEpisode:
    """The tracks of one episode in the order of their agents, and its environment steps."""

    tracks: list[Track]
    steps: int

    @classmethod
    def of(cls, tracks: Sequence[Track]) -> JointEpisode:
        ordered = sorted(tracks, key=lambda track: track.agent_id)
        times: list[npt.NDArray[Any]] = [track.rows[ENV_T] for track in ordered]
        return cls(ordered, len(np.unique(np.concatenate(times))))


@dataclass(slots=True, eq=False)
class _Group:
    """The tracks of an episode that may not be whole yet."""

    came: float  # when the latest one came
    tracks: dict[str, Track] = field(default_factory=dict)
    nbytes: int = 0  # of the tracks that are counted as waiting

    @property
    def whole(self) -> bool:
        return len(self.tracks) >= max(self._told(), default=len(self.tracks) + 1)

    @property
    def stopped(self) -> bool:
        """Over by no word of its client's: what is still missing may never come."""
        return any(track.stopped for track in self.tracks.values())

    @property
    def received(self) -> int:
        return max(track.received for track in self.tracks.values())

    def _told(self) -> Iterator[int]:
        return (track.agents for track in self.tracks.values() if track.agents > 0)


class TrackJoiner:
    """Holds tracks until their episode is whole, or for as long as its bounds allow.

    An episode that the collector stopped (it was abandoned or broken) does not tell its number:
    `patience` seconds after its latest track came, it is over (`expired`). Every other one waits
    for its tracks; but no more than `most_bytes` wait, then the one that has waited longest is
    handed over as it is (`excess`).
    """

    def __init__(self, patience: float, most_bytes: int) -> None:
        self._patience, self._most_bytes = patience, most_bytes
        self._held: dict[Key, list[_Group]] = {}  # an id that is used again is another episode
        self.waiting = 0  # episodes
        self.nbytes = 0  # of their tracks

    def pending(self) -> list[Track]:
        """The tracks that wait; pushed again in this order they wait as they do now."""
        return [track for _, group in self._groups() for track in group.tracks.values()]

    def push(self, track: Track, now: float) -> JointEpisode | None:
        """The track's episode, if it is whole now."""
        if track.alone or track.agents == 1:
            return JointEpisode.of([track])
        groups = self._held.setdefault(track.episode, [])
        group = next((one for one in groups if track.agent_id not in one.tracks), None)
        if group is None:
            group = _Group(now)
            groups.append(group)
            self.waiting += 1
        group.tracks[track.agent_id], group.came = track, now
        if group.whole:
            return self._release(track.episode, group)
        track.rows = track.rows.copy()  # lets go of the shard
        group.nbytes += track.rows.nbytes
        self.nbytes += track.rows.nbytes
        return None

    def _groups(self) -> Iterator[tuple[Key, _Group]]:
        return ((key, group) for key, groups in self._held.items() for group in groups)

    def _release(self, key: Key, group: _Group) -> JointEpisode:
        self._held[key].remove(group)
        if not self._held[key]:
            del self._held[key]
        self.waiting -= 1
        self.nbytes -= group.nbytes
        return JointEpisode.of(list(group.tracks.values()))

    def due(self) -> float | None:
        """When the next stopped episode is over; None: none waits."""
        times = [g.came + self._patience for _, g in self._groups() if g.stopped]
        return min(times, default=None)

    def expired(self, now: float) -> list[JointEpisode]:
        """The stopped episodes that are over, with what came of them."""
        return self._where(lambda g: g.stopped and g.came + self._patience <= now)

    def settled(self, now_us: int) -> list[JointEpisode]:
        """As `expired`, by when the collector had the latest step (microseconds, the epoch)."""
        limit = now_us - round(self._patience * 1e6)
        return self._where(lambda g: g.stopped and g.received <= limit)

    def excess(self) -> list[JointEpisode]:
        """What there is no room for, the longest waiting first."""
        found = []
        while self.nbytes > self._most_bytes:
            found.append(self._release(*next(self._groups())))
        return found

    def flush(self) -> list[JointEpisode]:
        """All that waits."""
        return self._where(lambda group: True)

    def _where(self, chosen: Callable[[_Group], bool]) -> list[JointEpisode]:
        found = [pair for pair in self._groups() if chosen(pair[1])]
        return [self._release(*pair) for pair in found]


class Ready:
    """Joint episodes in their order, until they are cut into batches of environment steps."""

    def __init__(self) -> None:
        self.episodes: list[JointEpisode] = []
        self.steps = 0

    def push(self, episode: JointEpisode) -> None:
        self.episodes.append(episode)
        self.steps += episode.steps

    def take(self, size: int, rng: np.random.Generator | None) -> list[JointEpisode]:
        """The next episodes of `size` steps or more, fewer if there are not so many; in a random
        order with `rng`."""
        if rng is not None:
            order = rng.permutation(len(self.episodes)).tolist()
            self.episodes = [self.episodes[i] for i in order]
        ends = np.cumsum([episode.steps for episode in self.episodes])
        stop = min(int(np.searchsorted(ends, size)) + 1, len(ends))
        taken, self.episodes = self.episodes[:stop], self.episodes[stop:]
        self.steps -= sum(episode.steps for episode in taken)
        return taken


def rows_by_policy(episodes: Sequence[JointEpisode]) -> dict[str, SampleBatch]:
    """Each policy's rows, episode by episode and agent by agent."""
    found: dict[str, list[SampleBatch]] = {}
    for episode in episodes:
        for track in episode.tracks:
            found.setdefault(track.policy_id, []).append(track.rows)
    return {policy_id: join_rows(pieces) for policy_id, pieces in sorted(found.items())}
