"""From sealed parts to recorded shards: the two-step sealing.

    add -> (stream is large or old enough) -> plan: ordinals, durable -> writer -> record: durable,
    rows dropped

A part waits here until its stream is planned, and is forgotten once its shard is recorded. All of
it runs on the collector's loop. Changes of the journal go through `transact(change, then)`, which
runs `then` once the change is durable, unless the state was rebuilt in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ingest.assembler import EpisodeAssembler, Sealed
from ingest.committer import Transaction
from ingest.errors import CollectorFailed
from ingest.recovery import (
    CARRY,
    FINISHED,
    INSTANCE,
    Recovered,
    assembler_state,
    encode_carry,
    encode_finished,
    plan_blob,
)
from ingest.sealer import Sealer, SealJob, WrittenShard
from storage.declarations import PolicyDeclaration
from storage.episode import Part
from storage.journal import Plan, ShardRecord

MAX_IDLE_ROWS = 64
"""So many journal rows that nothing needs may wait for the next record."""


@dataclass
class _Ready:
    """Parts of one stream that wait for a plan; `rule` says how long."""

    rule: PolicyDeclaration
    schema_id: str
    since: float
    parts: list[Sealed] = field(default_factory=list)
    nbytes: int = 0


class Sealing:
    """The parts on their way to shards, as of one state of the journal.

    A rebuilt collector makes a new one: what the old one still waits for is `guard`ed away.
    """

    def __init__(
        self,
        recovered: Recovered,
        sealer: Sealer,
        *,
        transact: Callable[[Transaction, Callable[[], None]], None],
        guard: Callable[[Callable[[WrittenShard], None]], Callable[[WrittenShard], None]],
    ) -> None:
        self._sealer = sealer
        self._transact = transact
        self._guard = guard
        self._assembler: EpisodeAssembler = recovered.assembler
        self._planned, self._waiting = recovered.planned, recovered.waiting
        self.totals = recovered.totals
        self.collector_id = recovered.collector_id
        self.idle_rows = list(recovered.idle_rows)
        self.in_flight = 0  # plans and records that are not durable yet, shards not written
        self._in_flight_bytes = 0
        self._next_plan = recovered.next_plan
        self._ordinals = dict(recovered.ordinals)
        self._finished = deque(recovered.finished)
        self._remembered = sum(count for _, count in recovered.finished)
        last = recovered.finished[-1:]
        self._next_finished = int(last[0][0].removeprefix(FINISHED)) + 1 if last else 0
        self._episode_ordinals = dict(recovered.episode_ordinals)
        self._ready: dict[str, _Ready] = {}
        self._empty: list[Sealed] = []  # episodes that ended without a step

    @property
    def pending_bytes(self) -> int:
        """Raw bytes of parts that wait for a plan or for their shard."""
        return self._in_flight_bytes + sum(ready.nbytes for ready in self._ready.values())

    def resume(self, now: float) -> None:
        """Write what was planned and not recorded, queue what was sealed and not planned."""
        for plan, parts in self._planned:
            rule = self._rule(parts)
            if rule is not None:  # else nothing of it can be made again: the journal was damaged
                self._count(1, _size(parts))
                self._write(plan, parts, rule)
        self._assembler.sealed[:0] = self._waiting
        self._planned, self._waiting = [], []
        self.add(now)

    # --- planning --------------------------------------------------------------------------

    def add(self, now: float) -> None:
        """Sort what the assembler sealed by stream; plan a stream that is large enough."""
        sealed, self._assembler.sealed = self._assembler.sealed, []
        for item in sealed:
            if item.part is None:
                self._empty.append(item)
            else:
                self._queue(item, item.part, now)
        for stream, ready in list(self._ready.items()):
            if ready.nbytes >= ready.rule.seal_bytes:
                self._plan(stream)

    def _queue(self, item: Sealed, part: Part, now: float) -> None:
        stream = f"{self.collector_id}-{part.schema_id}"
        ready = self._ready.get(stream)
        if ready is None:
            rules = self._assembler.rules_of(part.policy_id, part.schema_id)
            ready = self._ready[stream] = _Ready(rules.declaration, part.schema_id, now)
        ready.parts.append(item)
        ready.nbytes += part.nbytes

    def plan_due(self, now: float) -> None:
        """Plan the streams whose first part has waited long enough."""
        for stream, ready in list(self._ready.items()):
            if now - ready.since >= ready.rule.seal_seconds:
                self._plan(stream)

    def plan_all(self) -> None:
        for stream in list(self._ready):
            self._plan(stream)

    def _plan(self, stream: str) -> None:
        """Give the waiting parts of a stream their ordinals, durably; then write them."""
        ready = self._ready.pop(stream)
        first = self._ordinals.get(stream, 0)
        last = first + len(ready.parts) - 1
        self._ordinals[stream] = last + 1
        plan = Plan(self._next_plan, stream, ready.schema_id, first, last, plan_blob(ready.parts))
        self._next_plan += 1
        self._count(1, ready.nbytes)
        self._transact(Transaction(plan=plan), lambda: self._write(plan, ready.parts, ready.rule))

    # --- writing and recording -------------------------------------------------------------

    def _rule(self, sealed: list[Sealed]) -> PolicyDeclaration | None:
        part = next((item.part for item in sealed if item.part is not None), None)
        if part is None:
            return None
        return self._assembler.rules_of(part.policy_id, part.schema_id).declaration

    def _write(self, plan: Plan, sealed: list[Sealed], rule: PolicyDeclaration) -> None:
        """Hand a durable plan to the writer."""
        parts: list[Part] = []
        for ordinal, item in enumerate(sealed, plan.first):
            if item.part is not None:
                first = self._episode_ordinals.setdefault(item.key, ordinal)
                parts.append(item.part.with_ordinals(ordinal, first))
        done = self._guard(lambda shard: self._written(plan, sealed, shard))
        self._sealer.submit(SealJob(plan, rule.canonical_spaces, parts, done))

    def _written(self, plan: Plan, sealed: list[Sealed], shard: WrittenShard) -> None:
        """Record a shard and drop the rows that nothing needs any more."""
        parts = [item.part for item in sealed if item.part is not None]
        steps = sum(part.steps for part in parts)
        if shard.rows != steps and len(parts) == len(sealed):
            raise CollectorFailed(f"{shard.path}: expected {steps} rows, it has {shard.rows}")
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
        self._record(sealed, record, _size(sealed))

    def settle(self, *, all_rows: bool = False) -> None:
        """Record episodes without steps, and drop rows that nothing needs once they are many."""
        if self._empty or len(self.idle_rows) > MAX_IDLE_ROWS or (self.idle_rows and all_rows):
            empty, self._empty = self._empty, []
            self.totals.empty += len(empty)
            self._count(1, 0)
            self._record(empty, None, 0)

    def _record(self, sealed: list[Sealed], record: ShardRecord | None, nbytes: int) -> None:
        """One transaction: the shard, the rows that it frees, and what outlives them."""
        assembler = self._assembler
        free, self.idle_rows = self.idle_rows, []
        put: dict[str, bytes] = {}
        delete = [INSTANCE + name for name in assembler.forget_instances()]
        for item in sealed:
            free.extend(assembler.release(item))
            self._carry(item, put, delete)
        finished = [item.finished for item in sealed if item.finished is not None]
        self.totals.episodes += len(finished)
        self.totals.steps = assembler.steps
        if finished:
            name = f"{FINISHED}{self._next_finished:012}"
            put[name] = encode_finished(finished)
            delete.extend(self._remember(name, len(finished)))
        put.update(assembler_state(assembler, self.totals))
        change = Transaction(record=record, put=put, delete=delete, drop_rows=sorted(free))
        self._transact(change, lambda: self._count(-1, -nbytes))

    def _carry(self, item: Sealed, put: dict[str, bytes], delete: list[str]) -> None:
        """Note where an episode that goes on was cut; forget it once the episode is over."""
        key = f"{CARRY}{item.key}"
        if item.carry is not None:
            first = self._episode_ordinals[item.key]
            put[key] = encode_carry(item.carry.with_ordinal(first))
        elif item.finished is not None:
            first_part = item.part is not None and item.part.part == 0
            if not first_part:
                put.pop(key, None)
                delete.append(key)
            self._episode_ordinals.pop(item.key, None)

    def _remember(self, name: str, count: int) -> list[str]:
        """Count ended episodes that are written down; answers the state keys beyond the limit."""
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


def _size(sealed: list[Sealed]) -> int:
    return sum(item.part.nbytes for item in sealed if item.part is not None)
