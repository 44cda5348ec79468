"""Numbers that float32, in which policies and losses compute, cannot hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from storage.spaces.descriptors import Array

NOT_FINITE = "not_finite"
"""The reason of rows with numbers that float32 cannot hold, or that made a loss or weights infinite
or NaN."""
LARGEST = float(np.finfo(np.float32).max)
_LARGEST_TARGET = math.sqrt(LARGEST)
"""A loss squares rewards, and sums of rewards."""


def not_finite(
    batch: Mapping[str, Array], targets: Iterable[str], *inputs: str
) -> npt.NDArray[np.bool_]:
    """Whether each row has NaN, infinity or a number outside float32's range: bool (N,).

    `targets` are columns that a loss squares; `inputs` are columns that a network reads, `obs`
    includes `obs.<path>`.
    """
    bad = np.zeros(len(next(iter(batch.values()), ())), np.bool_)
    for name, column in batch.items():
        target = name in targets
        if (target or name.partition(".")[0] in inputs) and column.dtype.kind == "f":
            most = _LARGEST_TARGET if target else LARGEST
            inside = np.asarray(np.abs(column) <= most)  # False for NaN
            bad |= ~inside.all(axis=tuple(range(1, inside.ndim)))
    return bad
