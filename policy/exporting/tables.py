"""Formats with a row per step: RLlib's table, Hugging Face's data set, lines of JSON.

RLlib's pre-learner makes an episode of each row, and an output of the model of each column that it
does not know. So its table has what it needs and nothing else: `ordinals` are in `headrace.json`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from policy.exporting.runs import ACTIONS, Array, Log, WholeRuns, to_parquet
from storage.experience.sample_batch import (
    ACTION_LOGP,
    EPS_ID,
    HAS_NEXT_OBS,
    NEXT_OBS,
    OBS,
    REWARDS,
    TERMINATEDS,
    TRUNCATEDS,
    SampleBatch,
)

RLLIB = (EPS_ID, OBS, ACTIONS, REWARDS, NEXT_OBS, TERMINATEDS, TRUNCATEDS)
MORE = ("pass_prob", "ts", "infos", "tags")


def rllib_rows(runs: WholeRuns) -> SampleBatch:
    """The columns that Ray's `OfflineData` needs; rewards as float32, as its learners compute."""
    rows = _named(runs).select(RLLIB)
    rows[REWARDS] = rows[REWARDS].astype(np.float32)
    return rows


def rllib(log: Log, folder: Path) -> None:
    log.one_leaf("rllib")
    tables = (rllib_rows(runs).to_arrow() for runs in log.blocks(with_next=True))
    to_parquet(tables, folder / "steps.parquet")


def huggingface(log: Log, folder: Path) -> None:
    """Parquet in `data`, and a card that names it: `datasets.load_dataset(folder)`."""
    tables = (_plain(_named(runs).to_arrow()) for runs in log.blocks(more=MORE, names=True))
    (folder / "data").mkdir()
    to_parquet(tables, folder / "data" / "train-00000-of-00001.parquet")
    (folder / "README.md").write_text(_card(log), encoding="utf-8")


def jsonl(log: Log, folder: Path) -> None:
    """A line per step; null where nothing is known."""
    encoder = msgspec.json.Encoder()
    with (folder / "steps.jsonl").open("wb") as file:
        for runs in log.blocks(more=MORE, names=True):
            columns = {name: _json_values(name, column) for name, column in _named(runs).items()}
            for name in [name for name in columns if name.partition(".")[0] == NEXT_OBS]:
                pairs = zip(columns[name], columns[HAS_NEXT_OBS], strict=True)
                columns[name] = [value if known else None for value, known in pairs]
            rows = zip(*columns.values(), strict=True)
            lines = (dict(zip(columns, row, strict=True)) for row in rows)
            file.write(encoder.encode_lines(lines))


def _json_values(name: str, column: Array) -> list[Any]:
    if name in ("infos", "tags"):
        return [msgspec.Raw((text or "{}").encode()) for text in column.tolist()]
    if name == ACTION_LOGP:
        return [None if math.isnan(value) else value for value in column.tolist()]
    values: list[Any] = column.tolist()
    return values


def _named(runs: WholeRuns) -> SampleBatch:
    """All columns, with the names of runs as `eps_id`."""
    return SampleBatch({**runs.rows, EPS_ID: runs.names()})


def _plain(table: Any) -> Any:
    """Tensors as lists of lists, which every reader of Parquet knows; null where nothing is."""
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    for name, column in columns.items():
        if isinstance(column.type, pa.FixedShapeTensorType):
            lists, values = column.storage, column.storage.flatten()
            for size in reversed(column.type.shape[1:]):
                values = pa.FixedSizeListArray.from_arrays(values, size)
            columns[name] = pa.FixedSizeListArray.from_arrays(values, len(values) // len(lists))
    known = {ACTION_LOGP: pc.invert(pc.is_nan(columns[ACTION_LOGP]))}
    known |= {n: columns[HAS_NEXT_OBS] for n in columns if n.partition(".")[0] == NEXT_OBS}
    for name, mask in known.items():
        nothing = pa.scalar(None, columns[name].type)
        columns[name] = pc.if_else(mask, columns[name], nothing)
    return pa.table(columns)


def _card(log: Log) -> str:
    observation, action = (msgspec.json.encode(one.to_json()).decode() for one in log.spaces)
    return f"""---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*.parquet
task_categories:
- reinforcement-learning
tags:
- reinforcement-learning
- offline-reinforcement-learning
---

# Steps of the policy `{log.selection.policy_id}`

{log.rows} steps of {log.runs} episodes, one per row, exported by Headrace. The rows of an episode
have the same `eps_id` and are ordered by `t`.

- observation space: `{observation}`
- action space: `{action}`
- `terminateds` is true where an episode ended, `truncateds` where it was cut off or is not known to
  have ended: a value follows the latter, and not the former.
- `new_obs` is the next observation if `has_new_obs` is true.
- `action_logp` is the logarithm of the action's propensity, null where it is unknown.
- (`stream`, `ordinal`, `t`) identifies a step in the log that it comes from.
"""
