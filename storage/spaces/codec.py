"""The codec of a space: values <-> canonical bytes, with validation, also for whole columns.

The canonical encoding of a value is the concatenation of its fixed-size leaves (little-endian, C
order, Dict keys sorted, Tuple items in order), followed by its Text and ragged leaves, each as a
4-byte length and UTF-8, or float32 rows without those at the end that are zeros. All values of a
space without such leaves have the same size, so T values are one buffer.

Example:
    >>> codec = Codec(Box(shape=(2,), low=-1.0, high=1.0))
    >>> codec.decode(codec.encode([0.5, -0.25]))
    array([ 0.5 , -0.25], dtype=float32)
"""

from __future__ import annotations

import base64
import contextlib
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from storage.spaces.descriptors import (
    Array,
    Dict,
    Discrete,
    MultiBinary,
    Space,
    SpaceError,
    Tuple,
)
from storage.spaces.leaves import (
    Leaf,
    Quick,
    QuickInteger,
    QuickName,
    bounds_of,
    describe,
    leaves,
    quick_numbers,
    rows_of,
)

LONG_LIST = 1_000
"""Lists up to this length become arrays before their shape is checked, so that the error can show
them."""

_SHORT = reprlib.Repr()
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxtuple = 8
_SHORT.maxstring = _SHORT.maxother = 80

# --- the codec -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slot:
    """The place of a fixed-size leaf in the canonical encoding, and its allowed values."""

    leaf: Leaf
    offset: int
    size: int
    bounds: tuple[Array, Array] | None = field(compare=False)
    quick: Quick | None = field(compare=False)


def _slot_of(leaf: Leaf, offset: int) -> _Slot:
    size = leaf.dtype.itemsize * math.prod(leaf.shape)
    space, bounds = leaf.space, bounds_of(leaf.space)
    quick: Quick | None
    if isinstance(space, Discrete):
        last = space.start + space.n - 1
        quick = QuickName(space) if space.names else QuickInteger(space.start, last)
    else:
        quick = quick_numbers(leaf.dtype, leaf.shape, bounds)
    return _Slot(leaf, offset, size, bounds, quick)


