"""The collector: the shell around the assembler, without HTTP.

    accept -> assembler (in memory) -> journal row -> group commit -> acknowledgement
    ended or cut parts -> plan (ordinals, durable) -> writer process -> record (rows dropped)

Everything here runs on one event loop. The journal has its own thread (`Committer`), so has the
waiting for the writer process (`Sealer`); both report back onto the loop. The state in memory runs
ahead of the disk; nothing is acknowledged before its row is durable, and when a write fails the
state is thrown away and rebuilt from the journal.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ingest import wire
from ingest.assembler import Limits, Sealed
from ingest.committer import Committer, Transaction
from ingest.errors import CollectorFailed, Refusal
from ingest.events import Event, encode_event, encode_row
from ingest.recovery import (
    CARRY,
    FINISHED,
    INSTANCE,
    Recovered,
    assembler_state,
    encode_carry,
    encode_finished,
    plan_blob,
    policies_state,
    recover,
)
from ingest.sealer import Sealer, SealJob, Writer, WrittenShard
from storage.declarations import PolicyDeclaration
from storage.journal import Journal, Plan, ShardRecord
from storage.spaces import canonical_json

log = logging.getLogger("headrace.collector")

CHECK_TOGETHER = 32
"""From so many events on, validating a batch's values at once is cheaper than one by one."""

TICK_SECONDS = 0.1
TIMEOUT_CHECK_SECONDS = 1.0


@dataclass
class _Ready:
    """Parts of one stream that wait for a plan."""

    spaces: str
    schema_id: str
    parts: list[Sealed] = field(default_factory=list)
    nbytes: int = 0
    since: float = 0.0


@dataclass
class CollectorStats:
    """Counts since this collector started; `steps` is over the journal's whole life."""

    accepted: int = 0
    duplicates: int = 0
    refused: int = 0
    broken: int = 0
    abandoned: int = 0
    rebuilt: int = 0


