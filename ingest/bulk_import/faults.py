"""The invalid rows of an import: found with masks, described one by one only on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]


class RowFaults:
    """The first fault of each of `rows` rows; `label(row)` is a row's number in the table."""

    def __init__(self, rows: int, label: Callable[[int], int]) -> None:
        self._rows, self.label = rows, label
        self._which = np.zeros(0, np.int16)  # 0: no fault, n: the n-th reason; empty: no faults
        self._reasons: list[tuple[str, str, Callable[[int], Any]]] = []

    def __len__(self) -> int:
        return self._rows

    def add(
        self, bad: Mask, column: str, expected: str, got: Callable[[int], Any] | None = None
    ) -> None:
        """Mark the rows of the mask `bad`, except those that have a fault already.

        `got(row)` returns the value found in a row; rows count from 0 here.
        """
        if bad.any():
            if not self._reasons:
                self._which = np.zeros(self._rows, np.int16)
            self._reasons.append((column, expected, got or (lambda row: "null")))
            self._which[bad & (self._which == 0)] = len(self._reasons)

    @property
    def rows(self) -> NDArray[np.int64]:
        """The invalid rows, ascending."""
        return np.flatnonzero(self._which) if self._reasons else np.zeros(0, np.int64)

    def sums(self) -> Iterator[tuple[str, int]]:
        """The number of invalid rows, by column and reason."""
        if self._reasons:
            counts = np.bincount(self._which, minlength=len(self._reasons) + 1)
            for (column, expected, _), count in zip(self._reasons, counts[1:], strict=True):
                if count:
                    yield f"{column}: {expected}"[:200], int(count)

    def has(self, row: int) -> bool:
        """Whether a row is invalid."""
        return bool(self._reasons) and bool(self._which[row])

    def expected(self, row: int) -> str:
        """What was expected in an invalid row."""
        expected: str = self._reasons[int(self._which[row]) - 1][1]
        return expected

    def name(self, row: int) -> tuple[str, str]:
        """(path, message) of an invalid row."""
        column, expected, got = self._reasons[self._which[row] - 1]
        return f"$.{column}[{self.label(row)}]", f"{expected}, got {got(row)!s:.100}"

    def take(self, others: RowFaults, rows: NDArray[np.int64]) -> None:
        """Copy the faults of `others`, whose row i is row `rows[i]` here."""
        for number, (column, expected, got) in enumerate(others._reasons, 1):
            bad = np.zeros(len(self), np.bool_)
            bad[rows[others._which == number]] = True
            place = dict(zip(rows.tolist(), range(len(rows)), strict=True))
            self.add(bad, column, expected, partial(_at, got, place))


def _at(got: Callable[[int], Any], place: Mapping[int, int], row: int) -> Any:
    return got(place[row])
