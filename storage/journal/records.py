"""What a journal is: its records, the `Journal` protocol, and the laws of a commit."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import msgspec

from storage.experience.range_set import RangeSet

NOTHING: Mapping[str, bytes] = MappingProxyType({})
FORMER_ID = "former"
"""The state's key for the collector id that a journal had before it was found to lack rows."""

NO_ENDS: Mapping[str, int] = MappingProxyType({})


class Plan(msgspec.Struct, frozen=True):
    """The decision to write ordinals `first..last` of a stream as one shard; `blob` is opaque."""

    plan_id: int
    stream: str
    schema_id: str
    first: int
    last: int
    blob: bytes


class ShardRecord(msgspec.Struct, frozen=True):
    """A written shard: the plan that it fulfils, its file name, SHA-256 (64 hex), rows, bytes."""

    plan_id: int
    stream: str
    first: int
    last: int
    name: str
    digest: str
    rows: int
    nbytes: int


class DamageReport(msgspec.Struct, frozen=True):
    """What opening and replaying found broken; falsy when nothing is.

    `missing_rows`: acknowledged rows behind the end of the database, or in one that was set aside
    (then at most so many: some of them may be in shards); `lost_rows`: gaps inside it;
    `damaged_rows`: rows whose checksum does not fit; `lost_state`: what is gone of the state, by
    whoever knows what has to be there. `set_aside`: where a malformed database was
    moved, with the `reason`. `previous_collector_id`: set when the journal had to take a new one.
    """

    missing_rows: int = 0
    lost_rows: int = 0
    damaged_rows: int = 0
    set_aside: Path | None = None
    reason: str = ""
    previous_collector_id: str | None = None
    lost_state: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(
            self.missing_rows
            or self.lost_rows
            or self.damaged_rows
            or self.lost_state
            or self.set_aside is not None
        )


def new_collector_id() -> str:
    """12 random hex digits."""
    return secrets.token_hex(6)


class Journal(Protocol):
    """What the collector needs of a journal. Used by one thread at a time."""

    @property
    def collector_id(self) -> str:
        """12 hex digits: the first half of every stream's name."""

    @property
    def last_row(self) -> int:
        """The highest row number ever given, 0 when none."""

    @property
    def damage(self) -> DamageReport:
        """What was found broken since this journal was opened."""

    def commit(
        self,
        rows: Sequence[tuple[int, bytes]] = (),
        *,
        plan: Plan | None = None,
        record: ShardRecord | None = None,
        put: Mapping[str, bytes] = NOTHING,
        delete: Iterable[str] = (),
        drop_rows: Iterable[int] = (),
    ) -> None:
        """Do all of it in one transaction, durable on return.

        `rows` are numbered densely from `last_row + 1`; `plan` takes the stream's next ordinals;
        `record` fulfils a plan; `delete` comes before `put`. Raises ValueError when the arguments
        break a law (nothing changed), JournalFull when the disk is full (rolled back, usable) and
        JournalFailed when a write or sync failed (unusable from then on).
        """

    def replay(self) -> Iterator[tuple[int, bytes]]:
        """The rows that still exist, ascending. Damaged ones are counted, not yielded."""

    def state(self, prefix: str = "") -> dict[str, bytes]:
        """The key-value state, as far as keys start with `prefix`."""

    def plans(self) -> list[Plan]:
        """Plans without a record, by id."""

    def shards(self, stream: str | None = None, *, after: int = -1) -> Iterator[ShardRecord]:
        """The recorded shards, by plan id, from the first one behind plan `after` on."""

    def next_ordinal(self, stream: str) -> int:
        """The first ordinal of `stream` that no plan has taken."""

    def streams(self) -> dict[str, int]:
        """Every stream's next ordinal."""

    def next_plan_id(self) -> int:
        """A plan id that was never used."""

    def renew_collector_id(
        self,
        rows: Sequence[tuple[int, bytes]] = (),
        *,
        records: Sequence[ShardRecord] = (),
        ends: Mapping[str, int] = NO_ENDS,
        put: Mapping[str, bytes] = NOTHING,
    ) -> str:
        """Take a new collector id, durably: all streams from here on are new ones.

        In the same transaction it takes up what it did not know of: `records` of shards, with plan
        ids from `next_plan_id` on, and in `ends` the next ordinal of their streams.
        """

    def close(self) -> None: ...


def require_lawful(
    journal: Journal,
    rows: Sequence[tuple[int, bytes]],
    plan: Plan | None,
    record: ShardRecord | None,
    drop_rows: RangeSet,
) -> None:
    """Raise ValueError when a commit would break a law of the journal."""
    for expected, (number, blob) in enumerate(rows, journal.last_row + 1):
        if number != expected or not isinstance(blob, bytes):
            raise ValueError(
                f"journal rows: expected bytes under number {expected}, "
                f"got {type(blob).__name__} under {number}"
            )
    top = journal.last_row + len(rows)
    if drop_rows and ((drop_rows.first or 0) < 1 or (drop_rows.last or 0) > top):
        raise ValueError(f"drop_rows: expected numbers of 1..{top}, got {drop_rows}")
    if plan is not None:
        _require_next(journal, plan)
    if record is not None:
        known = [p for p in (*journal.plans(), plan) if p and p.plan_id == record.plan_id]
        planned = [(p.stream, p.first, p.last) for p in known]
        if planned != [(record.stream, record.first, record.last)]:
            raise ValueError(f"shard record: expected an open plan's range {planned}, got {record}")


def _require_next(journal: Journal, plan: Plan) -> None:
    expected = journal.next_ordinal(plan.stream)
    if plan.first != expected or plan.last < plan.first:
        raise ValueError(
            f"plan {plan.plan_id} of {plan.stream}: expected ordinals from {expected} on, "
            f"got {plan.first}..{plan.last}"
        )
    if plan.plan_id < journal.next_plan_id():
        raise ValueError(
            f"plan: expected an id of {journal.next_plan_id()} or more, got {plan.plan_id}"
        )
