"""What the checks of a shard's content cost a reader: decoding with them and without.

`python -m benchmarks.content_checks`. One thread's CPU time for a shard of 150,000 rows in memory,
digest and decoding included; the two alternate. The baseline is the same with checks that do
nothing.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import storage.reading.loading as loading
from benchmarks.reader import ACTION, EPISODES, OBSERVATION, STEPS, STREAM, cartpole_like_part
from benchmarks.report import Figure, render
from storage.reading.loading import DEFAULT_COLUMNS, PartFilter, ShardLoader
from storage.reading.sources import DirectorySource
from storage.shards.shard import ShardWriter
from storage.spaces.descriptors import canonical_json

ROUNDS = 31
CHECKS = ("check_size", "check_column", "check_endings", "check_footer", "check_choices")


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Without the checks, but for those that give what decoding needs anyway."""
    kept = {name: getattr(loading, name) for name in CHECKS}
    for name in CHECKS:
        setattr(loading, name, lambda *given: None)
    try:
        yield
    finally:
        for name, check in kept.items():
            setattr(loading, name, check)


def run() -> list[Figure]:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        writer = ShardWriter(Path(folder) / "shards")
        parts = [cartpole_like_part(i, rng) for i in range(EPISODES)]
        writer.write(STREAM, canonical_json(OBSERVATION, ACTION), parts)
        with DirectorySource(folder) as source:
            (shard,) = source.scan()
            content = source.read(shard)
    loader = ShardLoader(DEFAULT_COLUMNS, PartFilter())
    times: dict[str, list[float]] = {"checked": [], "unchecked": []}
    for _ in range(ROUNDS):
        for name, spent in times.items():
            with unchecked() if name == "unchecked" else contextlib.nullcontext():
                begin = time.thread_time()
                loader.load(shard, content, 0)
                spent.append(time.thread_time() - begin)
    speed = {
        name: EPISODES * STEPS / statistics.median(spent) / 1e6 for name, spent in times.items()
    }
    return [
        Figure(
            name="decoding a shard, content checked",
            value=speed["checked"],
            unit="Msteps/s",
            baseline_name="without the checks",
            baseline_value=speed["unchecked"],
            aim=">= 0.9",
        )
    ]


if __name__ == "__main__":
    print(render(run()))
