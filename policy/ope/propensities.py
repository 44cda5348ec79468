"""Whether logged propensities are those of the logged actions, whatever policy is judged.

    found = Propensities()
    found.add(logp, ActionCells(actions[:, None], np.zeros(4), str))
    found.check().passed

With the propensity p of the action A, [A = a] / p has a mean of at most 1, and of 1 if the logging
policy can always take a. An estimate from propensities that are too low counts some rewards several
times. S is the number of steps, C of cells (actions, or values of one position). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policy.ope.diagnostics import Diagnostic

__all__ = ["ActionCells", "Propensities"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

ERROR = 1 / 2500
"""Of all cells together, in a log whose propensities are right."""
LEAST_EVENTS = 200
"""Cells with fewer expected events are pooled."""
MISSING = 5.0
"""Standard errors below 1 from which a mean is noted. Fewer possible actions are no fault."""
MOST_VALUES = 20  # of a tag; one with more values is no group of many episodes
MOST_CELLS = 1 << 12  # with more cells only the whole log is tested
LARGEST = 300.0  # log of a number: its square is finite
PIECES = 20  # between 10 and 20 parts of the log of equal size
FIRST_PIECE = 256  # rows
STAKES = 0.5 ** np.arange(1.0, 15.0)
"""The bets against mean 1, each with an equal part of the wealth."""


@dataclass(frozen=True, eq=False)
class ActionCells:
    """The cells of S actions: what [A = a] is computed for."""

    numbers: IntArray  # (S, K) the cells that each action is in, -1: none
    log_size: FloatArray  # (C,) the log of the number of actions in a cell; of its volume
    name: Callable[[int], str]  # of a cell


class _WealthTable:
    """The log wealth of each stake against mean 1, in several groups of C cells."""

    def __init__(self, groups: int) -> None:
        self.rows = np.zeros(groups, np.int64)
        self.events = np.zeros((groups, 0), np.int64)
        self._won = np.zeros((groups, 0, STAKES.size))
        self.sums = np.zeros((2, groups, 0))  # of x and of its square

    def grow(self, groups: int, cells: int) -> None:
        """Add groups or cells."""
        more = max(0, groups - self.rows.size), max(0, cells - self.events.shape[1])
        if any(more):
            self.rows = np.pad(self.rows, (0, more[0]))
            self.events = np.pad(self.events, ((0, more[0]), (0, more[1])))
            self._won = np.pad(self._won, ((0, more[0]), (0, more[1]), (0, 0)))
            self.sums = np.pad(self.sums, ((0, 0), (0, more[0]), (0, more[1])))

    def add(self, of_rows: IntArray, of_events: IntArray, cell: IntArray, x: FloatArray) -> None:
        """Add rows, given their groups, and the numbers x > 0 with their groups and cells."""
        groups, cells = self.events.shape
        self.rows += np.bincount(of_rows, minlength=groups)
        key = of_events * cells + cell

        def by_cell(numbers: FloatArray) -> FloatArray:
            sums = np.asarray(np.bincount(key, numbers, groups * cells), np.float64)
            return sums.reshape(groups, cells)

        self.events += np.bincount(key, minlength=self.events.size).reshape(self.events.shape)
        self.sums[0] += by_cell(x)
        self.sums[1] += by_cell(x**2)
        for number, stake in enumerate(STAKES):
            self._won[..., number] += by_cell(np.log1p(stake * (x - 1)) - np.log1p(-stake))

    def merged(self) -> None:
        """Merge neighbouring groups, and leave the second half empty."""
        for array, axis in ((self.rows, 0), (self.events, 0), (self._won, 0), (self.sums, 1)):
            moved = np.moveaxis(array, axis, 0)
            pairs = moved[0::2] + moved[1::2]
            moved[: len(pairs)], moved[len(pairs) :] = pairs, 0

    def whole(self) -> _WealthTable:
        """All groups as one."""
        found = _WealthTable(1)
        found.rows = self.rows.sum(keepdims=True)
        found.events = self.events.sum(axis=0, keepdims=True)
        found._won = self._won.sum(axis=0, keepdims=True)
        found.sums = self.sums.sum(axis=1, keepdims=True)
        return found

    def wealth(self) -> FloatArray:
        """(groups, C) the log of the mean wealth over all stakes."""
        total = self._won + self.rows[:, None, None] * np.log1p(-STAKES)
        highest = total.max(axis=-1, keepdims=True)
        found: FloatArray = highest[..., 0] + np.log(np.exp(total - highest).mean(axis=-1))
        return found


class _Groups:
    """The values of one tag, numbered."""

    def __init__(self) -> None:
        self.codes: dict[str, int] = {}
        self.table = _WealthTable(0)

    @property
    def too_many(self) -> bool:
        return len(self.codes) > MOST_VALUES

    def numbers(self, values: Sequence[str | None]) -> IntArray:
        """(n,) the number of each value, -1 without one."""
        codes = self.codes
        found = [-1 if one is None else codes.setdefault(one, len(codes)) for one in values]
        return np.array(found, np.int64)


class Propensities:
    """The test of a log's propensities: by action, by part of the log, and by tag."""

    def __init__(self) -> None:
        self._size, self._rows = FIRST_PIECE, 0
        self._pieces = _WealthTable(PIECES)
        self._tags: dict[str, _Groups] = {}
        self._few: list[tuple[IntArray, IntArray, FloatArray]] = []  # row, cell, x: to be pooled
        self._units: list[tuple[IntArray, IntArray, FloatArray]] = []  # unit, cells, x
        self._unit_tags: dict[str, IntArray] = {}
        self._name: Callable[[int], str] = str
        self._cells = 0

    def add(
        self,
        logp: FloatArray,
        cells: ActionCells,
        units: IntArray | None = None,
        tags: Mapping[str, Sequence[str | None]] | None = None,
    ) -> None:
        """Add S steps with their log propensities (S,).

        `units` (S,) int: steps of one unit are tested as one, by their mean. `tags`: name -> values
        (S,).
        """
        if not logp.size:
            return
        self._name, self._cells = cells.name, max(self._cells, cells.log_size.size)
        inside = cells.numbers >= 0
        size = cells.log_size[np.where(inside, cells.numbers, 0)]
        x = np.where(inside, np.exp(np.minimum(-logp[:, None] - size, LARGEST)), 0.0)
        groups = {name: self._numbers(name, values) for name, values in (tags or {}).items()}
        if units is None:
            self._note(cells.numbers, x, groups)
        else:
            self._units.append((units, cells.numbers, x))
            first, where = np.unique(units, return_index=True)
            for name, numbers in groups.items():
                known = self._unit_tags.get(name, np.empty(0, np.int64))
                self._unit_tags[name] = known = _padded(known, int(first[-1]) + 1)
                new = known[first] < 0
                known[first[new]] = numbers[where[new]]

    def check(self) -> Diagnostic:
        """Whether no mean is above 1, by betting.

        The product of 1 + s (x - 1) over the steps is a non-negative martingale if the mean of x is
        at most 1 at each, and exceeds 1 / error with a probability of at most `error` (Ville 1939).
        So does its mean over fixed stakes s. The error is divided by the number of cells: a half
        for the whole log, a quarter each for its parts and for tags (Bonferroni). No variance is
        estimated, so a low propensity in few steps is no exception.
        """
        self._note_units()
        whole = self._pieces.whole()
        found = [self._worst(whole, ERROR / 2, [""], also=self._pooled(whole))]
        if self._cells <= MOST_CELLS:
            used = int((self._pieces.rows > 0).sum())
            parts = [f" in part {part + 1} of {used} of the log" for part in range(PIECES)]
            found.append(self._worst(self._pieces, ERROR / 4, parts, share=whole))
            tags = {name: one for name, one in self._tags.items() if not one.too_many}
            for name, one in tags.items():
                values = [f" with {name}={value}" for value in one.codes]
                one.table.grow(len(values), self._cells)  # it may lack cells of later blocks
                found.append(self._worst(one.table, ERROR / 4 / len(tags), values, share=whole))
        surplus, mean, what = max(found)
        passed = surplus <= 0
        sentence = self._means(whole)
        if not passed:
            sentence = (
                f"the mean of [A = a] / propensity is {mean:.3g} for {what}, where at most 1 was "
                "expected: logged propensities are too low, or of other actions; check how they "
                "are computed. If an action is drawn once for all steps of a user, name the user's "
                "tag (--cluster)"
            )
        return Diagnostic(
            name="propensities",
            value=mean,
            threshold=1.0,
            passed=passed,
            sentence=sentence,
            source="bets against mean 1 in all cells, together at 1 in 2,500 (Ville 1939)",
        )

    # adding

    def _numbers(self, name: str, values: Sequence[str | None]) -> IntArray:
        groups = self._tags.setdefault(name, _Groups())
        if groups.too_many:
            return np.full(len(values), -1)
        return groups.numbers(values)

    def _note(self, numbers: IntArray, x: FloatArray, groups: Mapping[str, IntArray]) -> None:
        """Add S rows with their cells and numbers (S, K)."""
        rows = np.arange(self._rows, self._rows + len(numbers))
        self._rows += len(numbers)
        while self._rows > PIECES * self._size:
            self._pieces.merged()
            self._size *= 2
        row, column = np.nonzero(x)
        cell, x = numbers[row, column], x[row, column]
        pieces = rows // self._size
        self._pieces.grow(PIECES, self._cells)
        few = self._pieces.events.sum(axis=0)[cell] < LEAST_EVENTS
        self._few.append((rows[row[few]], cell[few], x[few]))
        self._pieces.add(pieces, pieces[row], cell, x)
        if self._cells > MOST_CELLS:
            return
        for name, of_row in groups.items():
            tag = self._tags[name]
            if not tag.too_many:
                tag.table.grow(len(tag.codes), self._cells)
                known = of_row[row] >= 0
                tag.table.add(of_row[of_row >= 0], of_row[row][known], cell[known], x[known])

    def _note_units(self) -> None:
        """Add one row for each unit: the means of its numbers."""
        if not self._units:
            return
        units = np.concatenate([one for one, _, _ in self._units])
        cells = np.concatenate([one for _, one, _ in self._units])
        x = np.concatenate([one for _, _, one in self._units]) / np.bincount(units)[units][:, None]
        self._units = []
        known, rows = np.unique(units, return_inverse=True)
        inside = cells >= 0
        key = (rows[:, None] * self._cells + cells)[inside]
        keys, where = np.unique(key, return_inverse=True)
        means = np.bincount(where, x[inside])
        # one row for each pair of a unit and a cell would count units several times
        width = int(np.bincount(keys // self._cells).max(initial=1))
        row = keys // self._cells
        column = np.arange(keys.size) - np.searchsorted(row, row)
        wide = np.full((known.size, width), -1), np.zeros((known.size, width))
        wide[0][row, column], wide[1][row, column] = keys % self._cells, means
        groups = {
            name: _padded(one, int(known[-1]) + 1)[known] for name, one in self._unit_tags.items()
        }
        self._note(*wide, groups)

    # testing

    def _worst(
        self,
        table: _WealthTable,
        error: float,
        places: Sequence[str],
        *,
        share: _WealthTable | None = None,
        also: tuple[float, float, str] | None = None,
    ) -> tuple[float, float, str]:
        """(the log wealth above its threshold, the mean, the cell) of the cell with most wealth."""
        wealth = table.wealth()
        threshold = math.log((wealth.size + (also is not None)) / error) if wealth.size else 0.0
        of = table if share is None else share
        expected = table.rows[:, None] * (of.events / np.maximum(1, of.rows[:, None]))
        wealth = np.where(expected > LEAST_EVENTS - 0.5, wealth, -math.inf)
        found = [(-math.inf, 1.0, "")]
        if wealth.size:
            group, cell = np.unravel_index(int(wealth.argmax()), wealth.shape)
            mean = float(table.sums[0, group, cell] / max(1, table.rows[group]))
            what = f"{self._name(int(cell))}{places[int(group)]}"
            found.append((float(wealth[group, cell]) - threshold, mean, what))
        if also is not None:
            found.append((also[0] - threshold, also[1], also[2]))
        return max(found)

    def _pooled(self, whole: _WealthTable) -> tuple[float, float, str]:
        """(log wealth, mean, name) of all cells with few events as one."""
        pool = whole.events[0] < LEAST_EVENTS
        size, few = int(pool.sum()), self._few
        if not size or not few:
            return -math.inf, 1.0, ""
        rows, cells, x = (np.concatenate([one[part] for one in few]) for part in range(3))
        chosen = pool[cells]
        found, where = np.unique(rows[chosen], return_inverse=True)
        x = np.bincount(where, x[chosen]) / size
        table = _WealthTable(1)
        table.grow(1, 1)
        none = np.zeros(found.size, np.int64)
        table.add(none, none, none, x)
        table.rows = whole.rows
        mean = float(x.sum() / max(1, int(whole.rows[0])))
        return float(table.wealth()[0, 0]), mean, f"{size} actions with few events together"

    def _means(self, whole: _WealthTable) -> str:
        """The range of the means, and an action that could not always be taken, as text."""
        rows = max(1, int(whole.rows[0]))
        means, squares = whole.sums[:, 0] / rows
        tested = whole.events[0] >= LEAST_EVENTS
        if not tested.any():
            return "too few steps to test propensities by action"
        low, high = float(means[tested].min()), float(means[tested].max())
        sentence = (
            f"the mean of [A = a] / propensity is {low:.3g} to {high:.3g}, which agrees with 1"
        )
        spread = np.sqrt(np.maximum(squares - means**2, 0) / rows)
        missing = np.where(tested, (1 - means) / np.maximum(spread, 1e-12), 0.0)
        if missing.max() > MISSING:
            cell = int(missing.argmax())
            sentence = (
                f"the mean of [A = a] / propensity is {means[cell]:.3g} for {self._name(cell)}: in "
                f"{1 - means[cell]:.0%} of steps it could not be taken, or its propensities are "
                "too high"
            )
        return sentence


def _padded(numbers: IntArray, size: int) -> IntArray:
    """At least `size` numbers; the further ones are -1."""
    return np.pad(numbers, (0, max(0, size - numbers.size)), constant_values=-1)
