"""Counters of a collector, and the steps that its clients dropped."""

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

_INSTANCES = 10_000  # client instances whose totals are remembered


class CollectorStats(msgspec.Struct):
    """Counts since this collector started, except `steps`: the total of the journal."""

    accepted: int = 0
    duplicates: int = 0
    unsampled: int = 0  # rewards for episodes that their client does not sample
    refused: int = 0
    broken: int = 0
    refused_by: Counter[str] = msgspec.field(default_factory=Counter)  # code -> events
    ended: Counter[str] = msgspec.field(default_factory=Counter)  # how -> episodes


class DroppedByClients:
    """Steps and episodes that clients dropped, from the totals that client instances report."""

    def __init__(self) -> None:
        self.episodes = 0
        self.steps = 0
        self._totals: OrderedDict[str, Dropped] = OrderedDict()

    def note(self, instance: str, totals: Dropped) -> None:
        """Add the increase of an instance's totals; a repeated report adds nothing."""
        known = self._totals.pop(instance, Dropped())
        self.episodes += max(0, totals.episodes - known.episodes)
        self.steps += max(0, totals.steps - known.steps)
        self._totals[instance] = totals
        if len(self._totals) > _INSTANCES:
            self._totals.popitem(last=False)

    def by_instance(self) -> dict[str, Lost]:
        """The totals of the latest instances that dropped anything."""
        totals = self._totals.items()
        return {name: Lost(one.episodes, one.steps) for name, one in totals if one != Dropped()}

    def restore(self, totals: Mapping[str, Lost]) -> None:
        """Restore the totals from before a restart."""
        for name, one in totals.items():
            self.note(name, Dropped(episodes=one.episodes, steps=one.steps))


class DroppedRecord:
    """Writes the file with the numbers of dropped steps, which judgements read.

    A thread writes it, because a file system that hangs must not block the event loop; nothing
    waits for the thread.
    """

    def __init__(self, dropped: DroppedByClients, root: Path, name: Callable[[], str]) -> None:
        self._dropped, self._root, self._name = dropped, root, name
        self._changes: queue.SimpleQueue[dict[str, Lost] | None] = queue.SimpleQueue()

    async def follow(self) -> None:
        """Have changes written until cancelled."""
        self._dropped.restore(read_dropped(self._root, self._name()))
        threading.Thread(target=self._write, name="headrace-dropped", daemon=True).start()
        last = self._dropped.by_instance()
        try:
            while True:
                await asyncio.sleep(_WRITE_SECONDS)
                if (now := self._dropped.by_instance()) != last:
                    last = now
                    self._changes.put(now)
        finally:
            self._changes.put(None)

    def _write(self) -> None:
        while (totals := self._changes.get()) is not None:
            try:
                say_dropped(self._root, self._name(), totals)
            except OSError as error:
                log.warning("the number of steps that clients dropped cannot be written: %s", error)
