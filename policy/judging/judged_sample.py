"""A bounded sample of the judged episodes for the estimates, and work done ahead by threads.

    sample = Sample()
    for block, target in ahead(work, batches):
        sample.add(block, units)
    sample.taken(excluded).steps          # all episodes, or a share of them by a hash of the unit

The judgement reads every episode once and keeps sums (policy.ope.judgement). The estimates need
their episodes in memory: above `SAMPLE_CELLS` numbers they get half of the units, then half of
these, and so on. Each estimate reports the number of its episodes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from policy.judging.judged_log import JUDGED_BY, PASS_PROB, JudgedBlock
from storage.experience.sample_batch import (
    ACTION_LOGP,
    ORDINAL,
    REWARDS,
    SampleBatch,
    concat_samples,
)
from storage.reading.holdout import hash_fractions

IntArray = npt.NDArray[np.int64]
Given = TypeVar("Given")
Made = TypeVar("Made")

SAMPLE_CELLS = 1 << 24  # numbers: 128 MB
SALT = "estimates"
MOST_THREADS = 8


@dataclass(frozen=True, eq=False)
class Taken:
    """n complete episodes, sorted by unit; their S steps follow each other."""

    steps: SampleBatch
    flat: npt.NDArray[np.float32]  # (S, D)
    lengths: IntArray  # (n,)
    units: IntArray  # (n,)
    excluded: Mapping[str, int]  # why -> episodes

    @property
    def pass_prob(self) -> npt.NDArray[np.float64]:
        starts = np.cumsum(self.lengths) - self.lengths
        chances: npt.NDArray[np.float64] = np.asarray(self.steps[PASS_PROB], np.float64)[starts]
        return chances


class Sample:
    """Collects blocks, and drops half of the units whenever there are too many."""

    def __init__(self) -> None:
        self._held: list[tuple[Taken, npt.NDArray[np.float64]]] = []  # with a hash of each episode
        self._share, self._cells, self._episodes = 1.0, 0, 0

    def add(self, block: JudgedBlock, units: IntArray | None) -> None:
        """Add a block. `units` (n,) are the numbers of the episodes' units; None: no units."""
        n = len(block.lengths)
        if not n:
            return
        if units is None:
            units = np.arange(self._episodes, self._episodes + n)
        self._episodes += n
        names = [name for name in block.steps if name.partition(".")[0] in _KEPT]
        given = Taken(block.steps.select(names), block.flat, block.lengths, units, {})
        self._hold(given, hash_fractions(SALT, block.names))
        while self._cells > SAMPLE_CELLS:
            self._share /= 2
            held, self._held, self._cells = self._held, [], 0
            for taken, fractions in held:
                self._hold(taken, fractions)

    def taken(self, excluded: Mapping[str, int]) -> Taken | None:
        """The sample; None if it is empty. `excluded` (reason -> episodes) is passed through."""
        if not self._held:
            return None
        lengths = np.concatenate([one.lengths for one, _ in self._held])
        units = np.concatenate([one.units for one, _ in self._held])
        order = np.argsort(units, kind="stable")
        starts = np.cumsum(lengths) - lengths
        sizes = lengths[order]
        ends = np.cumsum(sizes)
        rows = np.repeat(starts[order] - (ends - sizes), sizes) + np.arange(int(sizes.sum()))
        steps = concat_samples([one.steps for one, _ in self._held])
        flat = np.concatenate([one.flat for one, _ in self._held])
        if not (np.diff(rows) == 1).all():
            steps, flat = steps.take(rows), flat[rows]
        return Taken(steps, flat, sizes, units[order], dict(excluded))

    def _hold(self, given: Taken, fractions: npt.NDArray[np.float64]) -> None:
        keep = fractions < self._share
        if not keep.any():
            return
        if not keep.all():
            rows = np.repeat(keep, given.lengths)
            given = Taken(
                given.steps.take(rows),
                given.flat[rows],
                given.lengths[keep],
                given.units[keep],
                {},
            )
            fractions = fractions[keep]
        self._held.append((given, fractions))
        self._cells += given.flat.size * 2 + given.steps.count * 8


_KEPT = ("actions", REWARDS, ACTION_LOGP, "ended", PASS_PROB, ORDINAL, *JUDGED_BY)


def ahead(work: Callable[[Given], Made], items: Iterable[Given]) -> Iterator[Made]:
    """Yield `work(item)` of each item, in order. Threads compute a few items ahead."""
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    waiting: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(threads, "headrace-judge") as pool:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
