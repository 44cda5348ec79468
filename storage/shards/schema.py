"""The columns of a shard: spaces <-> Arrow fields, and the footer that describes them.

How a leaf of a space is stored (`ColumnSpec.encoding`):

* `scalar`  a number: a plain column of its dtype
* `list`    up to 1,024 numbers, flattened in C order: a list, without nulls inside
* `ragged`  a list without the rows at its end that are zeros (`Box.ragged`)
* `binary`  larger arrays, and those of uint8 and int8: little-endian bytes in C order
* `text`    a string

float16, which few tools read, is stored as float32. Leaves of a Dict or a Tuple are columns of
their own: `obs.age` in memory is `obs__age` in the file, because a dot in a name breaks the filters
and lists of some tools. Dtype and shape are in the footer: no list has a fixed size in the file.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from storage.experience.range_set import RangeSet
from storage.experience.step_columns import ADDED_COLUMNS, STEP_COLUMNS
from storage.shards.names import ShardDamaged
from storage.spaces.descriptors import (
    MultiBinary,
    Space,
    SpaceError,
    schema_id,
    spaces_from_canonical_json,
)
from storage.spaces.leaves import Leaf, leaves

FORMAT_VERSION = 2
PREFIX = "headrace."
MAX_LIST = 1024

Encoding: TypeAlias = Literal["scalar", "list", "ragged", "binary", "text"]


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """How the values of one column of a space are stored: rows of `dtype` and `shape`.

    `name` is the column's name in memory, `stored` in the file. `dtype` is numpy's name, or "str".
    A size of -1 in `shape` may vary between rows.
    """

    name: str
    encoding: Encoding
    dtype: str
    shape: tuple[int, ...]
    nullable: bool = False
    stored: str = ""

    @property
    def item(self) -> np.dtype[Any]:
        """The dtype of the stored numbers."""
        return np.dtype("float32" if self.dtype == "float16" else self.dtype)

    @property
    def arrow_type(self) -> pa.DataType:
        if self.encoding == "binary":
            return pa.binary()
        if self.encoding == "text":
            return pa.string()
        item = pa.from_numpy_dtype(self.item)
        if self.encoding == "scalar":
            return item
        return pa.list_(pa.field("element", item, nullable=False))


DIST_INPUTS = ColumnSpec(
    "action_dist_inputs", "list", "float32", (-1,), nullable=True, stored="action_dist_inputs"
)


def leaf_specs(space: Space, prefix: str, *, nullable: bool = False) -> tuple[ColumnSpec, ...]:
    """The columns `prefix[.path]` of a space, in the canonical order of its leaves."""
    found: dict[str, ColumnSpec] = {}
    for leaf in leaves(space):
        name = leaf.column(prefix)
        stored = name.replace(".", "__")
        while stored.lower() in found:  # `a.b` next to `a__b`; SQL does not know case
            stored += "_"
        dtype, shape = ("str", ()) if leaf.is_text else (leaf.dtype.name, leaf.shape)
        found[stored.lower()] = ColumnSpec(name, _encoding(leaf), dtype, shape, nullable, stored)
    return tuple(found.values())


def final_specs(observation: Space) -> tuple[ColumnSpec, ...]:
    """The nullable columns `final_obs[.path]`, in the canonical order of the leaves."""
    return leaf_specs(observation, "final_obs", nullable=True)


def _encoding(leaf: Leaf) -> Encoding:
    if leaf.is_text:
        return "text"
    if not leaf.shape:
        return "scalar"
    if leaf.is_ragged:
        return "ragged"
    # lists of single bytes take several times as long to read, those of two values hardly
    numbers = leaf.dtype.itemsize > 1 or leaf.dtype.kind == "b" or type(leaf.space) is MultiBinary
    return "list" if numbers and 0 < math.prod(leaf.shape) <= MAX_LIST else "binary"


def columns_for(specs: Mapping[str, ColumnSpec]) -> pa.Schema:
    """The Arrow schema of shards with these columns of spaces, in order, without metadata."""
    text, integer = pa.string(), pa.int64()
    numbers = {
        c.name: pa.field(
            c.name, text if c.words else pa.from_numpy_dtype(np.dtype(c.dtype)), nullable=c.nullable
        )
        for c in STEP_COLUMNS
    }

    def always(*pairs: tuple[str, pa.DataType]) -> list[pa.Field]:
        return [pa.field(name, kind, nullable=False) for name, kind in pairs]

    def of(prefix: str) -> list[pa.Field]:
        own = [one for one in specs.values() if one.name.partition(".")[0] == prefix]
        return [pa.field(one.name, one.arrow_type, nullable=one.nullable) for one in own]

    return pa.schema(
        [
            *always(("eps_id", text), ("part", integer), ("t", integer), ("agent_id", text)),
            *of("obs"),
            *of("actions"),
            numbers["rewards"],
            *always(("terminateds", pa.bool_()), ("truncateds", pa.bool_())),
            pa.field("ended", text),
            *of("final_obs"),
            pa.field("infos", text),
            numbers["action_logp"],
            *of("action_dist_inputs"),
            *always(("policy_id", text)),
            *(numbers[name] for name in ("policy_version", "source", "pass_prob")),
            *(numbers[name] for name in ("ts", "received_ts")),
            *always(("training_enabled", pa.bool_())),
            pa.field("continues", text),
            *always(("tags", text), ("ordinal", integer), ("episode_ordinal", integer)),
            numbers["env_t"],
            pa.field("agents", pa.int32()),
            *(numbers[column.name] for column in ADDED_COLUMNS),
        ]
    )


def with_defaults(table: pa.Table, names: Iterable[str]) -> pa.Table:
    """A shard's table with the added columns of these names that the shard lacks."""
    for column in ADDED_COLUMNS:
        if column.name in names and column.name not in table.column_names:
            values = np.full(len(table), column.default, column.dtype)
            array = pa.nulls(len(values), pa.from_numpy_dtype(values.dtype))
            table = table.append_column(column.name, array if column.nullable else pa.array(values))
    return table


