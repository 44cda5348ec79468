"""Tables in memory <-> tables in a file: other names, and the conversion of format 1.

    names = stored_names(["t", "obs.age"], metadata.columns)
    table = in_memory(file.read(columns=names), metadata)

Format 1, which release 0.1.0 wrote, has dotted names in the file, lists of a fixed size, and bytes
for lists in a Dict or a Tuple, for final observations and for `action_dist_inputs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import pyarrow as pa

from storage.shards.arrow_arrays import items_array, items_of
from storage.shards.names import ShardError
from storage.shards.schema import (
    FORMAT_VERSION,
    ColumnSpec,
    ShardMetadata,
    columns_for,
    stored_names,
    stored_schema,
)


def in_file(table: pa.Table, specs: Mapping[str, ColumnSpec]) -> pa.Table:
    """A table in memory with the names of the file."""
    return table.rename_columns(stored_names(table.column_names, specs))


def memory_names(stored: Iterable[str], specs: Mapping[str, ColumnSpec]) -> list[str]:
    """The names in memory of columns in the file."""
    known = {spec.stored or name: name for name, spec in specs.items()}
    return [known.get(name, name) for name in stored]


def in_memory(table: pa.Table, metadata: ShardMetadata) -> pa.Table:
    """A table of a file in memory: other names, and the current format, in its footer too.

    Raises ShardError for bytes that do not fit, and ValueError for spaces that cannot be read.
    """
    footer = table.schema.metadata
    table = table.rename_columns(memory_names(table.column_names, metadata.columns))
    if metadata.format_version == FORMAT_VERSION:
        return table.replace_schema_metadata(footer)  # which renaming loses
    for name in (name for name in metadata.specs if name in table.column_names):
        column = _from_first(table.column(name), metadata.columns[name], metadata.specs[name])
        at, field = table.column_names.index(name), table.schema.field(name)
        table = table.set_column(at, field.with_type(column.type), column)
    now = replace(metadata, format_version=FORMAT_VERSION, columns=metadata.specs)
    return table.replace_schema_metadata(now.to_footer())


def stored_form(
    specs: Mapping[str, ColumnSpec], format_version: int
) -> tuple[dict[str, ColumnSpec], pa.Schema]:
    """(columns in the footer, schema) of files of a format. `specs`: the columns in memory."""
    if format_version == FORMAT_VERSION:
        return dict(specs), stored_schema(columns_for(specs), specs)
    first = {name: _first(spec) for name, spec in specs.items()}
    schema = columns_for(first)
    for name, spec in first.items():
        if spec.encoding == "list":
            at = schema.get_field_index(name)
            kind = pa.list_(schema.field(at).type.value_field, math.prod(spec.shape))
            schema = schema.set(at, schema.field(at).with_type(kind))
    return first, schema


def _first(spec: ColumnSpec) -> ColumnSpec:
    """How format 1 stores a column."""
    is_list, wide = spec.encoding == "list", np.dtype(spec.dtype).itemsize > 1
    was_list = wide and len(spec.shape) <= 2 and "." not in spec.name
    is_bytes = spec.nullable or spec.dtype == "float16" or (is_list and not was_list)
    return replace(spec, encoding="binary" if is_bytes else spec.encoding, stored="")


def _from_first(column: pa.ChunkedArray, old: ColumnSpec, new: ColumnSpec) -> pa.ChunkedArray:
    if column.type == new.arrow_type:
        return column
    return pa.chunked_array([_converted(c, old, new) for c in column.chunks], new.arrow_type)


def _converted(chunk: pa.Array, old: ColumnSpec, new: ColumnSpec) -> pa.Array:
    if new.encoding == "text":
        return chunk.cast(pa.string())
    offsets, values = items_of(chunk, old)
    stored = values.astype(new.item, copy=False)
    valid = np.asarray(chunk.is_valid().to_numpy(zero_copy_only=False), np.bool_)
    if new.encoding == "list":
        return items_array(new.arrow_type, offsets, stored, valid if chunk.null_count else None)
    if not np.array_equal(np.diff(offsets), valid):
        raise ShardError(f"{new.name}: expected one {new.dtype} in each row, got another number")
    spread = np.zeros(len(chunk), new.item)
    spread[valid] = stored
    return pa.array(spread, mask=~valid if chunk.null_count else None)
