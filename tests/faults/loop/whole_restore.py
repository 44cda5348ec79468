"""A root is put back from a copy: journal, shards, readers and weights, while all stand still.

What came after the copy is gone, from the weights too; what is there is trained on once. Numbers of
versions and generations that anybody saw are not given again: they go on (`numbers/` is no part of
the copy). In every other turn the weights alone are put back, and the trainer's claims with them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.faults.loop.running import Loop
from tests.faults.scenario import Scenario, Trial, Verdict

WHOLE = ("journal", "shards", "readers", "weights", "policies")
PATIENCE = 90.0


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    with Loop(trial) as loop:
        for number in range(trial.size):
            if not trial.in_time or trial.is_caught(verdict):
                break
            _turn(loop, WHOLE if number % 2 == 0 else ("weights",), verdict)
            verdict.count("restores")
        loop.judge(verdict)
    return verdict


def _turn(loop: Loop, names: tuple[str, ...], verdict: Verdict) -> None:
    """Train, copy, train on, put the copy back."""
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


def _train(loop: Loop, verdict: Verdict) -> None:
    """Until two more versions are live; then all stand still."""
    trainer, before = loop.start_trainer(), loop.live_version()
    for _ in range(2):
        came = loop.wait_for_version(before, PATIENCE)
        verdict.require(came, "stuck", f"no version after {before}: {trainer.complaint()}")
        before = loop.live_version()
    trainer.kill()
    loop.watch.look()
    loop.end_collector()


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """These folders, in the place of what is there."""
    for name in names:
        shutil.rmtree(target / name, ignore_errors=True)
        if (source / name).exists():
            shutil.copytree(source / name, target / name)


SCENARIO = Scenario(
    name="whole_restore",
    law="after a restore no number names a second content, and what is there is trained on once",
    unit="restores",
    quick=2,
    long=20,
    planted=2,
    run=run,
    seconds=60.0,
)