CODED = ("eps_id", "agent_id", "ended", "policy_id", "source", "continues", "tags")
"""Text columns with few distinct values."""


def coded_schema(schema: pa.Schema) -> pa.Schema:
    """A shard's schema with dictionaries for the text columns that repeat, used for writing.

    The file stores plain texts. Writing these directly would hash every row's text again.
    """
    for name in CODED:
        at = schema.get_field_index(name)
        kind = pa.dictionary(pa.int32(), schema.field(at).type)
        schema = schema.set(at, schema.field(at).with_type(kind))
    return schema


def stored_names(names: Iterable[str], specs: Mapping[str, ColumnSpec]) -> list[str]:
    """The names in the file of columns in memory."""
    return [(specs[name].stored or name) if name in specs else name for name in names]


def stored_schema(schema: pa.Schema, specs: Mapping[str, ColumnSpec]) -> pa.Schema:
    """The schema in the file of a table in memory."""
    names = stored_names(schema.names, specs)
    fields = [field.with_name(name) for field, name in zip(schema, names, strict=True)]
    return pa.schema(fields, schema.metadata)


def column_specs(observation: Space, action: Space) -> dict[str, ColumnSpec]:
    """Column name -> spec, for the columns whose dtype and shape are in the footer."""
    specs = [
        *leaf_specs(observation, "obs"),
        *leaf_specs(action, "actions"),
        *final_specs(observation),
        DIST_INPUTS,
    ]
    return {spec.name: spec for spec in specs}


def schema_hash(schema: pa.Schema) -> str:
    """SHA-256 in hex of names, types and nullability: equal for files with equal columns."""
    described = [[f.name, str(f.type), f.nullable] for f in schema]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


