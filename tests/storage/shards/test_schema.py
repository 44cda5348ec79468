"""Spaces <-> Arrow columns, and the footer."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from storage.shards.names import ShardDamaged
from storage.shards.schema import (
    ColumnSpec,
    ShardMetadata,
    column_specs,
    columns_for,
    leaf_specs,
    metadata_for,
    schema_hash,
)
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
)

ENCODINGS: list[tuple[Space, str]] = [
    (Box(()), "scalar"),
    (Box((), np.dtype("uint8")), "scalar"),
    (Box((), np.dtype("bool")), "scalar"),
    (Box((), np.dtype("float16")), "scalar"),
    (Box((4,)), "list"),
    (Box((2, 3), np.dtype("int16")), "list"),
    (Box((1024,)), "list"),
    (Box((1025,)), "binary"),
    (Box((0,)), "binary"),
    (Box((2, 2, 2)), "list"),
    (Box((4,), np.dtype("float16")), "list"),
    (Box((4,), np.dtype("uint8")), "binary"),
    (Box((4,), np.dtype("bool")), "list"),
    (MultiBinary((4,)), "list"),
    (MultiBinary((1025,)), "binary"),
    (MultiDiscrete((2, 3)), "list"),
    (Box((64, 20), ragged=True), "ragged"),
    (Discrete(2), "scalar"),
    (Text(5), "text"),
]


@pytest.mark.parametrize(("space", "encoding"), ENCODINGS, ids=repr)
def test_how_a_leaf_is_stored(space: Space, encoding: str) -> None:
    """Numbers are columns, small vectors are lists, all else is bytes that the footer explains."""
    (spec,) = leaf_specs(space, "obs")
    assert (spec.name, spec.encoding) == ("obs", encoding)


def test_no_column_in_the_file_has_a_dot() -> None:
    """Dots break filters and lists of other tools; names differ also for those that ignore case."""
    space = Dict({"b": Tuple((Box((4,)), Discrete(2))), "A": Text(3), "a": Box(), "b__0": Box()})
    specs = leaf_specs(space, "obs")
    assert [(s.name, s.stored, s.encoding) for s in specs] == [
        ("obs.A", "obs__A", "text"),
        ("obs.a", "obs__a_", "scalar"),
        ("obs.b.0", "obs__b__0", "list"),
        ("obs.b.1", "obs__b__1", "scalar"),
        ("obs.b__0", "obs__b__0_", "scalar"),
    ]


def test_the_columns_stand_in_their_documented_order() -> None:
    schema = columns_for(column_specs(Box((4,)), Discrete(2)))
    assert " ".join(schema.names) == (
        "eps_id part t agent_id obs actions rewards terminateds truncateds ended final_obs infos "
        "action_logp action_dist_inputs policy_id policy_version source pass_prob ts received_ts "
        "training_enabled continues tags ordinal episode_ordinal env_t agents"
    )
    assert [f.name for f in schema if f.nullable] == [
        "ended",
        "final_obs",
        "infos",
        "action_logp",
        "action_dist_inputs",
        "continues",
        "env_t",
        "agents",
    ]


def test_vectors_are_never_null_at_either_level() -> None:
    field = columns_for(column_specs(Box((2, 2)), Discrete(2))).field("obs")
    assert not field.nullable
    assert not field.type.value_field.nullable


@pytest.mark.parametrize(("space", "encoding"), ENCODINGS, ids=repr)
def test_a_footer_says_again_what_it_was_made_of(space: Space, encoding: str) -> None:
    metadata, schema = metadata_for(
        "s-1", canonical_json(space, Discrete(2)), ((3, 5), (9, 9)), rows=40, parts=4
    )
    again = ShardMetadata.from_footer(schema.metadata, "here")
    assert again == metadata
    assert (again.first, again.last, again.rows, again.parts) == (3, 9, 40, 4)
    assert again.space_pair() == (space, Discrete(2))
    assert again.columns["final_obs"].nullable
    assert again.columns["obs"].encoding == encoding


def test_every_key_of_the_footer_has_the_prefix() -> None:
    _, schema = metadata_for(
        "s", canonical_json(Box((4,)), Discrete(2)), ((0, 0),), rows=1, parts=1
    )
    assert all(key.startswith(b"headrace.") for key in schema.metadata)


def footer() -> dict[bytes, bytes]:
    _, schema = metadata_for(
        "s", canonical_json(Box((4,)), Discrete(2)), ((0, 0),), rows=1, parts=1
    )
    return dict(schema.metadata)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format_version", "3", "expected format version 1 or 2, got b'3'; a newer release may"),
        ("digest", "blake4", "expected digest sha256 or blake3, got b'blake4'; a newer release"),
        ("ranges", "[]", "cannot be read"),
        ("ranges", "{", "cannot be read"),
        ("ranges", "[[3, 2]]", "cannot be read"),
        ("ranges", "[[0, 3], [3, 4]]", "cannot be read"),
        ("rows", "many", "cannot be read"),
        ("columns", '[{"name": "x"}]', "cannot be read"),
        ("columns", "[1]", "cannot be read"),
    ],
)
def test_a_footer_that_is_not_ours_is_damage(key: str, value: str, message: str) -> None:
    with pytest.raises(ShardDamaged, match=f"shard-7: .*{message}"):
        ShardMetadata.from_footer(
            {**footer(), f"headrace.{key}".encode(): value.encode()}, "shard-7"
        )


@pytest.mark.parametrize("pairs", [None, {}, {b"pandas": b"{}"}])
def test_no_footer_is_damage(pairs: dict[bytes, bytes] | None) -> None:
    with pytest.raises(ShardDamaged, match="expected the footer of a shard"):
        ShardMetadata.from_footer(pairs, "here")


def test_a_missing_key_is_damage_and_an_unknown_one_is_ignored() -> None:
    pairs = footer()
    assert ShardMetadata.from_footer({**pairs, b"headrace.new": b"1"}, "here").rows == 1
    del pairs[b"headrace.stream"]
    with pytest.raises(ShardDamaged, match="stream"):
        ShardMetadata.from_footer(pairs, "here")


def test_the_schema_hash_tells_columns_apart() -> None:
    """The hash depends on names, types and nullability, and not on metadata."""
    schema = columns_for(column_specs(Box((4,)), Discrete(2)))
    assert schema_hash(schema) == schema_hash(schema.with_metadata({"a": "b"}))
    others = [
        columns_for(column_specs(Box((4,)), Text(3))),
        columns_for(column_specs(Box((4,), np.dtype("float64")), Discrete(2))),
        schema.set(0, pa.field("eps_id", pa.string(), nullable=True)),
    ]
    assert len({schema_hash(s) for s in [schema, *others]}) == 4


def test_the_footer_names_dtype_and_shape_for_other_tools() -> None:
    columns = json.loads(footer()[b"headrace.columns"])
    assert {c["name"]: (c["dtype"], c["shape"]) for c in columns} == {
        "obs": ("float32", [4]),
        "actions": ("int64", []),
        "final_obs": ("float32", [4]),
        "action_dist_inputs": ("float32", [-1]),
    }


@pytest.mark.parametrize("text", ["{}", "[]", "nonsense", '{"version": 1}'])
def test_spaces_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(SpaceError, match="spaces: expected canonical JSON"):
        metadata_for("s", text, ((0, 0),), rows=1, parts=1)


def test_specs_give_arrow_types() -> None:
    assert ColumnSpec("a", "binary", "uint8", (2,)).arrow_type == pa.binary()
    assert ColumnSpec("a", "scalar", "uint16", ()).arrow_type == pa.uint16()
