"""The digest of an import's first rows, which its key stands for, independent of chunks.

A longer file that begins with the same rows continues the same import; any other rows are a
conflict. Rows are compared as they are stored: after redaction, so that no digest of a redacted
value is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from operator import itemgetter
from typing import Any

import numpy as np

from ingest.bulk_import.forms import Form
from ingest.bulk_import.step_columns import json_object
from ingest.columns.arrow_kinds import load_arrow, one_array
from ingest.columns.faults import RowFaults
from ingest.columns.leaf_columns import LeafColumn
from ingest.episodes.redaction import Redaction
from ingest.protocol import messages as wire

BYTES = 16
_FORM = b"\2"
"""What a digest that is kept begins with. Those of release 0.1.0 have no such byte; they leave out
all columns of a part (`obs`, `infos`, `tags`) of which anything is redacted."""


class KeyedRows:
    """The rows of an import under a key, as its policy stores them."""

    def __init__(self, table: Any, form: Form, redaction: Redaction | None) -> None:
        """`table` is a validated pyarrow.Table of that form."""
        self._table, self._hidden = table, form.hidden
        self._stored = table if redaction is None else _redacted(table, form, redaction)

    def digest(self) -> bytes:
        """The digest to keep."""
        return _FORM + digest_rows(self._stored, self._table.num_rows)

    def begins_with(self, rows: int, digest: bytes) -> bool:
        """Whether the kept digest is that of the first rows."""
        found = digest_rows(self._stored, rows)
        if len(digest) != BYTES:
            return digest == _FORM + found
        return digest == found or digest == digest_rows(self._table, rows, self._hidden)


def _redacted(table: Any, form: Form, redaction: Redaction) -> Any:
    """The table with its values as they are stored, in the columns with redacted values."""
    columns = dict(zip(table.column_names, table.columns, strict=True))
    for leaf in (*form.leaves["obs"], *form.leaves["final_obs"]):
        if redaction.rule_of(leaf.leaf) is not None:
            columns[leaf.place] = _leaf(leaf, one_array(columns[leaf.place]), redaction)
    for name, redact in (("infos", redaction.info), ("tags", redaction.tags)):
        if name in form.hidden and name in columns:
            columns[name] = _objects(columns[name], redact)
    return load_arrow().table(columns)


def _leaf(leaf: LeafColumn, column: Any, redaction: Redaction) -> Any:
    """A leaf's values; of dropped ones, and of those that do not fit, only that they are there."""
    arrow, there = load_arrow(), column.is_valid()
    if redaction.rule_of(leaf.leaf) == "drop" or not len(column):
        return there
    faults = RowFaults(len(column))
    values = redaction.column(leaf.leaf, leaf.values(column, faults))
    found = [v.encode() if isinstance(v, str) else v.tobytes() for v in values]
    for row in faults.rows.tolist():
        found[row] = b""
    return arrow.array(found, arrow.large_binary(), mask=~np.asarray(there))


def _objects(column: Any, redact: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Any:
    """Texts of JSON objects without redacted values; "" for other texts."""
    texts = column.to_pylist()
    known = {text: _object(text or "", redact) for text in {*texts}}
    arrow = load_arrow()
    return arrow.array([known[text] for text in texts], arrow.large_string())


def _object(text: str | bytes, redact: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> str:
    value = json_object(text)
    if value is None:
        return ""
    try:
        wire.require_shallow(value)
        return json.dumps(redact(value), sort_keys=True)
    except (ValueError, RecursionError):
        return ""


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
