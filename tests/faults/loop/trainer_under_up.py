"""`headrace up` with a trainer that is killed repeatedly: the collector keeps running."""

from __future__ import annotations

import contextlib
import os
import signal

from tests.faults.loop.running_loop import PATIENCE, Loop, wait_until
from tests.faults.loop.up_processes import Up
from tests.faults.scenario import Scenario, Trial, Verdict


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    with Loop(trial, collect=False, clients=("keyed-0",)) as loop, Up(loop) as up:
        collector = up.pid("collector")
        for _ in range(trial.size):
            if trial.is_caught(verdict):
                break
            found = wait_until(lambda: up.ended or up.pid("trainer") is not None, PATIENCE)
            verdict.require(found, "stuck", "no trainer is started again")
            pid = up.pid("trainer")
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                wait_until(lambda pid=pid: up.pid("trainer") != pid, PATIENCE)
                verdict.count("trainer_kills")
            same = not up.ended and up.pid("collector") == collector
            verdict.require(same, "collector_ended", "with its trainer")
        rows = loop.answers()
        took = wait_until(lambda: loop.answers() > rows, PATIENCE)
        verdict.require(took, "collector_ended", "no event is taken any more")
        verdict.counts["acknowledged"] = loop.answers()
    return verdict


SCENARIO = Scenario(
    name="trainer_under_up",
    law="a trainer that dies again and again never takes its collector down",
    unit="kills",
    quick=7,
    long=9,
    planted=9,
    run=run,
    seconds=120.0,
)
