"""The leaves of a space: each one array or string, its dtype, shape, bounds and description.

Values in hot paths (small arrays, short lists of numbers, integers) have fast paths, because
numpy's fixed cost is several times that of `struct` and Python's comparisons. A fast path returns
None (or False) for values that it cannot decide. The general path then decides, and words the
error. A fast path must never accept a value that the general path refuses, nor return other bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from operator import le
from typing import Any, Protocol

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
    def is_ragged(self) -> bool:
        return isinstance(self.space, Box) and self.space.ragged

    @property
    def varies(self) -> bool:
        """Whether encodings of its values have different sizes."""
        return self.is_text or self.is_ragged

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
        """The column name: `obs` for a space with a single leaf, else `obs.<path>`."""
        return f"{prefix}.{self.path}" if self.path else prefix


def leaves(space: Space, path: str = "") -> tuple[Leaf, ...]:
    """The leaves in canonical order, both fixed-size and Text."""
    if isinstance(space, Dict):
        named: Sequence[tuple[str, Space]] = space.spaces
    elif isinstance(space, Tuple):
        named = [(str(i), s) for i, s in enumerate(space.spaces)]
    else:
        return (Leaf(path, space),)
    prefix = f"{path}." if path else ""
    return tuple(leaf for name, s in named for leaf in leaves(s, prefix + name))


def bounds_of(space: Any) -> tuple[Array, Array] | None:
    """Inclusive bounds, whose comparison also rejects NaN and infinity; None if all is allowed.

    If all elements have the same bound, it is an array without axes, which numpy compares fastest.
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


def rows_of(data: bytes, leaf: Leaf) -> bytes:
    """The bytes of a ragged leaf's value without the rows at its end that are zeros."""
    size = leaf.dtype.itemsize * leaf.shape[1]
    return data[: -(-len(data.rstrip(b"\0")) // size) * size]


def one_of_names(names: Sequence[str]) -> str:
    """A choice of these names, for messages: the first of them, and how many there are."""
    shown = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
    return f"{'the name' if len(names) == 1 else f'one of the {len(names)} names'} {shown:.200}"


def describe(space: Any) -> str:
    if isinstance(space, Discrete) and space.names:
        return one_of_names(space.names)
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
    if space.ragged:
        most, width = space.shape
        return f"up to {most} rows of {width} finite {space.dtype} in [{low}, {high}]"
    return f"{finite}{space.dtype} of shape {space.shape} in [{low}, {high}]"


MAX_ITEMS = 32  # with more numbers numpy's loops are faster

_CODES = {
    "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i",
    "uint64": "Q", "int64": "q", "float32": "f", "float64": "d",
}  # fmt: skip
_FLOAT64 = np.dtype("float64")


class Quick(Protocol):
    """The fast path of one leaf."""

    def encode(self, value: Any, check_range: bool) -> bytes | None:
        """The canonical bytes of a valid value; None if that cannot be decided here."""

    def is_valid(self, data: bytes, check_range: bool) -> bool:
        """Whether canonical bytes are valid; False also if that cannot be decided here."""


class QuickInteger:
    """A Discrete leaf: one int64 in first..last."""

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first, last

    def encode(self, value: Any, check_range: bool) -> bytes | None:
        if type(value) is not int:
            if not isinstance(value, np.integer) or value.dtype.kind not in "iu":
                return None
            value = int(value)
        if self._first <= value <= self._last:
            return int.to_bytes(value, 8, "little", signed=True)
        return None

    def is_valid(self, data: bytes, check_range: bool) -> bool:
        if len(data) != 8:
            return False
        return self._first <= int.from_bytes(data, "little", signed=True) <= self._last


class QuickName(QuickInteger):
    """A Discrete leaf with names: a name or its code."""

    def __init__(self, space: Discrete) -> None:
        super().__init__(0, space.n - 1)
        self._codes = {name: i.to_bytes(8, "little") for i, name in enumerate(space.names)}
        self._other = None if space.other is None else self._codes[space.other]
        self._numbers = space.has_numbers

    def encode(self, value: Any, check_range: bool) -> bytes | None:
        if isinstance(value, str):
            return self._codes.get(value, self._other)
        if self._numbers and check_range:
            return None
        return super().encode(value, check_range)

    def is_unsure(self, value: Any) -> bool:
        """Whether a value is an integer that could mean a name or a code."""
        return self._numbers and isinstance(value, (int, np.integer))


class QuickNumbers:
    """A leaf of 1 to MAX_ITEMS numbers of one dtype, with inclusive bounds (None: all allowed)."""

    def __init__(
        self, dtype: np.dtype[Any], shape: tuple[int, ...], bounds: tuple[Array, Array] | None
    ) -> None:
        self._dtype, self._shape, self._size = dtype, shape, math.prod(shape)
        self._row = len(shape) == 1
        packer = struct.Struct(f"<{self._size}{_CODES[dtype.name]}")
        self._pack, self._unpack, self._nbytes = packer.pack, packer.unpack, packer.size
        self._is_float = dtype.kind == "f"
        self._kinds = {float} if self._is_float else {int}
        self._lows: list[Any] | None = None
        self._highs: list[Any] = []
        if bounds is not None:
            self._lows = np.broadcast_to(bounds[0], shape).ravel().tolist()
            self._highs = np.broadcast_to(bounds[1], shape).ravel().tolist()
        self._only_finite = self._is_float and bounds is not None and _is_whole(dtype, bounds)

    def encode(self, value: Any, check_range: bool) -> bytes | None:
        kind = type(value)
        if kind is np.ndarray:
            if value.shape != self._shape:
                return None
            if value.dtype == self._dtype:
                data = value.tobytes()
            elif self._is_float and value.dtype == _FLOAT64:
                return self._packed(value.ravel().tolist(), check_range)
            else:
                return None
            return data if self.is_valid(data, check_range) else None
        if (kind is list or kind is tuple) and self._row and set(map(type, value)) == self._kinds:
            return self._packed(value, check_range)
        return None

    def _packed(self, numbers: Any, check_range: bool) -> bytes | None:
        try:
            data = self._pack(*numbers)
        except (struct.error, OverflowError):
            return None
        return data if self.is_valid(data, check_range) else None

    def is_valid(self, data: bytes, check_range: bool) -> bool:
        if len(data) != self._nbytes:
            return False
        if self._only_finite or (self._is_float and not check_range):
            # a sum with NaN or infinity is not finite
            return math.isfinite(sum(self._unpack(data)))
        if self._lows is None:
            return True
        numbers = self._unpack(data)
        return all(map(le, self._lows, numbers)) and all(map(le, numbers, self._highs))


def _is_whole(dtype: np.dtype[Any], bounds: tuple[Array, Array]) -> bool:
    top = np.finfo(dtype).max
    return bool((bounds[0] <= -top).all() and (bounds[1] >= top).all())


def quick_numbers(
    dtype: np.dtype[Any], shape: tuple[int, ...], bounds: tuple[Array, Array] | None
) -> QuickNumbers | None:
    """The fast path of an array leaf, None if it has none."""
    if dtype.name not in _CODES or not 1 <= math.prod(shape) <= MAX_ITEMS:
        return None
    return QuickNumbers(dtype, shape, bounds)
