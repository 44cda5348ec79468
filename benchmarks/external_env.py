"""The cost of a step through ExternalEnv: round trips between a program and a worker.

`python -m benchmarks.external_env`. Baseline: two plain `queue.Queue`s between two threads, one
item each way. A round trip is `get_action` and `log_returns` on one side, `poll` and `send_actions`
on the other, with checked values. Each figure is the median of interleaved runs. The machine is
shared, so only ratios are meaningful.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time

import numpy as np

from benchmarks.report import Figure, render
from ingest.embedded.external_env import ExternalEnv
from ingest.protocol.errors import ServingStopped
from storage.experience.episode import DEFAULT_AGENT
from storage.spaces.descriptors import Box, Discrete

TRIPS = 5_000  # per run
ROUNDS = 7


def time_queues() -> float:
    """Round trips per second of a ping-pong over two queues."""
    there: queue.Queue[object] = queue.Queue()
    back: queue.Queue[object] = queue.Queue()

    def serve() -> None:
        for _ in range(TRIPS):
            back.put(there.get())

    server = threading.Thread(target=serve)
    server.start()
    began = time.perf_counter()
    for i in range(TRIPS):
        there.put(i)
        back.get()
    seconds = time.perf_counter() - began
    server.join()
    return TRIPS / seconds


class Program(ExternalEnv):
    """One long episode of TRIPS steps."""

    seconds = 0.0

    def run(self) -> None:
        observation = np.array([0.1, -0.2, 0.3, -0.4], np.float32)
        episode = self.start_episode()
        began = time.perf_counter()
        for _ in range(TRIPS):
            self.get_action(episode, observation)
            self.log_returns(episode, 1.0)
        self.seconds = time.perf_counter() - began
        self.end_episode(episode, observation)


def time_external_env() -> float:
    """Round trips per second of the program against a worker that always acts the same."""
    program = Program(Discrete(2), Box((4,)))
    worker = program.to_base_env()
    try:
        while True:
            worker.send_actions({name: {DEFAULT_AGENT: 1} for name in worker.poll()[0]})
    except ServingStopped:
        return TRIPS / program.seconds


def run() -> list[Figure]:
    """Round trips per second, compared with the queues'."""
    rates: dict[str, list[float]] = {"queues": [], "external": []}
    for _ in range(ROUNDS):
        rates["queues"].append(time_queues())
        rates["external"].append(time_external_env())
    median = {name: statistics.median(found) for name, found in rates.items()}
    return [
        Figure(
            name="ExternalEnv round trips",
            value=median["external"],
            unit="1/s",
            baseline_name="queue.Queue ping-pong",
            baseline_value=median["queues"],
            aim=">= 0.5",
        )
    ]


if __name__ == "__main__":
    print(render(run()))
