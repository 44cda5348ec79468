"""The database under `SqliteJournal`: its tables and settings, checksums, the high-water file.

Translates the errors of SQLite: the disk is full, another process holds the file, input or output
failed, or the content is malformed. The files of a damaged journal are kept in `damaged-<n>/` with
a report; `verify` repeats the report until the folder is moved away.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from storage.errors import JournalError, JournalFailed, JournalFull, JournalLocked
from storage.journal.records import DamageReport
from storage.system.files import FileLock, sync_directory, write_synced
from storage.wording import counted

APPLICATION_ID = 0x48_52_4A_31  # "HRJ1"
FORMAT_VERSION = 1
DATABASE = "journal.db"
COPYING = "copying"
"""The file that a process locks while it copies the database; see `copying`."""
CHECKPOINT_BYTES = 16 * 2**20

PAGE_BYTES = 16_384
"""Page size of a new database, in bytes. Compared with SQLite's 4 kB, large rows of imports are
written in half the time, and small commits take as long, because they wait for the disk."""

_SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT_VERSION};
CREATE TABLE rows (number INTEGER PRIMARY KEY, blob BLOB, checksum BLOB);
CREATE TABLE dropped (first INTEGER PRIMARY KEY, last INTEGER, checksum BLOB);
CREATE TABLE state (key TEXT PRIMARY KEY, value BLOB, checksum BLOB) WITHOUT ROWID;
CREATE TABLE streams (stream TEXT PRIMARY KEY, next INTEGER, checksum BLOB) WITHOUT ROWID;
CREATE TABLE plans (plan_id INTEGER PRIMARY KEY, stream TEXT, schema_id TEXT, first INTEGER,
    last INTEGER, blob BLOB, checksum BLOB);
CREATE TABLE shards (plan_id INTEGER PRIMARY KEY, stream TEXT, first INTEGER, last INTEGER,
    name TEXT, digest TEXT, rows INTEGER, nbytes INTEGER, checksum BLOB);
CREATE TABLE journal (key TEXT PRIMARY KEY, value TEXT, checksum BLOB) WITHOUT ROWID;
"""


class Malformed(Exception):
    """The database cannot be read as a journal."""


def checksum(*fields: int | str | bytes) -> bytes:
    """An 8-byte BLAKE2b digest of the fields of one database row.

    SQLite itself does not detect changed content.
    """
    digest = hashlib.blake2b(digest_size=8)
    for value in fields:
        data = value if isinstance(value, bytes) else str(value).encode()
        digest.update(b"%d:" % len(data))
        digest.update(data)
    return digest.digest()


def translate(error: sqlite3.Error) -> JournalError:
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return JournalFull(f"the journal's disk is full: {error}")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return JournalLocked(f"another program has the journal's database open: {error}")
    return JournalFailed(f"the journal cannot be read or written: {error}")


_ENVIRONMENT = (  # errors around the file, which say nothing about its content
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_AUTH,
)


def is_malformed(error: sqlite3.Error) -> bool:
    return ((getattr(error, "sqlite_errorcode", None) or 0) & 0xFF) not in _ENVIRONMENT


def is_being_copied(directory: Path) -> bool:
    """Whether a process copies the journal in `directory` now."""
    lock = FileLock(directory / COPYING)
    try:
        free = lock.acquire(blocking=False, shared=True)
    except OSError:  # it never was
        return False
    lock.release()
    return not free


class HighWater:
    """The number of the last committed row, in a file that is overwritten in place, never synced.

    It can lag behind the database. If it is ahead, the database has lost rows. A short or torn file
    reads as 0, and errors in writing it are ignored.
    """

    def __init__(self, path: Path) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def read(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            digits, crc = os.pread(self._fd, 64, 0).split()
            if len(digits) == 20 and int(crc, 16) == zlib.crc32(digits):
                return int(digits)
        return 0

    def write(self, row: int) -> None:
        digits = b"%020d" % row
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, b"%s %08x\n" % (digits, zlib.crc32(digits)), 0)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = -1


def connect(path: Path, collector_id_factory: Callable[[], str]) -> sqlite3.Connection:
    """Open the only connection to a journal's database; create the database if there is none.

    Raises Malformed, JournalError for a database that is not a journal, and sqlite3.Error for
    errors around the file.
    """
    _require_writable(path)
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0)
    try:
        _configure(database, path, collector_id_factory)
    except sqlite3.Error as error:
        database.close()
        if is_malformed(error):
            raise Malformed(str(error)) from error
        raise
    except UnicodeDecodeError as error:  # SQLite's error text quotes bytes of the damaged file
        database.close()
        raise Malformed(str(error)) from error
    except BaseException:
        database.close()
        raise
    return database


