"""What a collector has done since it started."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ingest.protocol.messages import Dropped
from storage.declarations.dropped_steps import Lost, read_dropped, say_dropped

log = logging.getLogger("headrace.collector")

_WRITE_SECONDS = 1.0

_INSTANCES = 10_000  # of so many it is known what they have told


class CollectorStats(msgspec.Struct):
    """Counts since this collector started; `steps` is over the journal's whole life."""

    accepted: int = 0
    duplicates: int = 0
    unsampled: int = 0  # rewards for episodes that their client left out of its sample
    refused: int = 0
    broken: int = 0
    abandoned: int = 0
    rebuilt: int = 0
    refused_by: Counter[str] = msgspec.field(default_factory=Counter)  # code -> events
    ended: Counter[str] = msgspec.field(default_factory=Counter)  # how -> episodes


class DroppedByClients:
    """What clients had no room for and did not log, as they tell it: totals of an instance."""

    def __init__(self) -> None:
        self.episodes = 0
        self.steps = 0
        self._told: OrderedDict[str, Dropped] = OrderedDict()

    def note(self, instance: str, told: Dropped) -> None:
        """Add what is new of an instance's totals; the same again adds nothing."""
        known = self._told.pop(instance, Dropped())
        self.episodes += max(0, told.episodes - known.episodes)
        self.steps += max(0, told.steps - known.steps)
        self._told[instance] = told
        if len(self._told) > _INSTANCES:
            self._told.popitem(last=False)

    def by_instance(self) -> dict[str, Lost]:
        """Of the last instances that dropped anything."""
        told = self._told.items()
        return {name: Lost(one.episodes, one.steps) for name, one in told if one != Dropped()}

    def restore(self, told: Mapping[str, Lost]) -> None:
        """Take up what was known before a restart."""
        for name, one in told.items():
            self.note(name, Dropped(episodes=one.episodes, steps=one.steps))


class DroppedRecord:
    """Keeps the file of what clients dropped, by which a judge knows how much is missing.

    A root that does not answer must not stop the event loop: a thread writes, and nobody waits
    for it.
    """

    def __init__(self, dropped: DroppedByClients, root: Path, name: Callable[[], str]) -> None:
        self._dropped, self._root, self._name = dropped, root, name
        self._changes: queue.SimpleQueue[dict[str, Lost] | None] = queue.SimpleQueue()

    async def follow(self) -> None:
        """Note what changes, until cancelled."""
        self._dropped.restore(read_dropped(self._root, self._name()))
        threading.Thread(target=self._write, name="headrace-dropped", daemon=True).start()
        said = self._dropped.by_instance()
        try:
            while True:
                await asyncio.sleep(_WRITE_SECONDS)
                if (now := self._dropped.by_instance()) != said:
                    said = now
                    self._changes.put(now)
        finally:
            self._changes.put(None)

    def _write(self) -> None:
        while (told := self._changes.get()) is not None:
            try:
                say_dropped(self._root, self._name(), told)
            except OSError as error:
                log.warning("what clients dropped cannot be noted: %s", error)
