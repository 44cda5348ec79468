"""The cost of the collector: durable logging, compared with a server that does nothing.

Each figure is a ratio within one run: both sides alternate, and their medians are compared.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import urllib3

from benchmarks.load import run_apart
from benchmarks.report import Figure
from ingest.client.policy_client import PolicyClient
from ingest.episodes.journal_events import UNKNOWN_LOGP
from ingest.protocol import messages as wire
from storage.experience.episode import Part
from storage.reading.shard_reader import ShardReader
from storage.shards.writer_process import WriterProcess
from storage.spaces.codec import Codec
from storage.spaces.descriptors import canonical_json, parse_space, schema_id
from tests.collector_process import CollectorProcess, declare

ROUNDS = 5
EPISODES, STEPS = 40, 250
SINGLE_EVENTS, CONNECTIONS = 6_000, (1, 16, 64, 256)
OBS = np.array([0.1, -0.2, 0.3, 0.4], np.float32)
SPACES = parse_space("box:4"), parse_space("discrete:2")


@contextlib.contextmanager
def collector(**rules: float) -> Iterator[CollectorProcess]:
    with tempfile.TemporaryDirectory() as folder:
        declare(Path(folder), **rules)
        with CollectorProcess(Path(folder)) as process:
            yield process


@contextlib.contextmanager
def empty_server() -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.empty_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is None:
            raise RuntimeError("the empty server has no output")
        try:
            yield process.stdout.readline().split()[1]
        finally:
            process.kill()


def medians(rounds: int, *sides: Callable[[], float]) -> list[float]:
    """The median of each side; the sides alternate."""
    found = [[side() for side in sides] for _ in range(rounds)]
    return [statistics.median(column) for column in zip(*found, strict=True)]


def client_steps_per_second(client: PolicyClient) -> float:
    """Steps/s from one client process, from logging until they are durable."""
    begin = time.perf_counter()
    for _ in range(EPISODES):
        episode = client.start_episode()
        for _ in range(STEPS):
            client.log_action(episode, OBS, 1, action_prob=0.5)
            client.log_returns(episode, 1.0)
        client.end_episode(episode, OBS)
    client.flush()
    return EPISODES * STEPS / (time.perf_counter() - begin)


def same_bytes(batches: int) -> list[bytes]:
    """The request bodies that the client sends for those steps, in `batches` requests."""
    observation, action = (Codec(space) for space in SPACES)
    events: list[wire.Event] = []
    for number in range(EPISODES):
        name = f"{number:032x}"
        events.append(wire.Start(episode_id=name, start=number))
        for seq in range(1, STEPS + 1):
            obs, act = observation.encode(OBS), action.encode(1)
            events.append(
                wire.LogAction(
                    episode_id=name, seq=seq, obs=obs, action=act, action_logp=-0.7, reward=1.0
                )
            )
        events.append(wire.End(episode_id=name, seq=STEPS + 1, obs=observation.encode(OBS)))
    size = -(-len(events) // batches)
    chunks = [events[i : i + size] for i in range(0, len(events), size)]
    return [wire.encode(wire.Batch(instance="0-a", events=c), wire.MSGPACK) for c in chunks]


def raw_steps_per_second(address: str, bodies: list[bytes]) -> float:
    pool = urllib3.PoolManager(maxsize=1)
    headers = {"content-type": wire.MSGPACK}
    pool.request("POST", address + "/v1/events", body=bodies[0], headers=headers)
    begin = time.perf_counter()
    for body in bodies:
        pool.request("POST", address + "/v1/events", body=body, headers=headers)
    return EPISODES * STEPS / (time.perf_counter() - begin)


def logging_figure() -> Figure:
    """Durable steps/s of one client, against raw posts of the same bytes to the empty server."""
    with (
        collector() as process,
        empty_server() as nothing,
        PolicyClient(process.address, inference_mode="remote") as client,
    ):
        client_steps_per_second(client)
        before = client.stats.batches
        client_steps_per_second(client)
        bodies = same_bytes(client.stats.batches - before)
        value, raw = medians(
            ROUNDS,
            lambda: client_steps_per_second(client),
            lambda: raw_steps_per_second(nothing, bodies),
        )
    return Figure(
        name="durable logged steps/s, one client process",
        value=value,
        unit="steps/s",
        baseline_name=f"urllib3, the same bytes in {len(bodies)} requests to an empty handler",
        baseline_value=raw,
        aim=">= 0.4",
    )


def _single_events(address: str, number: int) -> list[bytes]:
    """Bodies with one event each, for as many open episodes."""
    pool = urllib3.PoolManager()
    observation, action = (Codec(space) for space in SPACES)
    obs, act = observation.encode(OBS), action.encode(1)
    names = [f"{number}-{i}" for i in range(SINGLE_EVENTS)]
    starts: list[wire.Event] = [wire.Start(episode_id=name) for name in names]
    body = wire.encode(wire.Batch(events=starts), wire.MSGPACK)
    headers = {"content-type": wire.MSGPACK}
    answer = pool.request("POST", address + "/v1/events", body=body, headers=headers)
    if answer.status != 200:
        raise RuntimeError(f"the collector answered {answer.status}")
    return [
        wire.encode(
            wire.Batch(events=[wire.LogAction(episode_id=name, seq=1, obs=obs, action=act)]),
            wire.MSGPACK,
        )
        for name in names
    ]


def single_event_figures() -> list[Figure]:
    """Durable single events/s by the number of connections, against an empty handler."""
    return [_single_event_figure(connections) for connections in CONNECTIONS]


def _single_event_figure(connections: int) -> Figure:
    count = SINGLE_EVENTS if connections > 1 else SINGLE_EVENTS // 6
    with collector(seal_seconds=3600.0) as process, empty_server() as nothing:
        batches = [_single_events(process.address, n)[:count] for n in range(ROUNDS)]
        waiting = iter(batches)

        def durable() -> float:
            url = process.address + "/v1/events"
            found: float = run_apart(url, connections, next(waiting))["per_second"]
            return found

        def empty() -> float:
            url = nothing + "/v1/events"
            found: float = run_apart(url, connections, batches[0])["per_second"]
            return found

        value, baseline = medians(ROUNDS, durable, empty)
    return Figure(
        name=f"durable single events/s, {connections} connections",
        value=value,
        unit="events/s",
        baseline_name="an empty handler of the same server",
        baseline_value=baseline,
        aim=">= 0.5",
    )


def busy_writer_figure() -> Figure:
    """Ack p99 while the shard writer encodes, against the same load while it idles."""
    ratios, idle_p99, busy_p99 = [], [], []
    with collector(seal_seconds=3600.0) as process:
        batches = iter([_single_events(process.address, i)[:2_000] for i in range(2 * ROUNDS)])
        url = process.address + "/v1/events"
        for _ in range(ROUNDS):
            idle = run_apart(url, 4, next(batches))["p99_us"]
            with busy_writer():
                busy = run_apart(url, 4, next(batches))["p99_us"]
            ratios.append(busy / idle)
            idle_p99.append(idle)
            busy_p99.append(busy)
    return Figure(
        name="ack p99 with the shard writer busy",
        value=statistics.median(ratios) * statistics.median(idle_p99),
        unit="us",
        baseline_name="the same load with the writer idle (median of paired ratios)",
        baseline_value=statistics.median(idle_p99),
        aim="<= 2",
    )


@contextlib.contextmanager
def busy_writer() -> Iterator[None]:
    """Run a shard writer process that writes 100,000-step shards all the time."""
    steps = 100_000
    codec = [Codec(space) for space in SPACES]
    ones = np.ones(steps)
    part = Part(
        episode_id="busy",
        part=0,
        t0=0,
        steps=steps,
        schema_id=schema_id(*SPACES),
        obs=codec[0].encode(OBS) * steps,
        actions=codec[1].encode(1) * steps,
        rewards=ones.tobytes(),
        action_logp=np.full(steps, UNKNOWN_LOGP).tobytes(),
        policy_version=ones.astype(np.int64).tobytes(),
        source=bytes(steps),
        pass_prob=ones.tobytes(),
        ts=np.arange(steps).tobytes(),
        received_ts=np.arange(steps).tobytes(),
        ordinal=0,
        episode_ordinal=0,
    )

    spaces = canonical_json(*SPACES)
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as folder, WriterProcess(Path(folder)) as writer:
        writer.write("busy-stream", spaces, [part])

        def work() -> None:
            ordinal = 1
            while not stop.is_set():
                writer.write("busy-stream", spaces, [part.with_ordinals(ordinal, ordinal)])
                ordinal += 1

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def latency_figure() -> Figure:
    """The time from `end_episode` to the batch in a following reader, and the configured wait."""
    wait = 0.2
    found = []
    with (
        collector(seal_seconds=wait) as process,
        PolicyClient(process.address, inference_mode="remote") as client,
        ShardReader(process.root, follow=True, batch_size=1) as reader,
    ):
        for _ in range(15):
            episode = client.start_episode()
            client.log_action(episode, OBS, 1)
            begin = time.perf_counter()
            client.end_episode(episode, OBS)
            while not len(reader.next(timeout=5.0)):
                continue
            found.append(time.perf_counter() - begin)
    return Figure(
        name="end_episode -> batch in a following reader",
        value=statistics.median(found) * 1e3,
        unit="ms",
        baseline_name="the declared seal_seconds",
        baseline_value=wait * 1e3,
    )


def run() -> list[Figure]:
    return [logging_figure(), *single_event_figures(), busy_writer_figure(), latency_figure()]
