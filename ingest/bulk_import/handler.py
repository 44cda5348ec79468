"""Bulk import: an Arrow stream of shard columns becomes events.

`POST /v1/steps` takes one row per step; the rows of an episode are adjacent, in order of `t`.
Required columns: `eps_id`, `obs[.path]`, `actions[.path]`, `rewards`. Optional: `t`, `terminateds`,
`truncateds`, `ended`, `final_obs[.path]`, `infos`, `action_logp`, `policy_version`, `pass_prob`,
`ts`, `training_enabled`, `continues`, `tags`, `policy_id`, `source`, `agent_id`. An episode ends as
terminated unless its last row says that it was truncated. The header `Headrace-CRC32` (8 hex
digits) carries the body's CRC-32, because Arrow has no checksum.

With `env_t`, the step of the environment, rows belong to tracks: the rows of an `eps_id` and
`agent_id` are adjacent, and the last has `agents`, the number of tracks of the whole episode. All
rows of a body have one policy; tracks of other policies come in requests of their own.

A body whose columns have names or types that do not fit its policy is refused as a whole. Invalid
rows are found with masks: their episodes break at the last good step, or do not start if there is
none. The reply names them by row, column and reason, and the other episodes are accepted.

With an `Idempotency-Key` the import may be repeated: episodes known under the key are skipped and
counted as duplicates. Those with invalid rows are reported again. A digest of the key's rows, as
redacted, is kept as long as the numbers of its episodes; other rows under the key are a conflict.
Keys belong to a token.

Rows are processed in blocks, in a thread unless a block is small, and each group of a block's
episodes is one journal row. So a killed import has delivered whole episodes only, and a repetition
continues after them. An episode that is longer than a block is accepted with its last piece.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import Callable
from time import time
from typing import ParamSpec, TypeVar

from ingest.access.tokens import Caller
from ingest.bulk_import.acceptance import COMMIT_GROUPS, Acceptance, rebuilt
from ingest.bulk_import.arrow_stream import ArrowBatches, read_batches, table_of
from ingest.bulk_import.forms import Forms, policy_of
from ingest.bulk_import.repeats import KeyedRows
from ingest.bulk_import.step_columns import BlockRuns, StepBlock, StepColumns
from ingest.collector.collector import Collector
from ingest.episodes.client_instances import IMPORT
from ingest.episodes.idempotency import key_of
from ingest.episodes.journal_events import Receipt
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from ingest.web.asgi import Request
from ingest.web.cost_limits import in_thread
from storage.experience.range_set import RangeSet
from storage.wording import counted

P = ParamSpec("P")
T = TypeVar("T")

_KEY = "Idempotency-Key"
FEW_ROWS, MANY_ROWS = 100, 2_000
"""The most rows that are processed on the event loop, with and without Python code for each row.

