"""A lock on a file whose holder removes it, or forks."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.system.files import FileLock


def test_a_lock_is_held_on_the_file_that_has_the_name(tmp_path: Path) -> None:
    """The holder removes the file while another thread has it open and waits for it. That thread
    then holds a lock on a new file of this name, so that a third cannot get it as well."""
    first, second, third = (FileLock(tmp_path / "lock") for _ in range(3))
    first.acquire()
    waiting = threading.Thread(target=second.acquire)
    waiting.start()
    while _times_open(tmp_path / "lock") < 2:
        assert waiting.is_alive()
    (tmp_path / "lock").unlink()
    first.release()
    waiting.join()
    assert (tmp_path / "lock").exists()
    assert not third.acquire(blocking=False)
    second.release()
    assert third.acquire(blocking=False)
    third.release()


@contextmanager
def child_of(fork: Callable[[], int], *, calls: bool) -> Iterator[None]:
    """A forked child, which lives until the end of the block; with `calls` it takes another lock
    first."""
    mine, its = os.pipe(), os.pipe()
    child = fork()
    if not child:
        try:
            os.close(mine[1])
            if calls:
                FileLock(Path(os.devnull)).acquire(shared=True)
            os.write(its[1], b"x")
            os.read(mine[0], 1)
        finally:
            os._exit(0)
    os.close(its[1])  # so that a child that fails ends the read
    try:
        assert os.read(its[0], 1)
        yield
    finally:
        for fd in (*mine, its[0]):
            os.close(fd)
        os.waitpid(child, 0)


def test_two_locks_of_one_file_are_disowned_in_any_order(tmp_path: Path) -> None:
    """A lock whose number is not known yet closes all descriptors of its file, among them that of
    another lock, which must not fail for that."""
    held, opening, other = (FileLock(tmp_path / "lock") for _ in range(3))
    held.acquire()
    opening.disown()
    held.disown()
    assert other.acquire(blocking=False)
    other.release()


def check_forks(folder: Path, fork: Callable[[], int], *, calls: bool) -> None:
    """Fork while one thread has taken a lock and another waits for it."""
    held, waiting, other = (FileLock(folder / "lock") for _ in range(3))
    taken = threading.Thread(target=held.acquire)
    taken.start()
    taken.join()
    waits = threading.Thread(target=waiting.acquire)
    waits.start()
    while _times_open(folder / "lock") < 2:
        assert waits.is_alive()
    with child_of(fork, calls=calls):
        assert not other.acquire(blocking=False)
        held.release()
        waits.join(60)
        assert not waits.is_alive()
        assert not other.acquire(blocking=False)
        waiting.release()
        assert other.acquire(blocking=False)
        other.release()


def test_a_forked_child_does_not_hold_its_parents_locks(tmp_path: Path) -> None:
    """Neither one that another thread took, nor one that it waits for. The parent keeps its lock
    until it releases it."""
    check_forks(tmp_path, os.fork, calls=False)


def test_a_child_without_fork_hooks_lets_go_at_its_next_lock(tmp_path: Path) -> None:
    """The same, in a process without the test runner's threads, which can hang such a child."""
    program = f"""
from pathlib import Path
from tests.ingest.bare_fork import bare_fork
from tests.storage.system.test_files import check_forks
check_forks(Path({str(tmp_path)!r}), bare_fork, calls=True)
"""
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[3], check=True)


def test_a_fork_within_the_opening_of_a_lock_leaves_it_to_the_parent(tmp_path: Path) -> None:
    """The file is open in the kernel, and the thread that opened it does not know the descriptor's
    number yet, because the thread that forks has the interpreter."""
    libc, path = ctypes.PyDLL(None), tmp_path / "lock"  # PyDLL: this thread keeps the interpreter
    os.mkfifo(path)
    lock, other = FileLock(path), FileLock(path)
    waits = threading.Thread(target=lock.acquire, kwargs={"shared": True})

    def fork() -> int:
        lowest = os.dup(0)
        os.close(lowest)  # it is the next file's number
        waits.start()  # until there is a writer, who can open the file once a reader waits
        while (writer := libc.open(bytes(path), os.O_WRONLY | os.O_NONBLOCK)) < 0:
            path.stat()  # gives the other thread the interpreter
        opened.append(writer)
        while libc.fcntl(min({lowest, lowest + 1} - {writer}), 1) < 0:  # F_GETFD
            continue
        return os.fork()

    usual, opened = sys.getswitchinterval(), list[int]()
    sys.setswitchinterval(1000.0)
    try:
        with child_of(fork, calls=False):
            waits.join()
            lock.release()
            assert other.acquire(blocking=False)
            other.release()
    finally:
        sys.setswitchinterval(usual)
        os.close(opened[0])


def _times_open(path: Path) -> int:
    """How many descriptors of this process are for a file."""
    found = 0
    for entry in os.scandir("/proc/self/fd"):
        try:
            found += os.readlink(entry.path) == str(path)
        except FileNotFoundError:  # closed meanwhile
            continue
    return found
