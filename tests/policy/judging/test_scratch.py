"""Columns on disk behave as those in memory, in a file without a name."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from policy.judging import scratch
from policy.judging.scratch import Scratch
from policy.ope.betting import betting_interval
from policy.ope.columns import combined, whole


def test_a_column_on_disk_is_one_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks have their own size, and it can be appended to after it was read."""
    monkeypatch.setattr(scratch, "BLOCK", 64)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    values = np.random.default_rng(0).random(1000)
    with Scratch() as files:
        column = files.column()
        for block in np.array_split(values, 7):
            column.append(block)
            assert (whole(column) == values[: column.size]).all()
        assert {len(block) for block in column.blocks()} == {64, 1000 % 64}
        assert (whole(combined(np.negative, column)) == -values).all()
        found = betting_interval(column, limits=(0.0, 1.0), error=0.02)
        assert os.listdir(tmp_path) == []
    assert found == pytest.approx(betting_interval(values, limits=(0.0, 1.0), error=0.02))
