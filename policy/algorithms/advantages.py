"""Advantages and value targets over fragments of episodes, in numpy, float64.

Fragments are concatenated, each in the order of t. `ends` marks the last row of each fragment:
nothing is carried across it, and it bootstraps from its own `next_values`, as a truncated row does.
A terminated row does not bootstrap.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


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
    r, v = np.asarray(rewards, np.float64), np.asarray(values, np.float64)
    over = np.asarray(terminated, np.bool_)
    after = np.where(over, 0.0, np.asarray(next_values, np.float64))
    cuts = np.asarray(ends, np.bool_) | over
    shapes = {a.shape for a in (r, v, after, cuts)}
    if len(shapes) != 1 or r.ndim != 1:
        raise ValueError(f"expected arrays (N,) of one length, got the shapes {sorted(shapes)}")
    if len(cuts) and not cuts[-1]:
        raise ValueError("ends: expected the last row to end a fragment")
    delta = r + gamma * after - v
    factor = np.where(cuts, 0.0, gamma * lam)
    advantages = np.empty_like(delta)
    carried = 0.0
    # Python floats: a loop over numpy's floats is four times slower
    pairs = zip(delta[::-1].tolist(), factor[::-1].tolist(), strict=True)
    for i, (d, f) in enumerate(pairs, 1):
        carried = d + f * carried
        advantages[-i] = carried
    return Advantages(advantages, advantages + v)
