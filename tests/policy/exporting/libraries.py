"""Exports as their own libraries load them: `python -m tests.policy.exporting.libraries NAME`.

Each library is in an environment of its own (`make exports`, `make rllib`). What it reads is
compared with the log: runs, rewards, ends, observations.
"""

# ruff: noqa: PLC0415 - each part needs another environment

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from policy.exporting.opening import export
from tests.policy.exporting.written_log import (
    CHOICES,
    VECTORS,
    Expected,
    selection,
    write_log,
)

Found = Sequence[tuple[Any, Any, bool]]
"""(observations, rewards, terminated) of each episode that a library read."""


def exported(folder: Path, to: str, policy_id: str) -> list[Expected]:
    """Export a new log to `folder / to`; returns its runs."""
    runs = write_log(folder / f"root-{to}", policy_id)
    export(selection(folder / f"root-{to}", policy_id), to, folder / to)
    return runs


def require(runs: Sequence[Expected | None], found: Found) -> None:
    """That these are the runs, by their first rewards; with the final observation if it is read."""
    expected = {float(np.float32(one.rewards[0])): one for one in runs if one is not None}
    assert len(expected) == len(found), (len(expected), len(found))
    for obs, rewards, terminated in found:
        rewards = np.asarray(rewards).reshape(-1)
        one = expected.pop(float(np.float32(rewards[0])))
        assert np.allclose(rewards, one.rewards), one.name
        assert np.allclose(obs, one.obs[: len(obs)]), one.name
        assert len(obs) - len(rewards) in (0, 1)
        assert bool(terminated) == one.terminated, one.name


def minari(folder: Path) -> None:
    import minari

    runs = exported(folder, "minari", VECTORS)
    data = minari.MinariDataset(folder / "minari" / "data")
    found = []
    for one in data.iterate_episodes():
        assert bool(one.truncations[-1]) is not bool(one.terminations[-1])
        assert (one.infos["ordinal"][1:] >= 0).all()
        found.append((one.observations["place"], one.rewards, one.terminations[-1]))
    require([one.with_next() for one in runs], found)


def d3rlpy(folder: Path) -> None:
    import d3rlpy as library

    runs = exported(folder, "d3rlpy", CHOICES)
    file = str(folder / "d3rlpy" / "dataset.h5")
    data = library.dataset.ReplayBuffer.load(file, library.dataset.InfiniteBuffer())
    require(runs, [(one.observations, one.rewards, one.terminated) for one in data.episodes])
    learner = library.algos.DiscreteCQLConfig(batch_size=8).create(device="cpu:0")
    learner.fit(data, n_steps=4, n_steps_per_epoch=2, show_progress=False)


def lerobot(folder: Path) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    runs = exported(folder, "lerobot", VECTORS)
    data = LeRobotDataset("headrace/export", root=folder / "lerobot")
    steps: dict[int, list[Any]] = {}
    for at in range(len(data)):
        row = data[at]
        steps.setdefault(int(row["episode_index"]), []).append(row)
    found = []
    for rows in steps.values():
        obs = np.stack([row["observation.place"].numpy() for row in rows])
        assert [bool(row["next.done"]) for row in rows] == [*[False] * (len(rows) - 1), True]
        over = not bool(rows[-1]["next.truncated"])
        found.append((obs, [float(row["next.reward"]) for row in rows], over))
    require(runs, found)
    assert np.allclose(data.meta.stats["action"]["max"], max_action(runs))
    assert data.meta.total_episodes == len(runs)


def max_action(runs: Sequence[Expected]) -> Any:
    return np.concatenate([one.actions for one in runs]).max(axis=0)


def huggingface(folder: Path) -> None:
    from datasets import load_dataset

    runs = exported(folder, "huggingface", CHOICES)
    rows = load_dataset(str(folder / "huggingface"), split="train", cache_dir=str(folder / "hf"))
    by_name: dict[str, list[Any]] = {}
    for row in rows:
        by_name.setdefault(row["eps_id"], []).append(row)
    found = []
    for steps in by_name.values():
        obs = [row["obs"] for row in steps]
        assert steps[-1]["truncateds"] is not steps[-1]["terminateds"]
        rewards = [row["rewards"] for row in steps]
        found.append((np.array(obs), rewards, steps[-1]["terminateds"]))
    require(runs, found)


def torchrl(folder: Path) -> None:
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

    runs = exported(folder, "torchrl", CHOICES)
    rows = TensorDict.load_memmap(folder / "torchrl" / "steps")
    buffer = TensorDictReplayBuffer(storage=LazyMemmapStorage(len(rows)), batch_size=8)
    buffer.extend(rows)
    assert buffer.sample()["next", "observation"].shape == (8, 2)
    starts = [0, *(np.flatnonzero(rows["next", "done"].numpy()) + 1).tolist()]
    found = []
    for start, stop in itertools.pairwise(starts):
        piece = rows[start:stop]
        over = bool(piece["next", "terminated"][-1])
        found.append((piece["observation"].numpy(), piece["next", "reward"].numpy(), over))
    require([one.with_next() for one in runs], found)


PARTS: dict[str, Callable[[Path], None]] = {
    one.__name__: one for one in (minari, d3rlpy, lerobot, huggingface, torchrl)
}

if __name__ == "__main__":
    for part in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as temporary:
            PARTS[part](Path(temporary))
        print(json.dumps({"loaded": part}))
