"""Number columns that may exceed memory: written once and read block by block.

    column = MemoryColumn()
    column.append(np.array([1.0, 2.0]))
    mean, variance, skew = moments(column)

A judgement needs only a few numbers per episode, but those of all episodes. Here they are in
memory; `policy.judging.scratch` stores them on disk. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "MemoryColumn",
    "NumberColumn",
    "Numbers",
    "column_of",
    "combined",
    "ends",
    "mean_of",
    "moments",
    "whole",
]

FloatArray = npt.NDArray[np.float64]


class NumberColumn(Protocol):
    """Numbers (n,) in the order in which they were appended."""

    @property
    def size(self) -> int: ...

    def append(self, values: FloatArray) -> None: ...

    def blocks(self) -> Iterator[FloatArray]:
        """All blocks; may be called again. Columns written alike have blocks of equal sizes."""

    def like(self) -> NumberColumn:
        """An empty column of this kind."""


Numbers: TypeAlias = FloatArray | NumberColumn


class MemoryColumn:
    """A column in memory."""

    def __init__(self) -> None:
        self._blocks: list[FloatArray] = []
        self.size = 0

    def append(self, values: FloatArray) -> None:
        self._blocks.append(values)
        self.size += values.size

    def blocks(self) -> Iterator[FloatArray]:
        return iter(self._blocks)

    def like(self) -> MemoryColumn:
        return MemoryColumn()


def column_of(numbers: Numbers) -> NumberColumn:
    """An array as a column of one block; a column unchanged."""
    if not isinstance(numbers, np.ndarray):
        return numbers
    found = MemoryColumn()
    if numbers.size:
        found.append(np.asarray(numbers, np.float64))
    return found


def combined(make: Callable[..., FloatArray], *columns: NumberColumn) -> NumberColumn:
    """The column of what `make` returns for corresponding blocks of columns of equal length."""
    found = columns[0].like()
    for blocks in zip(*(one.blocks() for one in columns), strict=True):
        found.append(make(*blocks))
    return found


def whole(column: NumberColumn) -> FloatArray:
    """(n,) all numbers, in memory."""
    return np.concatenate([np.empty(0), *column.blocks()])


def ends(column: NumberColumn) -> tuple[float, float]:
    """(smallest, largest); both NaN if one is NaN. (inf, -inf) for an empty column."""
    low, high = np.inf, -np.inf
    for block in column.blocks():
        low, high = np.minimum(low, block.min()), np.maximum(high, block.max())
    return float(low), float(high)


def moments(column: NumberColumn) -> tuple[float, float, float]:
    """(mean, second and third central moment), each a mean over the n numbers, n > 0."""
    mean = mean_of(column)
    second = third = 0.0
    for block in column.blocks():
        apart = block - mean
        squares = apart * apart
        second, third = second + float(squares.sum()), third + float(squares @ apart)
    return mean, second / column.size, third / column.size


def mean_of(column: NumberColumn) -> float:
    """The mean of n numbers, n > 0."""
    return sum(float(block.sum()) for block in column.blocks()) / column.size
