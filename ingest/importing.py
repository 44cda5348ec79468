"""Whole episodes into the journal: the quick way of a bulk import (see `bulk_runs`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ingest import wire
from ingest.auth import Caller
from ingest.bulk_runs import Run, Runs
from ingest.collector import Collector
from ingest.errors import Refusal
from ingest.events import Event, Imported, ImportedEpisode, Started, encode_event
from ingest.judgements import REPLAYED

Apply: TypeAlias = Callable[[Event, bytes], None]


def accept_runs(
    collector: Collector, runs: Runs, some: Sequence[Run], instance: str | None, caller: Caller
) -> tuple[wire.EventsReply, int]:
    """Accept `some` of the episodes as one event in one journal row.

    Answers the reply, to be sent once the row is durable. A refused episode is named by its place
    in `some`. Raises Refusal when nothing can be accepted.
    """
    reply = wire.EventsReply(durable=collector.keeps, accepted=0)

    def fill(apply: Apply) -> None:
        taken: list[Run] = []
        episodes: list[ImportedEpisode] = []
        for place, run in enumerate(some):
            try:
                started = _judge(collector, run, instance, caller, len(taken))
            except Refusal as refusal:
                collector.stats.refused += 1
                collector.stats.refused_by[refusal.code] += 1
                reply.refused.append(wire.ItemError(index=place, error=refusal.to_json()))
                continue
            if started is None:
                reply.duplicates += run.events
                continue
            taken.append(run)
            episodes.append(ImportedEpisode(started, run.steps, run.how))
        if taken:
            event = Imported(episodes, REPLAYED, **runs.columns_of(taken))
            apply(event, encode_event(event))
            reply.accepted += sum(run.events for run in taken)
            collector.stats.ended.update(run.how for run in taken)

    row = collector.compose(fill)
    collector.stats.accepted += reply.accepted
    collector.stats.duplicates += reply.duplicates
    return reply, row


def _judge(
    collector: Collector, run: Run, instance: str | None, caller: Caller, ahead: int
) -> Started | None:
    """The start of an episode, with its owner; None when it is known. Raises Refusal."""
    started = collector.assembler.judge_start(instance, run.start, ahead=ahead)
    if started is None or not caller.token_id:
        return started
    owned, _ = collector.owned(started, caller)
    return owned
