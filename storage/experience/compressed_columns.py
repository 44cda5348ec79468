"""Columns compressed in blocks but still accessible by row: used by `SampleBatch.compress`.

A packed column is an object array of `PackedRow`: a block and an index in it. Rows can be sliced,
shuffled and joined like any others; unpacking decompresses each block once. A block is the
compressed buffer of its rows: nothing is pickled.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Compression: TypeAlias = Literal["zstd", "lz4", "zlib"]


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Rows of one dtype and shape: `data` is their little-endian buffer, compressed."""

    codec: Compression
    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # (rows, ...)
    data: bytes

    def rows(self) -> Array:
        """The rows as a new, writable array."""
        size = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        raw = _decompress(self.codec, self.data, size)
        return np.frombuffer(bytearray(raw), self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class PackedRow:
    """One row of a packed column."""

    block: _Block
    index: int

    @property
    def nbytes(self) -> float:
        """This row's share of its compressed block."""
        return len(self.block.data) / self.block.shape[0]


def is_packed(column: Array) -> bool:
    """Whether a column holds packed rows."""
    return column.dtype == object and len(column) > 0 and isinstance(column[0], PackedRow)


def pack(column: Array, codec: Compression, *, bulk: bool) -> Array:
    """The column as packed rows, object (N,): one block for all rows if `bulk`, else one per row.

    Blocks of single rows need more memory in total, but can be freed one by one.
    """
    pieces = [column] if bulk else [column[i : i + 1] for i in range(len(column))]
    packed = np.empty(len(column), object)
    at = 0
    for piece in pieces:
        raw = np.ascontiguousarray(piece)
        block = _Block(codec, raw.dtype, raw.shape, _compress(codec, raw.tobytes()))
        for index in range(len(piece)):
            packed[at] = PackedRow(block, index)
            at += 1
    return packed


def unpack(column: Array) -> Array:
    """The rows of a packed column (N,), in its order, as one array (N, ...)."""
    first = column[0].block
    rows = np.empty((len(column), *first.shape[1:]), first.dtype)
    by_block: dict[int, tuple[_Block, list[int], list[int]]] = {}
    for place, row in enumerate(column):
        _, places, indices = by_block.setdefault(id(row.block), (row.block, [], []))
        places.append(place)
        indices.append(row.index)
    for block, places, indices in by_block.values():
        rows[places] = block.rows()[indices]
    return rows


def _compress(codec: Compression, raw: bytes) -> bytes:
    if codec == "zlib":
        return zlib.compress(raw, 1)
    import pyarrow  # noqa: PLC0415  an optional extra: zlib does without

    return bytes(pyarrow.compress(raw, codec=codec, asbytes=True))


def _decompress(codec: Compression, data: bytes, size: int) -> bytes:
    if codec == "zlib":
        return zlib.decompress(data)
    import pyarrow  # noqa: PLC0415  an optional extra: zlib does without

    return bytes(pyarrow.decompress(data, decompressed_size=size, codec=codec, asbytes=True))
