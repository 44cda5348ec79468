"""What live clients experience: the cost of an action, and how soon a published version acts."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import urllib3

from benchmarks.client import CALLS as BYTES_CALLS
from benchmarks.client import bytes_per_step
from benchmarks.report import Figure
from ingest.client.policy_client import PolicyClient
from ingest.embedded.policy_server_input import PolicyServerInput
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.declarations.declaration import PolicyDeclaration
from storage.spaces.descriptors import parse_space
from tests.collector_process import CollectorProcess, declare

ROUNDS, CALLS, PUBLISHED = 7, 3_000, 40
ENDED, STEPS = 200, 20
SPEC = PolicySpec(parse_space("box:4"), parse_space("discrete:2"))
OBS = np.array([0.1, -0.2, 0.3, 0.4], np.float32)


def publish(store: WeightStore, seed: int) -> int:
    weights = Policy(SPEC, seed=seed).get_weights()
    digest = store.add_candidate(weights, spec=SPEC.to_json(), metrics={"seed": seed}, lineage={})
    return store.publish(digest).version


def microseconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS * 1e6


def action_figure(client: PolicyClient, store: WeightStore) -> Figure:
    """Local `get_action`, with queueing the decision, against the forward pass alone."""
    _, weights = store.load(1)
    bare = NumpyPolicy(SPEC, weights)
    flat = OBS.reshape(1, 4)
    episode = client.start_episode()
    sides: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        sides[0].append(microseconds(lambda: client.get_action(episode, OBS)))
        client.flush()
        sides[1].append(microseconds(lambda: bare.dist_inputs(flat)))
    client.end_episode(episode)
    return Figure(
        name="local get_action",
        value=statistics.median(sides[0]),
        unit="us",
        baseline_name="numpy forward of the same network",
        baseline_value=statistics.median(sides[1]),
        aim="<= 3",
    )


def adoption_figures(client: PolicyClient, store: WeightStore) -> list[Figure]:
    """The time from when a version is live to the first action with it."""
    episode, found, published = client.start_episode(), [], []
    for seed in range(PUBLISHED):
        begin = time.perf_counter()
        version = publish(store, seed + 100)
        live = time.perf_counter()
        while client.acting_version() != version:
            time.sleep(0.0002)
        client.get_action(episode, OBS)
        found.append((time.perf_counter() - live) * 1e3)
        published.append((live - begin) * 1e3)
    client.end_episode(episode)
    return [
        Figure(
            name=f"published -> acted with, p{q}",
            value=float(np.percentile(found, q)),
            unit="ms",
            baseline_name="publishing itself, p50",
            baseline_value=statistics.median(published),
        )
        for q in (50, 99)
    ]


def arrival_figures(root: Path | None) -> list[Figure]:
    """The time from `end_episode` in a client's process to the batch in the trainer's."""
    rules = PolicyDeclaration(observation=SPEC.observation, action=SPEC.action)
    found, bare = [], []
    with PolicyServerInput(None, "127.0.0.1", 0, root=root, policies=rules) as inputs:
        command = [sys.executable, "-m", "benchmarks.ending_client", inputs.address, str(STEPS)]
        with (
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as client,
            contextlib.ExitStack() as stack,
        ):
            if client.stdin is None or client.stdout is None:
                raise RuntimeError("the client has no pipes")
            stack.callback(client.stdin.close)
            for _ in range(ENDED):
                client.stdout.readline()
                asked = time.perf_counter()
                urllib3.request("GET", f"{inputs.address}/healthz")
                bare.append((time.perf_counter() - asked) * 1e3)
                client.stdin.write("end\n")
                client.stdin.flush()
                if inputs.next(5.0).count != STEPS:
                    raise RuntimeError("expected one episode")
                arrived = time.perf_counter()
                found.append((arrived - float(client.stdout.readline())) * 1e3)
    return [
        Figure(
            name=f"end_episode -> next(), {'root' if root else 'memory'}, p{q}",
            value=float(np.percentile(found, q)),
            unit="ms",
            baseline_name="an empty request to it, p50",
            baseline_value=statistics.median(bare),
        )
        for q in (50, 99)
    ]


def run() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        declare(root)
        store = WeightStore(root, "default")
        publish(store, 1)
        with CollectorProcess(root) as process, PolicyClient(process.address) as client:
            figures = [action_figure(client, store), *adoption_figures(client, store)]
            episode = client.start_episode()
            figures.append(
                bytes_per_step(
                    client,
                    "local get_action",
                    lambda: [client.get_action(episode, OBS) for _ in range(BYTES_CALLS)],
                )
            )
            client.end_episode(episode)
        return figures + arrival_figures(None) + arrival_figures(root / "hosted")
