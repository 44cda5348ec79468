"""The reply to an import: named refusals, sums, and when the rest is not read."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest

from ingest.access.tokens import Caller
from ingest.bulk_import.handler import Importer
from ingest.bulk_import.import_reply import NAMED, REFUSED_EVENTS
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from storage.journal.memory_journal import MemoryJournal
from tests.ingest.bulk_import.test_handler import importing, request, steps
from tests.ingest.collector.test_collector import GatedJournal


def reply_to(*tables: pa.Table) -> tuple[wire.EventsReply, float]:
    """The reply to the last of some imports, and the fraction of it that did not fit."""

    async def main() -> tuple[wire.EventsReply, float]:
        async with importing(MemoryJournal()) as (collector, _):
            imports = Importer(collector)
            answers = [await imports.take(request(table)) for table in tables]
            return answers[-1]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("actions", "part"), [([0, 1, 2, 0], 0.0), ([0, 1, 2, 9], 2 / 8), ([9] * 4, 1.0)]
)
def test_what_is_refused_of_an_import_is_told(actions: list[int], part: float) -> None:
    """Two episodes of two steps: good steps are accepted, those after a bad one are refused."""
    assert reply_to(steps({"a": 2, "b": 2}, actions=pa.array(actions)))[1] == part


@pytest.mark.parametrize("good", [0, 1])
@pytest.mark.parametrize("episodes", [NAMED, NAMED + 1, 700])
def test_a_reply_names_the_first_hundred_refused_episodes(episodes: int, good: int) -> None:
    """A reply names at most a hundred refused episodes and gives their total; bad rows are summed
    by reason."""
    actions = pa.array([9] * episodes + [0] * good)
    reply, wasted = reply_to(steps({f"e{n}": 1 for n in range(episodes + good)}, actions=actions))
    assert [item.index for item in reply.refused] == list(range(NAMED))
    assert reply.refused_count == (episodes if episodes > NAMED else 0)
    assert reply.refused_by == {"actions: expected an integer of 0..2": episodes}
    assert reply.accepted == 3 * good
    assert wasted == 3 * episodes / (3 * episodes + 3 * good)


def test_rows_are_summed_by_their_first_reason() -> None:
    """Each bad row counts once, also after the one that broke its episode."""
    actions = pa.array([0, 9, 9, 0, 0, 9])
    rewards = pa.array([0.0, 0.0, float("nan"), None, 0.0, 0.0])
    reply, _ = reply_to(steps({"a": 4, "b": 2}, actions=actions, rewards=rewards))
    assert reply.refused_by == {
        "actions: expected an integer of 0..2": 3,
        "rewards: expected a finite number": 1,
    }
    assert [item.index for item in reply.refused] == [1, 5]


def test_what_does_not_fit_counts_beyond_what_a_reply_names() -> None:
    """Known episodes fill the list of the reply; rows that do not fit after them count as wasted
    all the same."""
    known = {f"e{n}": 1 for n in range(NAMED)}
    actions = pa.array([0] * NAMED + [9])
    reply, wasted = reply_to(steps(known), steps(known | {"x": 1}, actions=actions))
    assert {item.error["code"] for item in reply.refused} <= {"completed", "invalid"}
    assert (reply.refused_count, reply.accepted) == (NAMED + 1, 0)
    assert wasted > 0.9


def test_what_is_refused_for_the_most_part_is_not_read_to_its_end() -> None:
    """The reply has the reason, and accepted rows are on disk; one refused in part is read
    whole.
    """
    count, good = 30_000, 400
    lengths = {f"e{n}": 1 for n in range(count)}

    async def main() -> None:
        journal = GatedJournal()
        async with importing(journal) as (collector, _):
            table = steps(lengths, actions=[0] * good + [9] * (count - good - 1) + [0])
            with pytest.raises(Refusal, match=r"stopped after .* 1,200 accepted") as refused:
                await Importer(collector).take(request(table))
            assert refused.value.code == "invalid"
            assert collector.journal.durable_row == collector.journal.submitted_row
            assert collector.assembler.steps == good

    asyncio.run(main())
    reply, _ = reply_to(steps(lengths, actions=[9 if n % 2 else 0 for n in range(count)]))
    assert (reply.accepted, reply.refused_count) == (3 * count // 2, count // 2)


def test_what_has_no_room_for_now_is_no_bad_import() -> None:
    """A token at its quota of open episodes gets 429, which may be retried, not 422."""
    caller, table = Caller("t", open_episodes=1), steps({f"e{n}": 1 for n in range(REFUSED_EVENTS)})

    async def main() -> None:
        async with importing(MemoryJournal()) as (collector, send):
            collector.accept(wire.Batch(events=[wire.Start(episode_id="x")]), caller=caller)
            with pytest.raises(Refusal, match="t: expected at most 1 open episode,") as refused:
                await Importer(collector).take(request(table, caller=caller))
            assert (refused.value.status, refused.value.retry_after) == (429, 1.0)
            collector.accept(wire.Batch(events=[wire.End(episode_id="x")]), caller=caller)
            assert (await send(table, caller=caller))[0] == 3 * REFUSED_EVENTS

    asyncio.run(main())


def test_an_import_without_a_key_may_be_sent_again_with_more_behind() -> None:
    """However many of its episodes are known, the new ones at the end are reached."""
    lengths = {f"e{n}": 1 for n in range(REFUSED_EVENTS)}
    reply, _ = reply_to(steps(lengths), steps(lengths | {"new": 1}))
    assert reply.accepted == 3
    assert {item.error["code"] for item in reply.refused} == {"completed"}
