"""A follower in its own process, which records its training rows, and dies at a given place.

    python -m tests.policy.training.dying_follower

Each line on stdin is a job, which is answered by its process id; or a process id, which is answered
by its exit status, or a signal's number below zero, once it has ended. A job is forked from this
process, which has only loaded the modules: importing torch takes seconds, and there are many kills.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch._dynamo  # noqa: F401  a second that the first optimizer of a process takes

from policy.algorithms.ppo import PPO, PPOConfig
from policy.networks.policy import Policy
from policy.training import train_live
from policy.training.checkpoint_files import CheckpointFiles
from policy.training.follower_state import FollowerState
from policy.training.settings import FollowSettings
from policy.training.train_live import follow
from storage.experience.sample_batch import SampleBatch
from storage.reading.untrained_rows import UntrainedRows
from storage.weights import lease
from storage.weights import store as store_module
from tests.policy.training.live_log import SPEC

__all__ = ["main"]

Patches = list[tuple[Any, str, Callable[..., Any]]]


@dataclasses.dataclass
class Job:
    """The job on a line."""

    root: str
    updates: int
    kill: list[Any] | None = None  # [after how many updates of this process, place]
    signal: int = signal.SIGKILL
    lease_seconds: float = 60.0
    lease_wait: float = 0.0
    planted: str = ""
    asked: int = 60  # an idle end, in case rows were lost
    made: int = 0
    files: int = 0

    def die(self, place: str) -> None:
        if [self.made, place] == self.kill:
            self.kill = None
            os.kill(os.getpid(), self.signal)


def run(job: Job) -> None:
    """Follow for so many updates."""

    class Recording(PPO):
        def update(self, batch: SampleBatch, rng: np.random.Generator, *rest: Any) -> Any:
            names = (batch["ordinal"].tolist(), batch["t"].tolist())
            rows = sorted(zip(*names, strict=True))
            metrics = super().update(batch, rng, *rest)
            job.made += 1
            fd = os.open(f"{job.root}/record", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(fd, json.dumps({"trained": self.trained, "rows": rows}).encode() + b"\n")
            os.close(fd)
            job.die("learned")
            return metrics

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class RecordingConfig(PPOConfig):
        def build(self, policy: Policy) -> PPO:
            return Recording(policy, self)

    RecordingConfig.__name__ = "PPOConfig"  # as its checkpoints say
    for owner, name, place in (
        (store_module.WeightFolder, "add_candidate", "candidate"),
        (CheckpointFiles, "save", "checkpoint"),
        (store_module.WeightFolder, "_number", "promoted"),
        (store_module.WeightFolder, "publish", "published"),
    ):
        _then_die(owner, name, job, place)
    if job.planted:
        PLANTED[job.planted](job)
    left = iter(range(job.asked))
    lease.LEASE_SECONDS = job.lease_seconds
    follow(
        job.root,
        "default",
        RecordingConfig(epochs=1),
        settings=FollowSettings(steps_per_update=100, lease_wait=job.lease_wait),
        spec=SPEC,
        stop=lambda: job.made >= job.updates or next(left, None) is None,
    )


def _then_die(owner: Any, name: str, job: Job, place: str) -> None:
    sound = vars(owner)[name]

    @functools.wraps(sound)
    def then(*positional: Any, **named: Any) -> Any:
        result = sound(*positional, **named)
        job.die(place)
        return result

    setattr(owner, name, then)


# --- broken builds; a name that is not there any more is an error --------------------------------


def stale_position(job: Job) -> None:
    """Every other update saves the reader's position from before the update."""
    sound = vars(FollowerState)["_note_position"]

    def broken(self: FollowerState) -> None:
        if job.made % 2 == 0 or not self._position:
            sound(self)

    FollowerState._note_position = broken  # type: ignore[method-assign]


def published_first(job: Job) -> None:
    """A version goes live before its checkpoint is written."""
    save, live = vars(FollowerState)["_save"], vars(FollowerState)["_go_live"]

    def late(self: FollowerState, candidate: str) -> None:
        live(self, candidate)
        job.die("live")
        save(self, candidate)

    FollowerState._save = lambda self, candidate: None  # type: ignore[method-assign]
    FollowerState._go_live = late  # type: ignore[method-assign]


def claims_rows_in_the_reader(job: Job) -> None:
    """A lineage lists whole parts, although some of their rows are still in the reader."""
    if "settle" not in vars(UntrainedRows):
        raise RuntimeError("UntrainedRows has no settle: the planted build must follow the code")
    UntrainedRows.settle = lambda self, lineage, position: {}  # type: ignore[method-assign]


def never_due(job: Job) -> None:
    """An update waits for its steps, even if a collector reports waiting clients."""
    if "_due" not in vars(train_live._Follower):
        raise RuntimeError("_Follower has no _due: the planted build must follow the code")
    train_live._Follower._due = lambda self: False  # type: ignore[method-assign]


def no_fencing(job: Job) -> None:
    """A lease prevents a second start, but later publications do not check its number."""
    for module in (lease, store_module):
        if "require_fence" not in vars(module):
            raise RuntimeError("no require_fence: the planted build must follow the code")
        module.require_fence = lambda files, fence: None


PLANTED = {
    one.__name__: one
    for one in (stale_position, published_first, claims_rows_in_the_reader, never_due, no_fencing)
}


def main() -> None:
    """Answer lines until stdin ends."""
    for line in sys.stdin:
        job = json.loads(line)
        if isinstance(job, int):
            print(os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]), flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            status = 1
            try:
                run(Job(**job))
                status = 0
            except BaseException:  # reported, and never raised into the parent's loop
                traceback.print_exc()
            finally:
                os._exit(status)


if __name__ == "__main__":
    main()
