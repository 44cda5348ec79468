"""SIGTERM under load: exit status 0 within five seconds, and nothing acknowledged is lost.

Sometimes the shard writer does not respond at that moment; then its plan waits for the next start.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

from tests.faults.crash import Traffic
from tests.faults.scenario import Scenario, Trial, Verdict

LIMIT_SECONDS = 5.0


def run(trial: Trial) -> Verdict:
    verdict, chance = Verdict(), random.Random(trial.seed)
    slowest = 0.0
    with Traffic(trial.folder, trial.seed, trial.program) as traffic:
        traffic.warm_up()
        for number in range(trial.size):
            if not trial.in_time:
                break
            threading.Event().wait(chance.uniform(0.2, 1.5))
            stuck = number % 3 == 1
            slowest = max(slowest, _drain(traffic, stuck, verdict))
            verdict.count("drains_with_a_stuck_writer" if stuck else "drains")
            traffic.collector.restart()
        traffic.settle()
        traffic.account().judge(verdict)
    verdict.counts["slowest_seconds"] = slowest
    return verdict


def _drain(traffic: Traffic, stuck: bool, verdict: Verdict) -> float:
    """SIGTERM; how long the collector took to end."""
    process, writer = traffic.collector.process, traffic.collector.writer_pid()
    with contextlib.ExitStack() as stack:
        if stuck and writer is not None:
            stack.enter_context(_stopped(writer))
        began = time.monotonic()
        process.terminate()
        try:
            status = process.wait(2 * LIMIT_SECONDS)
            verdict.require(status == 0, "status", f"expected exit status 0, got {status}")
        except subprocess.TimeoutExpired:
            traffic.collector.kill()
        seconds = time.monotonic() - began
    verdict.require(seconds <= LIMIT_SECONDS, "slow", f"it took {seconds:.1f} s; stuck: {stuck}")
    return seconds


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    """Suspend the process; kill it when the block ends, unless it is already dead."""
    process = os.pidfd_open(pid)  # its process id may have been reused by then
    try:
        signal.pidfd_send_signal(process, signal.SIGSTOP)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)


SCENARIO = Scenario(
    name="drain",
    law="SIGTERM under load ends the collector with status 0 within 5 s and loses nothing",
    unit="drains",
    quick=6,
    long=40,
    planted=2,
    run=run,
)
