"""The rows of a log as a `ray.data.Dataset`, without files in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from policy.data.log_selection import LogSelection
from policy.data.schemas import schema_to_read
from policy.exporting.runs import ROWS, Array, ExportFailed
from policy.exporting.tables import RLLIB
from storage.errors import NothingYet
from storage.experience.range_set import RangeSet
from storage.experience.sample_batch import HAS_NEXT_OBS, REWARDS
from storage.objects.opening import Root
from storage.reading.ledger import Ledger, Ranges
from storage.reading.objects_source import source_at
from storage.system.backoff import RETRY_FOR

ORDINALS = 4096
"""Of a task, at least, if there are as many."""

RayTask: TypeAlias = dict[str, list[tuple[int, int]]]


def read_ray(
    root: Root,
    *,
    policy_id: str = "default",
    columns: Sequence[str] = RLLIB,
    since: int | None = None,
    until: int | None = None,
    ordinals: Mapping[str, Ranges] | None = None,
    schema_id: str | None = None,
    names: bool = False,
    retry_for: float = RETRY_FOR,
) -> Any:
    """A `ray.data.Dataset` of a policy's rows, each once, which tasks of Ray read from the shards.

    Numbers are tensors, not objects. By default the rows are those that Ray's `OfflineData` learns
    from: with all columns that it needs and no other, and without those that lead nowhere known.
    Other `columns`, such as `action_logp` or `ordinal`, bring all rows. `since` and `until` are
    microseconds of the client's `ts`; `ordinals` is a manifest, stream -> ranges; with `names`,
    categories are names. All nodes have to see the root. Needs Ray (the [ray] extra). Raises
    NothingYet, and ExportFailed for observations of several arrays, which Ray's rows cannot hold.
    """
    import ray.data  # noqa: PLC0415  an optional extra

    selection = LogSelection(
        root=root,
        policy_id=policy_id,
        since=since,
        until=until,
        manifest=ordinals,
        schema_id=schema_to_read(root, policy_id, schema_id),
        retry_for=retry_for,
    )
    pieces = list(_pieces(selection))
    if not pieces:
        raise NothingYet(f"{root}: expected stored steps of policy {policy_id!r}, got none")
    tasks = ray.data.from_items([{"piece": one} for one in pieces], override_num_blocks=len(pieces))
    read = partial(_read, selection=selection, columns=tuple(columns), names=names)
    return tasks.map_batches(read, batch_size=1, batch_format="pandas")


def _pieces(selection: LogSelection) -> Iterator[RayTask]:
    """The ordinals of the shards that exist now, in disjoint pieces of about ORDINALS."""
    with closing(source_at(selection.root)) as source:
        shards = source.scan()
    wanted = None if selection.manifest is None else Ledger(selection.manifest).streams()
    seen: dict[str, RangeSet] = {}
    piece, size = RayTask(), 0
    for shard in shards:
        if selection.schema_id not in (None, shard.schema_id):
            continue
        taken = seen.setdefault(shard.stream, RangeSet())
        left = taken.missing(shard.first, shard.last)
        if wanted is not None:
            left = left.intersection(wanted.get(shard.stream, RangeSet()))
        if left:
            taken.update(left)
            piece.setdefault(shard.stream, []).extend(left.ranges())
            size += len(left)
        if size >= ORDINALS:
            yield piece
            piece, size = RayTask(), 0
    if piece:
        yield piece


def _read(
    tasks: Any, selection: LogSelection, columns: tuple[str, ...], names: bool
) -> Iterator[dict[str, Array]]:
    learns = columns == RLLIB
    needed = [*columns, HAS_NEXT_OBS] if learns else columns
    for piece in tasks["piece"]:
        part = replace(selection, manifest=piece)
        with closing(part.reader(columns=needed, batch_size=ROWS, names=names)) as reader:
            for rows in reader:
                rows = rows.select([n for n in rows if n.partition(".")[0] in needed])
                if learns:
                    if any(name not in rows for name in columns):
                        text = "expected an observation and an action of one array each"
                        raise ExportFailed(f"read_ray: {text}, got {', '.join(rows)}: give columns")
                    rows = rows.take(np.asarray(rows[HAS_NEXT_OBS], np.bool_)).select(columns)
                    rows[REWARDS] = rows[REWARDS].astype(np.float32)
                yield {name: np.array(column) for name, column in rows.items()}
