"""Random histories whose journal is restored from a backup, while their shards stay.

During a history its journal is backed up, and later replaced by the backup. Clients continue and
repeat their unanswered requests. At the end no step is in shards twice, every step acknowledged
before the backup is in them, ordinals are dense, the journal's records match the existing shards,
and its counts add up. A crash may happen anywhere, also in the start that detects the restore.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from random import Random

from ingest.collector.adoption import adopt, require_current
from ingest.collector.recovery import CARRY
from storage.errors import JournalBehind
from storage.journal.memory_journal import MemoryJournal
from tests.faults.scenario import Scenario, Trial, Verdict
from tests.faults.simulation import TURNS, History, quiet, stored_steps
from tests.faults.stepped_collector import Points, SteppedJournal, World
from tests.ingest.simulated_collector import MemoryShelf

CRASHES = 0.004  # at each point


class RestoreWorld(World):
    """A world whose starts refuse a restored journal; then the operator runs `adopt`."""

    restores = 0

    def find_journal(self) -> SteppedJournal:
        journal = super().find_journal()
        if not isinstance(journal, SteppedJournal):
            raise TypeError("expected a journal in memory")
        shelf = MemoryShelf(self.writer)
        try:
            require_current(journal, shelf.ends)
        except JournalBehind:
            received = 1_000 + int(self.now)
            adopt(
                journal,
                self.policies,
                shelf.ends,
                shelf.later,
                self.writer.write,
                received=received,
            )
            require_current(journal, shelf.ends)
            self.restores += 1
        return journal


class RestoredHistory(History):
    """A history with backups at `backups` moments, each of which is restored once."""

    world: RestoreWorld

    def __init__(self, seed: int, points: Points, times: int) -> None:
        super().__init__(seed, points, RestoreWorld, late=True)
        self._moments = sorted(Random(seed).sample(range(5, 2 * TURNS), 2 * times))
        self._shards = 0  # that existed at the backup
        self.safe: dict[int, float] = {}  # step -> its reward, acknowledged before the backup

    def run(self) -> None:
        backup: MemoryJournal | None = None
        for turn in range(2 * TURNS):
            if self._moments and turn >= self._moments[0] and self._has_changed(backup):
                self._moments.pop(0)
                backup = self._turn_back(backup)
            self.survive(self.turn)
        self.survive(self.end)

    def _has_changed(self, backup: MemoryJournal | None) -> bool:
        """Whether shards exist by now that the backup does not know."""
        return backup is None or len(self.world.writer.shards) > self._shards

    def _turn_back(self, backup: MemoryJournal | None) -> MemoryJournal | None:
        """Make a backup, or replace the journal by the existing one."""
        journal = self.world.journal
        if not isinstance(journal, MemoryJournal):
            raise TypeError("expected a journal in memory")
        if backup is None:
            self.safe = dict(self.ledger.expected)
            self._shards = len(self.world.writer.shards)
            return journal.crash()
        for client in self._clients:
            client.hang_up()
        self.ledger.expected = dict(self.safe)  # steps acknowledged since then may be lost
        self.world.journal = backup
        self._start()
        instances = self.world.collector.assembler.instances
        for client in self._clients:
            client.forget_unless(lambda name: instances.get(name) is not None)
        return None


def judge(history: RestoredHistory, verdict: Verdict, where: str) -> None:
    """The invariants of shards and journal that hold after any restore."""
    world = history.world
    verdict.require(not history.failures, "failed", f"{where}: {history.failures}")
    if history.over:
        return
    stored = stored_steps(world.writer.parts)
    doubled = [step for step, found in stored.items() if len(found) > 1]
    verdict.require(not doubled, "doubled", f"{where}: {doubled}")
    lost = [step for step in history.safe if step not in stored]
    verdict.require(not lost, "lost", f"{where}: {lost}")
    poor = [step for step, r in history.safe.items() if step in stored and min(stored[step]) < r]
    verdict.require(not poor, "wrong", f"{where}: {poor}")
    streams: dict[str, list[int]] = defaultdict(list)
    for (stream, _, _), shard in world.writer.shards.items():
        streams[stream] += [part.ordinal for part in shard.parts]
    dense = all(sorted(found) == list(range(len(found))) for found in streams.values())
    verdict.require(dense, "hole", f"{where}: {dict(streams)}")
    _judge_journal(world, verdict, where)
    verdict.count("acknowledged_before", len(history.safe))
    verdict.count("restores_noticed", world.restores)
    verdict.count("kept_back", world.collector.sealing.totals.restored)


def _judge_journal(world: RestoreWorld, verdict: Verdict, where: str) -> None:
    """Records are the shards, counts add up, and nothing of the history is left."""
    journal, collector = world.journal, world.collector
    records = {(record.stream, record.first, record.last) for record in journal.shards()}
    verdict.require(records == set(world.writer.shards), "records", f"{where}: {records}")
    steps, totals = sum(part.steps for part in world.writer.parts), collector.sealing.totals
    ended = sum(part.ended is not None for part in world.writer.parts)
    counted = (totals.steps, totals.rows, totals.parts) == (steps, steps, len(world.writer.parts))
    verdict.require(counted, "totals", f"{where}: {totals}, {steps} steps in shards")
    verdict.require(totals.episodes >= ended, "totals", f"{where}: {totals}, {ended} ended")
    left = (list(journal.replay()), journal.plans(), journal.state(CARRY))
    verdict.require(not any(left), "leaked", f"{where}: {left}")
    kept = (
        collector.assembler.episodes,
        collector.assembler.needed,
        collector.sealing.pending_bytes,
    )
    verdict.require(not any(kept), "leaked", f"{where}: {kept}")


def play(seed: int) -> RestoredHistory:
    """The restored history of a seed; every third one without any crash beside."""
    chance = Random(f"{seed} restore")
    crashes = {n for n in range(1, 900) if chance.random() < CRASHES * (seed % 3)}
    history = RestoredHistory(seed, Points(crashes, set()), 1 + seed % 2)
    history.run()
    return history


def run(trial: Trial) -> Verdict:
    verdict = Verdict(counts={"histories": 0})

    async def main() -> None:
        seed = trial.seed * 1_000_000
        while trial.goes_on(verdict.counts["histories"], verdict):
            seed += 1
            judge(play(seed), verdict, f"history {seed}")
            verdict.count("histories")

    with trial.planted(), quiet():
        asyncio.run(main())
    kept_back = verdict.counts.get("kept_back") or trial.is_caught(verdict)
    verdict.require(bool(kept_back), "idle", "no backup held what shards do")
    return verdict


SCENARIO = Scenario(
    name="restore",
    law="a journal that is put back to a backup gives no step to shards a second time",
    unit="histories",
    quick=2_000,
    long=12_000,
    planted=2_000,
    run=run,
)
