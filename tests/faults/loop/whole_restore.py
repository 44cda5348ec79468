"""A root is restored from a copy: journal, shards, readers and weights while everything is stopped,
or its weights alone under a running loop.

Everything after the copy is lost, also from the weights; the existing rows are trained on once.
Numbers of versions and generations that were visible are not given again (the copy does not include
`numbers/`). In every other turn only the weights are restored, with the trainer's lineage. Each
turn ends with weights that are restored under a running loop, while its clients are held by a later
version and its trainer may be killed: a version with an unused number follows.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from storage.declarations.held_policies import held_version
from tests.faults.loop.running_loop import POLICY, Loop, stop_between, wait_until
from tests.faults.scenario import Scenario, Trial, Verdict

WHOLE = ("journal", "shards", "readers", "weights", "policies")
PATIENCE = 90.0
RESTORED_SECONDS = 45.0  # a restored lease has expired by then


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    with Loop(trial) as loop:
        for number in range(trial.size):
            if not trial.in_time or trial.is_caught(verdict):
                break
            _turn(loop, WHOLE if number % 2 == 0 else ("weights",), verdict)
            verdict.count("restores")
            _under_the_loop(loop, verdict, killed=number % 2 == 1)
        loop.judge(verdict)
    return verdict


def _turn(loop: Loop, names: tuple[str, ...], verdict: Verdict) -> None:
    """Train, copy, continue training, restore the copy."""
    _train(loop, verdict)
    copy = loop.folder / "copy"
    _copy(loop.root, copy, names)
    loop.collector.restart()
    _train(loop, verdict)
    if names == WHOLE:
        loop.forget_clients()
    _copy(copy, loop.root, names)
    shutil.rmtree(copy)
    loop.watch.restored()
    loop.collector.restart()


def _under_the_loop(loop: Loop, verdict: Verdict, *, killed: bool) -> None:
    """Restore the weights of two versions ago, while clients wait for the next one."""
    trainer, copy = loop.start_trainer(), loop.folder / "copy"
    before = loop.live_version()
    came = loop.wait_for_version(before, PATIENCE)
    verdict.require(came, "stuck", f"no version after {before}: {trainer.complaint()}")
    stop_between(loop, trainer)
    _copy(loop.root, copy, ("weights",))
    trainer.send(signal.SIGCONT)
    for _ in range(2):
        before = loop.live_version()
        came = loop.wait_for_version(before, PATIENCE)
        verdict.require(came, "stuck", f"no version after {before}: {trainer.complaint()}")
    stop_between(loop, trainer)
    wait_until(lambda: held_version(loop.root, POLICY) == loop.live_version(), PATIENCE)
    last = loop.live_version()
    loop.watch.look()
    weights = loop.root / "weights"
    weights.rename(loop.folder / "gone")  # at once: the collector looks at it, and writes into it
    (copy / "weights").rename(weights)
    shutil.rmtree(loop.folder / "gone")
    loop.watch.restored()
    if killed:
        trainer.kill()
        trainer = loop.start_trainer(lease_wait="90")
    else:
        trainer.send(signal.SIGCONT)
    came = loop.wait_for_version(last, RESTORED_SECONDS)
    text = f"no version after {last}, which clients wait for: {trainer.complaint()}"
    verdict.require(came, "stuck", text)
    trainer.kill()
    loop.watch.look()


def _train(loop: Loop, verdict: Verdict) -> None:
    """Wait for two more live versions, then stop everything."""
    trainer, before = loop.start_trainer(), loop.live_version()
    for _ in range(2):
        came = loop.wait_for_version(before, PATIENCE)
        verdict.require(came, "stuck", f"no version after {before}: {trainer.complaint()}")
        before = loop.live_version()
    trainer.kill()
    loop.watch.look()
    loop.end_collector()


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """Replace the existing folders by these."""
    for name in names:
        shutil.rmtree(target / name, ignore_errors=True)
        if (source / name).exists():
            shutil.copytree(source / name, target / name)


SCENARIO = Scenario(
    name="whole_restore",
    law="after a restore, also under a running loop, no number names a second content, what is "
    "there is trained on once, and versions go on",
    unit="restores",
    quick=2,
    long=20,
    planted=2,
    run=run,
    seconds=60.0,
)
