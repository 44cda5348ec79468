"""Raw buffers <-> Arrow arrays, without creating a Python object per row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.shards.names import ShardError
from storage.shards.schema import PREFIX, ColumnSpec, specs_from_json
from storage.spaces.descriptors import Space
from storage.spaces.leaves import Leaf, leaves

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Texts:
    """N strings in Arrow's layout: `offsets` int64 (N + 1,), `data` uint8, UTF-8."""

    offsets: Array
    data: Array


LeafValues: TypeAlias = Array | Texts


class RecordSplitter:
    """Splits concatenated canonical encodings of one space into values by leaf."""

    def __init__(self, space: Space) -> None:
        self.leaves = leaves(space)
        self._texts = sum(leaf.varies for leaf in self.leaves)
        self._fixed = sum(_size(leaf) for leaf in self.leaves)
        self.itemsize = None if self._texts else self._fixed

    def offsets(self, rows: int, data: bytes, lengths: bytes, what: str) -> Array:
        """Where each of `rows` encodings begins, and the end: int64 (rows + 1,).

        `lengths`: uint32 (rows,), needed only if the space has Text. Raises ShardError if they do
        not fit the data.
        """
        if self.itemsize is not None:
            starts = np.arange(rows + 1, dtype=np.int64) * self.itemsize
        else:
            sizes = np.frombuffer(lengths, "<u4")
            if len(sizes) != rows:
                raise ShardError(f"{what}: expected {rows} lengths, got {len(sizes)}")
            starts = starts_of(sizes)
        if starts[-1] != len(data):
            raise ShardError(
                f"{what}: expected {starts[-1]} bytes for {rows} values, got {len(data)}"
            )
        return starts

    def split(self, data: Array, starts: Array) -> list[LeafValues]:
        """The values of each leaf in canonical order: arrays (N, *shape), or Texts.

        `data` uint8; `starts` int64 (N + 1,), offsets into it. Raises ShardError for truncated
        values.
        """
        count = len(starts) - 1
        fixed = self._fixed_part(data, starts)
        texts = iter(self._text_parts(data, starts))
        values: list[LeafValues] = []
        at = 0
        for leaf in self.leaves:
            if leaf.varies:
                values.append(_rows(next(texts), leaf) if leaf.is_ragged else next(texts))
                continue
            size = _size(leaf)
            raw = np.ascontiguousarray(fixed[:, at : at + size])
            shape = (count, *leaf.shape)
            values.append(raw.view(leaf.dtype).reshape(shape) if size else _empty(leaf, shape))
            at += size
        return values

    def _fixed_part(self, data: Array, starts: Array) -> Array:
        count = len(starts) - 1
        if self.itemsize is not None:
            return data[starts[0] : starts[-1]].reshape(count, self._fixed)
        if count and int((starts[1:] - starts[:-1]).min()) < self._fixed + 4 * self._texts:
            raise ShardError("expected whole values, got cut ones")
        return data[starts[:-1, None] + np.arange(self._fixed)]

    def _text_parts(self, data: Array, starts: Array) -> list[Texts]:
        """The values of each Text or ragged leaf. In a record they follow the fixed-size leaves."""
        at, ends, found = starts[:-1] + self._fixed, starts[1:], []
        for _ in range(self._texts):
            if (at + 4 > ends).any():
                raise ShardError("expected whole strings, got cut ones")
            sizes = data[at[:, None] + np.arange(4)].copy().view("<u4").reshape(-1).astype(np.int64)
            if (at + 4 + sizes > ends).any():
                raise ShardError("expected whole strings, got cut ones")
            found.append(Texts(starts_of(sizes), _gather(data, at + 4, sizes)))
            at = at + 4 + sizes
        return found


def _size(leaf: Leaf) -> int:
    return 0 if leaf.varies else leaf.dtype.itemsize * math.prod(leaf.shape)


