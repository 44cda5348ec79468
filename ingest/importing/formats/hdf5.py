"""The HDF5 files of Minari, D4RL and d3rlpy.

A group or a number of datasets per episode (Minari, d3rlpy), or one dataset of all steps with flags
where episodes end (D4RL, and d3rlpy before 2.0). A step that is both terminated and truncated is
terminated, because no value follows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ingest.importing.engine import Workspace
from ingest.importing.formats.recipes import (
    ENDED,
    EPISODE,
    REWARDS,
    Recipe,
    StepArrays,
    actions_option,
    ended,
    episode_options,
    file_of,
    first_rows,
    flat_values,
    table_unit,
    with_next,
)
from ingest.importing.options import ImportOptions
from ingest.importing.readers import BLOCK_ROWS, readable
from ingest.protocol.errors import ImportFailed

_LOGP = "infos/action_log_probs"


@contextlib.contextmanager
def _file(path: Path) -> Iterator[Any]:
    import h5py  # noqa: PLC0415 - the extra `hdf5`

    if not h5py.is_hdf5(path):
        raise ImportFailed(f"{path}: expected HDF5, got another file")
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (KeyError, RuntimeError, TypeError, ValueError) as error:  # as h5py finds damage
        text = f"expected the datasets of this format: {error.args[0]!s:.200}"
        raise ImportFailed(f"{path}: {text}") from error


def minari(path: Path, options: ImportOptions, space: Workspace) -> Recipe:
    """A data set's folder, or its `main_data.hdf5`."""
    file = file_of(path, "main_data.hdf5", "a Minari data set (its format `arrow` is not read)")
    rows = first_rows(file, _minari_episodes)
    return Recipe([table_unit(file, "HDF5", _minari_episodes)], episode_options(rows))


def _minari_episodes(path: Path) -> Iterator[StepArrays]:
    with _file(path) as file:
        names = [name for name in file if name.startswith("episode_")]
        if not names:
            raise ImportFailed(f"{path}: expected groups episode_0, episode_1, ..., as in Minari")
        for name in sorted(names, key=lambda name: int(name.removeprefix("episode_"))):
            group = file[name]
            rewards = group["rewards"][()]
            steps = len(rewards)
            terminated = group["terminations"][()].astype(bool)
            rows = {
                EPISODE: np.full(steps, name),
                **with_next(_values(group["observations"], "observations"), steps),
                **_values(group["actions"], "actions"),
                REWARDS: rewards,
                ENDED: terminated,
                "truncated": group["truncations"][()].astype(bool) & ~terminated,
            }
            infos = _values(group["infos"], "infos") if "infos" in group else {}
            rows |= {n: one[len(one) - steps :] for n, one in infos.items() if len(one) >= steps}
            yield rows


def _values(found: Any, name: str) -> StepArrays:
    """The arrays of a dataset, or of those in a group. Raises ImportFailed for images as JPEG."""
    if hasattr(found, "keys"):
        inner = {key.removeprefix("_index_"): found[key] for key in found}
        pairs = [_values(one, f"{name}.{key}") for key, one in inner.items()]
        return {one: array for pair in pairs for one, array in pair.items()}
    values = found[()]
    if values.dtype.kind == "O" and len(values) and not isinstance(values[0], (bytes, str)):
        raise ImportFailed(
            f"{found.name}: expected numbers or texts, got values of varying length, such as "
            "images as JPEG: write the data set with jpeg_encoding=False"
        )
    return {name: values}


# --- D4RL ------------------------------------------------------------------------------------


def d4rl(path: Path, options: ImportOptions, space: Workspace) -> Recipe:
    """A file with one row per step. Episodes end at `terminals` and `timeouts`."""
    return _flat(file_of(path, "*.hdf5", "D4RL"), "timeouts")


def _flat(path: Path, timeouts: str) -> Recipe:
    def pieces(file: Path) -> Iterator[StepArrays]:
        return _flat_rows(file, timeouts)

    rows = first_rows(path, pieces)
    found: dict[str, Any] = {
        "observation": ["observations"],
        "action": actions_option(["actions"], rows["actions"].dtype.kind == "f"),
        "reward": REWARDS,
        "terminated": "terminals",
    }
    named = {"truncated": timeouts, "action_logp": _LOGP}
    found |= {option: name for option, name in named.items() if name in rows}
    if "next_observations" in rows:
        found["final_observation"] = ["next_observations"]
    note = f"the file has no {timeouts}: episodes that a limit cut off are not known"
    return Recipe([table_unit(path, "HDF5", pieces)], found, [] if timeouts in rows else [note])


def _flat_rows(path: Path, timeouts: str) -> Iterator[StepArrays]:
    with _file(path) as file:
        if REWARDS not in file:
            raise ImportFailed(
                f"{path}: expected {REWARDS} of all steps, got {', '.join(file)!s:.80}"
            )
        steps = len(file[REWARDS])
        inner = {f"infos/{name}": file["infos"][name] for name in file.get("infos", ())}
        datasets = {
            name: one
            for name, one in [*file.items(), *inner.items()]
            if getattr(one, "shape", ())[:1] == (steps,)
        }
        for name in ("observations", "actions", "terminals"):
            if name not in datasets:
                raise ImportFailed(f"{path}: expected {name} with {steps} rows, as rewards has")
        for begin in range(0, steps, BLOCK_ROWS):
            rows = {name: one[begin : begin + BLOCK_ROWS] for name, one in datasets.items()}
            rows["terminals"] = rows["terminals"].astype(bool).reshape(-1)
            if timeouts in rows:
                rows[timeouts] = rows[timeouts].astype(bool).reshape(-1) & ~rows["terminals"]
            yield rows


# --- d3rlpy ----------------------------------------------------------------------------------


def d3rlpy(path: Path, options: ImportOptions, space: Workspace) -> Recipe:
    """A file of `ReplayBuffer.dump`, or of `MDPDataset.dump` before 2.0."""
    file = file_of(path, "*.h5", "d3rlpy")
    with readable(file, "HDF5"), _file(file) as found:
        is_flat = "columns" not in found
    if is_flat:
        return _flat(file, "episode_terminals")
    options_found = episode_options(first_rows(file, _d3rlpy_episodes))
    del options_found["final_observation"]
    return Recipe([table_unit(file, "HDF5", _d3rlpy_episodes)], options_found)


def _d3rlpy_episodes(path: Path) -> Iterator[StepArrays]:
    with _file(path) as file:
        for number in range(int(file["num_episodes"][()])):
            rewards = file[f"rewards_{number}"][()]
            steps = len(rewards)
            yield {
                EPISODE: np.full(steps, str(number)),
                **flat_values(_parts(file, "observations", number), "observations"),
                **flat_values(_parts(file, "actions", number), "actions"),
                REWARDS: rewards,
                ENDED: ended(steps, bool(file[f"terminated_{number}"][()])),
            }


def _parts(file: Any, name: str, number: int) -> Any:
    """An episode's array, or those of the parts of a tuple."""
    if f"{name}_{number}" in file:
        return file[f"{name}_{number}"][()]
    parts: list[Any] = []
    while (key := f"{name}_{number}_{len(parts)}") in file:
        parts.append(file[key][()])
    return parts
