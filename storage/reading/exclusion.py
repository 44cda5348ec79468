"""Shards that readers exclude or retry: one vocabulary for results and metrics."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from storage.experience.range_set import RangeSet
from storage.reading.listing import ShardFile

log = logging.getLogger("headrace.reader")

Reason: TypeAlias = Literal[
    "damaged",  # a shard whose bytes are not those that its name proves
    "content",  # a shard with the right digest whose content fails a check
    "vanished",  # a shard that was listed and is gone, and nothing else holds its parts
    "training_disabled",  # episodes logged with training_enabled=False
    "other_policy",  # steps of another policy
    "other_schema",  # steps of the policy in another schema than a job reads
    "tags",
    "time",
    "select",  # rows that the caller's mask left out
]
"""Why rows were left out, as `ReaderStats.excluded` and what is derived from it count them."""

SPOILED: tuple[Reason, ...] = ("damaged", "content", "vanished")
"""What is the shard's fault: a reader does not claim it, and the next one finds and counts it."""

TRANSIENT = (OSError, MemoryError)
"""What says nothing about a shard's content: it is tried again. A missing file is told apart."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """An excluded shard, and why. `rows`: as its footer states, None if that is unreadable."""

    shard: ShardFile
    reason: Reason
    text: str
    rows: int | None = None


@dataclass(slots=True)
class ReaderStats:
    """What a reader did since it was made; steps are rows of shards.

    The reasons of `excluded` are those of `Reason`. An excluded shard ("damaged", "content",
    "vanished") counts the rows that its footer states, if that is readable and fits the name; else
    one row for each part in its name, which is a lower bound. Shards in `retrying` are neither read
    nor excluded.
    """

    shards: int = 0
    parts: int = 0
    rows: int = 0  # handed to the caller
    nbytes: int = 0  # of the files read
    doubles: int = 0  # steps that another file had already brought
    lost: int = 0  # steps of a restored position that no shard holds any more
    incomplete: int = 0  # episodes that wait for parts (mode "episodes")
    excluded: dict[str, int] = field(default_factory=dict)  # reason -> rows left out
    excluded_shards: dict[str, str] = field(default_factory=dict)  # path -> why
    retrying: dict[str, str] = field(default_factory=dict)  # path -> what it failed with last

    @property
    def spoiled(self) -> int:
        """Rows that were written and cannot be read: those of excluded shards."""
        return sum(self.excluded.get(reason, 0) for reason in SPOILED)

    def exclude(self, reason: Reason, rows: int) -> None:
        """Count rows; fewer than none take some back."""
        if rows:
            self.excluded[reason] = self.excluded.get(reason, 0) + rows
            if not self.excluded[reason]:
                del self.excluded[reason]


class LeftOut:
    """The shards that a reader leaves out, as its statistics name and count them."""

    def __init__(self, stats: ReaderStats) -> None:
        self._stats = stats
        self._counted: dict[ShardFile, tuple[Reason, int]] = {}

    def shards(self) -> list[ShardFile]:
        return list(self._counted)

    def add(self, found: Excluded, unread: RangeSet) -> None:
        """Name a shard and count what it would have brought; `unread` are the ordinals of its name
        that no other one has brought."""
        shard = found.shard
        self.take_back(shard)
        if not unread:
            return
        told = found.rows if len(unread) == shard.last - shard.first + 1 else None
        rows = len(unread) if told is None else told
        self._counted[shard] = found.reason, rows
        self._stats.exclude(found.reason, rows)
        self._stats.excluded_shards[shard.place] = found.text
        log.warning(
            "left out as %s: %s%d rows in %d parts: %s",
            *(found.reason, "at least " if told is None else "", rows, len(unread), found.text),
        )

    def take_back(self, shard: ShardFile) -> None:
        """It is left out no longer: it is whole now, or another one brought its parts."""
        counted = self._counted.pop(shard, None)
        if counted is not None:
            self._stats.exclude(counted[0], -counted[1])
            self._stats.excluded_shards.pop(shard.place, None)
