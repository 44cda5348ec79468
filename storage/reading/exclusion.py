"""Shards and rows that readers exclude or retry: one vocabulary for results and metrics."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from storage.experience.range_set import RangeSet
from storage.reading.listing import ShardFile
from storage.wording import counted

log = logging.getLogger("headrace.reader")

Reason: TypeAlias = Literal[
    "damaged",  # a shard whose bytes do not match the digest in its name
    "content",  # a shard with the right digest whose content fails a check
    "vanished",  # a shard that was listed and is gone, and no other holds its parts
    "training_disabled",  # episodes logged with training_enabled=False
    "other_policy",  # steps of another policy
    "other_schema",  # steps of the policy in another schema than a job reads
    "tags",
    "time",
    "select",  # rows that the caller's mask excluded
]
"""Why rows were excluded, in `ReaderStats.excluded` and everything derived from it."""

SPOILED: tuple[Reason, ...] = ("damaged", "content", "vanished")
"""Reasons that lie in the shard: its rows do not count as read, so the next reader counts them
too."""

TRANSIENT = (OSError, MemoryError)
"""Errors that say nothing about a shard's content, and are retried. A missing file is not among
them: callers handle it first."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """An excluded shard, and why. `rows`: the number in its footer, None if it is unknown."""

    shard: ShardFile
    reason: Reason
    text: str
    rows: int | None = None


@dataclass(slots=True)
class ReaderStats:
    """What a reader has done since it was created. A step is a row of a shard.

    `excluded` counts rows by `Reason`. An excluded shard ("damaged", "content", "vanished") counts
    the rows in its footer, if that is readable and fits the name; otherwise their number is
    unknown, and only `excluded_shards` names it. Shards in `retrying` are neither read nor
    excluded.
    """

    shards: int = 0
    parts: int = 0
    rows: int = 0  # returned to the caller
    nbytes: int = 0  # of the files read
    doubles: int = 0  # steps that another file already contained
    lost: int = 0  # steps of a restored position that are in no shard any more
    incomplete: int = 0  # episodes that wait for parts (mode "episodes")
    excluded: dict[str, int] = field(default_factory=dict)  # reason -> rows
    excluded_shards: dict[str, str] = field(default_factory=dict)  # path -> why
    retrying: dict[str, str] = field(default_factory=dict)  # path -> its last error

    @property
    def spoiled(self) -> int:
        """How many shards were written and cannot be read."""
        return len(self.excluded_shards)

    def exclude(self, reason: Reason, rows: int) -> None:
        """Count rows; a negative number takes some back."""
        if rows:
            self.excluded[reason] = self.excluded.get(reason, 0) + rows
            if not self.excluded[reason]:
                del self.excluded[reason]


class LeftOut:
    """The shards that a reader excludes, as its statistics name and count them."""

    def __init__(self, stats: ReaderStats) -> None:
        self._stats = stats
        self._counted: dict[ShardFile, tuple[Reason, int]] = {}

    def shards(self) -> list[ShardFile]:
        return list(self._counted)

    def add(self, found: Excluded, unread: RangeSet) -> None:
        """Count an excluded shard.

        `unread`: the ordinals in its name that no other shard has delivered.
        """
        shard = found.shard
        self.take_back(shard)
        if not unread:
            return
        rows = found.rows if len(unread) == shard.last - shard.first + 1 else None
        self._counted[shard] = found.reason, rows or 0
        self._stats.exclude(found.reason, rows or 0)
        self._stats.excluded_shards[shard.place] = found.text
        text = "an unknown number of rows" if rows is None else counted(rows, "row")
        log.warning("left out as %s: %s: %s", found.reason, text, found.text)

    def take_back(self, shard: ShardFile) -> None:
        """No longer exclude a shard: it can be read now, or another one delivered its parts."""
        counted = self._counted.pop(shard, None)
        if counted is not None:
            self._stats.exclude(counted[0], -counted[1])
            self._stats.excluded_shards.pop(shard.place, None)
