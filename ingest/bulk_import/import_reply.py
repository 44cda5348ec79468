"""What an import is told: how much of it was taken, and the first of what was refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ingest.protocol import messages as wire
from ingest.protocol.errors import STATUS, Refusal

NAMED = 100
"""Refused episodes that a reply names; it counts those beyond."""

REFUSED_EVENTS = 5_000
"""After so many refused ones, which are most of it, an import is not looked at any further."""

_UNFIT = (400, 422)
"""Statuses of what does not fit its policy, whatever else is so."""


class ImportReply:
    """The reply to an import while it is put together, a batch of episodes at a time.

    `message` is what is sent. `refused` counts events, as `accepted` and `duplicates` do.
    """

    def __init__(self, *, durable: bool) -> None:
        self.message = wire.EventsReply(durable=durable, accepted=0)
        self.refused = 0
        self._episodes = 0
        self._unfit = 0  # of them did not fit their policy, whatever the others met
        self._futile = 0  # of them were refused for what others will be refused for as well
        self._first: Mapping[str, Any] = {}  # why, of those

    def take(self, accepted: int, duplicates: int = 0) -> None:
        """Count events that were not refused."""
        self.message.accepted += accepted
        self.message.duplicates += duplicates

    def refuse(
        self, row: int, events: int, code: str, error: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Count a refused episode's events, and name it by a row as long as a reply does so."""
        status = STATUS[code]
        self.refused += events
        self._episodes += 1
        self._unfit += status in _UNFIT
        named = self._episodes <= NAMED
        if named:
            self.message.refused.append(wire.ItemError(index=row, error=dict(error())))
        else:
            self.message.refused_count = self._episodes
        if status in (*_UNFIT, 429):
            self._futile += 1
            if not self._first:
                self._first = self.message.refused[-1].error if named else error()

    def count_rows(self, sums: Iterable[tuple[str, int]]) -> None:
        """Count rows that do not fit, by column and reason."""
        found = self.message.refused_by
        for reason, count in sums:
            found[reason] = found.get(reason, 0) + count

    @property
    def _fine(self) -> int:
        return self.message.accepted + self.message.duplicates

    @property
    def wasted(self) -> float:
        """The part that did not fit its policy, 0 to 1; all of it where nothing was taken."""
        if not self.refused or (self._fine and not self._unfit):
            return 0.0
        return self.refused / (self.refused + self._fine)

    def require_hope(self) -> None:
        """Raise Refusal where the rest of an import is not worth to be looked at.

        Most was refused, and for what the rest would be refused for as well: it does not fit (422),
        or there is no room for it (429). Of episodes that are known that cannot be said.
        """
        most = self.refused > max(REFUSED_EVENTS, self._fine)
        if not most or self._futile <= max(NAMED, self._episodes // 2):
            return
        text = (
            f"stopped after {self.refused} refused events, when {self.message.accepted} were "
            f"taken; the first one was refused: {self._first['message']}"
        )
        fits = STATUS[self._first["code"]] not in _UNFIT
        code, again = (self._first["code"], 1.0) if fits else ("invalid", None)
        raise Refusal(code, text, self._first["path"], retry_after=again)
