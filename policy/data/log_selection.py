"""The rows of a log that a job reads, as training and evaluation choose them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policy.data.schemas import in_other_schemas, schema_to_read
from storage.objects.opening import Root
from storage.reading.ledger import Ranges
from storage.reading.shard_reader import ShardReader


@dataclass(frozen=True, kw_only=True)
class LogSelection:
    """The rows of one policy under `root` that a job reads.

    - `since`, `until`: only episodes that began in this period (microseconds of the client's `ts`).
    - `manifest`: only these ordinals (stream -> inclusive ranges).
    - `schema_id`: instead of the declared schema.
    - `retry_for`: seconds for which an unreadable shard is tried again.
    """

    root: Root
    policy_id: str
    since: int | None
    until: int | None
    manifest: Mapping[str, Ranges] | None
    schema_id: str | None
    retry_for: float

    def reader(self, **how: Any) -> ShardReader:
        """A reader of these rows; `how` are further arguments of `ShardReader`."""
        schema_id = self.schema_id
        if self.manifest is None:
            schema_id = schema_to_read(self.root, self.policy_id, schema_id)
        reader = ShardReader(
            self.root,
            policy_id=self.policy_id,
            since=self.since,
            until=self.until,
            ordinals=self.manifest,
            schema_id=schema_id,
            retry_for=self.retry_for,
            **how,
        )
        reader.warns = False  # a job says itself what it has not found
        return reader

    def count_other_schemas(self, reader: ShardReader) -> None:
        """Count the rows of other schemas as excluded; a manifest is of one schema."""
        if self.manifest is None:
            found = in_other_schemas(self.root, self.policy_id, reader.schema_id)
            for why, rows in found.items():
                reader.stats.exclude(why, rows)
