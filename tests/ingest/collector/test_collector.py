"""The collector without HTTP: acknowledgements, back-pressure, faults, draining.

Also of `ingest.collector.sealing`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from ingest.collector.collector import CHECK_TOGETHER, Collector
from ingest.collector.journal_report import ledger
from ingest.protocol import messages as wire
from ingest.protocol.errors import CollectorFailed, Refusal
from storage.declarations.declaration import PolicyDeclaration
from storage.errors import JournalFailed, JournalFull
from storage.journal.memory_journal import MemoryJournal
from storage.spaces.codec import Codec
from storage.spaces.descriptors import SpaceError, parse_space
from tests.ingest.simulated_collector import MemoryWriter, numbered

DEFAULT = PolicyDeclaration(
    observation=parse_space("box:2"), action=parse_space("discrete:3"), seal_seconds=0.05
)


class GatedJournal(MemoryJournal):
    """A journal whose commits of rows wait for a gate, and may fail after it. Counts
    transactions."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.errors: list[Exception] = []
        self.groups: list[int] = []

    def commit(self, rows: Sequence[tuple[int, bytes]] = (), **change: Any) -> None:
        if rows:
            self.entered.set()
            self.gate.wait(60)
            if self.errors:
                raise self.errors.pop(0)
            self.groups.append(len(rows))
        super().commit(rows, **change)


@asynccontextmanager
async def running(
    journal: MemoryJournal,
    writer: MemoryWriter | None = None,
    policy: PolicyDeclaration = DEFAULT,
    **given: Any,
) -> AsyncIterator[Collector]:
    given = {"retry_seconds": 0.01, **given}
    collector = Collector(journal, writer or MemoryWriter(), {"default": policy}, **given)
    collector.start()
    try:
        yield collector
    finally:
        if not collector.draining:
            await collector.drain()


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            await body()

    asyncio.run(main())


async def registered(collector: Collector) -> str:
    reply, row = collector.register(wire.Register())
    await collector.journal.durable(row)
    return reply.instance


async def closed(event: threading.Event) -> None:
    """Wait until a thread reaches the gate."""
    assert await asyncio.to_thread(event.wait, 10.0)


async def turns() -> None:
    """Let the loop do what a thread that waits at the gate has notified it of."""
    for _ in range(10):
        await asyncio.sleep(0)


def batch(instance: str, name: str, start: int, steps: int = 1) -> wire.Batch:
    return wire.Batch(instance=instance, events=numbered(name, start, steps=steps))


