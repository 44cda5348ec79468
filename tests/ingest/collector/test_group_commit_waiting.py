"""Every waiter for a journal row gets one answer, whatever the disk does."""

from __future__ import annotations

import asyncio

import pytest

from ingest.collector.group_commit import LoopJournal, Transaction
from ingest.collector.recovery import Recovered, recover
from ingest.protocol.errors import CollectorFailed, Refusal
from storage.errors import JournalFull
from tests.ingest.collector.test_recovery import POLICIES
from tests.ingest.simulated_collector import WAIT_SECONDS, Fault, FaultyJournal


def opened(fault: Fault, taken: list[Recovered]) -> LoopJournal:
    journal = FaultyJournal()
    journal.fault = fault
    return LoopJournal(
        journal,
        loop=asyncio.get_running_loop(),
        recover=lambda journal: recover(journal, POLICIES),
        take_up=taken.append,
        retry_seconds=0.0,
    )


async def answer(waiting: asyncio.Future[None]) -> Exception | None:
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            await waiting
    except (Refusal, CollectorFailed) as error:
        return error
    return None


def test_after_a_full_disk_rows_go_on_from_what_the_journal_has() -> None:
    """Uncommitted rows are refused, no callback of their epoch runs, and their numbers are free."""

    async def script() -> None:
        taken: list[Recovered] = []
        ran: list[str] = []
        journal = opened(Fault(1, JournalFull), taken)
        lost = [journal.when_durable(journal.append(b"x")) for _ in range(3)]
        journal.transact(Transaction(put={"a": b""}), lambda: ran.append("lost"))
        stale = journal.guard(ran.append)
        journal.committer.start()
        codes = [getattr(await answer(one), "code", None) for one in lost]
        assert codes == ["disk_full"] * 3
        assert journal.rebuilding is not None
        with pytest.raises(Refusal, match="disk is full"):  # the caller's state is not on disk
            await journal.ask(lambda found: found.last_row)
        async with asyncio.timeout(WAIT_SECONDS):
            while not taken:
                await asyncio.sleep(0)
        stale("stale")
        assert (journal.is_usable, journal.rebuilds, ran) == (True, 1, [])
        journal.transact(Transaction(put={"a": b""}), lambda: ran.append("kept"))
        await journal.ask(lambda found: found.last_row)  # before all of it is done
        assert ran == ["kept"]
        assert (journal.durable_row, journal.submitted_row) == (0, 0)
        journal.committer.stop()

    asyncio.run(script())


def test_a_failure_answers_all_who_wait_and_all_who_come() -> None:
    """This includes waiters for a row that is on disk: the state of the rest is unknown."""

    async def script() -> None:
        journal = opened(Fault(0), [])
        early = journal.when_durable(journal.append(b"x"))
        journal.fail(OSError("no sync"))
        late = journal.when_durable(0)
        for error in (await answer(early), await answer(late)):
            assert isinstance(error, CollectorFailed)
            assert "no sync" in str(error)
        with pytest.raises(CollectorFailed):
            await journal.ask(lambda found: None)
        assert journal.failed.is_set()
        journal.committer.stop()

    asyncio.run(script())


def test_a_callback_runs_once_and_in_the_order_of_the_rows() -> None:
    """For a row that is already on disk, the callback runs at once."""

    async def script() -> None:
        calls: list[tuple[int, Exception | None]] = []
        journal = opened(Fault(0), [])
        for row in (journal.append(b"x"), journal.append(b"y")):
            journal.tell(row, lambda lost, row=row: calls.append((row, lost)))  # type: ignore[misc]
        journal.committer.start()
        await journal.durable(2)
        assert calls == [(1, None), (2, None)]
        journal.tell(1, lambda lost: calls.append((1, lost)))
        assert calls[2:] == [(1, None)]
        journal.committer.stop()

    asyncio.run(script())
