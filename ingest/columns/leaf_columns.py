"""The values of a space's leaves: from numbers or Arrow to canonical ones, by whole columns.

Numbers are cast if nothing but a float's precision can be lost. A column of Arrow with a leaf of
several numbers has lists or their bytes, a choice with names has names or their codes. Rows whose
values do not fit are recorded in `RowFaults`; those of a column of Arrow are replaced by zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

from ingest.columns.arrow_kinds import (
    Array,
    Mask,
    flattened,
    is_bytes,
    is_list,
    is_text,
    load_arrow,
    nulls,
    to_numpy,
)
from ingest.columns.faults import Got, RowFaults, nothing, shown
from ingest.protocol.errors import Refusal
from storage.spaces.codec import Codec
from storage.spaces.descriptors import Discrete, MultiBinary
from storage.spaces.leaves import Leaf, bounds_of, describe, rows_of

Values: TypeAlias = Any
"""An array (rows, *shape); for Text, a list of strings."""

_CASTS = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}


class LeafRule:
    """Judges a leaf's values. Faults are at `place`, which a message names."""

    hidden = False  # whether messages do not show values

    def __init__(self, place: str, leaf: Leaf) -> None:
        self.place, self.leaf = place, leaf
        self.dtype, self.shape, self.size = leaf.dtype, leaf.shape, math.prod(leaf.shape)
        self.expected = f"expected {describe(leaf.space)}"
        self._bounds = None if leaf.is_text or self.dtype.kind == "b" else bounds_of(leaf.space)

    def fault(self, faults: RowFaults, bad: Mask, got: Got) -> None:
        """Record rows that do not fit."""
        faults.add(bad, self.place, self.expected, _not_shown if self.hidden else got)

    def fitted(self, values: Array, faults: RowFaults) -> Array:
        """Numbers (rows, *shape) in the leaf's dtype, if they are in its range."""
        found, fine = values, np.ones(len(values), np.bool_)
        if values.dtype != self.dtype:
            with np.errstate(over="ignore", invalid="ignore"):
                found = values.astype(self.dtype)
            if self.dtype.kind != "f":
                fine &= _every(found == values)
        if self._bounds is not None and found.size:
            fine &= _every((found >= self._bounds[0]) & (found <= self._bounds[1]))
        if not fine.all():
            self.fault(faults, ~fine, lambda row: _shown(values[row]))
        return found

    def codes(self, space: Discrete, names: Any, faults: RowFaults) -> Array:
        """The codes of names, a pyarrow.Array, each distinct one looked up once; else 0."""
        encoded = names.dictionary_encode()
        codes = np.append(space.codes(encoded.dictionary.to_pylist()), -1)
        found = codes[to_numpy(encoded.indices.fill_null(-1))]
        unknown = found < 0
        if unknown.any():
            self.fault(faults, unknown, shown(names))
            found = np.maximum(found, 0)
        return found

    def texts(self, values: Any, faults: RowFaults) -> list[str]:
        """Strings, "" for invalid ones. Each distinct string is checked once."""
        space: Any = self.leaf.space
        encoded = values.dictionary_encode()
        words = [_word(word, space) for word in encoded.dictionary.to_pylist()]
        places = to_numpy(encoded.indices.fill_null(len(words)))
        words.append(None)
        bad = np.array([word is None for word in words])[places]
        if bad.any():
            self.fault(faults, bad, shown(values))
        return [words[place] or "" for place in places.tolist()]


