"""The account of a running collector's journal, which `verify` compares with the shards.

    GET /v1/ledger                     sums at one point in time, the plans, the ends of streams
    GET /v1/ledger/records?after=ID    recorded shards by plan id, in pages

The point in time is one turn of the event loop. The state in memory is counted in it. The journal's
thread reads the journal after all earlier submissions and before all later ones, so both agree.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import islice
from typing import Any

from msgspec.structs import asdict

from ingest.collector.collector import Collector
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from storage.journal.records import DamageReport, Journal

PAGE = 2_000
ANSWER_SECONDS = 20.0


async def ledger(collector: Collector) -> wire.JournalLedger:
    """The account at this moment. Raises Refusal (429) if the journal does not answer in time."""
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
    """A page of recorded shards with plan ids greater than `after`.

    `last` is the `after` of the next page. Raises Refusal as `ledger` does.
    """
    page, damaged = await _ask(
        collector,
        lambda journal: (list(islice(journal.shards(after), PAGE)), journal.damage.damaged_records),
    )
    rows = [wire.LedgerRecord(**asdict(record)) for record in page]
    last = page[-1].plan_id if len(page) == PAGE else None
    return wire.LedgerPage(records=rows, last=last, damaged=damaged)


def _plans_and_streams(journal: Journal) -> tuple[list[Any], dict[str, int]]:
    return journal.plans(), journal.streams()


async def _ask(collector: Collector, job: Any) -> Any:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await collector.journal.ask(job)
    except TimeoutError as error:
        text = f"the journal has not answered for {ANSWER_SECONDS:g} seconds"
        raise Refusal("busy", text, retry_after=1.0) from error


def damage_texts(damage: DamageReport) -> list[str]:
    """The damage of a journal as texts, one per kind."""
    kinds = (
        (damage.missing_rows, "acknowledged rows that are missing at its end"),
        (damage.lost_rows, "rows that are missing inside it"),
        (damage.damaged_rows, "rows that do not match their checksum"),
        (damage.damaged_records, "records of shards that do not match their checksum"),
    )
    lines = [f"{text}: {count:,}" for count, text in kinds if count]
    if damage.set_aside is not None:
        lines.append(f"the database cannot be read: {damage.reason}")
    return [*lines, *damage.lost_state]
