"""Comparing two policies that acted at the same time: is the canary better than the live version?

    found = compare_arms(returns, in_canary, failed, share=0.1, limits=(0.0, 1.0), error=0.05)
    found.verdict, found.returns.interval, found.failures.interval, found.mismatch

Each episode was assigned at random, with a known share, so no weights and no model are needed:
episodes are compared as they were assigned, whichever version acted. All bounds hold at every look.
Pure: arrays of n episodes, in the order in which they started.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from policy.ope.betting import POWER, betting_interval, first_time, numbers_needed
from policy.ope.comparison import BETTER, CANNOT_TELL, WORSE, Verdict
from policy.ope.diagnostics import rewards_in_range
from policy.ope.margins import Margin
from storage.wording import counted, rounded_up

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

MISMATCH = math.log(1000)
"""The log evidence against the share at which a comparison is refused: a correct split reaches it
at any look with a probability of 1 / 1000 (Ville 1939)."""
LACKING = 0.05
"""A verdict that losses would explain is refused if an arm has fewer episodes than a correct split
has with this probability."""
FEWEST = 100
"""The number of episodes in each arm that a verdict by a normal limit requires."""
LARGEST_RETURN = 1e140
"""Larger ones cannot be compared: their squares, and sums of these, overflow."""
MOST_NEEDED = 1e13
"""The largest number of episodes that is named as needed."""
NO_MARGIN = Margin()
_PRIOR = 100.0
_TUNED_FOR = 10_000


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The canary's mean minus the live version's, with an interval that holds at every look."""

    canary: float
    live: float
    difference: float
    interval: tuple[float, float]
    bound: str  # "betting", or "normal": approximate
    margin: float = 0.0  # what the difference has to exceed; a share of the live mean, as measured

    def to_dict(self) -> dict[str, Any]:
        low, high = (end if math.isfinite(end) else None for end in self.interval)
        return {**vars(self), "interval": [low, high]}


