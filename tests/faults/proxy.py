"""A bad network: a proxy between clients and a collector that injects seeded faults.

It reads whole requests (Content-Length), so that it can repeat them, and draws for each:

    pass            request and answer go through
    delay           both go through, late
    reset           the connection is reset before the request went on
    cut_request     a part of the request goes on, then both connections are reset
    lose_answer     the collector answers, and the client's connection is reset instead
    cut_answer      a part of the answer goes through, then the connection is reset
    repeat          the request is sent twice, one after the other; the first answer goes through
    repeat_late     the request goes through, and is sent once more later, amid others
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Mapping

from tests.closing import Closing

FAULTS: Mapping[str, float] = {
    "delay": 0.05,
    "reset": 0.02,
    "cut_request": 0.02,
    "lose_answer": 0.02,
    "cut_answer": 0.02,
    "repeat": 0.05,
    "repeat_late": 0.05,
}
LONGEST_DELAY = 0.15
LATE = (0.05, 1.0)


class BadNetwork(Closing):
    """Listens on a free port of this machine for the duration of the block; `counts` its actions.

    `counts["requests"]` includes every request that a client began to send.
    """

    def __init__(self, target: str, seed: int, faults: Mapping[str, float] = FAULTS) -> None:
        host, _, port = target.rpartition("/")[2].partition(":")
        self._target = (host, int(port))
        self._chance = random.Random(seed)
        self._faults = dict(faults)
        self.counts: Counter[str] = Counter()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._later: set[asyncio.Task[None]] = set()

    def __enter__(self) -> BadNetwork:
        self._thread.start()
        self._ready.wait()
        return self

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._client, "127.0.0.1", 0, limit=2**26)
        port = server.sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._later:
            task.cancel()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await _message(reader):
                self.counts["requests"] += 1
                if not await self._carry(request, writer):
                    break
        except (OSError, EOFError, ValueError, asyncio.CancelledError):
            self.counts["broken_connections"] += 1
        finally:
            writer.transport.abort()

    def _draw(self) -> str:
        kinds = ["pass", *self._faults]
        shares = [1.0 - sum(self._faults.values()), *self._faults.values()]
        kind: str = self._chance.choices(kinds, shares)[0]
        self.counts[kind] += 1
        return kind

    async def _carry(self, request: bytes, client: asyncio.StreamWriter) -> bool:
        """Forward one request and its answer; return whether the connection stays open."""
        kind = self._draw()
        if kind == "reset":
            return _reset(client)
        if kind == "cut_request":
            await self._send(request[: self._chance.randrange(1, len(request))], answered=False)
            return _reset(client)
        if kind == "delay":
            await asyncio.sleep(self._chance.uniform(0.0, LONGEST_DELAY))
        answer = await self._send(request)
        if kind == "repeat":
            await self._send(request)
        if kind == "repeat_late":
            self._repeat_late(request)
        if kind == "lose_answer":
            return _reset(client)
        if kind == "cut_answer":
            client.write(answer[: self._chance.randrange(1, len(answer))])
            await client.drain()
            return _reset(client)
        client.write(answer)
        await client.drain()
        return True

    async def _send(self, request: bytes, *, answered: bool = True) -> bytes:
        """Send to the collector on a new connection; return its answer."""
        reader, writer = await asyncio.open_connection(*self._target, limit=2**26)
        try:
            writer.write(request)
            await writer.drain()
            return await _message(reader) if answered else b""
        finally:
            writer.transport.abort()

    def _repeat_late(self, request: bytes) -> None:
        async def later() -> None:
            await asyncio.sleep(self._chance.uniform(*LATE))
            with contextlib.suppress(OSError, EOFError):
                await self._send(request)

        task = asyncio.ensure_future(later())
        self._later.add(task)
        task.add_done_callback(self._later.discard)


async def _message(reader: asyncio.StreamReader) -> bytes:
    """One request or answer: its head, and as many bytes as its Content-Length says."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return b""
    length = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            length = int(value)
    return head + await reader.readexactly(length)


def _reset(client: asyncio.StreamWriter) -> bool:
    """End a connection with RST rather than FIN."""
    found = client.get_extra_info("socket")
    found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.transport.abort()
    return False
