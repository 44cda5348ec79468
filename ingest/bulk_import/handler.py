"""Bulk import: an Arrow stream of shard columns becomes events.

`POST /v1/steps` takes one row a step, rows of an episode behind each other in order of `t`. Needed:
`eps_id`, `obs[.path]`, `actions[.path]`, `rewards`; optional: `t`, `terminateds`, `truncateds`,
`ended`, `final_obs[.path]`, `infos`, `action_logp`, `policy_version`, `pass_prob`, `ts`,
`training_enabled`, `continues`, `tags`, `policy_id`, `source`, `agent_id`. An episode whose last
row does not say that it was truncated ends as terminated. The body carries its CRC-32 in the header
`Headrace-CRC32` (8 hex digits), because Arrow has no checksum of its own.

A body that does not fit its policy's columns is refused as a whole. A row whose values are refused
closes its episode as broken at the last good step, is named in the reply by column and row, and
leaves the other episodes alone.

With an `Idempotency-Key` the import may be repeated: episodes that are known under it are skipped,
and counted as duplicates, but those that were broken or abandoned (see `import_known`). A digest of
the rows that came with a key is kept as long as the numbers of its episodes are; other rows under
it are a conflict. A key is its token's.

Each batch of episodes is one journal row, so that a killed import has whole episodes only; small
imports that arrive together share one (see `gathering`). A long episode that goes row by row is
taken in pieces, for which it needs a key: a repetition goes on where a killed import stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import zlib
from collections.abc import Callable, Container, Iterable, Iterator
from functools import partial
from time import perf_counter, time
from typing import Any, TypeVar

from ingest.access.tokens import Caller
from ingest.bulk_import.acceptance import accept_runs, tell
from ingest.bulk_import.arrow_stream import Batches, read_batches, read_table, table_of
from ingest.bulk_import.column_path import Run, Runs, runs_of
from ingest.bulk_import.import_known import events_of, still_open, tell_torn
from ingest.bulk_import.import_reply import ImportReply
from ingest.bulk_import.journal_rows import ImportRows
from ingest.bulk_import.repeats import digest_rows
from ingest.bulk_import.request_batching import ROW_EPISODES, ROW_STEPS, Gathering
from ingest.bulk_import.row_path import BulkColumns, BulkEpisode, place_of, policy_of
from ingest.collector.collector import Collector
from ingest.episodes.client_instances import IMPORT
from ingest.episodes.idempotency import key_of
from ingest.episodes.journal_events import Receipt
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from ingest.web.asgi import MOSTLY, Request
from ingest.web.cost_limits import in_thread, shared
from storage.declarations.declaration import PolicyDeclaration
from storage.experience.range_set import RangeSet

T = TypeVar("T")

_KEY = "Idempotency-Key"
TURN_EVENTS, TURN_SECONDS = (20, 500), 0.002
"""Events of the way row by row that are taken in one turn, and how long they shall take.

