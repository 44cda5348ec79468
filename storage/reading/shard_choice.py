"""Which shards of a scan a reader opens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from storage.experience.interfaces import MixedSchemas
from storage.reading.ledger import Ledger
from storage.reading.sources import ShardFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardChoice:
    """One schema, and of `manifest` alone if there is one.

    Without a `schema_id` and a `policy_id` the shards have to be of one schema; a policy's schema
    shows only in its rows.
    """

    policy_id: str | None = None
    schema_id: str | None = None
    manifest: Ledger | None = None

    def wanted(self, shards: Sequence[ShardFile], taken: Ledger) -> list[ShardFile]:
        """Of a scan, in order, what may hold something that is not in `taken`.

        Raises MixedSchemas.
        """
        mine = [s for s in shards if self.schema_id in (None, s.schema_id) and self._listed(s)]
        if self.schema_id is None and self.policy_id is None:
            refuse_mixture(mine)
        return [s for s in mine if taken.missing(s.stream, s.first, s.last)]

    def _listed(self, shard: ShardFile) -> bool:
        if self.manifest is None:
            return True
        span = shard.last - shard.first + 1
        return len(self.manifest.missing(shard.stream, shard.first, shard.last)) < span


def refuse_mixture(shards: Sequence[ShardFile]) -> None:
    """Raises MixedSchemas, which lists the schemas, unless there is one or none."""
    streams: dict[str, set[str]] = {}
    for shard in shards:
        streams.setdefault(shard.schema_id, set()).add(shard.stream)
    if len(streams) > 1:
        listed = "; ".join(f"{key}: {', '.join(sorted(v))}" for key, v in sorted(streams.items()))
        raise MixedSchemas(
            f"expected shards of one schema, found {len(streams)} ({listed}): pass policy_id= or "
            "schema_id="
        )
