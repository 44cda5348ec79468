"""What is left out of reading, and what is tried again: one vocabulary for results and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from storage.reading.sources import ShardFile

Reason: TypeAlias = Literal[
    "damaged",  # a shard whose bytes are not those that its name proves
    "content",  # a shard with the right digest whose content fails a check
    "vanished",  # a shard that was listed and is gone, and nothing else holds its parts
    "training_disabled",  # episodes logged with training_enabled=False
    "other_policy",  # steps of another policy of the same schema
    "tags",
    "time",
    "select",  # rows that the caller's mask left out
]
"""Why rows were left out, as `ReaderStats.excluded` and what is derived from it count them."""

TRANSIENT = (OSError, MemoryError)
"""What says nothing about a shard's content: it is tried again. A missing file is told apart."""


@dataclass(frozen=True, slots=True)
class Excluded:
    """A shard that is left out, and why. `rows`: as its footer says, None if that is unreadable."""

    shard: ShardFile
    reason: Reason
    text: str
    rows: int | None = None