A call of somebody else waits for one turn or two, which should not be felt.
"""

REST_TURNS = 2
"""Others have so many times a turn after it, while an import is refused for the most part."""

FEW_ROWS = 100
"""Of the way row by row, what is made events on the event loop, some 3 ms."""

ROOM_SECONDS = 0.02  # between looks whether the shard writer has caught up
CRC_BYTES = 5_120
SMALL = 500_000  # bytes of a body that is read on the event loop
MANY_ROWS = 2_000  # of such a body, that is read in a thread all the same: each may be an episode


async def import_steps(
    request: Request, collector: Collector, gathering: Gathering
) -> tuple[wire.EventsReply, float]:
    """Take a bulk request; answers when all of it is durable. Raises Refusal, CollectorFailed.

    Beside the reply stands the part of it, 0 to 1, that was refused for what it is.
    """
    if request.content_type != wire.ARROW:
        raise Refusal(
            "unsupported_media", f"expected {wire.ARROW}, got {request.content_type!r:.80}"
        )
    _check_crc(request)
    key = key_of(request.headers.get(b"idempotency-key"))
    # the first request loads pyarrow, and a large one takes seconds
    small = len(request.body) < SMALL and "pyarrow" in sys.modules
    stream = read_batches(request.body) if small else None
    reply, gathers = None, False
    if stream is not None:
        small = stream.rows <= MANY_ROWS
        gathers = small and key is None
        if gathers:
            reply = await _gathered(request, stream, collector, gathering)
    if reply is None:
        reply = await _alone(request, collector, gathering, key, small=small, charged=gathers)
    return reply.message, reply.wasted


async def _gathered(
    request: Request, stream: Batches, collector: Collector, gathering: Gathering
) -> ImportReply | None:
    """What `_alone` answers, of one taken with those that came beside it; None to go alone."""
    request.caller.charge(stream.rows)  # before anything is waited for
    names_policy = "policy_id" in stream.schema.names
    policy = policy_of(table_of([stream]) if names_policy else None, collector.policies)
    if not stream.rows:
        return None
    rules = collector.assembler.rules[policy.policy_id]
    answer = await gathering.take(stream, rules, request.caller)
    if answer is None:
        return None
    reply, row = answer
    await collector.durable(row)
    return reply


async def _alone(
    request: Request,
    collector: Collector,
    gathering: Gathering,
    key: str | None,
    *,
    small: bool,
    charged: bool,
) -> ImportReply:
    """The reply to an import that is taken by itself."""
    receipt = _receipt(collector, key, request.caller.token_id)
    if small:
        found, content = _read(request.body, collector, key, receipt)
    else:
        short = len(request.body) < SMALL
        reading = gathering.reading.entered(request.turn) if short else contextlib.nullcontext()
        async with reading:
            found, content = await in_thread(_read, request.body, collector, key, receipt)
    if not charged:
        request.caller.charge(found.rows)
    opened = partial(_opened, request, collector, key, receipt, content)
    reply = ImportReply(durable=collector.keeps)
    if isinstance(found, Runs):
        before = await opened()
        if not still_open(found, before[0], collector.assembler):
            await _take_runs(found, before, collector, reply, request.caller)
            return reply
        found = await in_thread(_by_row, request.body, collector)
    async with _turn(found, request, gathering):
        request.caller.require_live(time())
        kept = await _beside(found, _looked_at, found)
        await _take_rows(found, kept, await opened(), collector, reply, request.caller)
    return reply


def _by_row(body: bytes, collector: Collector) -> BulkColumns:
    """An import with a key for the way row by row. Raises Refusal."""
    table = read_table(body)
    return BulkColumns(table, policy_of(table, collector.policies), numbered=True)


def _turn(
    found: BulkColumns, request: Request, gathering: Gathering
) -> contextlib.AbstractAsyncContextManager[None]:
    """To be entered before rows are looked at one by one, which is dear. Raises Refusal (busy).

    Few rows share their wait for the disk with others.
    """
    if found.rows <= FEW_ROWS:
        return shared(request.turn)
    lane = gathering.short if found.nbytes <= SMALL else gathering.long
    return lane.entered(request.turn)


async def _opened(
    request: Request,
    collector: Collector,
    key: str | None,
    receipt: Receipt | None,
    content: tuple[bytes, int] | None,
) -> tuple[str | None, RangeSet]:
    """The instance of a keyed import, and which of its episodes are known. Raises Refusal."""
    if key is None:
        return None, RangeSet()
    owner = request.caller.token_id
    if _receipt(collector, key, owner) != receipt:
        text = "another import with this key is being read"
        raise Refusal("busy", text, _KEY, retry_after=1.0)
    registered, row = collector.register(wire.Register(name=IMPORT + key), owner, content)
    await collector.durable(row)
    return registered.instance, RangeSet(registered.starts)


async def _take_runs(
    found: Runs,
    opened: tuple[str | None, RangeSet],
    collector: Collector,
    reply: ImportReply,
    caller: Caller,
) -> None:
    """Accept whole episodes whose steps stay columns."""
    instance, known = opened
    fresh = found.episodes
    if known:  # beside the loop: an import may have hundreds of thousands
        fresh = await asyncio.to_thread(_unknown, found.episodes, known)
        await _tell_known(found, opened, collector, reply)
    for some in _grouped(fresh):
        await _room(collector, reply, caller)
        outcomes, row = accept_runs(collector, found, some, instance, caller)
        await collector.durable(row)
        tell(reply, zip(some, outcomes, strict=True))


async def _tell_known(
    found: BulkColumns | Runs,
    opened: tuple[str | None, RangeSet],
    collector: Collector,
    reply: ImportReply,
) -> None:
    """Tell of what a request before has taken, once all of that is on disk."""
    instance, known = opened
    reply.take(0, await asyncio.to_thread(events_of, found, known))
    tell_torn(found, instance, known, collector.assembler, reply)
    await collector.durable(collector.submitted_row)


async def _take_rows(
    found: BulkColumns,
    kept: list[BulkEpisode] | None,
    opened: tuple[str | None, RangeSet],
    collector: Collector,
    reply: ImportReply,
    caller: Caller,
) -> None:
    """Accept the events that rows are made of, those that were kept or made now.

    Of an episode that is open the events are numbered: those that are known are duplicates.
    """
    instance, starts = opened
    known = starts.difference(still_open(found, instance, collector.assembler))
    if known:
        await _tell_known(found, (instance, known), collector, reply)
    pace, journal, over = _Pace(), ImportRows(collector), _Over(known)
    groups = _groups(found.episodes(over) if kept is None else kept, over, pace)
    while group := await _beside(found, next, groups, None):
        await _room(collector, reply, caller)
        journal.require()
        began = perf_counter()
        row = _accept(group, instance, collector, reply, caller, over)
        took = perf_counter() - began
        pace.took(sum(len(episode.events) for episode in group), took)
        await journal.wrote(row)
        try:
            reply.require_hope()
        except Refusal:
            await journal.durable()  # it says how much was taken
            raise
        if reply.wasted > MOSTLY:
            await asyncio.sleep(REST_TURNS * took)
    await journal.durable()


class _Over:
    """The numbers of the episodes of which nothing is taken any more: the known, the refused."""

    def __init__(self, known: RangeSet) -> None:
        self._known, self._refused = known, set[int]()

    def __contains__(self, number: object) -> bool:
        return number in self._refused or (isinstance(number, int) and number in self._known)

    def add(self, number: int) -> None:
        self._refused.add(number)


async def _beside(found: BulkColumns, function: Callable[..., T], *args: Any) -> T:
    """Run it in a thread, unless the rows are so few that this would take longer than they do."""
    return function(*args) if found.rows <= FEW_ROWS else await in_thread(function, *args)


def _looked_at(found: BulkColumns) -> list[BulkEpisode] | None:
    """The episodes, once all of their rows are known to be events; None for so many that they are
    made again, a group at a time: they would take ten times their bytes. Raises Refusal.
    """
    if found.nbytes <= SMALL:
        return list(found.episodes())
    found.check()
    return None


def _receipt(collector: Collector, key: str | None, owner: str) -> Receipt | None:
    """What a token's key stands for, None for a new one. Raises Refusal: it is not known any more.

    That may be so of an import that an earlier release took.
    """
    instances = collector.assembler.instances
    name = None if key is None else instances.named(IMPORT + key, owner)
    known = None if name is None else instances.get(name)
    if known is not None and known.receipt is None and known.starts:
        text = "expected a new key: of an earlier import with this one the rows are not known"
        raise Refusal("conflict", text, _KEY)
    return None if known is None else known.receipt


def _check_crc(request: Request) -> None:
    given = request.headers.get(b"headrace-crc32")
    found = f"{_crc32(request.body):08x}"
    if given is None or given.decode("latin-1").lower() != found:
        shown = "none" if given is None else repr(given.decode("latin-1")[:40])
        raise Refusal("malformed", f"expected the header Headrace-CRC32: {found}, got {shown}")


def _crc32(body: bytes) -> int:
    """zlib's, which lets go of the interpreter for more than 5 kB, in pieces for which it does not.

    To get it back takes longer than such a piece, while the journal's thread is at work.
    """
    if len(body) > SMALL:
        return zlib.crc32(body)
    found, view = 0, memoryview(body)
    for begin in range(0, len(body), CRC_BYTES):
        found = zlib.crc32(view[begin : begin + CRC_BYTES], found)
    return found


def _read(
    body: bytes, collector: Collector, key: str | None, receipt: Receipt | None
) -> tuple[BulkColumns | Runs, tuple[bytes, int] | None]:
    """The episodes of a body, and what its key stands for from now on, None where nothing is new.

    Raises Refusal, also for another body than its key stands for.
    """
    table = read_table(body)
    policy = policy_of(table, collector.policies)
    given = None if key is None else _content(table, key, receipt, policy)
    runs = runs_of(table, collector.assembler.rules[policy.policy_id], numbered=key is not None)
    if runs is not None:
        return runs, given
    return BulkColumns(table, policy, numbered=key is not None), given


def _content(
    table: Any, key: str, known: Receipt | None, policy: PolicyDeclaration
) -> tuple[bytes, int] | None:
    """(digest, rows) to be kept, None for an import that is known to its end. Raises Refusal."""
    rows, hidden = table.num_rows, {path.partition(".")[0] for path in policy.redact}
    if known is not None:
        if rows < known.rows or digest_rows(table, known.rows, hidden) != known.digest:
            text = (
                f"expected the {known.rows} rows that came with {key!r} before, and perhaps more "
                f"behind them, got other content in {rows} rows"
            )
            raise Refusal("conflict", text, _KEY)
        if rows == known.rows:
            return None
    return digest_rows(table, rows, hidden), rows


class _Pace:
    """How many events a turn is for: refused ones take several times as long as others."""

    def __init__(self) -> None:
        self.events = TURN_EVENTS[0]

    def took(self, events: int, seconds: float) -> None:
        """A turn of so many took so long."""
        least, most = TURN_EVENTS
        self.events = max(least, min(most, int(events * TURN_SECONDS / max(seconds, 1e-6))))


def _groups(
    episodes: Iterable[BulkEpisode], over: Container[int], pace: _Pace
) -> Iterator[list[BulkEpisode]]:
    """Whole episodes, of about so many events as others may wait for, but those that are over."""
    group: list[BulkEpisode] = []
    size = 0
    for episode in episodes:
        if group and size + len(episode.events) > pace.events:
            yield group
            group, size = [], 0
        if episode.number in over:  # perhaps since the group before
            continue
        group.append(episode)
        size += len(episode.events)
    if group:
        yield group


def _unknown(runs: list[Run], known: RangeSet) -> list[Run]:
    """The episodes whose numbers are not known."""
    return [run for run in runs if run.number not in known]


def _grouped(runs: list[Run]) -> Iterator[list[Run]]:
    """Whole episodes, so many that others wait no longer for the event loop than is sane."""
    group: list[Run] = []
    size = 0
    for run in runs:
        if group and (size + run.steps > ROW_STEPS or len(group) == ROW_EPISODES):
            yield group
            group, size = [], 0
        group.append(run)
        size += run.steps
    if group:
        yield group


async def _room(collector: Collector, reply: ImportReply, caller: Caller) -> None:
    """Wait for the shard writer in the middle of a request: what has begun is not told to wait.

    Raises Refusal (401) once the caller's token has ended; what was taken before stays.
    """
    while reply.message.accepted and collector.is_behind and collector.failure is None:
        await asyncio.sleep(ROOM_SECONDS)
    caller.require_live(time())


def _accept(
    group: list[BulkEpisode],
    instance: str | None,
    collector: Collector,
    reply: ImportReply,
    caller: Caller,
    over: _Over,
) -> int:
    """Accept the events of some episodes as one batch; the row that must be durable for it.

    What follows a refused event of an episode is refused, too: those that come in a later batch are
    counted now.
    """
    batch = wire.Batch(
        instance=instance, events=[event for episode in group for event in episode.events]
    )
    answer, row = collector.accept(batch, caller=caller)
    reply.take(answer.accepted, answer.duplicates)
    reply.refused += len(answer.refused)
    owners = [(episode, index) for episode in group for index in range(len(episode.events))]
    last = {episode.number: episode for episode in group}
    for item in answer.refused:
        episode, index = owners[item.index]
        if episode.number not in over:
            over.add(episode.number)
            reply.refused += last[episode.number].rest
            _, field = place_of(item.error.get("path"))
            reply.refuse(episode.row(index), item.error, episode.place(index, field))
    return row
