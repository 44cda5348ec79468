"""From sealed parts to recorded shards, in two transactions.

    add: ordinals -> (stream is large or old enough) -> plan: durable -> writer -> record: durable,
    rows dropped

A part gets its ordinal when it is sealed, waits here until its stream is planned, and is released
once its shard is recorded. The ordinal is the part's position among its stream's parts in the order
of the journal's rows, so a replay before the plan gives the same one. All of this runs on the
collector's event loop. `transact(change, then)` changes the journal and calls `then` once the
change is durable, unless the state was rebuilt in between.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from ingest.collector.group_commit import Transaction
from ingest.collector.recovery import (
    CARRY,
    COUNTERS,
    DONE,
    FINISHED,
    INSTANCE,
    TOTALS,
    Recovered,
    assembler_state,
    encode_state,
    entries_of,
    plan_blob,
)
from ingest.collector.writer_thread import SealJob
from ingest.episodes.assembler import EpisodeAssembler
from ingest.episodes.idempotency import STATE
from ingest.episodes.sealed_parts import Sealed, parts_of_entry, steps_of
from storage.declarations.declaration import PolicyDeclaration
from storage.experience.episode import Part
from storage.experience.part_columns import PartColumns, each_part, parts_in
from storage.journal.records import Plan, ShardRecord
from storage.shards.names import ShardInfo

log = logging.getLogger("headrace.collector")

MAX_IDLE_ROWS = 64
"""The number of unneeded journal rows above which they are dropped without waiting for a record."""

MOST_WAITING = 16_000_000
"""Bytes of waiting parts of all streams above which parts do not wait for larger shards."""

PART_BYTES = 1_400
"""The approximate memory of a part without its columns, in bytes."""


BLOCK_PART_BYTES = 500
"""The same of a part in columns."""


class _ReadyParts(msgspec.Struct):
    """Parts of one stream that wait for a plan, from ordinal `first`; `rule` has the limits."""

    rule: PolicyDeclaration
    schema_id: str
    since: float
    first: int
    next_part: int = 0  # how many of the parts were passed to `fresh`
    parts: list[Sealed] = msgspec.field(default_factory=list)
    count: int = 0  # the parts in these
    nbytes: int = 0  # of columns
    held: int = 0  # the approximate memory of all, kept as a sum: it is asked for with each event


class Sealing:
    """The parts without a recorded shard, for one state of the journal.

    When the state is rebuilt, the collector makes a new one, and `guard` disables the callbacks of
    the old one. `fresh(stream, canonical_json, parts)` is called with parts that got their
    ordinals, `written(stream, first, last)` with written shards.
    """

    def __init__(
        self,
        recovered: Recovered,
        submit: Callable[[SealJob], None],
        *,
        transact: Callable[[Transaction, Callable[[], None]], None],
        guard: Callable[[Callable[[ShardInfo], None]], Callable[[ShardInfo], None]],
        fresh: Callable[[str, str, list[Part]], None] | None = None,
        written: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._submit = submit
        self._fresh, self._on_written = fresh, written
        self._transact = transact
        self._guard = guard
        self._assembler: EpisodeAssembler = recovered.assembler
        self._planned, self._waiting = recovered.planned, recovered.waiting
        self.totals = recovered.totals
        self.collector_id, self._keys = recovered.collector_id, recovered.keys
        self.idle_rows = list(recovered.idle_rows)
        self.in_flight = 0  # plans and records that are not durable yet, shards not written
        self._in_flight_bytes = 0
        self.unrecorded: dict[int, int] = {}  # plan id -> steps of the shard that is not recorded
        self._unwritten: Counter[str] = Counter()  # stream -> plans without their shard
        self._next_plan = recovered.next_plan
        self._ordinals = dict(recovered.ordinals)
        self._finished, self._lost = deque(recovered.finished), recovered.lost
        self._carried = set(recovered.carried)
        self._remembered = sum(count for _, count in recovered.finished)
        last = recovered.finished[-1:]
        self._next_finished = int(last[0][0].removeprefix(FINISHED)) + 1 if last else 0
        # key -> collector id -> the ordinal of the episode's first part in that one's stream
        self._episode_ordinals = dict(recovered.episode_ordinals)
        self._ready: dict[str, _ReadyParts] = {}
        self._empty: list[Sealed] = []  # episodes that ended without a step

    @property
    def pending_bytes(self) -> int:
        """The approximate memory of parts that wait for a plan or their shard, in bytes."""
        return self._in_flight_bytes + sum(ready.held for ready in self._ready.values())

    @property
    def waiting_steps(self) -> int:
        """Steps of parts that wait for a plan."""
        return sum(steps_of(ready.parts) for ready in self._ready.values())

    @property
    def next_ordinals(self) -> dict[str, int]:
        """stream -> the ordinal of its next part."""
        return dict(self._ordinals)

    def written(self, schema_id: str) -> bool:
        """Whether all sealed parts of a schema are in shards that readers can see."""
        streams = {*self._ready, *(name for name, plans in self._unwritten.items() if plans)}
        return not any(stream.rpartition("-")[2] == schema_id for stream in streams)

    def resume(self, now: float) -> None:
        """Write the shards of open plans, and queue sealed parts without a plan."""
        for plan, found in self._planned:
            rule = self._rule(found)
            if rule is not None:  # otherwise none of its parts is left: the journal was damaged
                owner, ordinal = owner_of(plan.stream), plan.first
                sealed = []
                for number, item in zip(entries_of(plan.blob), found, strict=True):
                    sealed.append(self._numbered(item, ordinal, owner))
                    ordinal += parts_of_entry(number)
                self._count(1, _size(sealed))
                self.unrecorded[plan.plan_id] = steps_of(sealed)
                self._unwritten[plan.stream] += 1
                self._tell(plan.stream, rule, sealed)
                self._write(plan, sealed, rule)
        self._assembler.sealed[:0] = self._waiting
        self._planned, self._waiting = [], []
        self.add(now)

    # --- planning --------------------------------------------------------------------------

    def add(self, now: float) -> None:
        """Queue the assembler's sealed parts by stream; plan a stream that is large enough."""
        sealed, self._assembler.sealed = self._assembler.sealed, []
        for item in sealed:
            if item.part is None:
                self._empty.append(item)
            else:
                self._queue(item, item.part, now)
        for stream, ready in list(self._ready.items()):
            self._tell(stream, ready.rule, ready.parts[ready.next_part :])
            ready.next_part = len(ready.parts)
            if ready.nbytes >= ready.rule.seal_bytes:
                self._plan(stream)
        if self.pending_bytes - self._in_flight_bytes >= MOST_WAITING:
            self.plan_all()

    def _tell(self, stream: str, rule: PolicyDeclaration, sealed: list[Sealed]) -> None:
        """Pass parts that have their ordinals to `fresh`."""
        if self._fresh is None:
            return
        parts = list(each_part(item.part for item in sealed if item.part is not None))
        if parts:
            self._fresh(stream, rule.canonical_spaces, parts)

    def _queue(self, item: Sealed, part: Part | PartColumns, now: float) -> None:
        stream = f"{self.collector_id}-{part.schema_id}"
        ready = self._ready.get(stream)
        if ready is None:
            rules = self._assembler.policies.schemas[part.policy_id, part.schema_id]
            first = self._ordinals.get(stream, 0)
            ready = self._ready[stream] = _ReadyParts(rules.declaration, part.schema_id, now, first)
        ordinal = ready.first + ready.count
        ready.count += parts_in(part)
        self._ordinals[stream] = ready.first + ready.count
        ready.parts.append(self._numbered(item, ordinal, self.collector_id))
        ready.nbytes += part.nbytes
        ready.held += part.nbytes + _extra(item)

    def _numbered(self, item: Sealed, ordinal: int, owner: str) -> Sealed:
        """Add the ordinals to a sealed part, unless its rows are damaged.

        Readers join parts by stream and first ordinal. So an episode that continues in the stream
        of another `owner` (after a restore) has a first part there too.
        """
        if item.part is None:
            return item
        if isinstance(item.part, PartColumns):
            return msgspec.structs.replace(item, part=item.part.with_ordinals(ordinal))
        first = self._episode_ordinals.setdefault(item.key, {}).setdefault(owner, ordinal)
        part = item.part.with_ordinals(ordinal, first)
        return msgspec.structs.replace(item, part=part)

    def plan_due(self, now: float) -> None:
        """Plan the streams whose oldest part has waited long enough."""
        for stream, ready in list(self._ready.items()):
            if now - ready.since >= ready.rule.seal_seconds:
                self._plan(stream)

    def plan_all(self) -> None:
        for stream in list(self._ready):
            self._plan(stream)

    def _plan(self, stream: str) -> None:
        """Make a plan of a stream's waiting parts durable, then have its shard written."""
        ready = self._ready.pop(stream)
        first, last = ready.first, ready.first + ready.count - 1
        plan = Plan(self._next_plan, stream, ready.schema_id, first, last, plan_blob(ready.parts))
        self._next_plan += 1
        self._count(1, ready.held)
        self.unrecorded[plan.plan_id] = steps_of(ready.parts)
        self._unwritten[stream] += 1
        self._transact(Transaction(plan=plan), lambda: self._write(plan, ready.parts, ready.rule))

    # --- writing and recording -------------------------------------------------------------

    def _rule(self, sealed: list[Sealed]) -> PolicyDeclaration | None:
        part = next((item.part for item in sealed if item.part is not None), None)
        if part is None:
            return None
        return self._assembler.policies.schemas[part.policy_id, part.schema_id].declaration

    def _write(self, plan: Plan, sealed: list[Sealed], rule: PolicyDeclaration) -> None:
        """Pass a durable plan to the writer."""
        parts = [item.part for item in sealed if item.part is not None]
        done = self._guard(lambda shard: self._written(plan, sealed, shard))
        self._submit(SealJob(plan, rule.canonical_spaces, parts, done))

    def _written(self, plan: Plan, sealed: list[Sealed], shard: ShardInfo) -> None:
        """Record a shard, and drop the rows that are no longer needed."""
        parts = [item.part for item in sealed if item.part is not None]
        steps = sum(part.steps for part in parts)
        if shard.rows != steps and len(parts) == len(sealed):
            # An earlier start wrote the shard, and rows of it have been damaged since.
            text = "shard %s is recorded with %d rows, although the journal still has only %d"
            log.error(text, shard.path, shard.rows, steps)
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
        self.unrecorded.pop(plan.plan_id, None)
        self._unwritten[plan.stream] -= 1
        self.totals.rows += shard.rows
        self.totals.shards += 1
        self.totals.parts += plan.last - plan.first + 1
        if self._on_written is not None:
            self._on_written(plan.stream, plan.first, plan.last)
        self._record(sealed, record, _size(sealed))

    def release(self, sealed: list[Sealed]) -> None:
        """Record what needs no shard: ends without steps, parts that are in shards (`adopt`)."""
        self._count(1, 0)
        self._record(sealed, None, 0)

    def settle(self, *, all_rows: bool = False) -> None:
        """Record episodes without steps, and drop unneeded rows if there are many (or all)."""
        if self._empty or len(self.idle_rows) > MAX_IDLE_ROWS or (self.idle_rows and all_rows):
            empty, self._empty = self._empty, []
            self.totals.empty += len(empty)
            self.release(empty)

    def _record(self, sealed: list[Sealed], record: ShardRecord | None, nbytes: int) -> None:
        """Commit in one transaction: the shard, the rows to drop, and the state that remains."""
        assembler = self._assembler
        free, self.idle_rows = self.idle_rows, []
        put: dict[str, bytes] = {}
        delete = [INSTANCE + name for name in assembler.forget_instances()]
        keys, old_keys = self._keys.state()
        delete += old_keys
        owner = self.collector_id if record is None else owner_of(record.stream)
        for item in sealed:
            free.extend(assembler.release(item))
            self._carry(item, owner, put, delete)
        finished = [one for item in sealed for one in item.all_finished]
        self.totals.episodes += len(finished)
        self.totals.steps = assembler.steps
        if finished:
            name = f"{FINISHED}{self._next_finished:012}"
            put[name] = encode_state(finished)
            delete.extend(self._remember(name, len(finished)))
        self.totals.kept = self._kept()
        put.update(assembler_state(assembler, self.totals) | keys)
        change = Transaction(record=record, put=put, delete=delete, drop_rows=sorted(free))
        self._transact(change, lambda: self._count(-1, -nbytes))

    def _kept(self) -> dict[str, int]:
        """The numbers of entries in the journal's state by prefix, including lost entries."""
        kept = {
            TOTALS: 1,
            DONE: 1,
            COUNTERS: 1,
            FINISHED: len(self._finished),
            STATE: self._keys.chunks,
            INSTANCE: len(self._assembler.instances),
            CARRY: len(self._carried),
        }
        return {name: count + self._lost.get(name, 0) for name, count in kept.items()}

    def _carry(self, item: Sealed, owner: str, put: dict[str, bytes], delete: list[str]) -> None:
        """Store where an open episode was cut; delete this once the episode has ended."""
        key = f"{CARRY}{item.key}"
        if item.carry is not None:
            first = self._episode_ordinals.get(item.key, {}).get(owner, -1)
            put[key] = encode_state(item.carry.with_ordinal(first, owner))
            self._carried.add(key)
        elif item.finished is not None:
            first_part = isinstance(item.part, Part) and item.part.part == 0
            if not first_part:
                put.pop(key, None)
                delete.append(key)
                self._carried.discard(key)
            self._episode_ordinals.pop(item.key, None)

    def _remember(self, name: str, count: int) -> list[str]:
        """Count stored ended episodes; return the state keys of those above the limit."""
        self._next_finished += 1
        self._finished.append((name, count))
        self._remembered += count
        gone: list[str] = []
        while self._remembered - self._finished[0][1] >= self._assembler.limits.finished:
            key, number = self._finished.popleft()
            self._remembered -= number
            gone.append(key)
        return gone

    def _count(self, change: int, nbytes: int) -> None:
        self.in_flight += change
        self._in_flight_bytes += nbytes


def owner_of(stream: str) -> str:
    """The collector id that a stream's name begins with."""
    return stream.rpartition("-")[0]


def _size(sealed: list[Sealed]) -> int:
    return sum(item.part.nbytes + _extra(item) for item in sealed if item.part is not None)


def _extra(item: Sealed) -> int:
    """The approximate memory of what is not in buffers."""
    count = item.part.count if isinstance(item.part, PartColumns) else 0
    return PART_BYTES + BLOCK_PART_BYTES * count
