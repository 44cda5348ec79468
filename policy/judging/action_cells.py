"""The cells of actions for which logged propensities are tested (`policy.ope.propensities`).

Every action of a Discrete space is a cell, every value of each position of several, and four equal
parts of each bounded number of a Box.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policy.ope.propensities import ActionCells
from storage.spaces.descriptors import Box, Discrete, MultiBinary, MultiDiscrete, Space
from storage.spaces.leaves import Leaf, leaves

BINS = 4


@dataclass(frozen=True)
class _ActionPosition:
    """One number of an action, with values in `n` parts of equal size from `low` on."""

    name: str
    low: float
    size: float  # of a part
    n: int
    names: tuple[str, ...] = ()
    whole: bool = True  # whether the numbers are whole


def cells_of(space: Space, columns: Mapping[str, npt.NDArray[np.generic]]) -> ActionCells | None:
    """The cells of S actions, leaf path -> (S, ...); None for a space with numbers without bounds.

    With one propensity p of a whole action, [A in cell] / p has the mean (the number of actions in
    the cell, or its volume), if all can be taken.
    """
    positions: list[_ActionPosition] = []
    values = []
    for leaf in leaves(space):
        found = _positions(leaf)
        if found is None:
            return None
        positions += found
        column = np.asarray(columns[leaf.path])
        values.append(column.reshape(len(column), -1))
    numbers = np.concatenate(values, axis=1)
    offsets = np.cumsum([0, *(one.n for one in positions)])
    parts = np.stack(
        [
            _parts((column - one.low) / one.size, one.n)
            for one, column in zip(positions, numbers.T, strict=True)
        ],
        axis=1,
    )
    whole = sum(math.log(one.n * one.size) for one in positions)
    log_size = [whole - math.log(one.n) for one in positions for _ in range(one.n)]

    def name(cell: int) -> str:
        place = int(np.searchsorted(offsets, cell, side="right")) - 1
        return _named(positions[place], cell - int(offsets[place]))

    return ActionCells(np.where(parts < 0, -1, parts + offsets[:-1]), np.array(log_size), name)


def _parts(scaled: npt.NDArray[np.float64], n: int) -> npt.NDArray[np.int64]:
    """(S,) the part of each number, of n; the upper bound is in the last one, -1: outside."""
    inside = (scaled >= 0) & (scaled <= n)
    return np.where(inside, np.minimum(np.where(inside, scaled, 0.0), n - 1), -1).astype(np.int64)


def _positions(leaf: Leaf) -> list[_ActionPosition] | None:
    """The positions of a leaf; None if a number of it has no bounds."""
    space, path = leaf.space, leaf.path
    if isinstance(space, Discrete):
        return [_ActionPosition(path or "action", space.start, 1.0, space.n, space.names)]
    if isinstance(space, MultiDiscrete):
        where = zip(space.start, space.nvec, strict=True)
        return [_ActionPosition(f"{path}[{i}]", low, 1.0, n) for i, (low, n) in enumerate(where)]
    if isinstance(space, MultiBinary):
        return [_ActionPosition(f"{path}[{i}]", 0, 1.0, 2) for i in range(math.prod(space.shape))]
    if not isinstance(space, Box) or np.dtype(space.dtype).kind != "f":
        return None
    low, high = (
        np.broadcast_to(np.asarray(end, np.float64), space.shape).reshape(-1)
        for end in (space.low, space.high)
    )
    width = (high - low) / BINS
    if not (np.isfinite(width).all() and (width > 0).all()):
        return None
    return [
        _ActionPosition(f"{path}[{i}]", float(low[i]), float(width[i]), BINS, (), False)
        for i in range(low.size)
    ]


def _named(position: _ActionPosition, part: int) -> str:
    if position.names:
        return repr(position.names[part])
    low = position.low + part * position.size
    if not position.whole:
        return f"{position.name or 'action'} in {low:g}..{low + position.size:g}"
    is_action = position.name == "action"
    return f"action {low:.0f}" if is_action else f"{position.name} = {low:.0f}"
