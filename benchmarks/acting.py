"""The cost of remote inference, as ratios of times.

They compare `get_action` with the same POST on a raw socket, which is encoded beforehand and whose
answer is not decoded; that POST with a GET of `/healthz` on the same socket; and the same client on
a server that does nothing. The client's CPU time is printed to stderr.
"""

from __future__ import annotations

import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.collector import empty_server
from benchmarks.live import OBS, publish
from benchmarks.report import Figure
from ingest.client.policy_client import PolicyClient
from ingest.protocol import messages as wire
from policy.inference.weight_store import WeightStore
from tests.collector_process import CollectorProcess, declare

ROUNDS, CALLS = 9, 400


def p50(client: PolicyClient) -> tuple[float, float]:
    """Microseconds of a get_action in one episode: wall time, and CPU time."""
    episode, found = client.start_episode(), []
    client.get_action(episode, OBS)
    own = time.process_time()
    for _ in range(CALLS):
        begin = time.perf_counter()
        client.get_action(episode, OBS)
        found.append(time.perf_counter() - begin)
    own = time.process_time() - own
    client.end_episode(episode)
    client.flush()
    return statistics.median(found) * 1e6, own / CALLS * 1e6


class RawSocket:
    """HTTP requests written to one socket."""

    def __init__(self, address: str) -> None:
        self.host = address.removeprefix("http://")
        host, _, port = self.host.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, line: str, body: bytes = b"") -> tuple[float, bytes]:
        """Send a request; return the seconds it took, and the body of the answer."""
        kind = f"Content-Type: {wire.MSGPACK}\r\nAccept: {wire.MSGPACK}\r\n" if body else ""
        head = f"{line} HTTP/1.1\r\nHost: {self.host}\r\n{kind}Content-Length: {len(body)}\r\n\r\n"
        request = head.encode() + body
        begin = time.perf_counter()
        self._socket.sendall(request)
        read = b""
        while True:
            read += self._socket.recv(65_536)
            got, blank, answer = read.partition(b"\r\n\r\n")
            length = got.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            if blank and len(answer) >= int(length):
                return time.perf_counter() - begin, answer


def raw_p50(client: PolicyClient, raw: RawSocket) -> float:
    """Microseconds of the POST of one get_action."""
    episode, found = client.start_episode(), []
    client.get_action(episode, OBS)
    client.flush()
    state = client._book.open[episode]
    for _ in range(CALLS):
        request = wire.GetAction(
            episode_id=episode,
            seq=state.seq,
            obs=state.policy.observe(episode, OBS),
            ts=time.time_ns() // 1000,
            decided=state.decided,
        )
        instance = client._outbox.instance or ""
        batch = wire.ActionBatch(
            instance=instance, events=[], actions=[request], durable=False, wait=1.0
        )
        seconds, answer = raw.ask("POST /v1/actions", msgspec.msgpack.encode(batch))
        reply = wire.decode(answer, wire.MSGPACK, wire.ActionsReply).actions[0]
        if reply.error is not None:
            raise RuntimeError(f"the collector refused: {reply.error}")
        state.seq, state.decided = state.seq + 1, reply.decision
        found.append(seconds)
    client.end_episode(episode)
    client.flush()
    return statistics.median(found) * 1e6


def get_p50(raw: RawSocket) -> float:
    return statistics.median(raw.ask("GET /healthz")[0] for _ in range(CALLS)) * 1e6


def run() -> list[Figure]:
    """Microseconds of a remote action and of its baselines."""
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
            raw = RawSocket(process.address)
            rows = [
                (*p50(real), p50(empty)[0], raw_p50(real, raw), get_p50(raw)) for _ in range(ROUNDS)
            ]
    action, cpu, nothing_p50, post, get = map(float, np.median(np.array(rows), axis=0))
    print(f"  processor us of the client per get_action: {cpu:.0f}", file=sys.stderr)
    return [
        Figure(
            name=name,
            value=value,
            unit="us",
            baseline_name=against,
            baseline_value=baseline,
            aim=aim,
        )
        for name, value, against, baseline, aim in (
            ("remote get_action, p50", action, "the same POST, raw socket", post, "<= 1.3"),
            ("the same POST, raw socket", post, "an empty GET, raw socket", get, "<= 2.5"),
            ("remote get_action, p50", action, "the same client, no work", nothing_p50, "<= 2"),
        )
    ]
