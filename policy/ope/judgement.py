"""Better, worse, or cannot tell, and why: the whole judgement of a candidate on logged episodes.

    found = judge(episodes, candidate, [Bar("the logging policy")], Rules(reward_range=(0.0, 1.0)))
    found.verdict, found.reasons         # "cannot tell", ("action 2 was never logged ...",)

A bar is what the candidate must be better than: the live version, the logging policy. Only unbiased
differences decide (policy.ope.differences); ratio estimators and the direct method inform. S is the
number of steps, n of episodes, A of actions. Pure: arrays in, a judgement out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from policy.ope.comparison import BETTER, CANNOT_TELL, WORSE, Comparison, Verdict, compare
from policy.ope.cross_fitting import score_by_earlier
from policy.ope.diagnostics import (
    LEAST_EVENTS,
    MOST_OF_VARIANCE,
    MOST_OF_WEIGHT,
    Diagnostic,
    action_support,
    at_least,
    at_most,
    context_support,
    effective_number,
    largest_share,
    mean_weight,
    neighbourhoods,
    reward_events,
)
from policy.ope.differences import (
    Differences,
    Scores,
    one_step_differences,
    per_decision_differences,
    per_unit,
    scaled,
)
from policy.ope.episodes import running_sums
from policy.ope.value_models import BoundedRewardModel, LinearRewardModel

__all__ = ["Bar", "Evidence", "Judged", "Judgement", "Rules", "Target", "combined", "judge"]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MOST_LOG_WEIGHT = 300.0  # a weight of 1e130: its square is a number still
SAME_LOGP = 1e-4  # a float32 log-probability, computed twice


@dataclass(frozen=True, eq=False)
class Judged:
    """Whole episodes with propensities, in the order that they came in: steps one by one."""

    rewards: FloatArray  # (S,)
    lengths: IntArray  # (n,)
    behaviour_logp: FloatArray  # (S,) of the logged action, known all
    flat: npt.NDArray[np.floating[Any]]  # (S, D) observations
    taken: IntArray | None = None  # (S,) logged actions counted from 0; None: not Discrete
    start: int = 0  # the first action's name
    discrete: bool = True  # propensities are probabilities, not densities
    units: IntArray | None = None  # (n,) which unit an episode is of; those of one stand together

    @property
    def one_step(self) -> bool:
        return bool((self.lengths == 1).all())

    @property
    def starts(self) -> IntArray:
        return np.cumsum(self.lengths) - self.lengths

    pass_prob: FloatArray | None = None  # (n,) that an episode was logged at all; None: 1

    @property
    def unit_starts(self) -> IntArray:
        """The first episode of each unit; without units every episode is one."""
        n = self.lengths.size
        if self.units is None:
            return np.arange(n)
        return np.flatnonzero(np.append(True, np.diff(self.units) != 0))[:n]

    @property
    def returns(self) -> FloatArray:
        """(n,) undiscounted."""
        return np.add.reduceat(self.rewards, self.starts)


@dataclass(frozen=True, eq=False)
class Target:
    """A policy on the judged steps."""

    logp: FloatArray  # (S,) of the logged actions
    probs: FloatArray | None = None  # (S, A) of all actions, where they are Discrete


@dataclass(frozen=True, eq=False)
class Bar:
    """What the candidate must be better than; without a policy it is the logging policy."""

    name: str
    policy: Target | None = None
    logged: bool = False  # the policy is the logging policy: its weights are 1


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a judgement is made by."""

    confidence: float = 0.95  # of a two-sided interval: each end fails with half of the rest
    gamma: float = 1.0
    reward_range: tuple[float, float] | None = None  # of a step's reward: known, never from data
    min_ess: float = 100.0
    looks: int = 0  # earlier ones at this candidate, on fewer episodes
    unit: str = "episodes"  # what `Judged.units` are

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence: expected a share in (0, 1), got {self.confidence}")
        if self.reward_range is not None:
            low, high = self.reward_range
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise ValueError(
                    f"reward_range: expected two finite numbers, low < high, got {low}, {high}"
                )

    @property
    def error(self) -> float:
        """That a candidate which is not better is called better."""
        return (1 - self.confidence) / 2


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict, and all that it rests on."""

    verdict: Verdict
    reasons: tuple[str, ...]  # why it is not "better"; what is missing
    comparisons: tuple[Comparison, ...]
    diagnostics: tuple[Diagnostic, ...]

    @property
    def approximate(self) -> bool:
        """Whether an interval that it rests on leans on a normal limit."""
        return any(one.approximate for one in self.comparisons)

    def to_dict(self) -> dict[str, Any]:
        """Plain types for strict JSON."""
        return {
            "verdict": self.verdict,
            "approximate": self.approximate,
            "reasons": list(self.reasons),
            "comparisons": [one.to_dict() for one in self.comparisons],
            "diagnostics": [one.to_dict() for one in self.diagnostics],
        }


def judge(
    data: Judged,
    candidate: Target,
    bars: Sequence[Bar],
    rules: Rules,
    counted: Sequence[Diagnostic] = (),
) -> Judgement:
    """Judge the candidate against each bar; `counted` are checks of what was left out before.

    A bar's policy that gives the logged actions their logged propensities is the logging policy.
    """
    return Evidence(data, candidate, bars).judged(rules, counted)


class Evidence:
    """What episodes say of a candidate and its bars, computed once, to be judged by any rules."""

    def __init__(self, data: Judged, candidate: Target, bars: Sequence[Bar]) -> None:
        self._data, self._candidate = data, candidate
        self._bars = _merged(data, bars) if data.lengths.size else []
        self._found: dict[Any, list[Differences]] = {}

    def judged(self, rules: Rules, counted: Sequence[Diagnostic] = ()) -> Judgement:
        """The judgement by these rules; see `judge`."""
        in_range = _range_check(self._data, rules)
        if not self._bars or not all(one.passed for one in in_range):
            return combined([], [*counted, *in_range])
        comparisons, tails = [], []
        for bar, found in zip(self._bars, self._differences(rules), strict=True):
            compared = compare(
                found, bar=bar.name, error=rules.error, looks=rules.looks, unit=rules.unit
            )
            comparisons.append(compared)
            squares = (found.values - found.values.mean()) ** 2
            threshold = MOST_OF_VARIANCE if compared.approximate else None
            what = f"squared deviation from the mean difference to {bar.name}"
            tails.append(largest_share("heavy_tails", squares, threshold, what))
        approximate = any(one.approximate for one in comparisons)
        checks = [one for checked in self._checked for one in checked(rules, approximate)]
        return combined(comparisons, [*counted, *in_range, *checks, *tails])

    def _differences(self, rules: Rules) -> list[Differences]:
        key = (rules.reward_range, rules.gamma)
        if key not in self._found:
            largest = _largest_weight(self._data)
            self._found[key] = [
                per_unit(
                    scaled(
                        _differences(self._data, self._candidate, bar, rules, largest),
                        self._data.pass_prob,
                    ),
                    self._data.unit_starts,
                )
                for bar in self._bars
            ]
        return self._found[key]

    @cached_property
    def _checked(self) -> list[_Checked]:
        weighed = [("", self._candidate)]
        weighed += [("live_", one.policy) for one in self._bars if one.policy and not one.logged]
        place = None
        if self._data.taken is not None and self._candidate.probs is not None:
            place = neighbourhoods(self._data.flat, self._candidate.probs.shape[1])
        return [_Checked(prefix, self._data, policy, place) for prefix, policy in weighed]


def combined(comparisons: Sequence[Comparison], diagnostics: Sequence[Diagnostic]) -> Judgement:
    """One verdict: a failed check or nothing to go by is "cannot tell", one worse bar "worse"."""
    failed = [f"{one.name}: {one.sentence}" for one in diagnostics if not one.passed]
    worse = [_told(one) for one in comparisons if one.verdict == WORSE]
    open_ones = [_told(one) for one in comparisons if one.verdict == CANNOT_TELL]
    verdict, reasons = BETTER, []
    if failed or not comparisons:
        verdict, reasons = CANNOT_TELL, failed or ["nothing to judge by"]
    elif worse:
        verdict, reasons = WORSE, worse
    elif open_ones:
        verdict, reasons = CANNOT_TELL, open_ones
    return Judgement(
        verdict=verdict,
        reasons=tuple(reasons),
        comparisons=tuple(comparisons),
        diagnostics=tuple(diagnostics),
    )


def _told(one: Comparison) -> str:
    low, high = one.interval
    text = f"{one.difference:+.4g} [{low:.4g}, {high:.4g}] against {one.bar}"
    if one.verdict == WORSE:
        return text
    if one.missing is None:
        return f"{text}: more episodes will hardly tell; use a canary"
    return f"{text}: about {one.missing:,} more {one.unit}, if the difference is what it seems"


# --- the differences -------------------------------------------------------------------------


def _merged(data: Judged, bars: Sequence[Bar]) -> list[Bar]:
    """The bars, less a logging policy that another one is as well."""
    found: list[Bar] = []
    for bar in bars:
        same = bar.policy is None or bool(
            (np.abs(bar.policy.logp - data.behaviour_logp) < SAME_LOGP).all()
        )
        if not (same and any(one.logged for one in found)):
            found.append(replace(bar, logged=same))
    return found


def _largest_weight(data: Judged) -> float:
    """1 / the lowest logged propensity, which no step's ratio can exceed; inf for densities."""
    if not data.discrete:
        return math.inf
    return float(np.exp(-data.behaviour_logp.min()))


