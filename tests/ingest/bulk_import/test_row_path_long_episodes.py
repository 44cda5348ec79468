"""A long episode that goes row by row: in pieces, between which others are heard."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from ingest.bulk_import.handler import import_steps
from ingest.bulk_import.import_known import still_open, tell_torn
from ingest.bulk_import.import_reply import REFUSED_EVENTS, ImportReply
from ingest.bulk_import.request_batching import Gathering
from ingest.bulk_import.row_path import WHOLE_ROWS, BulkColumns
from ingest.collector.collector import Collector
from ingest.collector.recovery import INSTANCE
from ingest.episodes.sealed_parts import Limits
from ingest.protocol.errors import Refusal
from ingest.web.asgi import Request
from storage.experience.range_set import RangeSet
from storage.journal.memory_journal import MemoryJournal
from tests.ingest.bulk_import.test_handler import steps
from tests.ingest.bulk_import.test_request_batching import PATIENT, request
from tests.ingest.collector.test_collector import running

ROWS = 3 * WHOLE_ROWS
LENGTHS = {"before": 2, "long": ROWS, "behind": 2}
SHORT_PARTS = dataclasses.replace(PATIENT, part_steps=WHOLE_ROWS)


def long(**columns: Any) -> Request:
    """Two short episodes and a long one between them, in a request with a key."""
    return keyed(steps(LENGTHS, infos=["{}"] * (ROWS + 4), **columns))


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


def keyed(table: pa.Table, key: bytes = b"k") -> Request:
    plain = request(table)
    return replace(plain, headers={**plain.headers, b"idempotency-key": key})


async def begun(collector: Collector, asked: Request) -> int:
    """Take an import until some of its long episode is there; answers how many steps."""
    call = asyncio.ensure_future(import_steps(asked, collector, Gathering(collector)))
    while collector.steps < WHOLE_ROWS:
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    return collector.steps


def test_what_would_go_as_columns_by_now_goes_on_row_by_row() -> None:
    """Under a policy of longer parts, say: the rest of the episode is no duplicate."""
    asked = keyed(steps(LENGTHS))

    async def main() -> None:
        journal = MemoryJournal()
        async with running(journal, policy=SHORT_PARTS) as collector:
            assert await begun(collector, asked) < ROWS
            crashed = journal.crash()
        async with running(crashed, policy=PATIENT) as collector:
            told, _ = await import_steps(asked, collector, Gathering(collector))
            assert (told.accepted + told.duplicates, told.refused) == (ROWS + 4 + 6, [])
            assert collector.steps == ROWS + 4

    asyncio.run(main())


def test_one_that_was_abandoned_is_never_taken_for_whole() -> None:
    """Not even where the episode is forgotten, and its import is all that is remembered."""
    limits, now = Limits(finished=1), 0.0
    asked = long()

    async def told(collector: Collector) -> tuple[int, list[tuple[int, str]]]:
        reply, _ = await import_steps(asked, collector, Gathering(collector))
        return reply.duplicates, [(item.index, item.error["code"]) for item in reply.refused]

    async def main() -> None:
        nonlocal now
        journal = MemoryJournal()
        given = {"policy": PATIENT, "limits": limits, "clock": lambda: now}
        async with running(journal, **given) as collector:
            await begun(collector, asked)
            now = 10 * PATIENT.episode_timeout
            collector.tick()
            assert collector.stats.abandoned == 1
            assert await told(collector) == (4, [(2, "abandoned")])
            await import_steps(request(steps({"other": 1})), collector, Gathering(collector))
            assert "long" not in collector.assembler.finished
            assert await told(collector) == (8, [(2, "broken")])
            await collector.drain()
        async with running(journal.crash(), **given) as collector:
            assert await told(collector) == (8, [(2, "broken")])

    asyncio.run(main())


def test_what_an_earlier_release_left_torn_is_not_taken_for_whole() -> None:
    """Its journal says so of the episode, not of the import."""
    asked, now = long(), 0.0

    async def main() -> None:
        nonlocal now
        journal = MemoryJournal()
        async with running(journal, policy=PATIENT, clock=lambda: now) as collector:
            await begun(collector, asked)
            now = 10 * PATIENT.episode_timeout
            collector.tick()
            await collector.drain()
        state = {key: json.loads(blob) for key, blob in journal.state(INSTANCE).items()}
        (key,) = (key for key, known in state.items() if known.pop("torn"))
        journal.commit(put={key: json.dumps(state[key]).encode()})
        async with running(journal, policy=PATIENT, clock=lambda: now) as collector:
            reply, _ = await import_steps(asked, collector, Gathering(collector))
            assert [(item.index, item.error["code"]) for item in reply.refused] == [
                (2, "abandoned")
            ]
            assert reply.duplicates == 4

    asyncio.run(main())


def test_one_that_ends_while_it_is_gone_on_with_is_not_told_twice() -> None:
    """It was no duplicate before; what follows of it is refused, once."""

    async def main() -> None:
        actions = np.zeros(ROWS + 4, np.int64)
        actions[100] = 9
        async with running(MemoryJournal(), policy=PATIENT) as collector:
            await import_steps(long(actions=actions), collector, Gathering(collector))
            found = BulkColumns(steps(LENGTHS), PATIENT, numbered=True)
            (instance,) = [*collector.assembler.instances]
            for known, told in ((RangeSet.of([0, 1, 2]), [2]), (RangeSet.of([0]), [])):
                reply = ImportReply(durable=True)
                reply.take(0, ROWS + 10)
                tell_torn(found, instance, known, collector.assembler, reply)
                assert [item.index for item in reply.message.refused] == told
                assert reply.message.duplicates == (8 if told else ROWS + 10)

    asyncio.run(main())


def test_one_that_was_broken_is_told_so_again() -> None:
    """Whoever did not hear the first answer hears of what was not taken, long or short."""
    actions = np.zeros(ROWS + 4, np.int64)
    actions[[1, 100]] = 9

    async def main() -> None:
        async with running(MemoryJournal(), policy=PATIENT) as collector:
            for taken in (2 + 99 + 4, 0):
                asked = long(actions=actions)
                reply, _ = await import_steps(asked, collector, Gathering(collector))
                named = [(item.index, item.error["code"]) for item in reply.refused]
                assert reply.accepted == taken
                assert [index for index, _ in named] == ([1, 100] if taken else [0, 2])
            assert {code for _, code in named} == {"broken"}
            assert reply.duplicates == 4

    asyncio.run(main())


def test_another_episode_of_its_name_is_not_gone_on_with() -> None:
    """Only that of the same import and number, and that is open."""

    async def main() -> None:
        async with running(MemoryJournal(), policy=PATIENT) as collector:
            await begun(collector, long())
            instance = collector.assembler.episodes["long"].started.instance
            found = BulkColumns(steps({"x": 1, "long": ROWS}), PATIENT, numbered=True)
            for given, numbers in ((instance, [1]), ("another", []), (None, [])):
                assert [*still_open(found, given, collector.assembler)] == numbers
            moved = BulkColumns(steps({"long": ROWS}), PATIENT, numbered=True)
            assert not still_open(moved, instance, collector.assembler)

    asyncio.run(main())


def test_a_bad_row_of_a_long_episode_leaves_the_others_alone() -> None:
    """The rows behind it are not looked at, and count as refused; they stop no import."""
    rows = 3 * REFUSED_EVENTS
    actions = np.zeros(rows + 20, np.int64)
    actions[100] = 9
    lengths = {"long": rows} | {f"e{n}": 1 for n in range(20)}

    async def main() -> None:
        async with running(MemoryJournal(), policy=PATIENT) as collector:
            asked, gathering = keyed(steps(lengths, actions=actions)), Gathering(collector)
            reply, wasted = await import_steps(asked, collector, gathering)
            assert [item.index for item in reply.refused] == [100]
            assert reply.accepted == 1 + 100 + 20 * 3
            refused = rows + 2 - 101
            assert wasted == refused / (refused + reply.accepted)

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
