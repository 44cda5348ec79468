"""`headrace publish` next to a trainer, interrupted at a call that changes files of the store.

The first publication runs undisturbed and records its calls. Later ones are interrupted just before
or after one of these calls, most often one that writes a version.

The publisher is killed there, or stopped (perhaps while it holds the store's lock), or its disk is
full from then on. It publishes the first weights again, which can be distinguished from the
trainer's. Logging continues meanwhile, and the trainer then continues from the live version.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path

from tests.faults.loop import file_call_strikes
from tests.faults.loop.ledger import WeightFolder
from tests.faults.loop.running_loop import POLICY, Loop, Trainer, wait_until
from tests.faults.scenario import Scenario, Trial, Verdict

HOW = ("killed", "stopped", "full")
Strike = tuple[int, bool]
"""The number of a call, and whether it is done by then."""
PATIENCE = 60.0
STOPPED_SECONDS = 0.5


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    with Loop(trial) as loop:
        trainer = loop.start_trainer()
        verdict.require(loop.wait_for_version(2), "stuck", "no version before any fault")
        first = WeightFolder(loop.root, POLICY).manifest(1).candidate
        calls = _calls(loop, first)
        strikes = {how: iter(_places(loop, calls)) for how in HOW}
        for number in range(trial.size):
            if not trial.in_time or trial.is_caught(verdict):
                break
            how = HOW[number % len(HOW)]
            strike = next(strikes[how], None)
            if strike is None:  # all of them were
                break
            _publish(loop, first, how, strike, verdict)
            version = loop.live_version()
            came = loop.wait_for_version(version + 1, PATIENCE)
            verdict.require(came, "stuck", f"no version follows {version}: {trainer.complaint()}")
            verdict.require(trainer.alive, "ended", f"by itself: {trainer.complaint()}")
        weights = loop.watch.versions[1].weights
        again = [n for n, one in loop.watch.versions.items() if one.weights == weights]
        verdict.counts["published"] = len(again) - 1
        loop.judge(verdict, goes_back=again)
    return verdict


def _calls(loop: Loop, digest: str) -> list[str]:
    """The paths of the calls of an undisturbed publication."""
    noted = loop.folder / "calls"
    publisher = loop.forks.start(*_words(loop, digest), strike={"nth": 0, "noted": str(noted)})
    if not publisher.wait(PATIENCE):
        raise RuntimeError(f"a publication does not end: {publisher.complaint()}")
    loop.watch.look()
    return file_call_strikes.noted_calls(noted)


def _places(loop: Loop, calls: list[str]) -> list[Strike]:
    """All interruptions under the root, in random order; two thirds at calls for a version."""
    inside, others = list[Strike](), list[Strike]()
    for nth, path in enumerate(calls, 1):
        found = inside if f"weights/{POLICY}/versions/" in path else others
        if str(loop.root) in path:
            found += [(nth, False), (nth, True)]
    loop.chance.shuffle(inside)
    loop.chance.shuffle(others)
    places = list[Strike]()
    while inside or others:
        places += [*inside[:2], *others[:1]]
        del inside[:2], others[:1]
    return places


def _words(loop: Loop, digest: str) -> tuple[str, ...]:
    return ("publish", digest, "--no-gate", "--wait", "none", "--root", str(loop.root))


def _publish(loop: Loop, digest: str, how: str, strike: Strike, verdict: Verdict) -> None:
    """An interrupted publication; after its last call it may still complete."""
    nth, after = strike
    order = {"nth": nth, "after": after, "how": how}
    publisher = loop.forks.start(*_words(loop, digest), strike=order)
    struck = wait_until(lambda: not publisher.alive or _is_stopped(publisher), PATIENCE)
    verdict.require(struck, "stuck", f"a publisher waits: {publisher.complaint()}")
    if _is_stopped(publisher):
        verdict.count("stopped")
        loop.watch.look()
        threading.Event().wait(STOPPED_SECONDS)
        status = loop.collector.post("/v1/instances")[0]
        verdict.require(status == 201, "refused", f"an event is answered with {status}")
        publisher.send(signal.SIGCONT)
        verdict.require(publisher.wait(PATIENCE), "stuck", "a publisher does not go on")
    publisher.kill()
    ended = publisher.exit_status()
    verdict.count("killed" if ended is None else f"status_{ended}")
    known = (None, 0, 1, 6)  # 1: its disk is full, or the trainer was faster; 6: it is pinned
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
