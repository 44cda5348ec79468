"""Everything at once: `headrace up` under clients, and readers beside it.

Clients, collector, shard writer, trainer, `headrace up` itself and a reader are killed or stopped
at random. The clients act by the policy, log by `Idempotency-Key` and send calls of long ago again.
Each acknowledged row is at rest once, as its client was answered; a reader with a position has it
once; and the trainer has trained on it once, named it or not read it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading

from tests.faults.loop.running import Loop, stopped, wait_until
from tests.faults.loop.upheaval import Up
from tests.faults.scenario import Scenario, Trial, Verdict

PATIENCE = 90.0
TARGETS = ("collector", "trainer", "writer", "client", "reader", "up", "trainer", "collector")
STOPPED = 0.3  # the share that is stopped for a moment


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    with Loop(trial, collect=False, episode_timeout=20.0) as loop, Up(loop) as up:
        verdict.require(loop.wait_for_version(1), "stuck", "no version before any fault")
        for number in range(trial.size):
            if not trial.in_time:
                break
            _strike(loop, up, TARGETS[number % len(TARGETS)], verdict)
            threading.Event().wait(loop.chance.uniform(0.05, 0.8))
            loop.watch.look()
        before = loop.live_version()
        came = loop.wait_for_version(before, PATIENCE)
        verdict.require(came, "stuck", f"the faults are over, and no version follows {before}")
        up.judge(verdict)
    return verdict


def _strike(loop: Loop, up: Up, target: str, verdict: Verdict) -> None:
    """Kill it, or stop it for a moment."""
    verdict.count(f"{target}_strikes")
    if up.ended:
        verdict.count("up_gave_up")
        up.restart()
    if target == "client":
        loop.replace_client(loop.chance.choice(loop.names))
    elif target == "reader":
        up.restart_reader()
    elif target == "up":
        up.restart()
    else:
        found = wait_until(lambda: up.pid(target) is not None, PATIENCE)
        verdict.require(found, "gone", f"there is no {target} any more")
        pid = up.pid(target)
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if loop.chance.random() < STOPPED:
                with stopped(pid):
                    threading.Event().wait(loop.chance.uniform(0.1, 1.0))
            else:
                os.kill(pid, signal.SIGKILL)


SCENARIO = Scenario(
    name="loop_kills",
    law="whatever of the loop is killed or stopped: acknowledged is at rest once, as it was "
    "answered, and trained on once, excluded by name or unread",
    unit="strikes",
    quick=16,
    long=160,
    planted=16,
    run=run,
    seconds=90.0,
)
