"""Descriptors are what their JSON says, and JSON from outside is a Space or a SpaceError."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.spaces.descriptors import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    SpaceError,
    Text,
    Tuple,
    canonical_json,
    parse_space,
    schema_id,
    space_from_json,
    space_to_json,
    spaces_from_canonical_json,
)
from tests.storage.space_strategies import spaces

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats()
    | st.sampled_from(["box", "discrete", "dict", "tuple", "text", "float32", "O", "inf", "Graph"])
)  # fmt: skip
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
NODES: dict[str, dict[str, Any]] = {
    "box": {"dtype": "float32", "shape": [2], "low": 0, "high": [1, 2.5]},
    "discrete": {"n": 2, "start": 0},
    "multi_discrete": {"nvec": [2, 3], "start": [0, 1]},
    "multi_binary": {"shape": [2]},
    "text": {"min_length": 0, "max_length": 3, "charset": "ab"},
    "dict": {"spaces": [["a", {"kind": "discrete", "n": 2, "start": 0}]]},
    "tuple": {"spaces": [{"kind": "discrete", "n": 2, "start": 0}]},
}


@given(spaces, spaces)
def test_json_round_trip(observation: Space, action: Space) -> None:
    """A descriptor survives JSON text; the canonical text is stable and names the schema."""
    text = json.dumps(space_to_json(observation))
    assert space_from_json(json.loads(text)) == observation
    canonical = canonical_json(observation, action)
    assert spaces_from_canonical_json(canonical) == (observation, action)
    assert canonical_json(*spaces_from_canonical_json(canonical)) == canonical
    assert len(schema_id(observation, action)) == 12
    assert hash(space_from_json(json.loads(text))) == hash(observation)


@given(json_values)
def test_any_json_is_a_space_or_a_space_error(document: Any) -> None:
    """Whatever arrives as a document or as a node: SpaceError, or a space that round-trips."""
    for given_document in (document, {"version": 1, "space": document}):
        try:
            space = space_from_json(given_document)
        except SpaceError:
            continue
        assert space_from_json(space_to_json(space)) == space


@given(st.sampled_from(sorted(NODES)), st.data())
def test_a_node_with_one_hostile_field_is_a_space_or_a_space_error(
    kind: str, data: st.DataObject
) -> None:
    """A right node with any one field replaced, gone or added never raises anything else."""
    node = {"kind": kind, **NODES[kind]}
    field = data.draw(st.sampled_from([*node, "extra"]))
    node[field] = data.draw(json_values | st.lists(st.lists(json_values, max_size=2), max_size=2))
    if data.draw(st.booleans()):
        node.pop(data.draw(st.sampled_from(sorted(NODES[kind]))), None)
    try:
        space = space_from_json({"version": 1, "space": node})
    except SpaceError:
        return
    assert space_from_json(space_to_json(space)) == space


@pytest.mark.parametrize("kind", sorted(NODES))
def test_the_nodes_of_these_tests_are_right(kind: str) -> None:
    """The unchanged document is valid; otherwise the hostile ones might all fail for one reason."""
    space_from_json({"version": 1, "space": {"kind": kind, **NODES[kind]}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "O"}, "dtype"),
        ({"dtype": None}, "dtype"),
        ({"shape": [10**9, 10**9]}, "at most"),
        ({"shape": [-1]}, "sizes >= 0"),
        ({"shape": [True]}, "an integer"),
        ({"dtype": "int8", "low": 0.5, "high": 1}, "values of int8"),
        ({"dtype": "uint8", "low": -1, "high": 1}, "values of uint8"),
        ({"low": True}, "values of float32"),
        ({"low": float("nan")}, "without NaN"),
        ({"low": 3, "high": 2}, "low <= high"),
        ({"kind": "Graph"}, "not supported"),
        ({"kind": []}, "a kind"),
        ({"more": 1}, "keys"),
    ],
)
def test_a_refusal_says_what_is_wrong(change: dict[str, Any], message: str) -> None:
    """Types, sizes, bounds, kinds and keys are each refused by name."""
    node = {"kind": "box", **NODES["box"], **change}
    with pytest.raises(SpaceError, match=message):
        space_from_json({"version": 1, "space": node})


def test_deep_nesting_is_refused() -> None:
    """A tower of tuples ends with a SpaceError, not with the interpreter's stack."""
    node: dict[str, Any] = {"kind": "discrete", "n": 2, "start": 0}
    for _ in range(40):
        node = {"kind": "tuple", "spaces": [node]}
    with pytest.raises(SpaceError, match="nested"):
        space_from_json({"version": 1, "space": node})


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version":1}', '{"version":true}'])
def test_other_text_is_no_canonical_json(text: str) -> None:
    """A damaged footer raises SpaceError."""
    with pytest.raises(SpaceError):
        spaces_from_canonical_json(text)


