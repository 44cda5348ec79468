"""Copies of a journal that another process writes: each is one moment, and none is refused."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from storage.errors import JournalFailed
from storage.journal import copying, sqlite_journal
from storage.journal.copying import copy_journal
from storage.journal.database import COPYING, is_being_copied
from storage.journal.sqlite_journal import SqliteJournal
from storage.system.files import FileLock

PROGRAM = """
import itertools, os, pathlib, sys
from storage.journal import sqlite_journal
sqlite_journal.CHECKPOINT_BYTES = 200_000  # several checkpoints per copy, unless put off
journal = sqlite_journal.SqliteJournal.open(pathlib.Path(sys.argv[1]))
journal._db.execute('PRAGMA synchronous = OFF')  # only the order of its writes counts here
for number in itertools.count(1):
    keep = number - 60
    journal.commit([(number, os.urandom(9_000))], drop_rows=[keep] if keep > 0 else ())
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""


def test_a_copy_beside_a_writer_is_one_moment(tmp_path: Path) -> None:
    """No copy is damaged, and each has what was committed before it: the last 60 rows."""
    source, last = tmp_path / "journal", 0
    command = [sys.executable, "-c", PROGRAM, str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for number in range(25):
            while last < 70 * (number + 1):
                last = int(writer.stdout.readline())
            target = tmp_path / f"copy-{number}"
            target.mkdir()
            copy_journal(source, target)
            with closing(SqliteJournal.open(target)) as journal:
                assert not journal.damage, journal.damage
                assert not (target / "damaged-1").exists()
                rows = [row for row, _ in journal.replay()]
            assert rows == list(range(rows[-1] - 59, rows[-1] + 1))
            assert rows[-1] >= last
        writer.kill()


def test_a_log_that_is_restarted_all_the_time_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy is never returned from two moments; while one is made, the journal is known to be."""
    source, target = tmp_path / "journal", tmp_path / "copy"
    target.mkdir()
    SqliteJournal.open(source).close()
    assert not is_being_copied(source)
    moments = iter(range(1_000))

    def changed(directory: Path) -> object:
        assert is_being_copied(directory)
        return next(moments)

    monkeypatch.setattr(copying, "_identity", changed)
    with pytest.raises(JournalFailed, match="was changed too quickly to be copied, 50 times"):
        copy_journal(source, target)
    assert not is_being_copied(source)


def test_the_log_goes_on_while_it_is_copied_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint comes in the way of a slow copy; one that is stopped does not fill the disk."""
    monkeypatch.setattr(sqlite_journal, "CHECKPOINT_BYTES", 100_000)
    with closing(SqliteJournal.open(tmp_path)) as journal:
        numbers = iter(range(1, 999))

        def restarts(commits: int) -> int:
            found = [copying._identity(tmp_path)]
            for _ in range(commits):
                journal.commit([(next(numbers), b"x" * 50_000)])
                found.append(copying._identity(tmp_path))
            return len(set(found)) - 1

        assert restarts(10) >= 4
        with FileLock(tmp_path / COPYING):
            assert restarts(40) == 0
            assert restarts(60) == 1
        assert restarts(10) >= 4
