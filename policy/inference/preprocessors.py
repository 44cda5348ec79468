"""Observations of any space as flat float32 vectors, with numpy alone.

A Box becomes its elements, a Discrete a one-hot vector, a MultiDiscrete one-hot vectors in
sequence, a MultiBinary zeros and ones. The leaves of Dict and Tuple follow each other in canonical
order (storage.spaces.codec), but candidates and an action mask come last: a flat observation has S
numbers of the state, then those of the candidates, then the mask. Shards contain the raw
observation: it is flattened where a policy reads it.

    flat = Flattener(space)
    flat.value({"speed": 0.5, "gear": 2})            # (D,) for one observation
    flat.columns({"speed": speeds, "gear": gears})   # (B, D) for B of them
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.spaces.descriptors import (
    Array,
    Box,
    Dict,
    Discrete,
    MultiDiscrete,
    Space,
    SpaceError,
    Tuple,
)
from storage.spaces.leaves import Leaf, bounds_of, leaves

FloatArray = npt.NDArray[np.float32]
_FLOAT32 = np.dtype("float32")
_PLAUSIBLE = 8
"""The number of observations in `plausible_columns`."""
_NEAR = 1e6
"""Bounds farther from zero are treated as no bounds: a valid network may overflow on them."""


class Flattener:
    """Flattens the observations of one space.

    `size` is D, the length of a flat observation, and `features` S, the length without the leaves
    in `last`, which come last. `places` are the slices of the `leaves` in it. Raises SpaceError for
    a space with Text.
    """

    def __init__(self, space: Space, last: Sequence[Leaf] = ()) -> None:
        self.space = space
        self.leaves = leaves(space)
        for leaf in self.leaves:
            if leaf.is_text:
                where = f"observation.{leaf.path}" if leaf.path else "observation"
                raise SpaceError(f"{where}: a policy can't read a Text space")
        sizes = [_leaf_size(leaf) for leaf in self.leaves]
        self.size = sum(sizes)
        paths = [leaf.path for leaf in last]
        order = [*(leaf.path for leaf in self.leaves if leaf.path not in paths), *paths]
        widths = {leaf.path: size for leaf, size in zip(self.leaves, sizes, strict=True)}
        ends = np.cumsum([widths[path] for path in order]).tolist()
        places = {p: slice(end - widths[p], end) for p, end in zip(order, ends, strict=True)}
        self.places = [places[leaf.path] for leaf in self.leaves]
        self.features = self.size - sum(widths[path] for path in paths)
        box = self.leaves[0] if len(self.leaves) == 1 and isinstance(space, Box) else None
        self._only_box = box
        self._box_shape = box.shape if box is not None else ()

    def value(self, value: Any) -> FloatArray:
        """(D,) float32 of one observation; raises SpaceError for a wrong shape or key."""
        box = self._only_box
        if box is not None and type(value) is np.ndarray and value.dtype == _FLOAT32:
            if value.shape != self._box_shape:
                raise _wrong_shape(box, value.shape)
            flat: FloatArray = value if value.ndim == 1 else value.reshape(-1)
            return flat
        rows = [np.asarray(item)[None] for item in leaf_values(self.space, value, "observation")]
        one: FloatArray = self._joined(rows, 1)[0]
        return one

    def columns(self, columns: Mapping[str, Array] | Array) -> FloatArray:
        """(B, D) float32 from B observations: path -> (B, *shape), or a single leaf's array."""
        if not isinstance(columns, Mapping):
            columns = {self.leaves[0].path: columns}
        missing = [leaf.path for leaf in self.leaves if leaf.path not in columns]
        if missing or len(columns) != len(self.leaves):
            raise SpaceError(
                f"observation: expected the columns {[leaf.path for leaf in self.leaves]}, "
                f"got {sorted(columns)}"
            )
        arrays = [np.asarray(columns[leaf.path]) for leaf in self.leaves]
        return self._joined(arrays, len(arrays[0]))

    def features_of(self, flat: FloatArray) -> FloatArray:
        """(B, S): flat observations (B, D) without candidates and action mask."""
        return flat[:, : self.features]

    def _joined(self, arrays: list[Array], count: int) -> FloatArray:
        flat = np.empty((count, self.size), np.float32)
        for leaf, place, array in zip(self.leaves, self.places, arrays, strict=True):
            if array.shape != (count, *leaf.shape):
                raise _wrong_shape(leaf, array.shape[1:])
            _write(leaf, array, flat[:, place])
        return flat


def columns_of(space: Space, prefix: str, batch: Mapping[str, Any]) -> dict[str, Array]:
    """Leaf path -> array, from a batch with columns `prefix` or `prefix.<path>`.

    Raises KeyError that names the missing column.
    """
    return {leaf.path: batch[leaf.column(prefix)] for leaf in leaves(space)}


