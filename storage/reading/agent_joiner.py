"""Joining the tracks of multi-agent episodes: which episodes are whole, and how long others wait.

A track is one agent's run through an episode, and is complete when it comes here. Tracks belong
together if collector and eps_id are equal; a track that ended with its episode states the number of
tracks. Times are arguments: seconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from storage.experience.sample_batch import AGENT_ID, ENV_T, EPISODE_ORDINAL, EPS_ID, SampleBatch
from storage.reading.batching import join_rows

Key: TypeAlias = tuple[str, str]
"""(collector, eps_id)."""


@dataclass(slots=True)
class Track:
    """One agent's rows by time. `agents`: the episode's number of tracks, -1 if unknown."""

    policy_id: str
    stream: str
    rows: SampleBatch
    alone: bool  # a single-agent episode
    agents: int
    stopped: bool  # abandoned or broken
    received: int  # when the collector received its last step, microseconds since the epoch

    @property
    def episode(self) -> Key:
        return self.stream.rpartition("-")[0], str(self.rows[EPS_ID][0])

    @property
    def agent_id(self) -> str:
        return str(self.rows[AGENT_ID][0])

    @property
    def identity(self) -> tuple[str, str, int]:
        """(policy, stream, episode_ordinal), by which the track is found again in the shards."""
        return self.policy_id, self.stream, int(self.rows[EPISODE_ORDINAL][0])


@dataclass(slots=True)
class JointEpisode:
    """The tracks of one episode, sorted by agent, and its number of environment steps."""

    tracks: list[Track]
    steps: int

    @classmethod
    def of(cls, tracks: Sequence[Track]) -> JointEpisode:
        ordered = sorted(tracks, key=lambda track: track.agent_id)
        times: list[npt.NDArray[Any]] = [track.rows[ENV_T] for track in ordered]
        return cls(ordered, len(np.unique(np.concatenate(times))))


@dataclass(slots=True, eq=False)
class _WaitingTracks:
    """The tracks of an episode that may be incomplete."""

    came: float  # when the latest track came
    tracks: dict[str, Track] = field(default_factory=dict)
    nbytes: int = 0  # of the tracks that are counted as waiting

    @property
    def whole(self) -> bool:
        return len(self.tracks) >= max(self._agent_counts(), default=len(self.tracks) + 1)

    @property
    def stopped(self) -> bool:
        """Whether the collector ended a track (abandoned or broken): others may never come."""
        return any(track.stopped for track in self.tracks.values())

    @property
    def received(self) -> int:
        return max(track.received for track in self.tracks.values())

    def _agent_counts(self) -> Iterator[int]:
        return (track.agents for track in self.tracks.values() if track.agents > 0)


class TrackJoiner:
    """Holds tracks until their episode is whole, or until a limit is reached.

    An episode that was abandoned or broken does not state its number of tracks. It is over
    (`expired`) `patience` seconds after its latest track came. Every other episode waits for its
    tracks. If the waiting tracks exceed `most_bytes`, the episodes that have waited longest are
    handed over incomplete (`excess`).
    """

    def __init__(self, patience: float, most_bytes: int) -> None:
        self._patience, self._most_bytes = patience, most_bytes
        # a list, as an id may be used again for another episode
        self._held: dict[Key, list[_WaitingTracks]] = {}
        self.waiting = 0  # episodes
        self.nbytes = 0  # of their tracks

    def pending(self) -> list[Track]:
        """The waiting tracks, in an order in which `push` restores this state."""
        return [track for _, group in self._groups() for track in group.tracks.values()]

    def push(self, track: Track, now: float) -> JointEpisode | None:
        """Add a track. Returns its episode if that is whole now, else None."""
        if track.alone or track.agents == 1:
            return JointEpisode.of([track])
        groups = self._held.setdefault(track.episode, [])
        group = next((one for one in groups if track.agent_id not in one.tracks), None)
        if group is None:
            group = _WaitingTracks(now)
            groups.append(group)
            self.waiting += 1
        group.tracks[track.agent_id], group.came = track, now
        if group.whole:
            return self._release(track.episode, group)
        track.rows = track.rows.copy()  # a copy, so that the shard's memory can be freed
        group.nbytes += track.rows.nbytes
        self.nbytes += track.rows.nbytes
        return None

    def _groups(self) -> Iterator[tuple[Key, _WaitingTracks]]:
        return ((key, group) for key, groups in self._held.items() for group in groups)

    def _release(self, key: Key, group: _WaitingTracks) -> JointEpisode:
        self._held[key].remove(group)
        if not self._held[key]:
            del self._held[key]
        self.waiting -= 1
        self.nbytes -= group.nbytes
        return JointEpisode.of(list(group.tracks.values()))

    def due(self) -> float | None:
        """When the next abandoned or broken episode is over; None if none waits."""
        times = [g.came + self._patience for _, g in self._groups() if g.stopped]
        return min(times, default=None)

    def expired(self, now: float) -> list[JointEpisode]:
        """Remove and return the abandoned or broken episodes that are over by `now`."""
        return self._where(lambda g: g.stopped and g.came + self._patience <= now)

    def settled(self, now_us: int) -> list[JointEpisode]:
        """Like `expired`, but by the time at which the collector received the latest step.

        `now_us`: microseconds since the epoch.
        """
        limit = now_us - round(self._patience * 1e6)
        return self._where(lambda g: g.stopped and g.received <= limit)

    def excess(self) -> list[JointEpisode]:
        """Remove and return the episodes beyond `most_bytes`, the longest waiting first."""
        found = []
        while self.nbytes > self._most_bytes:
            found.append(self._release(*next(self._groups())))
        return found

    def flush(self) -> list[JointEpisode]:
        """Remove and return all waiting episodes."""
        return self._where(lambda group: True)

    def _where(self, chosen: Callable[[_WaitingTracks], bool]) -> list[JointEpisode]:
        found = [pair for pair in self._groups() if chosen(pair[1])]
        return [self._release(*pair) for pair in found]


class Ready:
    """Holds joint episodes, in order, until they are cut into batches of environment steps."""

    def __init__(self) -> None:
        self.episodes: list[JointEpisode] = []
        self.steps = 0

    def push(self, episode: JointEpisode) -> None:
        self.episodes.append(episode)
        self.steps += episode.steps

    def take(self, size: int, rng: np.random.Generator | None) -> list[JointEpisode]:
        """Remove and return the next episodes with `size` steps or more, or all if there are fewer.

        With `rng`, all episodes are shuffled first.
        """
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
