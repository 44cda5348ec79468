"""torchrl's rows: a TensorDict in a folder of memory maps, `TensorDict.load_memmap(folder)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from policy.algorithms.torchrl import to_tensordict
from policy.exporting.runs import ExportFailed, Log
from policy.inference.spec import PolicySpec
from storage.experience.sample_batch import (
    ACTION_LOGP,
    EPISODE_ORDINAL,
    ORDINAL,
    TRUNCATEDS,
    T,
)

NAMES = {ACTION_LOGP: "action_log_prob", ORDINAL: ORDINAL, EPISODE_ORDINAL: EPISODE_ORDINAL, T: T}


def torchrl(log: Log, folder: Path) -> None:
    """The rows of `headrace.torchrl.to_tensordict`, all in memory, with their ends as torchrl's own
    data sets have them: `done` also where a time-out is, which `truncated` says.
    """
    spec = PolicySpec(*log.spaces)
    found: list[Any] = []
    for runs in log.blocks(with_next=True):
        try:
            rows = to_tensordict(spec, runs.rows)
        except ValueError as error:
            raise ExportFailed(f"torchrl: {error}") from error
        if len(rows) != runs.rows.count:
            lost = runs.rows.count - len(rows)
            raise ExportFailed(
                f"torchrl: expected rows within float32 and their action masks, got {lost} others"
            )
        for name, new in NAMES.items():
            rows[new] = torch.from_numpy(np.array(runs.rows[name]))
        rows["sample_log_prob"] = rows["action_log_prob"].clone()  # the name in older losses
        truncated = torch.from_numpy(np.array(runs.rows[TRUNCATEDS]))[:, None]
        rows["next", "truncated"] = truncated
        rows["next", "done"] = rows["next", "terminated"] | truncated
        found.append(rows)
    if found:
        joined: Any = torch.cat(found)
        joined.memmap(str(folder / "steps"))
