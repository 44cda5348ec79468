"""Counters of a collector, the steps that its clients dropped, and rewards that came late."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from ingest.episodes.assembler import EpisodeAssembler
from ingest.protocol.agent_names import Name
from ingest.protocol.messages import Dropped
from storage.declarations.dropped_steps import Lost, read_dropped, say_dropped
from storage.declarations.late_rewards import LateReward, delay_of, read_late, say_late
from storage.experience.step_columns import UNKNOWN_VERSION
from storage.spaces.descriptors import Discrete

log = logging.getLogger("headrace.collector")

_WRITE_SECONDS = 1.0

_INSTANCES = 10_000  # client instances whose totals are remembered
_REWARDS = 10_000  # late rewards that are remembered, to count a retry once
_KINDS = 10_000  # of late rewards, beyond which actions are no longer told apart


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

    def totals(self) -> Mapping[str, Lost]:
        """The totals of the latest instances that dropped anything."""
        totals = self._totals.items()
        return {name: Lost(one.episodes, one.steps) for name, one in totals if one != Dropped()}

    def restore(self, totals: Mapping[str, Lost]) -> None:
        """Restore the totals from before a restart."""
        for name, one in totals.items():
            self.note(name, Dropped(episodes=one.episodes, steps=one.steps))


class LateRewards:
    """Rewards that were refused because their step's window had closed."""

    def __init__(self) -> None:
        self._counts: Counter[LateReward] = Counter()
        self._latest: OrderedDict[tuple[Any, ...], None] = OrderedDict()

    def note(self, reward: tuple[Any, ...], kind: LateReward) -> None:
        """Count a reward, unless it is among the latest ones already: a retry."""
        known = reward in self._latest
        self._latest[reward] = None
        self._latest.move_to_end(reward)
        if len(self._latest) > _REWARDS:
            self._latest.popitem(last=False)
        if not known:
            self._counts[kind if len(self._counts) < _KINDS else kind._replace(action=None)] += 1

    def totals(self) -> Mapping[LateReward, int]:
        """Kind -> number."""
        return dict(self._counts)

    def restore(self, totals: Mapping[LateReward, int]) -> None:
        """Add the numbers from before a restart."""
        self._counts.update(totals)


def late_reward(
    assembler: EpisodeAssembler, name: Name, step: int | None, received: int
) -> LateReward | None:
    """The kind of a reward that came too late; None if its episode is not remembered."""
    episode = assembler.episodes.get(name) or assembler.closing.get(name)
    if episode is None:
        ended = assembler.finished.get(name)
        if ended is None:
            return None
        seconds = (received - ended.acted) / 1e6 if ended.acted else None
        return LateReward(ended.policy_id, ended.version, delay_of(seconds), None)
    policy_id = episode.started.policy_id
    at = -1 if step is None else step - episode.t0
    if not 0 <= at < len(episode.received_ts):
        return LateReward(policy_id, UNKNOWN_VERSION, delay_of(None), None)
    seconds = (received - episode.received_ts[at]) / 1e6
    action = None
    if isinstance(episode.rules.action.space, Discrete):
        action = int(np.frombuffer(episode.actions, "<i8", 1, 8 * at)[0])
    return LateReward(policy_id, episode.policy_version[at], delay_of(seconds), action)


Totals = TypeVar("Totals")


class Counts(Protocol[Totals]):
    """Counts that outlive the collector."""

    def totals(self) -> Totals: ...
    def restore(self, totals: Totals, /) -> None: ...


@dataclass(frozen=True)
class CountsFile(Generic[Totals]):
    """The file of a root in which a collector's counts are."""

    what: str
    read: Callable[[Path, str], Totals]
    say: Callable[[Path, str, Totals], None]


DROPPED: CountsFile[Mapping[str, Lost]] = CountsFile(
    "the number of steps that clients dropped", read_dropped, say_dropped
)
LATE: CountsFile[Mapping[LateReward, int]] = CountsFile(
    "the number of late rewards", read_late, say_late
)


class CountsRecord(Generic[Totals]):
    """Writes the file with a collector's counts, which judgements read.

    A thread writes it, because a file system that hangs must not block the event loop; nothing
    waits for the thread.
    """

    def __init__(
        self, counts: Counts[Totals], file: CountsFile[Totals], root: Path, name: Callable[[], str]
    ) -> None:
        self._counts, self._file, self._root, self._name = counts, file, root, name
        self._changes: queue.SimpleQueue[Totals | None] = queue.SimpleQueue()

    async def follow(self) -> None:
        """Have changes written until cancelled."""
        self._counts.restore(self._file.read(self._root, self._name()))
        threading.Thread(target=self._write, name="headrace-counts", daemon=True).start()
        last = self._counts.totals()
        try:
            while True:
                await asyncio.sleep(_WRITE_SECONDS)
                if (now := self._counts.totals()) != last:
                    last = now
                    self._changes.put(now)
        finally:
            self._changes.put(None)

    def _write(self) -> None:
        while (totals := self._changes.get()) is not None:
            try:
                self._file.say(self._root, self._name(), totals)
            except OSError as error:
                log.warning("%s cannot be written: %s", self._file.what, error)
