"""Runs of rows in time: fragments of episodes, padded sequences, n-step returns, on plain arrays.

`SampleBatch` offers these computations as methods. Pure: arrays in, arrays out.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


def fragment_ends(t: npt.ArrayLike, *keys: npt.NDArray[Any]) -> BoolArray:
    """Where runs of consecutive `t` with equal keys end: bool (N,); True for the last row.

    `t` and each of `keys` are (N,). A row that is missing in the middle therefore ends a fragment.
    """
    times = np.asarray(t)
    if not len(times):
        return np.zeros(0, np.bool_)
    breaks = times[1:] != times[:-1] + 1
    for key in keys:
        breaks = breaks | np.asarray(key[1:] != key[:-1], np.bool_)
    return np.append(breaks, True)


def sequence_lengths(ends: BoolArray, longest: int) -> IntArray:
    """The lengths of the sequences that `ends` (N,) cuts, at most `longest`: int64 (B,), sum N."""
    bounds = np.flatnonzero(ends) + 1
    runs = np.diff(bounds, prepend=0)
    pieces = -(-runs // longest)
    lengths = np.full(int(pieces.sum()), longest, np.int64)
    lengths[np.cumsum(pieces) - 1] = runs - (pieces - 1) * longest
    return lengths


def pad(column: Array, lengths: IntArray, width: int) -> Array:
    """Pad the sequences of a column (N, ...) with zeros (or empty strings): (B, width, ...)."""
    shape = (len(lengths), width, *column.shape[1:])
    strings = column.dtype == object
    padded = np.full(shape, "", object) if strings else np.zeros(shape, column.dtype)
    padded[np.arange(width) < lengths[:, None]] = column
    return padded


def unpad(column: Array, lengths: IntArray) -> Array:
    """(N, ...): the rows of a padded column (B, width, ...), in order."""
    return np.asarray(column[np.arange(column.shape[1]) < lengths[:, None]])


class NStep(NamedTuple):
    """For each row: its n-step return, its number of rewards, and the row of the last one."""

    returns: npt.NDArray[np.float64]
    steps: IntArray
    last: IntArray


def n_step(rewards: Array, ends: BoolArray, n: int, gamma: float) -> NStep:
    """The returns of up to n rewards, not beyond the row where `ends` (N,) is True.

        G_t = r_t + gamma r_t+1 + ... + gamma^(m-1) r_t+m-1,  m = min(n, rows left)

    Sutton & Barto 2018, Reinforcement Learning, eq. 7.1, without its bootstrap, which is gamma^m
    times the value of the observation after the last row. `rewards`: (N,).
    """
    count = len(rewards)
    row = np.arange(count)
    left = np.zeros(count, np.int64)
    if count:
        bounds = np.flatnonzero(ends)
        left = bounds[np.searchsorted(bounds, row)] - row + 1
    steps = np.minimum(left, n).astype(np.int64)
    returns = np.zeros(count, np.float64)
    for k in range(min(n, int(steps.max(initial=0)))):
        summed = row[steps > k]
        returns[summed] += gamma**k * rewards[summed + k]
    return NStep(returns, steps, row + steps - 1)
