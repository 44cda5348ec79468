"""What is deleted without `close` leaves no thread behind."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from storage.reading import prefetch
from storage.reading.multi_agent_reader import MultiAgentReader
from storage.reading.shard_reader import ShardReader
from storage.reading.sources import DirectorySource
from tests.storage.multi_agent_log import JointLog, Run
from tests.storage.reading.test_shard_reader import part, write


class Owned:
    """Holds the only reference to a reader or source, whose threads it knows."""

    def __init__(self) -> None:
        self.threads = set(threading.enumerate())
        self.held: list[Any] = []

    def own(self, one: Any) -> None:
        self.held.append(one)
        self.threads = set(threading.enumerate()) - self.threads

    def drop(self) -> None:
        found, pause = weakref.ref(self.held.pop()), threading.Event()
        for _ in range(1_000):
            gc.collect()
            if found() is None:
                return
            pause.wait(0.01)  # its thread may be decoding a shard for it
        raise AssertionError(f"{found()} is still referenced")

    def join(self) -> None:
        assert self.threads
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def owned() -> Owned:
    return Owned()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in range(8):
        write(tmp_path, [part(number, 4)])
    return tmp_path


@pytest.mark.parametrize("follow", [False, True])
@pytest.mark.parametrize("is_large", [False, True])
def test_a_reader_that_is_deleted_leaves_no_thread(
    root: Path, owned: Owned, monkeypatch: pytest.MonkeyPatch, follow: bool, is_large: bool
) -> None:
    """In the middle of its input, while the prefetch thread waits for space, also if a second one
    fetches large shards, and with `follow`, where the folders are watched."""
    if is_large:
        monkeypatch.setattr(prefetch, "LARGE", 0)
    reader = ShardReader(root, batch_size=4, prefetch=1, follow=follow)
    assert next(iter(reader)).count == 4
    owned.own(reader)
    del reader
    owned.drop()
    owned.join()


def test_a_reader_that_has_read_everything_and_waits_leaves_none(root: Path, owned: Owned) -> None:
    """The prefetch thread waits for a change of the folders, for a long time."""
    reader = ShardReader(root, batch_size=4, follow=True, poll_interval=1000.0)
    for _ in range(8):
        reader.next()
    while not reader.caught_up():
        continue
    owned.own(reader)
    del reader
    owned.drop()
    owned.join()


def test_a_reader_of_several_policies_leaves_none(tmp_path: Path, owned: Owned) -> None:
    """Each policy's reader has its own threads."""
    log = JointLog(tmp_path)
    log.write(Run("e", "s", "seller", (0, 1), agents=2), Run("e", "b", "buyer", (0, 1), agents=2))
    reader = MultiAgentReader(tmp_path, batch_size=1, follow=True)
    reader.next(60)
    owned.own(reader)
    del reader
    owned.drop()
    owned.join()


def test_a_source_that_is_deleted_stops_watching(root: Path, owned: Owned) -> None:
    """Also one that no reader has used."""
    source = DirectorySource(root, follow=True)
    source.scan()
    owned.own(source)
    del source
    owned.drop()
    owned.join()


def test_a_deletion_waits_for_no_lock(root: Path, owned: Owned) -> None:
    """The garbage collector may run in a thread that is about to wait for the folders' event, whose
    lock is not reentrant."""
    source = DirectorySource(root, follow=True)
    reader = ShardReader(source=source, batch_size=4, follow=True)
    reader.next()
    owned.own(reader)
    lock = source._changed._cond  # type: ignore[attr-defined]  # of the event
    del reader, source
    with lock:
        owned.drop()
    del lock
    owned.join()


def test_a_child_leaves_its_parents_threads_alone(root: Path) -> None:
    """A forked child has none of them, and locks that they held stay locked in it."""
    owned = [ShardReader(root, batch_size=4, prefetch=1, follow=True)]
    owned[0].next()
    child = os.fork()
    if not child:
        owned.clear()
        gc.collect()
        os._exit(threading.active_count())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert owned[0].next().count == 4
    owned[0].close()
