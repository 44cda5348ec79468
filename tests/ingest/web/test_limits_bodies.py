"""Memory for bodies: none before authorisation, a reserved share for short bodies."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ingest.access.key_files import create_token
from ingest.web.limits import LONG_BODY, Budget
from tests.collector_process import CollectorProcess, declare
from tests.ingest.raw_http import HOST, connect, exchange, listen

ARROW = b"Content-Type: application/vnd.apache.arrow.stream\r\n"
EVENTS = b'{"events":[]}'
ROOM, LONG = 40_000_000, 7_000_000
LIMITS = (f"max_bodies={ROOM}", "body_seconds=300")


class House(NamedTuple):
    """A collector with two tokens for logging."""

    process: CollectorProcess
    web: bytes
    two: bytes

    def begun(self, token: bytes, size: int) -> socket.socket:
        """A connection that has sent a long body except for its last byte."""
        connection = connect(self.process.port)
        connection.sendall(post(token, size) + b" " * (size - 1))
        return connection

    def held(self) -> float:
        lines = exchange(self.process.port, get(self.web, b"/metrics")).data.decode().splitlines()
        (line,) = [line for line in lines if line.startswith("headrace_body_bytes ")]
        return float(line.split()[1])

    def memory(self) -> float:
        """Resident memory in MB."""
        text = Path(f"/proc/{self.process.process.pid}/status").read_text()
        (line,) = [line for line in text.splitlines() if line.startswith("VmRSS")]
        return int(line.split()[1]) / 1000


def get(token: bytes, path: bytes) -> bytes:
    return (
        b"GET " + path + b" HTTP/1.1\r\nAuthorization: Bearer " + token + b"\r\n" + HOST + b"\r\n"
    )


def post(token: bytes, size: int) -> bytes:
    """The header of a batch."""
    head = b"POST /v1/events HTTP/1.1\r\nAuthorization: Bearer " + token + b"\r\n" + HOST
    return head + b"Content-Length: %d\r\n\r\n" % size


def padded(token: bytes, size: int) -> bytes:
    """An empty batch padded to this many bytes."""
    return post(token, size) + EVENTS + b" " * (size - len(EVENTS))


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Ask until the condition holds; each question is a request, which takes its time."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    root = tmp_path_factory.mktemp("root")
    declare(root)
    web, two = (create_token(root, name, ["log"])[1].encode() for name in ("web", "two"))
    options = [word for name in LIMITS for word in ("--limit", name)]
    with CollectorProcess(root, options=options) as process:
        yield House(process, web, two)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"GET /healthz", 413),
        (b"HEAD /readyz", 413),
        (b"GET /v1/spec", 401),
        (b"POST /v1/steps", 401),
        (b"POST /v1/policies/default/versions", 401),
        (b"POST /nowhere", 401),
    ],
)
@pytest.mark.parametrize(
    "length", [b"Content-Length: 64000000\r\n", b"Transfer-Encoding: chunked\r\n"]
)
def test_a_request_without_a_token_is_answered_before_its_body_is_read(
    house: House, line: bytes, status: int, length: bytes
) -> None:
    """Without authorisation, or on a route without a body, no byte of a body is kept in memory."""
    before, crowd = house.memory(), []
    for _ in range(2):
        crowd.append(connect(house.process.port))
        crowd[-1].sendall(line + b" HTTP/1.1\r\n" + HOST + ARROW + length + b"\r\n")
        with contextlib.suppress(OSError):  # cut off: bytes sent after the answer
            crowd[-1].sendall(b"F42400\r\n" + b"x" * 16_000_000)
    assert house.memory() - before < 10.0
    assert house.held() == 0
    for connection in crowd:
        with contextlib.suppress(OSError):
            assert listen(connection).statuses in ([status], [])
        connection.close()
    heard = exchange(
        house.process.port, line + b" HTTP/1.1\r\n" + HOST + length + b"\r\n1\r\nx\r\n"
    )
    assert heard.statuses == [status]


def test_a_route_without_a_body_takes_an_empty_one(house: House) -> None:
    for length in (b"Content-Length: 0\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"):
        heard = exchange(house.process.port, b"GET /healthz HTTP/1.1\r\n" + HOST + length)
        assert heard.statuses == [200]


def test_the_header_does_not_say_how_long_a_body_may_be(house: House) -> None:
    """A batch that is declared as Arrow still has the limit of a batch."""
    head = post(house.web, 9_000_000).replace(HOST, HOST + ARROW)
    assert exchange(house.process.port, head).statuses == [413]


def test_short_bodies_find_room_while_long_ones_fill_it(house: House) -> None:
    """Ordinary small requests are always accepted, also from tokens that hold long bodies."""
    with contextlib.ExitStack() as stack:
        for token in (house.web, house.two, house.web):
            size = house.held() + LONG
            stack.enter_context(house.begun(token, LONG))
            wait_until(lambda size=size: house.held() >= size - 1)  # type: ignore[misc]
        with connect(house.process.port) as last, contextlib.suppress(OSError):
            last.sendall(post(house.two, LONG) + b" " * (LONG - 1))
            assert listen(last).statuses == [429]
        for token in (house.web, house.two) * 10:
            assert exchange(house.process.port, padded(token, LONG_BODY)).statuses == [200]
    wait_until(lambda: house.held() == 0)
    assert exchange(house.process.port, padded(house.web, LONG)).statuses == [200]


def test_one_account_leaves_room_for_another(house: House) -> None:
    """A token that holds as many long bodies as it can does not block another token's long body."""
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            connection = stack.enter_context(connect(house.process.port))
            connection.settimeout(0.3)
            with contextlib.suppress(OSError):
                connection.sendall(post(house.two, LONG) + b" " * (LONG - 1))
        wait_until(lambda: house.held() > LONG)
        for _ in range(3):
            assert exchange(house.process.port, padded(house.web, LONG)).statuses == [200]


def test_an_account_with_several_bodies_leaves_as_much_free() -> None:
    """A single body takes what it needs; freed memory can be used again."""
    budget = Budget(80)
    assert budget.take(60, "a")
    assert not budget.take(11, "b")
    assert budget.take(10, "b")
    assert [budget.take(5), budget.take(5), budget.take(1)] == [True, True, False]
    budget.give(60, "a")
    budget.give(10, "b")
    budget.give(10)
    assert budget.held == 0
    assert [budget.take(20, "a") for _ in range(3)] == [True, False, False]
    assert budget.take(30, "b")
    assert budget.take(20, "b", own=30)
    assert budget.refused == 4