def test_a_large_batch_is_checked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of a large batch are checked together, and not by the check of single events."""

    def one_by_one(*_: object, **__: object) -> bytes:
        raise SpaceError("checked alone")

    def logged(name: str, start: int, steps: int) -> list[wire.Event]:
        obs, action = bytes(8), bytes(8)
        return [
            wire.Start(episode_id=name, start=start),
            *(
                wire.LogAction(episode_id=name, obs=obs, action=action, seq=1 + t)
                for t in range(steps)
            ),
        ]

    async def body() -> None:
        async with running(MemoryJournal()) as collector:
            instance = await registered(collector)
            monkeypatch.setattr(Codec, "from_wire", one_by_one)
            replies = [
                collector.accept(wire.Batch(instance=instance, events=logged(f"{n}", at, n)))[0]
                for at, n in enumerate((CHECK_TOGETHER - 1, 1))
            ]
            assert [len(reply.refused) for reply in replies] == [0, 1]

    run(body)


def test_nothing_is_acknowledged_before_its_commit() -> None:
    """No request is answered during a sync; requests that arrive meanwhile share the next one."""

    async def body() -> None:
        journal = GatedJournal()
        async with running(journal) as collector:
            instance = await registered(collector)
            journal.gate.clear()
            journal.entered.clear()
            rows = [collector.accept(batch(instance, "e0", 0))[1]]
            await closed(journal.entered)
            rows += [collector.accept(batch(instance, f"e{n}", n))[1] for n in range(1, 20)]
            waits = [asyncio.ensure_future(collector.journal.durable(row)) for row in rows]
            await turns()
            assert not any(wait.done() for wait in waits)
            assert len(list(journal.replay())) == 1
            journal.gate.set()
            await asyncio.gather(*waits)
            assert journal.groups[-2:] == [1, 19]

    run(body)


def test_a_retry_waits_for_what_it_repeats() -> None:
    """A repeated batch is acknowledged when the first one is durable, not before."""

    async def body() -> None:
        journal = GatedJournal()
        async with running(journal) as collector:
            instance = await registered(collector)
            journal.gate.clear()
            journal.entered.clear()
            collector.accept(batch(instance, "e", 0))
            await closed(journal.entered)
            reply, row = collector.accept(batch(instance, "e", 0))
            assert (reply.accepted, reply.duplicates) == (0, 3)
            wait = asyncio.ensure_future(collector.journal.durable(row))
            await turns()
            assert not wait.done()
            journal.gate.set()
            await wait

    run(body)


def test_a_full_disk_refuses_rolls_back_and_resumes() -> None:
    """All that was not durable is refused with 507; the state is reloaded from the journal, and the
    collector goes on.
    """

    async def body() -> None:
        journal = GatedJournal()
        async with running(journal) as collector:
            instance = await registered(collector)
            await collector.journal.durable(collector.accept(batch(instance, "kept", 0, 2))[1])
            journal.gate.clear()
            journal.errors = [JournalFull("no space")]
            rows = [collector.accept(batch(instance, f"lost{n}", n))[1] for n in (1, 2)]
            waits = [asyncio.ensure_future(collector.journal.durable(row)) for row in rows]
            await asyncio.sleep(0)
            journal.gate.set()
            answers = await asyncio.gather(*waits, return_exceptions=True)
            assert [getattr(answer, "status", None) for answer in answers] == [507, 507]
            assert collector.journal.full  # the status page says so
            with pytest.raises(Refusal, match="disk is full"):
                collector.accept(batch(instance, "later", 3))
            while collector.journal.rebuilding is not None:
                await asyncio.sleep(0.001)
            assert set(collector.assembler.finished) == {"kept"}
            assert collector.assembler.steps == 2
            reply, row = collector.accept(batch(instance, "lost1", 1))
            await collector.journal.durable(row)
            assert reply.accepted == 3
            assert not collector.journal.full
            await collector.drain()
            assert collector.sealing.totals.rows == collector.sealing.totals.steps == 3

    run(body)


def test_a_shard_that_was_under_way_at_a_rebuild_is_recorded_once() -> None:
    """The rebuilt state gives the writer the same plan; the earlier report no longer counts."""

    async def body() -> None:
        journal, writer = GatedJournal(), MemoryWriter(gate=threading.Event())
        async with running(journal, writer) as collector:
            instance = await registered(collector)
            await collector.journal.durable(collector.accept(batch(instance, "a", 0, 2))[1])
            while not journal.plans():
                await asyncio.sleep(0.01)
            journal.errors = [JournalFull("no space")]
            with pytest.raises(Refusal, match="disk is full"):
                await collector.journal.durable(collector.accept(batch(instance, "b", 1))[1])
            while collector.journal.rebuilding is not None:
                await asyncio.sleep(0.001)
            assert writer.gate is not None
            writer.gate.set()
            await collector.journal.durable(collector.accept(batch(instance, "b", 1))[1])
            await collector.drain()
            assert (writer.adopted, writer.conflicts) == (1, 0)
            assert collector.sealing.totals.rows == collector.sealing.totals.steps == 3
            assert collector.sealing.totals.shards == 2
            assert "stopped" in str(collector.journal.failure)

    run(body)


def test_a_failed_sync_stops_everything() -> None:
    """Waiting and later calls raise CollectorFailed; nothing is acknowledged any more."""

    async def body() -> None:
        journal = GatedJournal()
        async with running(journal) as collector:
            instance = await registered(collector)
            journal.errors = [JournalFailed("EIO")]
            _, row = collector.accept(batch(instance, "e", 0))
            with pytest.raises(CollectorFailed, match="EIO"):
                await collector.journal.durable(row)
            assert collector.journal.failed.is_set()
            with pytest.raises(CollectorFailed):
                collector.accept(batch(instance, "f", 1))
            with pytest.raises(CollectorFailed):
                await collector.journal.durable(1)

    run(body)


@pytest.mark.parametrize("error", [JournalFull("no space"), JournalFailed("EIO")])
def test_a_question_behind_a_failed_write_is_answered_with_its_error(error: Exception) -> None:
    """It does not wait for the time after which the journal counts as busy."""

    async def body() -> None:
        journal = GatedJournal()
        async with running(journal) as collector:
            instance = await registered(collector)
            journal.gate.clear()
            journal.entered.clear()
            journal.errors = [error]
            collector.accept(batch(instance, "e", 0))
            await closed(journal.entered)
            account = asyncio.ensure_future(ledger(collector))
            await turns()
            journal.gate.set()
            (answer,) = await asyncio.gather(account, return_exceptions=True)
            if isinstance(error, JournalFull):
                assert isinstance(answer, Refusal)
                assert answer.code == "disk_full"
            else:
                assert isinstance(answer, CollectorFailed)

    run(body)


def test_parts_that_wait_for_the_disk_push_back() -> None:
    """Beyond max_pending bytes, events get 429; once shards are written they are accepted again."""

    async def body() -> None:
        writer = MemoryWriter(full=True)
        async with running(MemoryJournal(), writer, max_pending=100) as collector:
            instance = await registered(collector)
            await collector.journal.durable(collector.accept(batch(instance, "a", 0, 5))[1])
            with pytest.raises(Refusal, match="wait to be written") as caught:
                collector.accept(batch(instance, "b", 1))
            assert (caught.value.status, caught.value.retry_after) == (429, 0.2)
            writer.full = False
            while collector.sealing.pending_bytes:
                await asyncio.sleep(0.01)
            assert collector.accept(batch(instance, "b", 1))[0].accepted == 3

    run(body)


def test_a_part_counts_for_what_it_holds_beside_its_columns() -> None:
    """A part counts for more than its columns: of one-step episodes the rest is nearly all of their
    memory."""

    async def body() -> None:
        writer, patient = MemoryWriter(full=True), replace(DEFAULT, seal_seconds=600.0)
        async with running(MemoryJournal(), writer, patient, max_pending=100_000) as collector:
            instance = await registered(collector)
            taken = 0
            while not collector.is_behind:
                await collector.journal.durable(
                    collector.accept(batch(instance, f"e{taken}", taken))[1]
                )
                taken += 1
            assert 10 < taken < 100

    run(body)


def test_waiting_parts_make_no_event_dearer() -> None:
    """What an event costs in function calls doesn't grow with the parts that wait for a shard."""
    calls: list[int] = []

    def count(_: object, event: str, __: object) -> None:
        calls[-1] += event == "call"

    async def body() -> None:
        patient = replace(DEFAULT, seal_seconds=600.0)
        async with running(MemoryJournal(), policy=patient) as collector:
            instance = await registered(collector)
            for number in range(200):
                calls.append(0)
                sys.setprofile(count)
                try:
                    _, row = collector.accept(batch(instance, f"e{number}", number))
                    collector.sealing.add(0.0)
                finally:
                    sys.setprofile(None)
                await collector.journal.durable(row)

    run(body)
    assert calls[-1] < calls[20] + 20


