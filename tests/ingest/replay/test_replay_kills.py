"""SIGKILL of the collector, its writer and the client in the middle of replaying the real log."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq

from tests.collector_process import CollectorProcess, declare, shard_rows

ROOT = Path(__file__).parents[3]
LOG = ROOT / "data/open_bandit/random_all.parquet"
KILLS, ROWS, APART = 20, 10_000, 300


def replay(address: str) -> subprocess.Popen[bytes]:
    words = ["replay", str(LOG), "--address", address, "--observation", "position"]
    words += ["--action", "item_id", "--reward", "click", "--action-prob", "propensity_score"]
    command = [sys.executable, "-m", "headrace", *words, "--time", "timestamp_us", "--json"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_twenty_kills_within_a_replay_lose_and_double_nothing(tmp_path: Path) -> None:
    """Each kill comes after more of the log has arrived; at the end every row is there once."""
    declare(tmp_path, observation="box:1", action="discrete:80")
    chance = random.Random(7)
    with CollectorProcess(tmp_path) as collector:
        client = replay(collector.address)
        try:
            for number in range(KILLS):
                while collector.get("/readyz")[1]["steps"] < (number + 1) * APART:
                    if client.poll() is not None:
                        client = replay(collector.address)
                victim = chance.choice(("collector", "writer", "client"))
                writer = collector.writer_pid()
                if victim == "collector":
                    collector.kill()
                    collector.restart()
                elif victim == "writer" and writer is not None:
                    os.kill(writer, signal.SIGKILL)
                else:
                    client.kill()
                    client.wait()
            assert collector.get("/readyz")[1]["steps"] < ROWS
            client.kill()
            client.wait()
            client = replay(collector.address)
            assert client.wait(60) == 0
        finally:
            client.kill()
            client.wait()
        assert collector.stop() == 0
    rows = shard_rows(tmp_path)
    log = pq.read_table(LOG)
    assert sorted(row["ts"] for row in rows) == sorted(log["timestamp_us"].to_pylist())
    assert len({row["eps_id"] for row in rows}) == len(rows) == ROWS
    assert sum(row["rewards"] for row in rows) == sum(log["click"].to_pylist())
