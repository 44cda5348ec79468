"""Convert columns to the values of a space, as the columns of the bulk route."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingest.columns.arrow_kinds import Array, flattened, nulls, to_numpy
from ingest.columns.leaf_columns import LeafRule
from ingest.importing.categories import Categories, Value, category, spelled_as
from ingest.importing.cells import Cells, to_numbers
from ingest.importing.options import ColumnOption
from ingest.protocol.errors import ImportFailed
from storage.spaces.descriptors import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
)
from storage.spaces.leaves import Leaf, leaves, one_of_names
from storage.wording import counted

Read: TypeAlias = Callable[[Cells], dict[str, Any]]
"""A function to column -> pyarrow.Array over all rows; values of faulty rows are arbitrary."""


def value_reader(
    what: str, prefix: str, space: Space, columns: Sequence[ColumnOption], found: Categories
) -> Read:
    """A function that converts columns to one value of `space` per row. Raises ImportFailed.

    The numbers of all columns are concatenated, those of a list in its order. A Dict takes one
    column for each of its names, a Tuple one for each of its parts, a Text one column. The names of
    the route's columns begin with `prefix`.
    """
    names = ", ".join(column.name for column in columns)
    if isinstance(space, (Dict, Tuple)):
        return _parts_reader(what, prefix, space, columns, found)
    if isinstance(space, Discrete) and space.names:
        if len(columns) != 1:
            raise ImportFailed(f"{what}: expected one column of names, got {names}")
        return _name_reader(prefix, space, columns[0].name)
    if isinstance(space, Text):
        if len(columns) != 1 or columns[0].categorical:
            raise ImportFailed(f"{what}: expected one column for a text space, got {names}")
        return _text_reader(what, prefix, space, columns[0].name)
    if not isinstance(space, (Box, Discrete, MultiDiscrete, MultiBinary)):
        raise ImportFailed(
            f"{what}: the policy's space is a {type(space).__name__}, which columns cannot fill"
        )
    (leaf,) = leaves(space)
    size = math.prod(leaf.shape)
    if len(columns) > max(size, 1):
        raise ImportFailed(
            f"{what}: the policy expects {counted(size, 'number')}, got the columns {names}"
        )
    _require_room(what, space, columns, found)

    rule = LeafRule(what, leaf)

    def read(cells: Cells) -> dict[str, Any]:
        matrix = _matrix(what, leaf, columns, found, cells)
        values = rule.fitted(matrix.reshape(len(matrix), *leaf.shape), cells.faults)
        return {prefix: lists_of(values.reshape(matrix.shape)) if leaf.shape else pa.array(values)}

    return read


def _parts_reader(
    what: str, prefix: str, space: Dict | Tuple, columns: Sequence[ColumnOption], found: Categories
) -> Read:
    names = [column.part for column in columns]
    wanted = [name for name, _ in space.spaces] if isinstance(space, Dict) else None
    if wanted is not None and sorted(names) != sorted(wanted):
        raise ImportFailed(f"{what}: the policy expects the columns {wanted}, got {names}")
    if wanted is None and len(names) != len(space.spaces):
        count = len(space.spaces)
        raise ImportFailed(f"{what}: the policy expects {counted(count, 'column')}, got {names}")
    readers = [
        value_reader(f"{what}.{path}", f"{prefix}.{path}", inner, [column], found)
        for path, inner, column in _parts(space, columns)
    ]

    def read(cells: Cells) -> dict[str, Any]:
        return {name: made for reader in readers for name, made in reader(cells).items()}

    return read


def _parts(
    space: Dict | Tuple, columns: Sequence[ColumnOption]
) -> Iterator[tuple[str, Space, ColumnOption]]:
    """(path, space, column) of each part with a column: by name, for a Tuple by position."""
    if isinstance(space, Tuple):
        for at, (inner, column) in enumerate(zip(space.spaces, columns, strict=False)):
            yield str(at), inner, column
        return
    inner_of = dict(space.spaces)
    for column in columns:
        if column.part in inner_of:
            yield column.part, inner_of[column.part], column


def _require_room(
    what: str, space: Any, columns: Sequence[ColumnOption], found: Categories
) -> None:
    """Check that leaves have enough codes for categories, if each column's place is known."""
    if isinstance(space, Discrete):
        sizes: Sequence[int] = [space.n + space.start]
    elif isinstance(space, MultiDiscrete):
        sizes = [n + start for n, start in zip(space.nvec, space.start, strict=True)]
    else:
        return
    if len(sizes) != len(columns):
        return
    for column, size in zip(columns, sizes, strict=True):
        if column.categorical and len(found[column.part]) > size:
            raise ImportFailed(
                f"{what}: column {column.name} has {len(found[column.part])} categories, the "
                f"policy expects at most {size}"
            )


# --- names -----------------------------------------------------------------------------------


def named_spaces(
    spaces: tuple[Space, Space],
    observations: Sequence[ColumnOption],
    actions: Sequence[ColumnOption],
) -> Iterator[tuple[ColumnOption, Discrete | None]]:
    """Each column, and the space whose names its values are, None if it has none."""
    for space, columns in zip(spaces, (observations, actions), strict=True):
        found: dict[str, Space] = {}
        if isinstance(space, (Dict, Tuple)):
            found = {column.name: inner for _, inner, column in _parts(space, columns)}
        for column in columns:
            inner = found.get(column.name, space)
            yield column, inner if isinstance(inner, Discrete) and inner.names else None


