"""LeRobot's data sets, version 3: Parquet in `data`, described in `meta`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from policy.exporting.runs import ACTIONS, Array, ExportFailed, Log, WholeRuns, float32, to_parquet
from storage.experience.sample_batch import OBS, ORDINAL, REWARDS, TRUNCATEDS, SampleBatch, T
from storage.spaces.leaves import Leaf

_FILE = "chunk-000/file-000.parquet"
_FPS = 1
"""A log has no rate: a step is a second, and `timestamp` its number."""


def lerobot(log: Log, folder: Path) -> None:
    """`LeRobotDataset("headrace/export", root=folder)`."""
    observed, acted = (log.numeric(space, "lerobot") for space in log.spaces)
    if len(acted) != 1:
        raise ExportFailed(f"lerobot: expected an action of one array, got {len(acted)}")
    names = {leaf.column(OBS): _observation(leaf) for leaf in observed}
    names |= {ACTIONS: "action", REWARDS: "next.reward", ORDINAL: "ordinal", T: "t"}
    lengths: list[int] = []
    statistics = _Statistics()
    for inner in ("data/chunk-000", "meta/episodes/chunk-000"):
        (folder / inner).mkdir(parents=True)
    features: dict[str, Any] = {}

    def tables() -> Iterator[Any]:
        for runs in log.blocks():
            rows = _rows(runs, names, sum(lengths), len(lengths))
            lengths.extend(runs.lengths.tolist())
            statistics.add(rows)
            features.update({name: _feature(column) for name, column in rows.items()})
            yield rows.to_arrow()

    to_parquet(tables(), folder / "data" / _FILE)
    _describe(log, folder / "meta", lengths, features)
    (folder / "meta" / "stats.json").write_text(json.dumps(statistics.to_json()))


def _observation(leaf: Leaf) -> str:
    return f"observation.{leaf.path}" if leaf.path else "observation.state"


def _rows(runs: WholeRuns, names: dict[str, str], rows: int, episodes: int) -> SampleBatch:
    """The columns of LeRobot. An end is `next.done`; it is a time-out if `next.truncated`."""
    given, index = runs.rows, np.arange(runs.rows.count)
    frame = index - np.repeat(runs.starts, runs.lengths)
    return SampleBatch(
        {
            **{new: float32(given[name]) for name, new in names.items()},
            "next.done": np.append(frame[1:] == 0, True),
            "next.truncated": given[TRUNCATEDS],
            "timestamp": (frame / _FPS).astype(np.float32),
            "frame_index": frame,
            "episode_index": np.repeat(np.arange(len(runs.starts)) + episodes, runs.lengths),
            "index": index + rows,
            "task_index": np.zeros(len(index), np.int64),
        }
    )


def _feature(column: Array) -> dict[str, Any]:
    return {"dtype": column.dtype.name, "shape": list(column.shape[1:]) or [1], "names": None}


def _describe(log: Log, meta: Path, lengths: list[int], features: dict[str, Any]) -> None:
    stops = np.cumsum(lengths)
    document = {
        "codebase_version": "v3.0",
        "robot_type": None,
        "total_episodes": len(lengths),
        "total_frames": int(sum(lengths)),
        "total_tasks": 1,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": _FPS,
        "splits": {"train": f"0:{len(lengths)}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": None,
        "features": features,
    }
    (meta / "info.json").write_text(json.dumps(document, indent=4))
    task = log.selection.policy_id
    index = {"index_columns": ["__index_level_0__"], "column_indexes": [], "columns": []}
    tasks = pa.table({"task_index": [0], "__index_level_0__": [task]})
    tasks = tasks.replace_schema_metadata({"pandas": json.dumps(index)})
    pq.write_table(tasks, meta / "tasks.parquet")
    zeros = np.zeros(len(lengths), np.int64)
    table = {
        "episode_index": np.arange(len(lengths)),
        "tasks": [[task]] * len(lengths),
        "length": lengths,
        "data/chunk_index": zeros,
        "data/file_index": zeros,
        "dataset_from_index": stops - lengths,
        "dataset_to_index": stops,
        "meta/episodes/chunk_index": zeros,
        "meta/episodes/file_index": zeros,
    }
    pq.write_table(pa.table(table), meta / "episodes" / _FILE)


class _Statistics:
    """Least, greatest, mean and deviation of each column, by which LeRobot's policies normalize."""

    def __init__(self) -> None:
        self._count = 0
        self._found: dict[str, list[Array]] = {}

    def add(self, rows: SampleBatch) -> None:
        before, self._count = self._count, self._count + rows.count
        for name, column in rows.items():
            values = column.reshape(rows.count, -1).astype(np.float64)
            low, high, mean = values.min(axis=0), values.max(axis=0), values.mean(axis=0)
            squares = ((values - mean) ** 2).sum(axis=0)  # about the mean: it may be far from zero
            if before:
                known = self._found[name]
                low, high = np.minimum(known[0], low), np.maximum(known[1], high)
                distance, share = mean - known[2], rows.count / self._count
                mean = known[2] + distance * share
                squares = known[3] + squares + distance**2 * share * before
            self._found[name] = [low, high, mean, squares]

    def to_json(self) -> dict[str, Any]:
        found = {}
        for name, (low, high, mean, squares) in self._found.items():
            deviation = np.sqrt(squares / self._count)
            values = {"min": low, "max": high, "mean": mean, "std": deviation}
            found[name] = {key: value.tolist() for key, value in values.items()}
            found[name]["count"] = [self._count]
        return found
