"""What a remote client keeps behind the replies to `get_action`, which run ahead of the disk.

A reply may be lost with the collector's memory, and all that travelled with its request. Events and
decisions stay here until the collector says that they are durable; what it has lost is taken out
and sent again.
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
"""What a collector answers that does not know events it had before it was killed."""


def seq_of(event: Event) -> int:
    """An event's place in its episode; -1 for a reward outside the sequence."""
    if isinstance(event, Start):
        return 0
    return -1 if event.seq is None else event.seq


def _key(event: Event) -> int | tuple[int | None, str | None]:
    """What makes two events one: the number, or the step and the name of a reward without one."""
    if isinstance(event, LogReturns) and event.seq is None:
        return event.step, event.reward_id
    return seq_of(event)


class Kept:
    """Events of each episode, or track, in order. Every method may be called from any thread."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing kept, with a fresh lock: how a forked child begins."""
        self._lock = threading.RLock()  # a signal handler may call in the middle of a call
        self._events: dict[Name, list[Event]] = {}
        self._mixed: set[Name] = set()  # whose events do not ascend by number

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, list(self._events.values())))

    def __bool__(self) -> bool:
        return bool(self._events)

    def keep(self, name: Name, events: Iterable[Event]) -> None:
        """Add events of an episode behind those that are kept of it; a number again replaces."""
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
        """Drop an episode's events up to `seq`, which are on disk, and answer them.

        A reward without a number is on disk when a number behind it is.
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
        """Drop what is on disk now that `event` is: itself, if it is kept, and what `durable`
        says of its number."""
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
        """Forget an episode: the collector has refused it for good."""
        with self._lock:
            self._forget(name)

    def _forget(self, name: Name) -> None:
        self._events.pop(name, None)
        self._mixed.discard(name)

    def take(self, name: Name, seq: int) -> list[Event]:
        """Take out all of an episode, to send it again: the collector misses event `seq`.

        What lies before `seq` too: a decision may have been drawn anew, and not be known as lost.
        Empty when `seq` itself is not kept: then the collector misses what was durable once.
        """
        with self._lock:
            events = self._events.get(name, [])
            if seq not in map(seq_of, events):
                return []
            self._forget(name)
        return [undecided(event) for event in events]

    def copies(self) -> list[Event]:
        """Everything, to have it acknowledged: it stays here until it is."""
        with self._lock:
            events = [event for kept in list(self._events.values()) for event in kept]
        return [undecided(copy(event)) for event in events]


def _ascend(events: list[Event]) -> bool:
    """Whether all have numbers, each a higher one than the one before."""
    numbers = [-1, *map(seq_of, events)]
    return all(a < b for a, b in pairwise(numbers))


E = TypeVar("E", Event, GetAction)


def undecided(event: E) -> E:
    """The event without the name of its decision, which now goes before it in full."""
    if not isinstance(event, Start):
        event.decided = None
    return event