def _name_reader(prefix: str, space: Discrete, name: str) -> Read:
    """Read names as the policy declares them, independent of a file of categories."""
    rule = LeafRule(f"column {name}", Leaf("", space))

    def read(cells: Cells) -> dict[str, Any]:
        texts = spelled_as(space.names, cells.texts(name))
        absent = cells.missing(name, texts, one_of_names(space.names), has_value=False)
        listed = to_numpy(pc.is_in(texts, pa.array(space.names)))
        if space.other is None:
            _name_codes(cells, name, space.names, texts, ~listed & ~absent)
        else:
            cells.faults.note_other(name, ~listed & ~absent)
        codes = rule.codes(space, texts, cells.faults)
        return {prefix: pa.array(space.names).take(codes) if space.has_numbers else pa.array(codes)}

    return read


def _name_codes(cells: Cells, name: str, names: Sequence[str], texts: Any, unknown: Array) -> None:
    """Mark rows whose text is no name but looks like a name's code.

    A number is never read as a code: CSV has no types, and names may be numbers.
    """
    if unknown.any() and not any(map(str.isdecimal, names)):
        are_codes = to_numpy(pc.is_in(texts, pa.array([str(code) for code in range(len(names))])))
        expected = f"expected {one_of_names(names)} (not their codes: map these to names first)"
        cells.fault(name, unknown & are_codes, expected, texts)


# --- numbers ---------------------------------------------------------------------------------


def codes(cells: Cells, name: str, listed: Sequence[Value]) -> Array:
    """The codes of a column's categories, int64 (rows,)."""
    names = [category(value) for value in listed]
    texts = spelled_as(names, cells.texts(name))
    cells.missing(name, texts, one_of_names(names), has_value=False)
    places = pc.index_in(texts, pa.array(names, pa.string()))
    unknown = nulls(places) & ~nulls(texts)
    _name_codes(cells, name, names, texts, unknown)
    cells.fault(name, unknown, f"expected {one_of_names(names)}", texts)
    return to_numpy(places.fill_null(0)).astype(np.int64)


def _matrix(
    what: str, leaf: Leaf, columns: Sequence[ColumnOption], found: Categories, cells: Cells
) -> Array:
    """The numbers of all columns, concatenated for each row: (rows, size)."""
    size, whole = math.prod(leaf.shape), leaf.dtype.kind in "iub"
    parts: list[tuple[Array, Array]] = []  # how many numbers each row has, the numbers
    for column in columns:
        if column.categorical:
            made = codes(cells, column.name, found[column.part])
            parts.append((np.ones(cells.rows, np.int64), made))
            continue
        raw = cells.lists(column.name)
        cells.missing(column.name, raw, "numbers")
        counts, flat = flattened(raw)
        values, bad = to_numbers(flat, whole=whole, booleans=True)
        if bad.any() or (flat.null_count and flat is not raw):
            odd = bad | nulls(flat)
            rows = odd if flat is raw else _rows_with(odd, counts)
            kind = "whole numbers" if whole else "a number" if flat is raw else "numbers"
            given = cells.raw(column.name)
            cells.fault(column.name, rows & ~nulls(raw), f"expected {kind}", given)
        parts.append((counts, values))
    return _side_by_side(what, parts, size, cells)


def _rows_with(mask: Array, counts: Array) -> Array:
    """The rows with a marked value; row i has counts[i] values."""
    rows = np.zeros(len(counts), bool)
    rows[np.repeat(np.arange(len(counts)), counts)[mask]] = True
    return rows


def _side_by_side(
    what: str, parts: Sequence[tuple[Array, Array]], size: int, cells: Cells
) -> Array:
    total = np.zeros(cells.rows, np.int64)
    for counts, _ in parts:
        total += counts
    expected = f"expected {counted(size, 'number')}"
    absent = cells.faults.bad | cells.faults.dropped
    fine = total == size
    cells.faults.add(~fine, what, expected, total.item)
    usual = parts[0][0][:0]
    if fine.any():  # lists must be as long as in the first valid row
        usual = np.array([counts[int(fine.argmax())] for counts, _ in parts])
        for width, (counts, _) in zip(usual, parts, strict=True):
            cells.faults.add(fine & (counts != width), what, expected, counts.item)
            fine &= counts == width
    matrix = np.zeros((cells.rows, size), parts[0][1].dtype)
    at = 0
    for width, (counts, values) in zip(usual, parts, strict=False):
        chosen = values if fine.all() else values[np.repeat(fine, counts)]
        matrix[fine, at : at + width] = chosen.reshape(-1, width)
        at += int(width)
    matrix[absent] = 0
    return matrix


def lists_of(matrix: Array) -> Any:
    """A pyarrow.Array with a list per row of a matrix."""
    flat = pa.array(np.ascontiguousarray(matrix).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, matrix.shape[1])


# --- texts -----------------------------------------------------------------------------------


def _text_reader(what: str, prefix: str, space: Text, name: str) -> Read:
    rule = LeafRule(what, Leaf("", space))

    def read(cells: Cells) -> dict[str, Any]:
        texts = cells.texts(name)
        cells.missing(name, texts, "a text")
        return {prefix: pa.array(rule.texts(texts.fill_null(""), cells.faults), pa.string())}

    return read
