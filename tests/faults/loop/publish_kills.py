"""SIGKILL of the trainer right before and right after each call that changes files.

Storing a candidate, writing the checkpoint, numbering a version and making it live take some dozens
of calls. Each of them is once a trainer's last call; the next trainer continues from the result.
"""

from __future__ import annotations

from tests.faults.loop.running_loop import Loop, wait_until
from tests.faults.scenario import Scenario, Trial, Verdict

CALLS = 60  # of a start and two updates, about
PATIENCE = 60.0


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    with Loop(trial) as loop:
        calls = list(range(1, CALLS + 1))
        loop.chance.shuffle(calls)
        for number in range(trial.size):
            if not trial.in_time:
                break
            after = loop.chance.random() < 0.5
            strike(loop, calls[number % CALLS], verdict, after=after)
        loop.judge(verdict)
    return verdict


def strike(loop: Loop, nth: int, verdict: Verdict, *, after: bool) -> None:
    """A trainer that dies at this call."""
    trainer = loop.start_trainer(strike={"nth": nth, "after": after})
    struck = wait_until(lambda: not trainer.alive, PATIENCE)
    verdict.require(struck, "stuck", f"a trainer has not come to call {nth}")
    status = trainer.exit_status()
    verdict.require(status is None, "ended", f"by itself, status {status}: {trainer.complaint()}")
    trainer.kill()
    verdict.count("kills")
    verdict.count("kills_after_the_call" if after else "kills_before_the_call")
    loop.watch.look()


SCENARIO = Scenario(
    name="publish_kills",
    law="whatever call of a checkpoint or a publication is a trainer's last, its versions are "
    "whole, their lineages true, and the next trainer goes on",
    unit="kills",
    quick=20,
    long=100,
    planted=25,
    run=run,
    seconds=60.0,
)
