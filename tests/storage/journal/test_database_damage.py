"""Damage is counted and set aside; damaged rows are never replayed."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from storage.errors import JournalError
from storage.journal.database import checksum, past_damage
from storage.journal.records import Plan, ShardRecord
from storage.journal.sqlite_journal import SqliteJournal


def blob(number: int) -> bytes:
    return b"%d:" % number * 500


def rows_of(directory: Path) -> tuple[dict[int, bytes], SqliteJournal]:
    journal = SqliteJournal.open(directory)
    return dict(journal.replay()), journal


def killed_image(directory: Path, rows: int = 30) -> Path:
    """The files of a journal whose process died: database, log and high-water file."""
    journal = SqliteJournal.open(directory / "live", collector_id_factory=lambda: "0" * 12)
    for n in range(1, rows + 1):
        journal.commit([(n, blob(n))], put={"k": b"%d" % n}, drop_rows=[n // 2] if n > 20 else [])
    shutil.copytree(directory / "live", directory / "image")
    journal.close()
    return directory / "image"


def clean_image(directory: Path) -> Path:
    killed_image(directory)
    return directory / "live"


def test_rows_missing_at_the_end_are_counted_and_never_reused(tmp_path: Path) -> None:
    """A log truncated outside SQLite: the report gives the number of missing acknowledged rows.

    The rest remains usable, under a new collector id, and no number is given twice.
    """
    image = killed_image(tmp_path)
    log = image / "journal.db-wal"
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    rows, journal = rows_of(image)
    assert journal.damage.missing_rows > 0
    assert journal.damage.missing_rows == 30 - int(journal.state()["k"])
    assert journal.damage.previous_collector_id == "0" * 12 != journal.collector_id
    assert journal.last_row == 30
    assert all(data == blob(n) for n, data in rows.items())
    journal.commit([(31, b"next")])
    journal.close()
    again = SqliteJournal.open(image)
    again.close()
    assert not again.damage
    assert (again.collector_id, again.last_row) == (journal.collector_id, 31)


def test_a_deleted_database_is_noticed(tmp_path: Path) -> None:
    """Without the database, the high-water file shows how many rows existed."""
    image = killed_image(tmp_path)
    (image / "journal.db").unlink()
    (image / "journal.db-wal").unlink()
    journal = SqliteJournal.open(image)
    journal.close()
    assert journal.damage.missing_rows == journal.last_row == 30


@pytest.mark.parametrize(
    "content", [b"", b"0", bytes(30), b"9" * 20 + b" 00000000\n", b"\xff" * 64]
)
def test_a_torn_high_water_file_is_ignored(tmp_path: Path, content: bytes) -> None:
    """An unsynced high-water file may have any content after a power loss; that is no damage."""
    image = killed_image(tmp_path)
    (image / "high-water").write_bytes(content)
    journal = SqliteJournal.open(image)
    journal.commit([(31, b"x")])
    journal.close()
    assert not journal.damage


def test_a_row_deleted_by_hand_is_a_gap(tmp_path: Path) -> None:
    """A number that is missing inside, but was not dropped, counts as damage."""
    image = clean_image(tmp_path)
    database = sqlite3.connect(image / "journal.db")
    database.execute("DELETE FROM rows WHERE number IN (17, 18)")
    database.commit()
    database.close()
    rows, journal = rows_of(image)
    journal.close()
    assert journal.damage.lost_rows == 2
    assert not {17, 18} & set(rows)


def test_a_flipped_byte_in_a_row_is_counted_and_not_replayed(tmp_path: Path) -> None:
    """SQLite would return the damaged row, but its checksum does not match."""
    image = clean_image(tmp_path)
    data = (image / "journal.db").read_bytes()
    at = data.index(blob(25)) + 700
    (image / "journal.db").write_bytes(data[:at] + b"!" + data[at + 1 :])
    rows, journal = rows_of(image)
    journal.close()
    assert journal.damage.damaged_rows == 1
    assert 25 not in rows
    assert {26, 27, 28} <= set(rows)


@pytest.mark.parametrize("wreck", ["garbage", "truncated", "header", "ordinal"])
def test_a_malformed_database_is_set_aside(tmp_path: Path, wreck: str) -> None:
    """Unreadable: kept under damaged-1/, a new journal with a new name begins, and it says so.

    All 30 rows count as lost, but for the 6 that were dropped where that can still be read.
    """
    image = clean_image(tmp_path)
    data = (image / "journal.db").read_bytes()
    wrecked = {
        "garbage": b"not a database" * 1000,
        "truncated": data[: len(data) // 2],
        "header": b"X" + data[1:],
        "ordinal": data.replace(b"collector_id" + b"0" * 12, b"collector_id" + b"1" * 12),
    }[wreck]
    assert wrecked != data
    (image / "journal.db").write_bytes(wrecked)
    journal = SqliteJournal.open(image)
    assert journal.damage.set_aside == image / "damaged-1"
    assert journal.damage.reason
    assert journal.damage.missing_rows in ((24,) if wreck == "ordinal" else (24, 30))
    assert journal.collector_id != "0" * 12
    assert (image / "damaged-1" / "journal.db").exists()
    journal.commit([(1, b"x")])
    journal.close()
    reopened = SqliteJournal.open(image)
    reopened.close()
    assert not reopened.damage


def test_a_report_of_damage_outlives_the_start_that_found_it(tmp_path: Path) -> None:
    """Each loss leaves a folder, and is reported until that folder is moved away."""
    image = killed_image(tmp_path)
    log = image / "journal.db-wal"
    log.write_bytes(log.read_bytes()[: log.stat().st_size // 2])
    torn = log.read_bytes()
    first = SqliteJournal.open(image)
    first.close()
    (image / "journal.db").write_bytes(b"not a database" * 1000)
    SqliteJournal.open(image).close()
    SqliteJournal.open(image).close()
    (one, lost), (two, all_lost) = past_damage(image)
    assert (one.name, two.name) == ("damaged-1", "damaged-2")
    assert lost.startswith(f"up to {first.damage.missing_rows} acknowledged rows are lost")
    assert all_lost.startswith("up to 30 acknowledged rows are lost: file is not a database")
    assert (one / "journal.db-wal").read_bytes() == torn
    (two / "report.json").write_text("{}")
    assert "cannot be read" in dict(past_damage(image))[two]


def change_header(image: Path, at: int, data: bytes) -> None:
    database = image / "journal.db"
    content = database.read_bytes()
    database.write_bytes(content[:at] + data + content[at + len(data) :])


@pytest.mark.parametrize("at", [60, 68], ids=["user_version", "application_id"])
def test_a_header_that_lies_about_the_format_is_damage(tmp_path: Path, at: int) -> None:
    """The header is compared with a sealed row: a damaged journal is set aside, and not refused at
    every start as one of another format."""
    image = clean_image(tmp_path)
    change_header(image, at, b"\x00\x00\x01\x00")
    journal = SqliteJournal.open(image)
    journal.close()
    assert journal.damage.set_aside == image / "damaged-1"
    assert "its header says" in journal.damage.reason


def test_a_header_that_says_read_only_is_damage(tmp_path: Path) -> None:
    """SQLite would open it and fail at the first commit of every start."""
    image = clean_image(tmp_path)
    change_header(image, 18, b"\x09")
    journal = SqliteJournal.open(image)
    journal.commit([(journal.last_row + 1, b"x")])
    journal.close()
    assert journal.damage.set_aside is not None


def test_a_message_that_is_no_text_is_damage_too(tmp_path: Path) -> None:
    """SQLite's error may quote arbitrary bytes."""
    image = clean_image(tmp_path)
    data = (image / "journal.db").read_bytes()
    (image / "journal.db").write_bytes(data.replace(b"CREATE TABLE", b"CREA\xd4E TABLE"[:12]))
    journal = SqliteJournal.open(image)
    journal.close()
    assert journal.damage.set_aside is not None


