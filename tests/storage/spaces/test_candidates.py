"""Candidates: which leaf has them, how rows are padded, and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from storage.spaces.candidates import Candidates
from storage.spaces.descriptors import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    SpaceError,
)

MASK = MultiBinary((4,))


def observation(rows: Space, **others: Space) -> Dict:
    return Dict({"candidates": rows, "age": Box(()), **others})


def rows(*shape: int) -> Box:
    return Box(shape, ragged=True)


def made() -> Candidates:
    return Candidates(observation(rows(4, 2), action_mask=MASK), Discrete(4))


def test_rows_are_padded_and_the_others_masked() -> None:
    found = made().observed({"age": 3.0}, [[1, 2], [3, 4]])
    assert found["age"] == 3.0
    np.testing.assert_array_equal(found["candidates"], [[1, 2], [3, 4], [0, 0], [0, 0]])
    assert found["candidates"].dtype == np.float32
    np.testing.assert_array_equal(found["action_mask"], [1, 1, 0, 0])
    some = made().observed({"age": 3.0, "action_mask": [0, 1]}, [[1, 2], [3, 4]])
    np.testing.assert_array_equal(some["action_mask"], [0, 1, 0, 0])


def test_an_observation_is_padded_where_it_has_to_be() -> None:
    """Whole observations, and what is no mapping with candidates, come back as they are."""
    short = made().padded({"age": 3.0, "candidates": [[1, 2]]})
    np.testing.assert_array_equal(short["action_mask"], [1, 0, 0, 0])
    assert made().padded(short) is short
    masked = made().padded({"age": 3.0, "candidates": [[1, 2], [3, 4]], "action_mask": [0, 1]})
    np.testing.assert_array_equal(masked["action_mask"], [0, 1, 0, 0])
    full = made().padded({"age": 3.0, "candidates": np.ones((4, 2))})
    np.testing.assert_array_equal(full["action_mask"], [1, 1, 1, 1])
    for other in (None, 3.0, {"age": 3.0}):
        assert made().padded(other) is other


@pytest.mark.parametrize(
    ("context", "rows", "text"),
    [
        ({}, np.zeros((5, 2)), "expected 1 to 4 candidates, got 5"),
        ({}, np.zeros((0, 2)), "expected 1 to 4 candidates, got 0"),
        ({}, np.zeros((3, 1)), r"expected rows of 2 features, got shape \(3, 1\)"),
        ({}, np.zeros(2), r"expected rows of 2 features, got shape \(2,\)"),
        ({"action_mask": [1]}, np.zeros((3, 2)), r"expected 0 or 1 for each of 3 .* got \[1\]"),
        ({}, [[1.0, 2.0], [4.0]], "expected rows of 2 numbers, got others"),
        ({}, [["a", "b"]], "expected rows of 2 numbers, got others"),
        (
            {"action_mask": [0.5]},
            [[1.0, 2.0]],
            r"expected 0 or 1 for each of 1 .* got \[0\.5\]",
        ),
        ({"action_mask": ["on"]}, [[1.0, 2.0]], r"expected 0 or 1 for each of 1"),
    ],
)
def test_rows_that_do_not_fit_are_refused(context, rows, text) -> None:
    with pytest.raises(SpaceError, match=text):
        made().observed(context, rows)


@pytest.mark.parametrize(
    ("spaces", "text"),
    [
        ((observation(rows(4, 2)), Discrete(4)), "expected the key 'action_mask' beside it"),
        ((observation(rows(3, 2), action_mask=MASK), Discrete(4)), "expected candidates:NxFEAT"),
        ((observation(Box((4, 2)), action_mask=MASK), Discrete(4)), "expected candidates:NxFEAT"),
        (
            (observation(rows(4, 2), action_mask=MASK), MultiDiscrete((2, 2))),
            r"expected candidates:NxFEATURES, as in Box\(\(n, features\), ragged=True\), next to",
        ),
    ],
)
def test_a_leaf_that_does_not_fit_is_named(spaces, text) -> None:
    with pytest.raises(SpaceError, match=f"observation.candidates: {text}"):
        Candidates.of(*spaces)
    assert Candidates.of(Dict({"items": Box((4, 2))}), Discrete(4)) is None
