"""What a follower says when learning makes no progress: in its log, and on the status page.

    hints.read(batch)                            # every row that was read
    hints.updated(0, {"not_on_policy": 256})     # after every update

- Why an update had no row to learn from. This is logged at the first of several such updates in
  succession, then at the second, fourth, eighth, ...
- After `PATIENCE` updates the episodes that ended in the later half of them are compared with those
  before. If the mean returns differ by less than two standard errors, the return has not moved.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from statistics import fmean, variance

import numpy as np

from storage.experience.sample_batch import (
    AGENT_ID,
    EPISODE_ORDINAL,
    REWARDS,
    STREAM,
    TERMINATEDS,
    TRUNCATEDS,
    SampleBatch,
    T,
)
from storage.wording import counted

log = logging.getLogger("headrace.trainer")

PATIENCE = 100
_EPISODES = 5  # in each half, at least
_OPEN = 10_000  # episodes whose sums are kept


class Hints:
    """The hints of one follower; `text` is the current one, "" without."""

    columns = (REWARDS, TERMINATEDS, TRUNCATEDS, AGENT_ID)

    def __init__(self) -> None:
        self._without, self._why = 0, ""
        self._open: dict[tuple[object, ...], float] = {}
        self._halves: tuple[list[float], list[float]] = ([], [])
        self._updates, self._still = 0, ""

    @property
    def text(self) -> str:
        return self._why or self._still

    def read(self, batch: SampleBatch) -> None:
        """Add rewards of clients to their episodes, unless the first step was missed."""
        names = (STREAM, EPISODE_ORDINAL, AGENT_ID)
        keys = zip(*(batch[name].tolist() for name in names), strict=True)
        over = (batch[TERMINATEDS] | batch[TRUNCATEDS]).tolist()
        mine = np.asarray(batch["source"] == "on_policy", np.bool_).tolist()
        rows = zip(keys, batch[T].tolist(), batch[REWARDS].tolist(), over, mine, strict=True)
        for key, t, reward, ended, counts in rows:
            if counts and t == 0:
                self._open[key] = 0.0
            if key not in self._open:
                continue
            self._open[key] += reward
            if ended:
                self._halves[1].append(self._open.pop(key))
        for key in list(self._open)[:-_OPEN]:
            del self._open[key]

    def updated(self, rows: int, left_out: Mapping[str, int]) -> None:
        """Note an update with its number of rows, and why others were left out."""
        if rows:
            self._without, self._why = 0, ""
        else:
            self._without += 1
            reasons = ", ".join(f"{why}: {number}" for why, number in left_out.items())
            self._why = (
                f"the last {counted(self._without, 'update')} had no row to learn from"
                f" (left out: {reasons or 'none'})"
            )
            if self._without & (self._without - 1) == 0:
                log.warning("%s", self._why)
        self._updates += 1
        if self._updates % (PATIENCE // 2) == 0:
            self._compare()

    def _compare(self) -> None:
        earlier, later = self._halves
        self._halves = (later, [])
        if min(len(earlier), len(later)) < _EPISODES:
            return
        before, now = fmean(earlier), fmean(later)
        error = math.sqrt(variance(earlier) / len(earlier) + variance(later) / len(later))
        if abs(now - before) > 2 * error:
            self._still = ""
            return
        self._still = (
            f"the return has not moved for {PATIENCE} updates: {now:.5g} per episode "
            f"(n={len(later)}), before {before:.5g} (n={len(earlier)}); if more can be earned, "
            'see "When nothing improves" in docs/training.md'
        )
        log.warning("%s", self._still)