# --- the footer ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """The content of a shard's footer.

    `ranges` are the ordinals in the shard, as inclusive (first, last) in ascending order.
    Compaction and erasure leave gaps. `columns` are those in the file, whose format may be an
    earlier one; `specs` those of a table in memory.
    """

    format_version: int
    spaces: str  # canonical JSON
    schema_id: str
    stream: str
    ranges: tuple[tuple[int, int], ...]
    rows: int
    parts: int
    columns: Mapping[str, ColumnSpec]
    schema_hash: str
    digest: str = "sha256"  # the algorithm

    @property
    def specs(self) -> Mapping[str, ColumnSpec]:
        """Column name -> spec, as the current format has them. Raises ValueError for bad spaces."""
        return (
            self.columns if self.format_version == FORMAT_VERSION else _known(self.spaces).columns
        )

    @property
    def first(self) -> int:
        return self.ranges[0][0]

    @property
    def last(self) -> int:
        return self.ranges[-1][1]

    def space_pair(self) -> tuple[Space, Space]:
        """(observation, action)."""
        return _known(self.spaces).spaces

    def to_footer(self) -> dict[bytes, bytes]:
        """The key-value pairs of the Parquet footer."""
        values = {
            "format_version": str(self.format_version),
            "spaces": self.spaces,
            "schema_id": self.schema_id,
            "stream": self.stream,
            "ranges": json.dumps(self.ranges, separators=(",", ":")),
            "rows": str(self.rows),
            "parts": str(self.parts),
            "columns": f"[{', '.join(map(_spec_json, self.columns.values()))}]",
            "schema_hash": self.schema_hash,
            "digest": self.digest,
        }
        return {(PREFIX + key).encode(): value.encode() for key, value in values.items()}

    @classmethod
    def from_footer(cls, footer: Mapping[bytes, bytes] | None, where: str) -> ShardMetadata:
        """Parse a footer's key-value pairs; unknown keys are ignored.

        `where`: the place, for messages. Raises ShardDamaged if it is not the footer of a shard, or
        has a newer format version.
        """
        version = (footer or {}).get(f"{PREFIX}format_version".encode())
        if footer is None or version is None:
            raise ShardDamaged(f"{where}: expected the footer of a shard, found none")
        algorithm = footer.get(f"{PREFIX}digest".encode(), b"sha256")
        for what, got, known in (
            ("format version", version, (b"1", b"2")),
            ("digest", algorithm, (b"sha256", b"blake3")),
        ):
            if got not in known:
                raise ShardDamaged(
                    f"{where}: expected {what} {b' or '.join(known).decode()}, got {got!r:.40}; a "
                    "newer release may read it"
                )
        try:
            return cls._from_texts(
                {
                    key.decode().removeprefix(PREFIX): value.decode()
                    for key, value in footer.items()
                    if key.startswith(PREFIX.encode())
                }
            )
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            raise ShardDamaged(f"{where}: the footer cannot be read: {error!r:.200}") from error

    @classmethod
    def _from_texts(cls, texts: Mapping[str, str]) -> ShardMetadata:
        ranges = tuple(RangeSet.from_json(json.loads(texts["ranges"])).ranges())
        if not ranges:
            raise ValueError("no ordinals")
        return cls(
            int(texts["format_version"]),
            texts["spaces"],
            texts["schema_id"],
            texts["stream"],
            ranges,
            int(texts["rows"]),
            int(texts["parts"]),
            specs_from_json(texts["columns"]),
            texts["schema_hash"],
            texts.get("digest", "sha256"),
        )


@lru_cache(maxsize=64)  # shards of one stream have the same
def specs_from_json(text: str | bytes) -> Mapping[str, ColumnSpec]:
    """Column name -> spec, from the footer's `headrace.columns`."""
    specs: list[dict[str, Any]] = json.loads(text)
    return MappingProxyType(
        {s["name"]: ColumnSpec(**{**s, "shape": tuple(s["shape"])}) for s in specs}
    )


def metadata_for(
    stream: str, canonical_json: str, ranges: tuple[tuple[int, int], ...], *, rows: int, parts: int
) -> tuple[ShardMetadata, pa.Schema]:
    """The footer of a shard to be written, and the schema of its rows in memory.

    Raises SpaceError for invalid spaces.
    """
    try:
        known = _known(canonical_json)
    except (KeyError, TypeError, ValueError) as error:
        raise SpaceError(f"spaces: expected canonical JSON, got {canonical_json!r:.200}") from error
    metadata = ShardMetadata(
        FORMAT_VERSION,
        canonical_json,
        known.schema_id,
        stream,
        ranges,
        rows,
        parts,
        known.columns,
        known.hash,
        "blake3",
    )
    return metadata, known.schema.with_metadata(metadata.to_footer())


@dataclass(frozen=True, slots=True)
class _Known:
    """What follows from a pair of spaces."""

    spaces: tuple[Space, Space]
    schema_id: str
    schema: pa.Schema
    columns: Mapping[str, ColumnSpec]
    hash: str


@lru_cache(maxsize=64)  # else computed anew for all parts that are read before their shard
def _known(canonical_json: str) -> _Known:
    observation, action = spaces_from_canonical_json(canonical_json)
    columns = MappingProxyType(column_specs(observation, action))
    schema = columns_for(columns)
    return _Known(
        (observation, action),
        schema_id(observation, action),
        schema,
        columns,
        schema_hash(stored_schema(schema, columns)),
    )


@lru_cache(maxsize=1024)
def _spec_json(spec: ColumnSpec) -> str:
    return json.dumps(asdict(spec))
