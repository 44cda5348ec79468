"""A byte flipped in the trainer's latest checkpoint while no trainer runs.

It is set aside, and the next trainer continues from the previous one, or from the live version; a
version whose checkpoint is lost is marked as off the chain.
"""

from __future__ import annotations

from policy.training.checkpoint_files import CheckpointFiles
from tests.faults.loop.damaged_shards import flip
from tests.faults.loop.running_loop import POLICY, Loop
from tests.faults.scenario import Scenario, Trial, Verdict

PATIENCE = 60.0


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    with Loop(trial) as loop:
        _learn(loop, verdict)
        folder = loop.root / "weights" / POLICY / "checkpoints"
        for _ in range(trial.size):
            if not trial.in_time or trial.is_caught(verdict):
                break
            found = CheckpointFiles(folder, 0).found()
            verdict.require(bool(found), "no_checkpoint", "there is none to damage")
            both = found[: loop.chance.choice((1, 1, 2))]
            for path in both:
                flip(path, loop.chance.randrange(path.stat().st_size))
            verdict.count("damaged_checkpoints", len(both))
            if not _learn(loop, verdict):
                break
        loop.judge(verdict, loses_checkpoints=True)
    verdict.counts["off_chain"] = len(loop.watch.off_chain)
    return verdict


def _learn(loop: Loop, verdict: Verdict) -> bool:
    """Whether a trainer makes versions; then it is killed."""
    trainer, before = loop.start_trainer(), loop.live_version()
    came = loop.wait_for_version(before + loop.chance.randrange(3), PATIENCE)
    verdict.require(trainer.alive, "ended", f"by itself: {trainer.complaint()}")
    verdict.require(came, "stuck", f"no version after {before}: {trainer.complaint()}")
    trainer.kill()
    loop.watch.look()
    return came


SCENARIO = Scenario(
    name="damaged_checkpoints",
    law="a damaged checkpoint is set aside: learning goes on from the one before or from what is "
    "live, and every lineage stays true",
    unit="turns",
    quick=4,
    long=40,
    planted=1,
    run=run,
    seconds=45.0,
)
