"""The sample that the estimates are made from, and work that is done ahead."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from policy.judging import judged_sample
from policy.judging.judged_log import JudgedBlock
from policy.judging.judged_sample import Sample, ahead
from storage.experience.sample_batch import SampleBatch


def block(first: int, n: int, steps: int = 2) -> JudgedBlock:
    """Episodes first .. first + n - 1, two of each user."""
    rows = n * steps
    return JudgedBlock(
        steps=SampleBatch(
            actions=np.zeros(rows, np.int64),
            rewards=np.repeat(np.arange(first, first + n), steps).astype(np.float64),
            action_logp=np.zeros(rows),
            ended=np.full(rows, "terminated", object),
            pass_prob=np.ones(rows),
            ordinal=np.repeat(np.arange(first, first + n), steps),
        ),
        flat=np.zeros((rows, 3), np.float32),
        lengths=np.full(n, steps),
        names=[f"u{i % 500}" for i in range(first, first + n)],
        times=np.zeros(n),
        tags={},
        lost=np.zeros(n, np.bool_),
        untagged=0,
        other_tags=set(),
        certain=SampleBatch(),
        capped=0,
        excluded={},
    )


def test_all_episodes_are_taken_while_they_are_few() -> None:
    """Each episode is taken once, next to the others of its unit."""
    sample = Sample()
    for first in range(0, 1000, 100):
        given = block(first, 100)
        sample.add(given, np.arange(first, first + 100) % 500)
    taken = sample.taken({"broken": 1})
    assert taken is not None
    assert (np.diff(taken.units) >= 0).all()
    assert sorted(taken.steps["rewards"][::2]) == list(range(1000))
    assert (taken.steps["rewards"][::2] % 500 == taken.units).all()
    assert taken.excluded == {"broken": 1}


def test_too_many_are_thinned_by_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole units are left out, the same ones for any size of the blocks."""
    monkeypatch.setattr(judged_sample, "SAMPLE_CELLS", 10_000)
    found = []
    for size in (50, 200):
        sample = Sample()
        for first in range(0, 1000, size):
            sample.add(block(first, size), np.arange(first, first + size) % 500)
        taken = sample.taken({})
        assert taken is not None
        assert set(np.bincount(taken.units)) <= {0, 2}
        assert 150 < len(taken.lengths) < 350
        found.append(taken.units.tolist())
    assert found[0] == found[1]


def test_nothing_is_no_sample() -> None:
    """Without an episode to judge by, there is no sample."""
    assert Sample().taken({}) is None


def test_work_is_done_ahead_and_handed_over_in_order() -> None:
    """Other threads do the work; their errors are raised here."""

    def work(number: int) -> tuple[int, str]:
        if number == 50:
            raise ValueError("fifty")
        return number, threading.current_thread().name

    done = list(ahead(work, range(50)))
    assert [number for number, _ in done] == list(range(50))
    assert all(name.startswith("headrace-judge") for _, name in done)
    with pytest.raises(ValueError, match="fifty"):
        list(ahead(work, range(60)))
