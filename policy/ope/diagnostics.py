"""Checks of the data that an interval cannot make: each has a name, a threshold and its source.

    found = [*support.checks(0), mean_weight(...), largest_share(...), ...]
    [one.sentence for one in found if not one.passed]

A failed check turns a verdict into "cannot tell", never into "worse": it means that these episodes
do not answer the question. A check without a threshold only informs. S is the number of steps, A of
actions, n of episodes. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from policy.ope.betting import wealth_against
from policy.ope.columns import NumberColumn, Numbers, column_of, combined, mean_of
from storage.wording import counted, rounded_up

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

MOST_UNSUPPORTED = 0.01
MOST_UNSUPPORTED_NEAR = 0.05
WEIGHT_ERROR = 0.0002
LEAST_EVENTS = 30.0
LEAST_ESS = 30.0
"""The effective sample size below which no spread is estimated: with few effective episodes an
interval is too narrow. With one, WIS equals its return."""
MOST_OF_VARIANCE = 0.1
MOST_OF_WEIGHT = 0.1

ROWS_AN_ACTION = 50  # in a neighbourhood
MOST_HALVINGS = 4
SAMPLE_CELLS = 1 << 22  # numbers in the rows from which neighbourhoods are computed: 32 MB
MOST_COMMON_OF = 1 << 16  # the number of returns from which the most common one is computed


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """One check: `passed` unless `value` is on the wrong side of `threshold`."""

    name: str
    value: float
    threshold: float | None  # None: only informs
    passed: bool
    sentence: str  # what was found, and how to mend a failure
    source: str  # of the threshold
    # approximate number of further episodes, or units of them, with which a failed check passes;
    # None: it passed, no number is known, or something else is missing
    missing: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain types for strict JSON."""
        return {
            "name": self.name,
            "value": float(self.value) if math.isfinite(self.value) else None,
            "threshold": self.threshold,
            "passed": self.passed,
            "sentence": self.sentence,
            "source": self.source,
            "missing": self.missing,
        }


def at_most(
    name: str, value: float, threshold: float | None, sentence: str, source: str = ""
) -> Diagnostic:
    """A check that passes if the value is not above the threshold; NaN fails."""
    passed = threshold is None or bool(value <= threshold)
    return _diagnostic(name, value, threshold, passed, sentence, source)


def at_least(
    name: str, value: float, threshold: float | None, sentence: str, source: str = ""
) -> Diagnostic:
    """A check that passes if the value is not below the threshold; NaN fails."""
    passed = threshold is None or bool(value >= threshold)
    return _diagnostic(name, value, threshold, passed, sentence, source)


def _diagnostic(
    name: str, value: float, threshold: float | None, passed: bool, sentence: str, source: str
) -> Diagnostic:
    return Diagnostic(
        name=name,
        value=float(value),
        threshold=threshold,
        passed=passed,
        sentence=sentence,
        source=source,
    )


