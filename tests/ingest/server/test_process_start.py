"""The exit status of a collector that fails to start says whether another start may succeed."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingest.access.key_files import create_token
from ingest.collector import stores
from ingest.collector.stores import stores_under
from policy.inference.spec import ModuleSpec, PolicySpec
from storage.errors import JournalLocked
from storage.spaces.descriptors import Box, Discrete
from storage.system.files import FileLock
from tests.collector_process import PLAIN, CollectorProcess, declare
from tests.collector_template import Forked, template
from tests.headrace.command import ROOT, headrace, refused

STOP_SECONDS = 60.0
FEW = 15
"""A limit of open files with which Python starts and a collector does not."""
SPEC = PolicySpec(Box((4,)), Discrete(2), ModuleSpec(hidden=(8,))).to_json()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    declare(tmp_path)
    return tmp_path


def collect(
    root: Path, program: str, *options: str, descriptors: int | None = None
) -> tuple[int, str]:
    """(status, stderr) of a collector that does not start."""

    def few() -> None:
        if descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    words = ["collect", "--root", str(root), "--port", "0", *options]
    if program == PLAIN and descriptors is None:
        with tempfile.TemporaryFile("w+") as file:
            process = template().fork(words, file.fileno())
            status = process.wait(60)
            process.stdout.close()
            file.seek(0)
            stderr = file.read()
    else:
        done = subprocess.run(
            [sys.executable, "-m", program, *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            preexec_fn=few,
            timeout=60,
        )
        status, stderr = done.returncode, done.stderr
    assert "Traceback" not in stderr
    return status, stderr


@contextlib.contextmanager
def starting(root: Path) -> Iterator[subprocess.Popen[str]]:
    """A collector that may fail or wait before it serves; killed when the block ends."""
    command = [sys.executable, "-m", "headrace", "collect", "--root", str(root), "--port", "0"]
    with subprocess.Popen(
        [*command, "--json"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_process_that_just_ended_takes_a_signal() -> None:
    """A signal to a `Forked` process that has ended is ignored, as with `Popen`, even before its
    status was read."""
    with subprocess.Popen(["true"], stdout=subprocess.PIPE, text=True) as gone:
        gone.wait()
        ended, write_end = os.pipe()
        assert gone.stdout is not None
        process = Forked(gone.pid, gone.stdout, ended)
        process.send_signal(0)
        os.write(write_end, b"0")
        os.close(write_end)
        assert process.wait() == 0


def test_trouble_of_disk_or_system_is_status_1(root: Path) -> None:
    """An error of the disk or the system may be over at the next start, so it is not wrong
    usage."""
    lock = root / "journal" / "lock"
    lock.mkdir(parents=True)
    status, stderr = collect(root, "headrace")
    assert (status, "Is a directory" in stderr) == (1, True)
    lock.rmdir()
    status, stderr = collect(root, "headrace", descriptors=FEW)
    assert (status, "Too many open files" in stderr) == (1, True)


def test_wrong_usage_is_status_2(tmp_path: Path) -> None:
    """Without a declared policy each further start would fail in the same way."""
    status, stderr = collect(tmp_path, "headrace")
    assert (status, "no policy is declared" in stderr) == (2, True)


@pytest.mark.parametrize("host", ["203.0.113.7", "collector.example.invalid"])
def test_an_address_that_is_not_there_yet_is_status_1(root: Path, host: str) -> None:
    """While a machine boots, its address or name may come later than the service: the next start
    may succeed."""
    create_token(root, "web", ["log"])
    status, stderr = collect(root, "headrace", "--host", host, "--insecure-no-tls")
    assert (status, host in stderr) == (1, True)


@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_what_is_no_name_at_all_is_status_2(root: Path, host: str) -> None:
    """A string that cannot be a host name makes each further start fail, too."""
    status, stderr = collect(root, PLAIN, "--host", host)
    assert (status, "expected a name" in stderr) == (2, True)


@pytest.mark.parametrize("name", ["", "policies", "keys", "journal", "shards"])
def test_a_file_in_the_place_of_a_folder_is_status_2(tmp_path: Path, name: str) -> None:
    """Each further start fails, too, until somebody removes the file."""
    root = tmp_path / "root"
    if name:
        root.mkdir()
    if name not in ("", "policies"):
        declare(root)
    place = root / name
    place.write_text("")
    status, stderr = collect(root, PLAIN)
    assert (status, f"{place}: expected a folder" in stderr) == (2, True)


def test_a_link_to_a_volume_that_is_away_is_status_1(root: Path, tmp_path: Path) -> None:
    """The volume may be mounted later, and then a start succeeds."""
    (root / "shards").symlink_to(tmp_path / "away")
    assert collect(root, PLAIN)[0] == 1


def test_a_file_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    """A file given by `--policy` that does not exist is named in the error."""
    result = headrace("collect", "--root", tmp_path, "--policy", tmp_path / "none.json")
    assert refused(result, "none.json")


def test_a_root_that_is_taken_is_status_3(root: Path) -> None:
    """The second collector on a root ends at once, with the process id and address of the first."""
    with CollectorProcess(root) as first:
        status, stderr = collect(root, "headrace")
        assert status == 3
        assert f"process {first.process.pid}" in stderr
        assert f"serves {first.address}" in stderr
        assert "waits" not in stderr
        port = first.address.rpartition(":")[2]
        result = headrace("collect", "--root", root, "--port", port)
        assert refused(result, f"already serves {first.address}", status=3)


def test_a_folder_in_the_place_of_the_address_stops_no_start(root: Path, tmp_path: Path) -> None:
    """The log says that the address file cannot be written, and the collector serves all the
    same."""
    (root / "journal" / "address" / "inside").mkdir(parents=True)
    log = tmp_path / "log"
    with CollectorProcess(root, log=log) as collector:
        assert collector.get("/healthz")[0] == 200
        assert collector.stop() == 0
    assert "this collector's address cannot be written" in log.read_text()


def test_a_port_that_is_taken_is_status_3(root: Path) -> None:
    """A taken port may be free later, so its status is not that of wrong usage."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = headrace("collect", "--root", root, "--port", other.getsockname()[1])
    assert refused(result, "cannot bind", "another port", status=3)


