"""Imports that arrive together are checked together, and make one journal row.

The work for a small import is mostly the same few calls whatever its size. So all that arrive until
a turn of the event loop brings no other, and whose columns are alike, are one table: its columns
are checked once, its episodes are judged one by one, and each request hears of its own. What a
closer look is for, what does not hold what it says, or what would hold the loop for too long, goes
alone. There is no timer: under light traffic every import is a group of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from ingest.access.tokens import Caller
from ingest.bulk_import.acceptance import Outcome, accept_runs, tell
from ingest.bulk_import.arrow_stream import Batches, table_of
from ingest.bulk_import.column_path import Run, TooManyEpisodes, runs_of
from ingest.bulk_import.import_reply import ImportReply
from ingest.collector.collector import Collector
from ingest.episodes.open_episode import PolicyRules
from ingest.protocol.errors import Refusal
from ingest.web.cost_limits import Lane

ROW_STEPS, ROW_EPISODES = 20_000, 500
"""So much is taken in one turn of the event loop, some 20 ms, and is one journal row."""

CROWD = 64
"""So many requests wait for each other at most."""

Answer = tuple[ImportReply, int] | None
"""A request's reply and the journal row that it waits for; None for one that has to go alone."""


@dataclass(slots=True)
class _Waiting:
    stream: Batches
    rules: PolicyRules
    caller: Caller
    answer: asyncio.Future[Answer]


@dataclass(slots=True)
class _Group:
    """Requests of one caller, policy and schema."""

    first: _Waiting
    members: list[_Waiting] = field(default_factory=list)
    rows: int = 0

    def takes(self, one: _Waiting) -> bool:
        first = self.first
        return (
            self.rows + one.stream.rows <= ROW_STEPS
            and one.rules is first.rules
            and one.caller.token_id == first.caller.token_id
            and one.stream.schema.equals(first.stream.schema)
        )

    def add(self, one: _Waiting) -> None:
        self.members.append(one)
        self.rows += one.stream.rows


class Gathering:
    """The imports of one collector that wait for a turn of its loop that brings no other."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._waiting: list[_Waiting] = []
        self._rows = 0
        self.reading = Lane()
        self.short, self.long = Lane(), Lane()  # for those that go row by row

    async def take(self, stream: Batches, rules: PolicyRules, caller: Caller) -> Answer:
        """Accept the episodes of a stream, with those of others. Raises Refusal for all of them.

        A stream has a row or more.
        """
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._flush, 0)
        one = _Waiting(stream, rules, caller, loop.create_future())
        self._waiting.append(one)
        self._rows += stream.rows
        return await one.answer

    def _flush(self, seen: int) -> None:
        """Accept what waits, unless more came than was seen before, and there is room for more."""
        count = len(self._waiting)
        if seen < count < CROWD and self._rows < ROW_STEPS:
            asyncio.get_running_loop().call_soon(self._flush, count)
            return
        waiting, self._waiting, self._rows = self._waiting, [], 0
        groups: list[_Group] = []
        for one in waiting:
            group = next((group for group in groups if group.takes(one)), None)
            if group is None:
                group = _Group(one)
                groups.append(group)
            group.add(one)
        for group in groups:
            self._accept(group.members)

    def _accept(self, members: Sequence[_Waiting]) -> None:
        """Accept the episodes of a group as one row, and tell each member."""
        answers: list[Answer] = [None]
        try:
            answers = list(self._answers(members))
        except TooManyEpisodes:
            if len(members) > 1:  # as its halves, each in a turn of its own
                middle, loop = len(members) // 2, asyncio.get_running_loop()
                for half in (members[:middle], members[middle:]):
                    loop.call_soon(self._accept, half)
                return
        except Exception as error:  # it is every member's, who each raise it in their own place
            for one in members:
                if not one.answer.done():
                    one.answer.set_exception(error)
            return
        for one, answer in zip(members, answers, strict=True):
            if not one.answer.done():
                one.answer.set_result(answer)

    def _answers(self, members: Sequence[_Waiting]) -> Iterator[Answer]:
        first = members[0]
        edges = list(accumulate((one.stream.rows for one in members), initial=0))
        try:
            table = table_of([one.stream for one in members])
            runs = runs_of(table, first.rules, numbered=False, edges=edges[:-1], most=ROW_EPISODES)
        except Refusal:  # of one of them, who hears of it when it goes alone
            runs = None
        if runs is None:
            yield from [None] * len(members)
            return
        outcomes, row = accept_runs(self._collector, runs, runs.episodes, None, first.caller)
        told = iter(zip(runs.episodes, outcomes, strict=True))
        for begin, end in pairwise(edges):
            reply = ImportReply(durable=self._collector.keeps)
            tell(reply, _until(told, end), begin)
            yield reply, row


def _until(told: Iterator[tuple[Run, Outcome]], end: int) -> Iterator[tuple[Run, Outcome]]:
    """What was told of the episodes up to a row, where one of them ends."""
    for run, outcome in told:
        yield run, outcome
        if run.end == end:
            return
