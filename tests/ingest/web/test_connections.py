"""A connection writes each answer in one piece, in the right order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from ingest.access.tokens import NOBODY_NEEDED
from ingest.web.asgi import Request, Response, Router
from ingest.web.connections import BoundedProtocol, ConnectionWatch
from ingest.web.limits import Budget, ServerLimits

BODY = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"


class Recorder(asyncio.Transport):
    """A connection that records each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        if data:
            self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


async def _echo(request: Request) -> Response:
    return Response(200, request.body)


def heard(*reads: bytes) -> Recorder:
    """Return what is written to a peer that sends these bytes."""
    router = Router()
    for method in ("GET", "POST"):
        router.add(method, "/echo", _echo, NOBODY_NEEDED)

    async def main() -> Recorder:
        config = Config(router, lifespan="off", log_config=None, access_log=False)
        config.load()
        watch = ConnectionWatch(ServerLimits(), max_connections=9, budget=Budget(10**6))
        protocol = BoundedProtocol(config, ServerState(), {}, watch=watch)
        recorder = Recorder()
        protocol.connection_made(recorder)
        for read in reads:
            protocol.data_received(read)
            while protocol.tasks:
                before = len(recorder.writes)
                await asyncio.sleep(0)
                if protocol.answering and protocol.cycle.more_body and before:
                    break  # waits for the next read
        return recorder

    return asyncio.run(main())


def test_an_answer_is_one_write() -> None:
    """Head and body are not sent apart: two packets make each request a tenth more expensive."""
    (answer,) = heard(BODY + b"\r\nabc").writes
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\nabc")


def test_a_long_answer_is_not_copied() -> None:
    """One copy of the weights serves all connections."""
    body = bytes(100_000)
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    first, second = heard(head + body).writes
    assert first.endswith(b"\r\n\r\n")
    assert second == body


def test_answers_of_a_pipeline_stay_apart_and_in_order() -> None:
    answers = heard(BODY + b"\r\nabc" + BODY + b"\r\ndef").writes
    assert [answer[-7:] for answer in answers] == [b"\r\n\r\nabc", b"\r\n\r\ndef"]


def test_a_bad_chunk_is_answered_for_its_own_request_alone() -> None:
    """Alone it gets 400. Behind a request whose answer is due it gets none, as that would look like
    the one that is due, and the connection ends."""
    bad = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n"
    (answer,) = heard(bad).writes
    assert answer.startswith(b"HTTP/1.1 400")
    behind = heard(BODY + b"\r\nabc" + bad)
    assert (behind.writes, behind.closed) == ([], True)


def test_go_on_is_written_before_the_body_comes() -> None:
    """A client with `Expect: 100-continue` waits for that answer before it sends its body."""
    first, answer = heard(BODY + b"Expect: 100-continue\r\n\r\n", b"abc").writes
    assert first == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answer.endswith(b"\r\n\r\nabc")


@pytest.mark.parametrize("extra", [b"", b"Connection: close\r\n"])
def test_an_answer_without_a_body_is_written_too(extra: bytes) -> None:
    head, empty = b"HEAD /echo HTTP/1.1\r\nHost: x\r\n", b"GET /echo HTTP/1.1\r\nHost: x\r\n"
    for request in (head, empty):
        recorder = heard(request + extra + b"\r\n")
        (answer,) = recorder.writes
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"\r\n\r\n")
        assert recorder.closed is bool(extra)