def _ratios(data: Judged, policy: Target) -> FloatArray:
    """(S,) candidate / logging policy of each step alone."""
    ratios: FloatArray = np.exp(np.minimum(policy.logp - data.behaviour_logp, MOST_LOG_WEIGHT))
    return ratios


def _weights(data: Judged, policy: Target) -> FloatArray:
    """(S,) products of the ratios up to and including each step."""
    if data.one_step:
        return _ratios(data, policy)
    sums = running_sums(policy.logp - data.behaviour_logp, data.lengths)
    weights: FloatArray = np.exp(np.minimum(sums, MOST_LOG_WEIGHT))
    return weights


def _differences(
    data: Judged, candidate: Target, bar: Bar, rules: Rules, largest: float
) -> Differences:
    weights = _weights(data, candidate)
    known = None if bar.logged else bar.policy
    bar_weights = None if known is None else _weights(data, known)
    if data.one_step:
        return one_step_differences(
            data.rewards,
            weights,
            bar_weights,
            _scores(data, candidate, bar.policy, rules),
            reward_range=rules.reward_range,
            largest_weight=largest,
        )
    return per_decision_differences(
        data.rewards,
        weights,
        bar_weights,
        data.lengths,
        gamma=rules.gamma,
        reward_range=rules.reward_range,
        largest_weight=largest,
    )