class Codec:
    """Values of one space <-> canonical bytes, with validation in both directions.

    Attributes: `space`; `leaves`; `itemsize`, bytes per value, None if it varies (Text, ragged);
    `has_names`, whether a leaf has names.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.leaves = leaves(space)
        self._varied = [leaf for leaf in self.leaves if leaf.varies]
        self._ragged = {leaf.path: _slot_of(leaf, 0) for leaf in self._varied if leaf.is_ragged}
        self._slots: list[_Slot] = []
        offset = 0
        for leaf in self.leaves:
            if not leaf.varies:
                self._slots.append(_slot_of(leaf, offset))
                offset += self._slots[-1].size
        self._fixed = offset
        self.itemsize: int | None = None if self._varied else offset
        inside = isinstance(space, (Dict, Tuple))
        self._single = None if inside or self._varied else self._slots[0]
        self.has_names = any(isinstance(x.space, Discrete) and x.space.names for x in self.leaves)

    # one value

    def encode(self, value: Any, where: str = "$", *, check_range: bool = True) -> bytes:
        """The canonical bytes of one value (array, number, nested list, dict, tuple, string).

        Integers are accepted for floats, but not floats for integers. In a space with names, a
        string is a name and an integer a code. If names are numbers other than their codes,
        integers are ambiguous and raise SpaceError. `check_range=False` is for actions that a
        policy chose: any code is accepted, and finite Box values may be outside their bounds, as in
        the unclipped sample of a Gaussian policy. `where`: the place of the value, for messages.
        Raises SpaceError.
        """
        single = self._single
        if single is not None:
            if single.quick is not None:
                data = single.quick.encode(value, check_range)
                if data is not None:
                    return data
            return _leaf_bytes(single, value, where, check_range)
        fixed: list[bytes] = []
        varied: list[bytes] = []
        slots, ragged = iter(self._slots), iter(self._ragged.values())
        for leaf, item, place in _walk(self.space, value, where):
            if leaf.is_text:
                varied.append(_text_record(leaf.space, item, place))
            elif leaf.is_ragged:
                varied.append(_ragged_record(next(ragged), item, place, check_range))
            else:
                fixed.append(_leaf_bytes(next(slots), item, place, check_range))
        return b"".join(fixed + varied)

    def from_wire(self, value: Any, where: str = "$", *, check_range: bool = True) -> bytes:
        """Encode a value of decoded JSON or msgpack; a leaf may also be `{"dtype","shape","data"}`.

        A whole value may also be raw bytes: its canonical encoding. Arguments and errors as for
        `encode`.
        """
        if isinstance(value, (bytes, bytearray, memoryview)):
            data = bytes(value)
            self.check(data, where, check_range=check_range)
            return data
        return self.encode(value, where, check_range=check_range)

    def decode(self, data: bytes) -> Any:
        """The value of canonical bytes: array, int, dict, tuple or string, as the space says."""
        single = self._single
        if single is not None and len(data) == single.size > 0:
            leaf = single.leaf
            if isinstance(leaf.space, Discrete):
                return int.from_bytes(data, "little", signed=True)
            return np.frombuffer(data, leaf.dtype).reshape(leaf.shape)
        columns = self.columns(data, 1, [len(data)])
        return _assemble(self.space, iter([columns[leaf.path] for leaf in self.leaves]), 0)

    def named(self, value: Any) -> Any:
        """A value as `decode` returns it, with names instead of their codes."""
        return _named(self.space, value) if self.has_names else value

    def check(self, data: bytes, where: str = "$", *, check_range: bool = True) -> None:
        """Raise SpaceError unless `data` is the canonical encoding of one allowed value."""
        single = self._single
        if single is not None and single.quick is not None:
            if single.quick.is_valid(data, check_range):
                return
        elif self.itemsize is None:
            for leaf, piece in zip(self._varied, self._split_varied(data, where), strict=True):
                place = f"{where}.{leaf.path}" if leaf.path else where
                if isinstance(piece, str):
                    _text_bytes(leaf.space, piece, place)
                else:
                    _check_rows(self._ragged[leaf.path], piece, place, check_range)
        if self.itemsize is not None and len(data) != self.itemsize:
            raise SpaceError(
                f"{where}: expected {_describe_all(self.leaves)} in {self.itemsize} bytes, "
                f"got {len(data)} bytes"
            )
        bad = self.find_invalid(data[: self._fixed], 1, check_range=check_range)
        if bad is not None:
            raise SpaceError(f"{where}{bad[1]}")

    # many values

    def find_invalid(
        self, fixed: bytes, count: int, *, check_range: bool = True
    ) -> tuple[int, str] | None:
        """The first invalid of `count` values' fixed parts, as (index, what is wrong), or None."""
        if self._fixed == 0:
            return None
        rows = np.frombuffer(fixed, np.uint8).reshape(count, self._fixed)
        for slot in self._slots:
            fine = _valid_rows(slot, rows, count, check_range)
            if fine is not None:
                index = int(np.argmin(fine))
                place = f".{slot.leaf.path}" if slot.leaf.path else ""
                shown = np.array2string(_slot_values(slot, rows, count)[index], threshold=8)
                return index, f"{place}: expected {describe(slot.leaf.space)}, got {shown}"
        return None

    def columns(
        self, data: bytes | bytearray | memoryview, count: int, lengths: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Decode `count` values to columns: path -> array `(count, *shape)`, or list of str.

        For a fixed-size space with one leaf the array is a read-only view. `lengths`: the size of
        each value in bytes, required if it varies. Raises SpaceError if sizes do not fit.
        """
        if self.itemsize is None:
            if lengths is None or len(lengths) != count or sum(lengths) != len(data):
                raise SpaceError(
                    f"expected {count} lengths that sum to {len(data)} bytes, got others"
                )
            return self._varied_columns(bytes(data), lengths)
        if len(data) != count * self.itemsize:
            raise SpaceError(
                f"expected {count} values of {self.itemsize} bytes, got {len(data)} bytes"
            )
        if self._fixed == 0:
            return {
                s.leaf.path: np.zeros((count, *s.leaf.shape), s.leaf.dtype) for s in self._slots
            }
        rows = np.frombuffer(data, np.uint8).reshape(count, self._fixed)
        return {s.leaf.path: _slot_values(s, rows, count) for s in self._slots}

    def encode_columns(self, columns: Mapping[str, Any], count: int) -> list[bytes]:
        """The canonical encoding of each of `count` values given as columns (see `columns`).

        Types, shapes and texts are checked, but not the range of numbers: see `find_invalid`.
        Raises SpaceError.
        """
        rows = np.empty((count, self._fixed), np.uint8)
        _require_columns(self.leaves, columns, count)
        for slot in self._slots:
            values = _column(slot.leaf, columns, count)
            if slot.size:
                rows[:, slot.offset : slot.offset + slot.size] = (
                    values.reshape(-1).view(np.uint8).reshape(count, slot.size)
                )
        if not self._varied:
            joined = rows.tobytes()
            size = self._fixed
            return [joined[i * size : (i + 1) * size] for i in range(count)]
        varied = [
            [_record(rows_of(row.tobytes(), leaf)) for row in _column(leaf, columns, count)]
            if leaf.is_ragged
            else [
                _text_record(leaf.space, one, leaf.path or "column") for one in columns[leaf.path]
            ]
            for leaf in self._varied
        ]
        return [b"".join((rows[i].tobytes(), *(v[i] for v in varied))) for i in range(count)]

    def _varied_columns(self, data: bytes, lengths: Sequence[int]) -> dict[str, Any]:
        fixed: list[bytes] = []
        varied: list[list[Any]] = [[] for _ in self._varied]
        at = 0
        for length in lengths:
            record = data[at : at + length]
            at += length
            fixed.append(record[: self._fixed])
            for column, piece in zip(varied, self._split_varied(record, "$"), strict=True):
                column.append(piece)
        result: dict[str, Any] = {}
        rows = np.frombuffer(b"".join(fixed), np.uint8).reshape(len(lengths), self._fixed)
        for slot in self._slots:
            result[slot.leaf.path] = _slot_values(slot, rows, len(lengths))
        for leaf, column in zip(self._varied, varied, strict=True):
            result[leaf.path] = _padded_rows(leaf, column) if leaf.is_ragged else column
        return result

    def _split_varied(self, data: bytes, where: str) -> list[str | bytes]:
        """The texts, and the bytes of the rows of ragged leaves."""
        at, found = self._fixed, list[str | bytes]()
        for leaf in self._varied:
            size = int.from_bytes(data[at : at + 4], "little")
            piece = data[at + 4 : at + 4 + size]
            if len(data) < at + 4 or len(piece) != size:
                raise SpaceError(f"{where}: expected {_describe_all(self.leaves)}, got cut bytes")
            at += 4 + size
            try:
                found.append(piece if leaf.is_ragged else piece.decode())
            except UnicodeDecodeError as error:
                raise SpaceError(f"{where}: expected UTF-8, got {piece[:40]!r}") from error
        if at != len(data):
            raise SpaceError(f"{where}: expected {at} bytes, got {len(data)}")
        return found


def _record(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


def _ragged_record(slot: _Slot, value: Any, where: str, check_range: bool) -> bytes:
    """The record of a value with as many rows as there are, or as there may be."""
    leaf = slot.leaf
    if isinstance(value, list) or np.ndim(value) == 2:
        with contextlib.suppress(ValueError):  # rows of different lengths are refused below
            rows = np.asarray(value if len(value) else np.zeros((0, leaf.shape[1]), leaf.dtype))
            fits = rows.ndim == 2 and rows.shape[1] == leaf.shape[1] and len(rows) < leaf.shape[0]
            if fits and rows.dtype.kind not in "SU":  # each item has room for the longest text
                value = np.zeros(leaf.shape, rows.dtype)
                value[: len(rows)] = rows
    return _record(rows_of(_leaf_bytes(slot, value, where, check_range), leaf))


def _check_rows(slot: _Slot, data: bytes, where: str, check_range: bool) -> None:
    """Raise SpaceError unless these are the rows of an allowed value."""
    leaf, whole = slot.leaf, data.ljust(slot.size, b"\0")
    if len(whole) > slot.size or rows_of(whole, leaf) != data:
        raise SpaceError(
            f"{where}: expected {describe(leaf.space)}, the last one not of zeros, got {len(data)} "
            "bytes"
        )
    _leaf_bytes(slot, np.frombuffer(whole, leaf.dtype).reshape(leaf.shape), where, check_range)


def _padded_rows(leaf: Leaf, pieces: Sequence[bytes]) -> Array:
    """The values of a ragged leaf (N, *shape), with zeros at their ends. Raises SpaceError."""
    size = leaf.dtype.itemsize * math.prod(leaf.shape)
    if any(len(piece) > size for piece in pieces):
        raise SpaceError(f"{leaf.path or '$'}: expected {describe(leaf.space)}, got more")
    joined = b"".join(piece.ljust(size, b"\0") for piece in pieces)
    return np.frombuffer(joined, leaf.dtype).reshape(len(pieces), *leaf.shape)


def _column(leaf: Leaf, columns: Mapping[str, Any], count: int) -> Array:
    """A column of a leaf's dtype and shape, contiguous. Raises SpaceError for another."""
    where = leaf.path or "column"
    values = np.asarray(columns[leaf.path])
    if values.shape != (count, *leaf.shape):
        raise SpaceError(f"{where}: expected shape {(count, *leaf.shape)}, got {values.shape}")
    return np.ascontiguousarray(
        values if values.dtype == leaf.dtype else _cast(values, leaf, where)
    )


def _describe_all(found: Sequence[Leaf]) -> str:
    return "; ".join(
        (f"{leaf.path}: " if leaf.path else "") + describe(leaf.space) for leaf in found
    )


def _slot_values(slot: _Slot, rows: Array, count: int) -> Array:
    raw = rows[:, slot.offset : slot.offset + slot.size]
    if slot.size == 0:
        return np.zeros((count, *slot.leaf.shape), slot.leaf.dtype)
    return np.ascontiguousarray(raw).view(slot.leaf.dtype).reshape(count, *slot.leaf.shape)


def _valid_rows(slot: _Slot, rows: Array, count: int, check_range: bool) -> Array | None:
    """Whether each of `count` rows has a valid value of the slot: bool (count,); None if all do."""
    if slot.size == 0:
        return None
    if slot.leaf.dtype.kind == "b":
        fine: Array = rows[:, slot.offset : slot.offset + slot.size] <= 1
    elif slot.bounds is None:
        return None
    else:
        values = _slot_values(slot, rows, count)
        if check_range or values.dtype.kind != "f":
            low, high = slot.bounds
            fine = np.asarray((values >= low) & (values <= high))
        else:
            fine = np.isfinite(values)
    if fine.all():
        return None
    result: Array = np.all(fine, axis=tuple(range(1, fine.ndim)))
    return result


def _leaf_bytes(slot: _Slot, value: Any, where: str, check_range: bool) -> bytes:
    if slot.quick is not None:
        data = slot.quick.encode(value, check_range)
        if data is not None:
            return data
    leaf = slot.leaf
    if isinstance(slot.quick, QuickName) and check_range and slot.quick.is_unsure(value):
        raise SpaceError(
            f"{where}: expected {describe(leaf.space)}, as a string (they are numbers, so that an "
            f"integer could be a name or a code), got {_shown(value)}"
        )
    try:
        array = value if type(value) is np.ndarray else _as_array(value, leaf, where)
        if array.dtype != leaf.dtype:
            array = _cast(array, leaf, where)
    except (ValueError, TypeError, OverflowError) as error:
        if isinstance(error, SpaceError):
            raise
        raise SpaceError(
            f"{where}: expected {describe(leaf.space)}, got {_shown(value)}"
        ) from error
    if array.shape != leaf.shape:
        text = f"{where}: expected {describe(leaf.space)}, got shape {array.shape}"
        in_a_list = (array.shape, leaf.shape) == ((), (1,))
        raise SpaceError(f"{text}: write [{array.item()!r}]" if in_a_list else text)
    bounds = slot.bounds
    if bounds is not None:
        if check_range or array.dtype.kind != "f":
            fine = ((array >= bounds[0]) & (array <= bounds[1])).all()
        else:
            fine = np.isfinite(array).all()
        if not fine:
            shown = np.array2string(array, threshold=8)
            raise SpaceError(f"{where}: expected {describe(leaf.space)}, got {shown}")
    return array.tobytes()


def _shown(value: Any) -> str:
    """The beginning of a value, for an error's text."""
    return _SHORT.repr(value)[:200]


def _as_array(value: Any, leaf: Leaf, where: str) -> Array:
    if isinstance(value, dict):
        return _from_parts(value, leaf, where)
    if isinstance(value, (str, bytes)) or value is None:
        raise SpaceError(f"{where}: expected {describe(leaf.space)}, got {_shown(value)}")
    if isinstance(value, list) and len(value) > max(LONG_LIST, math.prod(leaf.shape)):
        raise SpaceError(f"{where}: expected {describe(leaf.space)}, got {len(value)} items")
    array = np.asarray(value)
    if array.dtype.kind in "OUSV":
        raise SpaceError(f"{where}: expected {describe(leaf.space)}, got {_shown(value)}")
    if array.size == 0 and math.prod(leaf.shape) == 0:
        return array.astype(leaf.dtype)
    return array


def _from_parts(value: dict[str, Any], leaf: Leaf, where: str) -> Array:
    """An array from the wire form `{"dtype", "shape", "data"}`.

    `data` is raw little-endian bytes, or their base64 in a JSON message.
    """
    if set(value) != {"dtype", "shape", "data"}:
        raise SpaceError(
            f"{where}: expected {describe(leaf.space)} or the keys dtype, shape, data, "
            f"got the keys {_shown(sorted(map(str, value)))}"
        )
    data, shape = value["data"], value["shape"]
    if value["dtype"] != leaf.dtype.name or not isinstance(shape, (list, tuple)):
        raise SpaceError(
            f"{where}: expected dtype {leaf.dtype.name} and a list as shape, got "
            f"{_shown(value['dtype'])} and {_shown(shape)}"
        )
    if tuple(shape) != leaf.shape:
        raise SpaceError(f"{where}: expected shape {list(leaf.shape)}, got {_shown(shape)}")
    if isinstance(data, str):
        try:
            data = base64.b64decode(data, validate=True)
        except ValueError as error:
            raise SpaceError(f"{where}: expected base64 as data, got {data[:40]!r}") from error
    if not isinstance(data, bytes) or len(data) != leaf.dtype.itemsize * math.prod(leaf.shape):
        got = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise SpaceError(
            f"{where}: expected {leaf.dtype.itemsize * math.prod(leaf.shape)} bytes, got {got}"
        )
    return np.frombuffer(data, leaf.dtype.newbyteorder("<")).reshape(leaf.shape)


_ALLOWED_KINDS = {"f": "fiu", "i": "iu", "u": "iu", "b": "b"}


def _cast(array: Array, leaf: Leaf, where: str) -> Array:
    """Convert to the leaf's dtype; raise SpaceError if more than float precision would be lost."""
    target = leaf.dtype
    allowed = _ALLOWED_KINDS[target.kind] + ("b" if isinstance(leaf.space, MultiBinary) else "")
    if array.dtype.kind not in allowed:
        raise SpaceError(f"{where}: expected {describe(leaf.space)}, got {array.dtype}")
    if target.kind == "f":
        with np.errstate(over="ignore"):
            return array.astype(target)
    cast = array.astype(target)
    if not (cast == array).all():
        raise SpaceError(
            f"{where}: expected {describe(leaf.space)}, got {np.array2string(array, threshold=8)}"
        )
    return cast


def _text_bytes(space: Any, value: Any, where: str) -> bytes:
    if not isinstance(value, str) or not space.min_length <= len(value) <= space.max_length:
        raise SpaceError(f"{where}: expected {describe(space)}, got {_shown(value)}")
    if space.charset and not set(value) <= set(space.charset):
        raise SpaceError(f"{where}: expected {describe(space)}, got {_shown(value)}")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise SpaceError(f"{where}: expected text that UTF-8 can hold, got a surrogate") from error


def _text_record(space: Any, value: Any, where: str) -> bytes:
    return _record(_text_bytes(space, value, where))


def _require_columns(found: Sequence[Leaf], columns: Mapping[str, Any], count: int) -> None:
    for leaf in found:
        if leaf.path not in columns or len(columns[leaf.path]) != count:
            raise SpaceError(
                f"{leaf.path or 'column'}: expected {count} values of {describe(leaf.space)}"
            )


def _walk(space: Space, value: Any, where: str) -> Iterator[tuple[Leaf, Any, str]]:
    """Yield (leaf, its value, its place) in canonical order.

    Raises SpaceError for missing and extra keys or items.
    """
    if isinstance(space, Dict):
        names = [name for name, _ in space.spaces]
        if not isinstance(value, Mapping) or set(value) != set(names):
            got = _shown(sorted(map(str, value)) if isinstance(value, Mapping) else value)
            raise SpaceError(f"{where}: expected a mapping with the keys {names}, got {got}")
        for name, inner in space.spaces:
            yield from _walk(inner, value[name], f"{where}.{name}")
    elif isinstance(space, Tuple):
        if not isinstance(value, (list, tuple)) or len(value) != len(space.spaces):
            raise SpaceError(f"{where}: expected {len(space.spaces)} items, got {_shown(value)}")
        for i, inner in enumerate(space.spaces):
            yield from _walk(inner, value[i], f"{where}[{i}]")
    else:
        yield Leaf("", space), value, where


def _named(space: Space, value: Any) -> Any:
    if isinstance(space, Dict):
        return {name: _named(inner, value[name]) for name, inner in space.spaces}
    if isinstance(space, Tuple):
        return tuple(_named(inner, item) for inner, item in zip(space.spaces, value, strict=True))
    return space.names[int(value)] if isinstance(space, Discrete) and space.names else value


def _assemble(space: Space, columns: Iterator[Any], row: int) -> Any:
    if isinstance(space, Dict):
        return {name: _assemble(inner, columns, row) for name, inner in space.spaces}
    if isinstance(space, Tuple):
        return tuple(_assemble(inner, columns, row) for inner in space.spaces)
    item = next(columns)[row]
    return int(item) if isinstance(space, Discrete) else item
