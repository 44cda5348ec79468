"""The invalid rows of a table: found with masks, described one by one only on request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ingest.columns.arrow_kinds import Mask

Got: TypeAlias = Callable[[int], Any]
"""The value found in a row, for a message; rows count from 0."""


class Fault(NamedTuple):
    """What is wrong with some rows: the column or other place, and what was expected there."""

    place: str
    expected: str
    got: Got | None = None

    @property
    def reason(self) -> str:
        return f"{self.place}: {self.expected}"

    def message(self, row: int) -> str:
        """What was expected and, if that is known, what came."""
        return self.expected if self.got is None else f"{self.expected}, got {self.got(row)!s:.100}"

    def text(self, row: int) -> str:
        """The message with its place."""
        return f"{self.place}: {self.message(row)}"


class RowFaults:
    """The first fault of each of `rows` rows."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._which = np.zeros(0, np.int16)  # 0: no fault, n: the n-th; empty: no faults
        self._found: list[Fault] = []

    def __len__(self) -> int:
        return self._rows

    def add(self, bad: Mask, place: str, expected: str, got: Got | None = None) -> None:
        """Mark the rows of the mask `bad`, except those that have a fault already."""
        if bad.any():
            if not self._found:
                self._which = np.zeros(self._rows, np.int16)
            self._found.append(Fault(place, expected, got))
            self._which[bad & (self._which == 0)] = len(self._found)

    @property
    def bad(self) -> Mask:
        """Which rows are invalid, (rows,)."""
        return self._which > 0 if self._found else np.zeros(self._rows, np.bool_)

    @property
    def rows(self) -> NDArray[np.int64]:
        """The invalid rows, ascending."""
        return np.flatnonzero(self._which)

    def each(self) -> Iterator[tuple[Fault, NDArray[np.int64]]]:
        """The faults, each with its rows, ascending."""
        for number, fault in enumerate(self._found, 1):
            rows = np.flatnonzero(self._which == number)
            if len(rows):
                yield fault, rows

    def has(self, row: int) -> bool:
        """Whether a row is invalid."""
        return bool(self._found) and bool(self._which[row])

    def of(self, row: int) -> Fault:
        """The fault of an invalid row."""
        return self._found[int(self._which[row]) - 1]

    def take(self, others: RowFaults, rows: NDArray[np.int64]) -> None:
        """Copy the faults of `others`, whose row i is row `rows[i]` here."""
        place = dict(zip(rows.tolist(), range(len(rows)), strict=True)) if others._found else {}
        for fault, bad in others.each():
            mask = np.zeros(len(self), np.bool_)
            mask[rows[bad]] = True
            got = None if fault.got is None else partial(_at, fault.got, place)
            self.add(mask, fault.place, fault.expected, got)


def nothing(row: int) -> str:
    """What came in a row that is null."""
    return "nothing"


def shown(column: Any) -> Got:
    """What came in the rows of a pyarrow.Array."""

    def got(row: int) -> str:
        try:
            value = column[row].as_py()
        except (OverflowError, ValueError):  # a time that Python cannot represent
            return f"{column.type} {column[row].value}"
        return nothing(row) if value is None else f"{value!r:.80}"

    return got


def _at(got: Got, place: Mapping[int, int], row: int) -> Any:
    return got(place[row])
