"""Load for benchmarks: raw HTTP/1.1 over asyncio sockets, so that mostly the server is measured.

`python -m benchmarks.load URL CONNECTIONS FILE` posts the bodies in the file and prints one line of
JSON: requests per second and latency percentiles in microseconds.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np


async def _connection(
    host: str, port: int, requests: Callable[[], bytes | None], latencies: list[float]
) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    while (request := requests()) is not None:
        begin = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        lowered = head.lower()
        at = lowered.index(b"content-length:") + 15
        await reader.readexactly(int(lowered[at : lowered.index(b"\r\n", at)]))
        latencies.append(time.perf_counter() - begin)
        if not head.startswith(b"HTTP/1.1 20"):
            raise RuntimeError(f"the server answered {head[:80]!r}")
    writer.close()


def http_request(url: str, body: bytes, content_type: str = "application/msgpack") -> bytes:
    """The bytes of one POST."""
    parts = urlsplit(url)
    head = (
        f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\n"
        f"content-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def post_all(url: str, connections: int, bodies: Sequence[bytes]) -> dict[str, float]:
    """Post each body once over `connections` connections; requests/s and latencies in us."""
    parts = urlsplit(url)
    waiting = iter([http_request(url, body) for body in bodies])
    latencies: list[float] = []
    begin = time.perf_counter()
    await asyncio.gather(
        *(
            _connection(
                parts.hostname or "", parts.port or 80, lambda: next(waiting, None), latencies
            )
            for _ in range(connections)
        )
    )
    took = time.perf_counter() - begin
    p50, p99 = np.percentile(latencies, [50, 99]) * 1e6
    return {"per_second": len(latencies) / took, "p50_us": float(p50), "p99_us": float(p99)}


def run_apart(url: str, connections: int, bodies: Sequence[bytes]) -> dict[str, Any]:
    """`post_all` in a process of its own."""
    with tempfile.NamedTemporaryFile() as file:
        for body in bodies:
            file.write(len(body).to_bytes(4, "little") + body)
        file.flush()
        command = [sys.executable, "-m", "benchmarks.load", url, str(connections), file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _main() -> None:
    url, connections, path = sys.argv[1:]
    data, bodies, at = Path(path).read_bytes(), [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        bodies.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    print(json.dumps(asyncio.run(post_all(url, int(connections), bodies))))


if __name__ == "__main__":
    _main()
