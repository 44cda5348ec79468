"""Anonymous requests cannot fill the log, and events without a line are counted."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.access.log_rate import BROKEN_RATE, BrokenLines, FewLines
from ingest.protocol import messages as wire
from storage.journal.memory_journal import MemoryJournal
from tests.ingest.collector.test_collector import registered, running

AT_ONCE = int(BROKEN_RATE)


@given(st.lists(st.floats(0.0, 2.0), max_size=60), st.integers(1, 5))
def test_each_one_is_told_or_counted(pauses: list[float], rate: int) -> None:
    """The lines written plus the events that they count are all events; the rate is never
    exceeded."""
    few, now, lines, counted = FewLines(rate), 0.0, list[float](), 0
    for pause in pauses:
        now += pause
        untold = few.take(now)
        if untold is not None:
            lines.append(now)
            counted += untold
    counted += few.rest(now + 1.1)  # a second, and a margin for rounding
    assert len(lines) + counted == len(pauses)
    for begin in lines:  # at most a second's share, and that of the idle time before
        assert sum(begin <= line < begin + 1.0 for line in lines) <= 2 * rate
    assert few.rest(now + 2.2) == 0


def test_what_was_left_out_is_told_once_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    """The number of events without a line is logged by the next tick that may write one, or with
    the next episode that gets one."""
    lines = BrokenLines()
    for n in range(25):
        lines.tell(f"e{n}", "it did not fit", 0.0)
    assert [record.message for record in caplog.records] == [
        f"episode e{n} is broken: it did not fit" for n in range(AT_ONCE)
    ]
    caplog.clear()
    lines.rest(0.05)
    assert not caplog.records
    lines.rest(0.1)
    assert [record.message for record in caplog.records] == [
        "15 more episodes are broken (not logged individually)"
    ]
    caplog.clear()
    lines.tell("f", "late", 0.15)
    lines.tell(("g", "left"), "late", 0.3)
    assert [record.message for record in caplog.records] == [
        "1 more episode is broken (not logged individually)",
        "episode g, agent left is broken: late",
    ]


def test_a_collector_tells_of_few_episodes_that_break(caplog: pytest.LogCaptureFixture) -> None:
    """A batch of hundreds that do not fit has a few lines; all of them are broken and counted."""
    time = 0.0

    async def main() -> int:
        nonlocal time
        async with running(MemoryJournal(), clock=lambda: time) as collector:
            instance = await registered(collector)
            events: list[wire.Event] = []
            for n in range(300):
                events.append(wire.Start(episode_id=f"e{n}", start=n))
                events.append(wire.LogAction(episode_id=f"e{n}", seq=1, obs=[0.0, 0.0], action=9))
            reply, row = collector.accept(wire.Batch(instance=instance, events=events))
            await collector.journal.durable(row)
            assert len(reply.refused) == 300
            time = 1.0
            collector.tick()
            broken = collector.stats.broken
            time = 10.0  # longer than a drain waits
            return broken

    assert asyncio.run(main()) == 300
    messages = [record.message for record in caplog.records if "broken" in record.message]
    assert len(messages) == AT_ONCE + 1
    found = re.match(r"(\d+) more episodes", messages[-1])
    assert found is not None
    assert int(found[1]) == 300 - AT_ONCE
