"""Bounds on a mean that hold at every sample size, for numbers whose range is known: betting.

    low, high = betting_interval(differences, limits=(-5.0, 5.0), error=0.025)

A gambler who bets that the mean is above m can expect no profit if it is m: his wealth is a
non-negative martingale, and exceeds 1 / error with a probability of at most `error` (Ville 1939).
So every m at which it does is out of the interval. Waudby-Smith & Ramdas 2024, Estimating means of
bounded random variables by betting, theorem 3; Karampatziakis, Mineiro & Ramdas 2021, Off-policy
confidence sequences, section 4, for weighted rewards.

The bound needs each number's range, from outside of the data: an observed maximum voids it. It does
not need a variance, many events, or a normal limit. The wealth falls as m grows, so that the bound
is a root, found by bracketing; a grid of candidates for m would miss it where its step is wide.
Pure: the bets depend on the numbers before them alone, in the order given. Numbers may come as a
column (policy.ope.columns), which is read block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq

from policy.ope.columns import NumberColumn, Numbers, column_of, combined, ends, mean_of

__all__ = ["betting_interval", "wealth_against"]

FloatArray = npt.NDArray[np.float64]

LARGEST_STAKE = 0.75
"""Of the gambler's wealth, that the worst number may cost him; Waudby-Smith & Ramdas take 1/2 or
3/4."""
FIRST_VARIANCE = 0.01
"""Of the square of the range's half: the variance that is assumed before there are numbers."""


def betting_interval(
    values: Numbers,
    *,
    limits: tuple[float, float],
    error: float,
    sequence: bool = False,
) -> tuple[float, float]:
    """(low, high) for the mean of `values` (n,); each end fails with a probability <= `error`.

    `limits` hold for every number that might have come, also for those that did not; an end that
    is infinite leaves that end of the interval infinite. `sequence`: the interval may be asked for
    after every number, as often as one likes, and is the narrowest of all those so far. Otherwise
    the bets are chosen for these n, and the error holds for one look.

    Raises ValueError for numbers outside their limits.
    """
    if not 0 < error < 1:
        raise ValueError(f"error: expected a probability in (0, 1), got {error}")
    least, most = limits
    if not least < most:
        raise ValueError(f"limits: expected low < high, got {limits}")
    numbers = column_of(values)
    if numbers.size == 0:
        return -math.inf, math.inf
    found = ends(numbers)
    if not (found[0] >= least and found[1] <= most):
        raise ValueError(f"values: expected numbers in {limits}, got {found}")
    low, high = -math.inf, math.inf
    if math.isfinite(least):
        low = _lower(numbers, least, error, sequence)
    # Nothing is above the upper limit, and the mean of the numbers turned round is bounded alike.
    if math.isfinite(most):
        high = -_lower(combined(np.negative, numbers), -most, error, sequence)
    return max(low, least), min(high, most)


def wealth_against(
    values: Numbers, mean: float, *, least: float, error: float, sequence: bool = False
) -> float:
    """The log of the wealth after betting that the mean of `values` is above `mean`.

    Every number is `least` or more. Above log(1 / error) the mean is above `mean`, but for an
    error. With `sequence` it is the highest wealth on the way.
    """
    numbers = column_of(values)
    return _log_wealth(numbers, _bets(numbers, least, error, sequence), mean, least, sequence)


def _lower(values: NumberColumn, least: float, error: float, sequence: bool) -> float:
    bets, threshold = _bets(values, least, error, sequence), math.log(1 / error)

    def surplus(mean: float) -> float:
        return _log_wealth(values, bets, mean, least, sequence) - threshold

    return _root(surplus, least, mean_of(values))


def _root(surplus: Callable[[float], float], least: float, mean: float) -> float:
    """The mean at which the wealth is just not enough; `least` when it never is."""
    # At `least` itself a bet has no limit: a number above it would be impossible, the stake free.
    inside = least + (mean - least) * 1e-9
    if not mean > inside or surplus(inside) <= 0:
        return least
    high = mean
    while surplus(high) > 0:  # the highest wealth of a sequence may have lain above its mean
        high += mean - least
    root: float = brentq(surplus, inside, high, xtol=1e-12 * max(1.0, abs(least)), rtol=1e-10)
    return root


def _bets(values: NumberColumn, least: float, error: float, sequence: bool) -> NumberColumn:
    """(n,) stakes per unit: sqrt(2 log(1/error) / (variance n)), each from the numbers before it.

    Waudby-Smith & Ramdas 2024, eq. 15 (n for one look; t log(1 + t) at step t for a sequence) and
    eq. 26 for the variance.
    """
    bets = values.like()
    first = FIRST_VARIANCE * least**2 if least else FIRST_VARIANCE
    known, total, squares, variance = 0, 0.0, 0.0, first
    for block in values.blocks():
        count = np.arange(known + 1, known + block.size + 1, dtype=np.float64)
        sums = total + np.cumsum(block)
        spread = squares + np.cumsum((block - sums / count) ** 2)
        variances = np.concatenate(([variance], ((first + spread) / count)[:-1]))
        times = count * np.log1p(count) if sequence else float(values.size)
        bets.append(np.sqrt(2 * math.log(1 / error) / (variances * times)))
        known, total, squares = known + block.size, float(sums[-1]), float(spread[-1])
        variance = (first + squares) / known
    return bets


def _log_wealth(
    values: NumberColumn, bets: NumberColumn, mean: float, least: float, sequence: bool
) -> float:
    total, highest = 0.0, -math.inf
    most = LARGEST_STAKE / (mean - least)
    for block, stakes in zip(values.blocks(), bets.blocks(), strict=True):
        gains = np.log1p(np.minimum(stakes, most) * (block - mean))
        if sequence:
            highest = max(highest, total + float(np.cumsum(gains).max()))
        total += float(gains.sum())
    return highest if sequence else total
