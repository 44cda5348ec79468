"""Loss of power under a trainer: unsynced changes of its weights and checkpoints are lost.

Trainer and collector run on a `Disk` (tests.faults.disk). Power is cut at a random moment, or when
the trainer is about to write, sync, link or rename. A version that a trainer reported live must
exist afterwards, with its checkpoint; every version that was visible keeps its number.
"""

from __future__ import annotations

import threading
from typing import TypeAlias

from tests.faults.disk import KILL, Disk
from tests.faults.loop.running_loop import Loop, Trainer, wait_until
from tests.faults.scenario import Scenario, Trial, Verdict

Moment: TypeAlias = str | None
"""The kind of the trainer's call that is never made; None: whenever"""

MOMENTS: tuple[Moment, ...] = ("rename", None, "dirsync", "sync", "link", "dirsync", "write", None)
LATEST = {"rename": 8, "dirsync": 16, "sync": 16, "link": 3, "write": 16}
PATIENCE = 60.0


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    disk = Disk.create(trial.folder / "root")
    with Loop(trial, env=disk.environment) as loop:
        for number in range(trial.size):
            if not trial.in_time or "stuck" in verdict.faults:  # it stopped learning
                break
            _cut(loop, disk, MOMENTS[number % len(MOMENTS)], verdict)
        loop.judge(verdict)
    return verdict


def _cut(loop: Loop, disk: Disk, moment: Moment, verdict: Verdict) -> None:
    """Cut the power while a trainer runs; the next one has to continue from what is left."""
    before = loop.updates()
    trainer = loop.start_trainer()
    wanted = loop.chance.choice((0, 1, 2))
    came = wait_until(lambda: loop.updates() >= before + wanted or not trainer.alive, PATIENCE)
    verdict.require(came, "stuck", f"no {wanted} updates after a cut")
    verdict.require(trainer.alive, "ended", f"by itself: {trainer.complaint()}")
    _reach(loop, disk, trainer, moment, verdict)
    trainer.kill()
    loop.watch.look()
    last = max(trainer.versions(), default=0)
    loop.end_collector()
    disk.disarm()
    report = disk.cut(loop.chance, "nothing" if loop.trial.mutant else None)
    verdict.count("cuts")
    verdict.count("writes_undone", report.writes)
    verdict.count("names_undone", report.names)
    verdict.count("changes_spared", report.spared)
    loop.watch.after_cut(last)
    loop.collector.restart()


def _reach(loop: Loop, disk: Disk, trainer: Trainer, moment: Moment, verdict: Verdict) -> None:
    """Wait for the moment of the cut."""
    if moment is None:
        threading.Event().wait(loop.chance.uniform(0.0, 0.5))
        return
    fired = disk.fired
    disk.fail("trainer", moment, loop.chance.randint(1, LATEST[moment]), KILL)
    verdict.count("struck", wait_until(lambda: disk.fired > fired or not trainer.alive, PATIENCE))


SCENARIO = Scenario(
    name="weights_power_loss",
    law="no version that was served is lost or changed by a cut of the power, and its checkpoint "
    "is there",
    unit="cuts",
    quick=12,
    long=100,
    planted=5,
    run=run,
    seconds=60.0,
)
