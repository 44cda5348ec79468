"""Long batches in slices: the journal writes one while the next is judged.

Between slices the event loop serves other requests.
"""

from __future__ import annotations

import asyncio

import msgspec

from ingest.access.tokens import Caller
from ingest.collector.collector import Collector
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal

SLICE_BYTES = 1_000_000
"""The size of a slice, for about 5 ms of the event loop."""


class _Slice(msgspec.Struct, frozen=True):
    first: int
    reply: wire.EventsReply
    durable: asyncio.Future[None]


async def take(
    collector: Collector, batch: wire.Batch, size: int, caller: Caller
) -> wire.EventsReply:
    """Accept a batch of `size` bytes, and return a reply once all its accepted events are durable.

    Unless one is refused, the events are removed from the batch once they are accepted: decoded
    ones may take many times the memory of their body, and one request at a time is being decoded.

    If a slice cannot be accepted or does not become durable, the reply refuses each of its events
    and all later ones. A rebuild of the collector's state takes more than one turn of the event
    loop, so the next slice always notices it.

    Raises Refusal if no slice was accepted, and CollectorFailed.
    """
    count = len(batch.events)
    each = max(1, count * SLICE_BYTES // max(size, SLICE_BYTES))
    if count <= each:
        reply, row = collector.accept(batch, caller=caller)
        if not reply.refused:
            batch.events.clear()
        await collector.journal.durable(row)
        return reply
    collector.require_room(batch)
    slices = list[_Slice]()
    failure: Refusal | None = None
    for first in range(0, count, each):
        piece = msgspec.structs.replace(batch, events=batch.events[first : first + each])
        try:
            reply, row = collector.accept_slice(piece, first, caller)
        except Refusal as refusal:
            failure = refusal
            break
        slices.append(_Slice(first, reply, collector.journal.when_durable(row)))
        await asyncio.sleep(0)
    if failure is None and not any(one.reply.refused for one in slices):
        batch.events.clear()
        piece.events.clear()
    outcomes = await asyncio.gather(*(one.durable for one in slices), return_exceptions=True)
    whole = wire.EventsReply(durable=collector.keeps, accepted=0)
    end = 0
    for one, outcome in zip(slices, outcomes, strict=True):
        if isinstance(outcome, Refusal):
            failure = outcome
            break
        if isinstance(outcome, BaseException):
            raise outcome
        whole.accepted += one.reply.accepted
        whole.duplicates += one.reply.duplicates
        whole.refused += one.reply.refused
        whole.hold = one.reply.hold
        whole.redeclared |= one.reply.redeclared
        end = one.first + each
    if failure is not None and not end:
        raise failure
    if failure is not None:
        rest = range(end, count)
        whole.refused += [wire.ItemError.of(index, failure) for index in rest]
    return whole
