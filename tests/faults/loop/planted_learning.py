"""Broken builds of the reader, the follower and `headrace up`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import headrace.up
from policy.algorithms.learner import Learner
from policy.training.checkpoint_files import CheckpointFiles
from policy.training.follower_state import FollowerState
from policy.training.retrying import Retrying
from policy.training.train_live import _Follower
from storage.errors import WeightsDamaged
from storage.reading import loading
from storage.reading.ledger import Ledger
from storage.reading.position import Position
from storage.reading.retries import Retries
from storage.reading.untrained_rows import UntrainedRows
from tests.faults.mutants import Patch, mutant

# --- the follower ------------------------------------------------------------------------------


@mutant(trainer_kills="trained_twice")
def stale_position_saved(patch: Patch) -> None:
    """Every other update saves the reader's position from before the update."""
    note = patch.original(FollowerState, "_note_position")
    calls = 0

    def stale(self: FollowerState) -> None:
        nonlocal calls
        calls += 1
        before = self._position
        note(self)
        if calls % 2 == 0 and before:
            self._position = before

    patch.replace(FollowerState, "_note_position", stale)


@mutant(publish_kills="off_chain")
def published_before_its_checkpoint(patch: Patch) -> None:
    """A version goes live, and then its checkpoint is written."""
    go_live, save = (
        patch.original(FollowerState, "_go_live"),
        patch.original(FollowerState, "_save"),
    )
    waiting: list[str | None] = []

    def later(self: FollowerState, candidate: str | None) -> None:
        waiting.append(candidate)

    def first(self: FollowerState, candidate: str) -> None:
        go_live(self, candidate)
        while waiting:
            save(self, waiting.pop(0))

    patch.replace(FollowerState, "_save", later)
    patch.replace(FollowerState, "_go_live", first)


@mutant(trainer_kills="lineage")
def whole_parts_claimed(patch: Patch) -> None:
    """A lineage claims all rows of the parts of which some were trained on."""

    def none(
        self: UntrainedRows, lineage: Mapping[str, Any], position: Mapping[str, Any]
    ) -> dict[str, list[list[int]]]:
        return {}

    patch.replace(UntrainedRows, "settle", none)


@mutant(trainer_kills="unnamed")
def left_out_not_counted(patch: Patch) -> None:
    """Rows that the algorithm cannot use are skipped and not counted."""
    learn = patch.original(Learner, "learn")

    def silent(
        self: Learner, used: Any, left_out: Mapping[str, int], *given: Any
    ) -> dict[str, float]:
        metrics: dict[str, float] = learn(self, used, {}, *given)
        return metrics

    patch.replace(Learner, "learn", silent)


@mutant(damaged_shards="stuck")
def all_steps_waited_for(patch: Patch) -> None:
    """An update always waits for its full number of steps."""
    patch.replace(_Follower, "_due", lambda self: False)


@mutant(damaged_checkpoints=("stuck", "ended"))
def damaged_checkpoint_in_the_way(patch: Patch) -> None:
    """Each trainer that finds a damaged checkpoint exits."""

    def refuse(self: CheckpointFiles, path: Path, why: str) -> None:
        raise WeightsDamaged(why)

    patch.replace(CheckpointFiles, "set_aside", refuse)


@mutant(starved="ended")
def errors_not_waited_out(patch: Patch) -> None:
    """An error of the file system ends the trainer."""

    def once(self: Retrying, what: str, action: Callable[[], Any]) -> Any:
        return action()

    patch.replace(Retrying, "do", once)


# --- the reader --------------------------------------------------------------------------------


@mutant(starved="left_behind")
def shard_given_up_at_once(patch: Patch) -> None:
    """The reader does not retry a shard that is temporarily unreadable."""
    patch.replace(Retries, "waits", lambda self, key: True)
    patch.replace(Retries, "next_due", lambda self: None)


@mutant(damaged_shards=("trained_damage", "ended", "unnamed"))
def digest_not_checked_on_reading(patch: Patch) -> None:
    """A shard is decoded and trained on without a check of its digest."""
    patch.replace(loading, "check_digest", lambda shard, content: None)


@mutant(trainer_kills=("unnamed", "unread", "lineage"))
def rows_inside_forgotten(patch: Patch) -> None:
    """A position counts rows that still wait in the reader as delivered."""
    of = patch.original(Position, "of").__func__

    def poorer(cls: type[Position], *, taken: Ledger, **given: Any) -> Position:
        for stage in ("joiner", "window", "cutter"):
            given[stage] = []
        found: Position = of(cls, taken=taken, **given)
        return found

    patch.replace(Position, "of", classmethod(poorer))


@mutant(trainer_kills=("trained_twice", "lineage"))
def parts_delivered_twice(patch: Patch) -> None:
    """A reader that resumes from a position reads the latest part of each stream again."""
    taken = patch.original(Position, "taken")

    def less(self: Position) -> Ledger:
        ledger: Ledger = taken(self)
        last = Ledger()
        for stream, ranges in ledger.streams().items():
            newest: npt.NDArray[np.int64] = np.array([ranges.ranges()[-1][1]], np.int64)
            last.add(stream, newest)
        return ledger.without(last)

    patch.replace(Position, "taken", less)


# --- headrace up -------------------------------------------------------------------------------


@mutant(trainer_under_up="collector_ended")
def up_gives_up_with_its_trainer(patch: Patch) -> None:
    """A trainer that has died five times stops `headrace up`."""
    watch = patch.original(headrace.up.Up, "watch")
    revive = patch.original(headrace.up.Training, "revive")

    class GivenUp(Exception):
        """Not started again."""

    def impatient(self: headrace.up.Training) -> None:
        if self.restarts >= 5 and self.ended:
            raise GivenUp
        revive(self)

    def fragile(self: headrace.up.Up, stop: Any) -> bool:
        try:
            return bool(watch(self, stop))
        except GivenUp:
            return False

    patch.replace(headrace.up.Training, "revive", impatient)
    patch.replace(headrace.up.Up, "watch", fragile)
