"""Settings: checked by their annotations, set from text, explained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from msgspec import Meta

from policy.algorithms.settings import AnnotatedSettings, changed, settings_of


@dataclass(frozen=True, kw_only=True)
class Mine(AnnotatedSettings):
    """A config of every kind of setting."""

    share: Annotated[float, Meta(ge=0, le=1, description="a share")] = 0.5
    count: Annotated[int, Meta(ge=1, description="a count")] = 3
    most: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="a limit")] = None
    rate: Annotated[float, Meta(gt=0, description="a rate")] = 0.1
    kind: Annotated[Literal["a", "b", "c"], Meta(description="a kind")] = "a"
    base: Annotated[float | Literal["mean"], Meta(description="a base")] = "mean"
    on: Annotated[bool, Meta(description="a switch")] = False


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("share", "0.25", 0.25),
        ("share", 1, 1.0),
        ("count", "7", 7),
        ("most", "none", None),
        ("most", "4", 4),
        ("kind", "b", "b"),
        ("base", "-2.5", -2.5),
        ("base", "mean", "mean"),
        ("on", "true", True),
    ],
)
def test_values_may_be_text(name: str, text: Any, value: Any) -> None:
    """As from a command line, or typed as from a file."""
    found = getattr(changed(Mine(most=9), {name: text}), name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("share", "1.5", "0 to 1"),
        ("share", math.nan, "0 to 1"),
        ("count", "0", "a whole number >= 1"),
        ("count", "2.5", "a whole number >= 1"),
        ("most", "0", "a whole number >= 1 or none"),
        ("rate", "0", "a number > 0"),
        ("rate", math.inf, "a number > 0"),
        ("rate", "fast", "a number > 0"),
        ("kind", "d", "a, b or c"),
        ("base", "median", "a number or mean"),
        ("on", "perhaps", "true or false"),
    ],
)
def test_a_bad_value_is_refused_by_its_name(name: str, value: Any, expected: str) -> None:
    """The error says what was expected and what came, also from the constructor."""
    with pytest.raises(ValueError, match=f"{name}: expected {expected}, got {value!r}"):
        changed(Mine(), {name: value})
    if not isinstance(value, str):
        with pytest.raises(ValueError, match=f"{name}: expected {expected}"):
            Mine(**{name: value})


def test_numbers_of_numpy_are_numbers() -> None:
    """A search over settings often has them; text needs `changed`."""
    assert Mine(share=np.float64(0.5), count=np.int64(4)).count == 4
    with pytest.raises(ValueError, match="count: expected"):
        Mine(count="4")  # type: ignore[arg-type]


def test_an_unknown_name_comes_with_those_near_it() -> None:
    """And with all that there are."""
    with pytest.raises(
        ValueError, match=r"shar: expected a setting of Mine \(share, .*near shar: share"
    ):
        changed(Mine(), {"shar": 0.1})


def test_each_setting_is_explained() -> None:
    """Name, meaning and values, in the order of the class."""
    found = [(one.name, one.meaning, one.expected) for one in settings_of(Mine)]
    assert found[0] == ("share", "a share", "0 to 1")
    assert found[2] == ("most", "a limit", "a whole number >= 1 or none")
    assert [name for name, *_ in found] == ["share", "count", "most", "rate", "kind", "base", "on"]
