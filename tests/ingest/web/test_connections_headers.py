"""Headers that must be unique are, and the host that is checked is the effective one."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.collector_process import CollectorProcess, declare


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    root = tmp_path_factory.mktemp("root")
    declare(root)
    with CollectorProcess(root) as process:
        yield process


def answer(collector: CollectorProcess, *lines: str, body: bytes = b"") -> tuple[int, str]:
    """(status, body) of a request with these lines."""
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "Connection: close", "", ""])
    with socket.create_connection(("127.0.0.1", collector.port), 10) as raw:
        raw.sendall(head.encode() + body)
        got = b""
        while piece := raw.recv(65536):
            got += piece
    first, _, rest = got.decode().partition("\r\n")
    return int(first.split()[1]), rest.partition("\r\n\r\n")[2]


@pytest.mark.parametrize(
    "name",
    [
        "Idempotency-Key",
        "Headrace-Instance",
        "Content-Type",
        "Content-Encoding",
        "Headrace-CRC32",
        "If-None-Match",
        "Prefer",
    ],
)
@pytest.mark.parametrize("same", [True, False])
def test_a_header_with_one_value_is_refused_twice(
    collector: CollectorProcess, name: str, *, same: bool
) -> None:
    """Even if both values agree: readers differ in which one they use."""
    lines = ["POST /v1/episodes HTTP/1.1", "Host: localhost"]
    lines += [] if name == "Content-Type" else ["Content-Type: application/json"]
    first, second = ("application/json", "application/msgpack")
    values = [first, first if same else second]
    status, text = answer(collector, *lines, *(f"{name}: {value}" for value in values), body=b"{}")
    assert status == 400
    assert f"expected one header {name.lower()}, got two" in text


def test_a_header_with_a_list_may_come_in_lines(collector: CollectorProcess) -> None:
    """RFC 9110, 5.3: two lines are one list."""
    lines = ["GET /healthz HTTP/1.1", "Host: localhost", "Accept: a/b", "Accept: c/d"]
    assert answer(collector, *lines)[0] == 200


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/healthz", "localhost", 200),
        ("http://127.0.0.1:1/healthz", "rebound.evil.example", 200),
        ("http://[::1]:8642/healthz", "localhost", 200),
        ("http://rebound.evil.example/healthz", "localhost", 403),
        ("http://rebound.evil.example:8642/v1/spec", "localhost", 403),
        ("http://localhost@rebound.evil.example/healthz", "localhost", 400),
        ("http://rebound.evil.example@localhost/healthz", "localhost", 400),
        ("http://localhost", "localhost", 400),
        ("*", "localhost", 400),
    ],
)
def test_the_host_of_an_absolute_target_is_the_one_that_counts(
    collector: CollectorProcess, target: str, host: str, status: int
) -> None:
    """RFC 9112, 3.2.2: the `Host` header of such a request is ignored, so a known name in it does
    not admit a request for another host."""
    assert answer(collector, f"GET {target} HTTP/1.1", f"Host: {host}")[0] == status


def test_two_hosts_beside_an_absolute_target_are_refused(collector: CollectorProcess) -> None:
    """This is the same as without an absolute target."""
    lines = ["GET http://localhost/healthz HTTP/1.1", "Host: localhost", "Host: localhost"]
    assert answer(collector, *lines)[0] == 400