class LeafColumn(LeafRule):
    """A leaf's column of Arrow: its type check, and its values."""

    def __init__(self, column: str, kind: Any, leaf: Leaf, *, hidden: bool) -> None:
        """Raises Refusal for a column whose type cannot hold the leaf's values."""
        super().__init__(column, leaf)
        self.hidden = hidden
        self._is_null = load_arrow().types.is_null(kind)
        self._is_bytes, self._is_list = is_bytes(kind), is_list(kind)
        self._is_flat = getattr(kind, "list_size", -1) == self.size and not is_list(kind.value_type)
        names: Any = leaf.space if isinstance(leaf.space, Discrete) and leaf.space.names else None
        self._names: Discrete | None = names if is_text(kind) else None
        fits = self._is_null or self._is_bytes or (leaf.is_text and is_text(kind)) or self._names
        unsure = names is not None and not fits and names.has_numbers
        if unsure or not (fits or self._holds(kind)):
            text = f"{self.expected}, got a column of {kind!s:.80}"
            text += ": send these numbers as strings" if unsure else ""
            raise Refusal("invalid", text, f"$.{column}")

    def _holds(self, kind: Any) -> bool:
        """Whether the type is numbers, or lists as deep as the leaf's shape, that can be cast."""
        types, depth, axes = load_arrow().types, 0, len(self.shape)
        while is_list(kind):
            kind, depth = kind.value_type, depth + 1
        if self.leaf.is_text or not (depth == axes if axes < 2 else depth >= 1):
            return False
        if types.is_boolean(kind):
            return self.dtype.kind == "b" or isinstance(self.leaf.space, MultiBinary)
        given = "f" if types.is_floating(kind) else "i" if types.is_integer(kind) else "?"
        return given in _CASTS[self.dtype.kind]

    def values(self, column: Any, faults: RowFaults) -> Values:
        """The values of a pyarrow.Array."""
        if self.leaf.is_text:
            return self.texts(column.cast("string") if self._is_null else column, faults)
        if column.null_count:
            faults.add(nulls(column), self.place, self.expected, nothing)
        if self._is_bytes:
            return self.fitted(self._from_bytes(column, faults), faults)
        if self._names is not None:
            return self.codes(self._names, column, faults)
        if self._is_null:
            return np.zeros((len(column), *self.shape), self.dtype)
        return self.fitted(self._numbers(column, faults), faults)

    def _from_bytes(self, values: Any, faults: RowFaults) -> Array:
        """Decode a leaf's canonical bytes to numbers."""
        compute = load_arrow().compute
        size, rows = self.dtype.itemsize * self.size, len(values)
        lengths = to_numpy(compute.binary_length(values).fill_null(size))
        wrong = lengths != size
        if wrong.any():
            self.fault(faults, wrong, lambda row: f"{lengths[row]} bytes")
        kept = ~wrong & ~to_numpy(values.is_null())
        some = values if kept.all() else values.filter(load_arrow().array(kept))
        raw = np.zeros((rows, size), np.uint8)
        raw[kept] = np.frombuffer(b"".join(some.to_pylist()), np.uint8).reshape(len(some), size)
        if self.dtype.kind == "b":
            fine = raw <= 1
            if not fine.all():
                self.fault(faults, ~_every(fine), lambda row: "other bytes")
                raw &= 1
        if not size:
            return np.zeros((rows, *self.shape), self.dtype)
        return raw.view(self.dtype).reshape(rows, *self.shape)

    def _numbers(self, values: Any, faults: RowFaults) -> Array:
        """Numbers as they came, (rows, *shape); zeros for rows that are null or of wrong length."""
        rows, size = len(values), self.size
        places: Mask | None = None  # (rows, size), where the numbers belong if not everywhere
        if self._is_flat and not values.null_count:
            values = values.flatten()
        elif self._is_list:
            counts = flattened(values)[0]
            kept = counts == size
            if self.leaf.is_ragged:
                kept = (counts <= size) & (counts % self.shape[1] == 0)
            if not kept.all():
                self.fault(faults, ~kept, lambda row: f"{counts[row]} values")
                values = values.filter(load_arrow().array(kept))
            if self.leaf.is_ragged or not kept.all():
                places = np.arange(size) < np.where(kept, counts, 0)[:, None]
            while is_list(values.type):
                values = values.flatten()
        if values.null_count:
            if self._is_list:
                whole = np.ones((rows, size), np.bool_) if places is None else places
                bad = np.zeros(rows, np.bool_)
                bad[np.nonzero(whole)[0][to_numpy(values.is_null())]] = True
                self.fault(faults, bad, lambda row: "a list with a null")
            values = values.fill_null(False if str(values.type) == "bool" else 0)
        flat = to_numpy(values)
        if places is None:
            return flat.reshape(rows, *self.shape)
        found = np.zeros((rows, size), flat.dtype)
        found[places] = flat
        return found.reshape(rows, *self.shape)


def _shown(value: Any) -> str:
    """A number, or an array, of which a long one is abbreviated."""
    return str(value) if not value.shape else np.array2string(value, threshold=8, separator=", ")


def _not_shown(row: int) -> str:
    return "other values, not shown because they are redacted"


def _every(fine: Array) -> Mask:
    """For each row, whether all of its values are fine."""
    result: Mask = np.asarray(fine.all(axis=tuple(range(1, fine.ndim))))
    return result


def _word(word: str | bytes, space: Any) -> str | None:
    """The text if it is in the space, otherwise None."""
    if isinstance(word, bytes):
        try:
            word = word.decode()
        except UnicodeDecodeError:
            return None
    fits = space.min_length <= len(word) <= space.max_length
    return word if fits and (not space.charset or {*word} <= {*space.charset}) else None


def encode(codec: Codec, columns: Mapping[str, Values], rows: int) -> tuple[bytes, bytes]:
    """Canonical bytes of all rows by leaf path, and uint32 lengths if their sizes vary."""
    fixed = [leaf for leaf in codec.leaves if not leaf.varies]
    if len(codec.leaves) == 1 and fixed:
        return np.ascontiguousarray(columns[fixed[0].path]).tobytes(), b""
    raw = [
        np.ascontiguousarray(columns[leaf.path]).reshape(rows, -1).view(np.uint8).reshape(rows, -1)
        for leaf in fixed
        if math.prod(leaf.shape)
    ]
    joined = np.concatenate(raw, axis=1) if raw else np.zeros((rows, 0), np.uint8)
    varied = [_records(leaf, columns[leaf.path]) for leaf in codec.leaves if leaf.varies]
    if not varied:
        return joined.tobytes(), b""
    ahead = [row.tobytes() for row in joined]
    pieces = [b"".join(record) for record in zip(ahead, *varied, strict=True)]
    lengths = np.fromiter(map(len, pieces), np.uint32, rows)
    return b"".join(pieces), lengths.tobytes()


def _records(leaf: Leaf, column: Values) -> list[bytes]:
    """What follows the fixed-size leaves: a size and a text, or the rows of a ragged leaf."""
    if leaf.is_ragged:
        return [_record(rows_of(row.tobytes(), leaf)) for row in column]
    known = {text: _record(text.encode()) for text in {*column}}
    return [known[text] for text in column]


def _record(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data
