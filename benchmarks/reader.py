"""How fast a reader hands out batches, beside pyarrow alone on the same files.

`python -m benchmarks.reader`. Baseline: for each file in order, read its bytes, compare their
SHA-256 with the name, decode the same columns to an Arrow table with one thread. Each figure is the
median of interleaved runs: the machine is shared, only the ratio means something.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.report import Figure, render
from storage.experience.episode import Part
from storage.reading.shard_reader import ShardReader
from storage.shards.shard import ShardWriter
from storage.spaces.descriptors import Box, Discrete, canonical_json, schema_id

OBSERVATION, ACTION = Box((4,)), Discrete(2)
SCHEMA = schema_id(OBSERVATION, ACTION)
STREAM = f"{'0' * 12}-{SCHEMA}"
STEPS = 50  # of an episode
EPISODES = 3_000  # of a shard: about 8 MB raw
SHARDS = 8
ROUNDS = 7
BATCH = 4096
COLUMNS = [
    *("obs", "actions", "rewards", "terminateds", "truncateds", "final_obs", "eps_id", "t"),
    *("agent_id", "action_logp", "policy_id", "policy_version", "ordinal", "episode_ordinal"),
    "training_enabled",
]


def cartpole_like_part(ordinal: int, rng: np.random.Generator) -> Part:
    """An episode with numbers as incompressible as those of a simulator."""
    return Part(
        episode_id=f"{ordinal:032x}",
        part=0,
        t0=0,
        steps=STEPS,
        schema_id=SCHEMA,
        obs=rng.normal(size=(STEPS, 4)).astype(np.float32).tobytes(),
        actions=rng.integers(0, 2, STEPS).tobytes(),
        rewards=np.ones(STEPS).tobytes(),
        action_logp=np.log(rng.uniform(0.4, 0.6, STEPS)).tobytes(),
        policy_version=np.full(STEPS, 3).tobytes(),
        source=bytes(STEPS),
        pass_prob=np.ones(STEPS).tobytes(),
        ts=(1_700_000_000_000_000 + np.arange(STEPS) * 20_000).tobytes(),
        received_ts=(1_700_000_000_000_000 + np.arange(STEPS) * 20_000).tobytes(),
        final_obs=rng.normal(size=4).astype(np.float32).tobytes(),
        ended="terminated",
        ordinal=ordinal,
        episode_ordinal=ordinal,
    )


def write_shards(root: Path) -> int:
    """Fill `root`; the number of rows."""
    rng = np.random.default_rng(0)
    writer = ShardWriter(root / "shards")
    text = canonical_json(OBSERVATION, ACTION)
    for shard in range(SHARDS):
        first = shard * EPISODES
        writer.write(STREAM, text, [cartpole_like_part(first + i, rng) for i in range(EPISODES)])
    return SHARDS * EPISODES * STEPS


def read_with_pyarrow(root: Path) -> int:
    rows = 0
    for path in sorted(root.glob("shards/*/*.parquet")):
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest()[:16] != path.stem.rpartition("-")[2]:
            raise ValueError(f"{path}: the digest differs")
        table = pq.read_table(pa.BufferReader(content), columns=COLUMNS, use_threads=False)
        rows += len(table)
    return rows


def read_with_reader(root: Path, *, shuffle: int = 0) -> int:
    with ShardReader(root, batch_size=BATCH, shuffle=shuffle) as reader:
        return sum(batch.count for batch in reader)


def seconds(work: Callable[[], int], rows: int) -> float:
    begin = time.perf_counter()
    found = work()
    taken = time.perf_counter() - begin
    if found != rows:
        raise ValueError(f"expected {rows} rows, read {found}")
    return taken


def run() -> list[Figure]:
    """Rows per second, sequential and shuffled."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        rows = write_shards(root)
        ways: dict[str, Callable[[], int]] = {
            "pyarrow": lambda: read_with_pyarrow(root),
            "sequential": lambda: read_with_reader(root),
            "shuffled": lambda: read_with_reader(root, shuffle=100_000),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, work in ways.items():
                times[name].append(seconds(work, rows))
        speed = {name: rows / statistics.median(taken) / 1e6 for name, taken in times.items()}
    return [
        Figure(
            name=f"reading, {name}, B={BATCH}",
            value=speed[name],
            unit="Msteps/s",
            baseline_name="pyarrow to a table, same checks",
            baseline_value=speed["pyarrow"],
            aim=aim,
        )
        for name, aim in (("sequential", ">= 0.8"), ("shuffled", ""))
    ]


if __name__ == "__main__":
    print(render(run()))
