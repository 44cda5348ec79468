"""Arrow's types by what they hold, and the nulls and lengths of columns."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Mask: TypeAlias = NDArray[np.bool_]


@cache
def load_arrow() -> Any:
    """Import pyarrow and its `compute`, at the first bulk request rather than at the start."""
    importlib.import_module("pyarrow.compute")
    return importlib.import_module("pyarrow")


def is_list(kind: Any) -> bool:
    """Whether a type is a list of variable or fixed size."""
    types = load_arrow().types
    tests = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(test(kind) for test in tests)


def is_text(kind: Any) -> bool:
    """Whether a type holds strings."""
    types = load_arrow().types
    return bool(types.is_string(kind) or types.is_large_string(kind))


def is_bytes(kind: Any) -> bool:
    """Whether a type holds bytes."""
    types = load_arrow().types
    tests = (types.is_binary, types.is_large_binary, types.is_binary_view)
    return any(test(kind) for test in (*tests, types.is_fixed_size_binary))


def one_array(column: Any) -> Any:
    """A column as one contiguous pyarrow.Array."""
    if not isinstance(column, load_arrow().ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def to_numpy(column: Any) -> Array:
    found: Array = column.to_numpy(zero_copy_only=False)
    return found


def nulls(column: Any) -> Mask:
    """Which cells are null, (rows,)."""
    if not column.null_count:
        return np.zeros(len(column), np.bool_)
    return to_numpy(column.is_null())


def flattened(column: Any) -> tuple[Array, Any]:
    """(number of values in each row's list int64, the values), for nested lists too.

    A column of single values has one value per row.
    """
    if not is_list(column.type):
        return np.ones(len(column), np.int64), column
    compute = load_arrow().compute
    lengths = to_numpy(compute.fill_null(compute.list_value_length(column), 0)).astype(np.int64)
    inner = compute.list_flatten(column)
    if not is_list(inner.type):
        return lengths, inner
    counts, values = flattened(inner)
    ends, at = np.append(0, np.cumsum(counts)), np.append(0, np.cumsum(lengths))
    return ends[at[1:]] - ends[at[:-1]], values
