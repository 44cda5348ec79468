"""Finding shards that a journal has no record of, after it was restored from a backup.

Steps that the journal received after the backup may already be in shards. `later_shards` reads
which steps these are, so that the restored journal does not write them a second time. Each shard is
read once per restore; observations are not decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
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

__all__ = ["FoundPart", "FoundShard", "later_shards"]

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
    A stream that is not known is included if anything in it was received at `since` (microseconds
    since the epoch) or later: a collector wrote it after the backup. A shard that is damaged or
    cannot be read is skipped with a warning, and its ordinals count. Raises OSError for errors that
    no single shard causes.

    Returns (shards, stream -> next ordinal).
    """
    objects = objects_at(shards)
    found: list[FoundShard] = []
    ends: dict[str, int] = {}
    for stream in _streams(objects, known, since):
        first = known.get(stream, 0)
        for name in shard_names(objects, stream):
            if name.last < first or not is_shard(objects, stream, name):
                continue
            ends[stream] = max(ends.get(stream, 0), name.last + 1)
            shard = _read(objects, stream, name, first)
            if shard is None:
                log.warning("shard %s of %s is damaged, and gets no record", name, stream)
            else:
                found.append(shard)
    return found, ends


def _streams(objects: Objects, known: Mapping[str, int], since: int) -> Iterator[str]:
    """The known streams, and all streams of collectors that have written after the backup."""
    there = [stream for stream in streams(objects) if "-" in stream]
    strangers = [stream for stream in there if stream not in known]
    owners = {_owner(stream) for stream in strangers if _received_since(objects, stream, since)}
    for stream in there:
        if stream in known or _owner(stream) in owners:
            yield stream


def _owner(stream: str) -> str:
    return stream.rpartition("-")[0]


def _received_since(objects: Objects, stream: str, since: int) -> bool:
    """Whether a shard of the stream holds a step that was received at `since` or later.

    The modification time of a file cannot be used: a clock may have been set back before.
    """
    for name in reversed(shard_names(objects, stream)):
        if not is_shard(objects, stream, name):
            continue
        try:
            column = _table(objects, f"{stream}/{name}", ["received_ts"])["received_ts"]
        except (ShardDamaged, OSError) as error:
            _pass_over(error)
            log.warning("%s/%s/%s cannot be read: %s", objects, stream, name, error)
            continue
        if len(column) and int(np.max(column.to_numpy())) >= since:
            return True
    return False


def _read(objects: Objects, stream: str, name: ShardName, first: int) -> FoundShard | None:
    """A shard and its parts from ordinal `first` on; a compacted one may have earlier parts."""
    info = find_shard(objects, stream, name.first, name.last)
    if info is None:
        return None
    try:
        table = _table(objects, f"{stream}/{info.path.name}", _COLUMNS)
    except (ShardError, OSError) as error:
        _pass_over(error)
        return None
    if info.first < first:
        table = table.filter(pc.greater_equal(table["ordinal"], first))
        parts = tuple(_parts(table))
        info = structs.replace(info, first=first, rows=len(table), parts=len(parts))
        return FoundShard(info, parts)
    return FoundShard(info, tuple(_parts(table)))


def _table(objects: Objects, name: str, columns: Sequence[str]) -> pa.Table:
    return read_shard(RangedFile(objects, name), columns=columns)


def _pass_over(error: Exception) -> None:
    """Raise the error unless only this file is affected."""
    if isinstance(error, OSError) and not is_about_the_file(error):
        raise error


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