@dataclass(frozen=True, kw_only=True)
class ArmsComparison:
    """The comparison of both arms.

    `mismatch` describes a split that does not fit the share; then nothing is judged.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    n: tuple[int, int]  # episodes of the canary, of the live version
    share: float
    error: float
    returns: Difference | None
    # of the share of abandoned and broken episodes, which are judged separately
    failures: Difference | None
    mismatch: str | None
    # approximate number of further episodes that would show a difference of this size
    missing: int | None
    note: str = ""  # what could explain a verdict although the arms are equal

    @property
    def approximate(self) -> bool:
        return self.returns is not None and self.returns.bound != "betting"

    def to_dict(self) -> dict[str, Any]:
        """Plain types for strict JSON."""
        return {
            "verdict": self.verdict,
            "approximate": self.approximate,
            "reasons": list(self.reasons),
            "episodes": sum(self.n),
            "n": {"canary": self.n[0], "live": self.n[1]},
            "share": self.share,
            "error": self.error,
            "returns": self.returns and self.returns.to_dict(),
            "failures": self.failures and self.failures.to_dict(),
            "mismatch": self.mismatch,
            "missing": self.missing,
            "note": self.note,
        }


def compare_arms(
    returns: FloatArray,
    in_canary: BoolArray,
    failed: BoolArray,
    *,
    share: float,
    limits: tuple[float, float] | None,
    error: float = 0.05,
    margin: Margin = NO_MARGIN,
    started: Mapping[str, tuple[int, int]] | None = None,
) -> ArmsComparison:
    """Judge by returns (n,) and by failed episodes (n,) bool; `in_canary` (n,) as assigned.

    `limits` of a return must not come from the data. With them a betting bound decides, otherwise a
    normal limit (approximate). A canary that is equal is called better or worse with a probability
    <= `error`: each end of each interval fails with at most a third of it. If a return is outside
    of the limits, or beyond LARGEST_RETURN, only failures are compared. Returns have a `margin`.
    `started`: source -> (the canary's, all) episodes, also those too young to be compared.
    """
    n, k = len(returns), int(in_canary.sum())
    known: dict[str, Any] = {"n": (k, n - k), "share": share, "error": error}
    splits = _splits({"": (k, n)} if started is None else started)
    reason = _mismatch(splits, share)
    if reason is not None:
        nothing: dict[str, Any] = {"returns": None, "failures": None, "missing": None}
        return ArmsComparison(
            verdict=CANNOT_TELL, reasons=(reason,), mismatch=reason, **nothing, **known
        )
    if not 0 < k < n:
        reason = (
            f"{counted(k, 'episode')} of the canary and {n - k:,} of the live version are "
            "compared: more of both"
        )
        nothing = {"returns": None, "failures": None, "missing": None, "mismatch": None}
        return ArmsComparison(verdict=CANNOT_TELL, reasons=(reason,), **nothing, **known)
    end = error / 3
    problem = _why_not_compared(returns, limits)
    earned = None if problem else _difference(returns, in_canary, share, limits, end, margin)
    failures = _difference(failed.astype(np.float64), in_canary, share, (0.0, 1.0), end)
    reasons: list[str] = []
    verdict = CANNOT_TELL
    few = limits is None and min(k, n - k) < FEWEST
    if failures.interval[0] > 0:
        verdict = WORSE
        reasons.append(
            f"{failures.canary:.2%} of the canary's episodes are abandoned or broken, "
            f"{failures.live:.2%} of the others"
        )
    elif earned is None:
        reasons.append(problem)
    elif few:
        reasons.append(f"expected {FEWEST} episodes in each arm, got {k} and {n - k}")
    elif earned.interval[1] < earned.margin:
        verdict = WORSE
    elif earned.interval[0] > earned.margin:
        verdict = BETTER
    note = ""
    if earned is not None and verdict != CANNOT_TELL and not reasons:
        note = _fewer(returns, in_canary, share, limits, end, margin, verdict == BETTER)
    missing = None
    if note and _lacks(splits, share if verdict == BETTER else 1 - share, verdict == BETTER):
        reasons, verdict, note = [note], CANNOT_TELL, ""
    elif verdict == CANNOT_TELL and earned is not None:
        apart = abs(earned.difference - earned.margin)
        fill = max((FEWEST - k) / share, (FEWEST - (n - k)) / (1 - share)) if few else 1
        missing = _missing(returns, apart, share, limits, end, fill)
        reasons.append(_missing_text(missing, apart, earned.margin))
    return ArmsComparison(
        verdict=verdict,
        reasons=tuple(reasons),
        returns=earned,
        failures=failures,
        mismatch=None,
        missing=missing,
        note=note,
        **known,
    )


def _splits(started: Mapping[str, tuple[int, int]]) -> list[tuple[str, int, int]]:
    """(where, the canary's, all) episodes: of all sources, and of each if there are several.

    Each source is independent evidence, so a loss in one of them is seen sooner than in the sum.
    """
    canary, n = (sum(one[end] for one in started.values()) for end in (0, 1))
    splits = [("", canary, n)]
    if len(started) > 1:
        splits += [(f" from {source}", own, of) for source, (own, of) in started.items()]
    return splits


def _mismatch(splits: Sequence[tuple[str, int, int]], share: float) -> str | None:
    """Why the arms of all episodes, or of one source, do not have the share; None if they may.

    All tests together fail for a correct split with a probability of 1 / 1000 at any look.
    """
    for where, canary, n in splits:
        if log_evidence_of_mismatch(canary, n, share) >= MISMATCH + math.log(len(splits)):
            return (
                f"the canary has {canary:,} of {counted(n, 'episode')}{where}, which is not the "
                f"share of {share:.3g}: episodes of one arm are lost or miscounted, so the arms "
                "cannot be compared"
            )
    return None


def _lacks(splits: Sequence[tuple[str, int, int]], share: float, canary: bool) -> bool:
    """Whether the canary, or the live version, with this share has too few episodes somewhere.

    A correct split has too few with a probability of at most `LACKING`, at one look: too often to
    refuse every comparison, but not those whose verdict losses would change.
    """
    furthest = -float(ndtri(LACKING / len(splits)))
    for _, own, n in splits:
        short = share * n - (own if canary else n - own)
        if short > furthest * math.sqrt(n * share * (1 - share)):
            return True
    return False


def _missing(
    returns: FloatArray,
    apart: float,
    share: float,
    limits: tuple[float, float] | None,
    error: float,
    fill: float,
) -> int | None:
    """About how many further episodes, at least `fill`, show the difference `apart`.

    None if there is none to show.
    """
    spread = float(returns.std())
    if not (apart > 0 and spread > 0):
        return None
    width = None if limits is None else limits[1] - limits[0]
    more = episodes_needed(spread, apart, share, error, width=width) - len(returns)
    return rounded_up(max(more, fill))


def _missing_text(missing: int | None, apart: float, margin: float) -> str:
    if missing is None:
        return "no difference in returns is to be seen yet: more episodes"
    to = f" to the margin of {margin:.3g}" if margin else ""
    return (
        f"about {counted(missing, 'more episode')}, of both versions together, would show whether "
        f"the difference of {apart:.3g}{to} is real"
    )


def _why_not_compared(returns: FloatArray, limits: tuple[float, float] | None) -> str:
    """Why returns (n,) cannot be compared; "" if they can."""
    low, high = limits or (-LARGEST_RETURN, LARGEST_RETURN)
    outside = int((~((returns >= low) & (returns <= high))).sum())  # also NaN, as of inf - inf
    if not outside:
        return ""
    if limits is None:
        return (
            f"{counted(outside, 'return')} beyond {LARGEST_RETURN:g}, whose squares overflow: "
            "start a new comparison, with another share"
        )
    ends = float(returns.min()), float(returns.max())
    return rewards_in_range(outside, ends, limits, "return").sentence


def log_evidence_of_mismatch(canary: int, n: int, share: float) -> float:
    """The log of the evidence that the canary's share of n episodes is not `share`.

    A Beta mixture over other shares against the binomial: a martingale if the share is right, so it
    may be computed after every episode. Lindon & Malek 2022, Anytime-valid inference for
    multinomial count data, section 3, for two counts.
    """
    a, b = _PRIOR * share, _PRIOR * (1 - share)

    def log_beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    likelihood = canary * math.log(share) + (n - canary) * math.log1p(-share)
    return log_beta(a + canary, b + n - canary) - log_beta(a, b) - likelihood


def assignment_differences(values: FloatArray, in_canary: BoolArray, share: float) -> FloatArray:
    """(n - 1,) numbers whose mean is the difference: (y - m) (a / p - (1 - a) / (1 - p)).

    m is the mean of the earlier values, which removes what both arms have in common; the factor's
    mean is 0 for any m. The first value only serves as an m. Waudby-Smith, Wu, Ramdas,
    Karampatziakis & Mineiro 2024, Anytime-valid off-policy inference for contextual bandits,
    section 3, with a constant propensity.
    """
    before = np.cumsum(values)[:-1] / np.arange(1, len(values))
    factors = np.where(in_canary, 1 / share, -1 / (1 - share))
    apart: FloatArray = (values[1:] - before) * factors[1:]
    return apart


def _difference(
    values: FloatArray,
    in_canary: BoolArray,
    share: float,
    limits: tuple[float, float] | None,
    error: float,
    margin: Margin = NO_MARGIN,
) -> Difference:
    means = float(values[in_canary].mean()), float(values[~in_canary].mean())
    apart = assignment_differences(values, in_canary, share)
    asked, low, high = _margins(values[1:], in_canary[1:], share, limits, margin, means[1])
    apart = apart - asked
    by = float(asked.mean()) if margin.relative else margin.size
    if limits is not None:
        furthest = (limits[1] - limits[0]) / min(share, 1 - share)
        ends = (-furthest - high, furthest - low)
        interval = betting_interval(apart, limits=ends, error=error, sequence=True)
    else:
        radius = _radius(len(apart), float(apart.std()), error)
        middle = float(apart.mean())
        interval = (middle - radius, middle + radius)
    return Difference(
        canary=means[0],
        live=means[1],
        difference=means[0] - means[1],
        interval=(interval[0] + by, interval[1] + by),
        bound="normal" if limits is None else "betting",
        margin=by,
    )


def _fewer(
    returns: FloatArray,
    in_canary: BoolArray,
    share: float,
    limits: tuple[float, float] | None,
    error: float,
    margin: Margin,
    better: bool,
) -> str:
    """A note if the arm with the higher mean may only lack its worst episodes; "" if it does not.

    Episodes that are never logged raise the mean of their arm if they are its failures, long before
    its number contradicts the share. So an arm with fewer episodes than its share has to have
    earned more in total, above the lowest return: (y - low) (a / p - (1 - a) / (1 - p)), to which
    lost episodes with that return add nothing (Horvitz & Thompson 1952).
    """
    n, k = len(returns), int(in_canary.sum())
    name, own, of = ("canary", k, share) if better else ("live version", n - k, 1 - share)
    if own >= of * n:
        return ""
    low = float(returns.min()) if limits is None else limits[0]
    factors = np.where(in_canary, 1 / share, -1 / (1 - share))
    live = float(returns[~in_canary].mean())
    asked, least, most = _margins(returns, in_canary, share, limits, margin, live)
    total = (returns - low) * factors - asked
    if limits is None:
        radius = _radius(n, float(total.std()), error)
        interval = (float(total.mean()) - radius, float(total.mean()) + radius)
    else:
        width = limits[1] - limits[0]
        ends = (-width / (1 - share) - most, width / share - least)
        interval = betting_interval(total, limits=ends, error=error, sequence=True)
    if (interval[0] > 0) if better else (interval[1] < 0):
        return ""
    return (
        f"the {name}'s mean is higher, but it has {own:,} of {counted(n, 'episode')}, fewer than "
        f"its share of {of:.3g}, and has not surely earned more in total: failures that were never "
        "logged would explain it; find out whether each episode is logged, or wait for more"
    )


def _margins(
    values: FloatArray,
    in_canary: BoolArray,
    share: float,
    limits: tuple[float, float] | None,
    margin: Margin,
    live: float,
) -> tuple[FloatArray, float, float]:
    """((n,) numbers whose mean is the margin, their limits); a constant unless it is relative.

    A share of the live version's mean is y (1 - a) / (1 - p) times the share; `live` has its sign.
    """
    if not margin.relative:
        return np.full(len(values), margin.size), margin.size, margin.size
    factor = math.copysign(margin.size, margin.size * live) / (1 - share)
    earned = factor * np.where(in_canary, 0.0, values)
    if limits is None:
        return earned, -math.inf, math.inf
    low, high = sorted((factor * min(limits[0], 0.0), factor * max(limits[1], 0.0)))
    return earned, low, high


def _radius(n: float, deviation: float, error: float) -> float:
    """Half the width of an asymptotic confidence sequence; each end fails with `error`.

    Waudby-Smith, Arbour, Sinha, Kennedy & Ramdas 2024, Time-uniform central limit theory and
    asymptotic confidence sequences, theorem 2.2, tuned to be narrow at 10,000 episodes.
    """
    alpha = 2 * error
    rho2 = (-2 * math.log(alpha) + math.log(-2 * math.log(alpha)) + 1) / _TUNED_FOR
    inside = n * rho2 + 1
    return deviation * math.sqrt(2 * inside / (n * n * rho2) * math.log(math.sqrt(inside) / alpha))


def episodes_needed(
    deviation: float, effect: float, share: float, error: float, *, width: float | None
) -> int:
    """The approximate number of episodes, of both arms, that show `effect` with power 0.8.

    `deviation`: standard deviation of a return; `width`: the range of returns, None if unknown.
    With a width the returns are assumed to be rare events, whose early bets cost most, and the
    effect to be a gain; a loss, in which fewer events differ, needs fewer. The gain is of the
    canary or of an arm with the other share, whichever needs more episodes. So the number is the
    same for `share` and 1 - `share`. In 60 simulated logs per case (shares .05 to .95) the power
    was .8 to 1. Rounded up to two digits.
    """
    if width is not None:
        needs = [_bets(deviation, effect, one, error, width) for one in (share, 1 - share)]
        return rounded_up(min(max(needs), MOST_NEEDED))
    apart = deviation / math.sqrt(share * (1 - share))

    def enough(times: FloatArray) -> BoolArray:
        radii = np.array([_radius(float(n), apart, error) for n in times])
        is_enough: BoolArray = radii + float(ndtri(POWER)) * apart / np.sqrt(times) <= effect
        return is_enough

    return rounded_up(min(first_time(enough), MOST_NEEDED))


def _bets(deviation: float, gain: float, share: float, error: float, width: float) -> float:
    """How many episodes bets on rare events of one size need to show this gain in their mean.

    An event counts as size / share in the canary. Its rate there is higher by gain / size, and the
    size is chosen so that the rate at most doubles.
    """
    size = min(width, deviation**2 / gain)
    rate = (deviation / size) ** 2
    return numbers_needed(
        (size / share, -size / (1 - share)),
        (share * (rate + gain / size), (1 - share) * rate),
        least=-width / min(share, 1 - share),
        error=error,
        sequence=True,
    )
