"""Events that a remote client keeps after a reply to `get_action`, until they are durable.

A collector replies before its disk has the events. If it is killed then, it loses the decision and
the events of the request. They stay here until the collector says that they are durable; lost ones
are taken out and sent again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from copy import copy
from typing import TypeAlias, TypeVar

from ingest.protocol.agent_names import Name, name_of
from ingest.protocol.messages import Event, GetAction, LogReturns, Start

LOST = frozenset({"gap", "decision_unknown", "not_found"})
"""The codes of a collector that has lost events because it was killed."""


def seq_of(event: Event) -> int:
    """An event's sequence number; -1 for a reward without one."""
    if isinstance(event, Start):
        return 0
    return -1 if event.seq is None else event.seq


Key: TypeAlias = int | tuple[int | None, str | None]


def _key(event: Event) -> Key:
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
        self._events: dict[Name, dict[Key, Event]] = {}

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, list(self._events.values())))

    def __bool__(self) -> bool:
        return bool(self._events)

    def keep(self, name: Name, events: Iterable[Event]) -> None:
        """Add events of an episode; one with a known number replaces the earlier one."""
        with self._lock:
            known = self._events.setdefault(name, {})
            for event in events:
                key = _key(event)
                known.pop(key, None)  # it is the last one now
                known[key] = event

    def durable(self, name: Name, seq: int) -> list[Event]:
        """Drop and return an episode's events up to `seq`, which are on disk.

        A reward without a number is on disk if a later number is.
        """
        with self._lock:
            known = self._events.get(name, {})
            gone: list[Key] = []
            passed: list[Key] = []  # rewards without a number since the last event that is on disk
            for key in known:
                if not isinstance(key, int):
                    passed.append(key)
                elif key <= seq:
                    gone += [*passed, key]
                    passed = []
            return self._drop(name, gone)

    def delivered(self, event: Event) -> list[Event]:
        """Drop and return the events that are on disk now that `event` is.

        These are the event itself and those of `durable` for its number.
        """
        name, key = name_of(event), _key(event)
        if isinstance(key, int):
            return self.durable(name, key)
        with self._lock:
            return self._drop(name, [key] if key in self._events.get(name, {}) else [])

    def _drop(self, name: Name, keys: Iterable[Key]) -> list[Event]:
        known = self._events.get(name, {})
        gone = [known.pop(key) for key in keys]
        if not known:
            self._events.pop(name, None)
        return gone

    def drop(self, name: Name) -> None:
        """Forget an episode that the collector has refused for good."""
        with self._lock:
            self._events.pop(name, None)

    def take(self, name: Name, seq: int) -> list[Event]:
        """Take out all events of an episode, because the collector lacks event `seq`.

        Events before `seq` are included, because a decision may have been drawn again without being
        reported as lost. Empty if `seq` itself is not kept: then the collector lacks an event that
        was durable.
        """
        with self._lock:
            if seq not in self._events.get(name, {}):
                return []
            events = self._events.pop(name)
        return [undecided(event) for event in events.values()]

    def copies(self) -> list[Event]:
        """Copies of all events, to have them acknowledged; the originals stay until then."""
        with self._lock:
            events = [event for kept in list(self._events.values()) for event in kept.values()]
        return [undecided(copy(event)) for event in events]


E = TypeVar("E", Event, GetAction)


def undecided(event: E) -> E:
    """The event without the name of its decision, which is now sent in full before it."""
    if not isinstance(event, Start):
        event.decided = None
    return event
