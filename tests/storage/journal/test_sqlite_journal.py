"""Both journals keep the same laws; the one on disk keeps them across restarts.

Also of `storage.journal.records`.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from storage.errors import JournalError, JournalFailed, JournalLocked
from storage.journal.memory_journal import MemoryJournal
from storage.journal.records import Journal, Plan, ShardRecord
from storage.journal.sqlite_journal import SqliteJournal

Reopen: TypeAlias = Callable[[Any], Any]

STREAM = "c0ffee-5c4e3a"


def record_of(plan: Plan) -> ShardRecord:
    return ShardRecord(plan.plan_id, plan.stream, plan.first, plan.last, "a.parquet", "ab", 3, 9)


def contents(journal: Journal) -> dict[str, Any]:
    return {
        "rows": list(journal.replay()),
        "last_row": journal.last_row,
        "state": journal.state(),
        "plans": journal.plans(),
        "shards": list(journal.shards()),
        "streams": journal.streams(),
        "next_plan": journal.next_plan_id(),
    }


@pytest.fixture(params=["memory", "sqlite"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    opened: Journal = (
        MemoryJournal() if request.param == "memory" else SqliteJournal.open(tmp_path / "journal")
    )
    yield opened
    opened.close()


def test_a_new_journal_is_empty(journal: Journal) -> None:
    """Nothing in it, no damage, and 12 hex digits as its name."""
    assert contents(journal) == {
        "rows": [], "last_row": 0, "state": {}, "plans": [], "shards": [], "streams": {},
        "next_plan": 0,
    }  # fmt: skip
    assert not journal.damage
    assert len(journal.collector_id) == 12
    assert int(journal.collector_id, 16) >= 0


def test_rows_replay_in_order_and_go_when_dropped(journal: Journal) -> None:
    """Rows that were committed and not dropped are replayed in order; row numbers are never given
    again."""
    journal.commit([(1, b"one"), (2, b""), (3, b"three")])
    journal.commit([(4, b"four")], drop_rows=[3, 1, 1])
    assert list(journal.replay()) == [(2, b""), (4, b"four")]
    journal.commit(drop_rows=[2, 4])
    assert list(journal.replay()) == []
    assert journal.last_row == 4


def test_a_row_may_be_written_and_dropped_in_one_commit(journal: Journal) -> None:
    """A row that needs no shard takes its number and leaves nothing."""
    journal.commit([(1, b"tick"), (2, b"kept")], drop_rows=[1])
    assert list(journal.replay()) == [(2, b"kept")]


@pytest.mark.parametrize(
    ("rows", "drop"),
    [([(2, b"x")], []), ([(1, b"x"), (3, b"y")], []), ([(1, "text")], []), ([], [1]), ([], [0])],
)
def test_rows_outside_the_dense_sequence_are_refused(
    journal: Journal, rows: list[Any], drop: list[int]
) -> None:
    """A gap, a wrong type, or dropping an unknown row: ValueError, and nothing has changed."""
    before = contents(journal)
    with pytest.raises(ValueError, match="expected"):
        journal.commit(rows, put={"k": b"v"}, drop_rows=drop)
    assert contents(journal) == before


def test_rows_are_read_in_pages_and_rewritten(journal: Journal) -> None:
    """A page begins after a number; a rewritten row keeps its number, and its neighbours."""
    journal.commit([(number, b"%d" % number) for number in range(1, 101)], put={"a": b"1"})
    pages, after = [], 0
    while page := journal.page(after):
        pages += page
        after = page[-1][0]
    assert pages == [(number, b"%d" % number) for number in range(1, 101)] == [*journal.replay()]
    journal.rewrite({2: b"two", 3: b""}, {"a": b"2"})
    assert [*journal.replay()][:4] == [(1, b"1"), (2, b"two"), (3, b""), (4, b"4")]
    assert journal.state() == {"a": b"2"}
    assert not journal.damage


def test_state_is_put_and_deleted_by_key(journal: Journal) -> None:
    """delete comes before put; a prefix selects."""
    journal.commit(put={"a/1": b"x", "a/2": b"", "b/1": b"z"})
    journal.commit(delete=["a/1", "a/2", "never"], put={"a/2": b"new"})
    assert journal.state() == {"a/2": b"new", "b/1": b"z"}
    assert journal.state("a/") == {"a/2": b"new"}
    assert journal.state("c") == {}


def test_a_plan_takes_ordinals_and_a_record_fulfils_it(journal: Journal) -> None:
    """Ordinals are dense per stream; a plan is open until its record, which is permanent."""
    first = Plan(journal.next_plan_id(), STREAM, "5c4e3a", 0, 4, b"parts")
    journal.commit([(1, b"r")], plan=first)
    second = Plan(journal.next_plan_id(), STREAM, "5c4e3a", 5, 5, b"")
    other = Plan(second.plan_id + 1, "other", "ffff", 0, 0, b"")
    journal.commit(plan=second)
    journal.commit(plan=other)
    assert journal.plans() == [first, second, other]
    assert journal.streams() == {STREAM: 6, "other": 1}
    journal.commit(record=record_of(second), drop_rows=[1])
    assert journal.plans() == [first, other]
    journal.commit(record=record_of(first))
    journal.commit(record=record_of(other))
    assert list(journal.shards()) == [record_of(first), record_of(second), record_of(other)]
    assert list(journal.shards(first.plan_id)) == [record_of(second), record_of(other)]
    assert journal.next_ordinal(STREAM) == 6
    assert journal.next_ordinal("unheard") == 0


def test_plans_that_break_the_order_are_refused(journal: Journal) -> None:
    """An ordinal twice, a gap, an id twice, a record without its plan: ValueError."""
    journal.commit(plan=Plan(5, STREAM, "s", 0, 4, b""))
    for plan in (
        Plan(6, STREAM, "s", 4, 6, b""),
        Plan(6, STREAM, "s", 6, 7, b""),
        Plan(6, STREAM, "s", 5, 4, b""),
        Plan(5, STREAM, "s", 5, 6, b""),
    ):
        with pytest.raises(ValueError, match="plan"):
            journal.commit(plan=plan)
    for record in (
        record_of(Plan(4, STREAM, "s", 0, 4, b"")),
        record_of(Plan(5, STREAM, "s", 0, 3, b"")),
        record_of(Plan(5, "other", "s", 0, 4, b"")),
    ):
        with pytest.raises(ValueError, match="record"):
            journal.commit(record=record)
    assert journal.streams() == {STREAM: 5}


def test_a_renewed_journal_has_another_name(journal: Journal) -> None:
    """Content stays, the collector id does not."""
    journal.commit([(1, b"r")])
    before = journal.collector_id
    journal.renew_collector_id("fresh")
    assert journal.collector_id == "fresh" != before
    assert list(journal.replay()) == [(1, b"r")]


# --- on disk ---------------------------------------------------------------------------------


class TwinMachine(RuleBasedStateMachine):
    """The journal on disk equals the one in memory, through restarts and kills."""

    def __init__(self) -> None:
        super().__init__()
        self.home = Path(tempfile.mkdtemp())
        self.generation = count(1)
        self.disk = SqliteJournal.open(self.home / "0")
        self.memory = MemoryJournal()

    @rule(
        blobs=st.lists(st.binary(max_size=40) | st.just(b"z" * 9000), max_size=4),
        drops=st.lists(st.integers(1, 40), max_size=6),
        put=st.dictionaries(st.sampled_from("abc"), st.binary(max_size=5)),
        delete=st.lists(st.sampled_from("abcd"), max_size=2),
        planned=st.none() | st.tuples(st.sampled_from("xyz"), st.integers(0, 3)),
        recorded=st.booleans(),
    )
    def commit(
        self,
        blobs: list[bytes],
        drops: list[int],
        put: dict[str, bytes],
        delete: list[str],
        planned: tuple[str, int] | None,
        recorded: bool,
    ) -> None:
        last = self.memory.last_row
        rows = list(enumerate(blobs, last + 1))
        plan = record = None
        if planned is not None:
            first = self.memory.next_ordinal(planned[0])
            ids = self.memory.next_plan_id()
            plan = Plan(ids, planned[0], "s", first, first + planned[1], b"blob")
        if recorded and self.memory.plans():
            record = record_of(self.memory.plans()[0])
        drop_rows = [n for n in drops if n <= last + len(rows)]
        for journal in (self.disk, self.memory):
            journal.commit(
                rows, plan=plan, record=record, put=put, delete=delete, drop_rows=drop_rows
            )

    @rule()
    def restart(self) -> None:
        self.disk.close()
        self.disk = SqliteJournal.open(self.disk.directory)
        self.memory = self.memory.crash()

    @rule()
    def kill(self) -> None:
        image = self.home / str(next(self.generation))
        shutil.copytree(self.disk.directory, image)
        self.disk.close()
        self.disk = SqliteJournal.open(image)
        self.memory = self.memory.crash()

    @invariant()
    def same_content(self) -> None:
        assert contents(self.disk) == contents(self.memory)
        assert not self.disk.damage

    def teardown(self) -> None:
        self.disk.close()
        shutil.rmtree(self.home)


TestTwins = TwinMachine.TestCase
TestTwins.settings = settings(max_examples=25, stateful_step_count=15, deadline=None)


def test_a_journal_keeps_its_name_across_restarts(tmp_path: Path) -> None:
    """Only damage and renewal change the collector id."""
    names = iter(["aaaaaaaaaaaa"])
    journal = SqliteJournal.open(tmp_path, collector_id_factory=lambda: next(names))
    journal.close()
    journal = SqliteJournal.open(tmp_path, collector_id_factory=lambda: next(names))
    assert journal.collector_id == "aaaaaaaaaaaa"
    journal.renew_collector_id("fresh")
    journal.close()
    with_new_name = SqliteJournal.open(tmp_path)
    assert with_new_name.collector_id == "fresh"
    with_new_name.close()


def test_a_second_opener_is_told_who_holds_it(tmp_path: Path) -> None:
    """One journal, one process: the refusal names the holder; closing lets the next one in."""
    journal = SqliteJournal.open(tmp_path)
    with pytest.raises(JournalLocked, match=f"process {os.getpid()}"):
        SqliteJournal.open(tmp_path)
    journal.close()
    SqliteJournal.open(tmp_path).close()


def test_another_program_in_the_database_is_refused(tmp_path: Path) -> None:
    """A foreign SQLite connection that holds the file: a clear refusal, and none gets in later."""
    SqliteJournal.open(tmp_path).close()
    foreign = sqlite3.connect(tmp_path / "journal.db", isolation_level=None, timeout=0)
    foreign.execute("BEGIN IMMEDIATE")
    with pytest.raises(JournalLocked, match="another program"):
        SqliteJournal.open(tmp_path)
    foreign.execute("ROLLBACK")
    foreign.close()
    journal = SqliteJournal.open(tmp_path)
    late = sqlite3.connect(tmp_path / "journal.db", timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        late.execute("SELECT count(*) FROM rows")
    late.close()
    journal.close()


def test_a_database_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    """A foreign SQLite file, or a newer format, is refused and not changed."""
    other = sqlite3.connect(tmp_path / "journal.db")
    other.execute("CREATE TABLE recipes (name TEXT)")
    other.commit()
    other.close()
    before = (tmp_path / "journal.db").read_bytes()
    with pytest.raises(JournalError, match="expected a journal of format 1"):
        SqliteJournal.open(tmp_path)
    assert (tmp_path / "journal.db").read_bytes()[100:] == before[100:]


def test_a_closed_journal_refuses_use(tmp_path: Path) -> None:
    """After close every call that uses the disk raises; closing twice is fine."""
    journal = SqliteJournal.open(tmp_path)
    journal.close()
    journal.close()
    with pytest.raises(JournalFailed, match="closed"):
        journal.commit([(1, b"x")])
    with pytest.raises(JournalFailed, match="closed"):
        list(journal.replay())


def test_a_directory_that_cannot_be_made_is_an_error_of_the_journal(tmp_path: Path) -> None:
    """A file in the way: JournalFailed, with the path."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(JournalFailed, match="file"):
        SqliteJournal.open(tmp_path / "file" / "journal")


