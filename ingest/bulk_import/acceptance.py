"""Whole episodes into the journal: the quick way of a bulk import (see `bulk_runs`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import TypeAlias

from ingest.access.tokens import Caller
from ingest.bulk_import.column_path import Run, Runs
from ingest.bulk_import.import_reply import ImportReply
from ingest.collector.collector import Collector
from ingest.collector.quotas import owned
from ingest.episodes.event_checks import REPLAYED
from ingest.episodes.journal_events import Event, Imported, ImportedEpisode, Started, encode_event
from ingest.protocol.errors import Refusal

Apply: TypeAlias = Callable[[Event, bytes], None]


class Verdict(Enum):
    """What became of an episode that was not refused."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"


Outcome: TypeAlias = Verdict | Refusal


def accept_runs(
    collector: Collector, runs: Runs, some: Sequence[Run], instance: str | None, caller: Caller
) -> tuple[list[Outcome], int]:
    """Accept `some` of the episodes as one event in one journal row.

    Answers what became of each, and the row that must be durable before anybody hears of it.
    Raises Refusal when nothing can be accepted.
    """
    outcomes: list[Outcome] = []

    def fill(apply: Apply) -> None:
        taken: list[Run] = []
        episodes: list[ImportedEpisode] = []
        for run in some:
            try:
                started = _judge(collector, run, instance, caller, len(taken))
            except Refusal as refusal:
                collector.stats.refused += 1
                collector.stats.refused_by[refusal.code] += 1
                outcomes.append(refusal)
                continue
            if started is None:
                collector.stats.duplicates += run.events
                outcomes.append(Verdict.DUPLICATE)
                continue
            taken.append(run)
            episodes.append(ImportedEpisode(started, run.steps, run.how))
            outcomes.append(Verdict.ACCEPTED)
        if taken:
            event = Imported(episodes, REPLAYED, **runs.columns_of(taken))
            apply(event, encode_event(event))
            collector.stats.accepted += sum(run.events for run in taken)
            collector.stats.ended.update(run.how for run in taken)

    return outcomes, collector.compose(fill)


def tell(reply: ImportReply, runs: Iterable[tuple[Run, Outcome]], first_row: int = 0) -> None:
    """Add what became of episodes to the reply; a refusal names its row, counted from a first."""
    for run, outcome in runs:
        if outcome is Verdict.ACCEPTED:
            reply.take(run.events)
        elif outcome is Verdict.DUPLICATE:
            reply.take(0, run.events)
        else:
            row = run.begin - first_row
            reply.refused += run.events
            reply.refuse(row, outcome.to_json(), f"$.eps_id[{row}]")


def _judge(
    collector: Collector, run: Run, instance: str | None, caller: Caller, ahead: int
) -> Started | None:
    """The start of an episode, with its owner; None when it is known. Raises Refusal."""
    started = collector.assembler.judge_start(instance, run.start, ahead=ahead)
    if started is None or not caller.token_id:
        return started
    return owned(started, caller, collector.assembler.open_of)[0]
