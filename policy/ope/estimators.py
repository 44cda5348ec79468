"""Off-policy estimators: the return of a target policy, from episodes of another policy.

Pass the log as flat arrays, one row per step, episodes one after the other, with their lengths:

    episodes = Episodes.from_flat(
        rewards, lengths=lengths, behaviour_logp=action_logp, target_logp=logp_of_the_new_policy
    )
    pdis(episodes, gamma=0.99).interval                          # Student-t, 95 %
    wis(episodes, interval=Bootstrap(np.random.default_rng(7)))  # whole episodes drawn anew
    ESTIMATORS["cwpdis"](episodes, gamma=0.99).to_dict()         # by name, ready for JSON

Logs of one-step decisions (bandits) usually contain probabilities instead:

    episodes = Episodes.one_step(clicks, behaviour_prob=propensity, target_prob=prob, q=q, v=v)
    dr(episodes).value

`q` is a model's value of the action that was taken, `v` its expected value under the target policy;
`policy.ope.value_models` fits both. The estimators need:

    v_behavior                     rewards (the logging policy's own value, for comparison)
    dm                             v
    ips snips is pdis wis cwpdis   both logps
    dr sndr switch_dr dr_os        both logps, q, v

ips, snips, sndr, switch_dr and dr_os are for one-step episodes; the others accept any length, and
on one-step episodes is = pdis = ips and wis = cwpdis = snips. All of them use whole episodes: a
weight is the product of the ratios target / behaviour of the steps up to and including its own.
Pure: arrays in, numbers out; randomness is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from policy.ope.episodes import Episodes, running_sums
from policy.ope.intervals import Bootstrap, Interval, PerStepSums, Resampled, StudentT, Sums
from storage.experience.endings import ENDING_KINDS

__all__ = [
    "ESTIMATORS",
    "Bootstrap",
    "Episodes",
    "Estimate",
    "Estimator",
    "Interval",
    "StudentT",
    "cwpdis",
    "dm",
    "dr",
    "dr_os",
    "importance_sampling",
    "ips",
    "pdis",
    "sndr",
    "snips",
    "switch_dr",
    "v_behavior",
    "wis",
]

FloatArray = npt.NDArray[np.float64]

STUDENT_T_95 = StudentT()
# the square of a larger weight would overflow
LARGEST_WEIGHT = 1e150

_WHAT_TO_DO: dict[str, str] = {
    "no_propensity": "log actions with action_prob=... or action_logp=...",
    **{kind.word: kind.remedy for kind in ENDING_KINDS if kind.remedy},
    "unfinished": "wait until they end, or keep them with leave_out=()",
}


@dataclass(frozen=True)
class Estimate:
    """The result of an estimator. Values are returns per episode; `stderr` is that of `value`."""

    name: str
    value: float
    stderr: float  # inf if there is only one episode
    interval: tuple[float, float]
    level: float  # of the interval, e.g. 0.95
    ess: float  # effective sample size, (sum w)^2 / sum w^2 over whole-episode weights
    n: int  # episodes used
    excluded: Mapping[str, int]  # reason -> episodes not used
    max_weight: float  # largest whole-episode weight

    def to_dict(self) -> dict[str, object]:
        """Plain types for strict JSON; a number that is not finite becomes None."""

        def plain(number: float) -> float | None:
            return float(number) if np.isfinite(number) else None

        return {
            "name": self.name,
            "value": plain(self.value),
            "stderr": plain(self.stderr),
            "interval": [plain(limit) for limit in self.interval],
            "level": self.level,
            "ess": plain(self.ess),
            "n": self.n,
            "excluded": dict(self.excluded),
            "max_weight": plain(self.max_weight),
        }


class Estimator(Protocol):
    """The common signature of estimators; some have additional keywords."""

    def __call__(
        self, episodes: Episodes, *, gamma: float = 1.0, interval: Interval = ...
    ) -> Estimate: ...


# ------------------------------------------------------------------ estimators of any length


def v_behavior(
    episodes: Episodes, *, gamma: float = 1.0, interval: Interval = STUDENT_T_95
) -> Estimate:
    """The logging policy's own value: the mean discounted return. Needs no propensities."""
    data = _prepared(episodes)
    returns = _discounted(data, data.rewards, gamma)
    return _estimate("v_behavior", data, Sums(base=returns), interval, np.ones(data.n))


