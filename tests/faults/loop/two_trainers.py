"""Two trainers on one root: a scheduler's retry, and the orphan of its first attempt.

The second is refused with status 3, and names the first. A stopped trainer loses its lease to the
next one, and may publish nothing when it continues. A rollback under a running trainer holds until
`headrace resume`.
"""

from __future__ import annotations

import signal

from policy.inference.weight_store import WeightStore
from tests.faults.loop.running_loop import POLICY, Loop, Trainer, stop_between, wait_until
from tests.faults.scenario import Scenario, Trial, Verdict

PATIENCE = 90.0


def run(trial: Trial) -> Verdict:
    verdict, copies = Verdict(), list[int]()
    with Loop(trial) as loop:
        trainer = loop.start_trainer()
        verdict.require(loop.wait_for_version(2), "stuck", "no version before any fault")
        for _ in range(trial.size):
            if not trial.in_time or trial.is_caught(verdict):
                break
            _beside(loop, trainer, verdict)
            copies += _roll_back(loop, trainer, verdict)
            trainer = _orphan(loop, trainer, verdict)
            verdict.count("turns")
        loop.judge(verdict, goes_back=tuple(copies))
    return verdict


def _beside(loop: Loop, first: Trainer, verdict: Verdict) -> None:
    """A second trainer starts while the first one runs."""
    second = loop.start_trainer()
    loop.trainer = first
    went = not second.wait(PATIENCE)
    verdict.require(not went, "two", "a second trainer is at work beside the first")
    if went:
        second.kill()
        return
    status, complaint = second.exit_status(), second.complaint()
    verdict.require(status == 3, "status", f"expected 3, got {status}: {complaint}")
    verdict.require(
        str(first.pid) in complaint, "unnamed_holder", f"{first.pid} is not named: {complaint}"
    )


def _roll_back(loop: Loop, trainer: Trainer, verdict: Verdict) -> list[int]:
    """The rolled-back content stays live while the trainer continues to train."""
    store = WeightStore(loop.root, POLICY)
    live = store.live()
    if live is None or live.version < 2:
        return []
    pinned = store.rollback(by="a test", why="to see it hold")
    count = len(trainer.messages())
    rows = loop.answers()
    wait_until(lambda: len(trainer.messages()) >= count + 3 or not trainer.alive, PATIENCE)
    now = store.live()
    loop.watch.look()
    held = now is not None and now.version == pinned.version
    verdict.require(held, "undone", f"a rollback to {pinned} is followed by {now}")
    went_on = wait_until(lambda: loop.answers() > rows + 20, PATIENCE)
    verdict.require(went_on, "stuck", "clients wait while a rollback pins the policy")
    store.resume()
    loop.wait_for_version(pinned.version, PATIENCE)
    verdict.count("rollbacks")
    # a copy that lost to a publication keeps its number, and the next one went live
    weights = loop.watch.versions[pinned.version].weights
    return [number for number, one in loop.watch.versions.items() if one.weights == weights]


def _orphan(loop: Loop, first: Trainer, verdict: Verdict) -> Trainer:
    """The first trainer is stopped until the next one has the lease; then it continues."""
    stop_between(loop, first)
    second = loop.start_trainer(lease_wait="60")
    before = loop.live_version()
    took = loop.wait_for_version(before, PATIENCE)
    verdict.require(took, "stuck", f"nobody follows a trainer that stands still: {second.err}")
    first.send(signal.SIGCONT)
    ended = first.wait(PATIENCE)
    verdict.require(ended, "two", "an orphan that has lost its lease goes on")
    if not ended:
        first.kill()
    else:
        status = first.exit_status()
        verdict.require(status == 3, "status", f"an orphan ends with {status}")
    loop.watch.look()
    verdict.require(second.alive, "ended", f"by itself: {second.complaint()}")
    verdict.count("orphans")
    return second


SCENARIO = Scenario(
    name="two_trainers",
    law="one trainer of a policy at a time: a second one is refused by name, an orphan publishes "
    "nothing; and a rollback holds",
    unit="turns",
    quick=1,
    long=6,
    planted=1,
    run=run,
    seconds=60.0,
)
