"""`ls`: what the shards under a root contain, from their footers and statistics only.

No row is read, and nothing is verified (that is `verify`): a folder with thousands of shards is
listed in a second, while a collector writes to it. Parsing footers with Arrow would take longer
than all the rest, so the few values needed are searched in their bytes (storage.shards.footers).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.declarations.declaration import PolicyDeclaration
from storage.errors import ObjectNotFound
from storage.objects.interface import Objects
from storage.objects.opening import Root, objects_at
from storage.shards.footers import footer_bytes, own_footer
from storage.shards.names import MAX_SHARD, ShardDamaged, ShardName, streams
from storage.shards.schema import ShardMetadata
from storage.shards.shard import check_digest, damage_named
from storage.verify.audit import JournalAccount


@dataclass(frozen=True, kw_only=True)
class StreamListing:
    """One stream, by its footers. Times are microseconds since the epoch, None without rows.

    `policies` are those declared now with the stream's spaces; `unreadable` counts files without
    the footer of a shard, and entries that are not files.
    """

    stream: str
    shards: int
    parts: int
    rows: int
    nbytes: int
    first_ts: int | None
    last_ts: int | None
    policies: tuple[str, ...]
    spaces: str | None  # canonical JSON
    unreadable: int

    def to_dict(self) -> dict[str, Any]:
        """Plain types for strict JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Inventory:
    """Every stream under a root, by name.

    `being_written` counts the steps of closed parts that are not in any of these shards yet; None
    without an account of the journal. These, the rows, and the account's `open_steps` are all steps
    that were accepted.
    """

    streams: tuple[StreamListing, ...]
    being_written: int | None


def list_streams(
    root: Root,
    declarations: Mapping[str, PolicyDeclaration],
    account: JournalAccount | None = None,
) -> Inventory:
    """List the streams under `root`. A shard that is removed meanwhile is skipped.

    `account` is that of a running collector, taken before. Shards that it planned later are
    excluded, because their steps are counted as being written.
    """
    shards = objects_at(root).under("shards")
    names = {stream: _names(shards, stream, account) for stream in streams(shards)}
    listed = tuple(_listing(shards, *one, declarations) for one in names.items())
    if account is None:
        return Inventory(listed, None)
    there = {(stream, n.first, n.last) for stream, found in names.items() for n in found}
    planned = sum(
        steps
        for plan, steps in account.plans.items()
        if (plan.stream, plan.first, plan.last) not in there
    )
    return Inventory(listed, account.waiting_steps + planned)


def _names(shards: Objects, stream: str, account: JournalAccount | None) -> list[ShardName]:
    there = (name.rstrip("/").rpartition("/")[2] for name in shards.names(f"{stream}/"))
    found = [name for one in there if (name := ShardName.parse(one))]
    if account is None or not account.live:
        return found
    return [name for name in found if not account.is_behind(stream, name.first)]


def _listing(
    shards: Objects,
    stream: str,
    names: list[ShardName],
    declarations: Mapping[str, PolicyDeclaration],
) -> StreamListing:
    found: list[tuple[ShardMetadata, int]] = []
    times: list[int] = []
    unreadable = 0
    for name in names:
        try:
            metadata, nbytes, span = summary(shards, f"{stream}/{name}")
            found.append((metadata, nbytes))
            times += span
        except FileNotFoundError:
            continue
        except (ShardDamaged, OSError):
            unreadable += 1
    schema_id = stream.rpartition("-")[2]
    return StreamListing(
        stream=stream,
        shards=len(found),
        parts=sum(metadata.parts for metadata, _ in found),
        rows=sum(metadata.rows for metadata, _ in found),
        nbytes=sum(size for _, size in found),
        first_ts=min(times, default=None),
        last_ts=max(times, default=None),
        policies=tuple(name for name, d in declarations.items() if d.schema_id == schema_id),
        spaces=found[0][0].spaces if found else None,
        unreadable=unreadable,
    )


_TAIL = 65_536
"""The number of bytes, from the end of a file, that contain most footers."""


def summary(shards: Objects, name: str) -> tuple[ShardMetadata, int, list[int]]:
    """(metadata, bytes, the smallest and largest `ts` of each row group), from the footer only.

    `name`: a shard's under `shards`. Raises ShardDamaged if it has no such footer, and OSError.
    """
    status, path = shards.status(name), f"{shards}/{name}"
    if status is None:
        raise ObjectNotFound(f"expected {path}, which does not exist")
    nbytes = status.size
    tail = shards.read(name, begin=max(0, nbytes - _TAIL), end=nbytes)
    if len(tail) < (size := footer_bytes(tail)) <= nbytes:
        tail = shards.read(name, begin=nbytes - size, end=nbytes)
    found = own_footer(tail, path)
    return _by_arrow(shards, name) if found is None else (found[0], nbytes, found[1])


def _by_arrow(shards: Objects, name: str) -> tuple[ShardMetadata, int, list[int]]:
    """`summary` for any footer. Arrow gets it only if the digest in the name is right."""
    path = f"{shards}/{name}"
    content = shards.read(name, limit=MAX_SHARD)
    check_digest(path, content)
    with damage_named(path), pq.ParquetFile(pa.BufferReader(content)) as file:
        metadata = ShardMetadata.from_footer(file.schema_arrow.metadata, path)
        column = file.metadata.schema.names.index("ts")
        times: list[int] = []
        for group in range(file.metadata.num_row_groups):
            statistics = file.metadata.row_group(group).column(column).statistics
            if statistics is not None and statistics.has_min_max:
                times += [statistics.min, statistics.max]
    return metadata, len(content), times
