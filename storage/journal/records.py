"""The `Journal` interface, its records, and the checks of a commit."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import msgspec

from storage.experience.range_set import RangeSet

NOTHING: Mapping[str, bytes] = MappingProxyType({})
FORMER_ID = "former"
"""The state's key for the previous collector id of a journal that has lost rows."""

NO_ENDS: Mapping[str, int] = MappingProxyType({})


class Plan(msgspec.Struct, frozen=True):
    """The decision to write ordinals `first` to `last` of a stream as one shard.

    `blob` is opaque to the journal.
    """

    plan_id: int
    stream: str
    schema_id: str
    first: int
    last: int
    blob: bytes


class ShardRecord(msgspec.Struct, frozen=True):
    """A written shard: its plan, ordinals, file name, SHA-256 (64 hex digits), rows and bytes."""

    plan_id: int
    stream: str
    first: int
    last: int
    name: str
    digest: str
    rows: int
    nbytes: int


class DamageReport(msgspec.Struct, frozen=True):
    """Damage that was found on opening and replaying a journal; falsy if there is none.

    `missing_rows`: acknowledged rows after the last row of the database, or an upper bound of the
    rows in a database that was set aside (some may be in shards). `lost_rows`: missing rows before
    the last one. `damaged_rows`: rows whose checksum does not match. `damaged_records`: the same of
    shard records, among those read so far. `lost_state`: missing parts of the state, reported by
    the caller that expects them. `set_aside`: the folder that a malformed database was moved to,
    for `reason`. `previous_collector_id`: set if the journal took a new id.
    """

    missing_rows: int = 0
    lost_rows: int = 0
    damaged_rows: int = 0
    damaged_records: int = 0
    set_aside: Path | None = None
    reason: str = ""
    previous_collector_id: str | None = None
    lost_state: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(
            self.missing_rows
            or self.lost_rows
            or self.damaged_rows
            or self.damaged_records
            or self.lost_state
            or self.set_aside is not None
        )


def new_collector_id() -> str:
    """12 random hex digits."""
    return secrets.token_hex(6)


class Journal(Protocol):
    """The journal's interface for the collector. Use it from one thread at a time."""

    @property
    def collector_id(self) -> str:
        """12 hex digits; every stream's name begins with it."""

    @property
    def last_row(self) -> int:
        """The highest row number so far; 0 before the first row."""

    @property
    def damage(self) -> DamageReport:
        """The damage found since this journal was opened."""

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
        """Apply all changes in one transaction, durable on return.

        `rows` are (number, blob), numbered from `last_row + 1` without gaps. `plan` takes the next
        ordinals of its stream, and `record` completes an open plan. In the key-value state,
        `delete` is applied before `put`. `drop_rows` are the numbers of rows to delete.

        Raises ValueError if the arguments do not fit the journal (nothing has changed), JournalFull
        if the disk is full (rolled back, still usable), and JournalFailed if a write or a sync
        failed (unusable from then on).
        """

    def replay(self) -> Iterator[tuple[int, bytes]]:
        """Yield (number, blob) of the rows that still exist, ascending.

        Damaged rows are counted in `damage`, not yielded.
        """

    def page(self, after: int) -> list[tuple[int, bytes]]:
        """(number, blob) of the next intact rows after a number; [] after the last."""

    def rewrite(self, rows: Mapping[int, bytes], put: Mapping[str, bytes] = NOTHING) -> None:
        """Replace the blobs of existing rows, and state entries, in one transaction."""

    def shred(self) -> None:
        """Leave no byte of deleted or replaced rows in the journal's files."""

    def state(self, prefix: str = "") -> dict[str, bytes]:
        """The key-value state: the keys that start with `prefix`, sorted."""

    def plans(self) -> list[Plan]:
        """The plans without a record, by id."""

    def shards(self, after: int = -1) -> Iterator[ShardRecord]:
        """The recorded shards with plan ids greater than `after`, by plan id.

        Damaged records are counted in `damage`, not yielded.
        """

    def next_ordinal(self, stream: str) -> int:
        """The first ordinal of `stream` that no plan has taken."""

    def streams(self) -> dict[str, int]:
        """The next ordinal of each stream."""

    def next_plan_id(self) -> int:
        """The next plan id, which was never used."""

    def renew_collector_id(
        self,
        fresh: str,
        *,
        records: Sequence[ShardRecord] = (),
        ends: Mapping[str, int] = NO_ENDS,
        put: Mapping[str, bytes] = NOTHING,
    ) -> None:
        """Take the new collector id `fresh`, durably: all later streams are new.

        The same transaction adds `records` of shards that the journal did not have (with plan ids
        from `next_plan_id` on), in `ends` the next ordinal of each of their streams, and `put` to
        the key-value state.
        """

    def transaction(self) -> AbstractContextManager[None]:
        """Make all changes in a block durable together at its end, or none if it fails.

        After a failure the journal has to be opened again.
        """

    def close(self) -> None: ...


def require_lawful(
    journal: Journal,
    rows: Sequence[tuple[int, bytes]],
    plan: Plan | None,
    record: ShardRecord | None,
    drop_rows: RangeSet,
) -> None:
    """Raise ValueError if a commit's arguments do not fit the journal; see `Journal.commit`."""
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
            raise ValueError(
                f"shard record: expected the range of its open plan, {planned}, got {record}"
            )


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
