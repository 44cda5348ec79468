"""The wall clock jumps: an hour back, ten years ahead, and back again, under load.

The jumps have no effect: no episode is abandoned, no shard is late, nothing is lost or duplicated.
They affect every process of the collector (see disk.c).
"""

from __future__ import annotations

import threading
import time

from tests.faults.power_loss import DiskTraffic, wait_until
from tests.faults.scenario import Scenario, Trial, Verdict

HOUR, YEAR = 3600.0, 365 * 86400.0
JUMPS = (10 * YEAR, 0.0, -HOUR, 10 * YEAR, -HOUR, 0.0)
SHARD_SECONDS = 5.0
EPISODE_SECONDS = 20.0


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    slowest = 0.0
    with DiskTraffic(trial, episode_timeout=EPISODE_SECONDS) as traffic:
        traffic.warm_up()
        for number in range(trial.size):
            if not trial.in_time:
                break
            traffic.disk.shift_clock(JUMPS[number % len(JUMPS)])
            began, shards = time.monotonic(), traffic.shards()
            later = wait_until(lambda known=shards: traffic.shards() > known, SHARD_SECONDS)
            verdict.require(later, "late", f"no shard within {SHARD_SECONDS} s of a jump")
            slowest = max(slowest, time.monotonic() - began)
            threading.Event().wait(1.2)  # timeouts are checked once a second
            verdict.count("jumps")
        status = traffic.settle()
        verdict.require(status == 0, "drain", f"expected exit status 0, got {status}")
        account = traffic.account()
        account.judge(verdict)
    verdict.counts["slowest_shard_seconds"] = slowest
    return verdict


SCENARIO = Scenario(
    name="clock",
    law="jumps of the wall clock by -1 h and +10 y change nothing",
    unit="jumps",
    quick=6,
    long=30,
    planted=4,
    run=run,
)
