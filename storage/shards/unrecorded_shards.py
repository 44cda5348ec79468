"""Finding shards that a journal has no record of, after it was restored from a backup.

Steps that the journal received after the backup may already be in shards. `later_shards` reads
which steps these are, so that the restored journal does not write them a second time. Each shard is
read once per restore; observations are not decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from storage.objects.interface import Objects
from storage.objects.opening import Root, objects_at
from storage.objects.ranged import RangedFile
from storage.shards.names import (
    ShardDamaged,
    ShardError,
    ShardInfo,
    ShardName,
    is_about_the_file,
    is_shard,
    shard_names,
    streams,
)
from storage.shards.shard import find_shard, read_shard

log = logging.getLogger("headrace.collector")

_COLUMNS = ("eps_id", "agent_id", "part", "t", "ordinal", "ended", "received_ts", "env_t")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPart:
    """A part in a shard.

    `received`: when its steps came, int64 (steps,), microseconds since the epoch.
    """

    episode_id: str
    agent_id: str
    part: int
    t0: int
    steps: int
    received: bytes
    ended: str | None
    is_track: bool = False  # whether its episode has several agents


@dataclass(frozen=True, slots=True)
class FoundShard:
    """An intact shard and its parts, by ordinal."""

    info: ShardInfo
    parts: tuple[FoundPart, ...]


def later_shards(
    shards: Root, known: Mapping[str, int], since: int
) -> tuple[list[FoundShard], dict[str, int]]:
    """Find the shards that a journal has no record of, and the next ordinals of their streams.

    `shards` is the `shards/` folder; `known` are the journal's streams with their next ordinals.
    All streams of a collector that is not known are included if anything in one was received at
    `since` (microseconds since the epoch) or later: it wrote after the backup. A shard that is
    damaged or cannot be read is skipped with a warning, and its ordinals count. Raises OSError for
    errors that no single shard causes.

    Returns (shards, stream -> next ordinal).
    """
    objects = objects_at(shards)
    found: list[FoundShard] = []
    ends: dict[str, int] = {}
    there = {stream: stream.rpartition("-")[0] for stream in streams(objects) if "-" in stream}
    strangers = [stream for stream in there if stream not in known]
    owners = {there[stream] for stream in strangers if _latest(objects, stream) >= since}
    for stream in there:
        if stream not in known and there[stream] not in owners:
            continue
        first = known.get(stream, 0)
        for name in shard_names(objects, stream):
            if name.last < first or not is_shard(objects, stream, name):
                continue
            ends[stream] = max(ends.get(stream, 0), name.last + 1)
            if (shard := _read(objects, stream, name, first)) is not None:
                found.append(shard)
    return found, ends


def _latest(objects: Objects, stream: str) -> int:
    """When the latest step of the last intact shard was received; -1 without a shard.

    The modification time of a file cannot be used: a clock may have been set back before.
    """
    for name in reversed(shard_names(objects, stream)):
        shard = _read(objects, stream, name, 0) if is_shard(objects, stream, name) else None
        if shard is not None:
            times = (np.frombuffer(part.received, "<i8").max() for part in shard.parts)
            return int(max(times, default=-1))
    return -1


def _read(objects: Objects, stream: str, name: ShardName, first: int) -> FoundShard | None:
    """A shard and its parts from ordinal `first` on; a compacted one may have earlier parts.

    None, after a warning, for one that is damaged or cannot be read.
    """
    info = find_shard(objects, stream, name.first, name.last)
    try:
        if info is None:
            raise ShardDamaged("expected an intact shard")
        table = read_shard(RangedFile(objects, f"{stream}/{info.path.name}"), columns=_COLUMNS)
    except (ShardError, OSError) as error:
        if isinstance(error, OSError) and not is_about_the_file(error):
            raise
        log.warning("shard %s of %s gets no record: %s", name, stream, error)
        return None
    if info.first < first:
        table = table.filter(pc.greater_equal(table["ordinal"], first))
    parts = tuple(_parts(table))
    first = max(info.first, first)
    return FoundShard(structs.replace(info, first=first, rows=len(table), parts=len(parts)), parts)


def _parts(table: pa.Table) -> Iterator[FoundPart]:
    """The parts in a shard's rows. The rows of a part are consecutive."""
    ordinal, part, t, received = (
        table[name].to_numpy() for name in ("ordinal", "part", "t", "received_ts")
    )
    names, agents, ended = (table[name].to_pylist() for name in ("eps_id", "agent_id", "ended"))
    if not len(ordinal):
        return
    joined = table["env_t"].is_valid().to_pylist()
    breaks = ordinal[1:] != ordinal[:-1]
    breaks |= np.fromiter((a != b for a, b in pairwise(agents)), np.bool_)
    starts = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    for first, stop in zip(starts, [*starts[1:], len(ordinal)], strict=True):
        yield FoundPart(
            episode_id=names[first],
            agent_id=agents[first],
            part=int(part[first]),
            t0=int(t[first]),
            steps=stop - first,
            received=received[first:stop].astype("<i8").tobytes(),
            ended=ended[stop - 1],
            is_track=joined[first],
        )
