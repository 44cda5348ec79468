"""A disk that hangs or is full under a spooling client: no call waits for it."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ingest.client.async_client import AsyncPolicyClient
from ingest.client.policy_client import PolicyClient
from ingest.protocol.errors import BufferFull
from tests.ingest.scripted_collector import Gate, ScriptedCollector

SHORT = [0.5, -1.0]
NOBODY = "http://127.0.0.1:9"


class HangingDisk:
    """Writes below a folder wait while `answers` is clear, then fail with `error`, if any."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.answers = threading.Event()
        self.answers.set()
        self.reached = threading.Event()
        self.error = 0
        self._write = os.write

    def write(self, fd: int, data: bytes) -> int:
        if str(self.folder) in os.readlink(f"/proc/self/fd/{fd}"):
            if not self.answers.is_set():
                self.reached.set()
            self.answers.wait()
            if self.error:
                raise OSError(self.error, os.strerror(self.error))
        return self._write(fd, data)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingDisk]:
    hanging = HangingDisk(tmp_path)
    monkeypatch.setattr(os, "write", hanging.write)
    yield hanging
    hanging.error = 0
    hanging.answers.set()


@pytest.fixture
def collector() -> Iterator[ScriptedCollector]:
    with ScriptedCollector() as running:
        yield running


def spooling(address: str, directory: Path, **options: object) -> PolicyClient:
    return PolicyClient(address, on_full="spool", spool_dir=directory, **options)  # type: ignore[arg-type]  # as named


