"""Load for the bulk import: requests that are ready before the clock starts, over plain sockets.

`python -m benchmarks.bulk_load ADDRESS FIRST COUNT` posts COUNT requests over CONNECTIONS
keep-alive connections, one at a time on each, and prints one line of JSON. Episodes are named after
their request's number, starting with FIRST.
"""

from __future__ import annotations

import io
import json
import socket
import sys
import time
import zlib
from collections import deque
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from ingest.protocol.messages import ARROW

STEPS, EPISODES, CONNECTIONS = 250, 4, 32
BUSY_SECONDS = 0.02
_NUMBER = "%%number"  # as long as the number that replaces it
_RECEIVED = 65_536


def template() -> bytes:
    """An Arrow stream of EPISODES episodes with STEPS steps, shaped like CartPole's."""
    rows = EPISODES * STEPS
    drawn = np.random.default_rng(0)
    table = pa.table(
        {
            "eps_id": [f"{_NUMBER}-{row // STEPS}" for row in range(rows)],
            "t": np.tile(np.arange(STEPS), EPISODES),
            "obs": pa.FixedSizeListArray.from_arrays(
                drawn.normal(size=4 * rows).astype(np.float32), 4
            ),
            "actions": drawn.integers(0, 2, rows),
            "rewards": np.ones(rows),
            "terminateds": np.arange(rows) % STEPS == STEPS - 1,
        }
    )
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def body(stream: bytes, number: int) -> bytes:
    """The stream with the episode names of this request."""
    return stream.replace(_NUMBER.encode(), b"%08d" % number)


def _request(host: str, data: bytes) -> bytes:
    head = (
        f"POST /v1/steps HTTP/1.1\r\nhost: {host}\r\ncontent-type: {ARROW}\r\n"
        f"headrace-crc32: {zlib.crc32(data):08x}\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def _answer(connection: socket.socket) -> tuple[int, bytes]:
    """Read one answer: (status, body). Raises ConnectionError."""
    data = b""
    while True:
        head, found, rest = data.partition(b"\r\n\r\n")
        if found:
            lowered = head.lower()
            at = lowered.index(b"content-length:") + 15
            if len(rest) >= int(lowered[at:].split(b"\r\n")[0]):
                return int(head.split()[1]), rest
        more = connection.recv(_RECEIVED)
        if not more:
            raise ConnectionError("the server went away")
        data += more


def send(address: str, requests: deque[bytes]) -> dict[str, float]:
    """Send everything, and repeat requests that got 429; return steps/s and other figures."""
    parts = urlsplit(address)
    connections = [
        socket.create_connection((parts.hostname or "", parts.port or 80))
        for _ in range(CONNECTIONS)
    ]
    count, busy = len(requests), 0
    cpu, begin = time.process_time(), time.perf_counter()
    flying: deque[tuple[socket.socket, bytes]] = deque()
    for connection in connections:
        flying.append((connection, requests.popleft()))
        connection.sendall(flying[-1][1])
    while flying:
        connection, sent = flying.popleft()
        status, reply = _answer(connection)
        if status == 429:
            busy += 1
            requests.append(sent)
            time.sleep(BUSY_SECONDS)
        elif status != 200 or b"refused" in reply:
            raise RuntimeError(f"the server answered {status}: {reply!r:.200}")
        if requests:
            flying.append((connection, requests.popleft()))
            connection.sendall(flying[-1][1])
    took = time.perf_counter() - begin
    for connection in connections:
        connection.close()
    steps = count * STEPS * EPISODES
    return {"per_second": steps / took, "busy": busy, "cpu": time.process_time() - cpu}


def main() -> None:
    address, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    stream, host = template(), urlsplit(address).netloc
    requests = deque(_request(host, body(stream, first + n)) for n in range(count))
    print(json.dumps(send(address, requests)))


if __name__ == "__main__":
    main()