def dm(episodes: Episodes, *, gamma: float = 1.0, interval: Interval = STUDENT_T_95) -> Estimate:
    """Direct method: mean of v at the first step. Dudik, Langford & Li 2011, section 2.

    Its interval reflects how v varies over episodes, not the model's error. Needs no propensities;
    v already includes the discount.
    """
    data = _prepared(episodes, "v")
    _check_gamma(gamma)
    first = _given(data.v)[data.starts]
    return _estimate("dm", data, Sums(base=first), interval, np.ones(data.n))


def importance_sampling(
    episodes: Episodes, *, gamma: float = 1.0, interval: Interval = STUDENT_T_95
) -> Estimate:
    """Trajectory-wise: mean of w_T * return. Precup, Sutton & Singh 2000, section 3 (IS)."""
    data = _weighable(episodes)
    weights = _last(data, _weights(data))
    _check_overlap(weights)
    terms = weights * _discounted(data, data.rewards, gamma)
    return _estimate("is", data, Sums(base=terms), interval, weights)


def pdis(episodes: Episodes, *, gamma: float = 1.0, interval: Interval = STUDENT_T_95) -> Estimate:
    """Per decision: mean of sum_t g^t w_t r_t. Precup, Sutton & Singh 2000, section 4 (PDIS)."""
    data = _weighable(episodes)
    weights = _weights(data)
    terms = _discounted(data, weights * data.rewards, gamma)
    return _estimate("pdis", data, Sums(base=terms), interval, _last(data, weights))


def wis(episodes: Episodes, *, gamma: float = 1.0, interval: Interval = STUDENT_T_95) -> Estimate:
    """Weighted: sum w_T * return / sum w_T. Precup, Sutton & Singh 2000, section 3 (WIS)."""
    data = _weighable(episodes)
    weights = _last(data, _weights(data))
    _check_overlap(weights)
    returns = _discounted(data, data.rewards, gamma)
    return _estimate("wis", data, _ratio(weights, returns), interval, weights)


def cwpdis(
    episodes: Episodes, *, gamma: float = 1.0, interval: Interval = STUDENT_T_95
) -> Estimate:
    """Consistent weighted per decision: sum_t g^t (sum_i w_t r_t / sum_i w_t).

    Thomas 2015, Safe Reinforcement Learning (thesis), section 3.10. An episode that has ended
    keeps its last weight with reward 0.
    """
    data = _weighable(episodes)
    weights = _weights(data)
    sums = PerStepSums(weights, data.rewards, data.lengths, _check_gamma(gamma))
    if not sums.denominators().all():
        step = int(np.argmin(sums.denominators() > 0))
        raise ValueError(f"every importance weight is 0 at step {step}: use 'pdis' or 'dr'")
    return _estimate("cwpdis", data, sums, interval, _last(data, weights))


def dr(episodes: Episodes, *, gamma: float = 1.0, interval: Interval = STUDENT_T_95) -> Estimate:
    """Doubly robust: D_t = v_t + rho_t (r_t + g D_{t+1} - q_t), mean of D_0.

    Jiang & Li 2016; for one step Dudik, Langford & Li 2011. Computed unrolled, as Thomas &
    Brunskill 2016 write it: sum_t g^t (w_{t-1} v_t + w_t (r_t - q_t)), w_{-1} = 1.
    """
    data = _weighable(episodes, "q", "v")
    weights = _weights(data)
    before = np.empty_like(weights)
    before[1:] = weights[:-1]
    before[data.starts] = 1.0
    steps = before * _given(data.v) + weights * (data.rewards - _given(data.q))
    sums = Sums(base=_discounted(data, steps, gamma))
    return _estimate("dr", data, sums, interval, _last(data, weights))


# ------------------------------------------------------------------ estimators of one step


