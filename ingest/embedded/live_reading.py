"""Reading the data of a collector in this process, of one policy or all, before it is in shards.

The reader and its sources are combined here: the sources are fed by the collector, and drop what
the reader has taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ingest.collector.part_feed import Tap, Taps
from storage.declarations.declaration import PolicyDeclaration
from storage.reading.ledger import Ledger
from storage.reading.live_source import LiveSource
from storage.reading.multi_agent_reader import MultiAgentReader
from storage.reading.shard_reader import ShardReader
from storage.reading.untrained_rows import NOTHING_HELD


class LiveReading:
    """A reader and its sources: one for the policies of one schema, or one for each policy."""

    def __init__(
        self, reader: ShardReader | MultiAgentReader, sources: Sequence[tuple[str, LiveSource]]
    ) -> None:
        self.reader = reader
        self._sources = [source for _, source in sources]
        self._schemas = [schema_id for schema_id, _ in sources]
        self.tap: Tap = Taps(self._sources)

    @classmethod
    def of_one(
        cls,
        root: Path | None,
        schema_id: str,
        policy_id: str | None,
        bounds: Mapping[str, int],
        **options: Any,
    ) -> LiveReading:
        """Rows of one policy, or of all policies of one schema, in any mode of a ShardReader."""
        source = LiveSource(root, schema_id, **bounds)
        reader = ShardReader(
            source=source, policy_id=policy_id, schema_id=schema_id, follow=True, **options
        )
        source.taken = lambda: reader.taken
        return cls(reader, [(schema_id, source)])

    @classmethod
    def of_all(
        cls,
        root: Path | None,
        policies: Mapping[str, PolicyDeclaration],
        bounds: Mapping[str, int],
        **options: Any,
    ) -> LiveReading:
        """Whole episodes of all policies.

        Raises ValueError for flow control: clients that wait in the middle of an episode would wait
        for an update that waits for the end of the episode.
        """
        held = [name for name, one in policies.items() if one.steps_per_version is not None]
        if held:
            raise ValueError(
                f"multi_agent: expected policies without steps_per_version, got {held}: whole "
                "episodes and held clients would wait for each other; read one policy's steps "
                "with policy_id="
            )
        sources = {name: LiveSource(root, p.schema_id, **bounds) for name, p in policies.items()}
        reader = MultiAgentReader(sources=sources, policies=policies, follow=True, **options)
        for name, source in sources.items():
            source.taken = partial(reader.taken, name)
        return cls(reader, [(policies[name].schema_id, one) for name, one in sources.items()])

    def fail(self, error: BaseException) -> None:
        """Note that no more parts will come."""
        for source in self._sources:
            source.fail(error)

    @property
    def position(self) -> dict[str, Any]:
        """The reader's position for its buffered rows; whole episodes are counted by parts."""
        reader = self.reader
        return reader.state_dict() if isinstance(reader, ShardReader) else dict(NOTHING_HELD)

    @property
    def single(self) -> bool:
        """Whether one policy's rows are read, in a schema that no other policy has."""
        return len(self._schemas) == 1 and isinstance(self.reader, ShardReader)

    @property
    def waiting(self) -> int:
        """Unread parts; policies that share a schema share their parts."""
        return sum(self._by_schema([source.waiting for source in self._sources]))

    @property
    def dropped(self) -> int:
        """Parts that did not fit in the queue."""
        return sum(self._by_schema([source.dropped for source in self._sources]))

    def _by_schema(self, numbers: Sequence[int]) -> list[int]:
        most: dict[str, int] = {}
        for schema_id, number in zip(self._schemas, numbers, strict=True):
            most[schema_id] = max(most.get(schema_id, 0), number)
        return list(most.values())

    @property
    def taken(self) -> list[Ledger]:
        """The parts that are not read from the sources again."""
        reader = self.reader
        if isinstance(reader, MultiAgentReader):
            return [reader.taken(name) for name in reader.policies]
        return [reader.taken]
