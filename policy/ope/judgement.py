"""The whole judgement of a candidate on logged episodes: better, worse, or cannot tell, and why.

    found = judge(episodes, candidate, [Bar("the logging policy")], Rules(reward_range=(0.0, 1.0)))
    found.verdict, found.reasons         # "cannot tell", ("action 2 was never logged ...",)

A bar is what the candidate has to be better than: the live version, the logging policy. Only
unbiased differences decide (policy.ope.differences); ratio estimators and the direct method only
inform. S is the number of steps, n of episodes, A of actions. Pure: arrays in, a judgement out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from policy.ope.columns import (
    MemoryColumn,
    NumberColumn,
    UnitNumbers,
    column_of,
    first_of,
    mean_of,
)
from policy.ope.columns import combined as _apply
from policy.ope.comparison import (
    BETTER,
    CANNOT_TELL,
    WORSE,
    Comparison,
    Verdict,
    compare,
    without_limits,
)
from policy.ope.cross_fitting import EarlierScores
from policy.ope.diagnostics import (
    LEAST_ESS,
    LEAST_EVENTS,
    MOST_OF_VARIANCE,
    MOST_OF_WEIGHT,
    Diagnostic,
    Support,
    effective_sample_size,
    largest_share,
    mean_weight,
    reward_events,
)
from policy.ope.differences import (
    Differences,
    Scores,
    bounded_per_decision,
    one_step_limit,
    one_step_values,
    per_decision_terms,
    returns_range,
    weighted_returns,
)
from policy.ope.drift import ContextDrift, Drift
from policy.ope.episodes import running_sums
from policy.ope.lost_episodes import LostEpisodes
from policy.ope.margins import Margin
from policy.ope.propensities import ActionCells, Propensities
from policy.ope.repeats import Repeats, fingerprints
from policy.ope.reward_cap import FIRST_SHARE, proposed_cap
from policy.ope.reward_ends import MANY_TIMES, RewardEnds

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

# of a weight of 3e38, the largest float32; the cube of a weighted reward does not overflow
MOST_LOG_WEIGHT = math.log(np.finfo(np.float32).max)
MODEL_CELLS = 1 << 25  # numbers in a reward model: 256 MB
LOW_PROPENSITY = 0.1  # below it the reasons mention the propensity
NO_MARGIN = Margin()
SAME_LOGP = 1e-4  # tolerance for a float32 log-probability that was computed twice


@dataclass(frozen=True, eq=False)
class Judged:
    """Whole episodes with propensities, in the order in which they came; flat arrays of steps."""

    rewards: FloatArray  # (S,)
    lengths: IntArray  # (n,)
    behaviour_logp: FloatArray  # (S,) of the logged action, all known
    flat: npt.NDArray[np.floating[Any]]  # (S, D) observations
    taken: IntArray | None = None  # (S,) logged actions counted from 0; None: not Discrete
    start: int = 0  # the number of the first action
    names: tuple[str, ...] = ()  # of the actions, if they have names
    discrete: bool = True  # propensities are probabilities, not densities
    units: IntArray | None = None  # (n,) the unit of each episode, counted from 0
    pass_prob: FloatArray | None = None  # (n,) the probability that an episode was logged; None: 1
    cells: ActionCells | None = None  # of the steps; None: the actions, if they are Discrete
    tags: Mapping[str, Sequence[str | None]] | None = None  # name -> values (n,)
    times: FloatArray | None = None  # (n,) when each episode began; None: in this order
    lost: BoolArray | None = None  # (n,) abandoned or broken, with the default reward; None: none

    @property
    def by(self) -> FloatArray:
        """(n,) 1 / pass_prob: how many episodes each stands for (Horvitz & Thompson 1952)."""
        return np.ones(self.lengths.size) if self.pass_prob is None else 1 / self.pass_prob

    @property
    def one_step(self) -> bool:
        return bool((self.lengths == 1).all())

    @property
    def starts(self) -> IntArray:
        return np.cumsum(self.lengths) - self.lengths

    @property
    def ends(self) -> IntArray:
        """(n,) row of each episode's last step."""
        return np.cumsum(self.lengths) - 1

    @property
    def returns(self) -> FloatArray:
        """(n,) undiscounted returns."""
        return np.add.reduceat(self.rewards, self.starts)

    def action(self, number: int) -> str:
        """The name of an action, counted from 0."""
        return repr(self.names[number]) if self.names else f"action {self.start + number}"