def test_parts_of_many_bytes_do_not_wait_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of many bytes are planned long before `max_pending`, whatever the seal times and
    sizes."""
    monkeypatch.setattr("ingest.collector.sealing.MOST_WAITING", 500)

    async def body() -> None:
        writer, patient = MemoryWriter(), replace(DEFAULT, seal_seconds=600.0)
        async with running(MemoryJournal(), writer, patient) as collector:
            instance = await registered(collector)
            for number in range(100):
                await collector.journal.durable(
                    collector.accept(batch(instance, f"e{number}", number))[1]
                )
            while collector.sealing.pending_bytes > 500:
                await asyncio.sleep(0.01)
            assert len(writer.parts) > 50

    run(body)


def test_a_drain_writes_what_has_ended_and_keeps_what_is_open() -> None:
    """After a drain only rows of open episodes are left; new events get 503."""

    async def body() -> None:
        journal, writer = MemoryJournal(), MemoryWriter()
        async with running(journal, writer) as collector:
            instance = await registered(collector)
            collector.accept(batch(instance, "done", 0, 4))
            collector.accept(wire.Batch(instance=instance, events=numbered("o", 1, steps=2)[:3]))
            draining = asyncio.ensure_future(collector.drain())
            await asyncio.sleep(0)
            with pytest.raises(Refusal, match="shutting down"):
                collector.accept(batch(instance, "late", 2))
            await draining
        assert [part.episode_id for part in writer.parts] == ["done"]
        assert len(list(journal.replay())) == 1
        assert journal.plans() == []

    run(body)


def test_a_drain_with_a_broken_writer_leaves_the_plan_for_the_next_start() -> None:
    """The drain ends, and the next collector writes the shard."""

    async def body() -> None:
        journal, writer = MemoryJournal(), MemoryWriter(full=True)
        async with running(journal, writer) as collector:
            instance = await registered(collector)
            await collector.journal.durable(collector.accept(batch(instance, "e", 0, 2))[1])
            await collector.drain(timeout=0.2)
        assert len(journal.plans()) == 1
        writer.full = False
        async with running(journal, writer):
            pass
        assert [part.steps for part in writer.parts] == [2]
        assert journal.plans() == []

    run(body)


def test_a_batch_that_cannot_be_applied_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a bug within a batch, nothing of that batch is kept, and other batches are accepted."""

    async def body() -> None:
        async with running(MemoryJournal()) as collector:
            instance = await registered(collector)
            assembler = collector.assembler
            apply = assembler.apply

            def broken(event: Any, *args: Any, **given: Any) -> None:
                apply(event, *args, **given)
                if getattr(event, "seq", 0) == 2:
                    raise ZeroDivisionError("a bug")

            monkeypatch.setattr(assembler, "apply", broken)
            with pytest.raises(ZeroDivisionError):
                collector.accept(batch(instance, "e", 0, 3))
            with pytest.raises(Refusal, match="rebuilt"):
                collector.accept(batch(instance, "e", 0, 3))
            while collector.journal.rebuilding is not None:
                await asyncio.sleep(0.001)
            assert collector.assembler.episodes == {}
            assert collector.accept(batch(instance, "e", 0, 3))[0].accepted == 5
            await collector.drain()
            assert collector.sealing.totals.rows == 3

    run(body)


