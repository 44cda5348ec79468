"""What a simulated power cut leaves of a process's writes: tests of the fault suite's own disk."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.faults.disk import FAIL_THEN_KILL, KILL, Disk, build

HEADER = """
import os, sys, time
from pathlib import Path
root = Path(sys.argv[1])

def sync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)

def write(path, data, mode="wb"):
    with open(path, mode) as file:
        file.write(data)
"""


FOLDER = "(root / '.d').mkdir(); write(root / '.d' / 'a', b'A'); sync(root / '.d' / 'a'); "


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("disk"))


@pytest.fixture
def disk(tmp_path: Path, library: Path) -> Disk:
    """A disk that holds one durable file, `old`."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "old").write_bytes(b"old content")
    return Disk.create(tmp_path / "root", library)


def run(disk: Disk, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script on the disk; its one argument is the root."""
    return subprocess.run(
        [sys.executable, "-c", HEADER + textwrap.dedent(script), disk.root],
        env={**os.environ, **disk.environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def after_cut(disk: Disk, survival: str = "nothing", seed: int = 1) -> dict[str, bytes]:
    disk.cut(random.Random(seed), survival)
    files = sorted(path for path in disk.root.rglob("*") if path.is_file())
    return {str(path.relative_to(disk.root)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("script", "left"),
    [
        ("write(root / 'old', b'new')", {"old": b"old content"}),
        ("write(root / 'old', b'NEW', 'r+b')", {"old": b"old content"}),
        ("write(root / 'old', b'NEW', 'r+b'); sync(root / 'old')", {"old": b"NEW content"}),
        ("write(root / 'old', b' more', 'ab'); sync(root / 'old')", {"old": b"old content more"}),
        ("os.truncate(os.open(root / 'old', os.O_RDWR), 3)", {"old": b"old content"}),
        ("write(root / 'a', b'A'); sync(root / 'a')", {"old": b"old content"}),
        ("write(root / 'a', b'A'); sync(root)", {"old": b"old content", "a": b""}),
        ("write(root / 'a', b'A'); sync(root / 'a'); sync(root)",
         {"old": b"old content", "a": b"A"}),
        ("(root / 'old').unlink()", {"old": b"old content"}),
        ("(root / 'old').unlink(); sync(root)", {}),
        ("(root / 'old').rename(root / 'b')", {"old": b"old content"}),
        ("(root / 'old').rename(root / 'b'); sync(root)", {"b": b"old content"}),
        ("write(root / 'a', b'A'); sync(root / 'a'); os.replace(root / 'a', root / 'old')",
         {"old": b"old content"}),
        ("write(root / 'a', b'A'); os.replace(root / 'a', root / 'old'); sync(root)",
         {"old": b""}),
        (("(root / 'd').mkdir(); write(root / 'd' / 'a', b'A'); sync(root / 'd' / 'a'); "
         "sync(root / 'd')"), {"old": b"old content"}),
        (("(root / 'd').mkdir(); sync(root); write(root / 'd' / 'a', b'A'); "
         "sync(root / 'd' / 'a'); sync(root / 'd')"), {"old": b"old content", "d/a": b"A"}),
        # a folder is filled under another name, as versions of weights are
        (FOLDER + "sync(root / '.d'); (root / '.d').rename(root / 'd'); sync(root)",
         {"old": b"old content", "d/a": b"A"}),
        (FOLDER + "sync(root); sync(root / '.d'); (root / '.d').rename(root / 'd')",
         {"old": b"old content", ".d/a": b"A"}),
        (FOLDER + "(root / '.d').rename(root / 'd'); sync(root)", {"old": b"old content"}),
        (FOLDER + "sync(root / '.d'); (root / '.d').rename(root / 'd')", {"old": b"old content"}),
        (FOLDER + "(root / '.d').rename(root / 'd'); sync(root / 'd'); sync(root)",
         {"old": b"old content", "d/a": b"A"}),
        ("os.link(root / 'old', root / 'b'); sync(root)",
         {"old": b"old content", "b": b"old content"}),
        ("os.link(root / 'old', root / 'b')", {"old": b"old content"}),
    ],
)  # fmt: skip
def test_a_cut_leaves_what_was_synced(disk: Disk, script: str, left: dict[str, bytes]) -> None:
    """A file's sync keeps content, a folder's sync names; a second cut changes nothing."""
    done = run(disk, script)
    assert done.returncode == 0, done.stderr
    assert after_cut(disk) == left
    assert after_cut(disk) == left


def test_what_is_spared_is_a_beginning_or_any_parts(disk: Disk) -> None:
    """Unsynced changes may survive: in order, or each sector by itself."""
    script = "[write(root / 'old', b'%d' % n * 600, 'ab') for n in range(6)]"
    whole = b"old content" + b"".join(b"%d" % n * 600 for n in range(6))
    found: dict[str, set[bytes]] = {"beginning": set(), "parts": set()}
    for survival, seen in found.items():
        for seed in range(6):
            (disk.root / "old").write_bytes(b"old content")
            disk.forget()
            assert run(disk, script).returncode == 0
            seen.add(after_cut(disk, survival, seed)["old"])
    assert len(found["beginning"]) > 1
    assert all(whole.startswith(content) for content in found["beginning"])
    assert len(found["parts"]) > 2
    assert any(not whole.startswith(content) for content in found["parts"])


def test_no_sync_covers_what_one_failed_for(disk: Disk) -> None:
    """The kernel counts the pages as written: later syncs succeed and write only newer data."""
    disk.fail("collector", "sync", 1, 5)
    done = run(
        disk,
        """
        file = open(root / "old", "r+b", buffering=0)
        file.write(b"AAA")
        try:
            os.fsync(file.fileno())
        except OSError as error:
            print(error.errno)
        os.fsync(file.fileno())
        file.write(b"BBB")
        os.fsync(file.fileno())
        print(Path(root / "old").read_text())
        """,
    )
    assert done.stdout.split("\n") == ["5", "AAABBBntent", ""]
    assert disk.fired == 1
    assert after_cut(disk) == {"old": b"oldBBBntent"}


def test_a_process_is_killed_before_its_call(disk: Disk) -> None:
    disk.fail("collector", "write", 2, KILL)
    script = (
        "file = open(root / 'old', 'ab', buffering=0); [file.write(b'%d' % n) for n in range(9)]"
    )
    assert run(disk, script).returncode == -9
    assert (disk.root / "old").read_bytes() == b"old content0"


def test_a_process_is_killed_after_an_error(disk: Disk) -> None:
    disk.fail("collector", "sync", 1, FAIL_THEN_KILL, count=2)
    done = run(
        disk,
        """
        try:
            sync(root / "old")
        except OSError as error:
            print(error.errno, flush=True)
        sync(root / "old")
        """,
    )
    assert (done.returncode, done.stdout) == (-9, "5\n")


def test_a_full_disk_takes_what_does_not_grow(disk: Disk) -> None:
    disk.fill(True)
    done = run(
        disk,
        """
        write(root / "old", b"NEW", "r+b")
        for attempt in (lambda: write(root / "a", b""), lambda: write(root / "old", b"x", "ab")):
            try:
                attempt()
            except OSError as error:
                print(error.errno)
        """,
    )
    assert done.stdout == "28\n28\n"
    assert (disk.root / "old").read_bytes() == b"NEW content"


def test_the_wall_clock_moves_and_the_other_does_not(disk: Disk) -> None:
    script = "import datetime; print(int(time.time()), int(time.monotonic()))"
    before = [int(word) for word in run(disk, script).stdout.split()]
    disk.shift_clock(-3600)
    after = [int(word) for word in run(disk, script).stdout.split()]
    assert -3600 <= after[0] - before[0] < -3500
    assert 0 <= after[1] - before[1] < 100


def test_a_file_may_be_removed_while_it_is_made(disk: Disk) -> None:
    """By another thread; the call then fails as if its folder had been removed before it."""
    done = run(
        disk,
        """
        import threading
        made, removed = 0, 0

        def remove():
            global removed
            while made < 2_000:
                try:
                    os.unlink(root / "a")
                    removed += 1
                except FileNotFoundError:
                    pass

        other = threading.Thread(target=remove)
        other.start()
        while made < 2_000:
            try:
                os.close(os.open(root / "a", os.O_RDWR | os.O_CREAT))
                made += 1
            except FileNotFoundError:
                pass
        other.join()
        print(removed > 0)
        """,
    )
    assert (done.returncode, done.stdout) == (0, "True\n")
    assert after_cut(disk) == {"old": b"old content"}
