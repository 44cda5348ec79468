"""The cost of logging for a service during outages of its collector.

The collector is up, absent, frozen by SIGSTOP, or behind a full queue. Measured are the service's
calls, and the longest stall of an asyncio loop. A call on a full queue raises after its time limit,
so it has no aim. Then a service logs 500 steps a second while its collector is killed and absent
for 20 s; its calls are measured, and the shards are checked.

    python -m benchmarks.outages
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Figure, render
from headrace import BufferFull, PolicyClient
from tests.collector_process import CollectorProcess, declare, shard_rows

EPISODES, STEPS = 200, 10
RATE, OUTAGE = 500, 20.0  # steps/s, seconds
BOUND = 10_000.0  # microseconds: the default of max_wait
NOBODY = "http://127.0.0.1:9"
OBSERVATION = np.array([0.1, -0.2, 0.3, -0.4], np.float32)


@contextmanager
def client_of(state: str, process: CollectorProcess) -> Iterator[PolicyClient]:
    """A client whose collector is in this state; for `full`, its queue is full."""
    options: dict[str, Any] = {"max_pending": 3} if state.startswith("full") else {}
    if state == "full, drop":
        options["on_full"] = "drop"
    if state == "full, spool":
        options |= {"on_full": "spool", "spool_dir": process.root / "spool"}
    stopped = state in ("frozen", "frozen, own ids")
    if stopped:
        os.kill(process.serving_pid(), signal.SIGSTOP)
    up = stopped or state.startswith("up")
    client = PolicyClient(process.address if up else NOBODY, **options)
    try:
        if state.startswith("up"):
            client.connect()
        yield client
    finally:
        if stopped:
            os.kill(process.serving_pid(), signal.SIGCONT)
        with suppress(TimeoutError):
            client.close(30.0 if up else 0.0)


def timed(call: Callable[..., Any], *given: Any) -> tuple[float, Any]:
    began, found = time.perf_counter(), None
    with suppress(BufferFull):
        found = call(*given)
    return (time.perf_counter() - began) * 1e6, found


async def play(client: PolicyClient, own: bool) -> tuple[dict[str, list[float]], float]:
    """Microseconds of each call in a service's handler, and the longest stall of its loop."""
    times: dict[str, list[float]] = {"start_episode": [], "log_action": []}
    stalls = [0.0]

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            stalls.append((time.perf_counter() - began) * 1e6 - 1_000)

    watching = asyncio.ensure_future(watch())
    for number in range(EPISODES):
        seconds, name = timed(client.start_episode, f"{time.time_ns()}-{number}" if own else None)
        times["start_episode"].append(seconds)
        await asyncio.sleep(0)
        for step in range(STEPS if name else 0):
            times["log_action"].append(timed(client.log_action, name, OBSERVATION, step & 1)[0])
            await asyncio.sleep(0)
    watching.cancel()
    return times, max(stalls)


def pace(client: PolicyClient, seconds: float, times: list[float]) -> int:
    """Log RATE steps/s in episodes of STEPS; append the microseconds of each call to `times`."""
    began, logged, name = time.perf_counter(), 0, ""
    while (due := began + logged / RATE) < began + seconds:
        time.sleep(max(0.0, due - time.perf_counter()))
        if logged % STEPS == 0:
            spent, name = timed(client.start_episode)
            times.append(spent)
        times.append(timed(client.log_action, name, OBSERVATION, logged & 1)[0])
        times.append(timed(client.log_returns, name, 1.0)[0])
        logged += 1
        if logged % STEPS == 0:
            times.append(timed(client.end_episode, name)[0])
    return logged


def outage() -> list[Figure]:
    """A collector that is killed, and absent for OUTAGE seconds."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        declare(root)
        with CollectorProcess(root) as process:
            with PolicyClient(process.address) as client:
                logged = pace(client, 3.0, [])
                killer = threading.Thread(target=process.kill)
                killer.start()
                logged += pace(client, OUTAGE, times)
                killer.join()
                starter = threading.Thread(target=process.restart)
                starter.start()
                logged += pace(client, 3.0, times)
                starter.join()
                client.flush(60.0)
            process.stop()
        rows = Counter((row["eps_id"], row["t"]) for row in shard_rows(root))
    doubled = sum(rows.values()) - len(rows)
    outcome = f"{OUTAGE:.0f} s without a collector, {RATE} steps/s"
    lost = [
        Figure(
            name=f"{outcome}: {what}",
            value=count,
            unit="steps",
            baseline_name="logged",
            baseline_value=logged,
            aim="<= 0",
        )
        for what, count in (("lost", logged - len(rows)), ("doubled", doubled))
    ]
    spent = [
        Figure(
            name=f"{outcome}: a call's {name}",
            value=float(np.percentile(times, share)),
            unit="us",
            baseline_name="max_wait",
            baseline_value=BOUND,
            aim="<= 1",
        )
        for name, share in (("p50", 50), ("p99", 99))
    ]
    return lost + spent


def run() -> list[Figure]:
    """The caller's p50 and p99 and the loop's longest stall, in microseconds."""
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        declare(Path(folder))
        with CollectorProcess(Path(folder)) as process:
            for state in (
                "up",
                "up, own ids",
                "absent",
                "absent, own ids",
                "frozen",
                "frozen, own ids",
                "full",
                "full, drop",
                "full, spool",
            ):
                with client_of(state, process) as client:
                    times, stall = asyncio.run(play(client, "own ids" in state))
                found = {
                    f"{call} {name}": float(np.percentile(taken, share))
                    for call, taken in times.items()
                    for name, share in (("p50", 50), ("p99", 99), ("max", 100))
                    if taken
                }
                found["loop's longest stall"] = stall
                figures += [
                    Figure(
                        name=f"{state}: {name}",
                        value=value,
                        unit="us",
                        baseline_name="max_wait",
                        baseline_value=BOUND,
                        aim="<= 1" if name.endswith("p99") and state != "full" else "",
                    )
                    for name, value in found.items()
                ]
    return figures + outage()


if __name__ == "__main__":
    print(render(run()))
