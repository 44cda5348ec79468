"""A copy of a journal's database as of one commit, also while a collector uses it.

The collector's one connection locks the database exclusively (`database`), so SQLite's own backup
from another process would find it busy. Copying the two files needs no connection: between two
checkpoints the database does not change and its log only grows. During a checkpoint the changed
pages are in the log too, so applying the copied log replaces what was copied half-written. Only a
log that was restarted in between makes a copy useless; it then has another header. A collector puts
off checkpoints while the lock is held, up to a limit, so that a slow copy comes to an end.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from storage.errors import JournalFailed
from storage.journal.database import COPYING, DATABASE
from storage.journal.sqlite_journal import SqliteJournal
from storage.system.files import FileLock

TRIES = 50
_LOG = f"{DATABASE}-wal"
_HEADER_BYTES = 32  # of the log: it has a number and random salts that change with each restart


class Recorded(NamedTuple):
    """The next ordinal of each stream of a journal, and its recorded shards as (stream, name)."""

    streams: Mapping[str, int]
    shards: frozenset[tuple[str, str]]


def copy_journal(directory: Path, target: Path) -> None:
    """Copy the database of the journal in `directory`, and its log, to the folder `target`.

    The high-water file is left out: it may be later than the copy. Raises OSError, and
    JournalFailed if the log was restarted during each of `TRIES` copies.
    """
    with FileLock(directory / COPYING):
        for _ in range(TRIES):
            before = _identity(directory)
            for name in (DATABASE, _LOG):
                (target / name).unlink(missing_ok=True)
                with contextlib.suppress(FileNotFoundError):  # a collector that ends has no log
                    shutil.copyfile(directory / name, target / name)
            if _identity(directory) == before and (target / DATABASE).exists():
                return
    raise JournalFailed(
        f"the journal in {directory} was changed too quickly to be copied, {TRIES} times; try again"
    )


def recorded_shards(directory: Path) -> Recorded:
    """What the journal in `directory` has recorded, from a copy. Raises JournalError, OSError."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        copy_journal(directory, Path(folder))
        with opened_copy(Path(folder)) as journal:
            shards = frozenset((record.stream, record.name) for record in journal.shards())
            return Recorded(journal.streams(), shards)


@contextlib.contextmanager
def opened_copy(copy: Path) -> Iterator[SqliteJournal]:
    """Open a copy, which applies its log and checks all of it. Raises JournalFailed if damaged."""
    with contextlib.closing(SqliteJournal.open(copy)) as journal:
        if journal.damage:
            raise JournalFailed(f"the copy of a journal in {copy} is damaged: {journal.damage}")
        yield journal


def _identity(directory: Path) -> object:
    """A value that changes when the log is restarted, or the database is changed without a log."""
    with contextlib.suppress(FileNotFoundError), (directory / _LOG).open("rb") as log:
        if header := log.read(_HEADER_BYTES):
            return header
    with contextlib.suppress(FileNotFoundError):
        stat = (directory / DATABASE).stat()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns
    return None
