"""Long batches in slices: one reply for all slices, whatever happens to each."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from ingest.access.tokens import LOCAL
from ingest.collector.collector import Collector
from ingest.collector.slices import SLICE_BYTES, take
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from storage.errors import JournalFull
from storage.journal.memory_journal import MemoryJournal
from tests.ingest.collector.test_collector import GatedJournal, registered, run, running
from tests.ingest.simulated_collector import numbered

LONG = 4 * SLICE_BYTES
"""The body size given for the batches of these tests, which makes four slices of each."""


class SmallDisk(MemoryJournal):
    """Accepts `room` more groups of rows; then its disk is full until there is space again."""

    def __init__(self) -> None:
        super().__init__()
        self.room = 10**6
        self.committed, self.failed = threading.Event(), threading.Event()

    def commit(self, rows: Sequence[tuple[int, bytes]] = (), **change: Any) -> None:
        if rows and not self.room:
            self.room = 10**6
            self.failed.set()
            raise JournalFull("no space")
        super().commit(rows, **change)
        if rows:
            self.room -= 1
            self.committed.set()


def arrived(instance: str, name: str, start: int, steps: int) -> wire.Batch:
    """An episode as it arrives over the wire."""
    batch = wire.Batch(instance=instance, events=numbered(name, start, steps=steps))
    return wire.decode(wire.encode(batch, wire.MSGPACK), wire.MSGPACK, wire.Batch)


async def resumed(collector: Collector) -> None:
    """Wait until events are accepted again after a full disk."""
    while True:
        try:
            collector.accept(wire.Batch(events=[]))
            return
        except Refusal:
            await asyncio.sleep(0.01)


def test_a_refusal_names_its_place_in_the_whole_batch() -> None:
    """Slices are invisible to the caller: indices and paths are those of the batch."""

    async def body() -> None:
        async with running(MemoryJournal()) as collector:
            long = arrived(await registered(collector), "e", 0, 10)
            stray = wire.LogAction(episode_id="none", seq=9, obs=[0.0, 0.0], action=0)
            long.events.insert(9, stray)
            reply = await take(collector, long, LONG, LOCAL)
            assert collector.journal.durable_row >= 5  # the instance's row, and four slices
            (refused,) = reply.refused
            assert (refused.index, refused.error["code"]) == (9, "not_found")
            assert refused.error["path"].startswith("$.events[9]")
            again = await take(collector, long, LONG, LOCAL)
            assert (reply.accepted, reply.duplicates) == (12, 0)
            assert (again.accepted, again.duplicates, again.refused) == (0, 12, reply.refused)

    run(body)


def test_others_have_their_turn_between_slices() -> None:
    """A long batch does not block the loop for all of its time."""

    async def body() -> None:
        async with running(MemoryJournal()) as collector:
            instance = await registered(collector)
            long, rows = arrived(instance, "e", 0, 10), list[int]()

            async def other() -> None:
                rows.append(collector.accept(arrived(instance, "f", 1, 1))[1])

            await asyncio.gather(take(collector, long, LONG, LOCAL), other())
            assert rows[0] < collector.journal.submitted_row

    run(body)


def copied(batch: wire.Batch) -> wire.Batch:
    """A copy to be taken, as its events are removed once they are accepted."""
    return msgspec.structs.replace(batch, events=list(batch.events))


def test_accepted_events_are_not_kept_in_memory_for_the_disk() -> None:
    """While a request waits for the disk, its decoded events are gone, unless one was refused: the
    share that was refused is counted afterwards."""

    async def body() -> None:
        journal = GatedJournal()
        async with running(journal) as collector:
            instance = await registered(collector)
            for number, size in enumerate((LONG, 1)):
                whole = arrived(instance, f"e{number}", number, 10)
                journal.gate.clear()
                waiting = asyncio.create_task(take(collector, whole, size, LOCAL))
                while whole.events:
                    assert not waiting.done()
                    await asyncio.sleep(0)
                journal.gate.set()
                assert (await waiting).accepted == 12
            bad = arrived(instance, "e0", 2, 1)  # its episode has ended
            assert len((await take(collector, bad, 1, LOCAL)).refused) == 1
            assert len(bad.events) == 3

    run(body)


def test_what_follows_a_slice_that_was_lost_is_refused_and_comes_again() -> None:
    """The first slice is durable; the disk is full for the others, and each of their events is
    refused. The same batch sent again counts every event once."""

    async def body() -> None:
        journal, slices = SmallDisk(), list[int]()

        def wall() -> int:
            """Called once for each slice: the second one is accepted when the first is on disk."""
            slices.append(1)
            if journal.room <= 1 and len(slices) > 1:
                assert journal.committed.wait(60)
            return 1

        async with running(journal, wall=wall) as collector:
            long = arrived(await registered(collector), "e", 0, 10)
            journal.room = 1
            journal.committed.clear()
            slices.clear()
            reply = await take(collector, copied(long), LONG, LOCAL)
            assert reply.accepted == 3
            assert [one.index for one in reply.refused] == list(range(3, len(long.events)))
            assert {one.error["code"] for one in reply.refused} == {"disk_full"}
            await resumed(collector)
            again = await take(collector, copied(long), LONG, LOCAL)
            assert (again.duplicates, again.accepted) == (3, len(long.events) - 3)

    run(body)


def test_a_batch_of_which_nothing_was_taken_is_refused_as_a_whole() -> None:
    """The answer is that of a short batch: no event of it is kept."""

    async def body() -> None:
        journal = SmallDisk()
        async with running(journal) as collector:
            long = arrived(await registered(collector), "e", 0, 10)
            journal.room = 0
            with pytest.raises(Refusal, match="disk is full"):
                await take(collector, copied(long), LONG, LOCAL)
            await resumed(collector)
            assert (await take(collector, copied(long), LONG, LOCAL)).accepted == len(long.events)

    run(body)


def test_no_slice_is_taken_after_a_rebuild_that_came_between() -> None:
    """This includes a rebuild that begins between two slices and waits for nothing: the third slice
    would leave a gap after the two that were discarded, and break the episode."""

    async def body() -> None:
        journal, slices = SmallDisk(), list[int]()

        def wall() -> int:
            """Called once for each slice: the second one is accepted when the first has failed."""
            slices.append(1)
            if len(slices) > 1 and not journal.room:
                assert journal.failed.wait(60)
            return 1

        async with running(journal, wall=wall, retry_seconds=0.0) as collector:
            long = arrived(await registered(collector), "e", 0, 10)
            journal.room = 0
            slices.clear()
            with pytest.raises(Refusal, match="disk is full"):
                await take(collector, copied(long), LONG, LOCAL)
            await resumed(collector)
            assert (await take(collector, copied(long), LONG, LOCAL)).accepted == len(long.events)

    run(body)