def ips(episodes: Episodes, *, gamma: float = 1.0, interval: Interval = STUDENT_T_95) -> Estimate:
    """Inverse propensity score: mean of w r. Dudik, Langford & Li 2011, section 2."""
    one = importance_sampling(_single(episodes, "ips", "is"), gamma=gamma, interval=interval)
    return replace(one, name="ips")


def snips(episodes: Episodes, *, gamma: float = 1.0, interval: Interval = STUDENT_T_95) -> Estimate:
    """Self-normalised: sum w r / sum w. Swaminathan & Joachims 2015, section 4."""
    one = wis(_single(episodes, "snips", "wis"), gamma=gamma, interval=interval)
    return replace(one, name="snips")


def sndr(episodes: Episodes, *, gamma: float = 1.0, interval: Interval = STUDENT_T_95) -> Estimate:
    """Self-normalised DR: mean v + sum w (r - q) / sum w. Kallus & Uehara 2019."""
    data, weights, residual = _bandit(episodes, "sndr", gamma)
    sums = _ratio(weights, residual, base=_given(data.v))
    return _estimate("sndr", data, sums, interval, weights)


def switch_dr(
    episodes: Episodes,
    *,
    gamma: float = 1.0,
    interval: Interval = STUDENT_T_95,
    tau: float = 10.0,
) -> Estimate:
    """DR where w <= tau, the model alone elsewhere. Wang, Agarwal & Dudik 2017 (SWITCH)."""
    data, weights, residual = _bandit(episodes, "switch_dr", gamma)
    if not tau >= 0:
        raise ValueError(f"tau: expected a weight >= 0, got {tau}")
    # a ratio of exactly tau may be slightly above it after rounding
    kept = np.where(weights <= tau * (1 + 1e-9), weights, 0.0)
    terms = _given(data.v) + kept * residual
    return _estimate("switch_dr", data, Sums(base=terms), interval, weights)


def dr_os(
    episodes: Episodes,
    *,
    gamma: float = 1.0,
    interval: Interval = STUDENT_T_95,
    shrinkage: float = 10.0,
) -> Estimate:
    """DR with weights l w / (w^2 + l), l = `shrinkage` (0: the model alone; inf: plain DR).

    Su, Dimakopoulou, Krishnamurthy & Dudik 2020, optimistic shrinkage.
    """
    data, weights, residual = _bandit(episodes, "dr_os", gamma)
    if not shrinkage >= 0:
        raise ValueError(f"shrinkage: expected a number >= 0, got {shrinkage}")
    # as in the docstring, without dividing inf by inf
    shrunk = weights / (1 + weights**2 / shrinkage) if shrinkage > 0 else np.zeros_like(weights)
    terms = _given(data.v) + shrunk * residual
    return _estimate("dr_os", data, Sums(base=terms), interval, weights)


ESTIMATORS: Mapping[str, Estimator] = {
    "v_behavior": v_behavior,
    "ips": ips,
    "snips": snips,
    "dm": dm,
    "dr": dr,
    "sndr": sndr,
    "switch_dr": switch_dr,
    "dr_os": dr_os,
    "is": importance_sampling,
    "pdis": pdis,
    "wis": wis,
    "cwpdis": cwpdis,
}


# shared functions


def _estimate(
    name: str, data: Episodes, sums: Resampled, interval: Interval, weights: FloatArray
) -> Estimate:
    """Combine a value, its standard error and its interval. weights (n,)."""
    n, starts = data.n, data.unit_starts
    # an episode logged with probability p counts 1 / p times: Horvitz & Thompson 1952
    if data.pass_prob is not None:
        sums, weights = sums.weighed(1 / data.pass_prob), weights / data.pass_prob
    value = float(sums.value(np.ones((1, n)))[0])
    spread, units = np.add.reduceat(sums.influence(), starts), len(starts)
    # Also for ratios: with equal weights their error equals that of a plain mean. With units it is
    # Liang & Zeger 1986, eq. 11, with the factor u / (u - 1).
    scale = n * n * (units - 1) / units
    stderr = float(np.sqrt(spread @ spread / scale)) if units > 1 else np.inf
    return Estimate(
        name=name,
        value=value,
        stderr=stderr,
        interval=interval.around(sums, value, stderr, starts),
        level=interval.level,
        ess=_effective(weights),
        n=n,
        excluded=dict(data.excluded),
        max_weight=float(weights.max()),
    )


