"""The reply to an import: counts of accepted events, and the first refused episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ingest.protocol import messages as wire
from ingest.protocol.errors import STATUS, Refusal
from storage.wording import counted

NAMED = 100
"""The most refused episodes that a reply describes; it only counts the others."""

REFUSED_EVENTS = 5_000
"""After this many refused events, if they are the majority, an import is stopped."""

_UNFIT = (400, 422)
"""Statuses of content that does not fit its policy."""


class ImportReply:
    """The reply to an import while its episodes are accepted in groups.

    `message` is the reply to send. `refused` counts events, as `accepted` and `duplicates` do.
    """

    def __init__(self, *, durable: bool) -> None:
        self.message = wire.EventsReply(durable=durable, accepted=0)
        self.refused = 0
        self._episodes = 0
        self._unfit = 0  # refused events that did not fit their policy
        self._futile = 0  # refused events whose reason would also refuse others
        self._first: Mapping[str, Any] = {}  # the first error among these

    def take(self, accepted: int, duplicates: int = 0) -> None:
        """Count events that were not refused."""
        self.message.accepted += accepted
        self.message.duplicates += duplicates

    def refuse(
        self, row: int, events: int, code: str, error: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Count a refused episode's events, and describe the episode if the reply has room."""
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
        """Count invalid rows, by column and reason."""
        found = self.message.refused_by
        for reason, count in sums:
            found[reason] = found.get(reason, 0) + count

    @property
    def _fine(self) -> int:
        return self.message.accepted + self.message.duplicates

    @property
    def wasted(self) -> float:
        """The share of events that were refused, 0 to 1.

        0 if events were accepted and the refused ones all fit their policy.
        """
        if not self.refused or (self._fine and not self._unfit):
            return 0.0
        return self.refused / (self.refused + self._fine)

    def require_hope(self) -> None:
        """Raise Refusal if most events were refused, for reasons that would also refuse the rest.

        These are content that does not fit the policy (422), or a lack of room (429). Episodes that
        are already known are no such reason.
        """
        most = self.refused > max(REFUSED_EVENTS, self._fine)
        if not most or self._futile <= max(NAMED, self._episodes // 2):
            return
        text = (
            f"stopped after {counted(self.refused, 'refused event')} and {self.message.accepted:,} "
            f"accepted ones; the first refusal: {self._first['message']}"
        )
        fits = STATUS[self._first["code"]] not in _UNFIT
        code, again = (self._first["code"], 1.0) if fits else ("invalid", None)
        raise Refusal(code, text, self._first["path"], retry_after=again)