@pytest.mark.parametrize(
    ("text", "space"),
    [
        ("box:4", Box((4,))),
        ("box:84x84x4:uint8", Box((84, 84, 4), np.dtype("uint8"))),
        ("box:2::-1:1", Box((2,), low=np.float32(-1), high=np.float32(1))),  # type: ignore[arg-type]
        ("discrete:2", Discrete(2)),
        ("discrete:5:1", Discrete(5, 1)),
        ("multi_discrete:3,4", MultiDiscrete((3, 4))),
        ("multi_binary:2x3", MultiBinary((2, 3))),
        ("text:32", Text(32)),
    ],
)
def test_short_forms(text: str, space: Space) -> None:
    """The forms of the command line."""
    assert parse_space(text) == space


@given(st.text(max_size=12) | st.from_regex(r"(box|discrete|text|multi_\w+):[-0-9x:,.a-z]{0,8}"))
def test_any_text_is_a_space_or_a_space_error(text: str) -> None:
    """A typing error on the command line is a SpaceError, whatever it is."""
    try:
        parse_space(text)
    except SpaceError:
        return


@pytest.mark.parametrize("text", ["box", "box:", "box::float32:0:1", "discrete:", "text"])
def test_a_short_form_without_its_size_is_refused(text: str) -> None:
    """A forgotten shape declares no scalar; JSON has the shape [], as of an environment's space."""
    with pytest.raises(SpaceError, match="expected box:SHAPE"):
        parse_space(text)
    assert space_from_json(space_to_json(Box())) == Box()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("box:2:-1:1", r"^expected box:SHAPE\[:DTYPE\[:LOW:HIGH\]\], got 'box:2:-1:1'$"),
        ('{"hour": "box:2:-1:1"}', r"^hour: expected box:SHAPE.*, got 'box:2:-1:1'$"),
        ('{"hour": ["a", "a"]}', "^hour: "),
        ({"hour": "box:2"}, "expected text, .*the JSON text of a Dict, got a dict"),
    ],
)
def test_an_error_names_the_form_and_its_place(given: Any, message: str) -> None:
    """In a Dict the message names the part that is wrong; what is no text is refused as such."""
    with pytest.raises(SpaceError, match=message):
        parse_space(given)


def test_names_are_sorted_and_must_differ() -> None:
    """The order in which a Dict is written does not make another schema."""
    first, second = (
        Dict((("b", Discrete(2)), ("a", Text(3)))),
        Dict((("a", Text(3)), ("b", Discrete(2)))),
    )
    assert first == second
    assert schema_id(first, Discrete(2)) == schema_id(second, Discrete(2))
    for names in (("a", "a"), ("a.b",), ("",), ()):
        with pytest.raises(SpaceError, match="names"):
            Dict(tuple((name, Discrete(2)) for name in names))
    with pytest.raises(SpaceError, match="one or more spaces"):
        Tuple(())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultiBinary(3), "multi_binary: expected a shape of whole numbers, got 3"),
        (lambda: Box(84, 84), "box: expected a dtype, got 84"),
        (lambda: Box(84), "box: expected a shape of whole numbers, got 84"),
        (lambda: Box((2.5,)), r"box: expected a shape of whole numbers, got \(2.5,\)"),
        (lambda: Discrete("3"), "discrete: expected n and start of whole numbers, got"),
        (lambda: MultiDiscrete(4), "multi_discrete: expected sizes of whole numbers, got 4"),
        (lambda: Text("4"), "text: expected lengths of whole numbers, got"),
        (lambda: Tuple((3,)), "tuple: expected spaces of Headrace, got 3"),
        (lambda: Dict({"a": int}), "dict: expected spaces of Headrace, got <class 'int'>"),
    ],
)
def test_a_program_s_mistake_is_a_space_error(make: Callable[[], Any], message: str) -> None:
    """The error gives the expected and the actual value, instead of an internal one."""
    with pytest.raises(SpaceError, match=message):
        make()


def test_numbers_of_numpy_make_the_same_space() -> None:
    """Numbers of numpy, as gymnasium's spaces have them, make the same space as Python's."""
    assert Discrete(np.int64(3)) == Discrete(3)
    assert canonical_json(MultiBinary(np.array([2, 2])), Discrete(np.int64(3))) == canonical_json(
        MultiBinary((2, 2)), Discrete(3)
    )