def _effective(weights: FloatArray) -> float:
    """Kish 1965: (sum w)^2 / sum w^2; 0 if no episode has any weight."""
    largest = weights.max()
    if largest == 0:
        return 0.0
    shares = weights / largest
    return float(shares.sum() ** 2 / (shares @ shares))


def _prepared(data: Episodes, *needs: str) -> Episodes:
    """Raise ValueError if a column is missing or no episode is left."""
    missing = [name for name in needs if getattr(data, name) is None]
    if missing:
        raise ValueError(f"this estimator needs {', '.join(missing)}: give it to Episodes")
    if data.n == 0:
        reasons = ", ".join(f"{why}: {count}" for why, count in data.excluded.items() if count)
        advice = [_WHAT_TO_DO[why] for why in data.excluded if why in _WHAT_TO_DO]
        raise ValueError(
            f"no episodes are left to judge by ({reasons or 'none were given'})"
            + "".join(f"; {one}" for one in advice)
        )
    return data


def _weighable(data: Episodes, *needs: str) -> Episodes:
    return _prepared(data.with_propensity(), "target_logp", *needs)


def _single(data: Episodes, name: str, instead: str) -> Episodes:
    if data.rewards.size != data.n:
        raise ValueError(
            f"{name}: expected one-step episodes, got one of {int(data.lengths.max())} steps; "
            f"use {instead!r}"
        )
    return data


def _bandit(data: Episodes, name: str, gamma: float) -> tuple[Episodes, FloatArray, FloatArray]:
    """One-step episodes, their weights (n,) and residuals r - q (n,)."""
    _check_gamma(gamma)
    data = _weighable(_single(data, name, "dr"), "q", "v")
    return data, _weights(data), data.rewards - _given(data.q)


def _given(column: FloatArray | None) -> FloatArray:
    """A column that `_prepared` has checked."""
    if column is None:
        raise ValueError("a column that this estimator needs is missing")
    return column


def _weights(data: Episodes) -> FloatArray:
    """(S,) product of target / behaviour up to and including each step."""
    ratios = _given(data.target_logp) - data.behaviour_logp
    with np.errstate(over="ignore"):
        weights = np.exp(running_sums(ratios, data.lengths))
    if not (weights < LARGEST_WEIGHT).all():
        episode = int(np.searchsorted(np.cumsum(data.lengths), weights.argmax(), side="right"))
        raise ValueError(
            f"the importance weight of episode {episode} exceeds {LARGEST_WEIGHT}: target and "
            "behaviour are too far apart, or one of the logps is not of the logged action"
        )
    _check_overlap(weights)
    return weights


def _last(data: Episodes, weights: FloatArray) -> FloatArray:
    """(n,) whole-episode weights."""
    return weights[np.cumsum(data.lengths) - 1]


def _discounted(data: Episodes, steps: FloatArray, gamma: float) -> FloatArray:
    """(n,) sum_t g^t x_t of each episode; steps (S,)."""
    if _check_gamma(gamma) != 1:
        steps = steps * gamma ** data.t.astype(np.float64)
    return np.add.reduceat(steps, data.starts)


def _ratio(weights: FloatArray, values: FloatArray, base: FloatArray | None = None) -> Sums:
    """base + sum w x / sum w; all (n,)."""
    return Sums(base=base, numerator=weights * values, denominator=weights)


def _check_overlap(weights: FloatArray) -> None:
    if not weights.any():
        raise ValueError(
            "every importance weight is 0: the target policy never does what was logged, so these "
            "episodes say nothing about it"
        )


def _check_gamma(gamma: float) -> float:
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma: expected a discount in [0, 1], got {gamma}")
    return gamma
