"""Rows of N copies of an environment, until they form fragments: arrays (N, capacity, ...).

A row begins when its action is chosen and is completed by the environment's step. Each call writes
a column for many copies. A copy's rows are returned as columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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

Array = npt.NDArray[Any]
Index = npt.NDArray[np.intp]

CUT, INFOS = "cut", "infos"
CUTS = ("", "fragment", "terminated", "truncated", "horizon", "soft_horizon")
"""Why nothing is carried across a row, as numbers in the column `cut` (uint8). "fragment": the
episode continues, and the next observation is known; "terminated": no bootstrap; the others
bootstrap."""


RowLayout: TypeAlias = dict[str, tuple[tuple[int, ...], Any]]
"""Column -> (shape, dtype)."""


def row_layout(observation: Space, action: Space, dist_inputs: int) -> RowLayout:
    """The columns of a worker's row; texts are objects."""
    layout: RowLayout = {}
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
    """The first row of an episode among a copy's rows."""

    start: int
    episode_id: str
    number: int


class FragmentBuffers:
    """N x capacity rows; `filled` (N,) counts the complete ones of each copy."""

    def __init__(self, copies: int, capacity: int, layout: RowLayout) -> None:
        self.filled: Index = np.zeros(copies, np.intp)
        self.capacity = capacity
        self._columns: dict[str, Array] = {
            name: np.zeros((copies, capacity, *shape), dtype)
            for name, (shape, dtype) in layout.items()
        }
        self._segments: list[list[EpisodeSegment]] = [[] for _ in range(copies)]

    def put(self, copies: Index, columns: Mapping[str, Any]) -> None:
        """Write columns (M, ...) into the current rows of M copies."""
        at = self.filled[copies]
        for name, values in columns.items():
            self._columns[name][copies, at] = values

    def advance(self, copies: Index) -> None:
        """Mark the current rows of these copies as complete."""
        self.filled[copies] += 1
        if int(self.filled.max()) >= self.capacity:
            self._grow()

    def _grow(self) -> None:
        """Double the capacity, for an episode that exceeds it."""
        self.capacity *= 2
        for name, column in self._columns.items():
            wider = np.zeros((len(column), self.capacity, *column.shape[2:]), column.dtype)
            wider[:, : column.shape[1]] = column
            self._columns[name] = wider

    def begin_episode(self, copy: int, episode_id: str, number: int) -> None:
        """Make the copy's next row the first of this episode."""
        segments, start = self._segments[copy], int(self.filled[copy])
        if segments and segments[-1].start == start:
            segments.pop()  # an episode without rows
        segments.append(EpisodeSegment(start, episode_id, number))

    def discard_episode(self, copy: int) -> int:
        """Drop the rows of the copy's current episode, and return their number."""
        start = self._segments[copy][-1].start
        dropped = int(self.filled[copy]) - start
        self.filled[copy] = start
        return dropped

    def take_episode(self, copy: int) -> tuple[dict[str, Array], EpisodeSegment]:
        """Remove and return the rows of the copy's current episode; it continues without them."""
        current = self._segments[copy][-1]
        here = slice(current.start, int(self.filled[copy]))
        self.filled[copy] = current.start
        columns = {name: column[copy, here].copy() for name, column in self._columns.items()}
        return columns, EpisodeSegment(0, current.episode_id, current.number)

    def last(self, name: str, copy: int) -> Any:
        """A column of the copy's last complete row."""
        return self._columns[name][copy, self.filled[copy] - 1]

    def take(
        self, copies: Sequence[int], count: int
    ) -> tuple[dict[str, Array], list[EpisodeSegment]]:
        """Remove and return the first `count` rows of each of these copies, and their segments.

        Columns are concatenated copies; starts of segments refer to them. The copies start again
        with no rows, in their current episodes.
        """
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