def test_the_log_is_checkpointed_and_stays_bounded(tmp_path: Path) -> None:
    """40 MB through the journal leave a log of about one checkpoint interval, not of 40 MB."""
    journal = SqliteJournal.open(tmp_path)
    for _ in range(80):
        number = journal.last_row + 1
        journal.commit([(number, bytes(500_000))], drop_rows=[number])
    assert (tmp_path / "journal.db-wal").stat().st_size < 24 * 2**20
    journal.close()


def test_nothing_of_deleted_rows_is_left_in_the_files(tmp_path: Path) -> None:
    """Not in the database, not in the log, also not of rows that were dropped long ago."""
    secret = b"a secret of 24 bytes...." * 900  # more than a page
    with closing(SqliteJournal.open(tmp_path)) as journal:
        for number in range(1, 40):
            journal.commit([(number, secret)], put={"name": secret[:30]})
        journal.commit([(40, b"kept")], drop_rows=range(1, 39))
        journal.rewrite({39: b"short"}, {"name": b""})
        assert secret[:20] in files_of(tmp_path)
        journal.shred()
        assert secret[:20] not in files_of(tmp_path)
        journal.commit([(41, b"later")])
    with closing(SqliteJournal.open(tmp_path)) as journal:
        assert [*journal.replay()] == [(39, b"short"), (40, b"kept"), (41, b"later")]
        assert not journal.damage


def files_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())
