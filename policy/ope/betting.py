"""Bounds on a mean that hold at every sample size, for numbers with a known range: betting.

    low, high = betting_interval(differences, limits=(-5.0, 5.0), error=0.025)

A gambler who bets that the mean is above m cannot expect a profit if it is m: the wealth is a
non-negative martingale, and exceeds 1 / error with a probability of at most `error` (Ville 1939).
So the interval excludes every m at which it does. Waudby-Smith & Ramdas 2024, Estimating means of
bounded random variables by betting, theorem 3; Karampatziakis, Mineiro & Ramdas 2021, Off-policy
confidence sequences, section 4, for weighted rewards.

The range of the numbers must be known independently of the data: an observed maximum invalidates
the bound. Neither a variance, nor many events, nor a normal limit is required. The wealth decreases
as m grows, so the bound is a root, which is found by bracketing; a grid of candidates for m could
miss it. Pure: each bet depends only on the numbers before it, in the given order. Numbers may be a
column (policy.ope.columns), which is read block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from policy.ope.columns import NumberColumn, Numbers, column_of, combined, ends, mean_of

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

LARGEST_STAKE = 0.75
"""The largest share of the wealth that the worst number may cost; Waudby-Smith & Ramdas use 1/2 or
3/4."""
POWER = 0.8
"""The probability of a verdict with the number of episodes that is reported as needed."""
FIRST_VARIANCE = 0.01
"""The variance assumed before the first number, as a share of the square of half the range."""


def betting_interval(
    values: Numbers,
    *,
    limits: tuple[float, float],
    error: float,
    sequence: bool = False,
) -> tuple[float, float]:
    """(low, high) for the mean of `values` (n,); each end fails with a probability <= `error`.

    `limits` hold for every number that was possible, not only for those observed. If one limit is
    infinite, so is that end of the interval. With `sequence` the interval may be computed after
    every number, any number of times, and is the intersection of all so far. Otherwise the bets are
    chosen for these n, and the error holds for a single look.

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
    # an upper bound is a lower bound on the mean of the negated numbers
    if math.isfinite(most):
        high = -_lower(combined(np.negative, numbers), -most, error, sequence)
    return max(low, least), min(high, most)


def wealth_against(values: Numbers, mean: float, *, least: float, error: float) -> float:
    """The log of the wealth after betting that the mean of `values` is above `mean`.

    Every number is `least` or more. A result above log(1 / error) shows that the mean is above
    `mean`, with an error probability of at most `error`.
    """
    numbers = column_of(values)
    return _log_wealth(numbers, _bets(numbers, least, error, False), mean, least, False)


def numbers_needed(
    sizes: Sequence[float], rates: Sequence[float], *, least: float, error: float, sequence: bool
) -> float:
    """About how many numbers show, with the probability `POWER`, that their mean is above 0.

    Each is one of the `sizes`, with the probabilities `rates`, or else 0. The log wealth of the
    bets is approximated by a normal distribution.
    """
    needed = math.log(1 / error)
    variance = sum(rate * size**2 for rate, size in zip(rates, sizes, strict=True))

    def enough(times: FloatArray) -> BoolArray:
        grown = times * np.log1p(times) if sequence else times
        stakes = np.minimum(np.sqrt(2 * needed / (variance * grown)), LARGEST_STAKE / -least)
        won, squares = np.zeros_like(times), np.zeros_like(times)
        for rate, size in zip(rates, sizes, strict=True):
            log = np.log1p(stakes * size)
            won, squares = won + rate * log, squares + rate * log**2
        total = _summed if sequence else np.multiply
        spread = np.sqrt(total(squares, times))
        found: BoolArray = total(won, times) - float(ndtri(POWER)) * spread >= needed
        return found

    return first_time(enough)


def first_time(enough: Callable[[FloatArray], BoolArray]) -> float:
    """The smallest number of episodes that is `enough`, within 1 %; infinite if 1e13 are not."""
    times = np.geomspace(1.0, 1e13, 6000)
    found = enough(times)
    return float(times[int(np.argmax(found))]) if found.any() else math.inf


def _summed(terms: FloatArray, times: FloatArray) -> FloatArray:
    """The cumulative sums, at each time, of terms that change slowly."""
    areas = np.diff(times) * (terms[1:] + terms[:-1]) / 2
    sums: FloatArray = terms[0] + np.concatenate(([0.0], np.cumsum(areas)))
    return sums


def _lower(values: NumberColumn, least: float, error: float, sequence: bool) -> float:
    bets, threshold = _bets(values, least, error, sequence), math.log(1 / error)

    def surplus(mean: float) -> float:
        return _log_wealth(values, bets, mean, least, sequence) - threshold

    return _root(surplus, least, mean_of(values))


def _root(surplus: Callable[[float], float], least: float, mean: float) -> float:
    """The mean at which the wealth just reaches the threshold; `least` if it never does."""
    # at `least` itself a bet has no limit, as numbers below it are impossible
    inside = least + (mean - least) * 1e-9
    if not mean > inside or surplus(inside) <= 0:
        return least
    high = mean
    # a sequence's highest wealth may be above the threshold at the mean of all numbers
    while surplus(high) > 0:
        high += mean - least
    # here, as it takes 0.3 s of the start of `evaluate` and `publish`; only ranges need it
    from scipy.optimize import brentq  # noqa: PLC0415

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
