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
        self.weight = np.zeros(groups)  # of the rows
        self._lost = np.zeros((groups, STAKES.size))  # by all rows if no event came
        self.events = np.zeros((groups, 0), np.int64)
        self._won = np.zeros((groups, 0, STAKES.size))
        self.sums = np.zeros((2, groups, 0))  # of x and of its square

    def grow(self, groups: int, cells: int) -> None:
        """Add groups or cells."""
        more = max(0, groups - self.rows.size), max(0, cells - self.events.shape[1])
        if any(more):
            self.rows = np.pad(self.rows, (0, more[0]))
            self.weight = np.pad(self.weight, (0, more[0]))
            self._lost = np.pad(self._lost, ((0, more[0]), (0, 0)))
            self.events = np.pad(self.events, ((0, more[0]), (0, more[1])))
            self._won = np.pad(self._won, ((0, more[0]), (0, more[1]), (0, 0)))
            self.sums = np.pad(self.sums, ((0, 0), (0, more[0]), (0, more[1])))

    def add(
        self,
        of_rows: IntArray,
        of_events: IntArray,
        cell: IntArray,
        x: FloatArray,
        weights: tuple[FloatArray, FloatArray] | None = None,
    ) -> None:
        """Add rows, given their groups, and the numbers x > 0 with their groups and cells.

        `weights`: of the rows and of the numbers, up to 1, by which bets are multiplied.
        """
        groups, cells = self.events.shape
        rows = np.bincount(of_rows, minlength=groups)
        self.rows += rows
        own, k = (None, 1.0) if weights is None else weights
        self.weight += rows if own is None else np.bincount(of_rows, own, groups)
        key = of_events * cells + cell

        def by_cell(numbers: FloatArray) -> FloatArray:
            sums = np.asarray(np.bincount(key, numbers, groups * cells), np.float64)
            return sums.reshape(groups, cells)

        self.events += np.bincount(key, minlength=self.events.size).reshape(self.events.shape)
        self.sums[0] += by_cell(k * x)
        self.sums[1] += by_cell((k * x) ** 2)
        for number, stake in enumerate(STAKES):
            self._won[..., number] += by_cell(np.log1p(stake * k * (x - 1)) - np.log1p(-stake * k))
            lost = np.log1p(-stake)
            self._lost[:, number] += (
                rows * lost if own is None else np.bincount(of_rows, np.log1p(-stake * own), groups)
            )

    def merged(self) -> None:
        """Merge neighbouring groups, and leave the second half empty."""
        arrays = (self.rows, self.weight, self._lost, self.events, self._won)
        for moved in (*arrays, np.moveaxis(self.sums, 1, 0)):
            pairs = moved[0::2] + moved[1::2]
            moved[: len(pairs)], moved[len(pairs) :] = pairs, 0

    def whole(self) -> _WealthTable:
        """All groups as one."""
        found = _WealthTable(1)
        found.rows = self.rows.sum(keepdims=True)
        found.weight = self.weight.sum(keepdims=True)
        found._lost = self._lost.sum(axis=0, keepdims=True)
        found.events = self.events.sum(axis=0, keepdims=True)
        found._won = self._won.sum(axis=0, keepdims=True)
        found.sums = self.sums.sum(axis=1, keepdims=True)
        return found

    def take_rows(self, other: _WealthTable) -> None:
        """Replace the rows by those of another table."""
        self.rows, self.weight, self._lost = other.rows, other.weight, other._lost

    def wealth(self) -> FloatArray:
        """(groups, C) the log of the mean wealth over all stakes."""
        total = self._won + self._lost[:, None]
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
        # row, cell, x and weight, to be pooled; unit, cells, x and by
        self._few: list[tuple[IntArray, IntArray, FloatArray, FloatArray]] = []
        self._units: list[tuple[IntArray, IntArray, FloatArray, FloatArray]] = []
        self._most_by = 1.0
        self._unit_tags: dict[str, IntArray] = {}
        self._name: Callable[[int], str] = str
        self._cells = 0

    def add(
        self,
        logp: FloatArray,
        cells: ActionCells,
        units: IntArray | None = None,
        tags: Mapping[str, Sequence[str | None]] | None = None,
        by: FloatArray | None = None,
    ) -> None:
        """Add S steps with their log propensities (S,).

        `units` (S,) int: steps of one unit are tested as one, by their mean. `tags`: name -> values
        (S,). `by` (S,): 1 / pass_prob of sampled logging, None: 1. Bets are multiplied by it, as a
        share of the largest so far; then steps that were not logged would change no wealth.
        """
        if not logp.size:
            return
        self._name, self._cells = cells.name, max(self._cells, cells.log_size.size)
        inside = cells.numbers >= 0
        size = cells.log_size[np.where(inside, cells.numbers, 0)]
        x = np.where(inside, np.exp(np.minimum(-logp[:, None] - size, LARGEST)), 0.0)
        groups = {name: self._numbers(name, values) for name, values in (tags or {}).items()}
        if by is not None:
            self._most_by = max(self._most_by, float(by.max()))
        by = np.ones(logp.size) if by is None else by
        if units is None:
            self._note(cells.numbers, x, by, groups)
        else:
            self._units.append((units, cells.numbers, x, by))
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

    def _note(
        self, numbers: IntArray, x: FloatArray, by: FloatArray, groups: Mapping[str, IntArray]
    ) -> None:
        """Add S rows with their cells and numbers (S, K), and their `by` (S,)."""
        weight = by / self._most_by
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
        self._few.append((rows[row[few]], cell[few], x[few], weight[row[few]]))
        alike = bool((weight == 1).all())
        self._pieces.add(pieces, pieces[row], cell, x, None if alike else (weight, weight[row]))
        if self._cells > MOST_CELLS:
            return
        for name, of_row in groups.items():
            tag = self._tags[name]
            if not tag.too_many:
                tag.table.grow(len(tag.codes), self._cells)
                inside, known = of_row >= 0, of_row[row] >= 0
                own = None if alike else (weight[inside], weight[row][known])
                tag.table.add(of_row[inside], of_row[row][known], cell[known], x[known], own)

    def _note_units(self) -> None:
        """Add one row for each unit: the means of its numbers."""
        if not self._units:
            return
        units, cells, x, by = (
            np.concatenate([one[part] for one in self._units]) for part in range(4)
        )
        self._units = []
        known, rows, counts = np.unique(units, return_inverse=True, return_counts=True)
        x = x / counts[rows][:, None]
        by = np.bincount(rows, by) / counts
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
        self._note(*wide, by, groups)

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
            mean = float(table.sums[0, group, cell] / (table.weight[group] or 1))
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
        rows, cells, x, weight = (np.concatenate([one[part] for one in few]) for part in range(4))
        chosen = pool[cells]
        found, first, where = np.unique(rows[chosen], return_index=True, return_inverse=True)
        x, weight = np.bincount(where, x[chosen]) / size, weight[chosen][first]
        table = _WealthTable(1)
        table.grow(1, 1)
        none = np.zeros(found.size, np.int64)
        table.add(none, none, none, x, (weight, weight))
        table.take_rows(whole)
        mean = float(table.sums[0, 0, 0] / (whole.weight[0] or 1))
        return float(table.wealth()[0, 0]), mean, f"{size} actions with few events together"

    def _means(self, whole: _WealthTable) -> str:
        """The range of the means, and an action that could not always be taken, as text."""
        rows = max(1, int(whole.rows[0]))
        weight = (whole.weight[0] or 1) / rows
        weighted, squares = whole.sums[:, 0] / rows
        means = weighted / weight
        tested = whole.events[0] >= LEAST_EVENTS
        if not tested.any():
            return "too few steps to test propensities by action"
        low, high = float(means[tested].min()), float(means[tested].max())
        sentence = (
            f"the mean of [A = a] / propensity is {low:.3g} to {high:.3g}, which agrees with 1"
        )
        spread = np.sqrt(np.maximum(squares - weighted**2, 0) / rows) / weight
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
