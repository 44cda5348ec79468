"""The rate of a reader's batches, by layout, compared with pyarrow and with arrays in memory.

`python -m benchmarks.reader`. Two baselines, each in the same process and with the same batches:

* sequential: read each file, decode the same columns with one thread, convert them to numpy arrays
  (texts by their dictionaries, final_obs unchanged), and slice these into batches of B. No digest,
  no checks, no `new_obs`.
* shuffled: all columns that the reader returns are arrays in memory; each batch gathers B rows of a
  random permutation.

Rates are by CPU time, of all threads together, and medians of interleaved runs. The machine is
shared, so only ratios are meaningful. A reader's two or three threads get no credit for cores that
a learner would use.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.report import Figure, render
from storage.experience.episode import Part
from storage.reading.shard_reader import ShardReader
from storage.shards.shard import ShardWriter
from storage.spaces.codec import Codec
from storage.spaces.descriptors import (
    Box,
    Dict,
    Discrete,
    MultiDiscrete,
    Space,
    canonical_json,
    schema_id,
)

Array = npt.NDArray[Any]

ROUNDS = 5
BATCHES = (256, 4096)
SPACES = ("obs", "actions", "final_obs")
TEXTS = ["eps_id", "agent_id", "policy_id"]
COLUMNS = [
    *("rewards", "terminateds", "truncateds", "eps_id", "t", "agent_id", "action_logp"),
    *("policy_id", "policy_version", "ordinal", "episode_ordinal", "training_enabled"),
]
ACTION = Discrete(2)


@dataclass(frozen=True)
class Layout:
    """Episodes of `steps` rows with random observations, in `shards` shards of `rows` rows."""

    name: str
    observation: Space
    steps: int
    rows: int
    shards: int
    aim: float = 0.8

    @property
    def stream(self) -> str:
        return f"{'0' * 12}-{schema_id(self.observation, ACTION)}"


_LEAVES = Dict(
    {
        "age": Box(),
        "country": Discrete(40),
        "history": Box((6,)),
        "prices": Box((2, 3)),
    }
)
LAYOUTS = (
    Layout("4 floats, 100 steps", Box((4,)), 100, 150_000, 6),
    Layout("4 floats, 1 step", Box((4,)), 1, 75_000, 4),
    Layout("8 integers, 100 steps", MultiDiscrete([10] * 8), 100, 100_000, 4),
    Layout("4 leaves, 100 steps", _LEAVES, 100, 100_000, 4),
    Layout(
        "84x84x4 images, 100 steps", Box((84, 84, 4), np.dtype("uint8")), 100, 1_000, 4, aim=0.6
    ),
)


def any_part(layout: Layout, ordinal: int, rng: np.random.Generator) -> Part:
    """An episode with numbers as incompressible as those of a simulator."""
    steps, codec = layout.steps, Codec(layout.observation)
    values = {leaf.path: _any_values(leaf.space, steps + 1, rng) for leaf in codec.leaves}
    *rows, final = codec.encode_columns(values, steps + 1)
    return Part(
        episode_id=f"{ordinal:032x}",
        part=0,
        t0=0,
        steps=steps,
        schema_id=schema_id(layout.observation, ACTION),
        obs=b"".join(rows),
        actions=rng.integers(0, 2, steps).tobytes(),
        rewards=np.ones(steps).tobytes(),
        action_logp=np.log(rng.uniform(0.4, 0.6, steps)).tobytes(),
        policy_version=np.full(steps, 3).tobytes(),
        source=bytes(steps),
        pass_prob=np.ones(steps).tobytes(),
        ts=(1_700_000_000_000_000 + np.arange(steps) * 20_000).tobytes(),
        received_ts=(1_700_000_000_000_000 + np.arange(steps) * 20_000).tobytes(),
        final_obs=final if steps > 1 else None,
        ended="terminated",
        ordinal=ordinal,
        episode_ordinal=ordinal,
    )


def _any_values(space: Any, count: int, rng: np.random.Generator) -> Array:
    if isinstance(space, Discrete):
        return rng.integers(0, space.n, count)
    if isinstance(space, MultiDiscrete):
        return rng.integers(0, 10, (count, 8))
    if space.dtype == np.uint8:
        return rng.integers(0, 256, (count, *space.shape), np.uint8)
    return rng.random((count, *space.shape), np.float32)


def write_shards(root: Path, layout: Layout) -> int:
    """Fill `root`; return the number of rows."""
    rng = np.random.default_rng(0)
    writer = ShardWriter(root / "shards")
    text, episodes = canonical_json(layout.observation, ACTION), layout.rows // layout.steps
    for shard in range(layout.shards):
        ordinals = range(shard * episodes, (shard + 1) * episodes)
        writer.write(layout.stream, text, [any_part(layout, i, rng) for i in ordinals])
    return layout.shards * layout.rows


# --- the baselines ---------------------------------------------------------------------------


def read_with_pyarrow(root: Path, size: int) -> int:
    """Read batches of `size` rows from each file; a file's last batch may be shorter."""
    rows = 0
    for path in sorted(root.glob("shards/*/*.parquet")):
        source = pa.BufferReader(path.read_bytes())
        with pq.ParquetFile(source, read_dictionary=TEXTS) as file:
            names = [n for n in file.schema_arrow.names if n.partition("__")[0] in SPACES]
            table = file.read(columns=[*names, *COLUMNS], use_threads=False)
        names = [name for name in table.column_names if not name.startswith("final_obs")]
        columns = {name: _as_numpy(table.column(name)) for name in names}
        for start in range(0, len(table), size):
            batch = {name: values[start : start + size] for name, values in columns.items()}
            rows += len(batch["t"])
    return rows


