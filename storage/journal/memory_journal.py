"""`MemoryJournal`: `SqliteJournal` in memory, for simulation and small trials."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
from msgspec.structs import replace

from storage.experience.range_set import RangeSet
from storage.journal.records import (
    NO_ENDS,
    NOTHING,
    DamageReport,
    Plan,
    ShardRecord,
    new_collector_id,
    require_lawful,
)


class _JournalContent(msgspec.Struct):
    collector_id: str
    last_row: int = 0
    last_plan: int = -1
    rows: dict[int, bytes] = msgspec.field(default_factory=dict)
    state: dict[str, bytes] = msgspec.field(default_factory=dict)
    plans: dict[int, Plan] = msgspec.field(default_factory=dict)
    shards: dict[int, ShardRecord] = msgspec.field(default_factory=dict)
    streams: dict[str, int] = msgspec.field(default_factory=dict)

    def copy(self) -> _JournalContent:
        return replace(
            self,
            rows=self.rows.copy(),
            state=self.state.copy(),
            plans=self.plans.copy(),
            shards=self.shards.copy(),
            streams=self.streams.copy(),
        )


class MemoryJournal:
    """A journal in memory: it keeps the contract of `Journal`, except durability.

    `keep_records=False` forgets the records of shards, so that memory is bounded by what is not in
    shards yet.
    """

    def __init__(
        self,
        *,
        keep_records: bool = True,
        collector_id_factory: Callable[[], str] = new_collector_id,
    ) -> None:
        self._factory = collector_id_factory
        self._keep_records = keep_records
        self._content = _JournalContent(collector_id_factory())

    @property
    def collector_id(self) -> str:
        return self._content.collector_id

    @property
    def last_row(self) -> int:
        return self._content.last_row

    @property
    def damage(self) -> DamageReport:
        return DamageReport()

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
        dropped = RangeSet.of(drop_rows)
        require_lawful(self, rows, plan, record, dropped)
        content = self._content
        content.rows.update(rows)
        content.last_row += len(rows)
        for number in dropped:
            content.rows.pop(number, None)
        if plan is not None:
            content.plans[plan.plan_id] = plan
            content.last_plan = plan.plan_id
            content.streams[plan.stream] = plan.last + 1
        if record is not None:
            del content.plans[record.plan_id]
            if self._keep_records:
                content.shards[record.plan_id] = record
        for key in delete:
            content.state.pop(key, None)
        content.state.update(put)

    def replay(self) -> Iterator[tuple[int, bytes]]:
        yield from sorted(self._content.rows.items())

    def page(self, after: int) -> list[tuple[int, bytes]]:
        return sorted(item for item in self._content.rows.items() if item[0] > after)

    def rewrite(self, rows: Mapping[int, bytes], put: Mapping[str, bytes] = NOTHING) -> None:
        self._content.rows.update(rows)
        self._content.state.update(put)

    def shred(self) -> None:
        """Nothing to do."""

    def state(self, prefix: str = "") -> dict[str, bytes]:
        found = sorted(self._content.state.items())
        return {key: value for key, value in found if key.startswith(prefix)}

    def plans(self) -> list[Plan]:
        return [plan for _, plan in sorted(self._content.plans.items())]

    def shards(self, after: int = -1) -> Iterator[ShardRecord]:
        for plan_id, record in sorted(self._content.shards.items()):
            if plan_id > after:
                yield record

    def next_ordinal(self, stream: str) -> int:
        return self._content.streams.get(stream, 0)

    def streams(self) -> dict[str, int]:
        return dict(sorted(self._content.streams.items()))

    def next_plan_id(self) -> int:
        return self._content.last_plan + 1

    def renew_collector_id(
        self,
        fresh: str,
        *,
        records: Sequence[ShardRecord] = (),
        ends: Mapping[str, int] = NO_ENDS,
        put: Mapping[str, bytes] = NOTHING,
    ) -> None:
        content = self._content
        content.collector_id = fresh
        content.shards.update((record.plan_id, record) for record in records)
        content.last_plan = max([content.last_plan, *(record.plan_id for record in records)])
        content.streams.update(ends)
        content.state.update(put)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        before = self._content.copy()
        try:
            yield
        except BaseException:
            self._content = before
            raise

    def close(self) -> None:
        """Nothing to release."""

    def crash(self) -> MemoryJournal:
        """A new journal with this one's committed content, as a restart would find it.

        This journal stays usable.
        """
        twin = MemoryJournal(collector_id_factory=self._factory)
        twin._content = self._content.copy()
        return twin
