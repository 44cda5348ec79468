"""Fold policies: the same training on the first blocks of the rows, so that later ones can judge.

    for blocks in blocks_in_order(lineage, 5):      # 1, 1 to 2, ... 1 to 5
        ...                                         # train on up_to(blocks, manifest)

Fold policy i is trained on blocks 1 to i of k, and judges block i + 1. The blocks are in the order
of the rows, so that a bound holds; with a cluster, they are of a hash of the unit, so that a unit
is in one block, and the interval is approximate. Only the policy that is trained on all rows is
ever published (policy.judging.fold_policies).

Each of k folds judged by a policy of all others would use every row. But where actions are nearly
alike, these policies follow the chance of the rows that judge the others, and Student's t called
an equal candidate better in 9 % of logs (make judge has such logs), so there are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from storage.experience.hashed import SPLIT
from storage.experience.range_set import RangeSet
from storage.experience.sample_batch import SampleBatch
from storage.reading.holdout import Reserve, hash_fractions
from storage.reading.ledger import Ranges

MOST_BLOCKS = 50

Streams = Mapping[str, RangeSet]


def require_blocks(blocks: int, *, held_out: bool) -> None:
    """Raise ValueError for an invalid number of blocks, or if rows are held out as well."""
    if not 2 <= blocks <= MOST_BLOCKS:
        raise ValueError(f"cross_fit: expected 2 to {MOST_BLOCKS} blocks, got {blocks}")
    if held_out:
        raise ValueError("cross_fit: expected no evaluation_share, as each block judges")


@dataclass(frozen=True)
class FirstBlocks:
    """Chooses the rows of blocks 1 to `number` by a hash of the unit. Picklable."""

    reserve: Reserve  # for its unit
    number: int
    blocks: int

    def __call__(self, batch: SampleBatch) -> npt.NDArray[np.bool_]:
        fractions = hash_fractions(SPLIT, self.reserve.units(batch))
        return np.asarray(fractions * self.blocks < self.number)


def blocks_in_order(trained: Streams, blocks: int) -> Iterator[dict[str, RangeSet]]:
    """The ordinals of blocks 1 to i, for each i from 1 to `blocks`, from what was trained on.

    The blocks have equally many ordinals; streams follow each other by their names. Each result
    begins at ordinal 0, so that it includes ordinals between those trained on.
    """
    total = sum(len(ranges) for ranges in trained.values())
    for block in range(1, blocks + 1):
        left, found = round(total * block / blocks), {}
        for stream, ranges in sorted(trained.items()):
            if left <= 0:
                break
            last = _nth(ranges, min(left, len(ranges)))
            found[stream] = RangeSet([(0, last)])
            left -= len(ranges)
        yield found


def up_to(blocks: Streams, given: Mapping[str, Ranges] | None) -> dict[str, Ranges]:
    """The blocks as a manifest, restricted to a given one."""
    if given is None:
        return dict(blocks)
    found: dict[str, Ranges] = {}
    for stream, ranges in given.items():
        pairs = ranges.ranges() if isinstance(ranges, RangeSet) else ranges
        (_, last), *_ = blocks[stream].ranges() if stream in blocks else [(0, -1)]
        found[stream] = [(int(a), min(int(b), last)) for a, b in pairs if int(a) <= last]
    return found


def _nth(ranges: RangeSet, number: int) -> int:
    """The n-th member, counted from 1."""
    for first, last in ranges.ranges():
        if number <= last - first + 1:
            return first + number - 1
        number -= last - first + 1
    raise ValueError(f"expected {number} more members, got none")
