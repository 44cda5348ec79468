"""Loss of power under eight clients: unsynced changes are lost, partly or completely.

The collector and its shard writer run on a `Disk`. Power is cut at a random moment, or exactly when
one of them is about to write, sync or rename; sometimes only a process dies then, and the power is
cut a little later, when its successor has taken over.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import urllib3

from tests.faults.crash import Traffic, judge_root
from tests.faults.disk import KILL, Disk
from tests.faults.scenario import Scenario, Trial, Verdict

Moment: TypeAlias = tuple[str, str, bool] | None
"""A role's call of a kind that is never made; does only the process die at first? None: whenever"""

MOMENTS: tuple[Moment, ...] = (
    ("writer", "dirsync", True),
    None,
    ("writer", "sync", False),
    ("collector", "sync", True),
    ("writer", "rename", False),
    ("collector", "write", False),
    ("writer", "dirsync", False),
    ("collector", "sync", False),
    ("writer", "write", True),
)
LATEST = {"collector": 30, "writer": 2}
"""Up to which of the calls to come is the one that is never made."""

PATIENCE = 8.0


class DiskTraffic(Traffic):
    """Traffic to a collector on a disk."""

    def __init__(self, trial: Trial, *, episode_timeout: float = 20.0) -> None:
        self.disk = Disk.create(trial.folder / "root")
        super().__init__(
            trial.folder,
            trial.seed,
            trial.program,
            episode_timeout=episode_timeout,
            env=self.disk.environment,
        )
        self.chance = random.Random(trial.seed)

    def strike(self, role: str, kind: str, nth: int, action: int, count: int = 1) -> bool:
        """Let a call fail, and wait until it has; return False if the call was not made in time."""
        before = self.disk.fired
        self.disk.fail(role, kind, nth, action, count)
        return wait_until(lambda: self.disk.fired > before)

    def shards(self) -> int:
        """The number of recorded shards; 0 while the collector does not answer."""
        try:
            count: int = self.collector.get("/readyz")[1]["shards"]
        except urllib3.exceptions.HTTPError:
            return 0
        return count

    def end(self) -> None:
        """SIGKILL of the collector; its writer dies with it."""
        writer = self.collector.writer_pid()
        self.collector.kill()
        if writer is not None:
            wait_until(lambda: is_dead(writer))

    def cut(self, survival: str | None = None) -> dict[str, int]:
        """Cut the power and start again; what was undone, by kind."""
        self.end()
        self.disk.disarm()
        report = self.disk.cut(self.chance, survival)
        self.collector.restart()
        return {
            "writes_undone": report.writes,
            "names_undone": report.names,
            "changes_spared": report.spared,
        }


def wait_until(done: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        threading.Event().wait(0.003)
    return True


def is_dead(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    timeout = 2.0 if trial.mutant else 20.0  # a fault may make clients forget their episodes
    with DiskTraffic(trial, episode_timeout=timeout) as traffic:
        traffic.warm_up()
        wait_until(lambda: traffic.shards() > 0)
        for number in range(trial.size):
            if not trial.in_time:
                break
            _reach(traffic, MOMENTS[number % len(MOMENTS)], verdict)
            for name, count in traffic.cut("nothing" if trial.mutant else None).items():
                verdict.count(name, count)
            verdict.count("cuts")
        traffic.judge(verdict)
    judge_root(traffic.root, verdict)
    return verdict


def _reach(traffic: DiskTraffic, moment: Moment, verdict: Verdict) -> None:
    """Wait for the moment of the cut."""
    chance = traffic.chance
    if moment is None:
        threading.Event().wait(chance.uniform(0.1, 1.5))
        return
    role, kind, successor = moment
    nth = 1 if kind == "dirsync" and successor else chance.randint(1, LATEST[role])
    struck = traffic.strike(role, kind, nth, KILL)
    verdict.count("struck", struck)
    if struck and successor:
        if role == "collector":
            traffic.end()
            traffic.disk.disarm()
            traffic.collector.restart()
        else:
            traffic.disk.fail("writer", "write", 1, KILL)  # an adopted shard is not written
        shards = traffic.shards()
        verdict.count("successors", wait_until(lambda: traffic.shards() > shards))
        threading.Event().wait(0.2)  # it counts a shard a moment before its record is durable


SCENARIO = Scenario(
    name="power_loss",
    law="what was acknowledged survives a cut of the power at any moment, once",
    unit="cuts",
    quick=18,
    long=100,
    planted=3,
    run=run,
    seconds=40.0,
)
