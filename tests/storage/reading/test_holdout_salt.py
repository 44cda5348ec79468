"""Choosing episodes by hash: never changed, and independent under two salts."""

from __future__ import annotations

import numpy as np
import pytest

from storage.experience.hashed import CANARY, SAMPLING, SPLIT, hash_fraction
from storage.experience.sample_batch import SampleBatch
from storage.reading.holdout import hash_fractions, held_out

FROZEN = [0.18460693099188663, 0.2910107047259285, 0.7058483037031942]
IDS = [f"episode-{i}" for i in range(20_000)]


def test_the_split_is_frozen() -> None:
    """The numbers from before there was a salt: an existing log is split in the same way."""
    found = [hash_fraction(SPLIT, name) for name in ("a", "episode-17", "")]
    assert found == FROZEN


def test_a_sample_is_spread_evenly_over_the_split() -> None:
    """A tenth chosen by one salt has its third in the held-out third of another, within chance;
    under one salt it lies wholly there."""
    batch = SampleBatch(eps_id=np.array(IDS, object))
    for salt in (SAMPLING, CANARY):
        sampled = hash_fractions(salt, IDS) < 0.1
        split = held_out(batch, 1 / 3)
        count = int(sampled.sum())
        assert abs(count - 2_000) < 5 * np.sqrt(20_000 * 0.09)
        assert abs(int((sampled & split).sum()) - count / 3) < 5 * np.sqrt(count * 2 / 9)
        same = held_out(batch, 1 / 3, salt=salt)
        assert (same & sampled).sum() == count


def test_a_salt_has_an_end() -> None:
    """Longer salts are refused: if they were cut, two could become equal."""
    with pytest.raises(ValueError, match="salt: expected at most 64 bytes, got 65"):
        hash_fraction("x" * 65, "a")
