"""Names of a Discrete: programs send and receive names, and codes are stored."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.spaces.codec import Codec
from storage.spaces.descriptors import (
    Dict,
    Discrete,
    SpaceError,
    Tuple,
    parse_space,
    schema_id,
    space_from_json,
    space_to_json,
)
from storage.spaces.gymnasium_spaces import from_gym, to_gym
from tests.storage.space_strategies import named_spaces

COUNTRY = Discrete.of(["DE", "FR"])
ITEM = Discrete.of(["42", "7", "1"])


def code(codec: Codec, value: Any, **how: Any) -> Any:
    return codec.decode(codec.encode(value, **how))


@given(named_spaces())
def test_names_and_codes_are_the_same_thing(space: Discrete) -> None:
    """Each name comes back from its place in the list, by JSON, msgpack and canonical bytes."""
    codec = Codec(Dict((("x", Tuple((space,))),)))
    for place, name in enumerate(space.names):
        for value in (
            {"x": [name]},
            json.loads(json.dumps({"x": [name]})),
            msgspec.msgpack.decode(msgspec.msgpack.encode({"x": [name]})),
        ):
            data = codec.from_wire(value)
            assert codec.decode(codec.from_wire(data)) == {"x": (place,)}
            assert codec.named(codec.decode(data)) == {"x": (name,)}


@given(named_spaces(), st.lists(st.text(max_size=3) | st.none(), max_size=9), st.data())
def test_whole_columns_of_names(
    space: Discrete, others: list[str | None], data: st.DataObject
) -> None:
    """Lists, arrays and Arrow columns, dictionaries among them, give the codes of single values."""
    column = data.draw(st.permutations([*others, *space.names]))
    codes = space.codes(column)
    assert codes.dtype == np.int64
    for name, found in zip(column, codes.tolist(), strict=True):
        if name in space.names:
            assert space.named(found) == name
        else:
            known = space.other is not None and name is not None
            assert found == (space.names.index(space.other or "") if known else -1)
    assert (space.codes(np.array(column, object)) == codes).all()
    encoded = pa.array(column, pa.string()).dictionary_encode()
    listed = np.append(space.codes(encoded.dictionary.to_pylist()), -1)
    assert (listed[encoded.indices.fill_null(-1).to_numpy()] == codes).all()


@given(named_spaces())
def test_the_declaration_keeps_names_and_their_order(space: Discrete) -> None:
    """JSON and gymnasium give the space back; another order of names is another schema."""
    assert space_from_json(json.loads(json.dumps(space_to_json(space)))) == space
    assert from_gym(to_gym(space)) == space
    assert to_gym(space) == to_gym(Discrete(space.n))
    around = Discrete.of(space.names[::-1], other=space.other)
    plain = Discrete(space.n)
    ids = {schema_id(one, plain) for one in (space, around, plain)}
    assert len(ids) == (2 if space.n == 1 else 3)


def test_a_space_without_names_is_what_it_was() -> None:
    """Neither the JSON nor the schema id of a space without names depends on the feature of
    names."""
    assert Discrete(2).to_json() == {"kind": "discrete", "n": 2, "start": 0}
    assert Discrete.of(["a"]).to_json() == {
        "kind": "discrete",
        "n": 1,
        "start": 0,
        "names": ["a"],
    }


@pytest.mark.parametrize(
    ("text", "space"),
    [
        ('discrete:["DE","FR"]', COUNTRY),
        ('discrete:["a:b", "]"]:other', Discrete(3, 0, ("a:b", "]", "other"), "other")),
        ('discrete:["other","x"]:other', Discrete(2, 0, ("other", "x"), "other")),
        (
            '{"country": ["DE", "FR"], "age": "box:1", "os": "discrete:[\\"ios\\"]:other"}',
            Dict(
                (
                    ("country", COUNTRY),
                    ("age", parse_space("box:1")),
                    ("os", Discrete.of(["ios"], other="other")),
                )
            ),
        ),
    ],
)
def test_short_forms(text: str, space: Any) -> None:
    """The forms of the command line."""
    assert parse_space(text) == space


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("discrete:[]", "one or more names, got none"),
        ('discrete:["a","b","a"]', "different names, got 'a' twice"),
        ('discrete:["a",""]', "texts of 1 to 1000 characters as names, got ''"),
        ("discrete:[1,2]", "as names, got 1"),
        ('discrete:["\\ud800"]', "as names"),
        ('discrete:["a"]:rest', 'discrete:."NAME",....:other'),
        (
            'discrete:["a"',
            """names as JSON, quoted for the shell: 'discrete:.* got discrete:."a"$""",
        ),
        ("discrete:[a,b]", "names as JSON, quoted for the shell: '.*, got discrete:.a,b.$"),
        ('discrete:{"x":1}', 'expected discrete:."NAME"'),
        ("discrete:a,b", "names as JSON, quoted for the shell: '.*, got discrete:a,b$"),
        ("{country:[DE],age:box:1}", "spaces as JSON, quoted for the shell: '{.*, got {country:"),
        ('{"a": {"b": "box:1"}}', "a short form or a list of names"),
        ('{"a": ["x"], "a": ["y"]}', "different names"),
        ("{}", "one or more different names"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(text: str, message: str) -> None:
    """None, one that is empty or no text, one that comes twice, and other forms."""
    with pytest.raises(SpaceError, match=message):
        parse_space(text)


@pytest.mark.parametrize(
    "node",
    [
        {"n": 3, "start": 0, "names": ["a", "b"]},
        {"n": 2, "start": 1, "names": ["a", "b"]},
        {"n": 2, "start": 0, "names": []},
        {"n": 2, "start": 0, "names": "ab"},
        {"n": 2, "start": 0, "names": ["a", None]},
        {"n": 2, "start": 0, "names": ["a", "b"], "other": "c"},
        {"n": 2, "start": 0, "names": ["a", "b"], "other": None},
        {"n": 2, "start": 0, "other": "a"},
        {"n": 2, "start": 0, "labels": ["a", "b"]},
    ],
)
def test_a_stored_declaration_that_makes_no_sense_is_refused(node: dict[str, Any]) -> None:
    """A damaged or hostile file or footer is a SpaceError."""
    with pytest.raises(SpaceError):
        space_from_json({"version": 1, "space": {"kind": "discrete", **node}})
    with pytest.raises(SpaceError, match="expected names, got 'DE'"):
        Discrete.of("DE")


def test_a_new_name_is_an_error_or_the_other() -> None:
    """A new name raises, or becomes `other` if the space has one; a value that is no text always
    raises."""
    with pytest.raises(SpaceError, match=r"obs: expected one of the 2 names 'DE', 'FR', got 'IT'"):
        Codec(COUNTRY).encode("IT", "obs")
    open_ended = Codec(Discrete.of(["DE", "FR"], other="other"))
    assert code(open_ended, "IT") == code(open_ended, "other") == 2
    assert open_ended.named(2) == "other"
    for value in (None, 1.5, ["DE"], b"DE", {"DE": 1}, 3):
        with pytest.raises(SpaceError):
            open_ended.encode(value)


def test_codes_are_taken_where_they_cannot_be_names() -> None:
    """Integers are codes; where names are numbers only a policy, or raw bytes, may say codes."""
    assert code(Codec(COUNTRY), 1) == code(Codec(COUNTRY), "FR") == 1
    assert code(Codec(Discrete.of(["0", "1"])), 1) == 1  # either way
    items = Codec(ITEM)
    assert code(items, "42") == 0
    assert code(items, 2, check_range=False) == 2
    assert items.decode(items.from_wire(items.encode("1"))) == 2
    for value in (1, 42, np.int64(0), True):
        with pytest.raises(SpaceError, match="a name or a code"):
            items.encode(value)
