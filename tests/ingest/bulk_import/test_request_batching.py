"""Imports that arrive together: each is answered and stored as if it had come alone.

Also of `ingest.bulk_import.acceptance` and `ingest.episodes.imported`.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ingest.access.tokens import LOCAL, Allowance, Caller
from ingest.bulk_import.column_path import runs_of
from ingest.bulk_import.handler import import_steps
from ingest.bulk_import.import_reply import NAMED, REFUSED_EVENTS
from ingest.bulk_import.request_batching import CROWD, ROW_EPISODES, ROW_STEPS, Gathering
from ingest.episodes.journal_events import Imported, decode_row
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from ingest.web.asgi import Request
from storage.declarations.declaration import PolicyDeclaration
from storage.journal.memory_journal import MemoryJournal
from storage.spaces.descriptors import parse_space
from tests.ingest.bulk_import.test_handler import PLAIN, body, steps
from tests.ingest.collector.test_collector import GatedJournal, running

PATIENT = PolicyDeclaration(
    observation=parse_space("box:2"),
    action=parse_space("discrete:3"),
    seal_bytes=10**9,
    seal_seconds=10**6,
)
"""It seals nothing before the collector's drain."""

Told = tuple[int, int, list[tuple[int, str]]]  # accepted, duplicates, refused rows and why
Order = Callable[[Sequence[Awaitable[Told]]], Awaitable[list[Told]]]


def request(given: pa.Table | bytes) -> Request:
    data = given if isinstance(given, bytes) else body(given)
    headers = {
        b"content-type": wire.ARROW.encode(),
        b"headrace-crc32": f"{zlib.crc32(data):08x}".encode(),
    }
    return Request("POST", "/v1/steps", headers, data, caller=LOCAL)


async def together(calls: Sequence[Awaitable[Told]]) -> list[Told]:
    return list(await asyncio.gather(*calls))


async def one_by_one(calls: Sequence[Awaitable[Told]]) -> list[Told]:
    return [await call for call in calls]


def run(tables: Sequence[pa.Table | bytes], order: Order) -> tuple[list[Told], list[Any], int]:
    """(what each request heard, the stored episodes with their rewards, journal rows)."""

    async def main() -> tuple[list[Told], list[Any], int]:
        journal = MemoryJournal()
        async with running(journal, policy=PATIENT) as collector:
            gathering = Gathering(collector)

            async def call(table: pa.Table | bytes) -> Told:
                try:
                    reply, _ = await import_steps(request(table), collector, gathering)
                except Refusal as refusal:
                    return 0, 0, [(0, refusal.code)]
                refused = [(item.index, item.error["code"]) for item in reply.refused]
                return reply.accepted, reply.duplicates, refused

            told = await order([call(table) for table in tables])
            return told, list(_stored(journal)), journal.last_row

    return asyncio.run(main())


def test_a_rate_is_charged_before_anything_is_waited_for() -> None:
    """What comes at once with a large import finds the allowance used."""

    async def main() -> None:
        allowance = Allowance(rate=100.0, since=0.0)
        asked = replace(request(steps({"a": 300})), caller=Caller("t", allowance=allowance))
        async with running(MemoryJournal(), policy=PATIENT) as collector:
            call = asyncio.ensure_future(import_steps(asked, collector, Gathering(collector)))
            await asyncio.sleep(0)
            assert not call.done()
            assert allowance.wait(0.0) == pytest.approx(2.0)
            assert (await call)[0].accepted == 302
            assert allowance.wait(0.0) == pytest.approx(2.0)  # once, not twice

    asyncio.run(main())


@pytest.mark.parametrize(
    ("columns", "part"),
    [
        ({}, 0.0),
        ({"actions": pa.array([0, 1, 2, 9])}, 2 / 8),
        ({"actions": pa.array([9] * 4)}, 6 / 8),
    ],
)
def test_what_is_refused_of_an_import_is_told(columns: dict[str, Any], part: float) -> None:
    """Of two episodes of two steps: starts and good steps are taken, what follows is refused."""

    async def main() -> float:
        table = steps({"a": 2, "b": 2}, **columns)
        async with running(MemoryJournal(), policy=PATIENT) as collector:
            return (await import_steps(request(table), collector, Gathering(collector)))[1]

    assert asyncio.run(main()) == part