def _scores(data: Judged, candidate: Target, bar: Target | None, rules: Rules) -> Scores | None:
    """q and v of a linear model that was fitted on earlier rows, where actions are Discrete."""
    if data.taken is None or candidate.probs is None:
        return None
    actions, targets = candidate.probs.shape[1], [candidate.probs]
    if bar is not None:
        if bar.probs is None:
            return None
        targets.append(bar.probs)
    # Without a range a constant from the log itself: the interval is approximate anyway.
    limits = rules.reward_range
    start = float(data.rewards.mean()) if limits is None else sum(limits) / 2
    q, values = score_by_earlier(
        lambda: BoundedRewardModel(LinearRewardModel(actions), limits),
        data.flat,
        data.taken,
        data.rewards,
        targets,
        start=start,
        units=data.units,
    )
    return Scores(q, values[0], None if bar is None else values[1])


# --- the checks ------------------------------------------------------------------------------


class _Checked:
    """The checks of the candidate, or with a prefix of a bar that is weighed like it."""

    def __init__(self, prefix: str, data: Judged, policy: Target, place: IntArray | None) -> None:
        self._prefix, self._returns, self._starts = prefix, data.returns, data.unit_starts
        self._own: list[Diagnostic] = []
        if data.taken is not None and policy.probs is not None and place is not None:
            self._own.append(action_support(data.taken, policy.probs, start=data.start))
            self._own.append(context_support(place, data.taken, policy.probs))
        self._own.append(mean_weight(_ratios(data, policy), _largest_weight(data)))
        self._whole = _weights(data, policy)[np.cumsum(data.lengths) - 1]
        what, of_units = "importance weight", np.add.reduceat(self._whole, self._starts)
        self._own.append(largest_share("largest_weight", of_units, MOST_OF_WEIGHT, what))
        self._ess = effective_number(of_units)

    def __call__(self, rules: Rules, approximate: bool) -> list[Diagnostic]:
        ess = self._ess
        words = f"effective sample size: expected {rules.min_ess:g} or more, got {ess:.1f}"
        enough = at_least("effective_sample_size", ess, rules.min_ess, words, "min_ess")
        threshold = LEAST_EVENTS if approximate else None
        events = reward_events(self._returns, self._whole, threshold=threshold)
        found = [*self._own, enough, events]
        return [_named(one, self._prefix) for one in found] if self._prefix else found


def _named(one: Diagnostic, prefix: str) -> Diagnostic:
    return Diagnostic(
        name=prefix + one.name,
        value=one.value,
        threshold=one.threshold,
        passed=one.passed,
        sentence=f"live version: {one.sentence}",
        source=one.source,
    )


def _range_check(data: Judged, rules: Rules) -> list[Diagnostic]:
    if rules.reward_range is None or not data.rewards.size:
        return []
    low, high = rules.reward_range
    outside = int(((data.rewards < low) | (data.rewards > high)).sum())
    sentence = f"{outside} rewards outside of the declared range {low:g} to {high:g}"
    if outside:
        sentence += f", from {data.rewards.min():g} to {data.rewards.max():g}: mend the range"
    return [at_most("rewards_outside_range", outside, 0, sentence, "the range is a promise")]
