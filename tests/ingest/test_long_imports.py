"""A long episode that goes row by row: in pieces, between which others are heard."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from ingest.bulk import import_steps
from ingest.bulk_columns import WHOLE_ROWS
from ingest.collector import Collector
from ingest.errors import Refusal
from ingest.gathering import Gathering
from ingest.http import Request
from storage.memory_journal import MemoryJournal
from tests.ingest.test_bulk import steps
from tests.ingest.test_collector import running
from tests.ingest.test_gathering import PATIENT, request

ROWS = 3 * WHOLE_ROWS


def long(**columns: Any) -> Request:
    """Two short episodes and a long one between them, in a request with a key."""
    lengths = {"before": 2, "long": ROWS, "behind": 2}
    table = steps(lengths, infos=["{}"] * sum(lengths.values()), **columns)
    plain = request(table)
    return replace(plain, headers={**plain.headers, b"idempotency-key": b"k"})


def stored(collector: Collector) -> dict[str, np.ndarray[Any, Any]]:
    """The rewards of the sealed episodes."""
    parts: dict[str, bytes] = {}
    for ready in collector.sealing._ready.values():
        for sealed in ready.parts:
            if sealed.part is not None:
                name = sealed.part.episode_id
                parts[name] = parts.get(name, b"") + sealed.part.rewards
    return {name: np.frombuffer(data) for name, data in parts.items()}


def test_it_is_stored_as_if_it_were_one() -> None:
    """In many journal rows; a repetition adds nothing."""

    async def main() -> None:
        journal = MemoryJournal()
        async with running(journal, policy=PATIENT) as collector:
            gathering, rewards = Gathering(collector), pa.array(np.arange(ROWS + 4) / 8)
            first, _ = await import_steps(long(rewards=rewards), collector, gathering)
            assert (first.accepted, first.duplicates) == (ROWS + 4 + 6, 0)
            assert journal.last_row > 5
            found = stored(collector)
            assert found["long"].tolist() == (np.arange(2, ROWS + 2) / 8).tolist()
            again, _ = await import_steps(long(rewards=rewards), collector, gathering)
            assert (again.accepted, again.duplicates) == (0, ROWS + 4 + 6)

    asyncio.run(main())


def test_a_repetition_goes_on_where_it_stopped() -> None:
    """What was taken is told as duplicates; no step is lost, none is doubled."""

    async def main() -> None:
        async with running(MemoryJournal(), policy=PATIENT) as collector:
            gathering = Gathering(collector)
            call = asyncio.ensure_future(import_steps(long(), collector, gathering))
            while collector.steps < WHOLE_ROWS:
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
            taken = collector.steps
            assert WHOLE_ROWS <= taken < ROWS
            again, _ = await import_steps(long(), collector, gathering)
            assert (again.accepted + again.duplicates, again.refused) == (ROWS + 4 + 6, [])
            assert again.duplicates == taken + 1 + 2  # two starts, and the end of the first
            assert len(stored(collector)["long"]) == ROWS

    asyncio.run(main())


def test_a_refused_row_is_named_once_and_by_its_place() -> None:
    """Whatever piece it is in; what follows it is refused, and the next episode is taken."""

    async def main() -> None:
        actions, bad = np.zeros(ROWS + 4, np.int64), ROWS - 100
        actions[bad] = 9
        async with running(MemoryJournal(), policy=PATIENT) as collector:
            reply, _ = await import_steps(long(actions=actions), collector, Gathering(collector))
            ((row, error),) = [(item.index, item.error) for item in reply.refused]
            assert (row, error["path"]) == (bad, f"$.actions[{bad}]")
            found = stored(collector)
            assert {name: len(rewards) for name, rewards in found.items()} == {
                "before": 2, "long": bad - 2, "behind": 2,
            }  # fmt: skip

    asyncio.run(main())


def test_without_a_key_it_is_refused_as_a_whole() -> None:
    """A repetition could not go on with it."""

    async def main() -> None:
        async with running(MemoryJournal(), policy=PATIENT) as collector:
            asked = long()
            asked = replace(
                asked,
                headers={k: v for k, v in asked.headers.items() if k != b"idempotency-key"},
            )
            with pytest.raises(Refusal, match="expected an Idempotency-Key") as refused:
                await import_steps(asked, collector, Gathering(collector))
            assert (refused.value.status, refused.value.path) == (413, "$.eps_id[2]")
            assert collector.steps == 0

    asyncio.run(main())
