"""The rows of an import that wait for the disk together: none is acknowledged by another's."""

from __future__ import annotations

import asyncio

import pytest

from ingest.bulk_import.journal_rows import COMMIT_TURNS, ImportRows
from ingest.collector.collector import Collector
from ingest.protocol.errors import Refusal
from storage.errors import JournalFull
from tests.ingest.collector.test_collector import (
    GatedJournal,
    batch,
    closed,
    registered,
    run,
    running,
)


def test_so_many_turns_wait_together() -> None:
    """The last of them waits, and the end of the import does."""

    async def body() -> None:
        journal = GatedJournal()
        async with running(journal) as collector:
            instance, rows = await registered(collector), ImportRows(collector)
            journal.gate.clear()
            for number in range(COMMIT_TURNS):
                assert collector.durable_row < collector.submitted_row or number == 0
                rows.require()
                _, row = collector.accept(batch(instance, f"e{number}", number))
                if number == COMMIT_TURNS - 1:
                    journal.gate.set()
                await rows.wrote(row)
            assert collector.durable_row == collector.submitted_row
            rows.require()
            await rows.wrote(collector.accept(batch(instance, "last", COMMIT_TURNS))[1])
            await rows.durable()
            assert collector.durable_row == collector.submitted_row

    run(body)


def test_what_was_thrown_away_is_not_acknowledged() -> None:
    """After a full disk its row's number is somebody else's, and that one becomes durable."""

    async def body() -> None:
        journal = GatedJournal()
        async with running(journal) as collector:
            instance, rows = await registered(collector), ImportRows(collector)
            lost = await _filled(journal, collector, instance, rows)
            await _rebuilt(collector)
            _, others = collector.accept(batch(instance, "other", 1))
            await collector.durable(others)
            assert others == lost
            with pytest.raises(Refusal, match="send it again"):
                rows.require()
            with pytest.raises(Refusal, match="send it again"):
                await rows.durable()
            assert "lost" not in collector.assembler.finished

    run(body)


def test_while_the_disk_is_full_that_is_what_an_import_hears() -> None:
    """It says 507, as every other request does, not that the state was rebuilt."""

    async def body() -> None:
        journal = GatedJournal()
        async with running(journal) as collector:
            instance, rows = await registered(collector), ImportRows(collector)
            epoch = collector.epoch
            await _filled(journal, collector, instance, rows)
            while collector.epoch == epoch:
                await asyncio.sleep(0)
            with pytest.raises(Refusal) as refused:
                rows.require()
            assert refused.value.status == 507

    run(body)


async def _filled(
    journal: GatedJournal, collector: Collector, instance: str, rows: ImportRows
) -> int:
    """Let the disk be full when an import's row is written; answers that row."""
    journal.gate.clear()
    journal.entered.clear()
    _, lost = collector.accept(batch(instance, "lost", 0))
    await rows.wrote(lost)
    await closed(journal.entered)
    journal.errors = [JournalFull("no space")]
    journal.gate.set()
    return lost


async def _rebuilt(collector: Collector) -> None:
    """Wait until the state is that of the journal, after what was not durable was thrown away."""
    epoch = collector.epoch
    while collector.epoch == epoch or collector._rebuilding is not None:
        await asyncio.sleep(0.001)
