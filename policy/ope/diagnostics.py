"""What an interval cannot see of its own data: named checks, each with a threshold and its source.

    found = [action_support(...), context_support(...), mean_weight(...), ...]
    [one.sentence for one in found if not one.passed]

A check that fails turns a verdict into "cannot tell", and never into "worse": it says that these
episodes do not answer the question. One without a threshold informs. S is the number of steps, A of
actions, n of episodes. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from policy.ope.betting import wealth_against

__all__ = [
    "Diagnostic",
    "action_support",
    "at_least",
    "at_most",
    "context_support",
    "effective_number",
    "largest_share",
    "mean_weight",
    "neighbourhoods",
    "reward_events",
]

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

MOST_UNSUPPORTED = 0.01
MOST_UNSUPPORTED_NEAR = 0.05
WEIGHT_ERROR = 0.0002
LEAST_EVENTS = 30.0
MOST_OF_VARIANCE = 0.1
MOST_OF_WEIGHT = 0.1

ROWS_AN_ACTION = 50  # in a neighbourhood
MOST_HALVINGS = 4


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """One check: `passed` unless `value` is on the wrong side of `threshold`."""

    name: str
    value: float
    threshold: float | None  # None: informs, and decides nothing
    passed: bool
    sentence: str  # what was found, and when it failed what to do
    source: str  # of the threshold

    def to_dict(self) -> dict[str, Any]:
        """Plain types for strict JSON."""
        return {
            "name": self.name,
            "value": float(self.value) if math.isfinite(self.value) else None,
            "threshold": self.threshold,
            "passed": self.passed,
            "sentence": self.sentence,
            "source": self.source,
        }


def at_most(
    name: str, value: float, threshold: float | None, sentence: str, source: str = ""
) -> Diagnostic:
    """Passed when the value is not above the threshold; a NaN is not."""
    passed = threshold is None or bool(value <= threshold)
    return _diagnostic(name, value, threshold, passed, sentence, source)


def at_least(
    name: str, value: float, threshold: float | None, sentence: str, source: str = ""
) -> Diagnostic:
    """Passed when the value is not below the threshold; a NaN is not."""
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


def action_support(taken: IntArray, probs: FloatArray, *, start: int = 0) -> Diagnostic:
    """The candidate's probability of actions that were never logged.

    taken (S,) counted from 0, probs (S, A) of the candidate; `start` is the first action's name.
    Nothing is known of such an action's reward, whatever the effective sample size.
    """
    logged = np.bincount(taken, minlength=probs.shape[1]) > 0
    mass = np.where(logged, 0.0, probs.mean(axis=0))
    lost = float(mass.sum())
    sentence = "every action that the candidate takes was logged"
    if lost > 0:
        worst = np.argsort(-mass, kind="stable")[:3]
        names = [f"action {a + start} ({mass[a]:.1%} of steps)" for a in worst if mass[a] > 0]
        more = int((mass > 0).sum()) - len(names)
        listed = ", ".join(names) + (f" and {more} more" if more else "")
        sentence = f"never logged, but taken by the candidate: {listed}"
        if lost > MOST_UNSUPPORTED:
            sentence += "; log these actions, or use a canary"
    return at_most(
        "unsupported_actions",
        lost,
        MOST_UNSUPPORTED,
        sentence,
        "a share p without support can bias the value by p times the reward range",
    )


def context_support(place: IntArray, taken: IntArray, probs: FloatArray) -> Diagnostic:
    """The candidate's probability of actions that were never logged near the same observation.

    place (S,) of `neighbourhoods`, taken (S,), probs (S, A).
    """
    count = int(place.max()) + 1
    seen = np.zeros((count, probs.shape[1]), np.bool_)
    seen[place, taken] = True
    lost = 0.0
    if not seen.all():
        lost = float(np.where(seen[place], 0.0, probs).sum() / len(taken))
    sentence = f"{lost:.1%} of the candidate's actions were never logged near the same observation"
    if lost > MOST_UNSUPPORTED_NEAR:
        sentence += f" ({count} neighbourhoods); log more of them, or use a canary"
    return at_most(
        "unsupported_near",
        lost,
        MOST_UNSUPPORTED_NEAR,
        sentence,
        "as unsupported_actions; more than one neighbourhood of 16 may lack an action by chance",
    )


def neighbourhoods(flat: npt.NDArray[np.floating[Any]], actions: int) -> IntArray:
    """(S,) number of each row's neighbourhood; flat (S, D) observations.

    Each has 50 rows an action or more, if there are so many: the median cuts of a k-d tree.
    Friedman, Bentley & Finkel 1977, section 3.
    """
    rows = np.asarray(flat, np.float64)
    place = np.zeros(len(rows), np.int64)
    groups, least = [np.arange(len(rows))], ROWS_AN_ACTION * actions
    for _ in range(MOST_HALVINGS):
        halves = [half for group in groups for half in _halved(rows, group, least)]
        if len(halves) == len(groups):
            break
        groups = halves
    for number, group in enumerate(groups):
        place[group] = number
    return place


def _halved(flat: FloatArray, group: IntArray, least: int) -> list[IntArray]:
    if len(group) < 2 * least or flat.shape[1] == 0:
        return [group]
    own = flat[group]
    for feature in np.argsort(-own.std(axis=0), kind="stable")[:4]:
        column = own[:, feature]
        above = column > np.median(column)
        if not above.any():  # the median is the largest: of two values the common one
            above = column >= np.median(column)
        if least <= above.sum() <= len(group) - least:
            return [group[~above], group[above]]
    return [group]


def mean_weight(ratios: FloatArray, largest: float) -> Diagnostic:
    """Whether the ratios candidate / logging policy (S,) have mean 1, as they must at every step.

    They do when each action's propensity is what was logged, and when the logging policy might have
    done all that the candidate does. `largest` bounds them: 1 / the lowest propensity. Both ways to
    fail are tested by betting, which a sound log fails with a probability of at most 0.0002 each,
    also over many steps: given what came before, the mean is 1 at every one.
    """
    threshold = math.log(1 / WEIGHT_ERROR)
    value = float(ratios.mean())
    above = wealth_against(ratios, 1.0, least=0.0, error=WEIGHT_ERROR) > threshold
    below = (
        math.isfinite(largest)
        and largest > 1
        and (
            wealth_against(-ratios, -1.0, least=-largest * (1 + 1e-6), error=WEIGHT_ERROR)
            > threshold
        )
    )
    sentence = f"the mean importance weight of a step is {value:.3g}, which may be 1"
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


def largest_share(name: str, numbers: FloatArray, threshold: float | None, what: str) -> Diagnostic:
    """The largest of n numbers >= 0 over their sum: one that decides is no sample."""
    total = float(numbers.sum())
    share = float(numbers.max()) / total if total > 0 else 0.0
    sentence = f"the largest {what} is {share:.1%} of their sum"
    if threshold is not None and share > threshold:
        sentence += ": a single episode decides; more episodes, or a canary"
    return at_most(
        name, share, threshold, sentence, "Lindeberg's condition: no term keeps a share of the sum"
    )


def reward_events(
    returns: FloatArray, weights: FloatArray, *, threshold: float | None
) -> Diagnostic:
    """How many episodes say something of the reward where the policies act: an effective number.

    Events are the returns that differ from the most common one; each counts by its weight,
    (sum w)^2 / sum w^2 (Kish 1965). returns, weights (n,). A normal limit needs them.
    """
    values, which = np.unique(returns, return_inverse=True)
    common = int(np.bincount(which).argmax()) if values.size else 0
    happened = which != common if np.bincount(which)[common] > 1 else np.ones(len(which), np.bool_)
    number = effective_number(weights[happened])
    sentence = f"{number:.0f} reward events where the policy acts as it was logged"
    if threshold is not None and number < threshold:
        more = len(returns) * (threshold / number - 1) if number > 0 else math.inf
        hint = f"about {_rounded(more):,} more episodes" if math.isfinite(more) else "more episodes"
        sentence += f", of {threshold:.0f} needed: {hint}, or a reward_range"
    return at_least(
        "reward_events",
        number,
        threshold,
        sentence,
        "30 events: below, intervals by a normal limit miss rare ones too often (make judge)",
    )


def effective_number(weights: FloatArray) -> float:
    """Kish 1965: (sum w)^2 / sum w^2; 0 without any weight."""
    largest = float(weights.max()) if weights.size else 0.0
    if largest == 0:
        return 0.0
    shares = weights / largest
    return float(shares.sum() ** 2 / (shares @ shares))


def _rounded(number: float) -> int:
    """Two digits."""
    digits = 10.0 ** max(0, math.floor(math.log10(max(number, 1.0))) - 1)
    return int(math.ceil(number / digits) * digits)