@dataclass(frozen=True, eq=False)
class TargetPolicy:
    """A policy's probabilities on the judged steps."""

    logp: FloatArray  # (S,) of the logged actions
    probs: FloatArray | None = None  # (S, A) of all actions, if they are Discrete


@dataclass(frozen=True, eq=False)
class Bar:
    """What the candidate has to be better than; without a policy it is the logging policy."""

    name: str
    policy: TargetPolicy | None = None


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The settings of a judgement."""

    confidence: float = 0.95  # of a two-sided interval: each end fails with half of the remainder
    gamma: float = 1.0
    reward_range: tuple[float, float] | None = None  # of a step's reward; known, never from data
    min_ess: float = 100.0
    looks: int = 0  # earlier judgements of this candidate, on fewer episodes
    unit: str = "episodes"  # the name of `Judged.units`
    in_order: bool = True  # whether later looks append their episodes to the earlier ones
    margin: Margin = NO_MARGIN  # better than each bar by at least this

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
        """The probability that a candidate which is not better is called better."""
        return (1 - self.confidence) / 2


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A verdict with its reasons and all results that it is based on."""

    verdict: Verdict
    reasons: tuple[str, ...]  # why it is not "better", and what is missing
    comparisons: tuple[Comparison, ...]
    diagnostics: tuple[Diagnostic, ...]
    # approximate number of further episodes, or units of them, that would decide
    missing: int | None = None  # unknown, or not needed

    @property
    def approximate(self) -> bool:
        """Whether an interval that it is based on relies on a normal limit."""
        return any(one.approximate for one in self.comparisons)

    def to_dict(self) -> dict[str, Any]:
        """Plain types for strict JSON."""
        return {
            "verdict": self.verdict,
            "approximate": self.approximate,
            "reasons": list(self.reasons),
            "missing": self.missing,
            "comparisons": [one.to_dict() for one in self.comparisons],
            "diagnostics": [one.to_dict() for one in self.diagnostics],
        }


def judge(
    data: Judged,
    candidate: TargetPolicy,
    bars: Sequence[Bar],
    rules: Rules,
    counted: Sequence[Diagnostic] = (),
) -> Judgement:
    """Judge the candidate against each bar. `counted` are checks made by the caller.

    A bar's policy whose probabilities of the logged actions equal the logged propensities counts as
    the logging policy.
    """
    evidence = Evidence([bar.name for bar in bars], rules)
    evidence.add(data, candidate, [bar.policy for bar in bars])
    return evidence.judged(rules, counted)


