"""The journal: the durable log of accepted events until they are in shards.

A row has the accepted events of one request (or of a slice of a long one): an opaque blob with a
number. `commit` is one transaction, durable when it returns; only then may the acknowledgement be
sent. The journal also has the data that must change together with rows: a small key-value state,
the plans of shards to write, the records of written shards, and each stream's next ordinal.

Rows are deleted when no unsealed part needs them. The numbers of deleted rows are kept as ranges,
so any other gap is damage. `SqliteJournal` is the journal on disk, `MemoryJournal` the one for
simulation.

Files in the journal's directory (mode 0700):
    journal.db, -wal    SQLite, WAL, synchronous=FULL, one connection that locks it exclusively
    high-water          the number of the last committed row; not synced
    lock                flock, held while open
    copying             flock, held by a process that copies the database; see `copying`
    damaged-<n>/        a report of lost rows, and a malformed database that was set aside
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import astuple, replace

from storage.errors import (
    FolderMoved,
    JournalError,
    JournalFailed,
    JournalFull,
    JournalLocked,
    JournalLookedAt,
)
from storage.experience.range_set import RangeSet
from storage.journal.database import (
    CHECKPOINT_BYTES,
    DATABASE,
    PAGE_BYTES,
    HighWater,
    Malformed,
    checksum,
    connect,
    is_being_copied,
    is_malformed,
    keep_damaged,
    leave_open,
    translate,
)
from storage.journal.records import (
    FORMER_ID,
    NO_ENDS,
    NOTHING,
    DamageReport,
    Plan,
    ShardRecord,
    new_collector_id,
    require_lawful,
)
from storage.system.files import FileLock, make_directory
from storage.system.pinned_folders import Anchor

PAGE = 64  # rows per query, so that read transactions stay short
NUMBER_LIMIT = 2**62
MOST_PUT_OFF = 64
"""The log may grow to this many times its usual size while the journal is copied."""


class SqliteJournal:
    """The journal on disk. Create it with `open`, and use it from one thread at a time.

    The methods are those of `storage.journal.records.Journal`.
    """

    def __init__(
        self, directory: Path, lock: FileLock, collector_id_factory: Callable[[], str]
    ) -> None:
        self.directory = directory
        self._lock = lock
        self._factory = collector_id_factory
        self._failed: JournalError | None = None
        self._damage = DamageReport()
        self._unlogged = 0  # bytes committed since the last checkpoint
        self._joined = False  # in a `transaction`
        self._last_row, self._dropped = 0, RangeSet()
        self._place = Anchor(directory)
        try:
            self._connect()
            self._load()
        except Malformed as error:
            self._set_aside(str(error))
            self._connect()
            self._load()
        try:
            self._count_missing_rows()
            self._make_durable()
        except BaseException:
            self._disconnect()
            self._place.close()
            raise

    @classmethod
    def open(
        cls, directory: Path, *, collector_id_factory: Callable[[], str] = new_collector_id
    ) -> SqliteJournal:
        """Open or create the journal in `directory`, and check its whole content.

        A malformed database is moved to `damaged-<n>/` and a new journal with a new collector id
        begins. If rows are missing at the end, the journal also takes a new collector id, because
        ordinals may be missing too. `damage` reports both.

        Raises JournalLocked (JournalLookedAt while other processes only read), JournalFull and
        JournalFailed.
        """
        try:
            make_directory(directory)
            with contextlib.suppress(OSError):  # another user's folder: its owner sets the mode
                directory.chmod(0o700)
            lock = FileLock(directory / "lock")
            held = lock.acquire(blocking=False)
        except OSError as error:
            raise JournalFailed(f"the journal in {directory} cannot be opened: {error}") from error
        if not held:
            raise _locked(directory, lock)
        try:
            return cls(directory, lock, collector_id_factory)
        except BaseException as error:
            lock.release()
            if isinstance(error, sqlite3.Error):
                raise translate(error) from error
            if isinstance(error, OSError):
                text = f"the journal in {directory} cannot be opened: {error}"
                raise (JournalFull if error.errno == errno.ENOSPC else JournalFailed)(
                    text
                ) from error
            raise

    # opening

    def _connect(self) -> None:
        self._high_water = HighWater(self.directory / "high-water")
        self._db = connect(self.directory / DATABASE, self._factory)

    def _load(self) -> None:
        try:
            self._dropped = RangeSet(self._checked("dropped"))  # first: `_set_aside` needs it
            # The queries below do not read everything: a damaged list of free pages, for example,
            # would only fail a later commit, after each restart.
            (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise ValueError(verdict)
            journal = dict(self._checked("journal"))
            self.collector_id = str(journal["collector_id"])
            self._checkpoints = int(journal.get("checkpoints", 0))
            self._streams: dict[str, int] = dict(self._checked("streams"))
            self._plans = {fields[0]: Plan(*fields) for fields in self._checked("plans")}
            self._state: dict[str, bytes] = dict(self._checked("state"))
            self._bad, self._bad_records, present = RangeSet(), RangeSet(), RangeSet()
            for number, blob in self._pages():
                present.add(number)
                if blob is None:
                    self._bad.add(number)
            self._require_one_time(present)
            self._last_row = max(present.last or 0, self._dropped.last or 0)
            self._lost = self._dropped.missing(1, self._last_row).difference(present)
            (top,) = self._db.execute(
                "SELECT max(plan_id) FROM (SELECT plan_id FROM plans UNION ALL "
                "SELECT max(plan_id) FROM shards)"
            ).fetchone()
            self._last_plan = -1 if top is None else int(top)
        except (sqlite3.Error, LookupError, TypeError, ValueError) as error:
            self._disconnect()
            if isinstance(error, sqlite3.Error) and not is_malformed(error):
                raise
            raise Malformed(str(error)) from error

    def _require_one_time(self, present: RangeSet) -> None:
        """Raise ValueError if intact pages of two points in time are mixed."""
        both = present.intersection(self._dropped)
        if both:
            raise ValueError(f"expected that dropped rows are gone, got rows {both}")
        query = "SELECT plan_id FROM plans WHERE plan_id IN (SELECT plan_id FROM shards)"
        recorded = [plan_id for (plan_id,) in self._db.execute(query)]
        if recorded:
            raise ValueError(f"expected that recorded plans are gone, got plans {recorded}")

    def _checked(self, table: str) -> Iterator[Any]:
        """The rows of a small table without their checksums; ValueError if one does not match."""
        for *fields, stored in self._db.execute(f"SELECT * FROM {table}"):
            if checksum(*fields) != stored:
                raise ValueError(
                    f"table {table}: expected a row that matches its checksum, got {fields!r:.80}"
                )
            yield tuple(fields)

    def _pages(self, after: int = -NUMBER_LIMIT) -> Iterator[tuple[int, bytes | None]]:
        """Every row, ascending, with None for a blob that does not match its checksum."""
        while True:
            page = self._db.execute(
                "SELECT number, blob, checksum FROM rows WHERE number > ? ORDER BY number LIMIT ?",
                (after, PAGE),
            ).fetchall()
            for number, blob, stored in page:
                fits = isinstance(blob, bytes) and checksum(number, blob) == stored
                yield number, blob if fits else None
                after = number
            if len(page) < PAGE:
                return

    def _set_aside(self, reason: str) -> None:
        """Move a malformed database to `damaged-<n>/`. Its rows that were not dropped are lost."""
        high_water = HighWater(self.directory / "high-water")
        reached = max(high_water.read(), self._last_row)
        high_water.close()
        missing = RangeSet([(1, reached)] if reached else []).difference(self._dropped)
        self._damage = DamageReport(missing_rows=len(missing), reason=reason)
        # The high-water file is moved first: if the process dies between the renames, the next open
        # finds the malformed database, not an empty one with an old high-water mark.
        names = ("high-water", f"{DATABASE}-wal", DATABASE)
        target = keep_damaged(self.directory, self._damage, move=names)
        self._damage = replace(self._damage, set_aside=target)

    def _count_missing_rows(self) -> None:
        """Report acknowledged rows that are not in the database, and never reuse their numbers."""
        reached = self._high_water.read()
        if reached <= self._last_row:
            return
        self._damage = replace(
            self._damage,
            missing_rows=reached - self._last_row,
            previous_collector_id=self.collector_id,
            reason="the database ends before the high-water mark",
        )
        keep_damaged(self.directory, self._damage, copy=[f"{DATABASE}-wal"])
        self._write(lambda: self._drop(RangeSet([(self._last_row + 1, reached)])))
        self._dropped.add_range(self._last_row + 1, reached)
        self._last_row = reached
        self.renew_collector_id(self._factory(), put={FORMER_ID: self.collector_id.encode()})

    def _make_durable(self) -> None:
        """Copy the log into the database, with a sync, before anything is read from it.

        A process that ended because a sync failed leaves a log that can be read but is not on the
        disk: the kernel has marked its pages as written, so no later sync writes them.
        """
        busy, *_ = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if busy:
            raise JournalFailed(
                f"the journal in {self.directory}: {DATABASE}-wal cannot be copied into "
                f"{DATABASE}, because another program has the database open; stop that program"
            )

    # what it holds

    @property
    def last_row(self) -> int:
        return self._last_row

    @property
    def damage(self) -> DamageReport:
        return replace(
            self._damage,
            lost_rows=len(self._lost),
            damaged_rows=len(self._bad),
            damaged_records=len(self._bad_records),
        )

    def replay(self) -> Iterator[tuple[int, bytes]]:
        """Yield (number, blob) of the rows that still exist, ascending; see `Journal.replay`."""
        self._require_usable()
        try:
            for number, blob in self._pages():
                if blob is None:
                    self._bad.add(number)
                else:
                    yield number, blob
        except sqlite3.Error as error:
            raise self._fail(error) from error

    def page(self, after: int) -> list[tuple[int, bytes]]:
        """The next intact rows; see `Journal.page`."""
        self._require_usable()
        found: list[tuple[int, bytes]] = []
        try:
            for number, blob in self._pages(after):
                if blob is not None:
                    found.append((number, blob))
                if len(found) == PAGE:
                    break
        except sqlite3.Error as error:
            raise self._fail(error) from error
        return found

    def state(self, prefix: str = "") -> dict[str, bytes]:
        found = sorted(self._state.items())
        return {key: value for key, value in found if key.startswith(prefix)}

    def plans(self) -> list[Plan]:
        return [plan for _, plan in sorted(self._plans.items())]

    def shards(self, after: int = -1) -> Iterator[ShardRecord]:
        """The recorded shards; see `Journal.shards`."""
        while True:
            self._require_usable()
            try:
                page = self._db.execute(
                    "SELECT * FROM shards WHERE plan_id > ? ORDER BY plan_id LIMIT 500", (after,)
                ).fetchall()
            except sqlite3.Error as error:
                raise self._fail(error) from error
            for *fields, stored in page:
                after = fields[0]
                if checksum(*fields) == stored:
                    yield ShardRecord(*fields)
                else:
                    self._bad_records.add(after)
            if not page:
                return

    def next_ordinal(self, stream: str) -> int:
        return self._streams.get(stream, 0)

    def streams(self) -> dict[str, int]:
        return dict(sorted(self._streams.items()))

    def next_plan_id(self) -> int:
        return self._last_plan + 1

    # changes

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
        """One transaction, durable on return; see `Journal.commit`."""
        self._require_usable()
        drop, gone = RangeSet.of(drop_rows), list(delete)
        require_lawful(self, rows, plan, record, drop)

        def write() -> None:
            self._insert("rows", [(number, blob) for number, blob in rows])
            self._drop(drop)
            if plan is not None:
                self._insert("plans", [astuple(plan)])
                self._put("streams", plan.stream, plan.last + 1)
            if record is not None:
                self._insert("shards", [astuple(record)])
                self._db.execute("DELETE FROM plans WHERE plan_id = ?", (record.plan_id,))
            self._db.executemany("DELETE FROM state WHERE key = ?", ((key,) for key in gone))
            for key, value in put.items():
                self._put("state", key, value)

        self._write(write)
        self._remember(rows, plan, record, drop)
        for key in gone:
            self._state.pop(key, None)
        self._state.update(put)
        self._after_commit(sum(len(blob) for _, blob in rows), bool(rows))

    def rewrite(self, rows: Mapping[int, bytes], put: Mapping[str, bytes] = NOTHING) -> None:
        """Replace blobs and state entries; see `Journal.rewrite`."""
        self._require_usable()

        def write() -> None:
            self._db.executemany(
                "UPDATE rows SET blob = ?, checksum = ? WHERE number = ?",
                ((blob, checksum(number, blob), number) for number, blob in rows.items()),
            )
            for key, value in put.items():
                self._put("state", key, value)

        self._write(write)
        self._state.update(put)
        self._after_commit(sum(map(len, rows.values())), False)

    def shred(self) -> None:
        """Write the database anew and empty the log; see `Journal.shred`.

        It takes as long as copying the rows that are there. Raises as `commit` does.
        """
        self._require_usable()
        try:
            self._db.execute("PRAGMA secure_delete = ON")
            self._db.execute("VACUUM")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            self._db.execute("PRAGMA secure_delete = OFF")
        except sqlite3.Error as error:
            raise self._fail(error) from error
        self._unlogged = 0

    def renew_collector_id(
        self,
        fresh: str,
        *,
        records: Sequence[ShardRecord] = (),
        ends: Mapping[str, int] = NO_ENDS,
        put: Mapping[str, bytes] = NOTHING,
    ) -> None:
        """Take a new collector id, durably; see `Journal.renew_collector_id`."""
        self._require_usable()

        def write() -> None:
            self._insert("shards", [astuple(record) for record in records])
            for stream, end in ends.items():
                self._put("streams", stream, end)
            for key, value in put.items():
                self._put("state", key, value)
            self._put("journal", "collector_id", fresh)

        self._write(write)
        self.collector_id = fresh
        self._last_plan = max([self._last_plan, *(record.plan_id for record in records)])
        self._streams.update(ends)
        self._state.update(put)
        self._after_commit(0, False)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all changes in a block durable together; see `Journal.transaction`."""
        self._require_usable()
        self._db.execute("BEGIN IMMEDIATE")
        self._joined = True
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            self._failed = JournalError("a transaction was given up")
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise self._fail(error) from error
            raise
        finally:
            self._joined = False

    def close(self) -> None:
        """Close the database and release the lock. May be called more than once.

        If the folder was moved, the database stays open until the process ends.
        """
        if self._failed is None:
            self._failed = JournalError("the journal is closed")
        try:
            self._place.require()
        except (FolderMoved, OSError):
            # SQLite would remove `-wal` by its path, which may be another journal's file by now.
            leave_open(self._db)
        else:
            self._disconnect()
            self._place.close()
        self._lock.release()

    # inside

    def _write(self, statements: Callable[[], None]) -> None:
        """Run `statements` as one transaction, or roll all of it back."""
        if self._joined:
            statements()
            return
        try:
            self._db.execute("BEGIN IMMEDIATE")
            statements()
            self._db.execute("COMMIT")
        except BaseException as error:
            with contextlib.suppress(sqlite3.Error):
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                raise self._fail(error) from error
            raise

    def _insert(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            marks = ", ".join("?" * (len(rows[0]) + 1))
            self._db.executemany(
                f"INSERT INTO {table} VALUES ({marks})",
                ((*fields, checksum(*fields)) for fields in rows),
            )

    def _put(self, table: str, key: str, value: Any) -> None:
        self._db.execute(
            f"INSERT OR REPLACE INTO {table} VALUES (?, ?, ?)", (key, value, checksum(key, value))
        )

    def _drop(self, numbers: RangeSet) -> None:
        """Delete rows, and add their numbers to the stored ranges, merged with adjacent ones."""
        merged = numbers.copy()
        for first, last in numbers.ranges():
            self._db.execute("DELETE FROM rows WHERE number BETWEEN ? AND ?", (first, last))
            merged.update(self._dropped.touching(first, last))
        for first, last in merged.ranges():
            self._db.execute("DELETE FROM dropped WHERE first BETWEEN ? AND ?", (first, last))
            self._insert("dropped", [(first, last)])

    def _remember(
        self,
        rows: Sequence[tuple[int, bytes]],
        plan: Plan | None,
        record: ShardRecord | None,
        drop: RangeSet,
    ) -> None:
        self._last_row += len(rows)
        if drop:
            self._dropped.update(drop)
        if plan is not None:
            self._plans[plan.plan_id] = plan
            self._last_plan = plan.plan_id
            self._streams[plan.stream] = plan.last + 1
        if record is not None:
            del self._plans[record.plan_id]

    def _after_commit(self, nbytes: int, has_rows: bool) -> None:
        if has_rows:
            self._high_water.write(self._last_row)
        self._unlogged += nbytes + 2 * PAGE_BYTES  # a commit also writes pages without blobs
        if (
            self._joined
            or self._unlogged < CHECKPOINT_BYTES
            or (
                self._unlogged < MOST_PUT_OFF * CHECKPOINT_BYTES and is_being_copied(self.directory)
            )
        ):
            return
        self._unlogged = 0
        with contextlib.suppress(JournalFull):  # the log grows until there is space again
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Copy the log into the database, then restart the log.

        SQLite restarts the log at the first commit after a checkpoint, so this commits once.
        Otherwise the old log stays while nothing is written: if it were torn then, a start would
        apply its first pages to a newer database and mix pages of two points in time.
        """
        try:
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            raise self._fail(error) from error
        self._checkpoints += 1
        self._write(lambda: self._put("journal", "checkpoints", str(self._checkpoints)))

    def _fail(self, error: sqlite3.Error) -> JournalError:
        failure = translate(error)
        if not isinstance(failure, JournalFull):
            self._failed = failure
        return failure

    def _require_usable(self) -> None:
        if self._failed is not None:
            raise JournalFailed(
                f"the journal in {self.directory} is not in use: {self._failed}"
            ) from self._failed

    def _disconnect(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._db.close()
        self._high_water.close()


def require_free(directory: Path) -> None:
    """Raise JournalLocked if a collector has the journal in `directory`, which may not exist."""
    lock = FileLock(directory / "lock")
    try:
        free = lock.acquire(blocking=False, shared=True)
    except FileNotFoundError:
        return
    lock.release()
    if not free:
        raise _locked(directory, lock)


def _locked(directory: Path, lock: FileLock) -> JournalLocked:
    """The error for a journal that another process has locked."""
    if lock.acquire(blocking=False, shared=True):  # then no process holds it exclusively
        lock.release()
        return JournalLookedAt(
            f"the journal in {directory} is being read by another process, such as `headrace "
            f"verify` (lock: {lock.path}); wait until it has finished"
        )
    return JournalLocked(
        f"the journal in {directory} is open in process {lock.holder()} (lock: {lock.path}); stop "
        "that process or choose another directory"
    )
