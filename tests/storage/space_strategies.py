"""Random spaces and their values, for property tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from storage.spaces.descriptors import (
    BOX_DTYPES,
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
)

shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
names = st.text("abcdefé0_-", min_size=1, max_size=3)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    dtype = np.dtype(draw(st.sampled_from(BOX_DTYPES)))
    shape = draw(shapes)
    how = draw(st.sampled_from(["widest", "numbers", "arrays"]))
    if how == "widest":
        return Box(shape, dtype)
    elements = {"b": st.booleans(), "f": st.integers(-64, 64)}.get(dtype.kind, st.integers(0, 100))
    size = shape if how == "arrays" else ()
    pair = [draw(hnp.arrays(dtype, size, elements=elements)) for _ in range(2)]
    return Box(shape, dtype, np.minimum(*pair), np.maximum(*pair))


@st.composite
def named_spaces(draw: st.DrawFn) -> Discrete:
    """Spaces of different names, of any letters, numbers among them; some with an `other`."""
    numbers = st.integers(-5, 5).map(str)
    texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=4)
    found = draw(st.lists(numbers | texts, min_size=1, max_size=6, unique=True))
    other = draw(st.none() | st.sampled_from(found) | st.just("other"))
    return Discrete.of(found, other=other)


named = named_spaces()
ragged = st.builds(
    lambda shape: Box(shape, ragged=True), hnp.array_shapes(min_dims=2, max_dims=2, max_side=3)
)
leaf_spaces: st.SearchStrategy[Space] = st.one_of(
    boxes(),
    ragged,
    st.builds(Discrete, st.integers(1, 2**40), st.integers(-(2**50), 2**50)),
    named,
    st.lists(st.tuples(st.integers(1, 9), st.integers(-3, 3)), min_size=1, max_size=4).map(
        lambda pairs: MultiDiscrete(tuple(n for n, _ in pairs), tuple(s for _, s in pairs))
    ),
    st.builds(MultiBinary, hnp.array_shapes(max_dims=2, max_side=3)),
    st.builds(Text, st.integers(3, 8), st.integers(0, 3), st.sampled_from(["", "ab", "é€x"])),
)
spaces: st.SearchStrategy[Space] = st.recursive(
    leaf_spaces,
    lambda inner: (
        st.dictionaries(names, inner, min_size=1, max_size=3).map(
            lambda named: Dict(tuple(named.items()))
        )
        | st.lists(inner, min_size=1, max_size=3).map(lambda found: Tuple(tuple(found)))
    ),
    max_leaves=5,
)


def values(space: Space) -> st.SearchStrategy[Any]:
    """Values that the space allows."""
    if isinstance(space, Dict):
        return st.fixed_dictionaries({name: values(inner) for name, inner in space.spaces})
    if isinstance(space, Tuple):
        return st.tuples(*(values(inner) for inner in space.spaces))
    if isinstance(space, Text):
        letters = st.sampled_from(space.charset) if space.charset else st.characters(codec="utf-8")
        return st.text(letters, min_size=space.min_length, max_size=space.max_length)
    if isinstance(space, Discrete) and space.names:
        return st.sampled_from(space.names)
    if isinstance(space, Discrete):
        return st.integers(space.start, space.start + space.n - 1)
    if isinstance(space, MultiDiscrete):
        pairs = zip(space.nvec, space.start, strict=True)
        return st.tuples(*(st.integers(s, s + n - 1) for n, s in pairs)).map(list)
    if isinstance(space, MultiBinary):
        return hnp.arrays(np.int8, space.shape, elements=st.integers(0, 1))
    return _box_values(space)


def _box_values(space: Box) -> st.SearchStrategy[Any]:
    if space.dtype.kind != "f":
        picks = hnp.arrays(np.bool_, space.shape)
        return picks.map(lambda mask: np.where(mask, space.low, space.high).astype(space.dtype))
    shares = hnp.arrays(np.float64, space.shape, elements=st.floats(0, 1))
    low, high = (np.clip(bound.astype(float), -60000, 60000) for bound in (space.low, space.high))
    return shares.map(
        lambda share: np.clip(
            (low + share * (high - low)).astype(space.dtype), space.low, space.high
        )
    )