def leave_open(database: sqlite3.Connection) -> None:
    """Never close a connection, not even when the interpreter ends; it also keeps its locks."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(database))


def _require_writable(path: Path) -> None:
    """Raise Malformed if the header requires a newer SQLite: every commit would fail.

    Call it before the database is opened: closing a second descriptor of the file would drop the
    locks that SQLite holds on it.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        header = file.read(20)
        if header.startswith(b"SQLite format 3\0") and header[18:19] not in (b"", b"\1", b"\2"):
            raise Malformed(f"its header says write version {header[18]}")


def _configure(
    database: sqlite3.Connection, path: Path, collector_id_factory: Callable[[], str]
) -> None:
    for pragma in (
        # Exclusive: SQLite versions before 3.51.3 can corrupt a WAL that two connections share.
        "locking_mode = EXCLUSIVE",
        f"page_size = {PAGE_BYTES}",
        # Some builds of SQLite overwrite deleted rows with zeros: each row would be written twice.
        "secure_delete = OFF",
        "cache_size = -8000",  # in kB: most rows are deleted while their pages are still in memory
        "journal_mode = WAL",
        "synchronous = FULL",
        "wal_autocheckpoint = 0",  # `_checkpoint` does it, so that its errors are seen
        f"journal_size_limit = {4 * CHECKPOINT_BYTES}",
        "temp_store = MEMORY",
    ):
        database.execute(f"PRAGMA {pragma}")
    (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if not tables:
        _create(database, collector_id_factory())
        sync_directory(path.parent)
    elif (application, version) != (APPLICATION_ID, FORMAT_VERSION):
        if _is_ours(database):
            raise Malformed(f"its header says application {application:#x}, format {version}")
        raise JournalError(
            f"{path}: expected a journal of format {FORMAT_VERSION}, got application "
            f"{application:#x}, format {version}"
        )
    else:
        _require_tables(database)


def _require_tables(database: sqlite3.Connection) -> None:
    """Raise Malformed unless the tables are declared as in `_SCHEMA`.

    No checksum covers these declarations: a flipped bit can change a column's name, and each start
    would succeed until its first commit fails.
    """
    rows = database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    found = {" ".join(str(sql).split()) for (sql,) in rows}
    expected = {" ".join(text.split()) for text in _SCHEMA.split(";") if "CREATE" in text}
    if found != expected:
        other = " and ".join(sorted(found - expected)) or "fewer of them"
        raise Malformed(f"expected the tables of a journal, got {other:.200}")


def _create(database: sqlite3.Connection, collector_id: str) -> None:
    database.execute("BEGIN IMMEDIATE")
    for statement in _SCHEMA.split(";")[:-1]:
        database.execute(statement)
    for key, value in (("collector_id", collector_id), ("format", str(FORMAT_VERSION))):
        sealed = (key, value, checksum(key, value))
        database.execute("INSERT INTO journal VALUES (?, ?, ?)", sealed)
    database.execute("COMMIT")


def _is_ours(database: sqlite3.Connection) -> bool:
    """Whether the content is a journal of this format, although the header says otherwise."""
    with contextlib.suppress(sqlite3.Error, TypeError):
        rows = database.execute("SELECT key, value, checksum FROM journal").fetchall()
        whole = {key: value for key, value, stored in rows if checksum(key, value) == stored}
        return "collector_id" in whole and whole.get("format") == str(FORMAT_VERSION)
    return False


REPORT = "report.json"


def keep_damaged(
    directory: Path, report: DamageReport, *, move: Sequence[str] = (), copy: Sequence[str] = ()
) -> Path:
    """Make the next `damaged-<n>/` in a journal's directory, durably, and return its path.

    The report is written first; then the files of `move` are moved in their order. Those of `copy`
    are copied for a later examination; errors in copying are ignored. Raises OSError.
    """
    n = 1
    while (directory / f"damaged-{n}").exists():
        n += 1
    target = directory / f"damaged-{n}"
    target.mkdir()
    write_synced(target / REPORT, json.dumps(_report_document(report)).encode())
    for name in move:
        if (directory / name).exists():
            (directory / name).rename(target / name)
    for name in copy:
        with contextlib.suppress(OSError):
            shutil.copyfile(directory / name, target / name)
    sync_directory(target)
    sync_directory(directory)
    return target


def _report_document(report: DamageReport) -> dict[str, object]:
    return {
        "missing_rows": report.missing_rows,
        "reason": report.reason,
        "previous_collector_id": report.previous_collector_id,
    }


def past_damage(directory: Path) -> Iterator[tuple[Path, str]]:
    """Yield each `damaged-<n>/` that is still in a journal's directory, and its report as text."""
    for folder in sorted(directory.glob("damaged-*")):
        try:
            report = json.loads((folder / REPORT).read_bytes())
            lost = counted(report["missing_rows"], "acknowledged row is", "acknowledged rows are")
            text = f"up to {lost} lost: {report['reason']}"
        except (OSError, ValueError, LookupError, TypeError):
            text = "a journal was set aside, and its report cannot be read"
        yield folder, text
