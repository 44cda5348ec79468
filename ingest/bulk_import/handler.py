"""Bulk import: an Arrow stream of shard columns becomes events.

`POST /v1/steps` takes one row a step, rows of an episode behind each other in order of `t`. Needed:
`eps_id`, `obs[.path]`, `actions[.path]`, `rewards`; optional: `t`, `terminateds`, `truncateds`,
`ended`, `final_obs[.path]`, `infos`, `action_logp`, `policy_version`, `pass_prob`, `ts`,
`training_enabled`, `continues`, `tags`, `policy_id`, `source`, `agent_id`. An episode whose last
row does not say that it was truncated ends as terminated. The body carries its CRC-32 in the header
`Headrace-CRC32` (8 hex digits), because Arrow has no checksum of its own.

With `env_t`, the step of the environment, rows are those of tracks: an `eps_id` and `agent_id`
behind each other, with `agents`, how many tracks the whole episode has, on the last. All rows of a
body are of one policy; the tracks of another come in a request of their own.

A body whose columns have names or types that do not fit its policy is refused as a whole. A row
that does not fit is found by mask: its episode is broken at the last good step, or not begun where
there is none. The reply names it by row, column and reason, and the others are taken.

With an `Idempotency-Key` the import may be repeated: episodes that are known under it are skipped,
and counted as duplicates, but those with rows that do not fit, which are named again. A digest of
the rows that came with a key is kept as long as the numbers of its episodes are; other rows under
it are a conflict. A key is its token's.

A block of rows at a time is looked at, in a thread unless it is small, and each group of its
episodes is one journal row, so that a killed import has whole episodes only and a repetition goes
on behind them. The pieces of an episode that is longer than a block count once its last is there.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable
from time import time
from typing import Any, ParamSpec, TypeVar

from ingest.access.tokens import Caller
from ingest.bulk_import.acceptance import COMMIT_GROUPS, Acceptance, rebuilt
from ingest.bulk_import.arrow_stream import ArrowBatches, read_batches, table_of
from ingest.bulk_import.forms import Forms, policy_of
from ingest.bulk_import.repeats import digest_rows
from ingest.bulk_import.step_columns import StepBlock, StepColumns
from ingest.collector.collector import Collector
from ingest.episodes.client_instances import IMPORT
from ingest.episodes.idempotency import key_of
from ingest.episodes.journal_events import Receipt
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from ingest.web.asgi import Request
from ingest.web.cost_limits import in_thread
from storage.declarations.declaration import PolicyDeclaration
from storage.experience.range_set import RangeSet

P = ParamSpec("P")
T = TypeVar("T")

_KEY = "Idempotency-Key"
FEW_ROWS, MANY_ROWS = 100, 2_000
"""So many rows are looked at on the event loop, some 3 ms: with and without Python for each row."""

ROOM_SECONDS = 0.02  # between looks whether the shard writer has caught up
CRC_BYTES = 5_120
SMALL = 500_000  # bytes of a body that is read on the event loop


class Importer:
    """The imports of one collector, which take turns: a thread looks at one block of rows at a
    time, and one long episode at a time is there in pieces."""

    def __init__(self, collector: Collector) -> None:
        self._collector, self._forms = collector, Forms()
        self._looking, self._staging = asyncio.Lock(), asyncio.Lock()

    async def take(self, request: Request) -> tuple[wire.EventsReply, float]:
        """Take a bulk request; answers when all of it is durable. Raises Refusal, CollectorFailed.

        Beside the reply stands the part of it, 0 to 1, that was refused for what it is.
        """
        if request.content_type != wire.ARROW:
            text = f"expected {wire.ARROW}, got {request.content_type!r:.80}"
            raise Refusal("unsupported_media", text)
        _check_crc(request)
        collector, caller = self._collector, request.caller
        key = key_of(request.headers.get(b"idempotency-key"))
        receipt = _receipt(collector, key, caller.token_id)
        # the first request loads pyarrow, and a large one takes seconds
        small = len(request.body) < SMALL and "pyarrow" in sys.modules
        stream = read_batches(request.body) if small else None
        rows, body = MANY_ROWS + 1 if stream is None else stream.rows, stream or request.body
        if rows > MANY_ROWS:
            await request.sender.wait()
        found, content = await self._look(rows, _read, body, collector, self._forms, key, receipt)
        caller.charge(found.rows)
        instance, known = await self._opened(caller, key, receipt, content)
        taking = Acceptance(collector, found, caller, instance, known)
        try:
            await self._take(found, taking, caller)
        finally:
            taking.stop()
        if known:  # what a request before has taken, and is not on disk yet
            await collector.journal.durable(collector.journal.submitted_row)
        reply = taking.reply
        reply.message.refused.sort(key=lambda item: item.index)
        return reply.message, reply.wasted

    async def _look(
        self,
        rows: int,
        function: Callable[P, T],
        *args: P.args,
        **given: P.kwargs,
    ) -> T:
        """Run it in a thread, unless the rows are so few that they take less time than that."""
        if rows <= MANY_ROWS:
            return function(*args, **given)
        async with self._looking:
            return await in_thread(function, *args, **given)

    async def _take(self, found: StepColumns, taking: Acceptance, caller: Caller) -> None:
        staging = False
        try:
            for begin, end in found.blocks():
                if not taking.wants(begin):
                    continue
                if found.is_piece(begin, end) and not staging:
                    staging = await self._staging.acquire()
                rows = (end - begin) * (MANY_ROWS // FEW_ROWS if found.is_slow else 1)
                block = await self._look(rows, found.block, begin, end)
                await self._accept(block, taking, caller)
                taking.reply.require_hope()
                if staging and not taking.is_staging:
                    self._staging.release()
                    staging = False
        finally:
            if staging:
                self._staging.release()

    async def _accept(self, block: StepBlock, taking: Acceptance, caller: Caller) -> None:
        """Accept a block's episodes; between two turns of it the loop is everybody's.

        Raises Refusal where the state was rebuilt between two turns, without the first one's.
        """
        collector, row, since = self._collector, -1, None
        for turn, group in enumerate(taking.groups(block)):
            if turn % COMMIT_GROUPS:
                await asyncio.sleep(0)
            elif turn:
                await collector.journal.durable(row)
                since = None
            await self._room(taking, caller)
            if since not in (None, collector.assembler):
                raise rebuilt()
            row = max(row, taking.accept(block, group))
            since = collector.assembler
        await collector.journal.durable(row)

    async def _room(self, taking: Acceptance, caller: Caller) -> None:
        """Wait for the shard writer in the middle of a request: what has begun is not told to wait.

        Raises Refusal (401) once the caller's token has ended; what was taken before stays.
        """
        collector = self._collector
        while taking.has_begun and collector.is_behind and collector.journal.failure is None:
            await asyncio.sleep(ROOM_SECONDS)
        caller.require_live(time())

    async def _opened(
        self,
        caller: Caller,
        key: str | None,
        receipt: Receipt | None,
        content: tuple[bytes, int] | None,
    ) -> tuple[str | None, RangeSet]:
        """The instance of a keyed import, and which of its episodes are known. Raises Refusal."""
        if key is None:
            return None, RangeSet()
        collector, owner = self._collector, caller.token_id
        if _receipt(collector, key, owner) != receipt:
            text = "another import with this key is being read"
            raise Refusal("busy", text, _KEY, retry_after=1.0)
        registered, row = collector.register(wire.Register(name=IMPORT + key), owner, content)
        await collector.journal.durable(row)
        return registered.instance, RangeSet(registered.starts)


def _receipt(collector: Collector, key: str | None, owner: str) -> Receipt | None:
    """What a token's key stands for, None for a new one."""
    instances = collector.assembler.instances
    name = None if key is None else instances.named(IMPORT + key, owner)
    known = None if name is None else instances.get(name)
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
    given: bytes | ArrowBatches,
    collector: Collector,
    forms: Forms,
    key: str | None,
    receipt: Receipt | None,
) -> tuple[StepColumns, tuple[bytes, int] | None]:
    """The episodes of a body, and what its key stands for from now on, None where nothing is new.

    Raises Refusal, also for another body than its key stands for.
    """
    stream = read_batches(given) if isinstance(given, bytes) else given
    table = table_of(stream)
    policy = policy_of(table, collector.policies)
    rules = collector.assembler.policies.rules[policy.policy_id]
    content = None if key is None else _content(table, key, receipt, policy)
    redaction, form = collector.redactor.of(rules), forms.get(stream.schema, rules)
    return StepColumns(table, form, redaction, numbered=key is not None), content


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
