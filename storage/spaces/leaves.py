"""The leaves of a space: each one array or string, its dtype, shape, bounds and description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from storage.spaces.descriptors import (
    Array,
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
    bound_to_json,
    widest,
)


@dataclass(frozen=True)
class Leaf:
    """One array (or string) of a space: its path ("" for the space itself), dtype and shape."""

    path: str
    space: Box | Discrete | MultiDiscrete | MultiBinary | Text

    @property
    def is_text(self) -> bool:
        return isinstance(self.space, Text)

    @property
    def dtype(self) -> np.dtype[Any]:
        if isinstance(self.space, Box):
            return self.space.dtype
        return np.dtype("int8" if isinstance(self.space, MultiBinary) else "int64")

    @property
    def shape(self) -> tuple[int, ...]:
        if isinstance(self.space, (Box, MultiBinary)):
            return self.space.shape
        return (len(self.space.nvec),) if isinstance(self.space, MultiDiscrete) else ()

    def column(self, prefix: str) -> str:
        """The column name: `obs` for a space that is one leaf, else `obs.<path>`."""
        return f"{prefix}.{self.path}" if self.path else prefix


def leaves(space: Space, path: str = "") -> tuple[Leaf, ...]:
    """The leaves in canonical order, fixed-size and Text alike."""
    if isinstance(space, Dict):
        named: Sequence[tuple[str, Space]] = space.spaces
    elif isinstance(space, Tuple):
        named = [(str(i), s) for i, s in enumerate(space.spaces)]
    else:
        return (Leaf(path, space),)
    prefix = f"{path}." if path else ""
    return tuple(leaf for name, s in named for leaf in leaves(s, prefix + name))


def bounds_of(space: Any) -> tuple[Array, Array] | None:
    """Inclusive bounds whose comparison also refuses NaN and infinity; None if all is allowed.

    One bound for all elements is an array without axes, with which numpy compares fastest.
    """
    if isinstance(space, Box):
        if space.dtype.kind == "f":
            top = np.finfo(space.dtype).max
            return _one(np.maximum(space.low, -top)), _one(np.minimum(space.high, top))
        if space.dtype.kind == "b" or (
            (space.low == widest(space.dtype, -1)).all()
            and (space.high == widest(space.dtype, 1)).all()
        ):
            return None
        return _one(space.low), _one(space.high)
    if isinstance(space, Discrete):
        return np.array(space.start), np.array(space.start + space.n - 1)
    if isinstance(space, MultiDiscrete):
        start = np.array(space.start, np.int64)
        return start, start + np.array(space.nvec, np.int64) - 1
    return np.array(0, np.int8), np.array(1, np.int8)


def _one(bound: Array) -> Array:
    return bound.flat[:1].reshape(()) if bound.size and (bound == bound.flat[0]).all() else bound


def describe(space: Any) -> str:
    if isinstance(space, Discrete) and space.names:
        shown = ", ".join(map(repr, space.names[:8])) + (", ..." if space.n > 8 else "")
        return f"one of the {space.n} names {shown:.200}"
    if isinstance(space, Discrete):
        return f"an integer of {space.start}..{space.start + space.n - 1}"
    if isinstance(space, MultiDiscrete):
        return f"{len(space.nvec)} integers with sizes {space.nvec}, starts {space.start}"
    if isinstance(space, MultiBinary):
        return f"zeros and ones of shape {space.shape}"
    if isinstance(space, Text):
        letters = f" of {space.charset!r}" if space.charset else ""
        return f"a string of {space.min_length} to {space.max_length} characters{letters}"
    low, high = bound_to_json(space.low), bound_to_json(space.high)
    finite = "finite " if space.dtype.kind == "f" else ""
    return f"{finite}{space.dtype} of shape {space.shape} in [{low}, {high}]"
