"""Erasing episodes from a collector's journal.

    await erase(collector, marks)

1. The tombstones are made durable: from then on events of these episodes are refused. An episode
   that has an erased tag, or continues an erased one, gets a tombstone of its id.
2. Their open episodes end, and everything that is ready for a shard goes to shards, where
   maintenance erases it (`storage.maintenance.removal`).
3. Rows that are left lose what replays skip anyway, because it is in shards: events of other
   requests in the same row are kept. The lists of ended episodes and of keys lose the names.
4. The database is written anew, so that nothing is left on free pages and in the log.

Every step can be repeated. A row is the content of one request, which may have events of many
people, so rows are rewritten and not dropped.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from ingest.collector.collector import Collector, OpenRow
from ingest.collector.recovery import ERASED, FINISHED, decode_finished, encode_state
from ingest.episodes.idempotency import STATE, decode_keys
from ingest.episodes.journal_events import (
    Cut,
    Imported,
    ImportedBlock,
    JournalEvent,
    Keyed,
    Opened,
    Receipt,
    Started,
    Stored,
    decode_row,
    encode_event,
    encode_row,
)
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from storage.declarations.tombstones import Tombstones
from storage.experience.range_set import RangeSet
from storage.journal.records import Journal

WAIT_SECONDS = 120.0
LOOK_SECONDS = 0.02

E = TypeVar("E", Imported, ImportedBlock)


async def erase(collector: Collector, marks: Iterable[str]) -> wire.Erased:
    """Erase the episodes with these tombstones from a collector's journal; see the module.

    Raises Refusal if nothing can be accepted now, or if shards are not written in time: it can be
    asked for again.
    """
    fresh = collector.erased.new(marks)
    await _remember(collector, fresh)
    after, names = 0, set[str]()
    while after >= 0:  # before any of these rows loses its tags
        after, found = await collector.journal.ask(partial(_tagged, after, collector.erased))
        names |= found
    await _remember(collector, map(collector.erased.mark, names))
    ended = await _end(collector)
    rows = after = 0
    while after >= 0:
        job = partial(_scrub_page, after, collector.assembler.done.copy())
        after, count = await collector.journal.ask(job)
        rows += count
    await collector.journal.ask(partial(_scrub_state, collector.erased))
    await collector.journal.ask(lambda journal: journal.shred())
    collector.journal.rebuild(Refusal("busy", "the state is being rebuilt", retry_after=0.2))
    return wire.Erased(tombstones=len(fresh), ended=ended, rows=rows)


async def _remember(collector: Collector, marks: Iterable[str]) -> None:
    """Make tombstones durable that are not known yet."""
    fresh = collector.erased.new(marks)

    def commit(journal: Journal) -> None:
        known = journal.state(ERASED)
        last = max((int(key.removeprefix(ERASED)) for key in known), default=-1)
        journal.commit(put={f"{ERASED}{last + 1:012}": encode_state(fresh)})

    if fresh:
        await collector.journal.ask(commit)
        collector.erased.add(fresh)


async def _end(collector: Collector) -> int:
    """End the open episodes that are erased, and wait until all sealed parts are in shards."""
    assembler, erased = collector.assembler, collector.erased
    held = [one.started for one in (*assembler.episodes.values(), *assembler.closing.values())]
    while more := [one.episode_id for one in held if _is_next(one, erased)]:
        await _remember(collector, map(erased.mark, more))  # and then those that continue these
    hidden = [one.key for one in held if erased.hide(one.episode_id)]

    def fill(row: OpenRow) -> None:
        for one in list(assembler.episodes.values()):
            if one.started.key in hidden:  # and with it the tracks of the other agents
                for event in assembler.break_episode(one.started.name, "it was erased"):
                    row.apply(event)
        for one in list(assembler.closing.values()):
            if one.started.key in hidden:
                row.apply(Cut(one.started.key, one.part, one.steps))

    await collector.journal.durable(collector.compose(fill))
    end = asyncio.get_running_loop().time() + WAIT_SECONDS
    while not await _is_written(collector, hidden):
        if asyncio.get_running_loop().time() > end:
            raise Refusal("busy", "the shards are not written in time", retry_after=10.0)
    return len(hidden)


def _is_next(started: Started, erased: Tombstones) -> bool:
    """Whether an episode has no tombstone of its id, but one of a tag, or of what it continues."""
    known = erased.hide_tags(started.tags) or erased.hide(started.continues or "")
    return known and not erased.hide(started.episode_id)


async def _is_written(collector: Collector, keys: Sequence[int]) -> bool:
    """Whether these episodes, and all parts that are sealed now, are in recorded shards."""
    sealing = collector.sealing
    sealing.plan_all()
    if not collector.journal.is_usable:
        await asyncio.sleep(LOOK_SECONDS)
        return False
    last = max(sealing.unrecorded, default=-1)
    while sealing is collector.sealing and any(plan <= last for plan in sealing.unrecorded):
        await asyncio.sleep(LOOK_SECONDS)
    await collector.journal.ask(lambda journal: None)  # the latest record is durable
    await asyncio.sleep(LOOK_SECONDS)
    done = collector.assembler.done
    return sealing is collector.sealing and all(key in done for key in keys)


# --- the job of the journal's thread -----------------------------------------------------------


def _tagged(after: int, erased: Tombstones, journal: Journal) -> tuple[int, set[str]]:
    """The ids of episodes with an erased tag that start in a page of rows, and its last number.

    Those without steps are in no shard, which would tell their ids.
    """
    page = journal.page(after)
    events = (event for _, blob in page for event in decode_row(blob).events)
    found = {e.episode_id for e in events if isinstance(e, Started) and erased.hide_tags(e.tags)}
    return (page[-1][0] if page else -1), found


def _scrub_page(after: int, done: RangeSet, journal: Journal) -> tuple[int, int]:
    """Rewrite a page of rows: (the last number, -1 after the last page; how many were changed)."""
    page = journal.page(after)
    changed = {
        number: scrubbed for number, blob in page if (scrubbed := scrub_row(blob, done)) is not None
    }
    if changed:
        journal.rewrite(changed)
    return (page[-1][0] if page else -1), len(changed)


def scrub_row(blob: bytes, done: RangeSet) -> bytes | None:
    """A row without what a replay skips: the events of episodes in `done`; None if unchanged.

    Numbers that count starts stay, because a replay has to count them.
    """
    row = decode_row(blob)
    events = [_scrubbed(event, done) for event in row.events]
    if events == row.events:
        return None
    kept = [encode_event(event) for event in events if event is not None]
    return encode_row(row.received, row.steps, kept, row.running)


def _scrubbed(
    event: JournalEvent | Keyed | Stored, done: RangeSet
) -> JournalEvent | Keyed | Stored | None:
    if isinstance(event, (Opened, Receipt, Keyed, Stored)):
        return event
    if isinstance(event, Imported):
        return _imported(event, done)
    if isinstance(event, ImportedBlock):
        return _block(event, done)
    if event.key not in done:
        return event
    return _blank(event) if isinstance(event, Started) else None


def _blank(event: Started) -> Started:
    return replace(event, episode_id="", tags="{}", continues=None, ts=None, agent_id=None)


def _imported(event: Imported, done: RangeSet) -> Imported:
    spans, at = list[tuple[int, int]](), 0
    episodes = []
    for one in event.episodes:
        if one.started.key in done:
            spans.append((at, at + one.steps))
            one = replace(one, started=_blank(one.started), final_obs=None, cause="")
        episodes.append(one)
        at += one.steps
    return replace(_without_steps(event, spans), episodes=episodes) if spans else event


def _block(event: ImportedBlock, done: RangeSet) -> ImportedBlock:
    ends: list[int] = np.cumsum(np.frombuffer(event.lengths, np.int64)).tolist()
    spans = list(itertools.pairwise([0, *ends]))
    gone = [at for at in range(len(spans)) if event.key + at in done]
    if not gone:
        return event
    blank = {"episode_ids": "", "tags": "{}", "continues": None, "final_obs": None}
    changes = {}
    for name, value in blank.items():
        values = list(getattr(event, name))
        for at in gone if values else ():
            values[at] = value
        changes[name] = values
    return replace(_without_steps(event, [spans[at] for at in gone]), **changes)


def _without_steps(event: E, spans: Sequence[tuple[int, int]]) -> E:
    """Zeros in the place of the values of some steps, which nothing decodes any more."""
    total, changes = len(event.rewards) // 8, dict[str, object]()
    for name in ("obs", "actions", "rewards", "action_logp", "ts"):
        data = bytearray(getattr(event, name))
        lengths = np.frombuffer(getattr(event, f"{name}_lengths", b""), np.uint32)
        size = len(data) // max(1, total)
        sums: Any = np.cumsum(lengths) if len(lengths) else np.arange(1, total + 1) * size
        places: list[int] = [0, *sums.tolist()]
        for begin, end in spans if data else ():
            data[places[begin] : places[end]] = bytes(places[end] - places[begin])
        changes[name] = bytes(data)
    inside = {step for begin, end in spans for step in range(begin, end)}
    infos = {step: info for step, info in event.infos.items() if step not in inside}
    return replace(event, infos=infos, **changes)


def _scrub_state(erased: Tombstones, journal: Journal) -> None:
    """Remove the names from the lists of ended episodes and of Idempotency-Keys."""
    put: dict[str, bytes] = {}
    for key, blob in journal.state(FINISHED).items():
        kept = [one for one in decode_finished(blob) if not erased.hide(one.episode_id)]
        put[key] = encode_state(kept)
    for key, blob in journal.state(STATE).items():
        keys = decode_keys(blob)
        for at, one in enumerate(keys):
            if erased.hide(one.episode_id):  # the number stays: it counts
                keys[at] = replace(one, episode_id="", name="", digest=b"")
        put[key] = encode_state(keys)
    journal.rewrite({}, {key: blob for key, blob in put.items() if blob != journal.state(key)[key]})
