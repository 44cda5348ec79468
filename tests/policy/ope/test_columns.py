"""Columns give the same sums from the same numbers, in blocks or at once."""

from __future__ import annotations

import numpy as np
import pytest

from policy.ope.betting import betting_interval
from policy.ope.columns import MemoryColumn, column_of, combined, ends, moments, whole
from policy.ope.comparison import skewed_t_interval
from policy.ope.diagnostics import largest_share, mean_weight, reward_events


def in_blocks(values: np.ndarray, pieces: int = 7) -> MemoryColumn:
    column = MemoryColumn()
    for block in np.array_split(values, pieces):
        column.append(block)
    return column


def test_a_column_is_read_as_often_as_asked() -> None:
    """In order, in the blocks that were appended."""
    values = np.arange(100.0)
    column = in_blocks(values)
    for _ in range(2):
        assert (whole(column) == values).all()
    assert (column.size, ends(column)) == (100, (0.0, 99.0))
    assert (whole(combined(np.add, column, column)) == 2 * values).all()
    assert moments(column) == pytest.approx((49.5, values.var(), 0.0))
    assert (column.like().size, column_of(np.empty(0)).size) == (0, 0)


@pytest.mark.parametrize("sequence", [False, True])
def test_bounds_and_checks_do_not_depend_on_blocks(sequence: bool) -> None:
    """Bounds and checks of a column in blocks are those of the whole column."""
    values = (np.random.default_rng(1).random(2_000) < 0.1).astype(np.float64)
    limits = (0.0, 1.0)
    column = in_blocks(values)
    found = betting_interval(column, limits=limits, error=0.02, sequence=sequence)
    assert found == pytest.approx(
        betting_interval(values, limits=limits, error=0.02, sequence=sequence), abs=1e-12
    )
    assert skewed_t_interval(column, 0.02) == pytest.approx(skewed_t_interval(values, 0.02))
    for one, other in (
        (mean_weight(in_blocks(10 * values), 10.0), mean_weight(10 * values, 10.0)),
        (largest_share("x", column, 0.1, "x"), largest_share("x", values, 0.1, "x")),
        (
            reward_events(column, in_blocks(values + 1), threshold=30),
            reward_events(values, values + 1, threshold=30),
        ),
    ):
        assert (one.value, one.passed) == (pytest.approx(other.value), other.passed)
