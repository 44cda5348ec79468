"""A spool whose files are removed, moved or replaced under the running process.

The tests use PolicyClient and processes alone, so that they hold for any form of the files.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ingest.client.policy_client import PolicyClient
from tests.collector_process import CollectorProcess, declare, shard_rows

ROOT = Path(__file__).parents[3]
OBS = [0.0, 0.5, 1.0, -0.5]
NOBODY = "http://127.0.0.1:9"
PATIENCE = 60.0
LOGGING = """
import sys
from ingest.client.policy_client import PolicyClient
from ingest.protocol.errors import BufferFull
address, root, more = sys.argv[1:]
client = PolicyClient(
    address,
    on_full="spool",
    spool_dir=f"{root}/volume/spool",
    policy_file=f"{root}/policies/default.json",
    max_wait=20.0,
    **eval(more),
)
obs, number = [0.0, 0.5, 1.0, -0.5], 0
for words in sys.stdin:
    count, *begins = words.split()
    try:
        if begins == ["begin"]:
            episode = client.start_episode("long")
            client.log_action(episode, obs, 1)
            client.flush(60)
        for _ in range(int(count)):
            if begins == ["continue"]:
                client.log_action(episode, obs, 1)
                continue
            client.log_step(obs, 1, 1.0 + number)
            number += 1
    except BufferFull as error:
        print("full", flush=True)
    else:
        print(client.stats.unwritten, client.stats.refused.get("unreadable", 0), flush=True)
"""


class Logging:
    """A process that logs as many steps as it is told; by default the collector is away."""

    def __init__(self, root: Path, address: str = NOBODY, **options: Any) -> None:
        self.log = root / "log"
        command = [sys.executable, "-c", LOGGING, address, str(root), repr(options)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def steps(self, count: int, how: str = "") -> str:
        """Log episodes of one step, or with `how` a long one's; return (unwritten events,
        unreadable events), or "full"."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(count, how, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def logging(root: Path, **options: Any) -> Iterator[Logging]:
    declare(root, seal_seconds=0.05)
    process = Logging(root, **options)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def until(true: Callable[[], Any]) -> None:
    pause = threading.Event()
    for _ in range(6_000):
        if true():
            return
        pause.wait(0.01)
    raise AssertionError("it never became true")


def delivered(root: Path) -> list[float]:
    """The rewards that the next process delivers."""
    with CollectorProcess(root) as collector:
        spool = root / "volume/spool"
        with PolicyClient(collector.address, on_full="spool", spool_dir=spool) as client:
            client.flush(PATIENCE)
        assert collector.stop() == 0
    return sorted(row["rewards"] for row in shard_rows(root))


def remove_all(spool: Path) -> None:
    shutil.rmtree(spool.parent)


def remove_content(spool: Path) -> None:
    for one in spool.iterdir():
        shutil.rmtree(one) if one.is_dir() else one.unlink()


def remove_files(spool: Path) -> None:
    for one in spool.rglob("*"):
        if one.is_file():
            one.unlink()


def move(spool: Path) -> None:
    spool.rename(spool.with_name("moved"))


def copy(spool: Path) -> None:
    """The same content in other files, as of a restored backup, without what is written later."""
    shutil.copytree(spool, spool.with_name("copy"))
    shutil.rmtree(spool)
    spool.with_name("copy").rename(spool)


HOW = [remove_all, remove_content, remove_files, move, copy]


@pytest.mark.parametrize("how", HOW)
def test_calls_after_a_removal_are_on_disk(tmp_path: Path, how: Callable[[Path], None]) -> None:
    """What was logged before and after the files went away survives SIGKILL, once each."""
    with logging(tmp_path) as process:
        assert process.steps(20) == "0 0"
        how(tmp_path / "volume/spool")
        assert process.steps(50) == "0 0"
        process.kill()
        assert "removed, moved or replaced while it was in use" in process.log.read_text()
    assert delivered(tmp_path) == [1.0 + number for number in range(70)]


@pytest.mark.parametrize("replaced", [False, True])
def test_no_single_file_is_missed_in_silence(tmp_path: Path, replaced: bool) -> None:
    """Whichever file is removed, or replaced by a copy of it, nothing is lost."""
    place, count = 0, 1
    while place < count:
        root = tmp_path / str(place)
        with logging(root) as process:
            assert process.steps(20) == "0 0"
            files = sorted(path for path in root.glob("volume/**/*") if path.is_file())
            content, count = files[place].read_bytes(), len(files)
            files[place].unlink()
            if replaced:
                files[place].write_bytes(content)
            assert process.steps(50) == "0 0"
            process.kill()
        assert delivered(root) == [1.0 + number for number in range(70)], files[place]
        place += 1
    assert place > 1


def test_a_removal_changes_no_clients_instance(tmp_path: Path) -> None:
    """Steps of an episode that the collector has, and that are in new files only, are sent as the
    same client's: none is refused."""
    declare(tmp_path)
    spool = tmp_path / "volume/spool"
    with CollectorProcess(tmp_path) as collector:
        process = Logging(tmp_path, address=collector.address)
        try:
            assert process.steps(0, "begin") == "0 0"
            os.kill(collector.serving_pid(), signal.SIGSTOP)
            assert process.steps(5, "continue") == "0 0"
            remove_all(spool)
            assert process.steps(5, "continue") == "0 0"
        finally:
            process.kill()
            os.kill(collector.serving_pid(), signal.SIGCONT)
        with PolicyClient(collector.address, on_full="spool", spool_dir=spool) as client:
            client.flush(PATIENCE)
            assert (client.stats.acknowledged, client.stats.refused) == (10, {})


