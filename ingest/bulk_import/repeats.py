"""The digest of an import's first rows, which its key stands for, independent of chunks.

A longer file that begins with the same rows continues the same import; any other rows are a
conflict.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection
from operator import itemgetter
from typing import Any

import numpy as np

BYTES = 16


def digest_rows(table: Any, rows: int, without: Collection[str] = ()) -> bytes:
    """16 bytes that identify the values of a checked table's first rows, in any column order.

    `without` are first parts of column names (`obs` of `obs.user`) that are left out.
    """
    whole = hashlib.blake2b(str(rows).encode(), digest_size=BYTES)
    columns = zip(table.column_names, table.columns, strict=True)
    for name, values in sorted(columns, key=itemgetter(0)):
        if name.partition(".")[0] in without:
            continue
        streams: defaultdict[str, Any] = defaultdict(hashlib.blake2b)
        column = values.slice(0, rows)
        for chunk in column.chunks:
            if column.null_count:
                streams["nulls"].update(np.asarray(chunk.is_null()).tobytes())
            _update(streams, "values", chunk)
        whole.update(f"\n{name}".encode())
        for part in sorted(streams):
            whole.update(part.encode() + streams[part].digest())
    return whole.digest()


def _is(array: Any, kind: str | tuple[str, ...]) -> bool:
    return str(array.type).startswith(kind)


def _update(streams: defaultdict[str, Any], part: str, array: Any) -> None:
    """Add a chunk to a column's digests: one of its values, and one per level of list lengths."""
    if _is(array, ("list", "large_list")):
        lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        streams[f"{part} lengths"].update(lengths.astype(np.int64).tobytes())
        _update(streams, f"{part} of", array.flatten())
    elif _is(array, "fixed_size_list"):
        _update(streams, f"{part} of", array.flatten())
    elif _is(array, ("string", "large_string", "binary", "large_binary")):
        texts = array.fill_null("" if "string" in str(array.type) else b"")
        wide = np.int64 if _is(array, "large") else np.int32
        _, ends, data = texts.buffers()
        if len(texts):
            count = texts.offset + len(texts) + 1  # bytes may follow the last offset
            offsets = np.frombuffer(ends, wide, count=count)[texts.offset :]
            streams[f"{part} lengths"].update(np.diff(offsets).astype(np.int64).tobytes())
            streams[part].update(memoryview(data or b"")[offsets[0] : offsets[-1]])
    elif not _is(array, "null"):  # the digest `nulls` covers null columns
        numbers = array.cast("int8") if _is(array, "bool") else array
        filled = numbers.fill_null(0) if numbers.null_count else numbers
        streams[part].update(filled.to_numpy(zero_copy_only=False).tobytes())
