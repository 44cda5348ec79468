"""What the collector's results mean for events: counts, refusals, and what is sent again.

The sending thread and `get_action` both get such results.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ingest.delivery.transport import UNAVAILABLE
from ingest.delivery.unconfirmed import LOST, Kept, seq_of
from ingest.protocol.agent_names import Name, label_of, name_of
from ingest.protocol.errors import STATUS, Refusal
from ingest.protocol.messages import Event, LogReturns, Start

log = logging.getLogger("headrace.client")

UNREPORTED = 10_000
"""The number of refusals that are kept for `flush` to raise; older ones are only counted."""


class EventResults:
    """Counts of a client's events, the refused ones, and those that `get_action` keeps.

    `refuse` passes a refusal to the event's episode; `learn_anew` has the collector's declarations
    asked for again; `on_error` is the caller's. Every method may be called from any thread.
    """

    def __init__(
        self,
        refuse: Callable[[Event, Refusal], None],
        learn_anew: Callable[[], None],
        on_error: Callable[[Refusal], None] | None,
    ) -> None:
        self._refuse, self._learn_anew, self._on_error = refuse, learn_anew, on_error
        self.kept = Kept()
        self.reset()

    def reset(self) -> None:
        """Forget everything and renew the locks, also in a forked child."""
        self._lock = threading.RLock()  # a signal handler may call in the middle of a call
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._unreported: deque[Refusal] = deque(maxlen=UNREPORTED)  # not raised by a flush yet
        self.kept.clear()

    def count(self, **more: int) -> None:
        """Add to the counts, named as in `ClientStats`."""
        with self._lock:
            self._counts.update(more)

    def count_refused(self, reason: str) -> None:
        """Count an event that is left out because another one of its episode was refused."""
        with self._lock:
            self._refused[reason] += 1

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """(counts by name, refused events by reason)."""
        with self._lock:
            return dict(self._counts), dict(self._refused)

    def refuse(
        self, event: Event, refusal: Refusal, *, foreign: bool = False, reason: str | None = None
    ) -> None:
        """Handle a refusal, counted by its code or another reason.

        The first for each reason is logged, unless `on_error` reports it. A waiting flush changes
        nothing: it may end without raising it. A refusal of an earlier process's event is only
        counted and logged.
        """
        if refusal.episode_id is None:
            refusal.episode_id, refusal.agent_id = event.episode_id, event.agent_id
        if isinstance(event, LogReturns) and event.seq is None:
            refusal.step, refusal.reward_id = event.step, event.reward_id
        reason = reason or refusal.code
        with self._lock:
            first = reason not in self._refused
            self._refused[reason] += 1
            if not foreign:
                self._unreported.append(refusal)
        if first and self._on_error is None:
            log.warning("an event of episode %s was refused: %s", label_of(event), refusal)
        if refusal.code == "other_schema":
            self._learn_anew()
        if not foreign:
            self._refuse(event, refusal)
        if self._on_error is not None:
            try:
                self._on_error(refusal)
            except Exception:
                log.exception("on_error failed")
        if refusal.code != "window_closed":
            self.kept.drop(name_of(event))

    def take_unreported(self, wanted: Callable[[Refusal], bool]) -> list[Refusal]:
        """Remove and return the wanted refusals that no flush has raised."""
        with self._lock:
            found = [one for one in list(self._unreported) if wanted(one)]
            for one in found:
                self._unreported.remove(one)
        return found

    def release(self, durable: Sequence[Event]) -> None:
        """Drop the kept events of episodes up to these events, which are on disk now."""
        for event in durable if self.kept else ():
            dropped = self.kept.delivered(event)  # itself too, if it is a copy
            self.count(acknowledged=sum(seq_of(kept) != seq_of(event) for kept in dropped))

    def take_lost(self, refusals: Iterable[tuple[Name, Refusal]]) -> dict[Name, list[Event]]:
        """Take out the kept events of episodes that the collector has lost, by their refusals."""
        first: dict[Name, int] = {}
        for name, refusal in refusals if self.kept else ():
            if refusal.code in LOST:
                expected = refusal.expected_seq or 0
                first[name] = min(first.get(name, expected), expected)
        found = {name: self.kept.take(name, seq) for name, seq in first.items()}
        return {name: events for name, events in found.items() if events}


def to_repeat(
    events: Sequence[Event], refused: Mapping[int, Refusal], maybe_applied: bool
) -> tuple[list[Event], float, bool]:
    """(refused events to send again, after how many seconds, whether the instance is unknown).

    With a start that is to be sent again, all refused events of its episode are.
    """
    ids: set[Name] = set()
    again: list[Event] = []
    wait, forgotten = 0.0, False
    for index in sorted(refused):
        event, refusal = events[index], refused[index]
        if STATUS[refusal.code] in UNAVAILABLE:
            ids.add(name_of(event))
            wait = max(wait, refusal.retry_after or 0.1)
        elif refusal.code == "unknown_instance":
            forgotten = True
            if isinstance(event, Start) and not maybe_applied:
                ids.add(name_of(event))
        if name_of(event) in ids:
            again.append(event)
    return again, wait, forgotten


def summary(refused: list[Refusal]) -> Refusal:
    """One Refusal for all refusals since the last flush. Of several it describes the first."""
    first = refused[0]
    if len(refused) == 1:
        return first
    one = replace(first, path=None)  # the place in an event says nothing without the event
    message = f"{len(refused)} events were refused since the last flush, first: {one}"
    return replace(one, message=message, step=None, reward_id=None)
