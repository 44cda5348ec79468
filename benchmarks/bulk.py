"""The rate at which a bulk import becomes durable, and what limits it.

A step counts when its request is answered, which is after its commit. Meanwhile the writer process
writes shards, at the default sealing rules, on the same cores; the load generator uses them too. A
run is REQUESTS requests, which take five seconds or more at a million steps/s.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import bulk_load
from benchmarks.collector import SPACES, collector, empty_server, medians
from benchmarks.report import Figure
from ingest.bulk_import.arrow_stream import read_table
from ingest.bulk_import.forms import Form
from ingest.bulk_import.step_columns import StepColumns
from ingest.episodes.policy_rules import PolicyRules
from storage.declarations.declaration import PolicyDeclaration
from storage.journal.sqlite_journal import SqliteJournal
from tests.collector_process import CollectorProcess

ROUNDS, REQUESTS, WARM = 3, 6_000, 200
STEPS = bulk_load.STEPS * bulk_load.EPISODES
AIM = 1_000_000
DROP_EVERY = 25  # commits; a shard of 16 MB is recorded as often


def _load(address: str, first: int, count: int) -> dict[str, float]:
    """Send this many requests from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bulk_load", address, str(first), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


class _Imports:
    """Runs of imports into one collector: steps/s, and the CPU time of its two processes."""

    def __init__(self, process: CollectorProcess) -> None:
        self._process = process
        self._next = 0
        self.cpu: list[float] = []  # s per 1,000 steps in each run: collector and writer
        self.busy = 0
        self._run(WARM)

    def _run(self, count: int) -> float:
        found = _load(self._process.address, self._next, count)
        self._next += count
        self.busy += int(found["busy"])
        return found["per_second"]

    def per_second(self) -> float:
        before = self._cpu()
        value = self._run(REQUESTS)
        self.cpu.append((self._cpu() - before) * 1_000 / (REQUESTS * STEPS))
        return value

    def _cpu(self) -> float:
        writer = self._process.writer_pid()
        pids = [self._process.process.pid, *([] if writer is None else [writer])]
        return sum(_cpu_seconds(pid) for pid in pids)


def _cpu_seconds(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _blob(stream: bytes) -> bytes:
    """As many bytes as in the journal row of a request."""
    observation, action = SPACES
    rules = PolicyRules.of(PolicyDeclaration(observation=observation, action=action))
    table = read_table(bulk_load.body(stream, 0))
    block = StepColumns(table, Form(table.schema, rules), None, numbered=False).block(0, STEPS)
    return b"".join(block.columns.values())


@contextmanager
def _journal() -> Iterator[SqliteJournal]:
    with tempfile.TemporaryDirectory() as folder:
        journal = SqliteJournal.open(Path(folder))
        try:
            yield journal
        finally:
            journal.close()


def _committed_per_second(blob: bytes) -> float:
    """Steps/s of the journal alone: commits of one row per connection; rows are dropped."""
    with _journal() as journal:
        begin, dropped = time.perf_counter(), 1
        for commit in range(1, REQUESTS // bulk_load.CONNECTIONS + 1):
            first = journal.last_row + 1
            rows = [(first + n, blob) for n in range(bulk_load.CONNECTIONS)]
            journal.commit(rows)
            if commit % DROP_EVERY == 0:
                journal.commit(drop_rows=range(dropped, first))
                dropped = first
        return journal.last_row * STEPS / (time.perf_counter() - begin)


def run() -> list[Figure]:
    """The rate against its aim, an empty handler and the journal alone; the CPU time."""
    stream = bulk_load.template()
    blob = _blob(stream)
    with ExitStack() as stack:
        imports = _Imports(stack.enter_context(collector(seal_seconds=5.0)))
        nothing = stack.enter_context(empty_server())
        value, empty, alone = medians(
            ROUNDS,
            imports.per_second,
            lambda: _load(nothing, 0, REQUESTS)["per_second"],
            lambda: _committed_per_second(blob),
        )
    size = f"{len(stream) / STEPS:.0f} B a step"
    shape = f"{bulk_load.EPISODES} x {bulk_load.STEPS} steps a request, {size}"
    name = f"durable steps/s by Arrow import, {shape}, {bulk_load.CONNECTIONS} connections"
    return [
        *(
            Figure(name=name, value=value, unit="steps/s", baseline_name=other,
                   baseline_value=number, aim=aim)
            for other, number, aim in (
                ("the aim", AIM, ">= 1"),
                ("the same requests to an empty handler", empty, ""),
                (f"the journal alone, {len(blob) / STEPS:.0f} B a step", alone, ""),
            )
        ),
        Figure(
            name=f"CPU of collector and writer a request of those ({imports.busy} heard 429)",
            value=sorted(imports.cpu)[ROUNDS // 2] * 1e6,
            unit="us",
            baseline_name="what two cores have for it at the aim",
            baseline_value=2 * 1e6 * STEPS / AIM,
            aim="<= 1",
        ),
    ]  # fmt: skip
