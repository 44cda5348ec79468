"""A call to the system fails, or kills the process that makes it: EIO, ENOSPC, SIGKILL.

After each, power is cut: data acknowledged after a failed sync is lost then, because no later sync
covers it. A collector whose sync fails ends with status 1, or is killed before that; its successor
runs under load for a while before the power cut. A full disk and a failing shard writer are
retried.
"""

from __future__ import annotations

import errno
import random
import subprocess
import threading

from tests.faults.crash import judge_root
from tests.faults.disk import FAIL_THEN_KILL, KILL
from tests.faults.power_loss import DiskTraffic, wait_until
from tests.faults.scenario import Scenario, Trial, Verdict

ACTIONS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "KILL": KILL, "EIO, KILL": FAIL_THEN_KILL}
LATEST = {  # a running process makes these calls repeatedly: fail one of the first so many
    ("collector", "write"): 40,
    ("collector", "sync"): 40,
    ("writer", "write"): 2,
    ("writer", "sync"): 2,
    ("writer", "dirsync"): 2,
    ("writer", "rename"): 2,
    ("writer", "open"): 6,
}
AT_START = (("collector", "open"), ("collector", "dirsync"), ("writer", "unlink"))
AT_END = (("collector", "unlink"),)
EXIT_SECONDS = 5.0


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    cases = [
        (*place, action)
        for place in (*LATEST, *AT_START, *AT_END)
        for action in ACTIONS
        if action != "EIO, KILL" or place == ("collector", "sync")
    ]
    chance = random.Random(trial.seed)
    order: list[tuple[str, str, str]] = []
    while len(order) < trial.size:
        order += chance.sample(cases, len(cases))
    if trial.mutant is not None:
        order = [
            ("collector", "sync", "EIO"),
            ("collector", "sync", "EIO, KILL"),
            ("writer", "sync", "EIO"),
        ]
    with DiskTraffic(trial, episode_timeout=2.0 if trial.mutant else 20.0) as traffic:
        traffic.warm_up()
        wait_until(lambda: traffic.shards() > 0)
        for role, kind, action in order[: trial.size]:
            if not trial.in_time:
                break
            _strike(traffic, role, kind, action, verdict)
            traffic.cut("nothing" if trial.mutant else None)
            verdict.count("cuts")
        traffic.judge(verdict)
    judge_root(traffic.root, verdict)
    return verdict


def _strike(traffic: DiskTraffic, role: str, kind: str, action: str, verdict: Verdict) -> None:
    """Make one call fail, and check the collector."""
    name, number = f"{role} {kind} {action}", ACTIONS[action]
    if (role, kind) in LATEST:
        nth = traffic.chance.randint(1, LATEST[role, kind])
        struck = traffic.strike(role, kind, nth, number, 2 if number == FAIL_THEN_KILL else 1)
    else:
        struck = _strike_once(traffic, role, kind, number)
    verdict.count("struck" if struck else "not_reached")
    if not struck:
        return
    if role == "collector" and kind == "sync" and action == "EIO":
        _require_exit(traffic, name, verdict)
    elif action == "EIO, KILL":
        _succeed(traffic, verdict)
    elif role == "writer" or (kind, action) == ("write", "ENOSPC"):
        threading.Event().wait(traffic.chance.uniform(0.5, 1.5))
        alive = traffic.collector.process.poll() is None
        verdict.require(alive, "ended", f"{name}: the collector ended")


def _strike_once(traffic: DiskTraffic, role: str, kind: str, number: int) -> bool:
    """Calls of these kinds are made when a collector starts or ends."""
    fired = traffic.disk.fired
    if (role, kind) in AT_START:
        traffic.end()
        traffic.disk.fail(role, kind, traffic.chance.randint(1, 4), number)
        try:
            traffic.collector.restart()
        except RuntimeError:  # it fails to start; the next start, after the cut, works
            return True
        return wait_until(lambda: traffic.disk.fired > fired, 1.0)
    traffic.disk.fail(role, kind, 1, number)
    traffic.collector.process.terminate()
    try:
        traffic.collector.process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return traffic.disk.fired > fired


def _require_exit(traffic: DiskTraffic, name: str, verdict: Verdict) -> None:
    try:
        status = traffic.collector.process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        verdict.require(False, "went_on", f"{name}: no exit within {EXIT_SECONDS} s")
    else:
        verdict.require(status == 1, "status", f"{name}: expected status 1, got {status}")
        _succeed(traffic, verdict)


def _succeed(traffic: DiskTraffic, verdict: Verdict) -> None:
    """A new collector takes over, and runs under load for a while."""
    wait_until(lambda: traffic.collector.process.poll() is not None, EXIT_SECONDS)
    traffic.end()
    traffic.disk.disarm()
    traffic.collector.restart()
    threading.Event().wait(traffic.chance.uniform(0.3, 1.0))
    verdict.count("successors")


SCENARIO = Scenario(
    name="syscalls",
    law="no acknowledgement leaves after a failed sync, and nothing acknowledged is lost",
    unit="failures",
    quick=14,
    long=90,
    planted=3,
    run=run,
    seconds=40.0,
)
