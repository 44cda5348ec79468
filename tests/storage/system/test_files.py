"""A lock on a file whose holder removes it."""

from __future__ import annotations

import os
import threading
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


def _times_open(path: Path) -> int:
    """How many descriptors of this process are for a file."""
    found = 0
    for entry in os.scandir("/proc/self/fd"):
        try:
            found += os.readlink(entry.path) == str(path)
        except FileNotFoundError:  # closed meanwhile
            continue
    return found