class Evidence:
    """The evidence for a candidate and its bars, collected block by block and judged at the end.

    It stores a few numbers per episode, in columns that `column` creates, and one per step for each
    weighted policy; everything else is sums, or one number per unit. Discount, margin and units of
    the rules have to be the same in `judged`, and for one-step episodes the range as well.
    """

    def __init__(
        self, bars: Sequence[str], rules: Rules, column: Callable[[], NumberColumn] = MemoryColumn
    ) -> None:
        self._range, self._gamma = rules.reward_range, rules.gamma
        self._column = column
        self._bars = [_BarDifferences(name, rules.margin, column) for name in bars]
        self._lost = [LostEpisodes(column) for _ in bars]
        self._propensities, self._repeats = Propensities(), Repeats()
        self._drift, self.contexts = Drift(len(bars), column), ContextDrift()
        self._action: Callable[[int], str] = str  # names an action
        self._weighed: dict[int, _Weighed] = {}  # 0 is the candidate, k bar k - 1
        self._scores: EarlierScores | None = None
        self._support: Support | None = None
        self._returns, self._earned = column(), column()
        self._steps = _StepSummary()
        self.earned = RewardEnds(rules.reward_range)  # by these steps, or by a log's in all
        self._one_step = self._discrete = True
        self._scored = True  # whether all blocks were scored by a reward model

    def add(
        self, data: Judged, candidate: TargetPolicy, policies: Sequence[TargetPolicy | None]
    ) -> None:
        """Add whole episodes, with the probabilities of the candidate and of each bar's policy."""
        if not data.lengths.size:
            return
        data = _clipped(data, self._range)
        self._steps.add(data)
        self.earned.add(data.rewards)
        self._one_step &= data.one_step
        self._discrete &= data.discrete
        by = data.by
        weights, scores = _weights(data, candidate), self._view(data, candidate, policies)
        self._weigh(0, "", data, candidate, weights, by)
        self._returns.append(data.returns)
        if self._range is None:
            self._earned.append(data.rewards)
        self._action = data.action
        self._inspect(data, candidate, policies)
        numbers = []
        for number, (bar, policy) in enumerate(zip(self._bars, policies, strict=True), 1):
            others = bar.weights(data, policy)
            if policy is not None:
                same = np.ones_like(weights) if others is None else others
                self._weigh(number, "live_", data, policy, same, by)
            view = None if scores is None else scores[number - 1]
            numbers.append(bar.add(data, weights, others, view, self._gamma, by))
            self._lost[number - 1].add(data, weights, others)
        if numbers:
            self._drift.add(numbers, data.times, data.units)

    def judged(self, rules: Rules, counted: Sequence[Diagnostic] = ()) -> Judgement:
        """The judgement by these rules; see `judge`."""
        in_range = self.earned.checks() if self._steps.episodes else []
        bars = _merged(self._bars) if self._steps.episodes else []
        if not bars or not all(one.passed for one in in_range):
            return combined([], [*counted, *in_range])
        comparisons, tails = [], []
        for bar in bars:
            found = bar.differences(self._steps, self._plan(rules.reward_range))
            found = replace(found, in_order=found.in_order and rules.in_order)
            compared = compare(
                found, bar=bar.name, error=rules.error, looks=rules.looks, unit=rules.unit
            )
            comparisons.append(compared)
            values = column_of(found.values)
            center = compared.difference
            squares = _apply(lambda block, c=center: (block - c) ** 2, values)
            threshold = MOST_OF_VARIANCE if compared.approximate else None
            what = f"squared deviation from the mean difference to {bar.name}"
            name = bar.check_name("heavy_tails")
            tails.append(self._with_cap(largest_share(name, squares, threshold, what)))
        approximate = any(one.approximate for one in comparisons)
        checks = [
            one
            for number, weighed in self._weighed.items()
            if number == 0 or (self._bars[number - 1] in bars and not self._bars[number - 1].logged)
            for one in self._checks(number, weighed, rules, approximate)
        ]
        checks += [self._propensities.check(), self._repeats.check(), *self.contexts.check()]
        for one, bar in zip(comparisons, bars, strict=True):
            checks += self._drift.checks(
                self._bars.index(bar),
                bar.check_name,
                better=one.verdict == BETTER,
                margin=one.margin,
                by=self._steps.mean_by,
            )
        checks += [
            lost.check(bar.check_name("lost_by_action"), bar.name, self._apart(bar), self._action)
            for bar, lost in zip(self._bars, self._lost, strict=True)
            if bar in bars
        ]
        widening = self._steps.widening()
        if rules.reward_range is not None and self.earned.times() >= MANY_TIMES:
            widening = self._lost_power(bars[0], rules)
        return combined(comparisons, [*counted, *in_range, *checks, *tails], widening)

    def _lost_power(self, bar: _BarDifferences, rules: Rules) -> str:
        """Why a range much wider than the rewards costs evidence, with an interval without that."""
        found = bar.differences(self._steps, self._plan(rules.reward_range))
        low, high = without_limits(found, rules.error, self.earned.times())
        return (
            f"the interval is wide because {self.earned.sentence()}: with a range as wide as these "
            f"it would be about {low:.4g} .. {high:.4g}; declare the range that rewards can have"
        )

    # results of a block

    def _inspect(
        self, data: Judged, candidate: TargetPolicy, policies: Sequence[TargetPolicy | None]
    ) -> None:
        """Whether these episodes are what they claim to be; by no range and no bar's rewards."""
        self._test_propensities(data, candidate)
        self.contexts.add(data.flat)
        timed = data.times is not None
        self._repeats.add(fingerprints(data), data.units, timed=timed, pass_prob=data.pass_prob)
        if data.taken is not None and candidate.probs is not None:
            known = [candidate, *(one for one in policies if one is not None)]
            self._see(data, data.taken, [one.probs for one in known if one.probs is not None])

    def _view(
        self, data: Judged, candidate: TargetPolicy, policies: Sequence[TargetPolicy | None]
    ) -> list[Scores] | None:
        """A model's scores of the episodes for each bar, if all are one step and Discrete.

        None if there are units and a range: units continue through the log, so that a model of
        earlier rows would have seen other episodes of the same unit, and the exact bound would not
        hold.
        """
        self._scored &= data.taken is not None and self._one_step
        if data.taken is None or not self._scored:
            return None
        known = [one.probs for one in (candidate, *policies) if one and one.probs is not None]
        actions = 0 if candidate.probs is None else candidate.probs.shape[1]
        clustered = data.units is not None and self._range is not None
        if not actions or clustered or actions * (data.flat.shape[1] + 1) ** 2 > MODEL_CELLS:
            self._scored = False
            return None
        self._scores = self._scores or EarlierScores(actions, self._range)
        q, (v, *rest) = self._scores.scored(data.flat, data.taken, data.rewards, known)
        of_bars = iter(rest)
        return [Scores(q, v, next(of_bars) if one else None) for one in policies]

    def _weigh(
        self,
        number: int,
        prefix: str,
        data: Judged,
        policy: TargetPolicy,
        weights: FloatArray,
        by: FloatArray,
    ) -> None:
        if number not in self._weighed:
            self._weighed[number] = _Weighed(prefix, self._column)
        self._weighed[number].add(data, _ratios(data, policy), weights, by)

    def _test_propensities(self, data: Judged, candidate: TargetPolicy) -> None:
        cells = data.cells
        if cells is None and data.taken is not None:
            actions = 0 if candidate.probs is None else candidate.probs.shape[1]
            size = np.zeros(max(actions, int(data.taken.max()) + 1))
            cells = ActionCells(data.taken[:, None], size, data.action)
        if cells is not None:
            units = None if data.units is None else np.repeat(data.units, data.lengths)
            tags = {
                name: np.repeat(np.array(values, object), data.lengths).tolist()
                for name, values in (data.tags or {}).items()
            }
            by = None if data.pass_prob is None else np.repeat(data.by, data.lengths)
            self._propensities.add(data.behaviour_logp, cells, units, tags, by)

    def _see(self, data: Judged, taken: IntArray, probs: Sequence[FloatArray]) -> None:
        if self._support is None:
            actions = probs[0].shape[1]
            self._support = Support(actions, len(probs), start=data.start, names=data.names)
        units = None if data.units is None else np.repeat(data.units, data.lengths)
        self._support.add(data.flat, taken, probs, units)

    # results

    def _with_cap(self, tails: Diagnostic) -> Diagnostic:
        """A failed check of heavy tails with the cap that the first tenth of the rewards gives."""
        if tails.passed:
            return tails
        cap = proposed_cap(first_of(self._earned, FIRST_SHARE))
        if cap is None:
            return tails
        way = f"--reward-cap auto takes {cap:g} from the first tenth of the log, which is then not"
        return replace(tails, sentence=f"{tails.sentence}, or judge capped rewards: {way} judged")

    def _plan(self, reward_range: tuple[float, float] | None) -> _Scaling:
        return _Scaling(
            one_step=self._one_step,
            scored=self._scored,
            reward_range=reward_range if self._discrete else None,
            largest=self._steps.largest_weight if self._discrete else math.inf,
            gamma=self._gamma,
        )

    def _apart(self, bar: _BarDifferences) -> tuple[float, float]:
        """Limits of a whole episode's weight for the candidate minus that for the bar."""
        lowest = self._steps.lowest_logp if self._discrete else -math.inf
        most = math.exp(min(-lowest * self._steps.longest, 2 * MOST_LOG_WEIGHT))
        return -1.0 if bar.logged else -most, most

    def _checks(
        self, number: int, weighed: _Weighed, rules: Rules, approximate: bool
    ) -> list[Diagnostic]:
        found = []
        if self._support is not None:
            order = [one for one in self._weighed if one <= number]
            found += self._support.checks(len(order) - 1)
        largest = self._steps.largest_weight if self._discrete else math.inf
        sampled = self._steps.mean_by, self._steps.most_by
        found += weighed.checks(rules, self._returns, largest, approximate, sampled)
        return [_named(one, weighed.prefix) for one in found] if weighed.prefix else found