class Support:
    """Which actions were logged, and which other ones policies take, over rows added in blocks.

    "Near an observation" means in the same neighbourhood. There are up to 16 of these, with 50 rows
    per action or more each, from median cuts of a k-d tree (Friedman, Bentley & Finkel 1977,
    section 3) through the first rows, as many as fit into `SAMPLE_CELLS`.
    """

    def __init__(
        self, actions: int, policies: int, *, start: int = 0, names: Sequence[str] = ()
    ) -> None:
        self._actions = actions
        self._names = [repr(name) for name in names]
        self._names = self._names or [f"action {start + number}" for number in range(actions)]
        self._logged = np.zeros(actions, np.int64)
        self._mass = np.zeros((policies, actions))
        self._waiting: list[tuple[FloatArray, IntArray, Sequence[FloatArray]]] = []
        self._units: list[IntArray] = []
        self._rows = 0
        self._tree: _Tree | None = None
        self._seen = np.zeros((1 << MOST_HALVINGS, actions), np.bool_)
        self._near = np.zeros((policies, 1 << MOST_HALVINGS, actions))

    def add(
        self,
        flat: npt.NDArray[np.floating[Any]],
        taken: IntArray,
        probs: Sequence[FloatArray],
        units: IntArray | None = None,
    ) -> None:
        """Add S rows: flat (S, D), taken int64 (S,) counted from 0, probs (S, A) of each policy.

        `units` (S,): a neighbourhood has as many units as it has rows without them, because the
        rows of one may all have the same action.
        """
        self._logged += np.bincount(taken, minlength=self._actions)
        self._rows += len(taken)
        for mass, own in zip(self._mass, probs, strict=True):
            mass += own.sum(axis=0)
        if self._tree is not None:
            return self._place(flat, taken, probs)
        self._waiting.append((np.asarray(flat, np.float64), taken, probs))
        if units is not None:
            self._units.append(units)
        if self._rows * (flat.shape[1] + self._mass.size) >= SAMPLE_CELLS:
            self._plant()
        return None

    def checks(self, policy: int) -> list[Diagnostic]:
        """The checks for one policy, by its number."""
        if self._tree is None and self._waiting:
            self._plant()
        mass = np.where(self._logged > 0, 0.0, self._mass[policy] / max(1, self._rows))
        lost = float(np.where(self._seen, 0.0, self._near[policy]).sum() / max(1, self._rows))
        places = int(self._seen.any(axis=1).sum())
        support = _action_support(mass, self._names, self._rows)
        return [support, _context_support(lost, places)]

    def _plant(self) -> None:
        rows = np.concatenate([flat for flat, _, _ in self._waiting])
        if self._units:  # the first row of each
            rows = rows[np.unique(np.concatenate(self._units), return_index=True)[1]]
            self._units = []
        self._tree = _grown(rows, ROWS_AN_ACTION * self._actions, MOST_HALVINGS)
        for flat, taken, probs in self._waiting:
            self._place(flat, taken, probs)
        self._waiting = []

    def _place(
        self, flat: npt.NDArray[np.floating[Any]], taken: IntArray, probs: Sequence[FloatArray]
    ) -> None:
        place = np.zeros(len(taken), np.int64)
        _descend(self._tree, np.asarray(flat, np.float64), np.arange(len(taken)), place, 1)
        self._seen[place, taken] = True
        for near, own in zip(self._near, probs, strict=True):
            for action, mass in enumerate(own.T):
                near[:, action] += np.bincount(place, mass, len(near))


def _action_support(mass: FloatArray, names: Sequence[str], rows: int) -> Diagnostic:
    """The check of the candidate's probability of actions that no judged step has.

    `mass` (A,) is that probability, 0 for logged actions, `rows` the number of judged steps.
    Nothing is known of the reward of an action that none of them has, whatever the effective sample
    size.
    """
    lost = float(mass.sum())
    sentence = "every action that the candidate takes is in the judged steps"
    if lost > 0:
        worst = np.argsort(-mass, kind="stable")[:3]
        taken = [f"{names[a]} ({mass[a]:.1%} of steps)" for a in worst if mass[a] > 0]
        more = int((mass > 0).sum()) - len(taken)
        listed = ", ".join(taken) + (f" and {more} more" if more else "")
        sentence = (
            f"taken by the candidate, but not in the {counted(rows, 'judged step')}: {listed}"
        )
        if lost > MOST_UNSUPPORTED:
            sentence += "; log these actions, or use a canary"
    return at_most(
        "unsupported_actions",
        lost,
        MOST_UNSUPPORTED,
        sentence,
        "a share p without support can bias the value by p times the reward range",
    )


def _context_support(lost: float, places: int) -> Diagnostic:
    """The check of the probability of actions never logged near the same observation."""
    sentence = f"{lost:.1%} of the candidate's actions were never logged near the same observation"
    if lost > MOST_UNSUPPORTED_NEAR:
        sentence += f" ({places} neighbourhoods); log more of them, or use a canary"
    return at_most(
        "unsupported_near",
        lost,
        MOST_UNSUPPORTED_NEAR,
        sentence,
        "as unsupported_actions; more than one neighbourhood of 16 may lack an action by chance",
    )


