"""The difference between two policies' returns, per episode, on which verdicts are based.

    values = one_step_values(rewards, weights, bar_weights, scores)
    values.mean()                    # an unbiased estimate of the difference between two values

Both policies are weighted on the same episodes, so that common variation cancels. The expectation
of every number is the difference (importance weights have mean 1 at every step), as the bounds of
`policy.ope.betting` and `policy.ope.comparison` require; ratios of sums have no such numbers.

With a reward range (known, never taken from data) and the logging policy's lowest propensity, each
number has limits. A is the number of actions, S of steps, n of episodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from policy.ope.columns import NumberColumn, Numbers, column_of, combined, mean_of

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Range = tuple[float, float]

ROUNDING = 1e-6  # a float32 log-softmax may give a probability of 1 + 1e-6


@dataclass(frozen=True, eq=False)
class Differences:
    """n numbers whose mean is the difference; `lower` and `upper` have the same mean, with limits.

    Each end of a bound needs a limit on its own side only, so each may use different numbers.
    Without a reward range both are `values`, and the limits infinite.
    """

    method: str  # "dr", "ips", "pdis"
    values: Numbers  # (n,)
    lower: Numbers  # (n,) each >= least
    least: float
    upper: Numbers  # (n,) each <= most
    most: float
    in_order: bool = True  # further episodes append numbers without changing these
    furthest: float = math.inf  # the largest absolute value that their mean can have
    margin: float = 0.0  # the mean of what was subtracted as a margin (policy.ope.margins)

    def beyond(self, share: float, base: NumberColumn, ends: Range) -> Differences:
        """Subtract a margin, `share` * `base` (n,), from all numbers. `ends` limit the base.

        If the mean is above 0, the difference is larger than the margin. Both are linear in the
        same episodes, so a share of a value that is only estimated keeps the bound.
        """

        def less(column: Numbers) -> NumberColumn:
            return combined(lambda own, one: own - share * one, column_of(column), base)

        values = less(self.values)
        low, high = sorted(share * end for end in ends)
        return replace(
            self,
            values=values,
            lower=values if self.lower is self.values else less(self.lower),
            least=self.least - high,
            upper=values if self.upper is self.values else less(self.upper),
            most=self.most - low,
            furthest=self.furthest + max(abs(low), abs(high)),
            margin=share * mean_of(base),
        )

    def scaled(self, numbers: float, limits: float) -> Differences:
        """Multiply the numbers by one factor and the limits by another, both above 0."""
        if numbers == limits == 1:
            return self

        def times(column: Numbers) -> NumberColumn:
            return combined(lambda block: block * numbers, column_of(column))

        return Differences(
            self.method,
            times(self.values),
            times(self.lower),
            self.least * limits,
            times(self.upper),
            self.most * limits,
            self.in_order,
            self.furthest * limits,
            self.margin * numbers,
        )


@dataclass(frozen=True, eq=False)
class Scores:
    """A reward model's values for one-step episodes; the model must not have seen their rewards.

    v and bar_v are expectations of the same q, all within the reward range if there is one.
    """

    q: FloatArray  # (n,) of the action taken
    v: FloatArray  # (n,) expected under the candidate
    bar_v: FloatArray | None  # (n,) expected under the bar; None: unknown, q is used instead


def one_step_values(
    rewards: FloatArray, weights: FloatArray, bar_weights: FloatArray | None, scores: Scores
) -> FloatArray:
    """(n,) v - v' + (w - w') (r - q): doubly robust; each episode is one step.

    The estimator of Dudik, Langford & Li 2011, section 2, for the candidate minus that for the bar.
    rewards, weights, bar_weights (n,). Without bar_weights the bar is the logging policy itself,
    with weight 1; then bar_v reduces the variance if it is known.
    """
    q, v, bar_v = scores.q, scores.v, scores.bar_v
    other = np.ones_like(weights) if bar_weights is None else bar_weights
    return v - (q if bar_v is None else bar_v) + (weights - other) * (rewards - q)


def one_step_limit(reward_range: Range | None, largest_weight: float, *, known: bool) -> float:
    """The largest absolute value of `one_step_values`. `known`: whether bar_v is known.

    `largest_weight` is 1 or more.
    """
    if reward_range is None or not math.isfinite(largest_weight):
        return math.inf
    width = reward_range[1] - reward_range[0]
    # with bar_v = q and w' = 1 it is v - r + w (r - q), linear in each: extremes are at corners
    return (width * max(1.0, largest_weight) + (width if known else 0.0)) * (1 + ROUNDING)


def per_decision_terms(
    rewards: FloatArray,
    weights: FloatArray,
    bar_weights: FloatArray | None,
    lengths: IntArray,
    gamma: float,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(n,) sum_t g^t (w_t - w'_t) r_t, and two terms (n,) of the same sum for rewards of 1.

    Precup, Sutton & Singh 2000, section 4 (PDIS). rewards, weights, bar_weights (S,): products of
    ratios up to and including each step. For rewards of 1 up to a horizon H, the sum is the second
    result plus the third times sum_{t < H} g^t: an episode that ends earlier stays in an absorbing
    state, in which both weights keep their last values, and so their means of 1.
    """
    starts = np.cumsum(lengths) - lengths
    t = np.arange(rewards.size) - np.repeat(starts, lengths)
    other = np.ones_like(weights) if bar_weights is None else bar_weights
    apart = weights - other
    by_step = gamma ** t.astype(np.float64) * apart
    last = apart[np.cumsum(lengths) - 1]
    to_end = np.add.reduceat(by_step, starts) - last * discounted(lengths, gamma)
    return np.add.reduceat(by_step * rewards, starts), to_end, last