def test_a_start_waits_for_those_who_look(root: Path) -> None:
    """`verify` and `ls` lock a journal while they copy it: a start waits for them, and then
    serves."""
    CollectorProcess(root).stop()
    looking = FileLock(root / "journal" / "lock")
    assert looking.acquire(shared=True)
    with starting(root) as start:
        assert start.stdout is not None
        assert start.stderr is not None
        line = start.stderr.readline()
        assert "startup is waiting: the journal in" in line
        assert "is being read by another process" in line
        looking.release()
        assert '"address"' in start.stdout.readline()
        start.send_signal(signal.SIGTERM)
        assert start.wait(STOP_SECONDS) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_start_that_waits_hears_a_signal(root: Path, number: signal.Signals) -> None:
    """SIGTERM or SIGINT ends a waiting start with status 0, as it does a collector that serves."""
    CollectorProcess(root).stop()
    looking = FileLock(root / "journal" / "lock")
    assert looking.acquire(shared=True)
    with starting(root) as start:
        assert start.stderr is not None
        assert "startup is waiting" in start.stderr.readline()
        start.send_signal(number)
        assert start.wait(STOP_SECONDS) == 0
        assert start.stderr.read() == ""
    looking.release()
    CollectorProcess(root).stop()


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"network": 5}, "spec: policy spec: expected the keys"),
        (SPEC | {"action_rule": {"kind": "x"}}, "spec: action_rule: "),
        (SPEC | {"module": SPEC["module"] | {"hidden": "wide"}}, "spec: module"),
    ],
)
def test_a_spec_that_nothing_can_act_by_is_refused(
    root: Path, spec: dict[str, Any], text: str
) -> None:
    """The start fails, and the error names the policy's file and the part of the spec."""
    file = root / "policies" / "default.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"spec": spec}))
    result = headrace("collect", "--root", root, "--port", 0)
    assert refused(result, f"default.json: {text}")


def test_a_pipe_in_the_place_of_a_policy_is_refused(root: Path) -> None:
    """A named pipe without a writer would block a plain read for ever: the start refuses it."""
    os.mkfifo(root / "policies" / "pipe.json")
    result = headrace("collect", "--root", root, "--port", 0)
    assert refused(result, "pipe.json: expected a regular file")


def test_a_start_does_not_wait_for_ever(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start raises JournalLocked when another process reads the journal for over LOCK_SECONDS."""
    monkeypatch.setattr(stores, "LOCK_SECONDS", 0.1)
    stores_under(root).journal.close()
    looking = FileLock(root / "journal" / "lock")
    assert looking.acquire(shared=True)
    with pytest.raises(JournalLocked, match="is being read by another process"):
        stores_under(root)
    looking.release()
    stores_under(root).journal.close()