@pytest.mark.parametrize("how", [remove_all, move])
def test_a_process_that_logs_no_more_notices_a_removal(
    tmp_path: Path, how: Callable[[Path], None]
) -> None:
    """What is in memory is on disk again, without another call."""
    with logging(tmp_path) as process:
        assert process.steps(20) == "0 0"
        how(tmp_path / "volume/spool")
        until(lambda: "wrote 60 events again" in process.log.read_text())
        process.kill()
    assert delivered(tmp_path) == [1.0 + number for number in range(20)]


def test_what_cannot_be_written_again_counts_as_unwritten(tmp_path: Path) -> None:
    """While no files can be made, calls raise BufferFull and `unwritten` counts what is in memory;
    afterwards all of it is on disk."""
    with logging(tmp_path) as process:
        assert process.steps(20) == "0 0"
        remove_all(tmp_path / "volume/spool")
        (tmp_path / "volume").touch()
        assert process.steps(1) == "full"
        assert process.steps(0) == "60 0"
        (tmp_path / "volume").unlink()
        assert process.steps(5) == "0 0"
        process.kill()
    assert delivered(tmp_path) == [1.0 + number for number in range(25)]


def test_what_was_only_in_removed_files_is_counted(tmp_path: Path) -> None:
    """Events that did not fit in memory are lost with their files, and counted as unreadable."""
    with logging(tmp_path, max_pending=30) as process:
        assert process.steps(20) == "0 0"
        remove_all(tmp_path / "volume/spool")
        assert process.steps(5) == "0 30"
        process.kill()
    assert delivered(tmp_path) == [*(1.0 + n for n in range(10)), *(21.0 + n for n in range(5))]


def test_a_spool_that_was_removed_is_still_delivered(tmp_path: Path) -> None:
    """The running process sends what it has in memory, and removes its new files."""
    declare(tmp_path)
    spool = tmp_path / "volume/spool"
    with CollectorProcess(tmp_path) as collector:
        os.kill(collector.serving_pid(), signal.SIGSTOP)
        with PolicyClient(
            collector.address,
            on_full="spool",
            spool_dir=spool,
            max_wait=20.0,
            policy_file=tmp_path / "policies/default.json",
        ) as client:
            for number in range(20):
                client.log_step(OBS, 1, 1.0 + number)
                if number == 10:
                    remove_all(spool)
            os.kill(collector.serving_pid(), signal.SIGCONT)
            client.flush(PATIENCE)
            assert client.stats.acknowledged == 60
        assert not [one for one in spool.iterdir() if one.name != "lock"]
        assert collector.stop() == 0
    assert sorted(row["rewards"] for row in shard_rows(tmp_path)) == [1.0 + n for n in range(20)]


def pieces(spool: Path) -> list[Path]:
    """The files of a killed process, in the order in which they were written."""
    return sorted(spool.glob("segment-*/0*"))


SMALL = {"spool_bytes": 80_000}  # files of 10 kB


def test_a_first_file_that_is_missing_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The events in it are counted as unreadable; the rest is delivered."""
    with logging(tmp_path, **SMALL) as process:
        assert process.steps(100) == "0 0"
        process.kill()
    spool = tmp_path / "volume/spool"
    first, *others = pieces(spool)
    assert len(others) > 1
    first.unlink()
    with (
        CollectorProcess(tmp_path) as collector,
        PolicyClient(collector.address, on_full="spool", spool_dir=spool) as client,
    ):
        client.flush(PATIENCE)
        refused = dict(client.stats.refused)
        lost = refused.pop("unreadable")
        assert lost > 60
        assert client.stats.acknowledged == 300 - lost - sum(refused.values()) > 150
        assert sum(refused.values()) < 3  # of the episode that was cut
        assert f"{lost} events cannot be read: their files are missing" in caplog.text


def test_files_that_were_removed_because_all_arrived_are_not_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process delivers what its first files hold, logs more while the collector is away, and is
    killed. Its successor, too, is killed before it delivers that."""
    declare(tmp_path, seal_seconds=0.05)
    spool = tmp_path / "volume/spool"
    with CollectorProcess(tmp_path) as collector:
        for _ in range(2):
            process = Logging(tmp_path, address=collector.address, **SMALL)
            try:
                assert process.steps(100) == "0 0"
                until(lambda: all(int(one.name) for one in pieces(spool)))
                os.kill(collector.serving_pid(), signal.SIGSTOP)
                assert process.steps(20) == "0 0"
            finally:
                process.kill()
                os.kill(collector.serving_pid(), signal.SIGCONT)
        with PolicyClient(collector.address, on_full="spool", spool_dir=spool) as client:
            client.flush(PATIENCE)
            assert not client.stats.refused
        assert "missing" not in caplog.text
        assert collector.stop() == 0
    rewards = [*range(120), *range(120)]
    assert sorted(row["rewards"] for row in shard_rows(tmp_path)) == sorted(
        1.0 + n for n in rewards
    )
