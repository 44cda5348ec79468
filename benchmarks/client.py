"""The cost of logging for the program that logs: the caller's time in `log_action`.

`python -m benchmarks.client`. Baseline: the same validation (the codec's encoding of observation
and action) and `deque.append` of both. A server in its own process acknowledges every batch without
reading it, so that the sending thread works as in production and competes for the interpreter. Each
figure is the median of interleaved runs. The machine is shared, so only ratios are meaningful.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.report import Figure, render
from ingest.client.policy_client import PolicyClient
from storage.spaces.codec import Codec
from storage.spaces.descriptors import Box, Discrete, space_to_json

OBSERVATION, ACTION = Box((4,)), Discrete(2)
CALLS = 10_000  # per run; all of them fit in the queue
ROUNDS = 9
MOST_BYTES = 150.0  # of a step in a batch

SERVER = """
import asyncio, sys
from ingest.protocol import messages as wire

SPEC = sys.argv[1].encode()
KIND = {True: b"application/json", False: b"application/msgpack"}
REGISTERED = wire.encode(wire.Registered(instance="i"), wire.MSGPACK)
REPLY = wire.encode(wire.EventsReply(durable=True, accepted=0), wire.MSGPACK)

async def serve(reader, writer):
    try:
        while True:
            head = (await reader.readuntil(b"\\r\\n\\r\\n")).lower()
            if b"content-length:" in head:
                await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\\r\\n")[0]))
            spec = head.startswith(b"get")
            body = SPEC if spec else REGISTERED if b"/v1/instances" in head else REPLY
            lines = b"HTTP/1.1 200 OK\\r\\ncontent-type: %b\\r\\ncontent-length: %d\\r\\n\\r\\n"
            writer.write(lines % (KIND[spec], len(body)) + body)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


def start_server() -> tuple[subprocess.Popen[str], str]:
    """Start a process that acknowledges everything; return it and its address."""
    policy = {"observation": space_to_json(OBSERVATION), "action": space_to_json(ACTION)}
    spec = json.dumps({"protocol": 1, "durable": True, "policies": {"default": policy}})
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, spec], stdout=subprocess.PIPE, text=True
    )
    if process.stdout is None:
        raise RuntimeError("the server has no output")
    return process, f"http://127.0.0.1:{int(process.stdout.readline())}"


def time_baseline(observation: Any) -> float:
    """Seconds per call: encode both values and append them."""
    observe, act = Codec(OBSERVATION).encode, Codec(ACTION).encode
    queue: deque[tuple[bytes, bytes]] = deque()
    began = time.perf_counter()
    for i in range(CALLS):
        queue.append((observe(observation, "obs"), act(i & 1, "action")))
    return (time.perf_counter() - began) / CALLS


def time_log_action(client: PolicyClient, observation: Any) -> float:
    """Seconds per call of log_action, in one long episode."""
    episode = client.start_episode()
    began = time.perf_counter()
    for i in range(CALLS):
        client.log_action(episode, observation, i & 1)
    seconds = (time.perf_counter() - began) / CALLS
    client.end_episode(episode)
    client.flush()
    return seconds


def log_all(client: PolicyClient, observation: Any) -> None:
    """Log steps of 16 bytes of observation, with propensity and reward, in episodes of 100."""
    for i in range(CALLS):
        if i % 100 == 0:
            episode = client.start_episode()
        client.log_action(episode, observation, i & 1, action_prob=0.5)
        client.log_returns(episode, 1.0)
        if i % 100 == 99:
            client.end_episode(episode)


def time_log_step(client: PolicyClient, observation: Any) -> float:
    """Seconds per call of log_step: start, action with reward, end."""
    began = time.perf_counter()
    for i in range(CALLS):
        client.log_step(observation, i & 1, 1.0, action_prob=0.5)
    seconds = (time.perf_counter() - began) / CALLS
    client.flush()
    return seconds


def bytes_per_step(client: PolicyClient, what: str, log: Callable[[], object]) -> Figure:
    """The request bytes per step, for the CALLS steps that `log` logs."""
    transport, total = client._transport, 0
    attempt = transport.attempt

    def counted(
        method: str, path: str, body: bytes | None = None, *given: Any, **named: Any
    ) -> Any:
        nonlocal total
        total += len(body or b"") if path == "/v1/events" else 0
        return attempt(method, path, body, *given, **named)

    transport.attempt = counted  # type: ignore[method-assign, assignment]  # called as below
    try:
        log()
        client.flush()
    finally:
        transport.attempt = attempt  # type: ignore[method-assign]  # the original method
    return Figure(
        name=f"bytes a batched step, {what}",
        value=total / CALLS,
        unit="B",
        baseline_name="the aim",
        baseline_value=MOST_BYTES,
        aim="<= 1",
    )


def run() -> list[Figure]:
    """The caller's cost of one call, in microseconds, and the bytes of its step."""
    observation = np.array([0.1, -0.2, 0.3, -0.4], np.float32)
    process, address = start_server()
    times: dict[str, list[float]] = {"baseline": [], "log_action": [], "log_step": []}
    try:
        with PolicyClient(address) as client:
            for _ in range(ROUNDS):
                times["baseline"].append(time_baseline(observation))
                times["log_action"].append(time_log_action(client, observation))
                times["log_step"].append(time_log_step(client, observation))
            size = bytes_per_step(client, "log_action", lambda: log_all(client, observation))
    finally:
        process.terminate()
        process.wait()
    median = {name: statistics.median(found) * 1e6 for name, found in times.items()}
    costs = [
        Figure(
            name=f"caller's cost of {name}",
            value=median[name],
            unit="us",
            baseline_name="validation + deque.append",
            baseline_value=median["baseline"],
            aim=aim,
        )
        for name, aim in (("log_action", "<= 2"), ("log_step", ""))
    ]
    return [*costs, size]


if __name__ == "__main__":
    print(render(run()))
