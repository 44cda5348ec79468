"""The cost of a new shard, and of waiting, for a following reader, by the number of shards.

`python -m benchmarks.following`. A reader in its own process has read all but the last shards of a
stream. Then shards are renamed into place one at a time, each after the previous one's batch. CPU
time is the reader process's. The baseline of each figure is the same with 10 shards.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.reader import ACTION, LAYOUTS, any_part
from benchmarks.report import Figure, render
from storage.reading.listing import MOST_INTERVAL
from storage.shards.shard import ShardWriter
from storage.spaces.descriptors import canonical_json

LAYOUT = LAYOUTS[0]
STREAM = LAYOUT.stream
THERE = (10, 1_000, 10_000)
NEW = 150
PAUSE = 0.05  # s between a batch and the next shard
IDLE = 10.0  # s


@dataclass(frozen=True)
class Following:
    """One run: CPU per new shard (ms), rename -> batch (ms, median), CPU while idle (ms/s)."""

    per_shard: float
    arrival: float
    idle: float


def follow(there: int) -> Following:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        stream = root / "shards" / STREAM
        stream.mkdir(parents=True)
        for ordinal in range(there):  # read already: only their names are used
            (stream / f"{ordinal:012}-{ordinal:012}-{'0' * 16}.parquet").touch()
        made = _write(Path(folder) / "aside", there)
        return _measure(root, stream, there, made)


def _write(aside: Path, first: int) -> list[Path]:
    rng = np.random.default_rng(0)
    writer, text = ShardWriter(aside / "shards"), canonical_json(LAYOUT.observation, ACTION)
    return [writer.write(STREAM, text, [any_part(LAYOUT, first + i, rng)]).path for i in range(NEW)]


def _measure(root: Path, stream: Path, there: int, made: list[Path]) -> Following:
    command = [sys.executable, "-m", "benchmarks.follower", str(root), STREAM, str(there - 1)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        try:
            return _drive(reader, stream, made)
        finally:
            reader.kill()


def _drive(reader: subprocess.Popen[str], stream: Path, made: list[Path]) -> Following:
    if reader.stdin is None or reader.stdout is None:
        raise RuntimeError("the reader has no pipes")
    for path in made[:10]:  # includes imports and first decodes
        _place(path, stream)
        reader.stdout.readline()
    time.sleep(3.0)
    begin, arrivals = _asked(reader), []
    for path in made[10:]:
        placed = _place(path, stream)
        word, _, at = reader.stdout.readline().split()
        if word != "batch":
            raise RuntimeError(f"expected a batch, got {word}")
        arrivals.append((float(at) - placed) * 1e3)
        time.sleep(PAUSE)
    end = _asked(reader)
    time.sleep(MOST_INTERVAL + 6.0)  # until this change no longer causes checks of the folder
    resting = _asked(reader)
    time.sleep(IDLE)
    rested = _asked(reader)
    return Following(
        (end - begin) / len(arrivals) * 1e3,
        statistics.median(arrivals),
        (rested - resting) / IDLE * 1e3,
    )


def _place(path: Path, stream: Path) -> float:
    """Rename into place as the writer does, from a hidden file in the same folder."""
    hidden = stream / f".{path.name}.tmp"
    os.rename(path, hidden)
    placed = time.time()
    os.rename(hidden, stream / path.name)
    return placed


def _asked(reader: subprocess.Popen[str]) -> float:
    if reader.stdin is None or reader.stdout is None:
        raise RuntimeError("the reader has no pipes")
    reader.stdin.write("\n")
    reader.stdin.flush()
    return float(reader.stdout.readline().split()[1])


def run() -> list[Figure]:
    found = {there: follow(there) for there in THERE}
    base = found[THERE[0]]
    figures = []
    for there, one in found.items():
        for name, value, baseline, unit, aim in (
            ("CPU per new shard", one.per_shard, base.per_shard, "ms", "<= 2"),
            ("CPU of an idle follower", one.idle, base.idle, "ms/s", "<= 2"),
            ("rename -> batch, p50", one.arrival, base.arrival, "ms", ""),
        ):
            figures.append(
                Figure(
                    name=f"{name}, {there} there",
                    value=value,
                    unit=unit,
                    baseline_name=f"with {THERE[0]} there",
                    baseline_value=baseline,
                    aim=aim,
                )
            )
    return figures


if __name__ == "__main__":
    print(render(run()))
