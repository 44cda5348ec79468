"""Is a policy better than another, worse, or can these episodes not tell: `compare`.

    found = compare(differences, bar="live version 3", error=0.025)
    found.verdict, found.interval, found.missing

With limits on one or both sides the interval is a betting bound (policy.ope.betting), which holds
at every sample size. Otherwise it is Student's t with Hall's correction for skewness, and the
verdict is marked approximate; there is no verdict in cases in which this is known to fail
(policy.ope.diagnostics).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit

from policy.ope.betting import POWER, betting_interval, first_time, numbers_needed
from policy.ope.columns import NumberColumn, Numbers, column_of, combined, ends, mean_of, moments
from policy.ope.differences import Differences
from storage.wording import rounded_up

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
Verdict: TypeAlias = Literal["better", "worse", "cannot tell"]
Bound: TypeAlias = Literal["betting", "sequence", "student"]

BETTER: Verdict = "better"
WORSE: Verdict = "worse"
CANNOT_TELL: Verdict = "cannot tell"

FIRST_LOOK = 0.8
"""The share of the error that the first look at a candidate uses; later looks share the rest."""
MOST_MISSING = 10**9
"""Episodes: with more than these, more data is no way to a verdict, and no number is reported."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A candidate compared with one bar. Values are returns per episode, candidate minus bar."""

    bar: str  # "live version 3", "the logging policy", "0.8"
    verdict: Verdict
    difference: float
    stderr: float
    interval: tuple[float, float]
    error: float  # the error probability of one end of the interval
    bound: Bound
    method: str  # of the differences: dr, ips, pdis
    n: int  # episodes, or units of them
    unit: str  # what `n` counts: "episodes", "values of user", "held-out episodes"
    limits: tuple[float, float] | None  # of one episode's difference, if known
    # approximate number of further episodes with which the next look would show this difference
    missing: int | None
    unknown: str  # why `missing` is unknown; "" if it is known, not needed, or beyond MOST_MISSING
    limited: bool  # whether the limits, rather than the spread, make the interval wide
    margin: float = 0.0  # what the difference has to exceed; a share of the bar, as estimated

    @property
    def approximate(self) -> bool:
        """Whether the interval relies on a normal limit."""
        return self.bound == "student"

    def to_dict(self) -> dict[str, Any]:
        """Plain types for strict JSON; a number that is not finite becomes None."""
        return {
            "bar": self.bar,
            "verdict": self.verdict,
            "approximate": self.approximate,
            "difference": _plain(self.difference),
            "stderr": _plain(self.stderr),
            "interval": [_plain(end) for end in self.interval],
            "error": self.error,
            "bound": self.bound,
            "method": self.method,
            "n": self.n,
            "unit": self.unit,
            "limits": self.limits and [_plain(end) for end in self.limits],
            "margin": self.margin,
            "missing": self.missing,
        }


def compare(
    differences: Differences,
    *,
    bar: str,
    error: float,
    looks: int = 0,
    unit: str = "episodes",
) -> Comparison:
    """Judge differences that are less the margin, if any; see `_compared`."""
    found = _compared(differences, bar=bar, error=error, looks=looks, unit=unit)
    if not (margin := differences.margin):
        return found
    low, high = found.interval
    interval = (low + margin, high + margin)
    return replace(found, difference=found.difference + margin, interval=interval, margin=margin)


def _compared(
    differences: Differences, *, bar: str, error: float, looks: int, unit: str
) -> Comparison:
    """Judge by an interval, each end of which fails with a probability of at most `error`.

    `looks`: how often this candidate was judged before, on fewer episodes of the same log. If more
    episodes change the numbers or their order, as with units that grow, no sequence holds, and each
    look gets a share of the error.
    """
    values = column_of(differences.values)
    n, (mean, variance, _) = values.size, moments(values)
    bounded = math.isfinite(differences.least) or math.isfinite(differences.most)
    continued = bounded and differences.in_order  # whether later looks share one sequence
    sequence = continued and looks > 0
    bound: Bound = ("sequence" if sequence else "betting") if bounded else "student"
    spent, later = (_spent(error, look, continued) for look in (looks, looks + 1))
    stderr = math.sqrt(variance / (n - 1)) if n > 1 else math.inf
    limited = False
    if bounded:
        low = betting_interval(
            differences.lower,
            limits=(differences.least, math.inf),
            error=spent,
            sequence=sequence,
        )[0]
        high = betting_interval(
            differences.upper,
            limits=(-math.inf, differences.most),
            error=spent,
            sequence=sequence,
        )[1]
        # more than twice the sqrt(2 log(1 / error)) deviations that the spread alone requires
        reach = mean - low if mean > 0 else high - mean
        limited = reach > 2 * math.sqrt(2 * math.log(1 / spent)) * stderr
        low, high = max(low, -differences.furthest), min(high, differences.furthest)
    else:
        low, high = skewed_t_interval(values, spent)
    found = Comparison(
        bar=bar,
        verdict=BETTER if low > 0 else WORSE if high < 0 else CANNOT_TELL,
        difference=mean,
        stderr=stderr,
        interval=(low, high),
        error=spent,
        bound=bound,
        method=differences.method,
        n=n,
        unit=unit,
        limits=(differences.least, differences.most) if bounded else None,
        missing=None,
        unknown="",
        limited=limited,
    )
    if found.verdict != CANNOT_TELL:
        return found
    unknown = _why_unknown(found, differences)
    if unknown:
        return replace(found, unknown=unknown)
    return replace(found, missing=_missing(found, differences, spent=later, sequence=continued))


