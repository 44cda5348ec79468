"""The rate of importing a log, compared with the raw route and with writing the same Parquet file.

`headrace import` is a separate process, whose time, CPU time and memory are measured. The raw route
posts prepared bodies with the same columns one after another; both end with the last answer.
`python -m benchmarks.importing ROWS STEPS` measures a log of ROWS rows in episodes of STEPS steps.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.report import Figure, render
from ingest.delivery.transport import Delivery, Transport
from ingest.protocol import messages as wire
from tests.collector_process import CollectorProcess, declare

SHAPES = ((100_000, 1), (2_000_000, 100))
REQUEST_ROWS = 100_000
WORDS = ["--observation", "x", "--observation", "y", "--action", "a", "--reward", "r"]
WORDS += ["--action-prob", "p", "--json"]


def _log(rows: int, steps: int) -> Any:
    drawn = np.random.default_rng(0)
    return pa.table(
        {
            "x": drawn.normal(size=rows),
            "y": drawn.normal(size=rows),
            "a": drawn.integers(0, 2, rows),
            "r": drawn.normal(size=rows),
            "p": drawn.uniform(0.1, 0.9, rows),
            "e": np.arange(rows) // steps,
        }
    )


def _bodies(log: Any) -> Iterator[bytes]:
    """The bodies for the raw route, with the columns that an import makes of the log."""
    observations = np.column_stack([log["x"], log["y"]]).astype(np.float32).reshape(-1)
    names = pc.binary_join_element_wise("raw-0123456789", log["e"].cast(pa.string()), "-")
    columns = {
        "eps_id": names,
        "obs": pa.FixedSizeListArray.from_arrays(pa.array(observations), 2),
        "actions": log["a"],
        "rewards": log["r"],
        "action_logp": pc.ln(log["p"]),
    }
    table = pa.table(columns)
    for at in range(0, len(table), REQUEST_ROWS):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(at, REQUEST_ROWS))
        yield sink.getvalue().to_pybytes()


def _raw(address: str, bodies: list[bytes]) -> float:
    """Seconds until all of them are answered."""
    transport = Transport(address, timeout=300.0)
    begin = time.perf_counter()
    for number, body in enumerate(bodies):
        headers = {"Content-Type": wire.ARROW, "Headrace-CRC32": f"{zlib.crc32(body):08x}"}
        headers["Idempotency-Key"] = f"raw:{number}"
        reply = Delivery(transport, "POST", "/v1/steps", body, headers).run(wire.EventsReply)
        if reply.refused:
            raise RuntimeError(f"refused: {reply.refused[0]}")
    took = time.perf_counter() - begin
    transport.close()
    return took


def _imported(address: str, path: Path, steps: int) -> tuple[dict[str, Any], float, float]:
    """(the report, CPU seconds, peak memory in MB) of `headrace import`."""
    words = ["import", str(path), *WORDS, "--address", address]
    words += ["--episode", "e"] if steps > 1 else []
    process = subprocess.Popen([sys.executable, "-m", "headrace", *words], stdout=subprocess.PIPE)
    if process.stdout is None:
        raise RuntimeError("no output")
    memory = 0.0
    with process.stdout as output:
        while not select.select([output], [], [], 0.1)[0]:  # wait4's peak includes this process
            memory = _largest(process.pid)
        report: dict[str, Any] = json.loads(output.read())
    _, _, used = os.wait4(process.pid, 0)
    process.returncode = 0
    return report, used.ru_utime + used.ru_stime, memory


def _written(path: Path, copy: Path) -> float:
    """Seconds in which DuckDB reads the file and writes it again."""
    with duckdb.connect() as database:
        begin = time.perf_counter()
        database.read_parquet(str(path)).write_parquet(str(copy))
        return time.perf_counter() - begin


@contextmanager
def _collector() -> Iterator[CollectorProcess]:
    with tempfile.TemporaryDirectory() as folder:
        declare(Path(folder), "box:2", "discrete:2", seal_seconds=5.0)
        with CollectorProcess(Path(folder)) as process:
            yield process


def _cpu(process: CollectorProcess) -> float:
    pids = [process.process.pid, *filter(None, [process.writer_pid()])]
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")


def _memory(process: CollectorProcess) -> list[float]:
    """The peak memory of collector and writer so far, in MB."""
    pids = [process.process.pid, *filter(None, [process.writer_pid()])]
    return [_largest(pid) for pid in pids]


def _largest(pid: int) -> float:
    """The peak memory of a running process, in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1024


def shape(rows: int, steps: int) -> list[Figure]:
    """One log, imported, imported again, sent raw, and written as Parquet."""
    log = _log(rows, steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log.parquet")
        pq.write_table(log, path)
        written = _written(path, Path(folder, "copy.parquet"))
        bodies = list(_bodies(log))
        with _collector() as collector:
            report, cpu, memory = _imported(collector.address, path, steps)
            served, largest = _cpu(collector), _memory(collector)
            again, *_ = _imported(collector.address, path, steps)
        with _collector() as collector:
            raw = _raw(collector.address, bodies)
            raw_served = _cpu(collector)
    if (report["steps"], again["rows_known"]) != (rows, rows):
        raise RuntimeError(f"expected {rows} rows, got {report}")
    name, rate = f"import of {rows:,} rows, {steps} steps an episode", rows / report["seconds"]
    return [
        Figure(name=name, value=rate, unit="rows/s", baseline_name="the raw route",
               baseline_value=rows / raw),
        Figure(name=name, value=rate, unit="rows/s", baseline_name="DuckDB writes the file",
               baseline_value=rows / written),
        Figure(name=f"{name}: again", value=rows / again["seconds"], unit="rows/s",
               baseline_name="the first time", baseline_value=rate),
        Figure(name=f"{name}: the client's processor", value=cpu, unit="s",
               baseline_name="collector and writer", baseline_value=served),
        Figure(name=f"{name}: collector and writer", value=served, unit="s",
               baseline_name="theirs by the raw route", baseline_value=raw_served),
        Figure(name=f"{name}: the client's memory", value=memory, unit="MB",
               baseline_name="the log in memory", baseline_value=log.nbytes / 2**20),
        *(Figure(name=f"{name}: the {who}'s memory", value=used, unit="MB",
                 baseline_name="the log in memory", baseline_value=log.nbytes / 2**20)
          for who, used in zip(("collector", "writer"), largest, strict=False)),
    ]  # fmt: skip


def run() -> list[Figure]:
    return [figure for rows, steps in SHAPES for figure in shape(rows, steps)]


if __name__ == "__main__":
    print(render(shape(int(sys.argv[1]), int(sys.argv[2]))))