def test_an_event_breaks_only_its_own_clients_episode() -> None:
    """Another client's bad event, or a bad start of the same id, leaves the episode unchanged."""

    async def body() -> None:
        async with running(MemoryJournal()) as collector:
            owner, stranger = await registered(collector), await registered(collector)
            collector.accept(wire.Batch(instance=owner, events=numbered("e", 0, steps=1)[:2]))
            bad: list[wire.Event] = [
                wire.LogAction(episode_id="e", seq=2, obs=[1.0], action=0),
                wire.Start(episode_id="e"),
                wire.End(episode_id="e"),
            ]
            reply, _ = collector.accept(wire.Batch(instance=stranger, events=bad))
            codes = [item.error["code"] for item in reply.refused]
            assert codes == ["conflict", "invalid", "conflict"]
            assert collector.assembler.episodes["e"].steps == 1
            reply, _ = collector.accept(wire.Batch(instance=owner, events=bad[:1]))
            assert collector.assembler.finished["e"].how == "broken"

    run(body)


def test_an_error_in_the_ticker_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that can no longer seal logs the error and stops."""

    async def body() -> None:
        async with running(MemoryJournal()) as collector:

            def broken() -> None:
                raise ZeroDivisionError("a bug")

            monkeypatch.setattr(collector, "tick", broken)
            await collector.journal.failed.wait()
            assert isinstance(collector.journal.failure, ZeroDivisionError)

    run(body)


class Clocks:
    """A monotonic clock in seconds and a wall clock in microseconds, turned by hand."""

    def __init__(self, wall: int) -> None:
        self.monotonic, self.wall = 1_000.0, wall

    def turn(self, seconds: float, wall: float) -> None:
        self.monotonic += seconds
        self.wall += int(wall * 1_000_000)

    def clocks(self) -> dict[str, Callable[[], Any]]:
        return {"clock": lambda: self.monotonic, "wall": lambda: self.wall}


DAY = 86_400.0


@pytest.mark.parametrize("jump", [0.0, DAY, -DAY])
@pytest.mark.parametrize("down", [0.0, 7 * DAY])
def test_a_reward_window_is_of_running_time(jump: float, down: float) -> None:
    """Steps of an open and of an ended episode take rewards for 60 s in which a collector runs: a
    wall clock that is set, and time without a collector, neither shorten nor prolong them."""
    patient = replace(DEFAULT, reward_window=60.0, part_seconds=1e9, episode_timeout=1e9)
    clocks, journal = Clocks(1_700_000_000_000_000), MemoryJournal()

    async def reward(collector: Collector, name: str, number: int, expected: str) -> None:
        late = wire.LogReturns(episode_id=name, reward=1.0, step=0, reward_id=f"r{number}")
        collector.tick()
        reply, row = collector.accept(wire.Batch(events=[late]))
        await collector.journal.durable(row)
        assert [one.error["code"] for one in reply.refused] == [expected] * bool(expected)

    async def body() -> None:
        nonlocal journal
        async with running(journal, policy=patient, **clocks.clocks()) as collector:
            instance = await registered(collector)
            events = [*numbered("open", 0, steps=2)[:-1], *numbered("ended", 1, steps=1)]
            reply, row = collector.accept(wire.Batch(instance=instance, events=events))
            await collector.journal.durable(row)
            assert reply.refused == []
            clocks.turn(30, jump)
            for name in ("open", "ended"):
                await reward(collector, name, 1, "")
            journal = journal.crash()
            # a machine that was restarted: its monotonic clock begins again
        clocks.turn(-500, down)
        async with running(journal, policy=patient, **clocks.clocks()) as collector:
            clocks.turn(20, jump)
            for name in ("open", "ended"):
                await reward(collector, name, 2, "")
            clocks.turn(20, jump)
            for name in ("open", "ended"):
                await reward(collector, name, 3, "window_closed")
            totals = collector.late.totals()
            assert (sum(totals.values()), {one.policy_id for one in totals}) == (2, {"default"})

    run(body)