@dataclass(frozen=True)
class _TreeCut:
    """A cut: rows with a feature above the threshold, or equal if `at_too`, go to `above`."""

    feature: int
    threshold: float
    at_too: bool
    below: _Tree
    above: _Tree

    def is_above(self, column: FloatArray) -> BoolArray:
        found: BoolArray = column >= self.threshold if self.at_too else column > self.threshold
        return found


_Tree: TypeAlias = "_TreeCut | None"


def _grown(rows: FloatArray, least: int, depth: int) -> _Tree:
    if depth == 0 or len(rows) < 2 * least or rows.shape[1] == 0:
        return None
    for feature in np.argsort(-rows.std(axis=0), kind="stable")[:4]:
        column = rows[:, feature]
        median = float(np.median(column))
        at_too = not (column > median).any()  # no value is above the median
        above = column >= median if at_too else column > median
        if least <= above.sum() <= len(rows) - least:
            sides = (_grown(rows[side], least, depth - 1) for side in (~above, above))
            return _TreeCut(int(feature), median, at_too, *sides)
    return None


def _descend(tree: _Tree, flat: FloatArray, rows: IntArray, place: IntArray, bit: int) -> None:
    """Compute the number of each row's neighbourhood."""
    if tree is None or not len(rows):
        return
    above = tree.is_above(flat[rows, tree.feature])
    place[rows[above]] += bit
    _descend(tree.below, flat, rows[~above], place, 2 * bit)
    _descend(tree.above, flat, rows[above], place, 2 * bit)


def mean_weight(
    ratios: Numbers, largest: float, sampled: tuple[float, float] = (1.0, 1.0)
) -> Diagnostic:
    """Whether the ratios candidate / logging policy (S,) have mean 1, as expected at every step.

    They have if the logged propensities are those of the logged actions, and the logging policy can
    take every action that the candidate takes. With units, the ratios are the means of each.
    `largest` is a bound on them: 1 / the lowest propensity. Both directions are tested by betting.
    A correct log fails each with a probability of at most 0.0002, also over many steps, because the
    mean is 1 at every step given the earlier ones.

    With sampled logging, a step logged with probability p has 1 + (ratio - 1) / p in place of its
    ratio, with the same mean; `sampled` are the mean and the largest 1 / p.
    """
    threshold = math.log(1 / WEIGHT_ERROR)
    column, (mean_by, most_by) = column_of(ratios), sampled
    value = 1 + (mean_of(column) - 1) / mean_by
    above = wealth_against(column, 1.0, least=1 - most_by, error=WEIGHT_ERROR) > threshold
    most = 1 + (largest - 1) * most_by
    below = (
        math.isfinite(largest)
        and largest > 1
        and (
            wealth_against(
                combined(np.negative, column), -1.0, least=-most * (1 + 1e-6), error=WEIGHT_ERROR
            )
            > threshold
        )
    )
    sentence = f"the mean importance weight of a step is {value:.3g}, which agrees with 1"
    if below:
        sentence = (
            f"the mean importance weight of a step is {value:.3g}, where 1 was expected: the "
            "logging policy never does part of what the candidate does, or its propensities are "
            "too high; check them, or use a canary"
        )
    elif above:
        sentence = (
            f"the mean importance weight of a step is {value:.3g}, where 1 was expected: logged "
            "propensities are too low, or of other actions; check how they are computed"
        )
    return Diagnostic(
        name="mean_weight",
        value=value,
        threshold=1.0,
        passed=not (above or below),
        sentence=sentence,
        source="a bet against mean 1, each way at 0.0002 (Ville 1939)",
    )


