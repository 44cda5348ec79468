"""RLlib's Parquet files of episodes: the state of a SingleAgentEpisode in each row.

The state is msgpack, in which msgpack-numpy has put arrays as their bytes; msgspec reads it. An
array of Python objects, which msgpack-numpy pickles, is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq

from ingest.importing.engine import Workspace
from ingest.importing.formats.recipes import (
    ENDED,
    EPISODE,
    REWARDS,
    Recipe,
    StepArrays,
    ended,
    episode_options,
    first_rows,
    flat_values,
    table_unit,
    with_next,
)
from ingest.importing.options import ImportOptions
from ingest.importing.sources import require_whole
from ingest.protocol.errors import ImportFailed

_ITEM, _LOGP, _STEP = "item", "action_logp", "t"
_EPISODES = 64
"""The episodes that are read at a time."""


def rllib_episodes(path: Path, options: ImportOptions, space: Workspace) -> Recipe:
    """A file, or a folder of files, with the column `item`."""
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise ImportFailed(f"{path}: expected Parquet files in it, got none")
    units = [table_unit(file, "Parquet", _episodes) for file in files]
    require_whole(units)
    rows = first_rows(files[0], _episodes)
    found = {**episode_options(rows), "truncated": "truncated", "step": _STEP}
    if _LOGP in rows:
        found["action_logp"] = _LOGP
    return Recipe([*units], found)


def _episodes(path: Path) -> Iterator[StepArrays]:
    with pq.ParquetFile(path) as file:
        if _ITEM not in file.schema_arrow.names:
            raise ImportFailed(
                f"{path}: expected a column `item` with packed episodes, got the columns "
                f"{', '.join(file.schema_arrow.names)}: a table of steps needs no format"
            )
        for batch in file.iter_batches(_EPISODES, columns=[_ITEM]):
            for packed in batch.column(_ITEM).to_pylist():
                try:
                    yield _rows(msgspec.msgpack.decode(packed), path)
                except (msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
                    text = f"expected packed episodes of RLlib: {error!r:.200}"
                    raise ImportFailed(f"{path}: {text}") from error


def _rows(state: Mapping[str, Any], path: Path) -> StepArrays:
    """The steps of an episode, without those that it looks back on."""
    rewards = np.asarray(_buffer(state["rewards"], path), np.float64)
    steps, terminated = len(rewards), bool(state["is_terminated"])
    rows = {
        EPISODE: np.full(steps, str(state["id_"])),
        _STEP: np.arange(steps) + int(state["t_started"]),
        **with_next(flat_values(_buffer(state["observations"], path), "observations"), steps),
        **flat_values(_buffer(state["actions"], path), "actions"),
        REWARDS: rewards,
        ENDED: ended(steps, terminated),
        "truncated": ended(steps, bool(state["is_truncated"]) and not terminated),
    }
    outputs = state.get("extra_model_outputs") or {}
    if outputs.get(_LOGP):
        rows[_LOGP] = np.asarray(_buffer(outputs[_LOGP], path), np.float64)
    return rows


def _buffer(state: Mapping[str, Any], path: Path) -> Any:
    """The values of a buffer from the first step on: an array, or dicts and tuples of arrays."""
    values, begin = state["data"], int(state["lookback"])
    if state["finalized"]:
        return _each(_array(values, path), lambda array: array[begin:])
    return _stacked([_array(value, path) for value in values[begin:]])


def _array(value: Any, path: Path) -> Any:
    """A value with the arrays that msgpack-numpy has packed. Raises ImportFailed for objects."""
    if isinstance(value, Mapping) and b"nd" in value:
        kind = value[b"type"]
        if value.get(b"kind") == b"O" or not isinstance(kind, str):
            raise ImportFailed(f"{path}: expected arrays of numbers, got one of Python objects")
        array = np.frombuffer(value[b"data"], np.dtype(kind))
        return array.reshape(value[b"shape"]) if value[b"nd"] else array[0]
    if isinstance(value, Mapping):
        return {key: _array(one, path) for key, one in value.items()}
    return [_array(one, path) for one in value] if isinstance(value, list) else value


def _each(values: Any, change: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _each(one, change) for key, one in values.items()}
    if isinstance(values, list):
        return [_each(one, change) for one in values]
    return change(values)


def _stacked(values: list[Any]) -> Any:
    """One array of values that are alike, or a dict or list of arrays by their parts."""
    first = values[0] if values else math.nan
    if isinstance(first, Mapping):
        return {key: _stacked([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [_stacked([value[at] for value in values]) for at in range(len(first))]
    return np.asarray(values)
