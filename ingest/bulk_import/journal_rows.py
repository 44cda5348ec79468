"""The journal rows of an import that takes several turns of the event loop."""

from __future__ import annotations

from ingest.collector.collector import Collector
from ingest.protocol.errors import Refusal

COMMIT_TURNS = 6
"""So many turns wait for the disk together."""


class ImportRows:
    """The journal rows of one import, some of which wait for the disk together."""

    def __init__(self, collector: Collector) -> None:
        self._collector, self._epoch = collector, collector.epoch
        self._row, self._waiting = -1, 0

    def require(self) -> None:
        """Raise Refusal if a row that was not on disk was thrown away: its number is another's.

        It says why as long as the collector takes nothing for that reason.

        To be called before each turn.
        """
        if self._waiting and self._collector.epoch != self._epoch:
            self._collector.known(None)  # why, if that is still so
            text = "the state was rebuilt, and not all that was taken is kept: send it again"
            raise Refusal("busy", text, retry_after=1.0)
        self._epoch = self._collector.epoch

    async def wrote(self, row: int) -> None:
        """A row was submitted just now. Raises Refusal, CollectorFailed."""
        self._row, self._waiting = row, self._waiting + 1
        if self._waiting == COMMIT_TURNS:
            await self.durable()

    async def durable(self) -> None:
        """Wait until all rows are on disk. Raises Refusal, CollectorFailed."""
        self.require()
        if self._waiting:
            await self._collector.durable(self._row)
            self._waiting = 0