def combined(
    comparisons: Sequence[Comparison], diagnostics: Sequence[Diagnostic], widening: str = ""
) -> Judgement:
    """Combine results to one verdict.

    A failed check, or no comparison, gives "cannot tell"; one worse comparison gives "worse".
    `widening` says why limits of a difference are wide; it becomes a reason if they prevent a
    verdict.
    """
    failed = [one for one in diagnostics if not one.passed]
    worse = [_difference_text(one) for one in comparisons if one.verdict == WORSE]
    verdict, reasons, missing = BETTER, [], None
    if failed or not comparisons:
        needed, missing = _needed(failed, comparisons, widening)
        failures = [f"{one.name}: {one.sentence}" for one in failed] or ["nothing to judge by"]
        verdict, reasons = CANNOT_TELL, [*failures, *needed]
    elif worse:
        verdict, reasons = WORSE, worse
    elif any(one.verdict == CANNOT_TELL for one in comparisons):
        verdict = CANNOT_TELL
        reasons, missing = _needed([], comparisons, widening)
    return Judgement(
        verdict=verdict,
        reasons=tuple(reasons),
        comparisons=tuple(comparisons),
        diagnostics=tuple(diagnostics),
        missing=missing,
    )


def _needed(
    failed: Sequence[Diagnostic], comparisons: Sequence[Comparison], widening: str
) -> tuple[list[str], int | None]:
    """(what the undecided differences need, the number of further episodes that would decide).

    That is the largest number of any check or difference; None if one of these is unknown. The
    number of a difference follows from its size and spread, which only the effective sample size
    may leave usable if it fails.
    """
    usable = all(
        one.name.removeprefix("live_") == "effective_sample_size" and one.value >= LEAST_ESS
        for one in failed
    )
    sure = [one for one in comparisons if usable or not one.approximate]
    undecided = [one for one in comparisons if one not in sure or one.verdict == CANNOT_TELL]
    if any(one.verdict == WORSE for one in sure):
        undecided = []
    numbers = [one.missing for one in failed]
    numbers += [one.missing if usable else None for one in undecided]
    known = [number for number in numbers if number is not None]
    needs = [_difference_text(one) for one in undecided] if usable else []
    if usable and widening and any(one.limited for one in undecided):
        needs.append(widening)
    if len(known) == len(numbers):
        if len(known) > 1:
            unit = comparisons[0].unit
            needs.append(f"in all about {max(known):,} more {unit}: the largest of these numbers")
        return needs, max(known, default=None)
    if known and not usable and undecided:
        bars = " and ".join(one.bar for one in undecided)
        needs.append(
            f"in all at least {max(known):,} more {undecided[0].unit}: how many the difference to "
            f"{bars} needs is not known before these checks pass; or use a canary"
        )
    return needs, None


