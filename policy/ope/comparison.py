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
from scipy.special import ndtri, stdtrit

from policy.ope.betting import LARGEST_STAKE, betting_interval
from policy.ope.columns import Numbers, column_of, moments
from policy.ope.differences import Differences

__all__ = [
    "BETTER",
    "CANNOT_TELL",
    "FIRST_LOOK",
    "WORSE",
    "Bound",
    "Comparison",
    "Verdict",
    "compare",
    "skewed_t_interval",
]

Verdict: TypeAlias = Literal["better", "worse", "cannot tell"]
Bound: TypeAlias = Literal["betting", "sequence", "student"]

BETTER: Verdict = "better"
WORSE: Verdict = "worse"
CANNOT_TELL: Verdict = "cannot tell"

FIRST_LOOK = 0.8
"""The share of the error that the first look at a candidate uses. Later looks at more episodes use
the rest, by one confidence sequence, so that the total error holds."""
MOST_MISSING = 10**9
"""Episodes: with more than these, more data is no way to a verdict, and no number is reported."""
POWER = 0.8
"""The probability of a verdict with the number of episodes that is reported as missing."""


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
    # approximate number of further episodes that would show a difference of this size
    missing: int | None

    @property
    def approximate(self) -> bool:
        """Whether the interval relies on a normal limit."""
        return self.bound == "student"

    @property
    def limited(self) -> bool:
        """Whether the limits of one difference, rather than the spread, make the interval wide.

        That is the case if it is more than twice as wide as the sqrt(2 log(1 / error)) deviations
        that the spread alone requires.
        """
        if self.limits is None:
            return False
        low, high = self.interval
        reach = self.difference - low if self.difference > 0 else high - self.difference
        return reach > 2 * math.sqrt(2 * math.log(1 / self.error)) * self.stderr

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
    """Judge by an interval, each end of which fails with a probability of at most `error`.

    `looks`: how often this candidate was judged before, on fewer episodes of the same log. If more
    episodes change the numbers or their order, as with units that grow, no sequence holds, and each
    look gets a share of the error.
    """
    values = column_of(differences.values)
    n, (mean, variance, _) = values.size, moments(values)
    limited = math.isfinite(differences.least) or math.isfinite(differences.most)
    sequence = limited and looks > 0 and differences.in_order
    bound: Bound = ("sequence" if sequence else "betting") if limited else "student"
    spent = error * FIRST_LOOK
    if looks:
        spent = error * (1 - FIRST_LOOK) * (1.0 if sequence else 0.5**looks)
    if limited:
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
    else:
        low, high = skewed_t_interval(values, spent)
    stderr = math.sqrt(variance / (n - 1)) if n > 1 else math.inf
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
        limits=(differences.least, differences.most) if limited else None,
        missing=None,
    )
    return replace(found, missing=_missing(found)) if found.verdict == CANNOT_TELL else found


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


def _missing(found: Comparison) -> int | None:
    """The approximate number of further episodes that would show a difference of this size.

    None if there is no difference yet, no bound on its side, or MOST_MISSING would not be enough.
    """
    size = abs(found.difference)
    if not size > 0 or not math.isfinite(found.stderr):
        return None
    variance = found.n * found.stderr**2
    needed = math.log(1 / found.error)
    normal = found.bound == "student"
    deviations = -float(ndtri(found.error)) if normal else math.sqrt(2 * needed)
    episodes = ((deviations + float(ndtri(POWER))) / size) ** 2 * variance
    if found.limits is not None:
        furthest = -found.limits[0] if found.difference > 0 else found.limits[1]
        episodes = max(episodes, needed * furthest / (LARGEST_STAKE * size))
    if not episodes < MOST_MISSING:
        return None
    more = max(1.0, episodes - found.n)
    digits = 10.0 ** max(0, math.floor(math.log10(more)) - 1)
    return int(math.ceil(more / digits) * digits)


def _plain(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None