They take about 3 ms.
"""

ROOM_SECONDS = 0.02  # between checks whether the shard writer has caught up
CRC_BYTES = 5_120
SMALL = 500_000  # bytes of a body that is read on the event loop


class Importer:
    """The imports of one collector.

    They take turns, so that one thread processes one block of rows at a time, and memory holds the
    pieces of only one long episode.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector, self._forms = collector, Forms()
        self._looking, self._staging = asyncio.Lock(), asyncio.Lock()

    async def take(self, request: Request) -> tuple[wire.EventsReply, float]:
        """Take a bulk request; return its reply when all of it is durable.

        Also returns the share of the request, 0 to 1, that was refused as invalid. Raises Refusal,
        CollectorFailed.
        """
        if request.content_type != wire.ARROW:
            text = f"expected {wire.ARROW}, got {request.content_type!r:.80}"
            raise Refusal("unsupported_media", text)
        _check_crc(request)
        collector, caller = self._collector, request.caller
        key = key_of(request.headers.get(b"idempotency-key"))
        receipt = _receipt(collector, key, caller.token_id)
        # the first request loads pyarrow, and a large body takes seconds
        small = len(request.body) < SMALL and "pyarrow" in sys.modules
        stream = read_batches(request.body) if small else None
        rows, body = MANY_ROWS + 1 if stream is None else stream.rows, stream or request.body
        if rows > MANY_ROWS:
            await request.sender.wait()
        if key is not None and collector.assembler.policies.redacts:  # Python code for each row
            rows *= MANY_ROWS // FEW_ROWS
        found, content = await self._look(rows, _read, body, collector, self._forms, key, receipt)
        caller.charge(found.rows)
        instance, known = await self._opened(caller, key, receipt, content)
        taking = Acceptance(collector, found, caller, instance, known)
        try:
            await self._take(found, taking, caller)
        finally:
            taking.stop()
        if known:  # episodes of an earlier request may not be on disk yet
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
        """Call the function in a thread, or directly if the rows are few."""
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
        """Accept a block's episodes in groups, and let the event loop run in between.

        Raises Refusal if the collector's state was rebuilt in between, which drops earlier pieces.
        """
        collector, row, since = self._collector, -1, None
        for turn, group in enumerate(taking.groups(block)):
            if turn and (isinstance(group, BlockRuns) or turn % COMMIT_GROUPS == 0):
                await collector.journal.durable(row)
                since = None
            elif turn:
                await asyncio.sleep(0)
            await self._room(taking, caller)
            if since not in (None, collector.assembler):
                raise rebuilt()
            row = max(row, taking.accept(block, group))
            since = collector.assembler
        await collector.journal.durable(row)

    async def _room(self, taking: Acceptance, caller: Caller) -> None:
        """Wait for the shard writer in the middle of a request, instead of refusing its rest.

        Raises Refusal (401) if the caller's token has expired; accepted episodes are kept.
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
        """The instance of a keyed import, and its known episodes. Raises Refusal."""
        if key is None:
            return None, RangeSet()
        collector, owner = self._collector, caller.token_id
        if _receipt(collector, key, owner) != receipt:
            text = "another import with this key is in progress"
            raise Refusal("busy", text, _KEY, retry_after=1.0)
        registered, row = collector.register(wire.Register(name=IMPORT + key), owner, content)
        await collector.journal.durable(row)
        return registered.instance, RangeSet(registered.starts)


def _receipt(collector: Collector, key: str | None, owner: str) -> Receipt | None:
    """The content that a token's key stands for; None for a new key."""
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
    """The CRC-32 of a body, in small pieces if the body is small.

    zlib releases the interpreter lock for pieces above 5 kB. Getting it back while the journal's
    thread runs takes longer than such a piece.
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
    """The episodes of a body, and the new content of its key, None if that does not change.

    Raises Refusal, also for a body other than the key stands for.
    """
    stream = read_batches(given) if isinstance(given, bytes) else given
    table = table_of(stream)
    policy = policy_of(table, collector.policies)
    rules = collector.assembler.policies.rules[policy.policy_id]
    redaction, form = collector.redactor.of(rules), forms.get(stream.schema, rules)
    content = None
    if key is not None:
        content = _content(KeyedRows(table, form, redaction), table.num_rows, key, receipt)
    return StepColumns(table, form, redaction, numbered=key is not None), content


def _content(
    keyed: KeyedRows, rows: int, key: str, known: Receipt | None
) -> tuple[bytes, int] | None:
    """(digest, rows) to be stored, None for an import that is known completely. Raises Refusal."""
    if known is not None:
        if rows < known.rows or not keyed.begins_with(known.rows, known.digest):
            text = (
                f"expected the {counted(known.rows, 'row')} that were sent with {key!r} before, "
                f"optionally followed by more, got other content in {counted(rows, 'row')}"
            )
            raise Refusal("conflict", text, _KEY)
        if rows == known.rows:
            return None
    return keyed.digest(), rows
