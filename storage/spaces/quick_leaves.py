"""Short cuts for the values that hot paths see: small arrays, short lists of numbers, integers.

For a few numbers numpy's fixed cost is several times that of `struct` and the interpreter's own
comparisons. A short cut answers None (or False) for whatever it is not sure of, and the general
path then decides and words the error: it may never accept what that path refuses, nor give other
bytes.
"""

from __future__ import annotations

import math
import struct
from operator import le
from typing import Any, Protocol

import numpy as np

from storage.spaces.descriptors import Array, Discrete

MAX_ITEMS = 32  # beyond about this many numbers numpy's loops win

_CODES = {
    "uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "uint32": "I", "int32": "i",
    "uint64": "Q", "int64": "q", "float32": "f", "float64": "d",
}  # fmt: skip
_FLOAT64 = np.dtype("float64")


class Quick(Protocol):
    """The short cut of one leaf."""

    def encode(self, value: Any, check_range: bool) -> bytes | None:
        """The canonical bytes of a valid value; None when in doubt."""

    def is_valid(self, data: bytes, check_range: bool) -> bool:
        """Whether canonical bytes are surely valid."""


class QuickInteger:
    """A Discrete leaf: one int64 of first..last."""

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
    """A Discrete leaf with names: a name, or its code."""

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
        """Whether it is an integer that could be meant as a name or as a code."""
        return self._numbers and isinstance(value, (int, np.integer))


class QuickNumbers:
    """A leaf of 1 to MAX_ITEMS numbers of one dtype, with inclusive bounds (None: all)."""

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
            return math.isfinite(sum(self._unpack(data)))  # NaN and infinity stay in a sum
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
    """The short cut for an array leaf, None when it has none."""
    if dtype.name not in _CODES or not 1 <= math.prod(shape) <= MAX_ITEMS:
        return None
    return QuickNumbers(dtype, shape, bounds)
