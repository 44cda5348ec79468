"""The HDF5 files of Minari and d3rlpy: a group, or some data sets, for each episode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from policy.exporting.runs import ACTIONS, Array, ExportFailed, Log, float32
from storage.experience.sample_batch import ACTION_LOGP, ORDINAL, POLICY_VERSION, REWARDS, T
from storage.spaces.descriptors import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple
from storage.spaces.leaves import Leaf

_INFOS = (ACTION_LOGP, POLICY_VERSION, ORDINAL, T)


def _created(path: Path) -> Any:
    import h5py  # noqa: PLC0415 - the extra `hdf5`

    return h5py.File(path, "w")


# --- Minari ----------------------------------------------------------------------------------


def minari(log: Log, folder: Path) -> None:
    """A data set's folder, `minari.MinariDataset(folder / "data")`.

    An episode has one observation more than steps, so a last step that leads nowhere known is left
    out. Infos have a row for the reset, too.
    """
    observed, acted = (log.numeric(space, "minari") for space in log.spaces)
    data = folder / "data"
    data.mkdir()
    with _created(data / "main_data.hdf5") as file:
        for at, run in enumerate(run for runs in log.blocks(with_next=True) for run in runs.each()):
            group = file.create_group(f"episode_{at}")
            group.attrs.update(id=at, total_steps=run.rows.count, eps_id=run.name)
            for leaf in observed:
                group[_path("observations", leaf, log.spaces[0])] = run.observations(leaf)
            for leaf in acted:
                group[_path("actions", leaf, log.spaces[1])] = run.rows[leaf.column(ACTIONS)]
            group["rewards"] = run.rows[REWARDS]
            group["terminations"], group["truncations"] = run.ends()
            for name in _INFOS:
                column = run.rows[name]
                reset = np.nan if column.dtype.kind == "f" else -1
                group[f"infos/{name}"] = np.concatenate([np.array([reset], column.dtype), column])
    observation, action = (json.dumps(_minari_space(space)) for space in log.spaces)
    document = {
        "total_episodes": log.runs,
        "total_steps": log.rows,
        "data_format": "hdf5",
        "jpeg_encoding": False,
        "observation_space": observation,
        "action_space": action,
        "dataset_id": "headrace/export-v0",
        "minari_version": "0.5.4",
        "dataset_size": round((data / "main_data.hdf5").stat().st_size / 1e6, 1),
    }
    (data / "metadata.json").write_text(json.dumps(document))


def _path(name: str, leaf: Leaf, space: Space) -> str:
    """The place of a leaf: groups by key, and `_index_N` in a Tuple."""
    steps = leaf.path.split(".") if leaf.path else []
    for at, step in enumerate(steps):
        if isinstance(space, Tuple):
            steps[at], space = f"_index_{step}", space.spaces[int(step)]
        elif isinstance(space, Dict):
            space = dict(space.spaces)[step]
    return "/".join([name, *steps])


def _minari_space(space: Space) -> dict[str, Any]:
    if isinstance(space, Dict):
        inner = {name: _minari_space(one) for name, one in space.spaces}
        return {"type": "Dict", "subspaces": inner}
    if isinstance(space, Tuple):
        return {"type": "Tuple", "subspaces": [_minari_space(one) for one in space.spaces]}
    if isinstance(space, Box):
        bounds = {"low": space.low.tolist(), "high": space.high.tolist()}
        kind = {"dtype": space.dtype.name, "shape": list(space.shape)}
        return {"type": "Box", **kind, **bounds}
    if isinstance(space, Discrete):
        return {"type": "Discrete", "dtype": "int64", "start": space.start, "n": space.n}
    if isinstance(space, MultiDiscrete):
        sizes = {"nvec": list(space.nvec), "start": list(space.start)}
        return {"type": "MultiDiscrete", "dtype": "int64", **sizes}
    if isinstance(space, MultiBinary):
        n = space.shape[0] if len(space.shape) == 1 else list(space.shape)
        return {"type": "MultiBinary", "n": n}
    raise ExportFailed(f"minari: expected numbers, got {space}")


# --- d3rlpy ----------------------------------------------------------------------------------


def d3rlpy(log: Log, folder: Path) -> None:
    """`ReplayBuffer.load(folder / "dataset.h5", ...)`; `ordinals_N` is (T, 2): ordinal and t."""
    observation, action = log.one_leaf("d3rlpy")
    if not isinstance(action.space, Discrete) and not (
        isinstance(action.space, Box) and action.dtype.kind == "f"
    ):
        raise ExportFailed(f"d3rlpy: expected an action of Discrete or floats, got {action.space}")
    count = 0
    with _created(folder / "dataset.h5") as file:
        file["columns"] = ["observations", ACTIONS, "rewards", "terminated"]
        for run in (run for runs in log.blocks() for run in runs.each()):
            rows = run.rows
            file[f"observations_{count}"] = float32(rows[observation.column("obs")])
            file[f"{ACTIONS}_{count}"] = _d3rlpy_actions(rows[ACTIONS], action)
            file[f"rewards_{count}"] = rows[REWARDS].astype(np.float32).reshape(-1, 1)
            file[f"terminated_{count}"] = run.terminated
            file[f"ordinals_{count}"] = np.stack([rows[ORDINAL], rows[T]], axis=1)
            count += 1
        file["num_episodes"] = count
        file["version"] = "2.1"


def _d3rlpy_actions(column: Array, leaf: Leaf) -> Array:
    if isinstance(leaf.space, Discrete):
        return (column - leaf.space.start).reshape(-1, 1)
    return float32(column).reshape(len(column), -1)
