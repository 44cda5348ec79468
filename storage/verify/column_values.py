"""The values of one column as both readers return them, for a comparison byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_SHOWN = 60
"""The longest text of a value in a message, in characters."""


@dataclass(frozen=True)
class ColumnValues:
    """N values, concatenated in `data` (uint8); a null has no bytes.

    `dtype` is numpy's name of the numbers inside, "str" or "bytes".
    """

    dtype: str
    valid: Array  # bool (N,)
    sizes: Array  # int64 (N,), bytes
    data: Array  # uint8 (sum of sizes,)

    def __len__(self) -> int:
        return len(self.valid)

    def frames(self) -> list[bytes]:
        """The three arrays as bytes, the frames of a message."""
        return [
            self.valid.astype(np.uint8).tobytes(),
            self.sizes.astype("<i8").tobytes(),
            self.data.tobytes(),
        ]

    @classmethod
    def from_frames(cls, dtype: str, frames: Sequence[bytes]) -> ColumnValues:
        """The values that `frames` encoded."""
        valid, sizes, data = frames
        return cls(
            dtype,
            np.frombuffer(valid, np.uint8).astype(np.bool_),
            np.frombuffer(sizes, "<i8"),
            np.frombuffer(data, np.uint8),
        )

    def differing(self, other: ColumnValues) -> Array:
        """The rows whose values differ, ascending; both columns have the same number of rows.

        If rows differ in being null or in size, only those are returned.
        """
        shapes = (self.valid != other.valid) | (self.sizes != other.sizes)
        if shapes.any():
            return np.flatnonzero(shapes)
        bytes_ = np.flatnonzero(self.data != other.data)
        ends = np.cumsum(self.sizes)
        return np.unique(np.searchsorted(ends, bytes_, side="right"))

    def shown(self, row: int) -> str:
        """One value as text, truncated for a message."""
        if not self.valid[row]:
            return "null"
        end = int(self.sizes[: row + 1].sum())
        raw = self.data[end - int(self.sizes[row]) : end].tobytes()
        if self.dtype == "str":
            text = repr(raw.decode(errors="replace"))
        elif self.dtype == "bytes" or len(raw) % np.dtype(self.dtype).itemsize:
            text = raw.hex()
        else:
            values = np.frombuffer(raw, self.dtype).tolist()
            text = str(values[0] if len(values) == 1 else values)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def of_numbers(
    values: Array, valid: Array | None = None, *, nan_is_null: bool = False
) -> ColumnValues:
    """The values of rows of numbers (N, ...). `valid`: bool (N,), False for null.

    With `nan_is_null` NaN counts as null: not every reader distinguishes the two in plain numbers.
    """
    there = np.ones(len(values), np.bool_) if valid is None else valid
    if nan_is_null and values.dtype.kind == "f":
        there = there & ~np.isnan(values)
    flat = np.ascontiguousarray(values[there])
    size = flat.nbytes // len(flat) if len(flat) else 0
    return ColumnValues(
        values.dtype.name, there, np.where(there, size, 0), flat.reshape(-1).view(np.uint8)
    )


def of_items(dtype: str, items: Sequence[bytes | None]) -> ColumnValues:
    """The values of byte strings, None for null."""
    valid = np.fromiter((item is not None for item in items), np.bool_, len(items))
    sizes = np.fromiter((len(item or b"") for item in items), np.int64, len(items))
    data = np.frombuffer(b"".join(item or b"" for item in items), np.uint8)
    return ColumnValues(dtype, valid, sizes, data)