def test_a_flipped_bit_in_what_declares_a_table_is_damage(tmp_path: Path) -> None:
    """No checksum covers the declaration of a table, so a wrong column name is looked for at the
    start.

    Otherwise the first plan, which uses the column, would fail after each start.
    """
    whole = clean_image(tmp_path)
    data = (whole / "journal.db").read_bytes()
    begin = data.index(b"CREATE TABLE plans")
    text = data[begin : data.index(b")", begin) + 1]
    for at in range(text.index(b"(") + 1, len(text), 7):
        image = tmp_path / f"at-{at}"
        shutil.copytree(whole, image)
        change_header(image, begin + at, bytes([text[at] ^ 1]))
        journal = SqliteJournal.open(image)
        row = journal.last_row + 1
        plan = Plan(1, "stream", "schema", 0, 0, b"")
        journal.commit([(row, b"x")])
        journal.commit(plan=plan)
        assert journal.plans() == [plan]
        journal.close()
        assert journal.damage.set_aside == image / "damaged-1"


def test_a_torn_log_never_lies_over_a_newer_database(tmp_path: Path) -> None:
    """After a checkpoint, no truncation of the log mixes pages of two moments.

    Before each cut the journal is as its process left it, right after a checkpoint.
    """
    directory = tmp_path / "live"
    journal = SqliteJournal.open(directory)
    for n in range(1, 60):
        plan = Plan(n, "s", "x", n - 1, n - 1, b"")
        journal.commit([(n, blob(n))], plan=plan)
        record = ShardRecord(n, "s", n - 1, n - 1, "name", "digest", 1, 1)
        journal.commit(record=record, drop_rows=[n])
    journal._checkpoint()
    shutil.copytree(directory, tmp_path / "image")
    journal.close()
    size = (tmp_path / "image" / "journal.db-wal").stat().st_size
    for cut in range(0, size, size // 40):
        shutil.copytree(tmp_path / "image", tmp_path / "torn", dirs_exist_ok=True)
        os.truncate(tmp_path / "torn" / "journal.db-wal", cut)
        torn = SqliteJournal.open(tmp_path / "torn")
        assert (torn.last_row, torn.plans(), torn.damage.set_aside) == (59, [], None)
        torn.close()
        shutil.rmtree(tmp_path / "torn")


def test_a_journal_of_another_format_is_refused_and_left_alone(tmp_path: Path) -> None:
    """A newer version's journal is no damage: nothing is moved."""
    image = clean_image(tmp_path)
    database = sqlite3.connect(image / "journal.db")
    sealed = ("format", "2", checksum("format", "2"))
    database.execute("INSERT OR REPLACE INTO journal VALUES (?, ?, ?)", sealed)
    database.execute("PRAGMA user_version = 2")
    database.commit()
    database.close()
    for _ in range(2):
        with pytest.raises(JournalError, match="expected a journal of format 1, got"):
            SqliteJournal.open(image)
    assert list(past_damage(image)) == []


def test_damage_that_only_a_commit_would_meet_is_found_at_once(tmp_path: Path) -> None:
    """A broken list of free pages reads well: without a check each start would fail at its work."""
    image = clean_image(tmp_path)
    change_header(image, 32, (3).to_bytes(4, "big") + (5).to_bytes(4, "big"))
    journal = SqliteJournal.open(image)
    assert journal.damage.set_aside is not None
    for n in range(1, 200):
        journal.commit([(n, blob(n) * 20)])
    journal.close()


def test_any_damaged_byte_is_harmless_or_reported(tmp_path: Path) -> None:
    """400 journals with 8 wrong bytes somewhere: no wrong row is replayed, none goes uncounted."""
    image = killed_image(tmp_path)
    expected = {n for n in range(1, 31) if n not in {m // 2 for m in range(21, 31)}}
    closed = tmp_path / "live"
    chance = random.Random(11)
    silent = 0
    for trial in range(400):
        victim = tmp_path / "victim"
        shutil.copytree(image if trial % 2 else closed, victim)
        path = victim / ("journal.db-wal" if trial % 2 else "journal.db")
        data = bytearray(path.read_bytes())
        at = chance.randrange(len(data) - 8)
        data[at : at + 8] = chance.randbytes(8)
        path.write_bytes(data)
        try:
            rows, journal = rows_of(victim)
        except JournalError:
            rows = None
        if rows is not None:
            journal.close()
            assert all(data == blob(n) for n, data in rows.items()), trial
            lost = expected - set(rows)
            silent += bool(lost) and not journal.damage
        shutil.rmtree(victim)
    assert silent == 0
