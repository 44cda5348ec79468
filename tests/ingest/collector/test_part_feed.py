"""The part feed: each durable part is tapped before its shard is written, under its ordinal in that
shard."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from ingest.collector.collector import Collector
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from storage.errors import JournalFailed, JournalFull
from storage.experience.episode import Part
from tests.ingest.collector.test_recovery import POLICIES, play
from tests.ingest.simulated_collector import Fault, MemoryWriter, Simulation, numbered

Identity = tuple[str, int, int, str, int, bytes]


def identity(stream: str, part: Part) -> Identity:
    return stream, part.ordinal, part.episode_ordinal, part.episode_id, part.part, part.rewards


@dataclass
class Bucket:
    """A tap that keeps everything."""

    full: bool = False
    got: list[Identity] = field(default_factory=list)
    shards: list[tuple[str, int, int]] = field(default_factory=list)

    def offer(self, stream: str, canonical_json: str, parts: Sequence[Part]) -> None:
        self.got += [identity(stream, part) for part in parts]

    def written(self, stream: str, first: int, last: int) -> None:
        self.shards.append((stream, first, last))


def stored(writer: MemoryWriter) -> list[Identity]:
    return [
        identity(stream, part) for (stream, _, _), s in writer.shards.items() for part in s.parts
    ]


def history(fault: Fault) -> tuple[Simulation, Bucket]:
    bucket = Bucket()
    simulation = Simulation(POLICIES, fault, tap=bucket)
    asyncio.run(play(simulation))
    return simulation, bucket


@pytest.mark.parametrize(
    ("kind", "after"), [(JournalFailed, False), (JournalFailed, True), (JournalFull, False)]
)
def test_what_was_tapped_is_in_a_shard_under_the_same_ordinals(
    kind: type[Exception], after: bool
) -> None:
    """Whichever commit fails, a tapped part is never lost, renumbered or changed."""
    at, struck = 0, True
    while struck:
        at += 1
        fault = Fault(at if kind is JournalFailed else at + 1, kind, after)
        simulation, bucket = history(fault)
        assert sorted(set(bucket.got)) == sorted(stored(simulation.writer)), at
        assert set(bucket.shards) <= set(simulation.writer.shards)
        struck = fault.struck
    assert at > 15


def test_without_a_crash_each_part_is_tapped_once_and_each_shard_told() -> None:
    """Parts arrive in the order of their stream's ordinals."""
    simulation, bucket = history(Fault(0))
    for stream in {found[0] for found in bucket.got}:
        ordinals = [found[1] for found in bucket.got if found[0] == stream]
        assert ordinals == list(range(len(ordinals)))
    assert len(bucket.got) == len(stored(simulation.writer))
    assert sorted(bucket.shards) == sorted(simulation.writer.shards)


def test_a_part_is_held_back_until_its_row_is_on_disk() -> None:
    """The tap receives a part once its end may be acknowledged, not before."""

    async def script() -> None:
        bucket = Bucket()
        simulation = Simulation(POLICIES, tap=bucket)
        await simulation.begin()
        instance = await simulation.register()
        collector: Collector = simulation.collector
        batch = wire.Batch(instance=instance, events=numbered("one", 0, steps=1))
        _, row = collector.accept(batch)
        assert bucket.got == []
        await collector.journal.durable(row)
        assert [found[3] for found in bucket.got] == ["one"]
        await simulation.finish()

    asyncio.run(script())


def test_a_full_tap_refuses_events_and_nothing_else() -> None:
    """With a full tap, events get 429 `busy` and none is taken; the same batch is taken once there
    is space."""

    async def script() -> None:
        bucket = Bucket(full=True)
        simulation = Simulation(POLICIES, tap=bucket)
        await simulation.begin()
        batch = wire.Batch(events=[wire.Start(episode_id="one")])
        with pytest.raises(Refusal, match="the queue is full") as refused:
            simulation.collector.accept(batch)
        assert (refused.value.code, refused.value.status) == ("busy", 429)
        bucket.full = False
        assert simulation.collector.accept(batch)[0].accepted == 1
        await simulation.finish()

    asyncio.run(script())