@pytest.mark.parametrize("good", [0, 1])
def test_a_reply_names_the_first_hundred_refused_episodes(good: int) -> None:
    """And says how many there are in all, which no reply does that names them all."""

    async def main(episodes: int) -> tuple[wire.EventsReply, float]:
        lengths = {f"e{n}": 1 for n in range(episodes + good)}
        actions = pa.array([9] * episodes + [0] * good)
        async with running(MemoryJournal(), policy=PATIENT) as collector:
            asked = request(steps(lengths, actions=actions))
            return await import_steps(asked, collector, Gathering(collector))

    for episodes in (NAMED, NAMED + 1, 700):
        reply, wasted = asyncio.run(main(episodes))
        assert [item.index for item in reply.refused] == list(range(NAMED))
        assert reply.refused_count == (episodes if episodes > NAMED else 0)
        assert reply.accepted == episodes + 3 * good  # their starts, and an episode that fits
        assert wasted == 2 * episodes / (3 * episodes + 3 * good)


def test_what_does_not_fit_counts_beyond_what_a_reply_names() -> None:
    """Episodes that are known already fill the list; the toll is for those behind them."""

    async def main() -> tuple[wire.EventsReply, float]:
        known = {f"e{n}": 1 for n in range(NAMED)}
        async with running(MemoryJournal(), policy=PATIENT) as collector:
            gathering = Gathering(collector)
            await import_steps(request(steps(known)), collector, gathering)
            actions = pa.array([0] * NAMED + [9])
            asked = request(steps(known | {"x": 1}, actions=actions))
            return await import_steps(asked, collector, gathering)

    reply, wasted = asyncio.run(main())
    assert {item.error["code"] for item in reply.refused} == {"completed"}
    assert (reply.refused_count, reply.accepted) == (NAMED + 1, 1)
    assert wasted > 0.9


def test_the_way_row_by_row_has_turns_too() -> None:
    """Others are heard between some hundred events."""
    table = steps({f"e{n}": 1 for n in range(400)}, infos=["{}"] * 400)
    told, _, rows = run([table], one_by_one)
    assert told == [(1_200, 0, [])]
    assert rows >= 3


