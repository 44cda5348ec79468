"""Crashes at every commit: each acknowledged step is in exactly one shard."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from ingest.collector.collector import Collector
from ingest.collector.recovery import CARRY, FINISHED, INSTANCE, recover
from ingest.episodes.sealed_parts import Limits
from ingest.protocol import messages as wire
from storage.declarations.declaration import PolicyDeclaration
from storage.errors import JournalFailed, JournalFull
from storage.experience.episode import Part
from storage.experience.part_columns import PartColumns, each_part
from storage.journal.sqlite_journal import SqliteJournal
from storage.shards.names import ShardInfo
from storage.shards.shard import ShardWriter, find_shard, read_shard
from storage.spaces.descriptors import parse_space
from tests.ingest.simulated_collector import (
    Fault,
    MemoryShard,
    MemoryWriter,
    Simulation,
    numbered,
)

DEFAULT = PolicyDeclaration(
    observation=parse_space("box:2"),
    action=parse_space("discrete:3"),
    part_steps=2,
    part_seconds=20.0,
    seal_seconds=1.0,
    episode_timeout=50.0,
)
OTHER = PolicyDeclaration(
    policy_id="other",
    observation=parse_space("box:2"),
    action=parse_space("multi_discrete:3"),
    seal_bytes=1,
)
POLICIES = {"default": DEFAULT, "other": OTHER}
STEPS = {"long": 9, "short": 1, "empty": 0, "slow": 3, "side": 1}


async def play(simulation: Simulation) -> None:
    """Log long, short and empty episodes of two streams, cut by size and by time, one abandoned."""
    await simulation.begin()
    instance = await simulation.register()
    long, slow = numbered("long", 0, steps=9), numbered("slow", 1, steps=3)
    await simulation.send(instance, long[:4])
    await simulation.send(instance, [*slow[:3], *numbered("empty", 2, steps=0)])
    await simulation.advance(1.5)
    await simulation.send(instance, [long[4], *numbered("short", 3, steps=1), *long[5:7]])
    side = numbered("side", 4, steps=1, policy_id="other")
    side[1].action = [2]  # type: ignore[union-attr]
    await simulation.send(instance, side)
    await simulation.idle()
    await simulation.advance(25.0)
    await simulation.advance(1.5)
    await simulation.send(instance, [*long[7:], slow[3]])
    while simulation.collector.assembler.episodes:  # a rebuilt state restarts its time-outs
        await simulation.advance(60.0)
    await simulation.finish()


def check(simulation: Simulation, steps: dict[str, int] = STEPS) -> None:
    """Check every invariant of recovery that is visible at the end of a history."""
    parts = simulation.writer.parts
    by_episode: dict[str, list[Part]] = defaultdict(list)
    for part in sorted(parts, key=lambda part: part.t0):
        by_episode[part.episode_id].append(part)
    rewards = {
        name: np.concatenate([np.frombuffer(part.rewards) for part in held]).tolist()
        for name, held in by_episode.items()
    }
    assert rewards == {name: list(range(count)) for name, count in steps.items() if count}
    by_stream: dict[str, list[int]] = defaultdict(list)
    for (stream, _, _), shard in simulation.writer.shards.items():
        by_stream[stream] += [part.ordinal for part in shard.parts]
    for ordinals in by_stream.values():
        assert sorted(ordinals) == list(range(len(ordinals)))
    for held in by_episode.values():
        assert [part.part for part in held] == list(range(len(held)))
        assert {part.episode_ordinal for part in held} == {held[0].ordinal}
        assert [part.ended is None for part in held] == [True] * (len(held) - 1) + [False]
    journal = simulation.journal
    assert list(journal.replay()) == []
    assert journal.plans() == []
    assert journal.state(CARRY) == {}
    written = {(s.stream, s.first, s.last) for s in journal.shards()}
    assert written == set(simulation.writer.shards)
    totals = simulation.collector.sealing.totals
    assert totals.steps == totals.rows == sum(part.steps for part in parts)
    assert (totals.parts, totals.shards) == (len(parts), len(written))
    assert (totals.episodes, totals.empty) == (len(steps), sum(not n for n in steps.values()))
    assert simulation.collector.sealing.pending_bytes == 0
    assert simulation.writer.conflicts == 0


def run(script: Callable[[Simulation], Awaitable[None]], simulation: Simulation) -> Simulation:
    async def main() -> None:
        await script(simulation)

    asyncio.run(main())
    return simulation


def test_a_history_without_a_fault_is_whole() -> None:
    """The script without faults, as a reference for the faulty runs."""
    simulation = run(play, Simulation(POLICIES))
    check(simulation)
    assert simulation.restarts == 0
    assert len(simulation.writer.shards) == 4


@pytest.mark.parametrize(
    ("kind", "after"), [(JournalFailed, False), (JournalFailed, True), (JournalFull, False)]
)
def test_a_fault_at_any_commit_loses_and_doubles_nothing(
    kind: type[Exception], after: bool
) -> None:
    """Each commit in turn (a row, a plan, a record) fails, just before or just after it takes
    effect.
    """
    at, struck, adopted = 0, True, 0
    while struck:
        at += 1
        fault = Fault(at if kind is JournalFailed else at + 1, kind, after)
        simulation = run(play, Simulation(POLICIES, fault))
        check(simulation)
        struck = fault.struck
        adopted += simulation.writer.adopted
    assert at > 15
    assert adopted > 0 or after  # shards were written, and their record was lost


def test_two_crashes_in_a_row_are_as_good_as_one() -> None:
    """The second crash is within the recovery from the first."""

    async def script(simulation: Simulation) -> None:
        await simulation.begin()
        instance = await simulation.register()
        events = numbered("e", 0, steps=9)
        for event in events:
            await simulation.send(instance, [event])
            await simulation.crash()
            simulation.now += 1.5
            simulation.collector.tick()
            await simulation.crash()
        await simulation.finish()

    simulation = run(script, Simulation(POLICIES))
    check(simulation, {"e": 9})
    assert simulation.restarts == 22


def test_an_open_episode_survives_a_change_of_its_policy_file() -> None:
    """An open episode keeps the spaces that it began with; new episodes use the new ones."""
    wider = PolicyDeclaration(observation=parse_space("box:3"), action=parse_space("discrete:3"))

    async def script(simulation: Simulation) -> None:
        await simulation.begin()
        instance = await simulation.register()
        old = numbered("old", 0, steps=4)
        await simulation.send(instance, old[:2])
        simulation.policies = {"default": wider}
        await simulation.crash()
        new = numbered("new", 1, steps=2)
        for event in new[1:3]:
            event.obs = [0.0, 1.0, 2.0]  # type: ignore[union-attr]
        reply = await simulation.send(instance, [*old[2:], *new])
        assert reply.refused == []
        await simulation.crash()
        await simulation.finish()

    simulation = run(script, Simulation({"default": DEFAULT}))
    check(simulation, {"old": 4, "new": 2})
    schemas = {part.episode_id: part.schema_id for part in simulation.writer.parts}
    assert schemas == {"old": DEFAULT.schema_id, "new": wider.schema_id}


def test_the_first_ordinal_of_an_episode_that_ended_meanwhile_is_kept() -> None:
    """Part 0 is recorded, the episode ends and the process dies before the rest is planned."""

    async def script(simulation: Simulation) -> None:
        await simulation.begin()
        instance = await simulation.register()
        await simulation.send(instance, numbered("first", 0, steps=1))
        events = numbered("e", 1, steps=5)
        await simulation.send(instance, events[:4])
        await simulation.advance(1.5)
        await simulation.send(instance, events[4:])
        await simulation.crash()
        await simulation.finish()

    simulation = run(script, Simulation(POLICIES))
    check(simulation, {"first": 1, "e": 5})
    ordinals = {p.episode_ordinal for p in simulation.writer.parts if p.episode_id == "e"}
    assert ordinals == {1}


def test_a_part_cut_by_time_is_made_again() -> None:
    """A shard recorded between the plan of a time cut and its shard must not drop the cut's row."""

    async def script(simulation: Simulation) -> None:
        await simulation.begin()
        instance = await simulation.register()
        events = numbered("e", 0, steps=2)
        await simulation.send(instance, events[:3])
        simulation.now = 25.0
        simulation.collector.tick()  # cuts e
        await simulation.send(instance, numbered("empty", 1, steps=0))
        simulation.writer.full = True
        simulation.now = 27.0
        simulation.collector.tick()  # plans the cut, records the empty episode
        async with asyncio.timeout(60):
            while simulation.collector.sealing.totals.empty == 0 or not simulation.journal.plans():
                await asyncio.sleep(0)
        await simulation.send(instance, [wire.End(episode_id="nobody", seq=0)])
        simulation.writer.full = False
        await simulation.crash()
        await simulation.send(instance, events[3:])
        await simulation.finish()

    check(run(script, Simulation(POLICIES)), {"e": 2, "empty": 0})


