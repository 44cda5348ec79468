"""All faults together: `headrace up` with clients and a reader.

Clients, collector, shard writer, trainer, a reader and `headrace up` itself are killed, stopped, or
briefly left without descriptors, at random. The clients act by the policy, log by `Idempotency-Key`
and repeat old calls. Each acknowledged row is stored once, as its client was answered; a reader
with a position returns it once; and the trainer has trained on it once, excluded it by name, or not
read it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from functools import partial

from tests.faults.loop.running_loop import Loop, no_descriptors, stopped, wait_until
from tests.faults.loop.up_processes import Up
from tests.faults.scenario import Scenario, Trial, Verdict

PATIENCE = 90.0
TARGETS = ("collector", "trainer", "writer", "client", "reader", "up", "trainer", "collector")
HOW = ("killed", "stopped", "no_descriptors")
SHARES = (0.5, 0.25, 0.25)
LONGEST = 1.0  # s


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
    """Kill a process, stop it for a moment, or deny it further descriptors."""
    (how,) = loop.chance.choices(HOW, SHARES)
    name = loop.chance.choice(loop.names)
    verdict.count(f"{target}_{how}")
    if up.ended:
        verdict.count("up_gave_up")
        up.restart()
    if how == "killed" and target in ("client", "reader", "up"):
        replace = {"reader": up.restart_reader, "up": up.restart}
        replace.get(target, partial(loop.replace_client, name))()
        return
    pids = {"client": loop.clients[name].pid, "reader": up.reader_pid, "up": up.own_pid}
    wait_until(lambda: target in pids or up.pid(target) is not None, PATIENCE)
    pid = pids.get(target) or up.pid(target)
    verdict.require(pid is not None, "gone", f"there is no {target} any more")
    with contextlib.suppress(ProcessLookupError):
        if pid is not None and how == "killed":
            os.kill(pid, signal.SIGKILL)
        elif pid is not None:
            with stopped(pid) if how == "stopped" else no_descriptors(pid):
                threading.Event().wait(loop.chance.uniform(0.1, LONGEST))


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
