"""Acknowledged rows outlive kills, power loss, full disks and damage, or are counted as lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from storage.journal.sqlite_journal import SqliteJournal
from tests.faults.disk import FAIL_THEN_KILL, Disk, build

HERE = Path(__file__).parents[1]
REPOSITORY = HERE.parents[1]

WRITER = """
import sys
from pathlib import Path
import storage.journal.sqlite_journal
from storage.journal.sqlite_journal import SqliteJournal

storage.journal.sqlite_journal.CHECKPOINT_BYTES = 400_000  # so that a short run recycles its log
journal = SqliteJournal.open(Path(sys.argv[1]))
for level in sys.argv[2:]:
    journal._db.execute(f"PRAGMA synchronous = {level}")
while True:
    n = journal.last_row
    rows = [(n + i, b"%d:" % (n + i) * 500) for i in range(1, 4)]
    journal.commit(rows, put={"last": b"%d" % (n + 3)}, drop_rows=[n] if n else [])
    print(n + 3, flush=True)
"""


def blob(number: int) -> bytes:
    return b"%d:" % number * 500


def start(script: str, *arguments: str | Path, **variables: str | Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environment.update({name: str(value) for name, value in variables.items()})
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def acknowledge_then_kill(child: subprocess.Popen[str], commits: int) -> int:
    """The last row that the child acknowledged before it was killed."""
    assert child.stdout is not None
    acknowledged = [int(child.stdout.readline()) for _ in range(commits)]
    child.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in child.stdout.read().split("\n")[:-1]]
    child.communicate()
    return acknowledged[-1]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("disk"))


@pytest.fixture
def disk(tmp_path: Path, library: Path) -> Disk:
    return Disk.create(tmp_path / "disk", library)


def rows_of(directory: Path) -> tuple[dict[int, bytes], SqliteJournal]:
    journal = SqliteJournal.open(directory)
    return dict(journal.replay()), journal


@pytest.mark.parametrize("commits", [1, 2, 7, 40, 90])
def test_a_killed_writer_loses_nothing(tmp_path: Path, commits: int) -> None:
    """SIGKILL at any moment: every acknowledged row is there, and the state fits the rows."""
    last = acknowledge_then_kill(start(WRITER, tmp_path), commits)
    rows, journal = rows_of(tmp_path)
    journal.close()
    assert not journal.damage
    assert journal.last_row >= last
    assert journal.state() == {"last": b"%d" % journal.last_row}
    dropped = set(range(3, journal.last_row, 3))
    assert rows == {n: blob(n) for n in range(1, journal.last_row + 1) if n not in dropped}


def power_loss(disk: Disk, *how: str) -> tuple[int, SqliteJournal]:
    """(last acknowledged row, the journal after a cut that loses all unsynced data)."""
    child = start(WRITER, disk.root / "journal", *how, **disk.environment)
    last = acknowledge_then_kill(child, 60)
    disk.cut(random.Random(1), "nothing")
    return last, SqliteJournal.open(disk.root / "journal")


def test_power_loss_loses_nothing_acknowledged(disk: Disk) -> None:
    """Only what was synced survives: every acknowledged row still does."""
    last, journal = power_loss(disk)
    survived = [n for n, data in journal.replay() if data == blob(n)]
    journal.close()
    assert not journal.damage
    assert journal.last_row >= last
    # a durable but not yet acknowledged commit has dropped row `last`
    kept = {n for n in range(1, last + 1) if n % 3 or n == journal.last_row}
    assert set(survived) >= kept


@pytest.mark.parametrize("level", ["OFF", "NORMAL"])
def test_the_power_loss_test_sees_a_missing_sync(disk: Disk, level: str) -> None:
    """The same trial with less syncing loses acknowledged rows: the trial can fail."""
    last, journal = power_loss(disk, level)
    journal.close()
    assert journal.last_row < last


FAULTY = """
import errno, sys
from pathlib import Path
from storage.errors import JournalFailed, JournalFull
from storage.journal.sqlite_journal import SqliteJournal
from tests.faults.disk import Disk

disk = Disk.of_environment()
journal = SqliteJournal.open(Path(sys.argv[1]))
journal.commit([(1, b"before")], put={"k": b"1"})
for fault in sys.argv[2:]:
    if fault == "full":
        disk.fill(True)
    else:
        disk.fail("collector", "sync", 1, errno.EIO)
    try:
        journal.commit([(2, b"during" * 9000)], put={"k": b"2"}, drop_rows=[1])
        print("committed")
    except (JournalFull, JournalFailed) as error:
        print(type(error).__name__, journal.last_row, list(journal.state().values()))
    disk.fill(False)
try:
    journal.commit([(2, b"after")])
    print("committed", [blob for _, blob in journal.replay()])
except JournalFailed as error:
    print("refused", error)
"""


def run_faulty(disk: Disk, *faults: str) -> list[str]:
    child = start(FAULTY, disk.root / "j", *faults, **disk.environment)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    return output.splitlines()


def test_a_full_disk_rolls_back_and_resumes(disk: Disk) -> None:
    """No space left: JournalFull, nothing changed, and the next commit with space succeeds."""
    assert run_faulty(disk, "full", "full") == [
        "JournalFull 1 [b'1']",
        "JournalFull 1 [b'1']",
        "committed [b'before', b'after']",
    ]
    rows, journal = rows_of(disk.root / "j")
    journal.close()
    assert rows == {1: b"before", 2: b"after"}


def test_a_failed_sync_is_fatal(disk: Disk) -> None:
    """A failed sync: JournalFailed, also for every later commit, even if the disk recovers."""
    failed, refused = run_faulty(disk, "sync")
    assert failed == "JournalFailed 1 [b'1']"
    assert refused.startswith("refused")
    assert "disk I/O error" in refused
    rows, journal = rows_of(disk.root / "j")
    journal.close()
    assert rows[1 if 1 in rows else 2] in (b"before", b"during" * 9000)


REOPENED = """
import sys
from pathlib import Path
from storage.journal.sqlite_journal import SqliteJournal

journal = SqliteJournal.open(Path(sys.argv[1]))
n = journal.last_row
journal.commit([(n + 1, b"%d:" % (n + 1) * 500)])
print(n + 1, flush=True)
sys.stdin.read()
"""


def test_what_a_failed_sync_left_is_made_durable_by_the_next_start(disk: Disk) -> None:
    """A readable log may not be on the disk: it is synced before it is used."""
    disk.fail("collector", "sync", 40, FAIL_THEN_KILL, count=2)
    child = start(WRITER, disk.root / "journal", **disk.environment)
    child.communicate(timeout=60)
    assert disk.fired
    last = acknowledge_then_kill(start(REOPENED, disk.root / "journal", **disk.environment), 1)
    disk.cut(random.Random(1), "nothing")
    rows, journal = rows_of(disk.root / "journal")
    journal.close()
    assert not journal.damage
    assert journal.last_row == last
    assert {last, last - 1} <= set(rows)
