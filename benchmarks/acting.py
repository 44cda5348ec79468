"""What remote inference costs: `get_action`, and the same client on a server that does nothing."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.collector import empty_server
from benchmarks.live import OBS, publish
from benchmarks.report import Figure
from ingest.client.policy_client import PolicyClient
from policy.inference.weight_store import WeightStore
from tests.collector_process import CollectorProcess, declare

ROUNDS, CALLS = 9, 400


def p50(client: PolicyClient) -> float:
    """Microseconds of one get_action, within one episode."""
    episode, found = client.start_episode(), []
    for _ in range(CALLS):
        begin = time.perf_counter()
        client.get_action(episode, OBS)
        found.append(time.perf_counter() - begin)
    client.end_episode(episode)
    client.flush()
    return statistics.median(found) * 1e6


def run() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        declare(root, action="discrete:2")
        publish(WeightStore(root, "default"), 1)
        with (
            CollectorProcess(root) as process,
            empty_server() as nothing,
            PolicyClient(process.address, "remote") as real,
            PolicyClient(nothing, "remote") as empty,
        ):
            sides = np.array([(p50(real), p50(empty)) for _ in range(ROUNDS)])
    value, baseline = np.median(sides, axis=0)
    return [
        Figure(
            name="remote get_action, p50",
            value=float(value),
            unit="us",
            baseline_name="the same client on an empty handler",
            baseline_value=float(baseline),
            aim="<= 2",
        )
    ]
