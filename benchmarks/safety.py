"""The price of safety: what syncing costs, and how fast bulk imports become durable."""

from __future__ import annotations

import io
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import urllib3

from benchmarks.collector import CONNECTIONS, ROUNDS, _single_events, medians
from benchmarks.load import run_apart
from benchmarks.report import Figure
from ingest.wire import ARROW
from tests.collector_process import CollectorProcess, declare
from tests.faults import slow_disk

SYNC_SECONDS = 0.001
STEPS, EPISODES, REQUESTS, SENDERS = 250, 4, 60, 4


@contextmanager
def build(program: tuple[str, ...] = ("-m", "ingest")) -> Iterator[CollectorProcess]:
    env = {slow_disk.SECONDS: str(SYNC_SECONDS)}
    with tempfile.TemporaryDirectory() as folder:
        declare(Path(folder), seal_seconds=3600.0)
        with CollectorProcess(Path(folder), program=program, env=env) as process:
            yield process


def sync_figure() -> Figure:
    """Durable single events/s with a sync of 1 ms more, and of the same build with sync off."""
    with ExitStack() as stack:
        safe = stack.enter_context(build(slow_disk.program(None)))
        unsafe = stack.enter_context(build(("-m", "tests.faults.launcher", "no-sync", "ingest")))
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


def import_body(number: int) -> bytes:
    """An Arrow stream of EPISODES episodes of STEPS steps."""
    rows = EPISODES * STEPS
    names = [f"{number}-{i // STEPS}" for i in range(rows)]
    obs = pa.FixedSizeListArray.from_arrays(np.zeros(rows * 4, np.float32), 4)
    table = pa.table(
        {
            "eps_id": pa.array(names),
            "t": pa.array(np.tile(np.arange(STEPS), EPISODES)),
            "obs": obs,
            "actions": pa.array(np.ones(rows, np.int64)),
            "rewards": pa.array(np.ones(rows)),
            "terminateds": pa.array(np.arange(rows) % STEPS == STEPS - 1),
        }
    )
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def import_figure() -> Figure:
    """Durable steps/s of bulk imports, 1,000 steps a request, against reading the same bytes."""
    with build() as process:
        numbers = iter(range(1_000_000))

        def imported() -> float:
            bodies = [import_body(next(numbers)) for _ in range(REQUESTS)]
            begin = time.perf_counter()
            senders = [
                threading.Thread(target=_send, args=(process.address, bodies[i::SENDERS]))
                for i in range(SENDERS)
            ]
            for sender in senders:
                sender.start()
            for sender in senders:
                sender.join()
            return REQUESTS * STEPS * EPISODES / (time.perf_counter() - begin)

        def read() -> float:
            bodies = [import_body(0)] * REQUESTS
            begin = time.perf_counter()
            for body in bodies:
                pa.ipc.open_stream(body).read_all()
            return REQUESTS * STEPS * EPISODES / (time.perf_counter() - begin)

        value, baseline = medians(ROUNDS, imported, read)
    return Figure(
        name="durable steps/s by Arrow import, 1,000 a request",
        value=value,
        unit="steps/s",
        baseline_name="pyarrow reading the same bytes",
        baseline_value=baseline,
    )


def _send(address: str, bodies: list[bytes]) -> None:
    pool = urllib3.PoolManager(maxsize=1)
    for body in bodies:
        headers = {"content-type": ARROW, "headrace-crc32": f"{zlib.crc32(body):08x}"}
        answer = pool.request("POST", address + "/v1/steps", body=body, headers=headers)
        if answer.status != 200:
            raise RuntimeError(f"the collector answered {answer.status}: {answer.data!r:.200}")


def run() -> list[Figure]:
    return [sync_figure(), import_figure()]
