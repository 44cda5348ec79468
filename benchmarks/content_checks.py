"""The cost of checking a shard's content for a reader: decoding with and without the checks.

`python -m benchmarks.content_checks`. One thread's CPU time for a shard of 150,000 rows in memory,
including digest and decoding; both alternate. In the baseline the checks do nothing.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import storage.reading.loading as loading
from benchmarks.reader import LAYOUTS, write_shards
from benchmarks.report import Figure, render
from storage.reading.loading import DEFAULT_COLUMNS, PartFilter, ShardLoader, fetch
from storage.reading.sources import DirectorySource
from tests.storage.reading.memory_source import MemorySource

ROUNDS = 31
CHECKS = ("check_size", "check_column", "check_endings", "check_footer", "check_choices")


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Disable the checks, except for those whose results decoding needs."""
    kept = {name: getattr(loading, name) for name in CHECKS}
    for name in CHECKS:
        setattr(loading, name, lambda *given: None)
    try:
        yield
    finally:
        for name, check in kept.items():
            setattr(loading, name, check)


def run() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder, DirectorySource(folder) as source:
        rows = write_shards(Path(folder), replace(LAYOUTS[0], shards=1))
        (shard,) = source.scan()
        memory = MemorySource()
        memory.put(shard.stream, shard.name, source.read(shard))
    (shard,) = memory.scan()
    loader = ShardLoader(DEFAULT_COLUMNS, PartFilter())
    times: dict[str, list[float]] = {"checked": [], "unchecked": []}
    for _ in range(ROUNDS):
        for name, spent in times.items():
            with unchecked() if name == "unchecked" else contextlib.nullcontext():
                begin = time.thread_time()
                loader.load(shard, fetch(memory, shard).proven(), 0)
                spent.append(time.thread_time() - begin)
    speed = {name: rows / statistics.median(spent) / 1e6 for name, spent in times.items()}
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
