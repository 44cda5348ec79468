"""Durable steps/s by the size of an observation, with default settings.

Observations are 84x84x4 uint8 images of random pixels (28 kB), and 1.5 kB and 24 B of float32.
`python -m benchmarks.images`. Baselines on the same disk, in the same run: appends of 1 MB with one
fdatasync each, and SQLite journal rows of 1 MB with one commit each. It also gives the CPU time per
MB of each process of the path: client, collector and shard writer share the machine's cores.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.report import Figure, render
from ingest.client.policy_client import PolicyClient
from storage.journal.sqlite_journal import SqliteJournal
from tests.collector_process import CollectorProcess, declare

SHAPE = (84, 84, 4)
SMALL = (384, 6)  # numbers in a vector: 1.5 kB, 24 B
SMALL_EPISODES = 40
EPISODES, STEPS = 6, 250
ROUNDS = 5
DISK_BYTES, CHUNK = 48_000_000, 1_000_000
MB = 1e6
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int | None) -> float:
    """User and system time of a process so far."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def append_rate(folder: Path) -> float:
    """MB/s of appends that are synced one by one."""
    chunk = os.urandom(CHUNK)
    began = time.perf_counter()
    with (folder / "appended").open("wb", buffering=0) as file:
        for _ in range(DISK_BYTES // CHUNK):
            file.write(chunk)
            os.fdatasync(file.fileno())
    seconds = time.perf_counter() - began
    (folder / "appended").unlink()
    return DISK_BYTES / MB / seconds


def sqlite_rate(folder: Path) -> float:
    """MB/s of journal rows that are committed one by one."""
    chunk = os.urandom(CHUNK)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        journal = SqliteJournal.open(Path(place))
        try:
            began = time.perf_counter()
            for row in range(1, DISK_BYTES // CHUNK + 1):
                journal.commit([(row, chunk)])
            return DISK_BYTES / MB / (time.perf_counter() - began)
        finally:
            journal.close()


def log_images(client: PolicyClient, frames: np.ndarray, episodes: int = EPISODES) -> float:
    """Steps/s until all of them are durable."""
    began = time.perf_counter()
    for _ in range(episodes):
        episode = client.start_episode()
        for step in range(STEPS):
            client.log_action(episode, frames[step % len(frames)], step & 3, action_prob=0.25)
            client.log_returns(episode, 1.0)
        client.end_episode(episode)
    client.flush(300.0)
    return episodes * STEPS / (time.perf_counter() - began)


def small(numbers: int) -> Figure:
    """The rate for vectors of `numbers` float32."""
    frames = np.random.default_rng(7).standard_normal((64, numbers), np.float32)
    rates, appends = [], []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        declare(root, observation=f"box:{numbers}", action="discrete:4")
        with CollectorProcess(root) as process, PolicyClient(process.address) as client:
            log_images(client, frames, 1)
            for _ in range(ROUNDS):
                appends.append(append_rate(Path(folder)))
                rates.append(log_images(client, frames, SMALL_EPISODES))
                process.settle(0)
    steps = statistics.median(rates)
    return Figure(
        name=f"{frames[0].nbytes:,} bytes, {steps:,.0f} durable steps/s",
        value=steps * frames[0].nbytes / MB,
        unit="MB/s",
        baseline_name="appends of 1 MB with fdatasync",
        baseline_value=statistics.median(appends),
    )


def run() -> list[Figure]:
    """The rate of the whole path, and the CPU time of its three processes."""
    rng = np.random.default_rng(7)
    frames = rng.integers(0, 256, (64, *SHAPE), np.uint8)
    nbytes = frames[0].nbytes
    rates, appends, journals = [], [], []
    cpu: dict[str, float] = {"client": 0.0, "collector": 0.0, "writer": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        declare(root, observation="box:84x84x4:uint8:0:255", action="discrete:4")
        with (
            CollectorProcess(root) as process,
            PolicyClient(process.address, inference_mode="remote", timeout=300.0) as client,
        ):
            log_images(client, frames[:1])
            pids = {"collector": process.serving_pid(), "writer": process.writer_pid()}
            for _ in range(ROUNDS):
                appends.append(append_rate(Path(folder)))
                journals.append(sqlite_rate(Path(folder)))
                before = {name: cpu_seconds(pid) for name, pid in pids.items()}
                own = time.process_time()
                rates.append(log_images(client, frames))
                cpu["client"] += time.process_time() - own
                process.settle(0)
                for name, pid in pids.items():
                    cpu[name] += cpu_seconds(pid) - before[name]
            stats = client.stats
    print(f"  {stats}", file=sys.stderr)
    total = ROUNDS * EPISODES * STEPS * nbytes / MB
    steps, disk, sqlite = map(statistics.median, (rates, appends, journals))
    print(
        f"  processor ms per MB: {', '.join(f'{k} {v / total * 1e3:.1f}' for k, v in cpu.items())}",
        file=sys.stderr,
    )
    mine = steps * nbytes / MB
    return [
        Figure(
            name=f"84x84x4 images, {steps:,.0f} durable steps/s",
            value=mine,
            unit="MB/s",
            baseline_name="appends of 1 MB with fdatasync",
            baseline_value=disk,
            aim=">= 0.5",
        ),
        Figure(
            name="84x84x4 images",
            value=mine,
            unit="MB/s",
            baseline_name="rows of 1 MB in SQLite, a commit each",
            baseline_value=sqlite,
        ),
        *map(small, SMALL),
    ]


if __name__ == "__main__":
    print(render(run()))