def _rows(records: Texts, leaf: Leaf) -> Texts:
    """The numbers of a ragged leaf, as lists."""
    if (records.offsets % (leaf.dtype.itemsize * leaf.shape[1])).any():
        raise ShardError("expected whole rows, got cut ones")
    return Texts(records.offsets // leaf.dtype.itemsize, records.data.view(leaf.dtype))


def _empty(leaf: Leaf, shape: tuple[int, ...]) -> Array:
    return np.zeros(shape, leaf.dtype)


def starts_of(sizes: Array) -> Array:
    """The offsets of consecutive items of these sizes, and the end: int64 (N + 1,)."""
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def _gather(data: Array, begin: Array, sizes: Array) -> Array:
    """Concatenate the pieces data[begin[i] : begin[i] + sizes[i]]."""
    shift = np.repeat(begin - starts_of(sizes)[:-1], sizes)
    return data[shift + np.arange(len(shift))]


# --- to Arrow --------------------------------------------------------------------------------


def leaf_array(spec: ColumnSpec, values: LeafValues) -> pa.Array:
    """The Arrow array of a column of a space without nulls."""
    if spec.encoding == "scalar" and not isinstance(values, Texts):
        return pa.array(values.astype(spec.item, copy=False))
    items = _items(spec, values)
    return items_array(spec.arrow_type, items.offsets, items.data)


def sparse_leaf(spec: ColumnSpec, values: LeafValues, rows: int, at: Array) -> pa.Array:
    """`rows` values of a column of a space: `values` at the ascending rows `at`, null elsewhere."""
    if spec.encoding == "scalar" and not isinstance(values, Texts):
        spread, missing = np.zeros(rows, spec.item), np.ones(rows, np.bool_)
        spread[at], missing[at] = values, False
        return pa.array(spread, mask=missing)
    return sparse_items(rows, at, _items(spec, values), spec.arrow_type)


def _items(spec: ColumnSpec, values: LeafValues) -> Texts:
    """The values as N texts, byte strings or lists: little-endian in C order, or UTF-8."""
    if isinstance(values, Texts):
        return values
    flat = np.ascontiguousarray(values).reshape(-1)
    if spec.encoding == "binary":
        flat = flat.view(np.uint8)
    starts = np.arange(len(values) + 1, dtype=np.int64) * (flat.size // max(1, len(values)))
    return Texts(starts, flat.astype(spec.item, copy=False) if spec.encoding == "list" else flat)


def items_array(
    kind: pa.DataType, offsets: Array, data: Array, valid: Array | None = None
) -> pa.Array:
    """N texts, byte strings or lists in `data`; item i is at offsets[i]..offsets[i + 1].

    `valid`: bool (N,), False for null. Raises ShardError if they exceed Arrow's 2^31.
    """
    base, end = int(offsets[0]), int(offsets[-1])
    if end - base >= 2**31:
        unit = "numbers" if pa.types.is_list(kind) else "bytes"
        raise ShardError(f"expected less than 2^31 {unit} in one row group, got {end - base}")
    buffers = [
        None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little")),
        pa.py_buffer((offsets - base).astype(np.int32)),
    ]
    here = np.ascontiguousarray(data[base:end])
    if pa.types.is_list(kind):
        inside = [pa.array(here)]
        return pa.Array.from_buffers(kind, len(offsets) - 1, buffers, children=inside)
    return pa.Array.from_buffers(kind, len(offsets) - 1, [*buffers, pa.py_buffer(here)])


def sparse_items(rows: int, at: Array, items: Texts, kind: pa.DataType) -> pa.Array:
    """`rows` texts, byte strings or lists: `items` at the ascending rows `at`, null elsewhere."""
    if not len(at):
        return pa.nulls(rows, kind)
    sizes = np.zeros(rows, np.int64)
    sizes[at] = np.diff(items.offsets)
    valid = np.zeros(rows, np.bool_)
    valid[at] = True
    return items_array(
        kind, starts_of(sizes), items.data[items.offsets[0] : items.offsets[-1]], valid
    )


def coded(words: pa.Array, codes: Array) -> pa.Array:
    """The word of each code (N,), null for a negative code, as a dictionary array."""
    missing = codes < 0
    indices = pa.array(codes.astype(np.int32), mask=missing if missing.any() else None)
    return pa.DictionaryArray.from_arrays(indices, words)


class RepeatedText:
    """A text column with one value per part, repeated over the parts' rows."""

    def __init__(self, values: Sequence[str | None]) -> None:
        encoded = pa.array(values, pa.string()).dictionary_encode()
        self._codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        self._words = encoded.dictionary

    def rows(self, parts: slice, sizes: Array) -> pa.Array:
        """A dictionary array of the values of these parts, repeated `sizes` times each."""
        codes = self._codes[parts]
        used = np.zeros(len(self._words) + 1, np.bool_)  # the last one is for null, code -1
        used[codes] = True
        places = np.append(np.cumsum(used[:-1]) - 1, -1)
        words = self._words.filter(pa.array(used[:-1]))  # each row group has its own dictionary
        return coded(words, np.repeat(places[codes], sizes))


# --- from Arrow ------------------------------------------------------------------------------


def table_specs(schema: pa.Schema) -> Mapping[str, ColumnSpec]:
    """Column name -> spec, from the footer in the metadata of a shard's table."""
    text = (schema.metadata or {}).get(f"{PREFIX}columns".encode())
    return {} if text is None else specs_from_json(text)


def decode_column(table: pa.Table, name: str) -> Array:
    """A column of a shard's table as one array whose first axis is the rows.

    Columns of a space have their dtype and shape (N, *shape), as in the footer. Null rows are NaN
    in `action_logp` and `action_dist_inputs` (N, K), zeros in `final_obs` (see `present`), -1 in
    `env_t` and `agents`, and None in texts, which are an object array. Zero-copy results are
    read-only.

    Raises ShardError for a column that is not there, and for action_dist_inputs of different
    lengths.
    """
    if name not in table.column_names:
        raise ShardError(f"expected a column of {', '.join(table.column_names)}, got {name!r}")
    return decode_values(table.column(name), table_specs(table.schema).get(name))


def decode_values(column: pa.ChunkedArray, spec: ColumnSpec | None) -> Array:
    """As `decode_column`; `spec` is None for a column that does not belong to a space."""
    if spec is None:
        return _plain(column)
    values = given_values(column, spec)
    if not column.null_count:
        return values
    fill = np.nan if spec.name == "action_dist_inputs" else None if spec.dtype == "str" else 0
    spread = np.full((len(column), *values.shape[1:]), fill, values.dtype)
    spread[column.is_valid().to_numpy(zero_copy_only=False).astype(np.bool_)] = values
    return spread


def given_values(column: pa.ChunkedArray, spec: ColumnSpec) -> Array:
    """The values (M, *shape) of a column of a space without its null rows, in order."""
    if column.null_count:
        column = column.drop_null()
    if spec.encoding == "text":
        texts: Array = column.to_numpy(zero_copy_only=False).astype(object, copy=False)
        return texts
    dtype = np.dtype(spec.dtype)
    if spec.encoding == "scalar":
        found = [chunk.to_numpy(zero_copy_only=False) for chunk in column.chunks]
        return _joined(found, spec.item).astype(dtype, copy=False)
    pieces = [items_of(chunk, spec) for chunk in column.chunks]
    sizes = [np.diff(offsets) for offsets, _ in pieces if len(offsets) > 1]
    size, shape = math.prod(spec.shape), spec.shape
    if spec.encoding == "ragged":
        return _padded(spec, pieces, len(column))
    if -1 in shape:
        size = int(sizes[0][0]) if sizes else 0
        shape = (size,)
    for own in sizes:
        if not (own == size).all():
            other = int(own[own != size][0])
            raise ShardError(f"{spec.name}: expected {size} numbers in each row, got {other}")
    values = _joined([values for _, values in pieces], spec.item).astype(dtype, copy=False)
    return values.reshape(len(column), *shape)


def _padded(spec: ColumnSpec, pieces: list[tuple[Array, Array]], rows: int) -> Array:
    """Lists of different lengths as an array, with zeros at their ends."""
    sizes = np.concatenate([np.zeros(0, np.int64), *(np.diff(offsets) for offsets, _ in pieces)])
    most, width = spec.shape
    if ((sizes > most * width) | (sizes % width != 0)).any():
        raise ShardError(f"{spec.name}: expected up to {most} times {width} numbers in each row")
    padded = np.zeros((rows, most * width), spec.dtype)
    padded[np.arange(most * width) < sizes[:, None]] = _joined([v for _, v in pieces], spec.item)
    return padded.reshape(rows, *spec.shape)


def present(table: pa.Table, name: str) -> Array:
    """bool (N,): False where the column is null."""
    valid: Array = table.column(name).is_valid().to_numpy(zero_copy_only=False)
    return valid.astype(np.bool_)


def _plain(column: pa.ChunkedArray) -> Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    if pa.types.is_floating(kind):
        return _joined(
            [chunk.to_numpy(zero_copy_only=False) for chunk in column.chunks],
            np.dtype(kind.to_pandas_dtype()),
        )
    if column.null_count and pa.types.is_integer(kind):
        column = column.fill_null(-1)
    values: Array = column.to_numpy(zero_copy_only=False)
    return values


def _joined(pieces: list[Array], dtype: np.dtype[Any]) -> Array:
    if len(pieces) == 1:
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype)


def items_of(chunk: pa.Array, spec: ColumnSpec) -> tuple[Array, Array]:
    """(where each row's numbers begin, and the end: (N + 1,); the numbers) of lists or bytes.

    Both are views. A null row has no numbers. Raises ShardError for bytes that are cut.
    """
    if pa.types.is_fixed_size_list(chunk.type):
        values = chunk.flatten().to_numpy()
        return np.arange(len(chunk) + 1) * chunk.type.list_size, values
    if not len(chunk):
        return np.zeros(1, np.int32), np.zeros(0, spec.item)
    buffers = chunk.buffers()
    offsets: Array = np.frombuffer(buffers[1], np.int32)[chunk.offset :][: len(chunk) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    if pa.types.is_list(chunk.type):
        values = chunk.values.slice(first, last - first).to_numpy(zero_copy_only=False)
        return offsets - first, values
    dtype = np.dtype(spec.dtype)
    raw = np.zeros(0, np.uint8) if buffers[2] is None else np.frombuffer(buffers[2], np.uint8)
    starts = offsets - first
    if dtype.itemsize > 1:
        if (starts % dtype.itemsize).any():
            raise ShardError(
                f"{spec.name}: expected whole numbers of {dtype} in each row, got cut ones"
            )
        starts = starts // dtype.itemsize
    return starts, raw[first:last].view(dtype)
