"""Bytes flipped in shards while clients wait for the trainer's next version.

The trainer is stopped while a shard is written and damaged, so that it can only read the damaged
file. New versions must follow, although the collector counted rows that cannot be read. The delay
is reported together with the usual time between versions.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import statistics
import time
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.faults.loop.running_loop import Loop, stopped, wait_until
from tests.faults.scenario import Scenario, Trial, Verdict

PATIENCE = 50.0  # less than clients wait: only the trainer can bring the next version
CLIENTS = ("patient-0", "patient-1", "keyed-0")
TRIES, SHARD_SECONDS = 20, 5.0  # for a shard to come before clients are held
PLACES = 200  # attempts to find a byte that only the digest protects
USUAL = 6  # versions without a fault, for their interval


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    usual: list[float] = []
    after: list[float] = []
    damaged: list[str] = []
    with Loop(trial, clients=CLIENTS) as loop:
        trainer = loop.start_trainer()
        verdict.require(loop.wait_for_version(2), "stuck", "no version before any fault")
        usual += _intervals(loop)
        while trial.goes_on(len(damaged), verdict):
            names = damage(loop, trainer.pid)
            verdict.require(bool(names), "idle", "no shard came to be damaged")
            if not names:
                break
            damaged += names
            before, began = loop.live_version(), time.monotonic()
            if not loop.wait_for_version(before, PATIENCE):
                verdict.require(False, "stuck", f"no version after {before}: {names}")
                break
            after.append(time.monotonic() - began)
            verdict.require(trainer.alive, "ended", f"by itself: {trainer.complaint()}")
            loop.wait_for_version(before + 1)
        loop.judge(verdict, damaged=tuple(damaged))
    verdict.counts |= {"damaged_shards": len(damaged)}
    for name, seconds in (("version_seconds_usual", usual), ("version_seconds_damaged", after)):
        if seconds:
            verdict.counts[f"{name}_p50"] = statistics.median(seconds)
            verdict.counts[f"{name}_max"] = max(seconds)
    return verdict


def _intervals(loop: Loop) -> list[float]:
    """Seconds between versions while nothing is wrong."""
    found, at, version = [], time.monotonic(), loop.live_version()
    for _ in range(USUAL):
        if not loop.wait_for_version(version):
            break
        version, now = loop.live_version(), time.monotonic()
        found.append(now - at)
        at = now
    return found


def damage(loop: Loop, trainer: int) -> list[str]:
    """Flip a byte of a shard that is written while the trainer is stopped; return its name.

    The shard has rows that the collector counted for the live version.
    """
    for _ in range(TRIES):
        loop.wait_for_version(loop.live_version(), PATIENCE)
        fresh = partial(_fresh, loop, loop.shards())
        with stopped(trainer):
            wait_until(lambda fresh=fresh: bool(fresh()), SHARD_SECONDS)
            for path in fresh()[:1]:
                shutil.copy(path, loop.originals / path.name)
                flip(path, _place(path, loop.chance))
                return [path.name]
    return []


def _place(path: Path, chance: random.Random) -> int:
    """Where one byte is flipped: half of the time where Parquet itself would not notice it."""
    content = path.read_bytes()
    for _ in range(PLACES if chance.random() < 0.5 else 0):
        at = chance.randrange(len(content))
        flipped = content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]
        with contextlib.suppress(pa.ArrowException, OSError, ValueError):
            pq.read_table(pa.BufferReader(flipped)).validate(full=True)
            return at
    return chance.randrange(len(content))


def _fresh(loop: Loop, before: set[Path]) -> list[Path]:
    """The shards that were not there before and hold rows of the policy's own."""
    new = sorted(loop.shards() - before)
    return [path for path in new if "on_policy" in pq.read_table(path)["source"].to_pylist()]


def flip(path: Path, at: int) -> None:
    """Change one byte in place."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


SCENARIO = Scenario(
    name="damaged_shards",
    law="a damaged shard stops no learning: its rows are excluded by name, and versions go on",
    unit="shards",
    quick=4,
    long=30,
    planted=3,
    run=run,
    seconds=60.0,
)
