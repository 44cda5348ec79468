"""What one policy earns more than another, episode by episode: what a verdict rests on.

    found = one_step_differences(rewards, weights, bar_weights, scores, ...)
    found.values.mean()              # an unbiased estimate of the difference between two values

Both policies are weighed on the same episodes, so that what they share cancels. Every number has
the difference as its mean (importance weights have mean 1 at every step), which is what the bounds
of `policy.ope.betting` and `policy.ope.comparison` need; ratios of sums have no such numbers.

With a reward range (known, never taken from data) and the logging policy's lowest propensity, each
number has limits. A is the number of actions, S of steps, n of episodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

__all__ = [
    "Differences",
    "Scores",
    "one_step_differences",
    "per_decision_differences",
    "per_unit",
    "scaled",
]

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Range = tuple[float, float]

ROUNDING = 1e-6  # a float32 log-softmax may give a probability of 1 + 1e-6


@dataclass(frozen=True, eq=False)
class Differences:
    """n numbers whose mean is the difference; `lower` and `upper` are the same mean, with limits.

    An end of a bound needs limits on its own side alone, so that the numbers may be made otherwise
    for each. Without a reward range both are `values`, and the limits infinite.
    """

    method: str  # "dr", "ips", "pdis"
    values: FloatArray  # (n,)
    lower: FloatArray  # (n,) each >= least
    least: float
    upper: FloatArray  # (n,) each <= most
    most: float
    clustered: bool = False  # a number is the mean of several episodes


@dataclass(frozen=True, eq=False)
class Scores:
    """A reward model's view of one-step episodes; one that never saw the episode's own reward.

    v and bar_v are expectations of the same q, all within the reward range if there is one.
    """

    q: FloatArray  # (n,) of the action taken
    v: FloatArray  # (n,) expected under the candidate
    bar_v: FloatArray | None  # (n,) expected under the bar; None: unknown, q in its place


def one_step_differences(
    rewards: FloatArray,
    weights: FloatArray,
    bar_weights: FloatArray | None,
    scores: Scores | None,
    *,
    reward_range: Range | None = None,
    largest_weight: float = math.inf,
) -> Differences:
    """v - v' + (w - w') (r - q): doubly robust, each episode one step.

    Dudik, Langford & Li 2011, section 2, for the candidate less the same for the bar. rewards,
    weights, bar_weights (n,); no bar_weights: the logging policy itself, of weight 1, whose bar_v
    helps where it is known. Without scores q is a constant, the middle of the range or 0: weighted
    rewards. `largest_weight` is 1 or more.
    """
    if scores is None:
        constant = 0.0 if reward_range is None else sum(reward_range) / 2
        q = v = np.full_like(rewards, constant)
        bar_v: FloatArray | None = q
    else:
        q, v, bar_v = scores.q, scores.v, scores.bar_v
    other = np.ones_like(weights) if bar_weights is None else bar_weights
    values = v - (q if bar_v is None else bar_v) + (weights - other) * (rewards - q)
    least, most = -math.inf, math.inf
    if reward_range is not None and math.isfinite(largest_weight):
        width = reward_range[1] - reward_range[0]
        # With bar_v = q and w' = 1 it is v - r + w (r - q), linear in each: its ends are corners.
        most = width * max(1.0, largest_weight) + (0.0 if bar_v is None else width)
        most *= 1 + ROUNDING
        least = -most
    method = "ips" if scores is None else "dr"
    return Differences(method, values, values, least, values, most)


def per_decision_differences(
    rewards: FloatArray,
    weights: FloatArray,
    bar_weights: FloatArray | None,
    lengths: IntArray,
    *,
    gamma: float = 1.0,
    reward_range: Range | None = None,
    largest_weight: float = math.inf,
) -> Differences:
    """sum_t g^t (w_t - w'_t) r_t of each episode. Precup, Sutton & Singh 2000, section 4 (PDIS).

    rewards, weights, bar_weights (S,): products of ratios up to and including each step. When all
    episodes are equally long, a constant may be taken off every reward, which both policies earn
    alike; then the limit on the candidate's side is free of the largest weight. The horizon is
    that of the longest episode.
    """
    starts = np.cumsum(lengths) - lengths
    t = np.arange(rewards.size) - np.repeat(starts, lengths)
    other = np.ones_like(weights) if bar_weights is None else bar_weights
    apart = gamma ** t.astype(np.float64) * (weights - other)

    def less(constant: float) -> FloatArray:
        return np.add.reduceat(apart * (rewards - constant), starts)

    values = less(0.0)
    if reward_range is None:
        return Differences("pdis", values, values, -math.inf, values, math.inf)
    horizon = int(lengths.max())
    floor, ceiling = reward_range
    alike = bool((lengths == horizon).all())
    below, above = (min(floor, 0.0), max(ceiling, 0.0)) if alike else (0.0, 0.0)
    own = _total(gamma, horizon, largest_weight)
    bars = _total(gamma, horizon, 1.0 if bar_weights is None else largest_weight)

    def furthest(low: float, high: float) -> float:
        """The most that two policies can differ by in one direction: one earns, one pays."""
        return (1 + ROUNDING) * (_times(-low, own) + _times(high, bars))

    least = -furthest(min(floor - below, 0.0), max(ceiling - below, 0.0))
    most = furthest(-max(ceiling - above, 0.0), -min(floor - above, 0.0))
    return Differences("pdis", values, less(below), least, less(above), most)


def per_unit(found: Differences, starts: IntArray) -> Differences:
    """One number for the episodes from each start to the next: their mean, with the same limits.

    So every unit counts alike, however many episodes it has.
    """
    n = found.values.size
    if starts.size == n:
        return found
    sizes = np.diff(np.append(starts, n))

    def mean(numbers: FloatArray) -> FloatArray:
        means: FloatArray = np.add.reduceat(numbers, starts) / sizes
        return means

    return replace(
        found,
        values=mean(found.values),
        lower=mean(found.lower),
        upper=mean(found.upper),
        clustered=True,
    )


def scaled(found: Differences, pass_prob: FloatArray | None) -> Differences:
    """Numbers for episodes of which an episode was logged with `pass_prob` (n,), known before.

    By p_min / p each is within the same limits, and its mean has the sign of the difference over
    all episodes, logged or not: Horvitz & Thompson 1952. All is divided by the mean of p_min / p,
    so that it is about the size of the difference too.
    """
    if pass_prob is None or pass_prob.size == 0 or bool((pass_prob == pass_prob[0]).all()):
        return found
    share = pass_prob.min() / pass_prob
    by, scale = share / share.mean(), float(share.mean())
    return replace(
        found,
        values=by * found.values,
        lower=by * found.lower,
        upper=by * found.upper,
        least=(1 + ROUNDING) * found.least / scale,
        most=(1 + ROUNDING) * found.most / scale,
    )


def _total(gamma: float, horizon: int, weight: float) -> float:
    """sum_t g^t weight^(t + 1), the most that an episode's weights can add up to."""
    with np.errstate(over="ignore"):
        steps = gamma ** np.arange(horizon) * np.power(weight, np.arange(1.0, horizon + 1))
    return float(steps.sum())


def _times(reward: float, weight: float) -> float:
    return 0.0 if reward == 0 else reward * weight