def test_calls_return_while_no_write_does(
    collector: ScriptedCollector,
    tmp_path: Path,
    disk: HangingDisk,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Events logged while the disk hangs wait in memory, are counted, and are delivered in order
    once the disk answers. The log has a line for each change."""
    monkeypatch.setattr("ingest.delivery.shared_spool.HANG_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING), spooling(collector.address, tmp_path) as client:
        client.connect()
        client.log_step(SHORT, 1, 0.0, episode_id="first")
        client.flush(60)
        disk.answers.clear()
        names = [client.start_episode(f"e{n}") for n in range(5)]
        assert disk.reached.wait(60)
        for t in range(20):
            for name in names:
                client.log_action(name, SHORT, t % 3)
                client.log_returns(name, float(t))
        assert client.stats.unwritten == client.stats.waiting == 5 * 41
        assert client.stats.oldest_waiting > 0
        assert "headrace_client_events_unwritten 205" in client.stats.prometheus()
        with pytest.raises(TimeoutError, match="205 events still wait"):
            client.flush(0.01)
        assert set(collector.episodes) == {"first"}
        disk.answers.set()
        client.flush(60)
        assert (client.stats.unwritten, client.stats.spooled) == (0, 0)
    for name in names:
        assert collector.episodes[name].rewards == [float(t) for t in range(20)]
    lines = [record.message for record in caplog.records if "disk" in record.message]
    assert [line.partition(": ")[2] for line in lines] == [
        "the disk does not answer; events wait in memory",
        "writing events to disk resumed",
    ]


def test_an_asyncio_loop_waits_for_the_disk_too(tmp_path: Path) -> None:
    """Up to 10 ms by default, although no call waits otherwise; else each call would return before
    its event is on disk."""
    spool = {"on_full": "spool", "spool_dir": tmp_path, "timeout": 0.01}
    for options, bound in ((spool, 0.01), ({**spool, "max_wait": 0.0}, 0.0), ({}, 0.0)):
        client = AsyncPolicyClient(NOBODY, **options)
        assert client._outbox.patience == bound
    client = AsyncPolicyClient(NOBODY, **{**spool, "max_wait": 2.0})
    client.log_step(SHORT, 1, 1.0)
    assert (client.stats.spooled, client.stats.unwritten) == (3, 0)
    client.close(0.01)


def test_what_is_in_memory_is_sent_while_the_disk_hangs(
    collector: ScriptedCollector,
    tmp_path: Path,
    disk: HangingDisk,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither the handling of an answer nor `close` waits until the acknowledgement is written to
    disk."""
    client = spooling(collector.address, tmp_path, linger=0.0)
    client.log_step(SHORT, 1, 0.0)
    client.flush(60)
    gate = Gate()
    collector.faults.append(gate)
    client.log_step(SHORT, 1, 1.0)
    assert gate.reached.wait(60)
    client.log_step(SHORT, 1, 2.0)
    while client.stats.unwritten:
        client._outbox.wait_until(lambda: False, 0.01)
    disk.answers.clear()
    gate.opened.set()
    client.flush(60)
    client.log_step(SHORT, 1, 3.0)
    assert (client.stats.acknowledged, client.stats.unwritten) == (9, 3)
    client.close(0.01)
    assert [record.rewards for record in collector.episodes.values()] == [[0.0], [1.0], [2.0]]
    assert "3 events were not written" in caplog.text


def until(client: PolicyClient, holds: Callable[[], bool]) -> None:
    for _ in range(6_000):
        if holds():
            return
        client._outbox.wait_until(lambda: False, 0.01)
    raise AssertionError("it never held")


def hang(client: PolicyClient, disk: HangingDisk) -> None:
    """From here on a write does not return; everything logged before is on disk."""
    until(client, lambda: not client.stats.unwritten)
    disk.answers.clear()
    client.log_step(SHORT, 1, 1.0, episode_id="late")
    assert disk.reached.wait(60)


def test_what_is_in_memory_does_not_wait_for_what_is_on_disk_alone(
    collector: ScriptedCollector,
    tmp_path: Path,
    disk: HangingDisk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The queue is sent although a batch has room for more events, which cannot be read back."""
    monkeypatch.setattr("ingest.delivery.shared_spool.HANG_SECONDS", 0.0)
    with spooling(collector.address, tmp_path, linger=0.0, max_pending=6) as client:
        client.connect()
        client.log_step(SHORT, 1, 1.0, episode_id="first")
        client.flush(60)
        gate = Gate()
        collector.faults.append(gate)
        client.log_step(SHORT, 1, 1.0, episode_id="flying")
        assert gate.reached.wait(60)
        for name in ("memory", "disk"):
            client.log_step(SHORT, 1, 1.0, episode_id=name)
        hang(client, disk)
        assert client._outbox.spool is not None
        assert client._outbox.spool.files.unread == 3
        gate.opened.set()
        until(client, lambda: "memory" in collector.episodes)
        assert "disk" not in collector.episodes
        disk.answers.set()
        client.flush(60)
    assert list(collector.episodes) == ["first", "flying", "memory", "disk", "late"]


def test_others_do_not_wait_for_an_episode_that_is_to_go_on_in_a_new_one(
    collector: ScriptedCollector,
    tmp_path: Path,
    disk: HangingDisk,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new episode must be on disk first: until then its events are put off, whatever their
    number."""
    monkeypatch.setattr("ingest.delivery.shared_spool.HANG_SECONDS", 0.0)
    with spooling(collector.address, tmp_path, linger=0.0, batch=4) as client:
        client.connect()
        client.start_episode("closed")
        client.log_action("closed", SHORT, 0)
        client.flush(60)
        gate = Gate()
        collector.faults.append(gate)
        collector.judge = lambda event: "abandoned" if event.episode_id == "closed" else None
        client.log_step(SHORT, 1, 1.0, episode_id="flying")
        assert gate.reached.wait(60)
        for reward in range(10):
            client.log_action("closed", SHORT, 1)
            client.log_returns("closed", float(reward))
        for name in ("other", "another"):
            client.log_step(SHORT, 1, 1.0, episode_id=name)
        hang(client, disk)
        gate.opened.set()
        until(client, lambda: "another" in collector.episodes)
        assert client.stats.refused == {}
        disk.answers.set()
        client.flush(60)
        assert client.stats.refused == {}
    found = [one for one in collector.episodes.values() if one.start.continues == "closed"]
    assert [one.rewards for one in found] == [[float(reward) for reward in range(10)]]
    assert collector.episodes["late"].ended


def test_memory_is_bounded_while_the_disk_hangs(
    tmp_path: Path, disk: HangingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond `max_pending` events calls raise; every event whose call did not raise is written."""
    monkeypatch.setattr("ingest.delivery.shared_spool.FEWEST", 1)
    client = spooling(NOBODY, tmp_path, max_pending=30, max_wait=0.0, timeout=0.01)
    disk.answers.clear()
    for _ in range(10):
        client.log_step(SHORT, 1, 1.0)
    with pytest.raises(BufferFull, match=r"30 events .* waiting for the disk"):
        client.log_step(SHORT, 1, 1.0)
    assert client.stats.unwritten == 30
    disk.answers.set()
    while client.stats.unwritten:
        client._outbox.wait_until(lambda: False, 0.01)
    assert client.stats.spooled == 30
    client.log_step(SHORT, 1, 1.0)
    client.close(0.01)


def test_late_events_outlast_a_full_disk(
    collector: ScriptedCollector, tmp_path: Path, disk: HangingDisk
) -> None:
    """An event whose call has returned is retried until the disk takes it, in its place; new calls
    raise the disk's error."""
    client = spooling(collector.address, tmp_path)
    client.connect()
    name = client.start_episode()
    client.log_action(name, SHORT, 1)
    client.flush(60)
    disk.answers.clear()
    client.log_returns(name, 1.0)
    client.log_action(name, SHORT, 2)
    assert client.stats.unwritten == 2
    disk.error = errno.ENOSPC
    disk.answers.set()
    while client._outbox.spool._trouble is None:  # type: ignore[union-attr]  # it has a spool
        client._outbox.wait_until(lambda: False, 0.01)
    with pytest.raises(BufferFull, match="No space left"):
        client.log_returns(name, 2.0)
    disk.error = 0
    with client:
        client.flush(60)
        client.log_returns(name, 2.0)
        client.flush(60)
    assert collector.episodes[name].rewards == [1.0, 2.0]


def test_a_file_that_cannot_be_removed_stops_nothing(
    collector: ScriptedCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does any other error while events are marked as delivered."""
    with spooling(collector.address, tmp_path) as client:
        assert client._outbox.spool is not None
        client._outbox.spool.files._piece_bytes = 1
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", lambda *given, **options: os.open("/dev/full/none", 0))
            for n in range(10):
                client.log_step(SHORT, 1, float(n))
                client.flush(60)
            patch.setattr(type(client._outbox.spool.files), "done", lambda *given: [][0])
            client.log_step(SHORT, 1, 10.0)
            client.flush(60)
            client.log_step(SHORT, 1, 11.0)
            client.flush(60)
    assert len(collector.episodes) == 12
