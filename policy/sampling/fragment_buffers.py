"""Rows of N copies of an environment while they grow into fragments: arrays (N, capacity, ...).

A row is begun when its action is chosen and completed when the environment answers; several columns
are written for many copies in one call. What a copy has gathered leaves as columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.experience.sample_batch import (
    ACTION_DIST_INPUTS,
    ACTION_LOGP,
    NEXT_OBS,
    OBS,
    POLICY_VERSION,
    REWARDS,
    TERMINATEDS,
    TRUNCATEDS,
    T,
)
from storage.spaces.descriptors import Space
from storage.spaces.leaves import leaves

__all__ = ["CUT", "CUTS", "INFOS", "FragmentBuffers", "row_layout"]

Array = npt.NDArray[Any]
Index = npt.NDArray[np.intp]

CUT, INFOS = "cut", "infos"
CUTS = ("", "fragment", "terminated", "truncated", "horizon", "soft_horizon")
"""Why nothing is carried over a row, as the column `cut` (uint8) counts it. "fragment": the episode
goes on and its next observation is there; "terminated": nothing follows; the others bootstrap."""


def row_layout(
    observation: Space, action: Space, dist_inputs: int
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Column -> (shape, dtype) of a row that a worker gathers; texts are objects."""
    layout: dict[str, tuple[tuple[int, ...], Any]] = {}
    for prefix, space in ((OBS, observation), (NEXT_OBS, observation), ("actions", action)):
        for leaf in leaves(space):
            dtype = object if leaf.is_text else leaf.dtype
            layout[leaf.column(prefix)] = (() if leaf.is_text else leaf.shape, dtype)
    return layout | {
        REWARDS: ((), np.float64),
        TERMINATEDS: ((), np.bool_),
        TRUNCATEDS: ((), np.bool_),
        T: ((), np.int64),
        ACTION_LOGP: ((), np.float64),
        ACTION_DIST_INPUTS: ((dist_inputs,), np.float32),
        POLICY_VERSION: ((), np.int64),
        CUT: ((), np.uint8),
        INFOS: ((), object),
    }


@dataclass
class EpisodeSegment:
    """Where an episode begins among a copy's rows."""

    start: int
    episode_id: str
    number: int


class FragmentBuffers:
    """N x capacity rows; `filled` (N,) counts the complete ones of each copy."""

    def __init__(
        self, copies: int, capacity: int, layout: Mapping[str, tuple[tuple[int, ...], Any]]
    ) -> None:
        self.filled: Index = np.zeros(copies, np.intp)
        self.capacity = capacity
        self._columns: dict[str, Array] = {
            name: np.zeros((copies, capacity, *shape), dtype)
            for name, (shape, dtype) in layout.items()
        }
        self._segments: list[list[EpisodeSegment]] = [[] for _ in range(copies)]

    def put(self, copies: Index, columns: Mapping[str, Any]) -> None:
        """Write columns (M, ...) into the row that each of M copies is at."""
        at = self.filled[copies]
        for name, values in columns.items():
            self._columns[name][copies, at] = values

    def advance(self, copies: Index) -> None:
        """The rows that these copies are at are complete."""
        self.filled[copies] += 1
        if int(self.filled.max()) >= self.capacity:
            self._grow()

    def _grow(self) -> None:
        """Twice the room: an episode may be longer than what was set aside."""
        self.capacity *= 2
        for name, column in self._columns.items():
            wider = np.zeros((len(column), self.capacity, *column.shape[2:]), column.dtype)
            wider[:, : column.shape[1]] = column
            self._columns[name] = wider

    def begin_episode(self, copy: int, episode_id: str, number: int) -> None:
        """The copy's next row is the first of this episode."""
        segments, start = self._segments[copy], int(self.filled[copy])
        if segments and segments[-1].start == start:
            segments.pop()  # an episode without rows
        segments.append(EpisodeSegment(start, episode_id, number))

    def discard_episode(self, copy: int) -> int:
        """Drop the rows of the episode that the copy is in; how many they were."""
        start = self._segments[copy][-1].start
        dropped = int(self.filled[copy]) - start
        self.filled[copy] = start
        return dropped

    def take_episode(self, copy: int) -> tuple[dict[str, Array], EpisodeSegment]:
        """The rows of the episode that the copy is in, copied, and whose they are; the episode goes
        on without them."""
        current = self._segments[copy][-1]
        here = slice(current.start, int(self.filled[copy]))
        self.filled[copy] = current.start
        columns = {name: column[copy, here].copy() for name, column in self._columns.items()}
        return columns, EpisodeSegment(0, current.episode_id, current.number)

    def mark_last(self, copy: int, name: str, value: Any) -> None:
        """Set a column of the copy's last complete row."""
        self._columns[name][copy, self.filled[copy] - 1] = value

    def last(self, name: str, copy: int) -> Any:
        """A column of the copy's last complete row."""
        return self._columns[name][copy, self.filled[copy] - 1]

    def take(
        self, copies: Sequence[int], count: int
    ) -> tuple[dict[str, Array], list[EpisodeSegment]]:
        """The first `count` rows of each of these copies behind each other, copied, and their
        segments with starts among them. The copies begin anew, within the episodes they are in."""
        chosen = np.asarray(copies, np.intp)
        columns = {
            name: column[chosen, :count].reshape(len(chosen) * count, *column.shape[2:])
            for name, column in self._columns.items()
        }
        segments: list[EpisodeSegment] = []
        for place, copy in enumerate(copies):
            mine = self._segments[copy]
            segments += [
                EpisodeSegment(place * count + one.start, one.episode_id, one.number)
                for one in mine
                if one.start < count
            ]
            current = mine[-1]
            self._segments[copy] = [EpisodeSegment(0, current.episode_id, current.number)]
        self.filled[chosen] = 0
        return columns, segments
