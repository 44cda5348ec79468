"""RLlib's JsonWriter files: a batch of steps per line, each of its columns a list."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ingest.importing.engine import FILE, ROW, Workspace
from ingest.importing.formats.recipes import (
    REWARDS,
    Recipe,
    StepArrays,
    actions_option,
    first_rows,
    json_files,
    table_unit,
)
from ingest.importing.options import ImportOptions
from ingest.importing.readers import Problem, stream_of
from ingest.protocol.errors import ImportFailed

_OPTIONS = {
    "obs": "observation",
    "new_obs": "final_observation",
    "terminateds": "terminated",
    "dones": "terminated",
    "truncateds": "truncated",
    "eps_id": "episode",
    "step": "step",
    "action_logp": "action_logp",
    "action_prob": "action_prob",
}
"""Column -> its option; of two columns for one, the first counts."""
_COLUMNS = {*_OPTIONS, "actions", REWARDS, "t"}


def rllib(path: Path, options: ImportOptions, space: Workspace) -> Recipe:
    """A file, or the files of a folder. Raises ImportFailed for compressed columns."""
    pieces = partial(_batches, firsts={})
    units = [table_unit(unit.path, "batches of RLlib", pieces, unit) for unit in json_files(path)]
    rows = first_rows(units[0].path, pieces)
    found: dict[str, Any] = {
        "action": actions_option(["actions"], rows["actions"].dtype.kind == "f"),
        "reward": REWARDS,
    }
    for name, option in _OPTIONS.items():
        if name in rows:
            listed = option in ("observation", "final_observation")
            found.setdefault(option, [name] if listed else name)
    if "action_logp" in found:
        found.pop("action_prob", None)
    return Recipe([*units], found)


def _batches(path: Path, firsts: dict[str, int]) -> Iterator[StepArrays | Problem]:
    """The batches of a file, and a Problem for each line that is not one.

    `firsts`: the least `t` so far of each episode, which may have begun before its first batch. The
    first batch of every file is read before the rows of any are.
    """
    with stream_of(path) as stream:
        for number, line in enumerate(filter(bytes.strip, io.BufferedReader(stream)), 1):
            try:
                rows = _rows(msgspec.json.decode(line), f"{path.name} row {number}", firsts)
            except (msgspec.DecodeError, TypeError, ValueError, AttributeError) as error:
                text = (
                    f"row: expected a batch of RLlib with lists of one length, got {error!s:.200}"
                )
                yield Problem(number, text)
                continue
            if not (count := len(rows[REWARDS])):
                continue
            rows |= {FILE: np.full(count, path.name), ROW: np.full(count, number)}
            yield rows


def _rows(batch: Mapping[str, Any], where: str, firsts: dict[str, int]) -> StepArrays:
    if batch.get("type", "SampleBatch") != "SampleBatch":
        text = "expected a SampleBatch: batches of several agents are not read"
        raise ImportFailed(f"{where}: type: {text}, got {batch['type']!r:.80}")
    for name in sorted(_COLUMNS & {*batch}):
        if isinstance(batch[name], str):
            text = "expected a list of steps, got a compressed column, which only RLlib can read"
            raise ImportFailed(f"{where}: {name}: {text}: write with output_compress_columns=[]")
    for name in ("obs", "actions", REWARDS):
        if name not in batch:
            got = ", ".join(batch)
            raise ImportFailed(f"{where}: expected a batch of RLlib with {name}, got {got:.200}")
    if len({*batch.get("agent_index", ())}) > 1:
        raise ImportFailed(f"{where}: agent_index: expected one agent in a batch, got several")
    rows = {name: np.asarray(batch[name]) for name in _COLUMNS & {*batch}}
    if {len(one) for one in rows.values()} != {len(rows[REWARDS])}:
        raise ValueError("other lengths")
    if {"terminateds", "truncateds"} <= {*rows}:
        rows["truncateds"] = rows["truncateds"].astype(bool) & ~rows["terminateds"].astype(bool)
    if "eps_id" in rows:
        keys = [str(one) for one in batch["eps_id"]]
        rows["eps_id"] = np.array(keys, object)
        if "t" in rows:
            for key, t in zip(keys, batch["t"], strict=True):
                firsts[key] = min(t, firsts.get(key, t))
            rows["step"] = rows["t"] - np.array([firsts[key] for key in keys], np.int64)
    return rows