def _as_numpy(column: pa.ChunkedArray) -> Array:
    """Bytes as uint8 (N, K), lists as (N, K), texts as shared strings."""
    kind, pieces = column.type, []
    for chunk in column.chunks:
        if pa.types.is_dictionary(kind):
            words = chunk.dictionary.to_numpy(zero_copy_only=False)
            pieces.append(words[chunk.indices.to_numpy()])
        elif pa.types.is_list(kind):
            pieces.append(chunk.flatten().to_numpy().reshape(len(chunk), -1))
        elif pa.types.is_binary(kind):
            pieces.append(np.frombuffer(chunk.buffers()[2], np.uint8).reshape(len(chunk), -1))
        else:
            pieces.append(chunk.to_numpy(zero_copy_only=False))
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def gather(columns: Mapping[str, Array], size: int) -> int:
    """Gather batches of `size` rows in random order."""
    rows = len(columns["t"])
    order, found = np.random.default_rng(0).permutation(rows), 0
    for start in range(0, rows, size):
        at = order[start : start + size]
        batch = {name: values.take(at, axis=0) for name, values in columns.items()}
        found += len(batch["t"])
    return found


def read_with_reader(root: Path, size: int, *, shuffle: int = 0) -> int:
    with ShardReader(root, batch_size=size, shuffle=shuffle) as reader:
        return sum(batch.count for batch in reader)


# --- the figures -----------------------------------------------------------------------------


def rates(ways: Mapping[str, Callable[[], int]], rows: int) -> dict[str, float]:
    """Rows per second of CPU time for each way: the median of interleaved runs."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, work in ways.items():
            begin = time.process_time()
            found = work()
            times[name].append(time.process_time() - begin)
            if found != rows:
                raise ValueError(f"{name}: expected {rows} rows, read {found}")
    return {name: rows / statistics.median(taken) for name, taken in times.items()}


def figures_of(layout: Layout, size: int, root: Path, rows: int) -> list[Figure]:
    """Sequential and shuffled, in batches of `size`."""
    window = rows // 8
    with ShardReader(root, batch_size=rows) as reader:
        loaded = {name: np.ascontiguousarray(column) for name, column in reader.next().items()}
    ways: dict[str, Callable[[], int]] = {
        "pyarrow": lambda: read_with_pyarrow(root, size),
        "sequential": lambda: read_with_reader(root, size),
        "gather": lambda: gather(loaded, size),
        "shuffled": lambda: read_with_reader(root, size, shuffle=window),
    }
    found = rates(ways, rows)
    return [
        Figure(
            name=f"{layout.name}, {way}, B={size}",
            value=found[way] / 1e6,
            unit="Msteps/s",
            baseline_name=baseline,
            baseline_value=found[key] / 1e6,
            aim=f">= {aim}",
        )
        for way, key, baseline, aim in (
            ("sequential", "pyarrow", "pyarrow alone, no digest, no check", layout.aim),
            ("shuffled", "gather", "gather of arrays in memory", 0.6),
        )
    ]


def run() -> list[Figure]:
    figures = []
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            rows = write_shards(Path(folder), layout)
            for size in BATCHES:
                figures += figures_of(layout, size, Path(folder), rows)
    return figures


if __name__ == "__main__":
    print(render(run()))