def _difference_text(one: Comparison) -> str:
    low, high = one.interval
    where = "within" if low <= one.difference <= high else "outside its interval"
    text = f"the difference to {one.bar} is {one.difference:+.4g}, {where} {low:.4g} .. {high:.4g}"
    if one.margin:
        text += f", and has to be above the margin of {one.margin:+.4g}"
    if one.verdict == WORSE:
        return text
    if one.unknown:
        return f"{text}: how many more {one.unit} it needs is not known, because {one.unknown}"
    if one.missing is None:
        return f"{text}: more {one.unit} will hardly tell; use a canary"
    return f"{text}: about {one.missing:,} more {one.unit} would show whether it is real"


# --- the differences -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Scaling:
    """How differences become numbers with limits; depends on the whole log."""

    one_step: bool
    scored: bool
    reward_range: tuple[float, float] | None
    largest: float  # the largest importance weight of a step
    gamma: float

    @property
    def width(self) -> float:
        """Of the reward range."""
        low, high = self.reward_range or (-math.inf, math.inf)
        return high - low


class _BarDifferences:
    """One bar's differences: doubly robust while episodes are one step, and per decision."""

    def __init__(self, name: str, margin: Margin, column: Callable[[], NumberColumn]) -> None:
        self.name, self._margin = name, margin
        self.logged = True  # whether its weights are 1 on all episodes added
        self._known = False  # whether it has a policy
        self._robust, self._values, self._to_end, self._last, self._base = (
            UnitNumbers(column) for _ in range(5)
        )

    def check_name(self, name: str) -> str:
        """The name of a check of this bar."""
        return name if self.logged else f"live_{name}"

    def weights(self, data: Judged, policy: TargetPolicy | None) -> FloatArray | None:
        """The bar's weights (S,), None if they are 1: its policy made these episodes."""
        if policy is None:
            return None
        self._known = True
        if bool((np.abs(policy.logp - data.behaviour_logp) < SAME_LOGP).all()):
            return None
        self.logged = False
        return _weights(data, policy)

    def add(
        self,
        data: Judged,
        weights: FloatArray,
        others: FloatArray | None,
        scores: Scores | None,
        gamma: float,
        by: FloatArray,
    ) -> FloatArray:
        """Add n episodes; return the difference of each (n,)."""
        terms = per_decision_terms(data.rewards, weights, others, data.lengths, gamma)
        for numbers, term in zip((self._values, self._to_end, self._last), terms, strict=True):
            numbers.add(by * term, data.units)
        if self._margin.relative:
            base = weighted_returns(data.rewards, others, data.lengths, gamma)
            self._base.add(by * base, data.units)
        elif self._margin.size:
            self._base.add(by, data.units)
        if scores is None:
            return by * terms[0]
        robust = one_step_values(data.rewards, weights, others, scores)
        self._robust.add(by * robust, data.units)
        return by * robust

    def differences(self, steps: _StepSummary, plan: _Scaling) -> Differences:
        """The differences over all episodes, with limits.

        A lost episode counts as if it went on to the longest length with rewards of 0. Its weight
        is the expected weight of the steps that are missing, as later ratios have mean 1.

        An episode logged with probability p counts 1 / p times (Horvitz & Thompson 1952). The
        numbers are divided by the mean of 1 / p in the log, so that they have the sign of the
        difference, and nearly its size.
        """
        if plan.one_step and plan.scored:
            found = self._of_model(plan)
        elif plan.one_step:
            found = self._of_constant(plan)
        else:
            low, high = plan.reward_range or (0.0, 0.0)
            shortest = steps.shortest
            if not low <= 0 <= high:  # a step that is missing has no reward within the range
                shortest = min(shortest, steps.shortest_lost)
            found = bounded_per_decision(
                self._values.means(),
                (self._to_end.means(), self._last.means()),
                (shortest, steps.longest),
                gamma=plan.gamma,
                reward_range=plan.reward_range,
                largest_weight=plan.largest,
                against_log=self.logged,
            )
        found = replace(found, in_order=found.in_order and not self._values.several)
        if self._margin.size:
            found = self._beyond(found, plan, steps.longest)
        return found.scaled(1 / steps.mean_by, steps.most_by / steps.mean_by)

    def _beyond(self, found: Differences, plan: _Scaling, longest: int) -> Differences:
        """The differences less the margin."""
        base, share = self._base.means(), self._margin.size
        if not self._margin.relative:
            return found.beyond(share, base, (1.0, 1.0))
        ends = returns_range(
            plan.reward_range, longest, plan.gamma, 1.0 if self.logged else plan.largest
        )
        return found.beyond(math.copysign(share, share * mean_of(base)), base, ends)

    def _of_model(self, plan: _Scaling) -> Differences:
        values = self._robust.means()
        most = one_step_limit(plan.reward_range, plan.largest, known=self._known)
        return Differences("dr", values, values, -most, values, most, furthest=plan.width)

    def _of_constant(self, plan: _Scaling) -> Differences:
        """(w - w') (r - c): weighted rewards, minus the middle c of their range."""
        values = self._values.means()
        if plan.reward_range is not None:
            middle = sum(plan.reward_range) / 2
            apart = self._last.means()
            values = _apply(lambda earned, one: earned - middle * one, values, apart)
        most = one_step_limit(plan.reward_range, plan.largest, known=False)
        return Differences("ips", values, values, -most, values, most, furthest=plan.width)


