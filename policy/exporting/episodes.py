"""RLlib's Parquet of packed episodes: the state of a SingleAgentEpisode in each row.

The state is msgpack, with arrays as msgpack-numpy packs them; both are written here, so that
neither Ray nor these packages are needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from policy.exporting.runs import ACTIONS, Array, Log, WholeRun
from storage.experience.sample_batch import ACTION_LOGP, ORDINAL, REWARDS, STREAM, T
from storage.spaces.descriptors import Dict, Space, Tuple
from storage.spaces.leaves import leaves

_SCHEMA = pa.schema([("item", pa.binary())])


def rllib_episodes(log: Log, folder: Path) -> None:
    """All episodes are done, as Ray demands of those that it learns from."""
    for space in log.spaces:
        log.numeric(space, "rllib-episodes")
    with pq.ParquetWriter(folder / "episodes.parquet", _SCHEMA, compression="zstd") as writer:
        for runs in log.blocks(with_next=True):
            items = [msgspec.msgpack.encode(_state(run, log.spaces)) for run in runs.each()]
            writer.write_table(pa.table({"item": items}, _SCHEMA))


def _state(run: WholeRun, spaces: tuple[Space, Space]) -> dict[str, Any]:
    steps = run.rows.count
    observation, action = spaces
    logp = run.rows[ACTION_LOGP]
    outputs = {ACTION_LOGP: _buffer(_packed(logp))} if np.isfinite(logp).all() else None
    identity = {"stream": run.rows[STREAM][0], "t": _packed(run.rows[T])}
    return {
        "id_": run.name,
        "agent_id": None,
        "module_id": None,
        "multi_agent_episode_id": None,
        "observations": _buffer(_nested(observation, run.observations)),
        "actions": _buffer(_nested(action, lambda leaf: run.rows[leaf.column(ACTIONS)])),
        "rewards": _buffer(_packed(run.rows[REWARDS].astype(np.float32))),
        "infos": {**_buffer([{}] * (steps + 1)), "finalized": False},
        "extra_model_outputs": outputs,
        "is_terminated": run.terminated,
        "is_truncated": not run.terminated,
        "t_started": 0,
        "t": steps,
        "_observation_space": None,
        "_action_space": None,
        "_start_time": None,
        "_last_step_time": None,
        "custom_data": {**identity, "ordinals": _packed(run.rows[ORDINAL])},
    }


def _buffer(data: Any) -> dict[str, Any]:
    return {"data": data, "lookback": 0, "finalized": True, "space": None}


def _nested(space: Space, values: Any, path: str = "") -> Any:
    """The arrays of a space's leaves, nested as its values are."""
    prefix = f"{path}." if path else ""
    if isinstance(space, Dict):
        return {name: _nested(one, values, prefix + name) for name, one in space.spaces}
    if isinstance(space, Tuple):
        return [_nested(one, values, f"{prefix}{at}") for at, one in enumerate(space.spaces)]
    (leaf,) = leaves(space, path)
    return _packed(values(leaf))


def _packed(array: Array) -> dict[bytes, Any]:
    """An array as msgpack-numpy packs it."""
    whole = np.ascontiguousarray(array)
    return {
        b"nd": True,
        b"type": whole.dtype.str,
        b"kind": b"",
        b"shape": list(whole.shape),
        b"data": whole.tobytes(),
    }
