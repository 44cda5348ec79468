"""The stages between loaded shards and batches: joining parts, shuffling, cutting.

The output of a stage depends only on the rows pushed into it and the random state. Each stage can
list the rows that it still holds, in their order, which makes a saved position exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from storage.experience.sample_batch import (
    ACTION_DIST_INPUTS,
    AGENT_ID,
    EPISODE_ORDINAL,
    ORDINAL,
    SampleBatch,
    T,
    concat_samples,
)
from storage.reading.ledger import positions
from storage.reading.loading import ENDED, STREAM_INDEX
from storage.shards.content import is_null

Array: TypeAlias = npt.NDArray[Any]
IntArray: TypeAlias = npt.NDArray[np.int64]
Mode: TypeAlias = Literal["transitions", "fragments", "episodes"]

Bounds: TypeAlias = Callable[[SampleBatch], IntArray]
"""Batch -> int64 (units,): the first row of each unit, which is shuffled and never divided."""

Shown: TypeAlias = Callable[[SampleBatch], SampleBatch]


def join_rows(pieces: Sequence[SampleBatch]) -> SampleBatch:
    """Concatenate the pieces; action_dist_inputs of different widths are padded with NaN."""
    filled = [piece for piece in pieces if piece.count]
    if len(filled) > 1 and ACTION_DIST_INPUTS in filled[0]:
        width = max(piece[ACTION_DIST_INPUTS].shape[1] for piece in filled)
        filled = [_widened(piece, width) for piece in filled]
    if len(filled) < 2:
        return concat_samples(filled)
    first = filled[0]
    ones = {name for name in first if _is_one(name, filled)}
    joined = concat_samples([piece.select([n for n in piece if n not in ones]) for piece in filled])
    joined.update({n: np.broadcast_to(first[n][:1], (joined.count,)) for n in ones})
    return joined.select(list(first))


def _is_one(name: str, pieces: Sequence[SampleBatch]) -> bool:
    """Whether a column has the same value in all rows of all pieces and stores it once each."""
    if any(name not in piece or piece[name].strides != (0,) for piece in pieces):
        return False
    value = pieces[0][name][0]
    return all(piece[name][0] == value for piece in pieces)


def gather(rows: SampleBatch, order: IntArray) -> SampleBatch:
    """Take rows in this order: copies, except for columns that store one value for all rows."""
    return SampleBatch(
        {
            name: np.broadcast_to(column[:1], (len(order),))
            if column.strides == (0,)
            else column.take(order, axis=0)
            for name, column in rows.items()
        }
    )


def _widened(piece: SampleBatch, width: int) -> SampleBatch:
    given = piece[ACTION_DIST_INPUTS]
    if given.shape[1] == width:
        return piece
    wide = np.full((piece.count, width), np.nan, given.dtype)
    wide[:, : given.shape[1]] = given
    result = piece.select(list(piece))
    result[ACTION_DIST_INPUTS] = wide
    return result


def segment_starts(rows: SampleBatch, key: str) -> IntArray:
    """The first row of each run of consecutive t within one stream and one value of `key`."""
    if not rows.count:
        return np.zeros(0, np.int64)
    t, ids, streams = rows[T], rows[key], rows[STREAM_INDEX]
    breaks = (ids[1:] != ids[:-1]) | (t[1:] != t[:-1] + 1) | (streams[1:] != streams[:-1])
    return np.concatenate(([0], np.flatnonzero(breaks) + 1))


def unit_bounds(mode: Mode, batch_size: int) -> Bounds | None:
    """The unit that a mode shuffles and cuts by: a row (None), a fragment or an episode."""
    if mode == "transitions":
        return None
    if mode == "episodes":
        return lambda rows: segment_starts(rows, EPISODE_ORDINAL)
    return lambda rows: _fragments(rows, batch_size)


def _fragments(rows: SampleBatch, batch_size: int) -> IntArray:
    """The first rows of the parts, and of the pieces of `batch_size` rows within longer ones."""
    starts = segment_starts(rows, ORDINAL)
    steps = np.diff(np.append(starts, rows.count))
    if not len(steps) or steps.max() <= batch_size:
        return starts
    inside = positions(np.zeros_like(steps), steps)
    return np.flatnonzero(inside % batch_size == 0)


class EpisodeJoiner:
    """Holds the parts of episodes until an episode is complete, from t = 0 to its ending."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, str], list[SampleBatch]] = {}

    @property
    def waiting(self) -> int:
        """The number of incomplete episodes."""
        return len(self._held)

    def push(self, rows: SampleBatch) -> list[SampleBatch]:
        """Add rows. Returns batches of whole episodes that are complete now, one after another."""
        starts = segment_starts(rows, ORDINAL)
        stops = np.append(starts[1:], rows.count)
        whole = (rows[T][starts] == 0) & ~is_null(rows[ENDED][stops - 1])
        if whole.all():
            return [rows] if rows.count else []
        ready = [rows.take(np.repeat(whole, stops - starts))] if whole.any() else []
        for i in np.flatnonzero(~whole).tolist():
            # a copy, so that the shard's memory can be freed
            piece = rows.slice(int(starts[i]), int(stops[i])).copy()
            joined = self._complete(self.hold(piece))
            if joined is not None:
                ready.append(joined)
        return ready

    def hold(self, piece: SampleBatch) -> tuple[int, int, str]:
        """Hold a run of one part, and return the key of its episode."""
        key = (
            int(piece[STREAM_INDEX][0]),
            int(piece[EPISODE_ORDINAL][0]),
            str(piece[AGENT_ID][0]),
        )
        self._held.setdefault(key, []).append(piece)
        return key

    def _complete(self, key: tuple[int, int, str]) -> SampleBatch | None:
        pieces = sorted(self._held[key], key=lambda piece: int(piece[T][0]))
        if pieces[0][T][0] != 0 or pieces[-1][ENDED][-1] is None:
            return None
        if any(b[T][0] != a[T][-1] + 1 for a, b in pairwise(pieces)):
            return None
        del self._held[key]
        return join_rows(pieces)

    def flush(self) -> list[SampleBatch]:
        """Remove and return the rows of the incomplete episodes, each sorted by t."""
        held, self._held = list(self._held.values()), {}
        return [join_rows(sorted(pieces, key=lambda p: int(p[T][0]))) for pieces in held]

    def pending(self) -> list[SampleBatch]:
        return [piece for pieces in self._held.values() for piece in pieces]

    def restore(self, rows: SampleBatch) -> None:
        """Hold the rows of `pending` again."""
        starts = segment_starts(rows, ORDINAL).tolist()
        for start, stop in zip(starts, [*starts[1:], rows.count], strict=True):
            self.hold(rows.slice(start, stop).copy())


