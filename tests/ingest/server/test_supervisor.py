"""`collect --supervise`: real processes, real signals.

Also of `storage.system.process`.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import urllib3

from ingest.server.supervisor import BURST, PAUSE_SECONDS, WITHIN_SECONDS, Deaths
from tests.collector_process import PLAIN, READY_SECONDS, CollectorProcess, declare, shard_rows

OBSERVATION = [0.0, 0.0, 0.0, 0.0]
PROJECT = Path(__file__).parents[3]


def act(collector: CollectorProcess, episode_id: str) -> None:
    """Log one step of an episode, which is started if it does not exist."""
    collector.post("/v1/episodes", {"episode_id": episode_id})
    path = f"/v1/episodes/{episode_id}"
    logged = {"obs": OBSERVATION, "action": 1}
    assert collector.post(f"{path}/log_action", logged)[0] == 200
    assert collector.post(f"{path}/log_returns", {"reward": 1.0})[0] == 200


def ends(pid: int) -> bool:
    """Wait for the end of a process that need not be our child; False when it does not end."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(process):
        return bool(select.select([process], [], [], READY_SECONDS)[0])


def stop(pid: int) -> None:
    """Send SIGSTOP and wait until the process is stopped, which takes time on a busy machine."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        os.sched_yield()


def start_time(collector: CollectorProcess) -> str:
    """The start time of the serving process, as in /metrics."""
    lines = urllib3.request("GET", f"{collector.address}/metrics").data.decode().splitlines()
    [sample] = [line for line in lines if line.startswith("process_start_time_seconds ")]
    return sample


def test_what_is_killed_goes_on_where_it_was(tmp_path):
    """After five kills the address and the open episode are the same, and no step is lost or
    doubled.

    Each start can be recognised in /metrics.
    """
    declare(tmp_path)
    with CollectorProcess(tmp_path, supervise=True) as collector:
        address, served = collector.address, {collector.serving_pid()}
        starts = {start_time(collector)}
        for _ in range(5):
            act(collector, "one")
            collector.kill_serving()
            served.add(collector.serving_pid())
            starts.add(start_time(collector))
        path = "/v1/episodes/one/end"
        assert collector.post(path, {"obs": OBSERVATION})[0] == 200
        collector.settle(5)
        assert collector.address == address
        assert len(served) == len(starts) == 6
        assert collector.stop() == 0
    assert len(shard_rows(tmp_path)) == 5


def test_who_connects_between_two_children_waits_and_is_answered(tmp_path):
    """The supervisor owns the socket: it accepts connections while no child runs."""
    declare(tmp_path)
    with CollectorProcess(tmp_path, supervise=True) as collector:
        # stopped, so that it cannot start the next child before we have connected
        stop(collector.process.pid)
        dead = collector.serving_pid()
        os.kill(dead, signal.SIGKILL)
        assert ends(dead)
        with socket.create_connection(("127.0.0.1", collector.port), timeout=30.0) as link:
            link.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            collector.process.send_signal(signal.SIGCONT)
            assert link.recv(12) == b"HTTP/1.1 200"


def test_a_supervisor_that_is_killed_leaves_nobody_behind(tmp_path):
    """Port and root are free: the next start has both, and all acknowledged steps."""
    declare(tmp_path)
    with CollectorProcess(tmp_path, supervise=True) as collector:
        act(collector, "one")
        child = collector.serving_pid()
        collector.kill()
        assert ends(child)
        collector.restart()
        assert collector.get("/readyz")[1]["episodes_open"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_both(tmp_path, number):
    declare(tmp_path)
    with CollectorProcess(tmp_path, supervise=True) as collector:
        act(collector, "one")
        child = collector.serving_pid()
        collector.process.send_signal(number)
        assert collector.wait() == 0
        assert ends(child)


def test_a_child_that_is_asked_to_end_is_not_followed(tmp_path):
    declare(tmp_path)
    with CollectorProcess(tmp_path, supervise=True) as collector:
        os.kill(collector.serving_pid(), signal.SIGTERM)
        assert collector.wait() == 0


def started(
    root: Path, *options: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A supervised start that has to end by itself."""
    words = [sys.executable, "-m", PLAIN, "collect", "--supervise", "--root", str(root)]
    return subprocess.run(
        [*words, *options],
        cwd=PROJECT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_start_that_fails_is_the_end_and_says_why(tmp_path):
    """A start that fails is tried once: no second child repeats it."""
    wrong = started(tmp_path, "--port", "0")
    assert wrong.returncode == 2
    assert wrong.stderr.count("no policy is declared") == 1
    declare(tmp_path)
    with CollectorProcess(tmp_path) as other:
        root_taken = started(tmp_path, "--port", "0")
        port_taken = started(tmp_path, "--port", str(other.port))
        first_of_two = started(tmp_path / "other", "--port", str(other.port))
    assert (root_taken.returncode, port_taken.returncode) == (3, 3)
    assert first_of_two.returncode == 2  # no policy, and a port in use: as without a supervisor
    assert str(other.process.pid) in root_taken.stderr


def test_a_collector_that_fails_is_followed_and_the_failed_start_ends_it(tmp_path):
    """The root was moved: the child ends with 1 after it served, the next finds no policy there."""
    root, log = tmp_path / "root", tmp_path / "log"
    declare(root)
    with CollectorProcess(root, supervise=True, log=log) as collector:
        root.rename(tmp_path / "elsewhere")
        collector.post("/v1/episodes", {"episode_id": "one"})
        assert collector.wait() == 2
    assert "ended with 1; the next one starts" in log.read_text()


def test_a_later_start_that_fails_is_tried_again(tmp_path):
    """The cause may be temporary: here a policy's file that is half-written."""
    log = tmp_path / "log"
    declare(tmp_path)
    (policy,) = (tmp_path / "policies").glob("*.json")
    whole = policy.read_bytes()
    with CollectorProcess(tmp_path, supervise=True, log=log) as collector:
        act(collector, "one")
        policy.write_bytes(whole[:20])
        os.kill(collector.serving_pid(), signal.SIGKILL)
        while "ended with 2; the next one starts" not in log.read_text():
            assert collector.process.poll() is None
        policy.write_bytes(whole)
        assert collector.get("/readyz")[1]["episodes_open"] == 1
        assert collector.stop() == 0


@pytest.fixture(scope="module")
def no_fork(tmp_path_factory) -> dict[str, str]:
    """An environment in which no process can be forked while the file NO_FORK is there."""
    folder = tmp_path_factory.mktemp("no_fork")
    library, source = folder / "no_fork.so", Path(__file__).parents[1].joinpath("no_fork.c")
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return {"LD_PRELOAD": str(library), "NO_FORK": str(folder / "now")}


@pytest.fixture
def forbidden(no_fork) -> Iterator[Path]:
    """The path of that file, which does not exist yet."""
    path = Path(no_fork["NO_FORK"])
    yield path
    path.unlink(missing_ok=True)


def test_a_first_start_without_a_process_to_be_had_is_the_end(tmp_path, no_fork, forbidden):
    declare(tmp_path)
    forbidden.touch()
    ended = started(tmp_path, "--port", "0", env=no_fork)
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert line.endswith(f"no process can be started: [Errno 11] {os.strerror(errno.EAGAIN)}")


def test_a_later_start_waits_for_a_process_to_be_had(tmp_path, no_fork, forbidden):
    """Clients that connect meanwhile wait; nothing that was acknowledged is lost."""
    log = tmp_path / "log"
    declare(tmp_path)
    with CollectorProcess(tmp_path, supervise=True, log=log, env=no_fork) as collector:
        act(collector, "one")
        forbidden.touch()
        os.kill(collector.serving_pid(), signal.SIGKILL)
        while "no process can be started" not in log.read_text():
            assert collector.process.poll() is None
        forbidden.unlink()
        assert collector.get("/readyz")[1]["episodes_open"] == 1
        assert collector.stop() == 0
    assert "process -1" not in log.read_text()


def test_nobody_needs_to_read_what_it_says(tmp_path):
    """A start script that reads the first line and exits ends no later child."""
    declare(tmp_path)
    with CollectorProcess(tmp_path, supervise=True) as collector:
        assert collector.process.stdout is not None
        collector.process.stdout.close()
        for _ in range(2):
            os.kill(collector.serving_pid(), signal.SIGKILL)
            asked = collector.request("GET", "/healthz", None, {"connection": "close"})
            assert asked[0] == 200
        assert collector.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_next_child_starts_ends_both(tmp_path, number):
    log = tmp_path / "log"
    declare(tmp_path)
    with CollectorProcess(tmp_path, supervise=True, log=log) as collector:
        dead = collector.serving_pid()
        os.kill(dead, signal.SIGKILL)
        while collector.serving_pid() in (0, dead):
            os.sched_yield()
        collector.process.send_signal(number)
        assert collector.wait() == 0
    assert "Traceback" not in log.read_text()


def test_a_stop_that_finds_a_killed_child_says_so(tmp_path):
    """A killed child was not drained, so the status is not 0; the next start has all of its
    steps."""
    log = tmp_path / "log"
    declare(tmp_path)
    with CollectorProcess(tmp_path, supervise=True, log=log) as collector:
        child = collector.serving_pid()
        stop(collector.process.pid)
        os.kill(child, signal.SIGKILL)
        assert ends(child)
        collector.process.send_signal(signal.SIGTERM)
        collector.process.send_signal(signal.SIGCONT)
        assert collector.wait() == 1
    assert f"(process {child}) was killed by signal 9" in log.read_text()


def next_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of the process's output, if there is one soon."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], READY_SECONDS)[0]
    document: dict[str, Any] = json.loads(process.stdout.readline())
    return document


IGNORE = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
IGNORING = [sys.executable, "-c", IGNORE + "os.execv(sys.argv[1], sys.argv[1:])"]
"""Runs a command whose children's ends are not told, unless it asks for it."""


@pytest.mark.parametrize("first", [[], IGNORING])
def test_it_is_the_same_for_the_front_door(tmp_path, first):
    """`headrace collect --supervise --json` names the serving process each time."""
    declare(tmp_path)
    words = ["collect", "--supervise", "--root", str(tmp_path), "--port", "0", "--json"]
    with subprocess.Popen(
        [*first, sys.executable, "-m", "headrace", *words],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            one = next_line(process)
            os.kill(one["pid"], signal.SIGKILL)
            other = next_line(process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(READY_SECONDS) == 0
        finally:
            process.kill()
    assert one["pid"] != other["pid"] != process.pid
    assert {**one, "pid": 0} == {**other, "pid": 0}


def test_deaths_one_after_the_other_are_followed_by_a_pause():
    deaths = Deaths()
    apart = WITHIN_SECONDS / BURST
    assert not any(deaths.pause(number * 0.9 * apart) for number in range(BURST - 1))
    assert deaths.pause((BURST - 1) * 0.9 * apart) == PAUSE_SECONDS
    slow = Deaths()
    assert not any(slow.pause(number * 1.1 * apart) for number in range(3 * BURST))