class Collector:
    """Accepts events, makes them durable, turns them into shards.

    `journal` is open; `writer` is not started yet. `max_pending` bounds the bytes of parts that
    wait for a shard: beyond it events get 429.
    """

    def __init__(
        self,
        journal: Journal,
        writer: Writer,
        policies: Mapping[str, PolicyDeclaration],
        *,
        limits: Limits | None = None,
        max_pending: int = 256_000_000,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self.policies = dict(policies)
        self.stats = CollectorStats()
        self.draining = False
        self.failure: Exception | None = None
        self._limits = limits
        self._max_pending = max_pending
        self._clock, self._wall = clock, wall
        self._began = clock()
        self._loop = asyncio.get_running_loop()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._durable = journal.last_row
        self._rebuilding = False
        self._committer = Committer(
            journal,
            notify=self._notify,
            on_durable=self._on_durable,
            on_full=self._on_full,
            on_failed=self._on_failed,
        )
        self._sealer = Sealer(writer, notify=self._notify)
        self._in_flight = 0
        self._last_timeout_check = 0.0
        self.failed = asyncio.Event()
        journal.commit(put=policies_state(self.policies))
        self._take_up(recover(journal, self.policies, limits))

    # --- life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the journal and writer threads and finish what an earlier run had planned."""
        self._committer.start()
        self._sealer.start()
        self._resume()
        self._ticker = asyncio.ensure_future(self._tick_forever())

    async def drain(self, timeout: float = 4.0) -> None:
        """Refuse new events, seal what has ended, wait for its shards, close the journal."""
        self.draining = True
        self._ticker.cancel()
        if self.failure is None:
            self._move_sealed()
            for stream in list(self._ready):
                self._plan(stream)
            deadline = self._clock() + timeout
            while self._in_flight and self._clock() < deadline and self.failure is None:
                await asyncio.sleep(0.01)
            self._settle()
        await asyncio.to_thread(self._sealer.close)
        await asyncio.sleep(0)  # a last shard's record is submitted before the journal closes
        await asyncio.to_thread(self._committer.close)
        self._on_failed(CollectorFailed("the collector was stopped"))

    def _notify(self, function: Callable[..., Any], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    @property
    def now(self) -> float:
        """Seconds that this collector has been running."""
        return self._clock() - self._began

    @property
    def steps(self) -> int:
        """Steps accepted over the journal's whole life."""
        return self.assembler.steps

    @property
    def pending_bytes(self) -> int:
        """Raw bytes of parts that wait for a plan or for their shard."""
        return self._in_flight_bytes + sum(ready.nbytes for ready in self._ready.values())

    # --- accepting -------------------------------------------------------------------------

    def accept(self, batch: wire.Batch, *, single: bool = False) -> tuple[wire.EventsReply, int]:
        """Judge and apply a batch; answers the reply, to be sent once the row is durable.

        A refused event names itself in the reply. Unless `single`, one that is refused for its
        content closes its episode as broken. Raises Refusal when nothing can be accepted now.
        """
        self._require_open()
        assembler, received = self.assembler, self._wall()
        many = len(batch.events) >= CHECK_TOGETHER
        values = assembler.check_values(batch) if many else {}
        row = self._committer.next_row
        encoded: list[bytes] = []
        reply = wire.EventsReply(durable=True, accepted=0)
        for index, event in enumerate(batch.events):
            try:
                judged = assembler.judge(batch.instance, event, values.get(index))
            except Refusal as refusal:
                self.stats.refused += 1
                reply.refused.append(_item_error(index, refusal))
                if refusal.breaks_episode and not single:
                    self._break(event.episode_id, str(refusal), encoded, row, received)
                continue
            if judged is None:
                reply.duplicates += 1
            else:
                reply.accepted += 1
                self._apply(*judged, encoded, row, received)
        self.stats.accepted += reply.accepted
        self.stats.duplicates += reply.duplicates
        return reply, self._append(encoded, received)

    def register(self, request: wire.Register) -> tuple[wire.Registered, int]:
        """Register a client instance, or find the import of that name again."""
        self._require_open()
        if request.name is not None:
            known = self.assembler.instance_named(request.name)
            if known is not None:
                starts = self.assembler.instances[known].starts.ranges()
                return wire.Registered(instance=known, starts=starts), self._committer.next_row - 1
        opened = self.assembler.open_instance(secrets.token_hex(8), request.name)
        encoded: list[bytes] = []
        row, received = self._committer.next_row, self._wall()
        self._apply(opened, encode_event(opened), encoded, row, received)
        return wire.Registered(instance=opened.instance), self._append(encoded, received)

    async def durable(self, row: int) -> None:
        """Wait until journal row `row` is on disk.

        Raises Refusal (disk_full) when it will not be, CollectorFailed when the journal is gone.
        """
        if self.failure is not None:
            raise CollectorFailed(str(self.failure))
        if row > self._durable:
            future = self._loop.create_future()
            self._waiters.append((row, future))
            await future

    def _require_open(self) -> None:
        if self.failure is not None:
            raise CollectorFailed(str(self.failure))
        if self.draining:
            raise Refusal("draining", "the collector is shutting down", retry_after=1.0)
        if self._rebuilding:
            raise _disk_full()
        if self.pending_bytes > self._max_pending:
            text = f"{self.pending_bytes} bytes wait to be written to shards"
            raise Refusal("busy", text, retry_after=0.5)

    def _apply(
        self, event: Event, blob: bytes, encoded: list[bytes], row: int, received: int
    ) -> None:
        """Apply one event that goes into row `row`, and the cut that it may call for."""
        assembler, now = self.assembler, self.now
        assembler.apply(event, blob, row=row, received=received, now=now)
        encoded.append(blob)
        key = getattr(event, "key", None)
        cut = assembler.cut_for_size(key) if key is not None else None
        if cut is not None:
            blob = encode_event(cut)
            assembler.apply(cut, blob, row=row, received=received, now=now)
            encoded.append(blob)

    def _break(
        self, episode_id: str, cause: str, encoded: list[bytes], row: int, received: int
    ) -> None:
        ended = self.assembler.break_episode(episode_id, cause)
        if ended is not None:
            self.stats.broken += 1
            log.warning("episode %s is broken: %s", episode_id, cause)
            self._apply(ended, encode_event(ended), encoded, row, received)

    def _append(self, encoded: list[bytes], received: int) -> int:
        """Submit the row of the events; answers the row that an acknowledgement waits for."""
        if not encoded:
            return self._committer.next_row - 1
        row = self._committer.append(encode_row(received, self.assembler.steps, encoded))
        if row not in self.assembler.needed:
            self._idle_rows.append(row)
        self._move_sealed()
        return row

    # --- journal results -------------------------------------------------------------------

    def _on_durable(self, row: int) -> None:
        self._durable = row
        waiters = self._waiters
        while waiters and waiters[0][0] <= row:
            future = waiters.popleft()[1]
            if not future.done():
                future.set_result(None)

    def _on_full(self, error: Exception) -> None:
        """The disk is full: refuse what is not durable, and rebuild from what is."""
        log.error("journal: %s; refusing events until there is room", error)
        self._rebuilding = True
        self.stats.rebuilt += 1
        self._fail_waiters(_disk_full())
        self._committer.new_epoch()
        self._committer.call(
            lambda journal: recover(journal, self.policies, self._limits), self._rebuilt
        )

    def _rebuilt(self, recovered: Recovered) -> None:
        self._committer.restart_rows(recovered.last_row)
        self._take_up(recovered)
        self._rebuilding = False
        self._resume()

    def _on_failed(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
        self._fail_waiters(CollectorFailed(str(error)))
        self.failed.set()

    def _fail_waiters(self, error: Exception) -> None:
        while self._waiters:
            future = self._waiters.popleft()[1]
            if not future.done():
                future.set_exception(error)

    # --- sealing ---------------------------------------------------------------------------

    def _take_up(self, recovered: Recovered) -> None:
        """Continue from a journal's state."""
        self.assembler = recovered.assembler
        self.totals = recovered.totals
        self.collector_id = recovered.collector_id
        self.damage = recovered.damage
        if self.damage:
            log.error("journal damage: %s", self.damage)
        self._recovered = recovered
        self._next_plan = recovered.next_plan
        self._ordinals = dict(recovered.ordinals)
        self._idle_rows = list(recovered.idle_rows)
        self._finished_keys = deque(recovered.finished_keys)
        last = recovered.finished_keys[-1:]
        self._next_finished = int(last[0].removeprefix(FINISHED)) + 1 if last else 0
        self._ready: dict[str, _Ready] = {}
        self._settled: list[Sealed] = []
        self._episode_ordinals: dict[int, int] = {}
        self._in_flight = 0
        self._in_flight_bytes = 0
        self._durable = recovered.last_row

    def _resume(self) -> None:
        """Write what was planned and not recorded, queue what was sealed and not planned."""
        for episode in self.assembler.episodes.values():
            if episode.episode_ordinal >= 0:
                self._episode_ordinals[episode.started.key] = episode.episode_ordinal
        for plan, parts in self._recovered.planned:
            self._write(plan, parts)
        self.assembler.sealed = self._recovered.waiting
        self._recovered = Recovered(self.assembler)
        self._move_sealed()

    def _move_sealed(self) -> None:
        """Sort what the assembler sealed by stream; plan a stream that is large enough."""
        sealed, self.assembler.sealed = self.assembler.sealed, []
        for item in sealed:
            if item.part is None:
                self._settled.append(item)
                continue
            stream = f"{self.collector_id}-{item.part.schema_id}"
            ready = self._ready.get(stream)
            if ready is None:
                rules = self.assembler.rules_of(item.part.policy_id, item.part.schema_id)
                policy = rules.declaration
                spaces = canonical_json(policy.observation, policy.action)
                ready = self._ready[stream] = _Ready(spaces, item.part.schema_id, since=self.now)
            ready.parts.append(item)
            ready.nbytes += item.part.nbytes
        for stream, ready in list(self._ready.items()):
            if ready.nbytes >= self._seal_rule(ready).seal_bytes:
                self._plan(stream)

    def _seal_rule(self, ready: _Ready) -> PolicyDeclaration:
        """The declaration of the stream's first waiting part says when it is sealed."""
        part = ready.parts[0].part
        if part is None:
            raise CollectorFailed("an empty part waits for a shard")
        return self.assembler.rules_of(part.policy_id, part.schema_id).declaration

    def _plan(self, stream: str) -> None:
        """Give the waiting parts of a stream their ordinals, durably; then write them."""
        ready = self._ready.pop(stream)
        first = self._ordinals.get(stream, 0)
        last = first + len(ready.parts) - 1
        self._ordinals[stream] = last + 1
        plan = Plan(self._next_plan, stream, ready.schema_id, first, last, plan_blob(ready.parts))
        self._next_plan += 1
        self._in_flight += 1
        self._in_flight_bytes += ready.nbytes
        self._committer.transact(
            Transaction(plan=plan),
            lambda _: self._write(plan, ready.parts, counted=True, spaces=ready.spaces),
        )

    def _write(
        self, plan: Plan, sealed: list[Sealed], *, counted: bool = False, spaces: str | None = None
    ) -> None:
        """Hand a durable plan to the writer."""
        if not counted:
            self._in_flight += 1
            self._in_flight_bytes += sum(item.part.nbytes for item in sealed if item.part)
        parts, epoch = [], self._committer.epoch
        for ordinal, item in enumerate(sealed, plan.first):
            if item.part is None:
                continue
            first = self._episode_ordinals.setdefault(item.key, ordinal)
            parts.append(item.part.with_ordinals(ordinal, first))
        if spaces is None and parts:
            rules = self.assembler.rules_of(parts[0].policy_id, parts[0].schema_id)
            spaces = rules.declaration.canonical_spaces
        self._sealer.submit(
            SealJob(
                plan, spaces or "", parts, lambda shard: self._written(epoch, plan, sealed, shard)
            )
        )

    def _written(self, epoch: int, plan: Plan, sealed: list[Sealed], shard: WrittenShard) -> None:
        """Record a shard and drop the rows that nothing needs any more."""
        if epoch != self._committer.epoch:
            return  # the state was rebuilt; the plan was handed to the writer again
        record = ShardRecord(
            plan.plan_id,
            plan.stream,
            plan.first,
            plan.last,
            shard.path.name,
            shard.digest,
            shard.rows,
            shard.nbytes,
        )
        self.totals.rows += shard.rows
        self.totals.shards += 1
        self.totals.parts += len(sealed)
        nbytes = sum(item.part.nbytes for item in sealed if item.part)
        self._record(sealed, record, nbytes)

    def _settle(self) -> None:
        """Record episodes without steps, and drop rows that nothing needs."""
        if self._settled or len(self._idle_rows) > 64 or (self._idle_rows and self.draining):
            settled, self._settled = self._settled, []
            self._in_flight += 1
            self._record(settled, None, 0)

    def _record(self, sealed: list[Sealed], record: ShardRecord | None, nbytes: int) -> None:
        assembler, totals = self.assembler, self.totals
        free, self._idle_rows = self._idle_rows, []
        put: dict[str, bytes] = {}
        delete: list[str] = []
        finished = [item.finished for item in sealed if item.finished is not None]
        for item in sealed:
            free.extend(assembler.release(item))
            if item.carry is not None:
                first = self._episode_ordinals[item.key]
                put[f"{CARRY}{item.key}"] = encode_carry(item.carry.with_ordinal(first))
            elif item.part is not None and item.part.part > 0:
                delete.append(f"{CARRY}{item.key}")
                put.pop(f"{CARRY}{item.key}", None)
            if item.finished is not None:
                self._episode_ordinals.pop(item.key, None)
        totals.episodes += len(finished)
        totals.empty += sum(item.part is None for item in sealed)
        totals.steps = assembler.steps
        if finished:
            name = f"{FINISHED}{self._next_finished:012}"
            self._next_finished += 1
            put[name] = encode_finished(finished)
            self._finished_keys.append(name)
            while len(self._finished_keys) > _MAX_FINISHED_BLOBS:
                delete.append(self._finished_keys.popleft())
        put.update(assembler_state(assembler, totals))
        delete.extend(INSTANCE + gone for gone in assembler.forget_instances())
        change = Transaction(record=record, put=put, delete=delete, drop_rows=sorted(free))
        self._committer.transact(change, lambda _: self._recorded(nbytes))

    def _recorded(self, nbytes: int) -> None:
        self._in_flight -= 1
        self._in_flight_bytes -= nbytes

    # --- time ------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if not self._rebuilding and self.failure is None:
                self.tick()

    def tick(self) -> None:
        """What time calls for: time-outs, cuts, shards that waited long enough."""
        now = self.now
        if now - self._last_timeout_check >= TIMEOUT_CHECK_SECONDS:
            self._last_timeout_check = now
            self._apply_due(now)
        for stream, ready in list(self._ready.items()):
            if now - ready.since >= self._seal_rule(ready).seal_seconds:
                self._plan(stream)
        self._settle()

    def _apply_due(self, now: float) -> None:
        encoded: list[bytes] = []
        row, received = self._committer.next_row, self._wall()
        for event in self.assembler.tick(now):
            if getattr(event, "how", None) == "abandoned":
                self.stats.abandoned += 1
            self._apply(event, encode_event(event), encoded, row, received)
        self._append(encoded, received)


_MAX_FINISHED_BLOBS = 4_096
"""Ended episodes are remembered for so many shards (and up to Limits.finished in memory)."""


def _disk_full() -> Refusal:
    return Refusal(
        "disk_full",
        "the disk is full: nothing of this request was kept, try again later",
        retry_after=2.0,
    )


def _item_error(index: int, refusal: Refusal) -> wire.ItemError:
    document = refusal.to_json()
    place = document.get("path")
    document["path"] = f"$.events[{index}]" + (f".{place}" if place else "")
    return wire.ItemError(index=index, error=document)
