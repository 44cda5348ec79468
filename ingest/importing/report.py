"""The result of an import, row by row."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage.wording import counted

Array = NDArray[Any]


class BadRow(NamedTuple):
    """A row that was left out: its file, its number from 1, and the reason.

    It has the key of its episode if that has more rows, which are all left out.
    """

    source: str
    row: int
    reason: str
    episode: str | None = None


@dataclass
class Seen:
    """The count, sum and range of some numbers."""

    count: int = 0
    total: float = 0.0
    low: float | None = None
    high: float | None = None

    def add(self, values: Array) -> None:
        if len(values):
            low, high = float(values.min()), float(values.max())
            self.count += len(values)
            self.total += float(values.sum(dtype=np.float64))
            self.low = low if self.low is None else min(self.low, low)
            self.high = high if self.high is None else max(self.high, high)

    def to_dict(self) -> dict[str, Any]:
        found = {"low": self.low, "mean": self.total / max(1, self.count), "high": self.high}
        return {"count": self.count, **{name: _finite(value) for name, value in found.items()}}


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


@dataclass
class ImportReport:
    """The result for each row.

    rows == steps + rows_known + rows_left_out + rows_dropped + rows_repeated.

    `steps` steps of `episodes` episodes were acknowledged to this run; the collector already had
    `skipped_known` episodes. `rows_dropped` lacked a cell, under `missing="drop"`; `rows_repeated`
    had the key of an earlier row, under `dedupe`. `notes` say what may not be as intended. `bad`
    holds examples of faulty rows, `bad_counts` counts all by reason. `understood` describes the
    rows as they were read: spaces, lengths of episodes, rewards and returns, propensities, times in
    microseconds. With `checked` nothing was sent, and `steps` and `episodes` count what an import
    would send. `address` is the collector's, empty if none answered; `policies` are those that the
    rows may have, and `streams` the names under which `ls` lists their shards. Their
    `reward_windows`, in seconds by policy, say how long episodes await late rewards; only then can
    they be trained on. `read_as_other` counts, by column, the rows whose cell is none of the
    policy's names and was read as its name for all others. Without a collector `name` assumes the
    policy and the spaces that `--declare` would declare.
    """

    name: str = ""
    address: str = ""
    policies: list[str] = field(default_factory=list)
    streams: dict[str, str] = field(default_factory=dict)
    reward_windows: dict[str, float] = field(default_factory=dict)
    checked: bool = False
    rows: int = 0
    episodes: int = 0
    steps: int = 0
    skipped_known: int = 0
    rows_known: int = 0
    rows_left_out: int = 0
    rows_dropped: int = 0
    rows_repeated: int = 0
    notes: list[str] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    bad_counts: dict[str, int] = field(default_factory=dict)
    read_as_other: dict[str, int] = field(default_factory=dict)
    understood: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def __repr__(self) -> str:
        done = "would send" if self.checked else "sent"
        faults = f"; faults {self.bad_counts}" if self.bad_counts else ""
        return (
            f"ImportReport({self.name!r}: {counted(self.rows, 'row')}, {done} "
            f"{counted(self.steps, 'step')} of "
            f"{counted(self.episodes, 'episode')}; {counted(self.rows_known, 'row')} known, "
            f"{self.rows_left_out} left out, {self.rows_dropped} dropped{faults})"
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as a JSON object, as `headrace import --json` prints it."""
        return {**asdict(self), "bad": [row._asdict() for row in self.bad]}


def _kind(reason: str) -> str:
    """A reason without the row's own value."""
    return reason.partition(", got")[0]


class Account:
    """A report in progress."""

    def __init__(self, bad_shown: int) -> None:
        self.report = ImportReport()
        self._bad_shown = bad_shown
        self._counts, self._described = Counter[str](), Counter[str]()
        self.true = Counter[str]()  # column of flags -> rows where it is true
        self.same_time = 0  # rows with the time of another row of their episode
        self._seen = {
            name: Seen() for name in ("steps", "rewards", "returns", "propensities", "times")
        }

    def room(self, reason: str) -> int:
        """The number of rows with this reason that can still be described.

        A reason takes a third of the places at most, so that one fault does not hide the others.
        """
        left = max(1, self._bad_shown // 3) - self._described[_kind(reason)]
        return max(0, min(left, self._bad_shown - len(self.report.bad)))

    def name(self, bad: BadRow) -> None:
        """Describe a faulty row, if there is room; `count` counts it."""
        if self.room(bad.reason):
            self.report.bad.append(bad)
            self._described[_kind(bad.reason)] += 1

    def count(self, reason: str, rows: int) -> None:
        self._counts[_kind(reason)] += rows

    def count_other(self, rows: Mapping[str, int]) -> None:
        """Count rows of episodes that were read as a space's name for all others, by column."""
        for column, count in rows.items():
            if count:
                before = self.report.read_as_other.get(column, 0)
                self.report.read_as_other[column] = before + count

    def see(self, columns: Mapping[str, Array]) -> None:
        """Add the values of episodes to the statistics: name -> numbers."""
        for name, values in columns.items():
            self._seen[name].add(values)

    def note(self, text: str) -> None:
        if text not in self.report.notes:
            self.report.notes.append(text)

    def _judge(self) -> None:
        """Note what is likely not as it was meant."""
        for column, rows in self.true.items():
            if not rows:
                self.note(f"column {column} is true in no row")
        if self.same_time:
            self.note(
                f"{counted(self.same_time, 'row has', 'rows have')} the time of another row of "
                "the same episode: if they are repetitions, dedupe keeps the first of them"
            )
        refused = [reason for reason in self._counts if reason.startswith("action_prob")]
        if refused:
            self.note(
                "rows were left out for their propensity: what is left is selected by its "
                "likelihood, and no estimate from it is sound"
            )

    def finish(self) -> ImportReport:
        report = self.report
        self._judge()
        report.bad.sort(key=lambda bad: (bad.source, bad.row))
        report.bad_counts = dict(self._counts.most_common())
        report.understood |= {name: seen.to_dict() for name, seen in self._seen.items()}
        return report


def segment_sums(values: Array, begins: Array) -> Array:
    """The sums of values between begins, which ascend from 0."""
    return np.add.reduceat(values, begins) if len(begins) else values[:0]
