"""A policy's log before and after its spaces were changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from storage.experience.sample_batch import SampleBatch
from storage.shards.output_writer import ParquetOutputWriter
from storage.spaces.descriptors import Discrete, Space, schema_id


def log(root: Path, spaces: tuple[Space, Space], rows: int, policy_id: str = "default") -> str:
    """Log this many one-step episodes under a declaration of these spaces; return their schema."""
    rng = np.random.default_rng(rows)
    observation = spaces[0]
    kept = isinstance(observation, Discrete)
    obs = rng.integers(0, 2, rows) if kept else rng.random((rows, *observation.shape), np.float32)  # type: ignore[union-attr]
    batch = SampleBatch(
        obs=obs,
        actions=rng.integers(0, 2, rows),
        rewards=rng.random(rows),
        action_logp=np.full(rows, np.log(0.5)),
        terminateds=np.ones(rows, np.bool_),
        truncateds=np.zeros(rows, np.bool_),
        t=np.zeros(rows, np.int64),
        eps_id=np.array([f"{policy_id}-{rows}-{i}" for i in range(rows)], object),
        policy_id=np.array([policy_id] * rows, object),
    )
    writer = ParquetOutputWriter(root, {policy_id: spaces})
    writer.write(batch)
    writer.close()
    return schema_id(*spaces)
