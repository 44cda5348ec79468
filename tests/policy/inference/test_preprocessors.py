"""Flattening: single values and batches agree, and bad values are named."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.inference.preprocessors import (
    Flattener,
    assemble,
    columns_of,
    plausible_columns,
)
from storage.spaces.codec import Codec
from storage.spaces.descriptors import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    SpaceError,
    Text,
    Tuple,
)
from storage.spaces.leaves import leaves
from tests.storage.space_strategies import spaces as any_spaces

leaf_spaces = st.one_of(
    st.builds(
        Box,
        st.lists(st.integers(0, 3), max_size=2).map(tuple),
        st.sampled_from(["float32", "float64", "uint8", "int64", "bool"]),
    ),
    st.builds(Discrete, st.integers(1, 4), st.integers(-3, 3)),
    st.builds(lambda n: MultiDiscrete(tuple(n)), st.lists(st.integers(1, 4), min_size=1)),
    st.builds(MultiBinary, st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple)),
)
spaces = st.recursive(
    leaf_spaces,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(Dict),
        st.lists(inner, min_size=1, max_size=3).map(lambda items: Tuple(tuple(items))),
    ),
    max_leaves=4,
)


def random_columns(space, count, rng):
    """A batch of values of a space: leaf path -> array."""
    columns = {}
    for leaf in leaves(space):
        shape = (count, *leaf.shape)
        if isinstance(leaf.space, Discrete):
            values = leaf.space.start + rng.integers(0, leaf.space.n, shape)
        elif isinstance(leaf.space, MultiDiscrete):
            values = np.array(leaf.space.start) + rng.integers(0, leaf.space.nvec, shape)
        elif leaf.dtype.kind == "f":
            values = rng.normal(size=shape)
        else:
            values = rng.integers(0, 2, shape)
        columns[leaf.path] = values.astype(leaf.dtype)
    return columns


@given(spaces, st.integers(0, 2**32))
def test_one_value_flattens_as_its_row_of_a_batch(space, seed):
    """flat.value(v) == flat.columns(batch)[i], and both are float32 of the stated size."""
    columns = random_columns(space, 3, np.random.default_rng(seed))
    flat = Flattener(space)
    rows = flat.columns(columns)
    assert rows.shape == (3, flat.size)
    assert rows.dtype == np.float32
    for i in range(3):
        np.testing.assert_array_equal(flat.value(assemble(space, columns, i)), rows[i])


@given(spaces, st.integers(0, 2**32))
def test_assemble_is_what_the_codec_decodes(space, seed):
    """A value built from columns equals the codec's decoding of its bytes."""
    columns = random_columns(space, 2, np.random.default_rng(seed))
    codec = Codec(space)
    for i, data in enumerate(codec.encode_columns(columns, 2)):
        assert codec.encode(assemble(space, columns, i)) == data


@given(any_spaces.filter(lambda space: not any(leaf.is_text for leaf in leaves(space))))
def test_plausible_observations_are_legal(space):
    """Bounds far from zero, without zero, or absent; lists of any length."""
    codec = Codec(space)
    columns = plausible_columns(space)
    count = len(next(iter(columns.values())))
    for row in codec.encode_columns(columns, count):
        codec.check(row)


def test_plausible_observations_lie_about_zero():
    columns = plausible_columns(Box((50,)))
    assert (columns[""][0] == 0.0).all()
    assert 0.5 < columns[""][1:].std() < 2.0
    assert set(plausible_columns(Discrete(3, start=7))[""]) <= {7, 8, 9}


def test_leaves_follow_each_other_in_canonical_order():
    """Dict keys sorted; one-hots count from start."""
    space = Dict({"b": Discrete(3, 5), "a": Box((2,)), "c": MultiDiscrete((2, 3), (0, 1))})
    columns = {"a": [[0.5, -1.0]], "b": [6], "c": [[1, 1]]}
    flat = Flattener(space).columns({name: np.array(v) for name, v in columns.items()})
    assert flat.tolist() == [[0.5, -1.0, 0, 1, 0, 0, 1, 1, 0, 0]]


def test_columns_of_picks_a_spaces_columns_from_a_batch():
    """`obs` for a space of one leaf, `obs.<path>` for others."""
    batch = {"obs": "one", "obs.a": "first", "obs.b": "second"}
    assert columns_of(Box((2,)), "obs", batch) == {"": "one"}
    nested = Dict({"a": Box(()), "b": Box(())})
    assert columns_of(nested, "obs", batch) == {"a": "first", "b": "second"}


@pytest.mark.parametrize(
    ("space", "value", "text"),
    [
        (Box((2,)), np.zeros(3, np.float32), r"observation: expected shape \(2,\), got \(3,\)"),
        (Box((2,)), [1.0], r"expected shape \(2,\), got \(1,\)"),
        (Discrete(2, 1), 0, "observation: expected integers of Discrete"),
        (Discrete(2, 1), 1.0, "expected integers"),
        (Dict({"a": Discrete(2)}), {"b": 0}, r"observation: expected the keys \['a'\]"),
        (Dict({"a": Tuple((Discrete(2),))}), {"a": []}, "observation.a: expected 1 items"),
        (Dict({"a": Tuple((Discrete(2),))}), {"a": [2]}, "observation.a.0: expected integers"),
    ],
)
def test_a_value_outside_the_space_is_refused(space, value, text):
    """The error says which leaf, what was expected and what came."""
    with pytest.raises(SpaceError, match=text):
        Flattener(space).value(value)


def test_missing_columns_and_text_are_refused():
    """A policy can't read Text; a batch must have every leaf."""
    with pytest.raises(SpaceError, match=r"observation\.b: a policy can't read a Text space"):
        Flattener(Dict({"a": Box(()), "b": Text(4)}))
    with pytest.raises(SpaceError, match="expected the columns"):
        Flattener(Tuple((Box(()), Box(())))).columns({"0": np.zeros(2)})