def test_a_rebuilt_state_does_not_abandon_its_open_episodes() -> None:
    """After a full disk late in a collector's life, the time-outs restart."""

    async def script(simulation: Simulation) -> None:
        await simulation.begin()
        instance = await simulation.register()
        events = numbered("e", 0, steps=2)
        await simulation.send(instance, events[:2])
        simulation.now = 49.0
        simulation.fault.at, simulation.fault.kind = simulation.fault.commits + 1, JournalFull
        await simulation.send(instance, events[2:3])
        assert simulation.collector.journal.rebuilds == 1
        await simulation.advance(10.0)
        await simulation.send(instance, events[3:])
        await simulation.finish()

    simulation = run(script, Simulation(POLICIES))
    check(simulation, {"e": 2})
    assert {part.ended for part in simulation.writer.parts} == {"terminated"}


def test_the_state_of_a_journal_is_bounded_by_its_limits() -> None:
    """Ended episodes and instances beyond their limits are forgotten, the oldest first; no state is
    kept per episode.
    """
    limits = Limits(finished=10, instances=3)

    async def script(simulation: Simulation) -> None:
        await simulation.begin()
        for number in range(60):
            instance = await simulation.register()
            await simulation.send(instance, numbered(f"e{number}", 0, steps=number % 4))
            await simulation.advance(1.5)
            found = recover(simulation.journal, POLICIES, limits)
            assert found.lost == {}
            latest = range(max(0, number - 9), number + 1)
            assert list(found.assembler.finished) == [f"e{n}" for n in latest]
            if number % 25 == 24:
                await simulation.crash()
        sealing = simulation.collector.sealing
        assert sealing._episode_ordinals == {}
        assert simulation.collector.assembler.needed == {}
        assert len(simulation.collector.assembler.finished) == 10
        assert len(simulation.collector.assembler.done.ranges()) == 1
        assert len(simulation.collector.assembler.instances) <= 4
        assert len(simulation.journal.state(FINISHED)) <= 11
        assert len(simulation.journal.state(INSTANCE)) <= 4
        await simulation.finish()

    check(run(script, Simulation(POLICIES, limits=limits)), {f"e{n}": n % 4 for n in range(60)})


