"""Which shards of a scan a reader opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    seen: dict[str, set[str]] = field(default_factory=dict)  # schema -> its streams

    def wanted(self, shards: Sequence[ShardFile], taken: Ledger) -> list[ShardFile]:
        """Of newly found shards, in order, what may hold something that is not in `taken`.

        Raises MixedSchemas.
        """
        mine = [s for s in shards if self.schema_id in (None, s.schema_id) and self._listed(s)]
        if self.schema_id is None and self.policy_id is None:
            for shard in mine:
                self.seen.setdefault(shard.schema_id, set()).add(shard.stream)
            refuse_mixture(self.seen)
        return [s for s in mine if taken.missing(s.stream, s.first, s.last)]

    def _listed(self, shard: ShardFile) -> bool:
        if self.manifest is None:
            return True
        span = shard.last - shard.first + 1
        return len(self.manifest.missing(shard.stream, shard.first, shard.last)) < span


def refuse_mixture(streams: Mapping[str, set[str]]) -> None:
    """Raises MixedSchemas, which lists them, for streams by schema unless there is one or none."""
    if len(streams) > 1:
        listed = "; ".join(f"{key}: {', '.join(sorted(v))}" for key, v in sorted(streams.items()))
        raise MixedSchemas(
            f"expected shards of one schema, found {len(streams)} ({listed}): pass policy_id= or "
            "schema_id= (--policy-id, --schema-id)"
        )
