"""`headrace publish` beside a trainer, struck at a call that changes files.

It is killed there, or stopped, perhaps while it holds the store's lock, or its disk is full from
then on. What it publishes are the first weights again: a publication that everybody can tell from
the trainer's. Logging goes on meanwhile, the trainer goes on afterwards, from whatever is live.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path

from tests.faults.loop.ledger import WeightStore
from tests.faults.loop.running import POLICY, Loop, Trainer, wait_until
from tests.faults.scenario import Scenario, Trial, Verdict

HOW = ("killed", "stopped", "full")
CALLS = 24  # of a publication, about
PATIENCE = 60.0
STOPPED_SECONDS = 0.5


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    with Loop(trial) as loop:
        trainer = loop.start_trainer()
        verdict.require(loop.wait_for_version(2), "stuck", "no version before any fault")
        first = WeightStore(loop.root, POLICY).manifest(1).candidate
        for number in range(trial.size):
            if not trial.in_time or trial.is_caught(verdict):
                break
            _publish(loop, first, HOW[number % len(HOW)], verdict)
            version = loop.live_version()
            came = loop.wait_for_version(version + 1, PATIENCE)
            verdict.require(came, "stuck", f"no version follows {version}: {trainer.complaint()}")
            verdict.require(trainer.alive, "ended", f"by itself: {trainer.complaint()}")
        weights = loop.watch.versions[1].weights
        again = [n for n, one in loop.watch.versions.items() if one.weights == weights]
        verdict.counts["published"] = len(again) - 1
        loop.judge(verdict, goes_back=again)
    return verdict


def _publish(loop: Loop, digest: str, how: str, verdict: Verdict) -> None:
    """A publication that is struck; with the last of its calls done it comes to its end."""
    strike = {"nth": loop.chance.randint(1, CALLS), "after": loop.chance.random() < 0.5}
    words = ("publish", digest, "--no-gate", "--wait", "none", "--root", str(loop.root))
    publisher = loop.nursery.start(*words, strike={**strike, "how": how})
    struck = wait_until(lambda: not publisher.alive or _is_stopped(publisher), PATIENCE)
    verdict.require(struck, "stuck", f"a publisher waits: {publisher.complaint()}")
    if _is_stopped(publisher):
        verdict.count("stopped")
        threading.Event().wait(STOPPED_SECONDS)
        status = loop.collector.post("/v1/instances")[0]
        verdict.require(status == 201, "refused", f"an event is answered with {status}")
        publisher.send(signal.SIGCONT)
        verdict.require(publisher.wait(PATIENCE), "stuck", "a publisher does not go on")
    publisher.kill()
    ended = publisher.exit_status()
    verdict.count("killed" if ended is None else f"status_{ended}")
    known = (None, 0, 1)  # 1: its disk is full, or the trainer was faster
    verdict.require(ended in known, "status", f"{how}: {ended}: {publisher.complaint()}")
    loop.watch.look()


def _is_stopped(process: Trainer) -> bool:
    try:
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state == "T"


SCENARIO = Scenario(
    name="publishers",
    law="a publisher that is killed, stopped or without room leaves a whole version or none, stops "
    "no logging, and the trainer goes on",
    unit="publications",
    quick=12,
    long=90,
    planted=9,
    run=run,
    seconds=60.0,
)