def without_limits(differences: Differences, error: float, times: float) -> tuple[float, float]:
    """The interval of a first look if limits were `times` narrower: for information only.

    They are not known to hold, so they are at least as wide as the numbers.
    """
    lower, upper = column_of(differences.lower), column_of(differences.upper)
    spent = _spent(error, 0, differences.in_order)
    least = min(differences.least / times, ends(lower)[0] * (1 + 1e-9) - 1e-12)
    most = max(differences.most / times, ends(upper)[1] * (1 + 1e-9) + 1e-12)
    low = betting_interval(lower, limits=(least, math.inf), error=spent)[0]
    high = betting_interval(upper, limits=(-math.inf, most), error=spent)[1]
    return low + differences.margin, high + differences.margin


def _spent(error: float, looks: int, continued: bool) -> float:
    """The error that a look spends after `looks` others.

    The n-th later look gets 2^-n of what the first one left; a confidence sequence takes the place
    of the first such part, however many looks it serves. So all looks together keep the error, also
    if some are of one kind and some of the other: a sequence ends with the first look that does not
    continue it.
    """
    if not looks:
        return error * FIRST_LOOK
    return error * (1 - FIRST_LOOK) * 0.5 ** (1 if continued else looks)


def skewed_t_interval(values: Numbers, error: float) -> tuple[float, float]:
    """Student's t for the mean, corrected for skewness; each end fails with about `error`.

    Hall 1992, On the removal of skewness by transformation, section 2: with a = skewness / sqrt(n),
    g(t) = t + a t^2 / 3 + a^2 t^3 / 27 + a / 6 is close to normal, and is inverted here. Unbounded
    for fewer than two numbers.
    """
    n = values.size
    if n < 2:
        return -math.inf, math.inf
    center, variance, third = moments(column_of(values))
    if variance == 0:
        return center, center
    stderr = math.sqrt(variance / (n - 1))
    a = third / variance**1.5 / math.sqrt(n)
    quantile = float(stdtrit(n - 1, 1 - error))
    return (
        center - stderr * _inverse_hall(quantile, a),
        center - stderr * _inverse_hall(-quantile, a),
    )


def _inverse_hall(x: float, a: float) -> float:
    if abs(a) < 1e-6:
        return x
    return 3 / a * (float(np.cbrt(1 + a * (x - a / 6))) - 1)


def _why_unknown(found: Comparison, differences: Differences) -> str:
    """Why these numbers do not say how many further episodes are needed; "" if they do."""
    if found.n < 2:
        return "one number shows no spread"
    if found.difference == 0:
        return "no difference is to be seen"
    if abs(found.difference) > differences.furthest:
        return "the reward range excludes this value"
    low, high = found.interval
    if not low <= found.difference <= high:
        return "the interval excludes this value"
    if not mean_of(_deciding(found, differences)[0]) > 0:
        return "the adjusted rewards that the bound uses do not show it yet"
    return ""


def _deciding(found: Comparison, differences: Differences) -> tuple[NumberColumn, float]:
    """(the numbers whose mean the next look has to show to be above 0, their lower limit)."""
    if found.difference < 0:
        return combined(np.negative, column_of(differences.upper)), -differences.most
    return column_of(differences.lower), differences.least


def _missing(
    found: Comparison, differences: Differences, *, spent: float, sequence: bool
) -> int | None:
    """About how many further episodes show a difference of this size, with the probability POWER.

    `spent` is the error of the look at them, `sequence` its kind of bound. None if there is no
    bound on its side, or MOST_MISSING would not be enough.
    """
    n = found.n
    if found.limits is None:
        size = abs(found.difference)

        def enough(times: FloatArray) -> BoolArray:
            deviations = stdtrit(times, 1 - spent) + float(ndtri(POWER))
            is_enough: BoolArray = deviations * found.stderr * math.sqrt(n) <= size * np.sqrt(times)
            return is_enough

        episodes = first_time(enough)
    else:
        values, least = _deciding(found, differences)
        sizes, rates = _two_sizes(values)
        episodes = numbers_needed(sizes, rates, least=least, error=spent, sequence=sequence)
    return rounded_up(max(1.0, episodes - n)) if episodes < MOST_MISSING else None


def _two_sizes(values: NumberColumn) -> tuple[tuple[float, float], tuple[float, float]]:
    """Two sizes and their probabilities, with the values' mean, variance and skewness.

    They are the nodes and weights of a Gauss quadrature, so no size is outside the values' range.
    """
    mean, variance, third = moments(values)
    deviation = math.sqrt(variance)
    half = third / variance / deviation / 2 if variance > 0 else 0.0
    root = math.hypot(1.0, half)
    low, high = (mean + deviation * (half + x * root) for x in (-1, 1))
    return (low, high), ((1 + half / root) / 2, (1 - half / root) / 2)


def _plain(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None
