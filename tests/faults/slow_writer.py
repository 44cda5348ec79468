"""A stopped shard writer: clients get 429 before memory grows.

A client sends wide steps as fast as it can. It must get 429 with Retry-After before the collector's
memory has grown by 64 MB. Once the writer continues, everything acknowledged reaches the shards.
"""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import urllib3

from tests.collector_process import CollectorProcess, declare
from tests.faults.account import Account
from tests.faults.power_loss import wait_until
from tests.faults.scenario import Scenario, Trial, Verdict

LIMIT_BYTES = 64_000_000
WIDTH, STEPS = 1_000, 25  # floats of an observation; steps of a request, an episode each
PATIENCE = 40.0


class Flood:
    """One client that sends whole episodes, and notes what was acknowledged."""

    def __init__(self, collector: CollectorProcess, notes: Path, chance: random.Random) -> None:
        self._pool = urllib3.PoolManager(retries=False, timeout=20.0)
        self._address, self._notes = collector.address, notes
        self._obs = np.frombuffer(chance.randbytes(4 * WIDTH), "u1").astype("f4")[:WIDTH].tobytes()
        self._number = 0
        status, answer = self._post("/v1/instances", {})[:2]
        self._instance: str = answer["instance"]
        if status != 201:
            raise RuntimeError(f"expected 201, got {status}: {answer}")

    def _post(self, path: str, body: Any) -> tuple[int, Any, str | None]:
        answer = self._pool.request(
            "POST",
            self._address + path,
            body=msgspec.msgpack.encode(body),
            headers={"content-type": "application/msgpack"},
        )
        kind = answer.headers.get("content-type", "")
        decode = msgspec.json.decode if "json" in kind else msgspec.msgpack.decode
        return answer.status, decode(answer.data), answer.headers.get("retry-after")

    def send(self) -> tuple[int, str | None]:
        """One episode; (status, Retry-After)."""
        name, rewards = f"e{self._number}", [self._number * STEPS + n + 1.0 for n in range(STEPS)]
        obs = {"dtype": "float32", "shape": [WIDTH], "data": self._obs}
        steps = [
            {"type": "log_action", "episode_id": name, "seq": n + 1, "obs": obs, "action": 1,
             "reward": reward}
            for n, reward in enumerate(rewards)
        ]  # fmt: skip
        start = {"type": "start", "episode_id": name, "start": self._number}
        end = {"type": "end", "episode_id": name, "seq": STEPS + 1}
        body = {"instance": self._instance, "events": [start, *steps, end]}
        status, answer, retry = self._post("/v1/events", body)
        self._note("sent", rewards)
        if status == 200:
            if answer.get("refused"):
                raise RuntimeError(f"refused: {answer['refused'][0]}")
            self._number += 1
            self._note("acknowledged", rewards)
        return status, retry

    def _note(self, what: str, items: list[float]) -> None:
        with self._notes.open("a") as file:
            file.write(json.dumps({what: items}) + "\n")


def resident(pid: int) -> int:
    """Resident memory of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no memory")


def run(trial: Trial) -> Verdict:
    verdict, chance = Verdict(), random.Random(trial.seed)
    root, notes = trial.folder / "root", trial.folder / "notes"
    declare(root, f"box:{WIDTH}", "discrete:2", seal_seconds=5.0)
    with CollectorProcess(root, program=trial.program) as collector:
        flood = Flood(collector, notes, chance)
        for _ in range(50):  # warm up buffers and caches, start the writer
            flood.send()
        wait_until(lambda: collector.get("/readyz")[1]["bytes_waiting"] == 0, PATIENCE)
        for _ in range(trial.size):
            if not trial.in_time:
                break
            _stall(collector, flood, verdict)
            verdict.count("stalls")
        wait_until(lambda: collector.get("/readyz")[1]["episodes_open"] == 0, PATIENCE)
        status = collector.stop()
        verdict.require(status == 0, "drain", f"expected exit status 0, got {status}")
    Account.of(root, [notes]).judge(verdict)
    return verdict


def _stall(collector: CollectorProcess, flood: Flood, verdict: Verdict) -> None:
    """Stop the writer until the client gets 429; then let it continue."""
    writer = collector.writer_pid()
    if writer is None:
        raise RuntimeError("the collector has no shard writer")
    before = grown = resident(collector.process.pid)
    os.kill(writer, signal.SIGSTOP)
    try:
        while True:
            status, retry = flood.send()
            grown = max(grown, resident(collector.process.pid))
            if status != 200 or grown - before > 2 * LIMIT_BYTES:
                break
            verdict.count("requests")
    finally:
        os.kill(writer, signal.SIGCONT)
    growth = grown - before
    verdict.counts["growth_mb"] = max(verdict.counts.get("growth_mb", 0.0), growth / 1e6)
    verdict.require(growth <= LIMIT_BYTES, "grew", f"by {growth / 1e6:.1f} MB before any refusal")
    pushed = status == 429 and retry is not None
    verdict.require(pushed, "not_pushed_back", f"status {status}, Retry-After {retry}")
    taken = wait_until(lambda: flood.send()[0] == 200, PATIENCE)
    verdict.require(taken, "not_resumed", "the writer goes on, and no event is accepted")
    wait_until(lambda: collector.get("/readyz")[1]["bytes_waiting"] == 0, PATIENCE)


SCENARIO = Scenario(
    name="slow_writer",
    law="a shard writer that stands still: 429 with Retry-After before memory grew by 64 MB",
    unit="stalls",
    quick=3,
    long=20,
    planted=1,
    run=run,
)
