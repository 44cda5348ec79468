"""The root is renamed, replaced or loses its shards/ while a collector under load has it open.

The collector ends with status 1. Restarted at the root's new place, it has every acknowledged step
once. A shard that was being written at that moment may be left in the folder that replaced the root
(`astray`); it is never used.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import threading
from pathlib import Path

from tests.faults.crash import Traffic, judge_root
from tests.faults.scenario import Scenario, Trial, Verdict

WAYS = ("renamed", "replaced", "shards")
END_SECONDS = 20.0
PLANTED_SECONDS = 4.0  # a broken build does not exit by itself


def _take_away(way: str, root: Path, number: int) -> tuple[Path, Path]:
    """Move a folder, perhaps replacing it; return its old and its new path."""
    was = root / "shards" if way == "shards" else root
    now = was.with_name(f"{was.name}-{number}")
    was.rename(now)
    if way == "replaced":
        (was / "shards").mkdir(parents=True)
        (was / "journal").mkdir()
    elif way == "shards" and number % 2:
        was.mkdir()
    return was, now


def _ended(traffic: Traffic, trial: Trial) -> int | None:
    """The exit status; None if the collector continues, which is then killed."""
    try:
        traffic.collector.process.wait(PLANTED_SECONDS if trial.mutant else END_SECONDS)
    except subprocess.TimeoutExpired:
        traffic.collector.kill()
        return None
    return traffic.collector.wait()


def _move(traffic: Traffic, trial: Trial, way: str, number: int, verdict: Verdict) -> None:
    was, now = _take_away(way, traffic.root, number)
    status = _ended(traffic, trial)
    verdict.require(status == 1, "goes_on", f"{way}: expected exit status 1, got {status}")
    if was.exists():
        verdict.count("astray", len(list(was.rglob("*.parquet"))))
        shutil.rmtree(was)
    if way == "shards":
        now.rename(was)
    else:
        traffic.root = traffic.collector.root = now
    verdict.count(way)
    traffic.collector.restart()


def run(trial: Trial) -> Verdict:
    verdict, chance = Verdict(), random.Random(trial.seed)
    with Traffic(trial.folder, trial.seed, trial.program) as traffic:
        traffic.warm_up()
        for number in range(trial.size):
            if not trial.in_time:
                break
            threading.Event().wait(chance.uniform(0.2, 1.0))
            way = "replaced" if trial.mutant else WAYS[number % len(WAYS)]
            _move(traffic, trial, way, number, verdict)
        traffic.judge(verdict)
    judge_root(traffic.root, verdict)
    return verdict


SCENARIO = Scenario(
    name="moved_root",
    law="a root that is moved in use costs no acknowledged step: its collector ends and says so",
    unit="moves",
    quick=6,
    long=40,
    planted=1,
    run=run,
)
