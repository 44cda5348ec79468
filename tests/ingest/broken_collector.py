"""Collectors with a planted fault, so that the tests of kills can show that they would see it.

python -m tests.ingest.broken_collector FAULT collect --root DIR --port PORT
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from ingest import wire
from ingest.__main__ import main
from ingest.assembler import EpisodeAssembler
from ingest.collector import Collector
from ingest.sealer import Sealer, SealJob
from storage.journal import SqliteJournal

DELAY_SECONDS = 0.2


def acknowledge_early() -> None:
    """An answer leaves before its commit, which takes its time."""
    commit = SqliteJournal.commit

    def slow(self: SqliteJournal, *args: Any, **given: Any) -> None:
        threading.Event().wait(DELAY_SECONDS)
        commit(self, *args, **given)

    async def durable(self: Collector, row: int) -> None:
        return

    SqliteJournal.commit = slow  # type: ignore[method-assign]
    Collector.durable = durable  # type: ignore[method-assign]


def record_early() -> None:
    """A shard is recorded, and its rows are dropped, before it is written."""
    write = Sealer._write

    def early(self: Sealer, job: SealJob) -> Any:
        shard = SimpleNamespace(
            path=Path("none.parquet"),
            digest="0" * 64,
            rows=sum(part.steps for part in job.parts),
            nbytes=1,
        )
        self._notify(job.done, shard)
        threading.Event().wait(3 * DELAY_SECONDS)
        write(self, job)

    def run(self: Sealer) -> None:
        while (job := self._jobs.get()) is not None:
            early(self, job)

    Sealer._run = run  # type: ignore[method-assign]


def forget_numbers() -> None:
    """A retry is taken for something new; answers take their time, so that kills cut them off."""
    judge, durable = EpisodeAssembler.judge, Collector.durable

    def unnumbered(
        self: EpisodeAssembler, instance: str | None, event: wire.Event, values: Any = None
    ) -> Any:
        if not isinstance(event, wire.Start):
            event = msgspec.structs.replace(event, seq=None)
        return judge(self, instance, event, values)

    async def slow(self: Collector, row: int) -> None:
        await durable(self, row)
        await asyncio.sleep(DELAY_SECONDS)

    EpisodeAssembler.judge = unnumbered  # type: ignore[method-assign]
    Collector.durable = slow  # type: ignore[method-assign]


FAULTS = {
    "acknowledge-early": acknowledge_early,
    "record-early": record_early,
    "forget-numbers": forget_numbers,
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