class _StepSummary:
    """Results common to all bars: counts, and the ranges of lengths and propensities."""

    def __init__(self) -> None:
        self.episodes = 0
        self.shortest = self.shortest_lost = 2**62  # of whole episodes, of lost ones
        self.longest = 0
        self.by = self.most_by = 0.0
        self.lowest_logp = math.inf  # logged

    def add(self, data: Judged) -> None:
        self.episodes += data.lengths.size
        whole = data.lengths
        if data.lost is not None:
            whole, lost = data.lengths[~data.lost], data.lengths[data.lost]
            self.shortest_lost = min(self.shortest_lost, int(lost.min(initial=2**62)))
        self.shortest = min(self.shortest, int(whole.min(initial=self.shortest)))
        self.longest = max(self.longest, int(data.lengths.max()))
        by = data.by
        self.by, self.most_by = self.by + float(by.sum()), max(self.most_by, float(by.max()))
        self.lowest_logp = min(self.lowest_logp, float(data.behaviour_logp.min()))

    @property
    def mean_by(self) -> float:
        """The mean of 1 / pass_prob."""
        return self.by / self.episodes

    @property
    def largest_weight(self) -> float:
        """1 / the lowest logged propensity, which no step's ratio can exceed."""
        return math.exp(-self.lowest_logp)

    def widening(self) -> str:
        """Why limits are wide, and how to narrow them; "" if no propensity is low."""
        lowest = math.exp(self.lowest_logp)
        if not lowest < LOW_PROPENSITY:
            return ""
        return (
            f"the interval is wide because the lowest logged propensity is {lowest:.2g}: one step "
            f"with it may count for {1 / lowest:,.0f}, and with a reward range the interval allows "
            "for that. Judge without a range (--reward-range -inf inf; approximate), or by "
            "episodes with larger propensities (more exploration, --since, --until)"
        )


