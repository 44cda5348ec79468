"""Whether what a log shows still holds at its end: the last fifth beside the whole.

    drift = Drift(1, MemoryColumn)
    drift.add([differences], times, units)
    drift.checks(0, str, better=True)

A mean over a log describes its period. An action whose rewards fell is still better over the whole
log, and worse from now on. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from policy.ope.columns import MemoryColumn, NumberColumn
from policy.ope.comparison import skewed_t_interval
from policy.ope.diagnostics import Diagnostic, at_most

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

LAST = 0.2
"""The share of the log that is compared with the whole."""
ERROR = 0.025  # of each end of an interval of 95 %
FEWEST = 100  # episodes or units in the last fifth
TREND = 3.5  # standard errors
MOST_TIMES = 1 << 20  # numbers from which the start of the last fifth is computed
MOVED = 0.5
"""The shift of a feature's mean, in standard deviations, that is noted."""
PIECES = 20
FIRST_PIECE = 64  # rows


class Drift:
    """The differences of each episode with their times, for several bars."""

    def __init__(self, bars: int, column: Callable[[], NumberColumn] = MemoryColumn) -> None:
        self._numbers = [column() for _ in range(bars)]
        self._times, self._units = column(), column()
        self._by_unit = False

    def add(
        self, numbers: Sequence[FloatArray], times: FloatArray | None, units: IntArray | None
    ) -> None:
        """Add n episodes: the differences (n,) to each bar, the times and the units (n,).

        Without times the order counts.
        """
        begin, n = self._times.size, numbers[0].size
        self._by_unit |= units is not None
        order = np.arange(begin, begin + n, dtype=np.float64)
        self._times.append(order if times is None else times)
        self._units.append(order if units is None else units.astype(np.float64))
        for column, new in zip(self._numbers, numbers, strict=True):
            column.append(new)

    def checks(
        self,
        bar: int,
        name: Callable[[str], str],
        *,
        better: bool,
        margin: float = 0.0,
        by: float = 1.0,
    ) -> list[Diagnostic]:
        """(whether the last fifth agrees with the verdict, whether it differs from the rest).

        `better`: the verdict over the whole log, which a last fifth below the `margin` refuses.
        `by`: what the mean number is for a difference of 1.
        """
        last, rest = (numbers / by for numbers in self._parted(self._numbers[bar]))
        if min(last.size, rest.size) < FEWEST:
            return []
        low, high = skewed_t_interval(last, ERROR)
        before, now = float(rest.mean()), float(last.mean())
        sentence = f"in the last fifth of the log the difference is {now:+.4g}"
        sentence += f", within {low:.4g} .. {high:.4g}"
        if failed := better and high < margin:
            sentence += (
                f", and before that {before:+.4g}: the candidate was better and is not any more; "
                "judge by later episodes (--since), or use a canary"
            )
        check = Diagnostic(
            name=name("last_fifth"),
            value=now,
            threshold=margin if better else None,
            passed=not failed,
            sentence=sentence,
            source="an interval of 95 % below what the whole log's verdict requires",
        )
        spread = math.sqrt(last.var() / last.size + rest.var() / rest.size)
        if abs(now - before) <= TREND * spread:
            return [check]
        trend = f"the difference went from {before:+.4g} to {now:+.4g} in the last fifth of the log"
        return [check, at_most(name("trend"), now - before, None, trend)]

    def _parted(self, numbers: NumberColumn) -> tuple[FloatArray, FloatArray]:
        """(the numbers, or the units' means, in the last fifth, those before it)."""
        cut = self._begin()
        parts: tuple[list[FloatArray], list[FloatArray]] = ([], [])
        units: tuple[list[FloatArray], list[FloatArray]] = ([], [])
        columns = (numbers.blocks(), self._times.blocks(), self._units.blocks())
        for values, times, of_unit in zip(*columns, strict=True):
            late = times >= cut
            for side, chosen in enumerate((late, ~late)):
                parts[side].append(values[chosen])
                units[side].append(of_unit[chosen])
        found = [np.concatenate([np.empty(0), *one]) for one in parts]
        if self._by_unit:
            found = [
                _means(one, np.concatenate([np.empty(0), *of_unit]))
                for one, of_unit in zip(found, units, strict=True)
            ]
        return found[0], found[1]

    def _begin(self) -> float:
        """The time at which the last fifth begins."""
        every = max(1, self._times.size // MOST_TIMES)
        sample = [np.empty(0), *(block[::every] for block in self._times.blocks())]
        return float(np.quantile(np.concatenate(sample), 1 - LAST)) if self._times.size else 0.0


def _means(numbers: FloatArray, units: FloatArray) -> FloatArray:
    """The mean of each unit that has numbers."""
    _, where, counts = np.unique(units, return_inverse=True, return_counts=True)
    sums = np.asarray(np.bincount(where, numbers, counts.size), np.float64)
    means: FloatArray = sums / counts
    return means


class ContextDrift:
    """The means of D features in parts of a log of equal size, in its order, and after it."""

    def __init__(self) -> None:
        self._size, self._seen = FIRST_PIECE, 0
        self._rows = np.zeros(PIECES)
        self._sums = np.zeros((PIECES, 0))
        self._squares = np.zeros(0)
        self._later_rows, self._later = 0, np.zeros(1)

    def add_later(self, flat: npt.NDArray[np.floating]) -> None:
        """Add S rows (S, D) of after the log, by which nothing is judged."""
        self._later_rows += len(flat)
        self._later = self._later + np.asarray(flat, np.float64).sum(axis=0)

    def add(self, flat: npt.NDArray[np.floating]) -> None:
        """Add S rows (S, D)."""
        rows = np.arange(self._seen, self._seen + len(flat))
        self._seen += len(flat)
        if not self._sums.shape[1]:
            self._sums, self._squares = np.zeros((PIECES, flat.shape[1])), np.zeros(flat.shape[1])
        while self._seen > PIECES * self._size:
            for array in (self._rows, self._sums):
                half = array[0::2] + array[1::2]
                array[: PIECES // 2], array[PIECES // 2 :] = half, 0
            self._size *= 2
        numbers = np.asarray(flat, np.float64)
        for piece in np.unique(rows // self._size):
            own = numbers[rows // self._size == piece]
            self._rows[piece] += len(own)
            self._sums[piece] += own.sum(axis=0)
        self._squares += (numbers**2).sum(axis=0)

    def check(self) -> list[Diagnostic]:
        """A note for each that is far from the means before it: the last parts, up to a fifth, and
        what came after the log."""
        late = np.flatnonzero(np.cumsum(self._rows[::-1])[::-1] <= LAST * self._seen)
        whole, last = self._sums.sum(axis=0), self._sums[late].sum(axis=0)
        squares = self._squares / max(1, self._seen)
        spread = np.sqrt(np.maximum(squares - (whole / max(1, self._seen)) ** 2, 0))
        spread[spread == 0] = math.inf
        rows = int(self._rows[late].sum())
        notes = []
        for now, count, before, others, when in (
            (last, rows, whole - last, self._seen - rows, "at the end of"),
            (self._later, self._later_rows, whole, self._seen, "after"),
        ):
            if min(count, others) < FEWEST or not whole.size:
                continue
            moved = np.abs(now / count - before / others) / spread
            feature = int(moved.argmax())
            sentence = (
                f"feature {feature} of the observations moved by {moved[feature]:.2g} standard "
                f"deviations {when} the judged log: the candidate is judged on other "
                "observations than those to come"
            )
            if moved[feature] > MOVED:
                notes.append(at_most("context_drift", float(moved[feature]), None, sentence))
        return notes
