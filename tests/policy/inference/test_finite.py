"""Numbers that float32 cannot hold are found in the columns that are read."""

from __future__ import annotations

import numpy as np

from policy.inference.finite import LARGEST, not_finite


def test_a_row_is_marked_for_a_number_beyond_float32() -> None:
    """NaN and infinity, too. Targets are squared, so their limit is the root; other columns, and
    whole numbers, are not looked at."""
    batch = {
        "obs.speed": np.array([[0.0, 1.0], [0.0, np.nan], [2 * LARGEST, 0.0], [0.0, LARGEST]]),
        "obs.gear": np.array([1, 2, 3, 2**62]),
        "rewards": np.array([0.0, 1.0, 1.0, 1e19]),
        "infos": np.array([np.inf] * 4),
    }
    assert not_finite(batch, ("rewards",), "obs").tolist() == [False, True, True, False]
    batch["rewards"][3] = -1e20
    assert not_finite(batch, ("rewards",), "obs").tolist() == [False, True, True, True]
    assert not_finite(batch, ("rewards",)).tolist() == [False, False, False, True]


def test_a_batch_without_rows_has_no_marks() -> None:
    """Also one without columns."""
    assert not_finite({}, ("rewards",), "obs").shape == (0,)
    assert not_finite({"obs": np.empty((0, 2))}, (), "obs").shape == (0,)