def weighted_returns(
    rewards: FloatArray, weights: FloatArray | None, lengths: IntArray, gamma: float
) -> FloatArray:
    """(n,) sum_t g^t w_t r_t, whose mean is a policy's value; without weights the logging policy's.

    rewards, weights (S,), as for `per_decision_terms`.
    """
    starts = np.cumsum(lengths) - lengths
    t = np.arange(rewards.size) - np.repeat(starts, lengths)
    earned = gamma ** t.astype(np.float64) * rewards
    returns: FloatArray = np.add.reduceat(earned if weights is None else weights * earned, starts)
    return returns


def returns_range(
    reward_range: Range | None, longest: int, gamma: float, largest_weight: float
) -> Range:
    """The limits of `weighted_returns` of episodes with at most `longest` steps."""
    if reward_range is None:
        return -math.inf, math.inf
    total = _total(gamma, longest, largest_weight) * (1 + ROUNDING)
    return _times(min(reward_range[0], 0.0), total), _times(max(reward_range[1], 0.0), total)


def discounted(lengths: IntArray, gamma: float) -> FloatArray:
    """(n,) sum_t g^t over each of the lengths (n,)."""
    if gamma == 1:
        return lengths.astype(np.float64)
    found: FloatArray = (1 - gamma ** lengths.astype(np.float64)) / (1 - gamma)
    return found


def bounded_per_decision(
    values: NumberColumn,
    apart: tuple[NumberColumn, NumberColumn],
    lengths: tuple[int, int],
    *,
    gamma: float,
    reward_range: Range | None,
    largest_weight: float,
    against_log: bool,
) -> Differences:
    """The differences with terms (n,) from `per_decision_terms`, and their limits.

    A constant is subtracted from the rewards of all H steps, which affects both policies equally;
    then the limit on the candidate's side does not depend on the largest weight. `lengths` are the
    shortest and the longest episode: the horizon H is that of the longest. An episode that ends
    earlier earns 0 in each later step (`apart`, the terms of `per_decision_terms`).
    `against_log`: whether the bar's weights are 1.

    Whatever the weights, both values lie between sum_t g^t low and sum_t g^t high over the H steps,
    with low <= 0 <= high if an episode may end earlier. So their difference is at most
    (high - low) sum_t g^t, which limits the mean.
    """
    if reward_range is None:
        return Differences("pdis", values, values, -math.inf, values, math.inf)
    alike = lengths[0] == lengths[1]
    floor, ceiling = reward_range
    if not alike:
        floor, ceiling = min(floor, 0.0), max(ceiling, 0.0)
    below, above = min(floor, 0.0), max(ceiling, 0.0)
    own = _total(gamma, lengths[1], largest_weight)
    bars = _total(gamma, lengths[1], 1.0 if against_log else largest_weight)

    def furthest(low: float, high: float) -> float:
        """The largest difference in one direction: one policy gains, the other loses."""
        return (1 + ROUNDING) * (_times(-low, own) + _times(high, bars))

    def less(constant: float) -> NumberColumn:
        if constant == 0:
            return values
        return combined(
            lambda earned, to_end, last: earned - constant * (to_end + last * horizon),
            values,
            *apart,
        )

    horizon = float(discounted(np.array([lengths[1]]), gamma)[0])
    least = -furthest(min(floor - below, 0.0), max(ceiling - below, 0.0))
    most = furthest(-max(ceiling - above, 0.0), -min(floor - above, 0.0))
    apart_by = (ceiling - floor) * horizon
    lower, upper = less(below), less(above)
    # a longer episode changes the horizon, and so the numbers of shorter ones
    in_order = alike or (lower is values and upper is values)
    return Differences("pdis", values, lower, least, upper, most, in_order, apart_by)


def _total(gamma: float, horizon: int, weight: float) -> float:
    """sum_t g^t weight^(t + 1), the largest sum of an episode's weights."""
    with np.errstate(over="ignore"):
        steps = gamma ** np.arange(horizon) * np.power(weight, np.arange(1.0, horizon + 1))
    return float(steps.sum())


def _times(reward: float, weight: float) -> float:
    return 0.0 if reward == 0 else reward * weight
