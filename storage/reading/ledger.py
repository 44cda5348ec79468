"""The ordinals that a reader has taken, by stream, and the encoding of pending rows.

The size of a ledger grows with the number of streams and of gaps, not with that of shards.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from storage.experience.interfaces import ReaderState
from storage.experience.range_set import RangeSet

IntArray: TypeAlias = npt.NDArray[np.int64]
Ranges: TypeAlias = RangeSet | Sequence[tuple[int, int]] | Sequence[Sequence[int]]


class Ledger:
    """Range sets of ordinals by stream. Thread-safe."""

    def __init__(self, streams: Mapping[str, Ranges] | None = None) -> None:
        self._lock = threading.Lock()
        self._streams: dict[str, RangeSet] = {}
        for stream, ranges in (streams or {}).items():
            pairs = ranges.ranges() if isinstance(ranges, RangeSet) else ranges
            self._streams[stream] = RangeSet((int(pair[0]), int(pair[1])) for pair in pairs)

    def contains(self, stream: str, ordinals: IntArray) -> npt.NDArray[np.bool_]:
        """Whether each of the ordinals (N,) is in the ledger: bool (N,)."""
        with self._lock:
            known = self._streams.get(stream)
            if not known or not len(ordinals):
                return np.zeros(len(ordinals), np.bool_)
            near = known.touching(int(ordinals.min()), int(ordinals.max()))
        bounds = np.array(near, np.int64).reshape(-1, 2)
        at = np.searchsorted(bounds[:, 0], ordinals, side="right") - 1
        inside: npt.NDArray[np.bool_] = at >= 0
        inside[inside] = ordinals[inside] <= bounds[at[inside], 1]
        return inside

    def missing(self, stream: str, first: int, last: int) -> RangeSet:
        """The ordinals of first..last (inclusive) that are not in the ledger."""
        with self._lock:
            return self._streams.get(stream, RangeSet()).missing(first, last)

    def add(self, stream: str, ordinals: IntArray) -> None:
        """Add the ordinals (N,), in any order."""
        if not len(ordinals):
            return
        different = np.unique(ordinals)
        cuts = np.flatnonzero(np.diff(different) != 1) + 1
        runs = zip(
            different[np.concatenate(([0], cuts))].tolist(),
            different[np.concatenate((cuts - 1, [-1]))].tolist(),
            strict=True,
        )
        with self._lock:
            self._streams.setdefault(stream, RangeSet()).update(runs)

    def without(self, other: Ledger) -> Ledger:
        """A new ledger with the ordinals that are here and not in `other`."""
        result = Ledger()
        for stream, ranges in self._streams.items():
            left = ranges.difference(other._streams.get(stream, RangeSet()))
            if left:
                result._streams[stream] = left
        return result

    def union(self, other: Ledger) -> Ledger:
        """A new ledger with the ordinals that are here or in `other`."""
        result = Ledger(self._streams)
        for stream, ranges in other._streams.items():
            result._streams.setdefault(stream, RangeSet()).update(ranges)
        return result

    def streams(self) -> dict[str, RangeSet]:
        """A copy of the range sets, by stream."""
        with self._lock:
            return {stream: ranges.copy() for stream, ranges in self._streams.items()}

    def __len__(self) -> int:
        """The number of ordinals."""
        return sum(len(ranges) for ranges in self._streams.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self._streams == other._streams

    __hash__ = None  # type: ignore[assignment]  # mutable

    def to_json(self) -> dict[str, list[list[int]]]:
        return {stream: ranges.to_json() for stream, ranges in sorted(self.streams().items())}

    @classmethod
    def from_json(cls, document: Any) -> Ledger:
        """Parse the result of `to_json`. Raises ReaderState for anything else."""
        if not isinstance(document, dict):
            raise ReaderState(f"ledger: expected ranges by stream, got {document!r:.80}")
        try:
            return cls({str(name): RangeSet.from_json(r) for name, r in document.items()})
        except ValueError as error:
            raise ReaderState(f"ledger: {error}") from error


# --- rows as runs ----------------------------------------------------------------------------


def encode_runs(streams: IntArray, ordinals: IntArray, rows: IntArray) -> list[list[int]]:
    """Encode rows, in their order, as runs `[stream index, ordinal, first row in the part, count]`.

    The arguments are int64 (N,): each row's stream index, ordinal, and row within its part.
    """
    if not len(ordinals):
        return []
    breaks = (
        (streams[1:] != streams[:-1])
        | (ordinals[1:] != ordinals[:-1])
        | (rows[1:] != rows[:-1] + 1)
    )
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    counts = np.diff(np.concatenate((starts, [len(ordinals)])))
    runs = np.stack((streams[starts], ordinals[starts], rows[starts], counts), axis=1)
    listed: list[list[int]] = runs.astype(np.int64).tolist()
    return listed


def decode_runs(document: Any, streams: int) -> IntArray:
    """Parse the runs of a saved position: int64 (R, 4). Raises ReaderState for anything else."""
    try:
        runs = np.array(document, np.int64).reshape(-1, 4)
    except (ValueError, TypeError, OverflowError) as error:
        raise ReaderState(f"runs: expected lists of four integers: {error}") from error
    bad = (runs < 0).any(axis=1) | (runs[:, 0] >= streams) | (runs[:, 3] < 1)
    if bad.any():
        raise ReaderState(f"runs[{int(bad.argmax())}]: expected a run of rows of a known stream")
    return runs


def positions(starts: IntArray, counts: IntArray) -> IntArray:
    """Concatenate the ranges starts[i] .. starts[i] + counts[i] - 1: int64 (sum of counts,)."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    shift: IntArray = np.repeat(starts - (ends - counts), counts)
    return shift + np.arange(total, dtype=np.int64)
