"""The second reader, seen from inside: read a shard with fastparquet, send its values.

This module uses neither Arrow nor our decoding. It takes dtype and shape of a column of a space
from the footer, as any other program would.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import IO, Any

import fastparquet
import msgspec
import numpy as np
import pandas as pd

from storage.shards.writer_process import read_message, write_message
from storage.verify.column_values import ColumnValues, of_items, of_numbers
from storage.verify.second_reader import ColumnReply


def read_shards() -> None:
    """Serve requests from stdin until it ends: a request is a shard, the answer its columns.

    SIGINT is ignored, because Ctrl-C reaches all processes of the terminal: the parent decides when
    this process ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not be mixed with the answers
    with replies:
        while (frames := read_message(sys.stdin.buffer)) is not None:
            _answer(frames[0], replies)


def _answer(content: bytes, replies: IO[bytes]) -> None:
    try:
        for reply, values in _read(content):
            _send(replies, reply, [] if values is None else values.frames())
    except BrokenPipeError:
        raise
    except Exception as error:  # any error that fastparquet raises for an unreadable shard
        _send(replies, ColumnReply(error=f"{type(error).__name__}: {error}"), [])


def _send(replies: IO[bytes], reply: ColumnReply, frames: list[bytes]) -> None:
    write_message(replies, [[frame] for frame in (msgspec.msgpack.encode(reply), *frames)])


def _read(content: bytes) -> Iterator[tuple[ColumnReply, ColumnValues | None]]:
    """The columns of each row group in turn, and finally the end."""
    file = fastparquet.ParquetFile(io.BytesIO(content))
    columns = json.loads(file.key_value_metadata["headrace.columns"])
    specs = {spec.get("stored", spec["name"]): spec for spec in columns}
    first = 0
    for frame in file.iter_row_groups():
        for name in frame.columns:
            spec = specs.get(name)
            values = _values(frame[name], spec)
            shown = name if spec is None else spec["name"]
            yield ColumnReply(column=shown, first=first, dtype=values.dtype), values
        first += len(frame)
    yield ColumnReply(end=True, first=first), None


def _values(column: pd.Series[Any], spec: Mapping[str, Any] | None) -> ColumnValues:
    if spec is not None and spec["encoding"] == "ragged":
        size = int(np.prod(spec["shape"]))
        column = column.map(lambda row: [*row, *[0.0] * (size - len(row))], na_action="ignore")
    if spec is not None and spec["encoding"] in ("list", "ragged"):
        there = column.notna().to_numpy()
        rows = np.array(column[there].tolist())
        spread = np.zeros((len(column), *rows.shape[1:]), rows.dtype)
        spread[there] = rows
        return of_numbers(_exact(spread, spec["dtype"]), there)
    if spec is not None and spec["encoding"] == "binary":
        return of_items(spec["dtype"], _items(column))
    if column.dtype == object or isinstance(column.dtype, (pd.StringDtype, pd.CategoricalDtype)):
        return of_items("str", _items(column))
    if pd.api.types.is_extension_array_dtype(column.dtype):  # integers or booleans with nulls
        kind = column.dtype.type
        numbers = column.fillna(kind(0)).array.to_numpy(np.dtype(kind))
        return of_numbers(numbers, column.notna().to_numpy())
    numbers = column.to_numpy()
    exact = numbers if spec is None else _exact(numbers, spec["dtype"])
    return of_numbers(exact, nan_is_null=True)


def _exact(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """The numbers in the footer's dtype if the conversion does not change them."""
    cast = values.astype(dtype)
    return cast if np.array_equal(cast, values, equal_nan=values.dtype.kind == "f") else values


def _items(column: pd.Series[Any]) -> list[bytes | None]:
    there = column.notna()
    return [
        None if not known else item.encode() if isinstance(item, str) else bytes(item)
        for item, known in zip(column, there, strict=True)
    ]