def _merged(bars: Sequence[_BarDifferences]) -> list[_BarDifferences]:
    """The bars, with only one of those that are the logging policy."""
    found: list[_BarDifferences] = []
    for bar in bars:
        if not (bar.logged and any(one.logged for one in found)):
            found.append(bar)
    return found


def _clipped(data: Judged, limits: tuple[float, float] | None) -> Judged:
    """The data with the default rewards of lost episodes clipped to the range."""
    if limits is None or data.lost is None:
        return data
    lost = np.repeat(data.lost, data.lengths)
    return replace(data, rewards=np.where(lost, np.clip(data.rewards, *limits), data.rewards))


def _ratios(data: Judged, policy: TargetPolicy) -> FloatArray:
    """(S,) the ratio of the policy to the logging policy at each step."""
    ratios: FloatArray = np.exp(np.minimum(policy.logp - data.behaviour_logp, MOST_LOG_WEIGHT))
    return ratios


def _weights(data: Judged, policy: TargetPolicy) -> FloatArray:
    """(S,) products of the ratios up to and including each step."""
    if data.one_step:
        return _ratios(data, policy)
    sums = running_sums(policy.logp - data.behaviour_logp, data.lengths)
    weights: FloatArray = np.exp(np.minimum(sums, MOST_LOG_WEIGHT))
    return weights


# --- the checks ------------------------------------------------------------------------------


class _Weighed:
    """The weights of the candidate, or of a bar if there is a `prefix`."""

    def __init__(self, prefix: str, column: Callable[[], NumberColumn]) -> None:
        self.prefix = prefix
        self._whole = column()
        self._ratios, self._of_units = UnitNumbers(column), UnitNumbers(column)

    def add(self, data: Judged, ratios: FloatArray, weights: FloatArray, by: FloatArray) -> None:
        units = None if data.units is None else np.repeat(data.units, data.lengths)
        of_steps = np.repeat(by, data.lengths)
        self._ratios.add(of_steps * ratios - (of_steps - 1), units)
        last = by * weights[data.ends]
        self._whole.append(last)
        if data.units is not None:
            self._of_units.add(last, data.units)

    def checks(
        self,
        rules: Rules,
        returns: NumberColumn,
        largest: float,
        approximate: bool,
        sampled: tuple[float, float],
    ) -> list[Diagnostic]:
        of_units = self._of_units.sums() if self._of_units.by_unit else self._whole
        threshold = LEAST_EVENTS if approximate else None
        events = reward_events(
            returns,
            self._whole,
            threshold=threshold,
            unit="episodes" if self._of_units.by_unit else rules.unit,
        )
        if self._of_units.by_unit:
            events = replace(events, missing=None)  # it counts episodes, not units
        return [
            mean_weight(self._ratios.means(), largest, sampled),
            largest_share("largest_weight", of_units, MOST_OF_WEIGHT, "importance weight"),
            effective_sample_size(of_units, rules.min_ess, rules.unit),
            events,
        ]


def _named(one: Diagnostic, prefix: str) -> Diagnostic:
    words = one.sentence.replace("the candidate's", "its").replace("the candidate", "it")
    return replace(one, name=prefix + one.name, sentence=f"live version: {words}")