def plausible_columns(space: Space) -> dict[str, Array]:
    """A few observations that are likely to occur, as columns: the first is close to zero.

    The next two are at the space's lower and upper bounds, where these are within 1e6 of zero. In
    the others, integers are within 255 of zero and other numbers are standard normal, clipped to
    the bounds. The result is always the same.
    """
    rng = np.random.default_rng(0)
    return {leaf.path: _plausible(leaf, rng) for leaf in leaves(space)}


def _plausible(leaf: Leaf, rng: np.random.Generator) -> Array:
    whole = leaf.dtype.kind in "iub"
    shape = (_PLAUSIBLE, *leaf.shape)
    values = rng.integers(-255, 256, shape) if whole else rng.standard_normal(shape)
    values[0] = 0
    bounds = bounds_of(leaf.space)
    if bounds is None:  # all numbers of the dtype are allowed
        bounds = (np.array(0), np.array(1))
        if leaf.dtype.kind != "b":
            limits = np.iinfo(leaf.dtype)
            bounds = np.array(limits.min), np.array(limits.max)
    found = np.clip(values, *bounds)
    for row, bound in enumerate(bounds, 1):
        found[row] = np.where(np.abs(bound.astype(np.float64)) <= _NEAR, bound, found[row])
    return found.astype(leaf.dtype)


def assemble(space: Space, columns: Mapping[str, Array], row: int) -> Any:
    """One value of a space from columns (leaf path -> array), in the form of `Codec.decode`."""
    return _assembled(space, iter([columns[leaf.path] for leaf in leaves(space)]), row)


def _assembled(space: Space, columns: Iterator[Array], row: int) -> Any:
    if isinstance(space, Dict):
        return {name: _assembled(inner, columns, row) for name, inner in space.spaces}
    if isinstance(space, Tuple):
        return tuple(_assembled(inner, columns, row) for inner in space.spaces)
    item = next(columns)[row]
    return int(item) if isinstance(space, Discrete) else item


def _leaf_size(leaf: Leaf) -> int:
    if isinstance(leaf.space, Discrete):
        return leaf.space.n
    if isinstance(leaf.space, MultiDiscrete):
        return sum(leaf.space.nvec)
    return math.prod(leaf.shape)


def leaf_values(space: Space, value: Any, where: str) -> Iterator[Any]:
    """The leaves' values in canonical order. Raises SpaceError for wrong keys or items."""
    if isinstance(space, Dict):
        names = {name for name, _ in space.spaces}
        if not isinstance(value, Mapping) or set(value) != names:
            raise SpaceError(f"{where}: expected the keys {sorted(names)}, got {value!r:.80}")
        for name, inner in space.spaces:
            yield from leaf_values(inner, value[name], f"{where}.{name}")
    elif isinstance(space, Tuple):
        if not isinstance(value, (list, tuple)) or len(value) != len(space.spaces):
            raise SpaceError(f"{where}: expected {len(space.spaces)} items, got {value!r:.80}")
        for i, inner in enumerate(space.spaces):
            yield from leaf_values(inner, value[i], f"{where}[{i}]")
    else:
        yield value


def _write(leaf: Leaf, array: Array, target: FloatArray) -> None:
    """Write one leaf's column (B, *shape) into its place (B, size)."""
    if isinstance(leaf.space, Discrete):
        choices = array.reshape(-1, 1) - leaf.space.start
        _write_one_hots(leaf, choices, (leaf.space.n,), target)
    elif isinstance(leaf.space, MultiDiscrete):
        _write_one_hots(leaf, array - np.array(leaf.space.start), leaf.space.nvec, target)
    else:
        # a float64 beyond float32 becomes infinite, and the policy refuses to act on it
        with np.errstate(over="ignore"):
            target[...] = array.reshape(target.shape)


def _write_one_hots(leaf: Leaf, choices: Array, sizes: tuple[int, ...], target: FloatArray) -> None:
    """Write one-hot vectors: option i of choice j sets element i of block j.

    `choices` (B, m) count from 0. Raises SpaceError for choices outside the space.
    """
    if choices.dtype.kind not in "iu" or ((choices < 0) | (choices >= np.array(sizes))).any():
        place = f"observation.{leaf.path}" if leaf.path else "observation"
        raise SpaceError(f"{place}: expected integers of {leaf.space}, got others")
    offsets = np.cumsum((0, *sizes[:-1]))
    target[...] = 0.0
    np.put_along_axis(target, choices + offsets, np.float32(1.0), axis=1)


def _wrong_shape(leaf: Leaf, shape: tuple[int, ...]) -> SpaceError:
    place = f"observation.{leaf.path}" if leaf.path else "observation"
    return SpaceError(f"{place}: expected shape {leaf.shape}, got {shape}")