def test_damage_in_the_journal_never_stops_a_start() -> None:
    """An episode with a lost row is closed as broken at its last good step; others are whole."""

    async def script(simulation: Simulation) -> None:
        await simulation.begin()
        instance = await simulation.register()
        late = wire.LogReturns(episode_id="torn", seq=3, reward=1.0)
        torn, whole = numbered("torn", 0, steps=2), numbered("whole", 1, steps=2)
        await simulation.send(instance, torn[:2])
        lost = simulation.journal.last_row + 1
        await simulation.send(instance, torn[2:3])
        await simulation.send(instance, [*whole[:2], late])
        simulation.journal.commit(drop_rows=[lost])
        await simulation.crash()
        reply = await simulation.send(instance, [torn[3], *whole[2:]])
        assert [item.error["code"] for item in reply.refused] == ["broken"]
        await simulation.finish()

    simulation = run(script, Simulation({"default": OTHER_RULES}))
    ended = {part.episode_id: (part.ended, part.steps) for part in simulation.writer.parts}
    assert ended == {"torn": ("broken", 1), "whole": ("terminated", 2)}


class LongerShards(MemoryWriter):
    """Finds each shard as written before the journal lost one of its rows."""

    def write(
        self, stream: str, canonical_json: str, parts: Sequence[Part | PartColumns]
    ) -> MemoryShard:
        shard = super().write(stream, canonical_json, parts)
        shard.rows += 1
        return shard


