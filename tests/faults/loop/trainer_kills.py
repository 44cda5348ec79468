"""SIGKILL of the trainer at random moments, while clients act and wait for its versions.

Some kills come before its first version or checkpoint. At the end each acknowledged row was trained
on once, excluded by name, or not read; and each version's lineage lists what its weights were
trained on.
"""

from __future__ import annotations

import random

from tests.faults.loop.running_loop import Loop, wait_until
from tests.faults.scenario import Scenario, Trial, Verdict

LATEST = 0.6  # seconds after a moment that was waited for


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    with Loop(trial) as loop:
        for number in range(trial.size):
            if not trial.in_time or trial.is_caught(verdict):
                break
            kill_one(loop, loop.chance, verdict, early=number < trial.size // 5)
            verdict.count("trainer_kills")
        loop.judge(verdict)
    return verdict


def kill_one(loop: Loop, chance: random.Random, verdict: Verdict, *, early: bool) -> None:
    """Start a trainer and kill it: `early`, at any moment of its start, else after some updates."""
    trainer, before = loop.start_trainer(), loop.updates()
    wanted = 0 if early else chance.choice((0, 1, 1, 2, 3))
    if wanted:
        came = wait_until(lambda: loop.updates() >= before + wanted or not trainer.alive, 90.0)
        verdict.require(came, "stuck", f"no {wanted} updates after a kill")
    pause = chance.uniform(0, 0.05 if chance.random() < 0.5 else LATEST)
    ended = trainer.wait(pause)
    verdict.require(not ended, "ended", f"by itself: {trainer.complaint()}")
    trainer.kill()
    loop.watch.look()


SCENARIO = Scenario(
    name="trainer_kills",
    law="what was acknowledged is trained on once, excluded by name or unread, and a lineage says "
    "what its weights were trained on, whenever the trainer is killed",
    unit="kills",
    quick=25,
    long=100,
    planted=6,
    run=run,
    seconds=60.0,
)
