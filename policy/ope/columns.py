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

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


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


class UnitNumbers:
    """One number per episode, or the mean for each unit."""

    def __init__(self, column: Callable[[], NumberColumn]) -> None:
        self._column = column()
        self._sums, self._counts = np.empty(0), np.empty(0)
        self.by_unit = False

    def add(self, numbers: FloatArray, units: IntArray | None) -> None:
        if units is None:
            return self._column.append(numbers)
        self.by_unit = True
        new = max(0, int(units.max()) + 1 - self._sums.size)
        self._sums, self._counts = (np.pad(one, (0, new)) for one in (self._sums, self._counts))
        np.add.at(self._sums, units, numbers)
        np.add.at(self._counts, units, 1.0)
        return None

    def means(self) -> NumberColumn:
        return column_of(self._sums / self._counts) if self.by_unit else self._column

    def sums(self) -> NumberColumn:
        return column_of(self._sums) if self.by_unit else self._column

    @property
    def several(self) -> bool:
        """Whether a unit has more than one episode."""
        return self.by_unit and bool((self._counts > 1).any())


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


def first_of(column: NumberColumn, share: float) -> FloatArray:
    """The first `share` of the numbers, in memory."""
    left, found = int(share * column.size), [np.empty(0)]
    for block in column.blocks():
        if left <= 0:
            break
        found.append(block[:left])
        left -= block.size
    return np.concatenate(found)


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