def test_a_shard_from_before_the_damage_counts(caplog: pytest.LogCaptureFixture) -> None:
    """A start succeeds whether the remaining rows give a shorter or a longer shard."""

    async def script(simulation: Simulation) -> None:
        await simulation.begin()
        instance = await simulation.register()
        await simulation.send(instance, numbered("e", 0, steps=2))
        await simulation.advance(60.0)
        assert [record.rows for record in simulation.journal.shards()] == [3]
        assert simulation.collector.journal.failure is None
        await simulation.finish()

    run(script, Simulation({"default": OTHER_RULES}, writer=LongerShards()))
    assert "is recorded with 3 rows, although the journal still has only 2" in caplog.text


OTHER_RULES = PolicyDeclaration(observation=DEFAULT.observation, action=DEFAULT.action)


class InProcessWriter:
    """The real ShardWriter without its process; it dies after its `at`-th write."""

    def __init__(self, directory: Path, at: int) -> None:
        self.directory, self._left = directory, at

    def start(self) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...

    def write(
        self, stream: str, canonical_json: str, parts: Sequence[Part | PartColumns]
    ) -> ShardInfo:
        parts = list(each_part(parts))
        found = find_shard(self.directory, stream, parts[0].ordinal, parts[-1].ordinal)
        shard = found or ShardWriter(self.directory).write(stream, canonical_json, parts)
        self._left -= 1
        if self._left == 0:
            raise OSError("the writer was killed")
        return shard


def test_real_files_hold_each_step_once(tmp_path: Path) -> None:
    """SQLite and Parquet, a writer that dies after its file is in place, and two restarts."""

    async def life(events: list[wire.Event], instance: str | None, at: int) -> str:
        journal = SqliteJournal.open(tmp_path / "journal")
        writer = InProcessWriter(tmp_path / "shards", at)
        collector = Collector(journal, writer, {"default": DEFAULT})
        collector.start()
        if instance is None:
            instance = collector.register(wire.Register())[0].instance
        reply, row = collector.accept(wire.Batch(instance=instance, events=events))
        assert reply.refused == []
        await collector.journal.durable(row)
        await collector.drain()
        return instance

    events = [*numbered("a", 0, steps=7), *numbered("b", 1, steps=1), *numbered("c", 2, steps=3)]
    instance = asyncio.run(life(events[:5], None, at=1))
    asyncio.run(life(events[5:11], instance, at=1))
    asyncio.run(life(events[11:], instance, at=9))
    tables = [read_shard(path) for path in sorted(tmp_path.glob("shards/*/*.parquet"))]
    rows = [row for table in tables for row in table.to_pylist()]
    found = sorted((row["eps_id"], row["t"], row["rewards"]) for row in rows)
    assert found == [
        (name, t, float(t)) for name, steps in (("a", 7), ("b", 1), ("c", 3)) for t in range(steps)
    ]
    ordinals = sorted({row["ordinal"] for row in rows})
    assert ordinals == list(range(len(ordinals)))
