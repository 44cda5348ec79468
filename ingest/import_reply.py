"""What an import is told: how much of it was taken, and the first of what was refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ingest import wire
from ingest.errors import STATUS

NAMED = 100
"""Refused episodes that a reply names; it counts those beyond."""


class ImportReply:
    """The reply to an import while it is put together, a batch of episodes at a time.

    `message` is what is sent. `refused` counts events, as `accepted` and `duplicates` do.
    """

    def __init__(self, *, durable: bool) -> None:
        self.message = wire.EventsReply(durable=durable, accepted=0)
        self.refused = 0
        self._episodes = 0
        self._hostile = False  # some did not fit their policy, whatever the others met

    def take(self, accepted: int, duplicates: int = 0) -> None:
        """Count events that were not refused."""
        self.message.accepted += accepted
        self.message.duplicates += duplicates

    def refuse(self, row: int, error: Mapping[str, Any], path: str) -> None:
        """Name a refused episode by its first refused row, as long as a reply does so."""
        self._episodes += 1
        self._hostile |= STATUS[error["code"]] in (400, 422)
        if len(self.message.refused) < NAMED:
            named = wire.ItemError(index=row, error={**error, "path": path})
            self.message.refused.append(named)
        else:
            self.message.refused_count = self._episodes

    @property
    def wasted(self) -> float:
        """The part that did not fit its policy, 0 to 1; all of it where nothing was taken."""
        fine = self.message.accepted + self.message.duplicates
        if not self.refused or (fine and not self._hostile):
            return 0.0
        return self.refused / (self.refused + fine)