class ShuffleWindow:
    """Shuffles units within a window of rows, half of which leaves at a time."""

    def __init__(self, size: int, bounds: Bounds | None, rng: np.random.Generator) -> None:
        self._size = size
        self._bounds = bounds
        self._rng = rng
        self._held: list[SampleBatch] = []
        self._rows = 0

    def push(self, rows: SampleBatch) -> list[SampleBatch]:
        """Add rows. Returns the rows that leave the window, if it is full now."""
        self._held.append(rows)
        self._rows += rows.count
        return self._stir(self._size // 2) if self._rows >= self._size else []

    def flush(self) -> list[SampleBatch]:
        """Remove and return all rows."""
        return self._stir(0) if self._rows else []

    def pending(self) -> list[SampleBatch]:
        return self._held

    def restore(self, rows: SampleBatch) -> None:
        self._held, self._rows = [rows], rows.count

    def _stir(self, keep: int) -> list[SampleBatch]:
        """Shuffle all units, keep about `keep` rows in the window, and return the others."""
        rows = join_rows(self._held)
        if self._bounds is None:
            order, at = self._rng.permutation(rows.count), rows.count - keep
        else:
            starts = self._bounds(rows)
            steps = np.diff(np.append(starts, rows.count))
            shuffled = self._rng.permutation(len(starts))
            order = positions(starts[shuffled], steps[shuffled])
            ends = np.cumsum(steps[shuffled])
            at = int(ends[np.searchsorted(ends, rows.count - keep)])
        self._held = [gather(rows, order[at:])] if at < rows.count else []
        self._rows = rows.count - at
        return [gather(rows, order[:at])]


class BatchCutter:
    """Cuts rows into batches: of exactly the given size, or of whole units with at least that size.

    `shown` turns rows into the form that batches have; it is called once per push. `whole` gives
    the units, None for batches of exact size.
    """

    def __init__(self, shown: Shown, whole: Bounds | None = None) -> None:
        self._shown = shown
        self._whole = whole
        self._queue: deque[tuple[SampleBatch, SampleBatch, IntArray | None]] = deque()
        self._at = 0  # rows of the first entry in the queue that have left
        self.rows = 0

    def push(self, rows: SampleBatch) -> None:
        if rows.count:
            ends = None
            if self._whole is not None:
                ends = np.append(self._whole(rows)[1:], rows.count)
            self._queue.append((rows, self._shown(rows), ends))
            self.rows += rows.count

    def take(self, size: int) -> SampleBatch:
        """Remove and return the next `size` rows (fewer if there are fewer), or whole units."""
        pieces, need = [], size
        while need > 0 and self._queue:
            _, rows, ends = self._queue[0]
            stop = min(self._at + need, rows.count)
            if ends is not None:
                stop = int(ends[np.searchsorted(ends, stop)])
            pieces.append(rows.slice(self._at, stop))
            need -= stop - self._at
            self._at = stop
            if stop == rows.count:
                self._queue.popleft()
                self._at = 0
        self.rows -= sum(piece.count for piece in pieces)
        return pieces[0] if len(pieces) == 1 else join_rows(pieces)

    def pending(self) -> list[SampleBatch]:
        queued = [rows for rows, _, _ in self._queue]
        return [queued[0].slice(self._at, None), *queued[1:]] if queued else []
