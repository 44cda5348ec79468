"""RangeSet behaves as a set of integers, whatever the order of changes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.experience.range_set import RangeSet

small = st.integers(-12, 40)
spans = st.tuples(small, st.integers(0, 9)).map(lambda pair: (pair[0], pair[0] + pair[1]))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
)


def members(ranges: list[tuple[int, int]]) -> set[int]:
    return {n for first, last in ranges for n in range(first, last + 1)}


def assert_canonical(ranges: RangeSet) -> None:
    pairs = ranges.ranges()
    assert all(first <= last for first, last in pairs)
    assert all(a[1] + 1 < b[0] for a, b in itertools.pairwise(pairs))
    assert len(ranges) == len(members(pairs)) == len(list(ranges))
    assert bool(ranges) == bool(pairs)


@given(st.sets(small))
def test_an_array_is_the_set_of_its_numbers(numbers: set[int]) -> None:
    """Whatever gaps there are between them."""
    ranges = RangeSet.of_array(np.array(sorted(numbers), np.int64))
    assert_canonical(ranges)
    assert {*ranges} == numbers


@given(st.lists(st.tuples(st.booleans(), spans), max_size=30))
def test_adding_and_discarding_equals_a_set(changes: list[tuple[bool, tuple[int, int]]]) -> None:
    """Any sequence of changes gives the members of the same sequence on a set, coalesced."""
    ranges, model = RangeSet(), set[int]()
    for adding, (first, last) in changes:
        if adding:
            ranges.add_range(first, last)
            model |= members([(first, last)])
        else:
            ranges.discard_range(first, last)
            model -= members([(first, last)])
        assert_canonical(ranges)
    assert set(ranges) == model
    assert [n for n in range(-15, 60) if n in ranges] == sorted(model)
    assert ranges.first == min(model, default=None)
    assert ranges.last == max(model, default=None)
    assert ranges.pieces == len(ranges.ranges())


@given(st.lists(small, max_size=40))
def test_single_numbers_coalesce_in_any_order(numbers: list[int]) -> None:
    """Adding one number at a time, doubles included, is adding a set."""
    ranges = RangeSet.of(numbers)
    assert_canonical(ranges)
    assert set(ranges) == set(numbers)


@given(st.lists(spans, max_size=8), st.lists(spans, max_size=8), spans)
def test_set_algebra(
    left: list[tuple[int, int]], right: list[tuple[int, int]], span: tuple[int, int]
) -> None:
    """union, difference, intersection, missing and contains_range mean what they say."""
    a, b = RangeSet(left), RangeSet(right)
    results = {
        "union": (a.union(b), members(left) | members(right)),
        "difference": (a.difference(b), members(left) - members(right)),
        "intersection": (a.intersection(b), members(left) & members(right)),
        "missing": (a.missing(*span), members([span]) - members(left)),
    }
    for name, (found, expected) in results.items():
        assert_canonical(found)
        assert set(found) == expected, name
    assert a.contains_range(*span) == (members([span]) <= members(left))
    assert members(a.touching(*span)) == {
        n for pair in a.ranges() if pair[0] <= span[1] + 1 and pair[1] >= span[0] - 1
        for n in range(pair[0], pair[1] + 1)
    }  # fmt: skip
    assert a == RangeSet(left)


@given(st.lists(spans, max_size=8))
def test_json_round_trip(pairs: list[tuple[int, int]]) -> None:
    """from_json(to_json) is the same set, through JSON text."""
    ranges = RangeSet(pairs)
    assert RangeSet.from_json(json.loads(json.dumps(ranges.to_json()))) == ranges


@given(json_values)
def test_any_json_is_a_set_or_a_value_error(document: Any) -> None:
    """Any content of a file gives a ValueError or a canonical set."""
    try:
        ranges = RangeSet.from_json(document)
    except ValueError:
        return
    assert RangeSet.from_json(ranges.to_json()) == ranges


@pytest.mark.parametrize(
    "document", [[[3, 1]], [[1, 4], [4, 5]], [[5, 6], [1, 2]], [[True, 1]], [[0, 2**63]], [[1]]]
)
def test_json_that_is_not_ascending_pairs_is_refused(document: Any) -> None:
    """Overlapping, unordered, reversed, boolean or huge pairs are refused and named."""
    with pytest.raises(ValueError, match=r"ranges\[\d\]"):
        RangeSet.from_json(document)


def test_a_reversed_range_is_refused() -> None:
    """first..last with last < first is a mistake of the caller, not an empty range."""
    ranges = RangeSet([(1, 2)])
    with pytest.raises(ValueError, match="first <= last"):
        ranges.add_range(5, 4)
    with pytest.raises(ValueError, match="first <= last"):
        ranges.discard_range(5, 4)
    assert ranges.ranges() == [(1, 2)]
