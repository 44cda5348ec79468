"""Forked children of a process with a client: those that Python knows of, and those of libc."""

from __future__ import annotations

import os
import signal
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
import ctypes, os, sys
from headrace import AsyncPolicyClient, PolicyClient, Refusal
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


LOG = """
client = PolicyClient(address, **SPOOL)
for number in range(300):
    client.log_step(OBS, 1, 1.0, episode_id=f"{os.getpid()}-{number}")
print(os.getpid(), flush=True)
os.read(0, 1)
"""

FORK = """
client = PolicyClient(address, **SPOOL)
client.log_step(OBS, 1, 1.0, episode_id="parent")
for number in range(20):
    if FORK() == 0:
        CALL
        os.read(0, 1)  # it lives until the test ends
        os._exit(0)
print("forked", flush=True)
os.read(0, 1)
"""


@pytest.mark.parametrize(
    ("fork", "call"),
    [("os.fork", "pass"), ("ctypes.PyDLL(None).fork", "client.stats; print('called', flush=True)")],
)
def test_a_child_does_not_keep_what_its_parent_took_up(
    collector: CollectorProcess, tmp_path: Path, fork: str, call: str
) -> None:
    """Children are forked while their parent takes up the segments of killed processes. After the
    parent's death the next process delivers these, although the children live."""
    root, names = tmp_path / "root", ["parent"]
    spool = root / "spool"
    for _ in range(3):
        with program(LOG, NOBODY, root) as killed:
            pid = int(line(killed))
            names += [f"{pid}-{number}" for number in range(300)]
    body = FORK.replace("FORK()", f"{fork}()").replace("CALL", call)
    with program(body, NOBODY, root) as parent:
        lines = [line(parent).strip() for _ in range(1 if call == "pass" else 21)]
        assert "forked" in lines
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        with PolicyClient(collector.address, on_full="spool", spool_dir=spool) as client:
            client.flush(PATIENCE)
    assert stored(collector) == Counter(names)
    assert [one.name for one in spool.iterdir()] == ["lock"]
