"""The cost of durability: syncing the journal."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.collector import CONNECTIONS, ROUNDS, _single_events, medians
from benchmarks.load import run_apart
from benchmarks.report import Figure
from tests.collector_process import PLAIN, CollectorProcess, declare
from tests.faults import slow_disk

SYNC_SECONDS = 0.001


@contextmanager
def build(program: tuple[str, ...] = ("-m", PLAIN)) -> Iterator[CollectorProcess]:
    env = {slow_disk.SECONDS: str(SYNC_SECONDS)}
    with tempfile.TemporaryDirectory() as folder:
        declare(Path(folder), seal_seconds=3600.0)
        with CollectorProcess(Path(folder), program=program, env=env) as process:
            yield process


def sync_figure() -> Figure:
    """Durable single events/s, with 1 ms added to each sync, and for a build without syncs."""
    with ExitStack() as stack:
        safe = stack.enter_context(build(slow_disk.program(None)))
        unsafe = stack.enter_context(build(("-m", "tests.faults.launcher", "no-sync", PLAIN)))
        numbers = iter(range(1_000))

        def per_second(process: CollectorProcess) -> Callable[[], float]:
            bodies = iter([_single_events(process.address, next(numbers)) for _ in range(ROUNDS)])
            url = process.address + "/v1/events"
            return lambda: float(run_apart(url, CONNECTIONS, next(bodies))["per_second"])

        value, baseline = medians(ROUNDS, per_second(safe), per_second(unsafe))
    return Figure(
        name=f"durable single events/s, {CONNECTIONS} connections, each commit 1 ms slower",
        value=value,
        unit="events/s",
        baseline_name="the same build with sync off",
        baseline_value=baseline,
        aim=">= 0.7",
    )


def run() -> list[Figure]:
    return [sync_figure()]