def largest_share(name: str, numbers: Numbers, threshold: float | None, what: str) -> Diagnostic:
    """The largest of n numbers >= 0 as a share of their sum; it must not decide alone."""
    total = most = 0.0
    for block in column_of(numbers).blocks():
        total, most = total + float(block.sum()), max(most, float(block.max()))
    share = most / total if total > 0 else 0.0
    sentence = f"the largest {what} is {share:.1%} of their sum"
    if threshold is not None and share > threshold:
        sentence += ": a single episode decides; more episodes, or a canary"
    return at_most(
        name, share, threshold, sentence, "Lindeberg's condition: no term keeps a share of the sum"
    )


def reward_events(
    returns: Numbers, weights: Numbers, *, threshold: float | None, unit: str = "episodes"
) -> Diagnostic:
    """The effective number of episodes that tell something of the reward where the policy acts.

    Events are the returns that differ from the most common one. Each counts with its weight, (sum
    w)^2 / sum w^2 (Kish 1965). returns, weights (n,). A normal limit requires enough events. `unit`
    names the n, for the sentence.
    """
    column, weighed = column_of(returns), column_of(weights)
    common = _most_common(column)
    happened = combined(lambda w, r: np.where(r == common, 0.0, w), weighed, column)
    number = effective_number(happened)
    sentence = f"{counted(number, 'reward event')} where the policy acts as it was logged"
    more = None if threshold is None else _further(column.size, number, threshold)
    if threshold is not None and number < threshold:
        about = "more" if more is None else f"about {more:,} more"
        sentence += f", of {threshold:.0f} needed: {about} {unit}, or a reward_range"
    found = at_least(
        "reward_events",
        number,
        threshold,
        sentence,
        "30 events: below, intervals by a normal limit miss rare ones too often (make judge)",
    )
    return replace(found, missing=more)


def rewards_in_range(
    outside: int, ends: tuple[float, float], limits: tuple[float, float], what: str = "reward"
) -> Diagnostic:
    """Whether none is outside of the declared limits; `ends` are the least and the most of all."""
    low, high = limits
    sentence = f"{counted(outside, what)} outside of the declared range {low:g} to {high:g}"
    if outside:
        sentence += f", from {ends[0]:g} to {ends[1]:g}: fix the range"
    source = "the range is a promise"
    return at_most("rewards_outside_range", outside, 0, sentence, source)


def _most_common(returns: NumberColumn) -> float:
    """The most common of the first returns; NaN if none occurs twice."""
    first, rows = [np.empty(0)], 0
    for block in returns.blocks():
        if rows >= MOST_COMMON_OF:
            break
        first.append(block)
        rows += block.size
    values, counts = np.unique(np.concatenate(first)[:MOST_COMMON_OF], return_counts=True)
    if not values.size or counts.max() < 2:
        return math.nan
    return float(values[counts.argmax()])


def effective_number(weights: Numbers) -> float:
    """Kish 1965: (sum w)^2 / sum w^2; 0 without weights above 0."""
    column = column_of(weights)
    largest = max((float(block.max()) for block in column.blocks()), default=0.0)
    if largest == 0:
        return 0.0
    total = squares = 0.0
    for block in column.blocks():
        shares = block / largest
        total, squares = total + float(shares.sum()), squares + float(shares @ shares)
    return total**2 / squares


def effective_sample_size(numbers: Numbers, threshold: float, unit: str) -> Diagnostic:
    """The check of Kish's (sum w)^2 / sum w^2 of the weights, with the number missing.

    `unit` names what has the weights, for the sentence.
    """
    column = column_of(numbers)
    number = effective_number(column)
    sentence = f"the weights leave an effective sample size of {number:.1f}"
    more = _further(column.size, number, threshold)
    if number < threshold:
        sentence = f"effective sample size: expected {threshold:g} or more, got {number:.1f}"
        about = "more" if more is None else f"about {more:,} more"
        sentence += f": it needs {about} {unit}, or use a canary"
    found = at_least("effective_sample_size", number, threshold, sentence, "min_ess")
    return replace(found, missing=more)


def _further(n: int, number: float, threshold: float) -> int | None:
    """How many more than n give the threshold, if the number grows with n; None if it is 0 or
    enough.
    """
    if not 0 < number < threshold:
        return None
    return rounded_up(n * (threshold / number - 1))
