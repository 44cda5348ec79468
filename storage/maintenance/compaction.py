"""`compact`: which small shards to join, and which replaced ones to delete.

Only neighbours are joined: shards of one stream whose ordinals are adjacent, or that have only
removed ones between them. A shard is rewritten only into one with at least twice its rows, so
repeated compaction writes each row a few times (the logarithm of their number), however often it
runs.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from storage.experience.range_set import RangeSet
from storage.journal.copying import Recorded, recorded_shards
from storage.journal.database import DATABASE
from storage.maintenance.plans import Delete, MaintenancePlan, Merge
from storage.objects.interface import Objects
from storage.objects.opening import Root, local_folder, objects_at
from storage.shards.names import ShardDamaged, ShardName, shard_names, streams
from storage.shards.replacements import REPLACED, Replacements
from storage.verify.inventory import summary

log = logging.getLogger("headrace.maintenance")

AIM_BYTES = 128_000_000
GRACE_SECONDS = 86_400.0


def recorded_under(root: Root) -> Recorded | None:
    """What the journal under a root has recorded; None without a journal. See `recorded_shards`."""
    folder = local_folder(root)
    if folder is None or not (folder / "journal" / DATABASE).exists():
        return None
    return recorded_shards(folder / "journal")


class _Small(NamedTuple):
    """A shard that may be joined. `period`: the number of the period of its first step."""

    name: ShardName
    rows: int
    nbytes: int
    period: int


def plan_compaction(
    root: Root,
    journal: Recorded | None,
    *,
    aim_bytes: int = AIM_BYTES,
    period_seconds: float | None = None,
    grace_seconds: float = GRACE_SECONDS,
    now: float | None = None,
) -> MaintenancePlan:
    """Plan to join shards up to a file size, to delete replaced ones after their grace period.

    `journal`: what the root's journal has recorded, None without one. Of its streams only recorded
    shards are joined, because a collector's start looks for those of its plans. With
    `period_seconds`, shards whose first steps (by the client's clock) are in different periods stay
    apart. `now`: seconds since the epoch. Raises NewerFormat, OSError, and ValueError for damaged
    records.
    """
    objects = objects_at(root)
    shards, replacements = objects.under("shards"), Replacements.of(objects)
    steps: list[Merge] = []
    period = None if period_seconds is None else int(period_seconds * 1_000_000)
    gone: dict[str, RangeSet] = defaultdict(RangeSet)
    for record in replacements.removals:
        gone[record.stream].update(record.removed)
    limit = (time.time() if now is None else now) - grace_seconds
    for stream in streams(shards):
        known = None if journal is None or stream not in journal.streams else journal.shards
        run: list[_Small] = []
        total = 0
        for name in [*shard_names(shards, stream), None]:
            place = stream, str(name)
            may = name and (known is None or place in known or place in replacements.made)
            small = _small(shards, stream, name, aim_bytes, period) if name and may else None
            if run and not (small and _follows(small, run[-1], aim_bytes - total, gone[stream])):
                steps += _worthwhile(stream, run)
                run, total = [], 0
            if small:
                run.append(small)
                total += small.nbytes
    over = replaced_over(objects, replacements, limit)
    return MaintenancePlan("compact", (*steps, *over))


def _small(
    shards: Objects, stream: str, name: ShardName, aim_bytes: int, period: int | None
) -> _Small | None:
    """A shard of less than half the wanted size; None for another, or a damaged one."""
    place = f"{stream}/{name}"
    status = shards.status(place)
    if status is None or not status.is_object or 2 * status.size > aim_bytes:
        return None
    try:
        metadata, nbytes, times = summary(shards, place)
    except (ShardDamaged, OSError) as error:
        log.warning("%s is left as it is: %s", place, error)
        return None
    return _Small(name, metadata.rows, nbytes, min(times, default=0) // period if period else 0)


def _follows(one: _Small, last: _Small, room: int, gone: RangeSet) -> bool:
    """Whether a shard can be joined to another: no ordinal is between them but removed ones."""
    between = gone.missing(last.name.last + 1, one.name.first - 1)
    return not between and last.period == one.period and one.nbytes <= room


def _worthwhile(stream: str, run: Sequence[_Small]) -> Iterator[Merge]:
    """The parts of a run that have at least twice the rows of their largest shard.

    The size of a small file is mostly that of its footer, and says nothing about its rows.
    """
    if len(run) < 2:
        return
    rows = sum(small.rows for small in run)
    largest = max(range(len(run)), key=lambda at: run[at].rows)
    if 2 * run[largest].rows <= rows:
        names = tuple(str(small.name) for small in run)
        yield Merge(stream, names, rows, sum(small.nbytes for small in run))
    else:
        yield from _worthwhile(stream, run[:largest])
        yield from _worthwhile(stream, run[largest + 1 :])


def replaced_over(root: Objects, replacements: Replacements, limit: float) -> list[Delete]:
    """The deletion of all shards that were replaced at `limit` or before (s since the epoch)."""
    shards, found = root.under("shards"), list[Delete]()
    for stream in streams(shards):
        names = tuple(
            name
            for place in shards.names(f"{stream}/")
            if place.endswith(REPLACED)
            and (name := place.rpartition("/")[2].removesuffix(REPLACED))
            and 0 <= replacements.since(stream, name) <= int(limit * 1_000_000)
        )
        found += [Delete(stream, names)] if names else []
    return found
