"""What a collector has done since it started."""

from __future__ import annotations

from collections import Counter, OrderedDict

import msgspec

from ingest.protocol.messages import Dropped

_INSTANCES = 10_000  # of so many it is known what they have told


class CollectorStats(msgspec.Struct):
    """Counts since this collector started; `steps` is over the journal's whole life."""

    accepted: int = 0
    duplicates: int = 0
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
