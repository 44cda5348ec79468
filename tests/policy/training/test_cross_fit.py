"""Which rows each fold policy is trained on."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from policy.training.cross_fit import FirstBlocks, blocks_in_order, require_blocks, up_to
from storage.experience.range_set import RangeSet
from storage.experience.sample_batch import EPS_ID, SampleBatch
from storage.reading.holdout import Reserve


def test_blocks_have_equally_many_ordinals_and_keep_the_gaps_between() -> None:
    """By hand: 0-3 and 10-11 of one stream, 5-6 of the next: 8 ordinals in 4 blocks of 2."""
    trained = {"b": RangeSet([(5, 6)]), "a": RangeSet([(0, 3), (10, 11)])}
    found = [
        {stream: ranges.ranges() for stream, ranges in blocks.items()}
        for blocks in blocks_in_order(trained, 4)
    ]
    assert found == [
        {"a": [(0, 1)]},
        {"a": [(0, 3)]},
        {"a": [(0, 11)]},
        {"a": [(0, 11)], "b": [(0, 6)]},
    ]


def test_a_manifest_is_cut_at_the_blocks_end() -> None:
    blocks = {"a": RangeSet([(0, 7)])}
    assert up_to(blocks, None) == blocks
    given = {"a": [(0, 3), (6, 9), (12, 20)], "b": [(0, 4)]}
    assert up_to(blocks, given) == {"a": [(0, 3), (6, 7)], "b": []}


def test_the_first_blocks_of_units_grow_and_keep_units_whole() -> None:
    names = np.array([f"e{i // 2}" for i in range(400)], object)
    batch = SampleBatch({EPS_ID: names, "x": np.arange(400)})
    masks = [FirstBlocks(Reserve(), number, 4)(batch) for number in (1, 2, 3)]
    for smaller, larger in pairwise(masks):
        assert (larger | ~smaller).all()
    for mask, share in zip(masks, (0.25, 0.5, 0.75), strict=True):
        assert (mask[::2] == mask[1::2]).all()
        assert mask.mean() == pytest.approx(share, abs=0.1)


def test_one_block_is_none() -> None:
    require_blocks(2, held_out=False)
    for blocks in (1, 51):
        with pytest.raises(ValueError, match="expected 2 to 50 blocks"):
            require_blocks(blocks, held_out=False)
