"""What a running collector says of its journal: the ledger that `verify` compares with the shards.

    GET /v1/ledger                     the sums at one moment, the plans, where streams end
    GET /v1/ledger/records?after=ID    recorded shards by plan id, a page at a time

The moment is one turn of the event loop. What memory holds then is counted at once; the journal is
read by its own thread after everything that was submitted until then, and before anything later, so
that both speak of the same history.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import islice
from typing import Any

from ingest.collector.collector import Collector
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from storage.journal.records import DamageReport, Journal

PAGE = 2_000
ANSWER_SECONDS = 20.0


async def ledger(collector: Collector) -> wire.JournalLedger:
    """The account of this moment. Raises Refusal when the journal does not answer."""
    assembler, sealing = collector.assembler, collector.sealing
    held = (*assembler.episodes.values(), *assembler.closing.values())
    steps = dict(sealing.unrecorded)
    found = wire.JournalLedger(
        collector_id=collector.collector_id,
        accepted=assembler.steps,
        waiting_steps=sealing.waiting_steps,
        open_steps=sum(len(episode.rewards) for episode in held),
        open_episodes=dict(Counter(episode.started.policy_id for episode in held)),
        damage=damage_texts(collector.damage),
        waiting_ordinals=sealing.next_ordinals,
    )
    plans, found.next_ordinals = await _ask(collector, _plans_and_streams)
    for plan in plans:
        found.plans.append(
            wire.LedgerPlan(
                plan_id=plan.plan_id,
                stream=plan.stream,
                first=plan.first,
                last=plan.last,
                steps=steps.get(plan.plan_id, 0),
            )
        )
    return found


async def records(collector: Collector, after: int) -> wire.LedgerPage:
    """Recorded shards whose plan comes behind `after`; `last` is where the next page begins."""
    page = await _ask(collector, lambda journal: list(islice(journal.shards(after=after), PAGE)))
    rows = [
        wire.LedgerRecord(
            plan_id=record.plan_id,
            stream=record.stream,
            first=record.first,
            last=record.last,
            name=record.name,
            digest=record.digest,
            rows=record.rows,
            nbytes=record.nbytes,
        )
        for record in page
    ]
    return wire.LedgerPage(records=rows, last=page[-1].plan_id if len(page) == PAGE else None)


def _plans_and_streams(journal: Journal) -> tuple[list[Any], dict[str, int]]:
    return journal.plans(), journal.streams()


async def _ask(collector: Collector, job: Any) -> Any:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await collector.journal.ask(job)
    except TimeoutError as error:
        raise Refusal("busy", "the journal does not answer now", retry_after=1.0) from error


def damage_texts(damage: DamageReport) -> list[str]:
    """What was found broken in a journal, in words."""
    texts = {
        "rows were acknowledged and are missing at its end": damage.missing_rows,
        "rows are missing inside it": damage.lost_rows,
        "rows do not fit their checksum": damage.damaged_rows,
    }
    told = [f"{count} {text}" for text, count in texts.items() if count]
    if damage.set_aside is not None:
        told.append(f"the database cannot be read: {damage.reason}")
    return [*told, *damage.lost_state]
