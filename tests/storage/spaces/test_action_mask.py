"""Action masks: which leaf is one, what it allows, and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.spaces.action_mask import ACTION_MASK, ActionMask
from storage.spaces.codec import Codec
from storage.spaces.descriptors import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    SpaceError,
)


def observation(mask: Space) -> Dict:
    return Dict({ACTION_MASK: mask, "x": Box((2,), "float32", -1.0, 1.0)})


def columns(*rows: list[int]) -> dict[str, np.ndarray]:
    return {ACTION_MASK: np.array(rows, np.int8), "x": np.zeros((len(rows), 2), np.float32)}


def made(mask: Space, action: Space) -> ActionMask:
    found = ActionMask.of(observation(mask), action)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("mask", "action"),
    [
        (MultiBinary((3,)), Discrete(3)),
        (Box((3,), "int8", 0, 1), Discrete(3)),
        (Box((3,), "float32", 0.0, 1.0), Discrete(3, start=5)),
        (MultiBinary((5,)), MultiDiscrete((2, 3))),
    ],
)
def test_the_leaf_of_the_known_name_is_the_mask(mask: Space, action: Space) -> None:
    """As a MultiBinary, or as RLlib's and PettingZoo's Box of zeros and ones."""
    assert made(mask, action).leaf.path == ACTION_MASK


def test_without_the_leaf_there_is_no_mask() -> None:
    assert ActionMask.of(MultiBinary((3,)), Discrete(3)) is None
    assert ActionMask.of(Dict({"mask": MultiBinary((3,))}), Discrete(3)) is None


@pytest.mark.parametrize(
    ("mask", "action", "expected"),
    [
        (MultiBinary((4,)), Discrete(3), r"expected MultiBinary\(3\), .* got MultiBinary"),
        (MultiBinary((3, 1)), Discrete(3), r"expected MultiBinary\(3\)"),
        (Box((3,), "float32", 0.0, 2.0), Discrete(3), r"expected MultiBinary\(3\), .* got Box"),
        (MultiBinary((3,)), MultiDiscrete((2, 3)), r"expected MultiBinary\(5\)"),
        (
            MultiBinary((3,)),
            Box((3,), "float32", -1.0, 1.0),
            "expected a Discrete or MultiDiscrete action",
        ),
    ],
)
def test_a_mask_for_another_space_is_named(mask: Space, action: Space, expected: str) -> None:
    with pytest.raises(SpaceError, match=rf"observation.action_mask: {expected}"):
        ActionMask.of(observation(mask), action)


@given(st.data())
def test_an_action_is_forbidden_iff_its_option_is(data: st.DataObject) -> None:
    """For every choice of a MultiDiscrete with any starts."""
    sizes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    start = tuple(data.draw(st.integers(-3, 3)) for _ in sizes)
    rows = [
        [data.draw(st.integers(0, 1)) for _ in range(sum(sizes))]
        for _ in range(data.draw(st.integers(1, 3)))
    ]
    chosen = [[data.draw(st.integers(0, size - 1)) for size in sizes] for _ in rows]
    mask = made(MultiBinary((sum(sizes),)), MultiDiscrete(sizes, start))
    expected = []
    for row, choice in zip(rows, chosen, strict=True):
        blocks = np.split(np.array(row), np.cumsum(sizes)[:-1])
        expected.append(not all(block[i] for block, i in zip(blocks, choice, strict=True)))
    found = mask.forbidden(columns(*rows), np.array(chosen) + np.array(start))
    assert found.tolist() == expected


def test_an_action_outside_its_space_is_forbidden() -> None:
    """It does not count as an option of the next choice."""
    mask = made(MultiBinary((4,)), MultiDiscrete((2, 2)))
    assert mask.forbidden(columns([1, 1, 1, 1]), np.array([[2, 0]])).tolist() == [True]


def test_a_forbidden_action_is_named_beside_the_allowed_ones() -> None:
    mask = made(MultiBinary((3,)), Discrete(3, start=5))
    with pytest.raises(SpaceError, match=r"^action: .* allows \(5, 7\), got 6$"):
        mask.require_allowed(columns([1, 0, 1]), np.array([6]))
    named = made(MultiBinary((3,)), Discrete.of(["hat", "shoe", "tie"]))
    with pytest.raises(SpaceError, match=r"allows \('hat', 'tie'\), got 'shoe' in row 1$"):
        named.require_allowed(columns([1, 1, 1], [1, 0, 1]), np.array([1, 1]))
    several = made(MultiBinary((4,)), MultiDiscrete((2, 2)))
    with pytest.raises(SpaceError, match=r"allows, got \[0, 1\]$"):
        several.require_allowed(columns([1, 1, 1, 0]), np.array([[0, 1]]))


def test_a_mask_that_allows_nothing_is_named() -> None:
    mask = made(MultiBinary((4,)), MultiDiscrete((2, 2)))
    expected = r"^obs.action_mask: expected at least one allowed option of choice 1, got none$"
    with pytest.raises(SpaceError, match=expected):
        mask.valid(columns([1, 0, 0, 0]))
    with pytest.raises(SpaceError, match=expected):
        mask.require_allowed(columns([1, 0, 0, 0]), np.array([[0, 0]]))


def test_bytes_are_checked_as_columns_are() -> None:
    spaces = observation(MultiBinary((3,))), Discrete(3)
    mask, codecs = made(MultiBinary((3,)), Discrete(3)), (Codec(spaces[0]), Codec(spaces[1]))
    obs = codecs[0].encode({ACTION_MASK: [0, 1, 0], "x": [0.0, 0.0]})
    mask.require_in(codecs, obs, codecs[1].encode(1))
    mask.require_in(codecs, obs)
    with pytest.raises(SpaceError, match="got 2"):
        mask.require_in(codecs, obs, codecs[1].encode(2))
    none = codecs[0].encode({ACTION_MASK: [0, 0, 0], "x": [0.0, 0.0]})
    with pytest.raises(SpaceError, match="got none"):
        mask.require_in(codecs, none)
