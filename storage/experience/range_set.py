"""`RangeSet`: a set of integers stored as inclusive ranges.

The size of state that consists of ordinals or row numbers (read, deleted, trained on) grows with
the number of gaps, not with the number of members.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

LIMIT = 2**63
SHOWN = 5  # ranges in a text


class RangeSet:
    """A mutable set of integers as sorted, disjoint, non-adjacent ranges.

    Example:
        >>> done = RangeSet([(1, 3)])
        >>> done.add(4)
        >>> done.ranges(), 5 in done
        ([(1, 4)], False)
    """

    __slots__ = ("_count", "_firsts", "_lasts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        self._count = 0
        for first, last in ranges:
            self.add_range(first, last)

    @classmethod
    def of(cls, numbers: Iterable[int]) -> RangeSet:
        """The set of single numbers, in any order."""
        result = cls()
        for number in numbers:
            result.add(number)
        return result

    # changes

    @classmethod
    def of_array(cls, numbers: npt.NDArray[np.int64]) -> RangeSet:
        """The set of ascending integers (N,)."""
        if not len(numbers):
            return cls()
        cuts = np.flatnonzero(np.diff(numbers) > 1)
        firsts = numbers[np.append(0, cuts + 1)].tolist()
        return cls(zip(firsts, numbers[np.append(cuts, len(numbers) - 1)].tolist(), strict=True))

    def add(self, number: int) -> None:
        """Add one number."""
        lasts = self._lasts
        if lasts and number == lasts[-1] + 1:  # the common case: the next one
            lasts[-1] = number
            self._count += 1
        else:
            self.add_range(number, number)

    def add_range(self, first: int, last: int) -> None:
        """Add first..last, both inclusive. Raises ValueError if last < first."""
        _require_range(first, last)
        i, j = self._span(first - 1, last + 1)
        if i < j:
            first = min(first, self._firsts[i])
            last = max(last, self._lasts[j - 1])
        self._count += last - first + 1 - self._size(i, j)
        self._firsts[i:j] = [first]
        self._lasts[i:j] = [last]

    def discard_range(self, first: int, last: int) -> None:
        """Remove the members among first..last. Raises ValueError if last < first."""
        _require_range(first, last)
        i, j = self._span(first, last)
        if i == j:
            return
        kept = []
        if self._firsts[i] < first:
            kept.append((self._firsts[i], first - 1))
        if self._lasts[j - 1] > last:
            kept.append((last + 1, self._lasts[j - 1]))
        self._count += sum(b - a + 1 for a, b in kept) - self._size(i, j)
        self._firsts[i:j] = [a for a, _ in kept]
        self._lasts[i:j] = [b for _, b in kept]

    def update(self, ranges: RangeSet | Iterable[tuple[int, int]]) -> None:
        """Add every range of another set."""
        pairs = ranges.ranges() if isinstance(ranges, RangeSet) else ranges
        for first, last in pairs:
            self.add_range(first, last)

    # questions

    def __contains__(self, number: int) -> bool:
        i = bisect_left(self._lasts, number)
        return i < len(self._firsts) and self._firsts[i] <= number

    def __len__(self) -> int:
        """The number of members."""
        return self._count

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __iter__(self) -> Iterator[int]:
        for first, last in self.ranges():
            yield from range(first, last + 1)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RangeSet):
            return NotImplemented
        return self._firsts == other._firsts and self._lasts == other._lasts

    __hash__ = None  # type: ignore[assignment]  # mutable, as a set is

    def __repr__(self) -> str:
        return f"RangeSet({self.ranges()})"

    def __str__(self) -> str:
        """`0-3, 7, 9-12`, or `none`; "..." after the first five ranges."""
        pairs = self.ranges()
        texts = [str(a) if a == b else f"{a}-{b}" for a, b in pairs[:SHOWN]]
        return ", ".join([*texts, "..."] if len(pairs) > SHOWN else texts) or "none"

    def ranges(self) -> list[tuple[int, int]]:
        """The members as ascending (first, last) pairs."""
        return list(zip(self._firsts, self._lasts, strict=True))

    def touching(self, first: int, last: int) -> list[tuple[int, int]]:
        """The ranges that overlap first..last or are adjacent to it."""
        i, j = self._span(first - 1, last + 1)
        return list(zip(self._firsts[i:j], self._lasts[i:j], strict=True))

    def contains_range(self, first: int, last: int) -> bool:
        """Whether all of first..last are members."""
        i = bisect_left(self._lasts, last)
        return i < len(self._firsts) and self._firsts[i] <= first

    def missing(self, first: int, last: int) -> RangeSet:
        """The numbers of first..last that are not members; empty if last < first."""
        return RangeSet([(first, last)] if first <= last else []).difference(self)

    @property
    def pieces(self) -> int:
        """The number of ranges."""
        return len(self._firsts)

    @property
    def first(self) -> int | None:
        """The smallest member; None if the set is empty."""
        return self._firsts[0] if self._firsts else None

    @property
    def last(self) -> int | None:
        """The largest member; None if the set is empty."""
        return self._lasts[-1] if self._lasts else None

    # new sets

    def copy(self) -> RangeSet:
        """A set of the same numbers, which changes on its own."""
        result = RangeSet()
        result._firsts, result._lasts = self._firsts.copy(), self._lasts.copy()
        result._count = self._count
        return result

    def union(self, other: RangeSet) -> RangeSet:
        """A new set of the numbers in either set."""
        result = self.copy()
        result.update(other)
        return result

    def difference(self, other: RangeSet) -> RangeSet:
        """A new set of the numbers in this set only."""
        result = self.copy()
        if not self:
            return result
        i, j = other._span(self._firsts[0], self._lasts[-1])
        for k in range(i, j):
            result.discard_range(other._firsts[k], other._lasts[k])
        return result

    def intersection(self, other: RangeSet) -> RangeSet:
        """A new set of the numbers in both sets."""
        return self.difference(self.difference(other))

    # JSON

    def to_json(self) -> list[list[int]]:
        """`[[first, last], ...]`, ascending."""
        return [[first, last] for first, last in self.ranges()]

    @classmethod
    def from_json(cls, document: Any) -> RangeSet:
        """Parse the result of `to_json`. Raises ValueError unless pairs are ascending and disjoint.

        Adjacent pairs are accepted and merged.
        """
        if not isinstance(document, list):
            raise ValueError(f"ranges: expected a list of [first, last], got {document!r:.80}")
        result = cls()
        for i, pair in enumerate(document):
            first, last = _pair(pair, i)
            if result._lasts and first <= result._lasts[-1]:
                raise ValueError(f"ranges[{i}]: expected more than {result._lasts[-1]}, got {pair}")
            result.add_range(first, last)
        return result

    # inside

    def _span(self, first: int, last: int) -> tuple[int, int]:
        """Indices i, j such that ranges i..j-1 are those that overlap first..last."""
        i = bisect_left(self._lasts, first)
        return i, max(i, bisect_right(self._firsts, last))

    def _size(self, i: int, j: int) -> int:
        return sum(self._lasts[i:j]) - sum(self._firsts[i:j]) + (j - i)


def _require_range(first: int, last: int) -> None:
    if last < first:
        raise ValueError(f"expected first <= last, got {first}..{last}")


def _pair(pair: Any, i: int) -> tuple[int, int]:
    if isinstance(pair, (list, tuple)) and len(pair) == 2 and all(type(n) is int for n in pair):
        first, last = pair
        if -LIMIT <= first <= last < LIMIT:
            return first, last
    raise ValueError(f"ranges[{i}]: expected [first, last] with first <= last, got {pair!r:.80}")
