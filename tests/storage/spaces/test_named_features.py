"""Features by name: each value has its column, or is an error that names the columns."""

from __future__ import annotations

import math
from typing import Any

import pytest

from storage.declarations.declaration import DeclarationError, PolicyDeclaration
from storage.spaces.descriptors import Box, Dict, Discrete, MultiBinary, SpaceError
from storage.spaces.named_features import NamedFeatures

NAMES = ("price", "color=red", "color=*", "shop.new", "size=L")


def test_values_have_their_columns() -> None:
    """Numbers by name, texts as a column of their own or as any other, inner keys with dots."""
    features = NamedFeatures(NAMES)
    assert features.row({"price": 3, "color": "red", "shop": {"new": True}}) == [3, 1, 0, 1, 0]
    assert features.row({"color": "blue", "size": "L"}) == [0, 0, 1, 0, 1]
    parts = [{"shop": {"new": 2}}, {"price": 3, "shop": {}}, {"color": "red"}]
    assert features.row(parts) == [3, 1, 0, 2, 0]
    assert features.row({}) == [0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"prise": 3}, r"declared features \(price, .*got 'prise'"),
        ({"size": "M"}, r"declared features \(.*size=L\), got 'size=M'"),
        ({"price": math.nan}, "features.price: expected finite numbers or texts, got nan"),
        ({"price": 10**400}, "features.price: expected finite numbers or texts, got 1000"),
        ({"price": [1]}, r"features.price: expected finite numbers or texts, got \[1\]"),
        ({"color=blue": 3}, r"declared features \(.*\), got 'color=blue'"),
        ([{"color": "red"}, {"color": "blue"}], "features: expected one value of 'color', got two"),
        ({"shop.new": 1, "shop": {"new": 0}}, r"expected one value of 'shop\.new', got two"),
        (3, "features: expected finite numbers or texts, got 3"),
        ({"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {}}}}}}}}}, "at most 8 deep"),
    ],
)
def test_a_value_without_a_column_is_refused(given: Any, text: str) -> None:
    with pytest.raises(SpaceError, match=text):
        NamedFeatures(NAMES).row(given)


def test_a_declaration_names_every_column() -> None:
    """Each once, and only those of candidates; a file without names is as it was."""
    space = Dict({"action_mask": MultiBinary((4,)), "candidates": Box((4, 2), ragged=True)})
    declared = PolicyDeclaration(
        observation=space, action=Discrete(4), candidate_features=("a", "b")
    )
    assert PolicyDeclaration.from_json(declared.to_json()) == declared
    without = PolicyDeclaration(observation=space, action=Discrete(4))
    assert "candidate_features" not in without.to_json()
    for names, text in (
        (("a",), "expected 2 names, got 1"),
        (("a", "a"), "expected different names of features, got 'a' twice"),
        (("a", ""), "expected names of features"),
        ("ab", "expected a list of names, got 'ab'"),
    ):
        with pytest.raises(DeclarationError, match=text):
            PolicyDeclaration(
                observation=space,
                action=Discrete(4),
                candidate_features=names,  # type: ignore[arg-type]
            )
    with pytest.raises(DeclarationError, match="expected none without candidates, got 1"):
        PolicyDeclaration(observation=Box((2,)), action=Discrete(4), candidate_features=("a",))
