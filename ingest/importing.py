"""Whole episodes into the journal: the quick way of a bulk import (see `bulk_runs`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ingest import wire
from ingest.auth import Caller
from ingest.bulk_runs import Run
from ingest.collector import Collector
from ingest.errors import Refusal
from ingest.events import ActedRun, Event, Started, encode_event
from ingest.judgements import REPLAYED

Apply: TypeAlias = Callable[[Event, bytes], None]


def accept_runs(
    collector: Collector, runs: Sequence[Run], instance: str | None, caller: Caller
) -> tuple[wire.EventsReply, int]:
    """Accept episodes as one journal row; answers the reply, to be sent once that is durable.

    A refused episode is named by its place in `runs`. Raises Refusal when nothing can be accepted.
    """
    reply = wire.EventsReply(durable=collector.keeps, accepted=0)

    def fill(apply: Apply) -> None:
        for place, run in enumerate(runs):
            try:
                new = _accept(collector, run, instance, caller, apply)
            except Refusal as refusal:
                collector.stats.refused += 1
                collector.stats.refused_by[refusal.code] += 1
                reply.refused.append(wire.ItemError(index=place, error=refusal.to_json()))
                continue
            reply.accepted += run.events * new
            reply.duplicates += run.events * (not new)

    row = collector.compose(fill)
    collector.stats.accepted += reply.accepted
    collector.stats.duplicates += reply.duplicates
    return reply, row


def _accept(
    collector: Collector, run: Run, instance: str | None, caller: Caller, apply: Apply
) -> bool:
    """Apply an episode from its start to its end; answers False when it is known already."""
    judged = collector.assembler.judge(instance, run.start, now=collector.now)
    if judged is None:
        return False
    started, blob = judged
    if not isinstance(started, Started):
        raise TypeError(f"expected a start to be judged as one, got {started}")
    if caller.token_id:
        started, blob = collector.owned(started, caller)
    apply(started, blob)
    acted = ActedRun(
        started.key,
        1,
        run.steps,
        run.obs,
        run.actions,
        run.rewards,
        run.logp,
        REPLAYED,
        run.versions,
        run.pass_prob,
        run.ts,
    )
    apply(acted, encode_event(acted))
    ended = collector.assembler.judge(instance, run.end, now=collector.now)
    if ended is not None:
        apply(*ended)
    return True
