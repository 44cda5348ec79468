"""The rows that a trainer did not train on, of parts with other rows that it did train on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from storage.experience.range_set import RangeSet
from storage.experience.sample_batch import ORDINAL, STREAM, SampleBatch
from storage.reading.ledger import Ledger, encode_runs
from storage.reading.loading import ROW

RunsByStream: TypeAlias = dict[str, list[list[int]]]
"""stream -> [ordinal, first row of the part, count], as in storage.weights.lineage."""


NOTHING_HELD: Mapping[str, Any] = {"streams": [], "joiner": [], "window": [], "cutter": []}
"""The stages of the position of a reader that holds no rows."""


class UntrainedRows:
    """Rows that were read and excluded, of parts that may have other rows that were not.

    Rows that a reader still holds are in its position. `known` are runs of untrained rows.
    """

    def __init__(self, known: Mapping[str, Sequence[Sequence[int]]] | None = None) -> None:
        self._rows: dict[tuple[str, int], RangeSet] = {}
        self._owed: dict[tuple[str, int], RangeSet] = {}
        for stream, runs in (known or {}).items():
            for ordinal, row, count in runs:
                self._add(stream, ordinal, row, count)

    @classmethod
    def behind(
        cls, known: RunsByStream, lineage: Mapping[str, Any], position: Mapping[str, Any]
    ) -> UntrainedRows:
        """The untrained rows for a reader that is further ahead than some weights.

        `lineage` and `known` are what the weights were trained on, and not. Rows that the reader
        still holds will come, so they do not count as untrained; rows that it has delivered do.
        """
        found, trained = cls(known), Ledger(lineage)
        for key, rows in _pending(position).items():
            if not _holds(trained, *key):  # its first rows were trained into other weights
                found._rows[key] = RangeSet([(0, rows.ranges()[-1][1])])
            found._rows[key] = found._rows.get(key, RangeSet()).difference(rows)
        return found

    def _add(self, stream: str, ordinal: int, row: int, count: int) -> None:
        self._rows.setdefault((stream, ordinal), RangeSet()).update([(row, row + count - 1)])

    def owe(self, position: Mapping[str, Any]) -> None:
        """Expect the rows that a restored reader held; those that do not come are in no shard."""
        self._owed = _pending(position)

    def read(self, rows: SampleBatch, used: npt.NDArray[np.bool_]) -> None:
        """Record rows that were read. `used`: bool (rows,), whether each is trained on."""
        if self._owed:
            for key, number in _identities(rows):
                if key in self._owed:
                    self._owed[key] = self._owed[key].difference(RangeSet([(number, number)]))
        if used.all():
            return
        for stream, ordinal, row, count in _runs_of(rows.take(~used)):
            self._add(stream, ordinal, row, count)

    def train(self, rows: SampleBatch) -> int:
        """Record that excluded rows are trained on after all. Returns how many were excluded."""
        new = 0
        for stream, ordinal, row, count in _runs_of(rows):
            if (known := self._rows.get((stream, ordinal))) is not None:
                before = len(known)
                known.discard_range(row, row + count - 1)
                new += before - len(known)
                if not known:
                    del self._rows[stream, ordinal]
        return new

    def settle(self, lineage: Mapping[str, Any], position: Mapping[str, Any]) -> RunsByStream:
        """The rows of the lineage's ordinals that were not trained on, at a reader's position.

        Forgets parts without a row that was trained on or is still to come.
        """
        trained, coming = Ledger(lineage), _pending(position)
        for (stream, ordinal), rows in self._owed.items():
            for first, last in rows.difference(coming.get((stream, ordinal), RangeSet())).ranges():
                self._add(stream, ordinal, first, last - first + 1)
        self._owed = {key: rows for key, rows in coming.items() if key in self._owed}
        found = {key: rows.copy() for key, rows in self._rows.items()}
        for key, rows in coming.items():
            found.setdefault(key, RangeSet()).update(rows.ranges())
        inside = {key for key in found if _holds(trained, *key)}
        self._rows = {
            key: rows for key, rows in self._rows.items() if key in inside or key in coming
        }
        return _runs({key: found[key] for key in inside})

    def to_json(self) -> RunsByStream:
        return _runs(self._rows)


def position_without(
    position: Mapping[str, Any], lineage: Mapping[str, Any], untrained: RunsByStream
) -> dict[str, Any]:
    """The position after a lineage, for a reader that has read nothing.

    `position` is that reader's. The rows of the lineage's ordinals that were not trained on come
    first.
    """
    ledger = Ledger(lineage)
    pending = Ledger()
    for stream, runs in untrained.items():
        pending.add(stream, np.array([ordinal for ordinal, _, _ in runs], np.int64))
    streams = sorted(untrained)
    cutter = [[i, *run] for i, stream in enumerate(streams) for run in untrained[stream]]
    behind = ledger.without(pending).to_json()
    return {**position, "ledger": behind, "streams": streams, "cutter": cutter}


def _pending(position: Mapping[str, Any]) -> dict[tuple[str, int], RangeSet]:
    """(stream, ordinal) -> the rows within the part that a position's reader still holds."""
    found: dict[tuple[str, int], RangeSet] = {}
    for stage in ("joiner", "window", "cutter"):
        for index, ordinal, row, count in position[stage]:
            key = position["streams"][index], ordinal
            found.setdefault(key, RangeSet()).add_range(row, row + count - 1)
    return found


def _runs_of(rows: SampleBatch) -> Iterator[tuple[str, int, int, int]]:
    """(stream, ordinal, first row of the part, count) of runs that contain each row once."""
    names, codes = np.unique(rows[STREAM].astype(str), return_inverse=True)
    columns = codes.astype(np.int64), rows[ORDINAL], rows[ROW].astype(np.int64)
    order = np.lexsort(columns[::-1])
    for code, ordinal, row, count in encode_runs(*(column[order] for column in columns)):
        yield str(names[code]), ordinal, row, count


def _identities(rows: SampleBatch) -> list[tuple[tuple[str, int], int]]:
    """((stream, ordinal), row within the part) of each row."""
    keys = zip(rows[STREAM].tolist(), rows[ORDINAL].tolist(), strict=True)
    return list(zip(keys, rows[ROW].tolist(), strict=True))


def _holds(ledger: Ledger, stream: str, ordinal: int) -> bool:
    inside: npt.NDArray[np.bool_] = ledger.contains(stream, np.array([ordinal], np.int64))
    return bool(inside[0])


def _runs(rows: Mapping[tuple[str, int], RangeSet]) -> RunsByStream:
    found: RunsByStream = {}
    for (stream, ordinal), ranges in sorted(rows.items()):
        runs = [[ordinal, first, last - first + 1] for first, last in ranges.ranges()]
        found.setdefault(stream, []).extend(runs)
    return found
