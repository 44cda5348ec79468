"""The tasks of `read_ray` read each row once; `make rllib` runs them in Ray."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from policy.exporting import ray_data
from policy.exporting.runs import ExportFailed
from policy.exporting.tables import RLLIB
from storage.maintenance.compaction import plan_compaction
from storage.maintenance.plans import apply
from tests.policy.exporting.written_log import CHOICES, VECTORS, selection, write_log


def read(chosen: Any, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    """The batches of all tasks."""
    tasks = pd.DataFrame({"piece": list(ray_data._pieces(chosen))})
    return list(ray_data._read(tasks, chosen, columns, False))


def test_each_row_is_read_once_by_tasks_of_their_own_ordinals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a merged shard lies beside those that it replaces."""
    monkeypatch.setattr(ray_data, "ORDINALS", 3)
    runs = write_log(tmp_path, repeats=2)
    chosen = selection(tmp_path)
    assert len(list(ray_data._pieces(chosen))) > 1
    shutil.copytree(tmp_path / "shards", tmp_path / "old")
    apply(tmp_path, plan_compaction(tmp_path, None), by="test", why="test")
    shutil.copytree(tmp_path / "old", tmp_path / "shards", dirs_exist_ok=True)
    steps = sum(len(one.rewards) for one in runs)
    batches = read(chosen, ("ordinal", "t", "obs"))
    assert {*batches[0]} == {"ordinal", "t", "obs"}
    found = [(o, t) for b in batches for o, t in zip(b["ordinal"], b["t"], strict=True)]
    assert len(found) == len({*found}) == steps
    learned = read(chosen, RLLIB)
    assert tuple(learned[0]) == RLLIB
    assert learned[0]["obs"].shape[1:] == (2,)
    rewards = np.concatenate([batch["rewards"] for batch in learned])
    assert rewards.dtype == np.float32
    unknown = 4  # per repeat: lost, open (its end, and the end of its first part), the gap
    assert len(rewards) == steps - 2 * unknown


def test_observations_of_several_arrays_need_columns(tmp_path: Path) -> None:
    write_log(tmp_path, VECTORS)
    chosen = selection(tmp_path, VECTORS)
    with pytest.raises(ExportFailed, match=r"one array each, got .*obs\.place.*: give columns"):
        read(chosen, RLLIB)
    assert read(chosen, ("obs", "rewards"))[0]["obs.place"].shape[1:] == (2,)
    assert not list(ray_data._pieces(selection(tmp_path, CHOICES, manifest={})))
