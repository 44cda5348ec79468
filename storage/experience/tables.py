"""Sample batches as tables of other libraries: Arrow and pandas.

Pure. The functions load pyarrow and pandas when they are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def arrow_table(columns: Mapping[str, Array]) -> Any:
    """Columns (N, *shape) as a pyarrow.Table of N rows, by `SampleBatch.to_arrow`'s rules."""
    import pyarrow as pa  # noqa: PLC0415  an optional extra

    return pa.table({name: _arrow_array(pa, column) for name, column in columns.items()})


def _arrow_array(pa: Any, column: Array) -> Any:
    if column.dtype.kind not in "biuf":
        texts = pa.array(column.tolist())
        return texts.cast(pa.string()) if texts.null_count == len(texts) else texts
    numbers = np.ascontiguousarray(column, column.dtype.newbyteorder("="))
    if column.ndim == 1:
        return pa.array(numbers)
    flat = pa.array(numbers.reshape(-1))
    if column.ndim == 2:
        return _lists(pa, flat, pa.list_(flat.type, column.shape[1]), len(column))
    tensors = pa.fixed_shape_tensor(flat.type, column.shape[1:])
    return pa.ExtensionArray.from_storage(
        tensors, _lists(pa, flat, tensors.storage_type, len(column))
    )


def _lists(pa: Any, flat: Any, kind: Any, rows: int) -> Any:
    """`rows` lists of equal length over their values, which may be 0."""
    return pa.Array.from_buffers(kind, rows, [None], children=[flat])


def pandas_frame(columns: Mapping[str, Array]) -> Any:
    """Columns (N, *shape) as a pandas.DataFrame of N rows, by `SampleBatch.to_pandas`'s rules."""
    import pandas as pd  # noqa: PLC0415  an optional extra

    frame = {
        name: pd.Series(column if column.ndim == 1 else list(column), dtype=_frame_dtype(column))
        for name, column in columns.items()
    }
    return pd.DataFrame(frame)


def _frame_dtype(column: Array) -> Any:
    return column.dtype if column.ndim == 1 else object
