"""Shards with a correct digest and wrong content, as from a broken writer or an edit by hand."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.shards.digests import digest_of
from storage.shards.shard import read_shard

Change = Callable[[pa.Table], pa.Table]


def rewrite(path: Path, change: Change, **options: Any) -> Path:
    """Replace a shard by a changed table, under the name that matches its bytes."""
    table = change(read_shard(path))
    sink = io.BytesIO()
    pq.write_table(table, sink, **{"use_dictionary": False, **options})
    digest = digest_of(sink.getvalue())[:16]
    path.unlink()
    written = path.with_name(f"{path.name[:26]}{digest}.parquet")
    written.write_bytes(sink.getvalue())
    return written


def put(name: str, values: Any, *, nullable: bool | None = None) -> Change:
    """Other values in a column, of its type if they are not an Arrow array."""

    def change(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(name)
        field = table.schema.field(at)
        array = values if isinstance(values, pa.Array) else pa.array(values, field.type)
        kind = field.with_type(array.type)
        if nullable is not None:
            kind = kind.with_nullable(nullable)
        return table.set_column(at, kind, array)

    return change


def at_row(name: str, row: int, value: Any) -> Change:
    """One other value."""

    def change(table: pa.Table) -> pa.Table:
        values = table.column(name).to_pylist()
        values[row] = value
        return put(name, values, nullable=True if value is None else None)(table)

    return change


def footer(**texts: str | Callable[[str], str]) -> Change:
    """Other texts in the footer, or functions of what is there."""

    def change(table: pa.Table) -> pa.Table:
        metadata = dict(table.schema.metadata)
        for key, text in texts.items():
            name = f"headrace.{key}".encode()
            new = text if isinstance(text, str) else text(metadata[name].decode())
            metadata[name] = new.encode()
        return table.replace_schema_metadata(metadata)

    return change


def drop(name: str) -> Change:
    return lambda table: table.drop_columns([name])


def order(rows: list[int]) -> Change:
    return lambda table: table.take(pa.array(rows))


def vector(rows: int, row: int, value: float) -> pa.Array:
    """obs of a `Box((2,))` with one other number."""
    flat = np.zeros(2 * rows, np.float32)
    flat[2 * row] = value
    return pairs(flat, np.arange(rows + 1) * 2)


def pairs(flat: Any, offsets: Any) -> pa.Array:
    """Lists of float32, as `obs` is stored."""
    kind = pa.list_(pa.field("element", pa.float32(), nullable=False))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(flat), type=kind)


def _one_more(text: str) -> str:
    return str(int(text) + 1)


# the shard has parts of 3, 2 and 3 rows, ordinals 0 to 2; the second ends with a final observation
BAD: Mapping[str, tuple[Change, str]] = {
    "a missing column": (drop("rewards"), "rewards: expected one column"),
    "another type": (put("rewards", pa.array([1] * 8, pa.int32())), "rewards: expected double"),
    "text for numbers": (put("actions", pa.array(["x"] * 8)), "actions: expected int64"),
    "a shorter vector": (
        put("obs", pairs(np.zeros(8, np.float32), np.arange(9))),
        "obs: expected 2 numbers in each row, got 1",
    ),
    "vectors of other sizes": (
        put("obs", pairs(np.zeros(16, np.float32), [0, 3, *range(4, 18, 2)])),
        "obs: expected 2 numbers in each row, got 3",
    ),
    "lists of other numbers": (
        put("obs", pa.array([[0.0, 0.0]] * 8)),
        "obs: expected list<element: float not null>, got list<element: double>",
    ),
    "a reward that is NaN": (at_row("rewards", 2, float("nan")), "rewards: expected a finite"),
    "an infinite reward": (at_row("rewards", 7, float("inf")), "rewards: expected a finite"),
    "an observation that is NaN": (put("obs", vector(8, 3, np.nan)), "obs: expected finite"),
    "an infinite observation": (put("obs", vector(8, 0, np.inf)), "obs: expected finite"),
    "an action outside its space": (
        at_row("actions", 1, 3),
        "actions: expected an integer of 0..2",
    ),
    "an action below its space": (at_row("actions", 6, -1), "actions: expected an integer of 0..2"),
    "a propensity above 1": (at_row("action_logp", 0, 0.5), "action_logp: expected logarithms"),
    "a propensity that is NaN": (
        at_row("action_logp", 0, float("nan")),
        "action_logp: expected a f",
    ),
    "a null ordinal": (at_row("ordinal", 0, None), "ordinal: expected a value in every row"),
    "a null episode id": (at_row("eps_id", 4, None), "eps_id: expected a value in every row"),
    "a null reward": (at_row("rewards", 4, None), "rewards: expected a value in every row"),
    "a foreign ordinal": (put("ordinal", [0] * 3 + [9] * 2 + [2] * 3), "got 3 of 0, 2, 9"),
    "an ordinal too few": (put("ordinal", [0] * 3 + [2] * 5), "ordinal 2: expected each step once"),
    "a part before its first": (put("episode_ordinal", [5] * 8), "no part before the first"),
    "a gap in t": (at_row("t", 1, 5), "ordinal 0: expected each step once"),
    "a doubled step": (order([0, 1, 1, 2, 3, 4, 5, 6]), "ordinal 0: expected each step once"),
    "a t below 0": (put("t", [-1, 0, 1, 0, 1, 0, 1, 2]), "episode_ordinal >= 0"),
    "parts torn apart": (order([0, 1, 3, 4, 2, 5, 6, 7]), "got 4 of 0-2"),
    "rows too few": (lambda table: table.slice(0, 5), "rows"),
    "a final observation inside": (
        at_row("final_obs", 1, [0.0, 0.0]),
        "final_obs: expected values at",
    ),
    "a final observation cut": (at_row("final_obs", 4, [0.0]), "final_obs"),
    "a final observation that is NaN": (
        at_row("final_obs", 4, [np.nan, np.nan]),
        "final_obs: expected finite",
    ),
    "an end inside a part": (at_row("terminateds", 0, True), "terminateds, truncateds"),
    "two ends at once": (put("truncateds", [False] * 7 + [True]), "terminateds, truncateds"),
    "an episode's id that changes in a part": (at_row("eps_id", 1, "x"), "eps_id: expected one"),
    "an agent that changes in a part": (at_row("agent_id", 1, "x"), "agent_id: expected one"),
    "a policy that changes in a part": (at_row("policy_id", 6, "x"), "policy_id: expected one"),
    "tags that change in a part": (at_row("tags", 4, '{"a":"b"}'), "tags: expected one value"),
    "a start that changes in a part": (
        at_row("episode_ordinal", 7, 0),
        "episode_ordinal: expected one value",
    ),
    "training that changes in a part": (
        at_row("training_enabled", 1, False),
        "training_enabled: expected one value",
    ),
    "broken tags": (put("tags", ["{"] * 8), "tags: expected a JSON object"),
    "tags that are no texts": (put("tags", ['{"a": 1}'] * 8), "tags: expected a JSON object"),
    "a footer of other ranges": (footer(ranges="[[0,1]]"), "its footer"),
    "a footer of more parts": (footer(parts=_one_more), "expected 4 parts"),
    "a footer of more rows": (footer(rows=_one_more), "9 rows"),
    "a footer of another stream": (footer(stream="b" * 12 + "-" + "c" * 12), "the footer says"),
    "a footer of other spaces": (
        footer(spaces=lambda text: text.replace('"n":3', '"n":4')),
        "of its spaces",
    ),
    "a footer without ranges": (footer(ranges="[]"), "the footer cannot be read"),
    "a footer that is no JSON": (footer(columns="{"), "the footer cannot be read"),
    "a footer of other shapes": (
        footer(columns=lambda text: json.dumps([{**s, "shape": [1]} for s in json.loads(text)])),
        "the columns of its spaces",
    ),
}
"""Kind of damage -> how to cause it, and the text of the reason."""
