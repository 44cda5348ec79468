"""Forked children of a process with a client (`storage.system.forks`): Python's and libc's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ingest.client.policy_client import PolicyClient
from tests.collector_process import CollectorProcess, declare, shard_rows

ROOT = Path(__file__).parents[3]
NOBODY = "http://127.0.0.1:9"
PATIENCE = 60.0
HEAD = """
import os, sys
from headrace import PolicyClient, Refusal
OBS = [0.0] * 4
address, root = sys.argv[1:]
SPOOL = {"on_full": "spool", "spool_dir": f"{root}/spool", "max_wait": 20.0}
SPOOL["policy_file"] = f"{root}/policies/default.json"
"""


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[CollectorProcess]:
    declare(tmp_path / "root")
    with CollectorProcess(tmp_path / "root") as running:
        yield running


@contextmanager
def program(body: str, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A user's program, which is killed at the end. Its children are to end with its stdin."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + textwrap.dedent(body), *map(str, words)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def stored(collector: CollectorProcess) -> Counter[str]:
    """Count each episode's occurrences in the shards."""
    assert collector.stop() == 0
    return Counter(row["eps_id"] for row in shard_rows(collector.root))


WAITING = """
from tests.ingest.bare_fork import bare_fork
client = PolicyClient(address, timeout=60.0)
client.log_step(OBS, 1, 1.0, episode_id="parent")  # its thread waits for an answer
if bare_fork() == 0:
    print("forked", flush=True)
    os.read(0, 1)
    CALL
    client.log_step(OBS, 1, 1.0, episode_id="child")
    client.flush(60)
    print("delivered", flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("call", ["client.connect()", "client.update_policy_weights()"])
def test_a_child_connects_although_its_parent_has_not(tmp_path: Path, call: str) -> None:
    """A fork without hooks while the parent waits for the collector's first answer: the child asks
    for itself."""
    root = tmp_path / "root"
    declare(root)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        body = WAITING.replace("CALL", call)
        with program(body, f"http://127.0.0.1:{port}", root) as parent:
            assert line(parent) == "forked\n"
            silent.close()
            with CollectorProcess(root, port=port) as collector:
                assert parent.stdin is not None
                print(file=parent.stdin, flush=True)
                assert line(parent) == "delivered\n"
                assert stored(collector)["child"] == 1


LOG = """
client = PolicyClient(address, **SPOOL)
for number in range(300):
    client.log_step(OBS, 1, 1.0, episode_id=f"{os.getpid()}-{number}")
print(os.getpid(), flush=True)
os.read(0, 1)
"""

CALLS = """
from storage.system import forks
from tests.ingest.bare_fork import bare_fork

def refused(call, *given):
    try:
        call("parent", *given)
    except Refusal as error:
        assert str(error).startswith("Episode parent not found."), error
    else:
        raise AssertionError(f"{call} knows the parent's episode")

def start():
    name = client.start_episode()
    client.log_action(name, OBS, 1)
    client.end_episode(name)

FIRST = {
    "start_episode": start,
    "log_step": lambda: client.log_step(OBS, 1, 1.0),
    "log_action": lambda: refused(client.log_action, OBS, 1),
    "log_returns": lambda: refused(client.log_returns, 1.0),
    "end_episode": lambda: refused(client.end_episode),
    "get_action": lambda: refused(client.get_action, OBS),
    "acting_version": lambda: refused(lambda name: client.acting_version(episode_id=name)),
    "update_policy_weights": lambda: client.update_policy_weights(),
    "connect": lambda: client.connect(10),
    "flush": lambda: client.flush(10),
    "stats": lambda: client.stats.waiting == 0 or 1 / 0,
    "close": lambda: client.close(10),
    "exit": lambda: sys.exit(0),
}
if OPTION:
    forks._page = None  # as on a system that wipes no memory
client = PolicyClient(address, linger=60.0, **(SPOOL if OPTION else {}))
client.start_episode("parent")
client.log_action("parent", OBS, 1)
client.flush()
client.log_action("parent", OBS, 0)  # it is in the queue when the process forks
children = {}
for name, call in FIRST.items():
    child = bare_fork()
    if child:
        children[name] = child
        continue
    try:
        call()
        if name != "close":
            client.log_step(OBS, 1, 1.0, episode_id=name)
            client.flush(60)
            assert client.stats.waiting == 0
    except Exception as error:
        print(name, repr(error), flush=True)
        os._exit(1)
    os._exit(0)
for name, child in children.items():
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        print(name, status, flush=True)
client.end_episode("parent")
client.close(60)
print("over", flush=True)
"""


@pytest.mark.parametrize("spools", [False, True])
def test_each_call_notices_a_fork_without_hooks(collector: CollectorProcess, spools: bool) -> None:
    """uWSGI forks like that. Whatever a child calls first, it has an empty client of its own: the
    parent's queue and episodes stay with the parent, and each event of both is stored once."""
    with program(CALLS.replace("OPTION", str(spools)), collector.address, collector.root) as parent:
        assert line(parent) == "over\n"
    found = stored(collector)
    assert found.pop("parent") == 2
    own = "log_step log_action log_returns end_episode get_action acting_version"
    own += " update_policy_weights connect flush stats start_episode"
    assert {name: found.pop(name, 0) for name in own.split()} == dict.fromkeys(own.split(), 1)
    assert sum(found.values()) == 2  # the first calls of two children are steps


FORK = """
client = PolicyClient(address, **SPOOL)
started, starts = os.pipe()
client.log_step(OBS, 1, 1.0, episode_id="parent")
for number in range(20):
    if os.fork() == 0:
        os.write(starts, b"x")
        os.read(0, 1)  # it lives until the test ends
        os._exit(0)
for number in range(20):
    os.read(started, 1)
print("forked", flush=True)
os.read(0, 1)
"""


def test_a_child_does_not_keep_what_its_parent_took_up(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    """Children are forked while their parent takes up the segments of killed processes. After the
    parent's death the next process delivers these, although the children live."""
    root, names = tmp_path / "root", ["parent"]
    for _ in range(2):
        with program(LOG, NOBODY, root) as killed:
            pid = int(line(killed))
            names += [f"{pid}-{number}" for number in range(300)]
    with program(FORK, NOBODY, root) as parent:
        assert line(parent) == "forked\n"
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        options = {"on_full": "spool", "spool_dir": root / "spool"}
        with PolicyClient(collector.address, **options) as client:
            client.flush(PATIENCE)
    assert stored(collector) == Counter(names)
    assert [one.name for one in (root / "spool").iterdir()] == ["lock"]
