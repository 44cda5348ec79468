"""Events that a remote client keeps after a reply to `get_action`, until they are durable.

A collector replies before its disk has the events. If it is killed then, it loses the decision and
the events of the request. They stay here until the collector says that they are durable; lost ones
are taken out and sent again.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable
from copy import copy
from itertools import pairwise
from typing import TypeVar

from ingest.protocol.agent_names import Name, name_of
from ingest.protocol.messages import Event, GetAction, LogReturns, Start

LOST = frozenset({"gap", "decision_unknown", "not_found"})
"""The codes of a collector that has lost events because it was killed."""


def seq_of(event: Event) -> int:
    """An event's sequence number; -1 for a reward without one."""
    if isinstance(event, Start):
        return 0
    return -1 if event.seq is None else event.seq


def _key(event: Event) -> int | tuple[int | None, str | None]:
    """An event's identity: its number, or step and `reward_id` of a reward without one."""
    if isinstance(event, LogReturns) and event.seq is None:
        return event.step, event.reward_id
    return seq_of(event)


class Kept:
    """Events of each episode or track, in order. Every method may be called from any thread."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all events and renew the lock, also in a forked child."""
        self._lock = threading.RLock()  # a signal handler may call in the middle of a call
        self._events: dict[Name, list[Event]] = {}
        self._mixed: set[Name] = set()  # episodes whose events are not sorted by number

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, list(self._events.values())))

    def __bool__(self) -> bool:
        return bool(self._events)

    def keep(self, name: Name, events: Iterable[Event]) -> None:
        """Add events of an episode; one with a known number replaces the earlier one."""
        with self._lock:
            new = list(events)
            known = self._events.setdefault(name, [])
            if name not in self._mixed and _ascend([*known[-1:], *new]):
                known += new
                return
            self._mixed.add(name)
            keys = set(map(_key, new))
            known[:] = [event for event in known if _key(event) not in keys] + new

    def durable(self, name: Name, seq: int) -> list[Event]:
        """Drop and return an episode's events up to `seq`, which are on disk.

        A reward without a number is on disk if a later number is.
        """
        with self._lock:
            events = self._events.get(name)
            if events is None:
                return []
            if name in self._mixed:
                places = [at for at, event in enumerate(events) if 0 <= seq_of(event) <= seq]
                behind = places[-1] if places else 0
                done = {*places, *(at for at in range(behind) if seq_of(events[at]) < 0)}
                gone = [event for at, event in enumerate(events) if at in done]
                events[:] = [event for at, event in enumerate(events) if at not in done]
            else:
                end = bisect_right(events, seq, key=seq_of)
                gone = events[:end]
                del events[:end]
            if not events:
                self._forget(name)
            return gone

    def delivered(self, event: Event) -> list[Event]:
        """Drop and return the events that are on disk now that `event` is.

        These are the event itself and those of `durable` for its number.
        """
        name, key = name_of(event), _key(event)
        if isinstance(key, int):
            return self.durable(name, key)
        with self._lock:
            events = self._events.get(name, [])
            gone = [kept for kept in events if _key(kept) == key]
            events[:] = [kept for kept in events if _key(kept) != key]
            if not events:
                self._forget(name)
            return gone

    def drop(self, name: Name) -> None:
        """Forget an episode that the collector has refused for good."""
        with self._lock:
            self._forget(name)

    def _forget(self, name: Name) -> None:
        self._events.pop(name, None)
        self._mixed.discard(name)

    def take(self, name: Name, seq: int) -> list[Event]:
        """Take out all events of an episode, because the collector lacks event `seq`.

        Events before `seq` are included, because a decision may have been drawn again without being
        reported as lost. Empty if `seq` itself is not kept: then the collector lacks an event that
        was durable.
        """
        with self._lock:
            events = self._events.get(name, [])
            if seq not in map(seq_of, events):
                return []
            self._forget(name)
        return [undecided(event) for event in events]

    def copies(self) -> list[Event]:
        """Copies of all events, to have them acknowledged; the originals stay until then."""
        with self._lock:
            events = [event for kept in list(self._events.values()) for event in kept]
        return [undecided(copy(event)) for event in events]


def _ascend(events: list[Event]) -> bool:
    """Whether all events have numbers, in ascending order."""
    numbers = [-1, *map(seq_of, events)]
    return all(a < b for a, b in pairwise(numbers))


E = TypeVar("E", Event, GetAction)


def undecided(event: E) -> E:
    """The event without the name of its decision, which is now sent in full before it."""
    if not isinstance(event, Start):
        event.decided = None
    return event