def test_what_is_refused_for_the_most_part_is_not_read_to_its_end() -> None:
    """It hears why, and how much was taken; one that is refused in part is taken to its end."""
    count = REFUSED_EVENTS + 1
    actions = [9] * (count - 1) + [0]
    told, _, rows = run([steps({f"e{n}": 1 for n in range(count)}, actions=actions)], one_by_one)
    assert told == [(0, 0, [(0, "invalid")])]
    assert rows > 3
    good = steps(
        {f"e{n}": 1 for n in range(count)}, actions=[9 if n % 2 else 0 for n in range(count)]
    )
    ((accepted, _, refused),), _, _ = run([good], one_by_one)
    assert (accepted, len(refused)) == (3 * (count // 2 + 1) + count // 2, NAMED)


def test_what_has_no_room_for_now_is_no_bad_import() -> None:
    """A token with its quota of open episodes hears 429, which it may send again, not 422."""
    table = steps({f"e{n}": 1 for n in range(REFUSED_EVENTS)}, infos=["{}"] * REFUSED_EVENTS)

    async def main() -> None:
        caller = Caller("t", open_episodes=1)
        asked = replace(request(table), caller=caller)
        async with running(MemoryJournal(), policy=PATIENT) as collector:
            gathering = Gathering(collector)
            collector.accept(wire.Batch(events=[wire.Start(episode_id="x")]), caller=caller)
            with pytest.raises(Refusal, match="t may have 1 open episodes") as refused:
                await import_steps(asked, collector, gathering)
            assert (refused.value.status, refused.value.retry_after) == (429, 1.0)
            collector.accept(wire.Batch(events=[wire.End(episode_id="x")]), caller=caller)
            reply, _ = await import_steps(asked, collector, gathering)
            assert reply.accepted == 3 * REFUSED_EVENTS

    asyncio.run(main())


def test_an_import_without_a_key_may_be_sent_again_with_more_behind() -> None:
    """However many of its episodes are known: what is new comes last, and is reached."""
    lengths = {f"e{n}": 1 for n in range(REFUSED_EVENTS)}
    both = [steps(some, infos=["{}"] * len(some)) for some in (lengths, lengths | {"new": 1})]
    _, (accepted, _, refused) = run(both, one_by_one)[0]
    assert (accepted, {code for _, code in refused}) == (3, {"completed"})


def test_who_is_stopped_hears_what_is_on_disk() -> None:
    """It is told how much was taken: that has to be there after a crash."""
    table = steps({f"e{n}": 1 for n in range(REFUSED_EVENTS)}, actions=[9] * REFUSED_EVENTS)

    async def main() -> None:
        journal = GatedJournal()
        async with running(journal, policy=PATIENT) as collector:
            call = import_steps(request(table), collector, Gathering(collector))
            with pytest.raises(Refusal, match="stopped after"):
                await call
            assert collector.durable_row == collector.submitted_row

    asyncio.run(main())


def test_rewards_of_single_precision_go_the_quick_way() -> None:
    """They are doubles from then on."""
    table = steps({"a": 2}, rewards=pa.array([0.5, 1.5], pa.float32()))
    runs = runs_of(table, PLAIN, numbered=False)
    assert runs is not None
    assert runs.columns["rewards"] == np.array([0.5, 1.5]).tobytes()


def _stored(journal: MemoryJournal) -> Iterator[Any]:
    """What the quick way stored, an episode at a time."""
    for _, blob in journal.replay():
        for event in decode_row(blob).events:
            if isinstance(event, Imported):
                begin = 0
                for episode in event.episodes:
                    end = begin + episode.steps
                    yield episode.started.episode_id, event.rewards[8 * begin : 8 * end]
                    begin = end


def test_those_of_one_turn_are_one_row() -> None:
    """Each hears of its own episodes; all of them wait for the same commit."""
    tables = [steps({"a": 3, "b": 1}), steps({"c": 2}), steps({"d": 1, "e": 1, "f": 1})]
    told, stored, rows = run(tables, together)
    assert told == [(8, 0, []), (4, 0, []), (9, 0, [])]
    assert [name for name, _ in stored] == list("abcdef")
    assert rows == 1
    assert run(tables, one_by_one)[2] == 3


def apart(turns: int) -> Order:
    """The calls so many turns of the loop after each other."""

    async def order(calls: Sequence[Awaitable[Told]]) -> list[Told]:
        running = []
        for call in calls:
            running.append(asyncio.ensure_future(call))
            for _ in range(turns):
                await asyncio.sleep(0)
        return list(await asyncio.gather(*running))

    return order


@pytest.mark.parametrize(("turns", "expected"), [(1, 1), (5, 2)])
def test_who_comes_in_the_next_turn_belongs_to_it(turns: int, expected: int) -> None:
    """Until a turn of the loop brings nobody: each request of a crowd is read in its own turn."""
    told, stored, rows = run([steps({"a": 3}), steps({"b": 1})], apart(turns))
    assert [answer[0] for answer in told] == [5, 3]
    assert (len(stored), rows) == (2, expected)


def test_nobody_waits_for_more_than_a_crowd() -> None:
    """One after the other, a turn each: whoever comes later belongs to the next group."""
    tables = [steps({f"e{n}": 1}) for n in range(CROWD + 5)]
    told, stored, rows = run(tables, apart(1))
    assert told == [(3, 0, [])] * len(tables)
    assert (len(stored), rows) == (len(tables), 2)


def test_an_episode_does_not_go_on_in_the_next_request() -> None:
    """The same id at the end of one and the beginning of the other: the second one is refused."""
    told, stored, _ = run([steps({"a": 3}), steps({"a": 2, "b": 1})], together)
    assert [answer[0] for answer in told] == [5, 3]
    assert [row for row, _ in told[1][2]] == [0]
    assert [(name, len(rewards) // 8) for name, rewards in stored] == [("a", 3), ("b", 1)]
    both = pa.concat_tables([steps({"a": 3}), steps({"a": 2})])
    assert runs_of(both, PLAIN, numbered=False, edges=[0, 3]) is None


def test_what_is_no_text_is_refused_by_itself() -> None:
    """Bytes that Arrow's reader takes and that are none: those beside them do not hear of it."""
    broken = body(steps({"%%%%": 2})).replace(b"%%%%", b"\xff\xfe%%")
    told, stored, _ = run([steps({"good": 3}), broken], together)
    assert told == [(5, 0, []), (0, 0, [(0, "malformed")])]
    assert [name for name, _ in stored] == ["good"]


def test_dictionaries_of_several_requests_are_no_trouble() -> None:
    """A data frame's categories have indices of a byte: together they are too many for it."""
    tables = []
    for part in "abc":
        ids = pa.array([f"{part}{n}" for n in range(100)]).dictionary_encode()
        short = ids.cast(pa.dictionary(pa.int8(), pa.string()))
        tables.append(steps({"_": 100}, eps_id=short))
    told, stored, rows = run(tables, together)
    assert told == [(300, 0, [])] * 3
    assert (len(stored), rows) == (300, 1)


def test_a_null_among_the_words_of_a_dictionary_is_no_name() -> None:
    """It is not the name of the row before either."""
    words = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2]), pa.array(["a", None, "b"]))
    told, stored, _ = run([steps({"_": 3}, eps_id=words)], together)
    assert told == [(0, 0, [(0, "invalid")])]
    assert stored == []


def test_a_refused_neighbour_is_nobody_elses_trouble() -> None:
    """One body breaks a law of its columns: it hears of it, and the others are taken."""
    bad = steps({"x": 2}, rewards=pa.array([1.0, None], pa.float64()))
    told, stored, _ = run([steps({"a": 2}), bad, steps({"b": 2})], together)
    assert told == [(4, 0, []), (0, 0, [(0, "invalid")]), (4, 0, [])]
    assert sorted(name for name, _ in stored) == ["a", "b"]


def test_a_turn_has_an_end() -> None:
    """More rows than a turn of the loop is for are more than one journal row."""
    tables = [steps({f"e{n}": 2_000}) for n in range(12)]
    assert sum(table.num_rows for table in tables) > ROW_STEPS
    told, stored, rows = run(tables, together)
    assert [answer[0] for answer in told] == [2_002] * 12
    assert (len(stored), rows) == (12, 2)


def test_a_turn_has_no_more_episodes_either() -> None:
    """A crowd of too many is taken in smaller groups; who has too many himself goes alone."""
    tables = [steps({f"{part}{n}": 2 for n in range(200)}) for part in "abcde"]
    told, stored, rows = run(tables, together)
    assert [answer[0] for answer in told] == [800] * 5
    assert (len(stored), rows) == (1_000, 3)
    many = steps({f"m{n}": 1 for n in range(ROW_EPISODES + 1)})
    told, stored, rows = run([many, steps({"a": 3})], together)
    assert told == [(3 * (ROW_EPISODES + 1), 0, []), (5, 0, [])]
    assert (len(stored), rows) == (ROW_EPISODES + 2, 3)


NAMES = st.sampled_from("abcdefgh")
EPISODES = st.dictionaries(NAMES, st.integers(1, 4), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.lists(EPISODES, min_size=1, max_size=6))
def test_together_is_one_after_the_other(requests: list[dict[str, int]]) -> None:
    """Whatever ids meet in a turn: the same answers, and the same episodes in the journal."""
    tables = [steps(lengths) for lengths in requests]
    assert run(tables, together)[:2] == run(tables, one_by_one)[:2]
