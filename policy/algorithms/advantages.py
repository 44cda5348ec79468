"""Advantages and value targets over fragments of episodes: GAE and V-trace, in numpy, float64.

Fragments are concatenated, each in the order of t. `ends` marks the last row of each fragment:
nothing is carried across it, and it bootstraps from its own `next_values`, as a truncated row does.
A terminated row does not bootstrap.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Advantages", "gae", "vtrace"]

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class Advantages(NamedTuple):
    """Two arrays (N,) float64."""

    advantages: FloatArray
    value_targets: FloatArray


def gae(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    next_values: npt.ArrayLike,
    *,
    terminated: npt.ArrayLike,
    ends: npt.ArrayLike,
    gamma: float,
    lam: float,
) -> Advantages:
    """Generalised advantage estimates of N rows, and A + V as value targets.

        delta_t = r_t + gamma V(s_t+1) - V(s_t)
        A_t = delta_t + gamma lam A_t+1

    Schulman et al. 2016, High-Dimensional Continuous Control Using Generalized Advantage
    Estimation, eq. 16. All arrays are (N,); `next_values` are used where a row is not terminated.
    Raises ValueError for arrays of different lengths, or if the last row does not end a fragment.
    """
    column = _Columns(rewards, values, next_values, terminated, ends)
    delta = column.rewards + gamma * column.bootstraps - column.values
    advantages = _carried_back(delta, np.where(column.cuts, 0.0, gamma * lam))
    return Advantages(advantages, advantages + column.values)


def vtrace(
    rewards: npt.ArrayLike,
    values: npt.ArrayLike,
    next_values: npt.ArrayLike,
    *,
    log_ratios: npt.ArrayLike,
    terminated: npt.ArrayLike,
    ends: npt.ArrayLike,
    gamma: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> Advantages:
    """V-trace policy gradient advantages of N rows, and vs as value targets.

        rho_t = min(rho_bar, pi / mu), c_t = min(c_bar, pi / mu)
        vs_t = V(s_t) + rho_t delta_t + gamma c_t (vs_t+1 - V(s_t+1))
        advantage_t = rho_t (r_t + gamma vs_t+1 - V(s_t))

    Espeholt et al. 2018, IMPALA, eq. 1 and section 4.2. `log_ratios` (N,) is log pi - log mu of the
    actions taken. The last row of a fragment uses V(s_t+1) for vs_t+1. Other arguments and errors
    as for `gae`. No algorithm here uses it yet; it is kept to its reference numbers by a test.
    """
    column = _Columns(rewards, values, next_values, terminated, ends)
    log_ratios = np.asarray(log_ratios, np.float64)
    rho = np.exp(np.minimum(log_ratios, np.log(rho_bar)))
    c = np.exp(np.minimum(log_ratios, np.log(c_bar)))
    delta = rho * (column.rewards + gamma * column.bootstraps - column.values)
    above = _carried_back(delta, np.where(column.cuts, 0.0, gamma * c))
    targets = column.values + above
    following = np.where(column.cuts, column.bootstraps, np.append(targets[1:], 0.0))
    advantages = rho * (column.rewards + gamma * following - column.values)
    return Advantages(advantages, targets)


class _Columns:
    """The inputs as arrays of one length; `bootstraps` is 0 where a row is terminated."""

    def __init__(
        self,
        rewards: npt.ArrayLike,
        values: npt.ArrayLike,
        next_values: npt.ArrayLike,
        terminated: npt.ArrayLike,
        ends: npt.ArrayLike,
    ) -> None:
        self.rewards: FloatArray = np.asarray(rewards, np.float64)
        self.values: FloatArray = np.asarray(values, np.float64)
        over = np.asarray(terminated, np.bool_)
        self.bootstraps = np.where(over, 0.0, np.asarray(next_values, np.float64))
        self.cuts: BoolArray = np.asarray(ends, np.bool_) | over
        shapes = {a.shape for a in (self.rewards, self.values, self.bootstraps, self.cuts)}
        if len(shapes) != 1 or self.rewards.ndim != 1:
            raise ValueError(f"expected arrays (N,) of one length, got the shapes {sorted(shapes)}")
        if len(self.cuts) and not self.cuts[-1]:
            raise ValueError("ends: expected the last row to end a fragment")


def _carried_back(delta: FloatArray, factor: FloatArray) -> FloatArray:
    """x_t = delta_t + factor_t x_t+1, from the last row to the first."""
    result = np.empty_like(delta)
    carried = 0.0
    # Python floats: a loop over numpy's floats is four times slower
    pairs = zip(delta[::-1].tolist(), factor[::-1].tolist(), strict=True)
    for i, (d, f) in enumerate(pairs, 1):
        carried = d + f * carried
        result[-i] = carried
    return result
