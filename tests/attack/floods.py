"""Too much of everything: half-open connections, endless bodies, descriptors, slow readers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from tests.attack.attacked_collector import PAIRS, Arena, Case, arena
from tests.faults.scenario import Scenario, Trial, Verdict
from tests.ingest.raw_http import HOST, connect, exchange, listen

POST = b"POST /v1/events HTTP/1.1\r\n" + HOST
GET = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
CHUNK = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
ARROW = b"Content-Type: application/vnd.apache.arrow.stream\r\n"
FILES = 200
ROOM, BODY = 60_000_000, 7_000_000


def half_open(place: Arena, count: int) -> None:
    """Connections that begin a request and stop; a new caller is still served."""
    held: list[socket.socket] = []
    for number in range(count):
        held.append(connect(place.collector.port))
        held[-1].sendall(b"GET /healthz HTTP/1.1\r\nHo" if number % 2 else b"")
    place.verdict.count("half_open", count)
    for _ in range(20):
        served = exchange(place.collector.port, GET).statuses == [200]
        place.verdict.require(served, "starved", f"a new caller beside {count} half-open ones")
    growth = place.growth()
    place.verdict.counts["half_open_mb"] = growth
    place.verdict.require(growth <= 32.0, "memory", f"{count} half-open: {growth:.1f} MB")
    for connection in held:
        connection.close()


def large_body(place: Arena, size: int) -> None:
    """A body of gigabytes: refused at once, and cut off if it is sent anyway."""
    with connect(place.collector.port) as connection:
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % size)
        sent = _pour(connection, b"x" * 1_000_000, size)
        place.verdict.count("large_body_mb_taken", sent / 1e6)
        place.verdict.require(sent < size, "endless", f"{sent} bytes were taken")
    place.strike(Case("after it", "GET", "/healthz"))


def chunked_for_ever(place: Arena, seconds: float) -> None:
    """Endless chunks, also tiny ones: 413 or a closed connection before memory or time run out."""
    for name, chunk in (("large", CHUNK), ("tiny", b"1\r\nx\r\n" * 1_000)):
        with connect(place.collector.port) as connection:
            connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
            sent = _pour(connection, chunk, 200_000_000, seconds)
            place.verdict.require(sent < 200_000_000, "endless", f"{name} chunks: {sent} bytes")
    for tail in (b"0\r\nX: ", b"1;ext="):
        with connect(place.collector.port) as connection:
            connection.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n" + tail)
            sent = _pour(connection, b"y" * 100_000, 200_000_000, seconds)
            place.verdict.require(sent < 50_000_000, "endless", f"{tail!r}: {sent} bytes")


def _pour(connection: socket.socket, data: bytes, size: int, seconds: float = 20.0) -> int:
    """Send until a limit of bytes or seconds, or the peer closes; return the bytes sent."""
    sent, deadline = 0, time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while sent < size and time.monotonic() < deadline:
            connection.sendall(data)
            sent += len(data)
    return sent


def slow_headers(place: Arena, seconds: float) -> None:
    """A header sent byte by byte is cut off after its time limit."""
    with connect(place.collector.port) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\n")
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < seconds:
                connection.sendall(b"X")
                connection.settimeout(0.1)
                if listen(connection, answers=0).closed:
                    break
        took = time.monotonic() - began
        place.verdict.counts["slow_header_s"] = took
        place.verdict.require(took < seconds, "endless", f"a slow header lasted {took:.0f} s")


def many_bodies(place: Arena, count: int) -> None:
    """Simultaneous bodies of 7 MB without their last byte fill their memory limit, but no more.

    Memory is measured while they are held; short calls are accepted meanwhile, long ones get 429.
    """
    with contextlib.ExitStack() as stack:
        for size in [BODY] * count + [ROOM // 100] * count:  # the small ones fill the rest
            _begin(stack.enter_context(connect(place.collector.port)), POST, size)
        taken, growth = place.metric("headrace_body_bytes"), place.growth()
        place.verdict.counts |= {"bodies_mb": taken / 1e6, "bodies_held_mb": growth}
        place.verdict.require(0.8 * ROOM < taken <= ROOM, "memory", f"{taken:.0f} bytes of bodies")
        place.verdict.require(growth <= ROOM / 1e6 + 32.0, "memory", f"{growth:.0f} MB of bodies")
        for size in (13, 1_000, 60_000):
            body = b'{"events":[]}'.ljust(size)
            head = POST + b"Content-Length: %d\r\n\r\n" % size
            served = exchange(place.collector.port, head + body).statuses
            place.verdict.require(served == [200], "starved", f"{size} bytes: {served}")


def bodies_for_nobody(place: Arena, count: int) -> None:
    """Bodies as large as an import's on a public route that accepts no body."""
    before = place.rss()
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(connect(place.collector.port))
            _begin(connection, GET[:-2] + ARROW, 10 * ROOM // 12)
        taken, growth = place.metric("headrace_body_bytes"), place.rss() - before
        place.verdict.counts["nobody_mb"] = growth
        place.verdict.require(taken < 1_000, "memory", f"{taken:.0f} bytes of bodies for nobody")
        place.verdict.require(growth <= 32.0, "memory", f"{growth:.0f} MB for nobody")


def _begin(connection: socket.socket, head: bytes, size: int) -> None:
    """Send a request except for the last byte of its body, as far as the server reads it."""
    connection.settimeout(0.5)
    with contextlib.suppress(OSError):
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % size + b" " * (size - 1))


def few_descriptors(trial: Trial) -> Verdict:
    """More connections than descriptors: the collector continues to accept and to seal."""
    program = ("-m", "tests.attack.few_files", str(FILES))
    folder = trial.folder / "few"
    folder.mkdir()
    inner = Trial(trial.seed, folder, trial.size, None, trial.deadline)
    with arena(inner, program=program) as place:
        place.begin()

        def attack() -> None:
            held: list[socket.socket] = []
            for _ in range(3 * FILES):
                with contextlib.suppress(OSError):
                    held.append(connect(place.collector.port, 1.0))
            for _ in range(20):
                served = exchange(place.collector.port, GET).statuses == [200]
                place.verdict.require(served, "starved", "a new caller found no descriptor")
            for connection in held:
                connection.close()

        for _ in range(PAIRS):
            place.pair(attack, again=True)
        shards = place.metric("headrace_shards_total")
        place.verdict.require(shards > 0, "starved", "no shard was written meanwhile")
    return place.verdict


def run(trial: Trial) -> Verdict:
    limits = (f"max_bodies={ROOM}", "header_seconds=3", "body_seconds=5")
    options = [word for limit in limits for word in ("--limit", limit)]
    with arena(trial, options=options) as place:
        place.strike(Case("warm", "GET", "/openapi.json"))
        place.begin()
        attacks: tuple[Callable[[], None], ...] = (
            lambda: half_open(place, trial.size),
            lambda: large_body(place, 2_000_000_000),
            lambda: chunked_for_ever(place, 5.0),
            lambda: slow_headers(place, 8.0),
            lambda: many_bodies(place, 12),
            lambda: bodies_for_nobody(place, 4),
        )
        for attack in attacks:
            place.pair(attack, again=True)  # a short one has too few of the bystander's calls
            threading.Event().wait(0.5)
    few = few_descriptors(trial)
    for kind, texts in few.faults.items():
        for text in texts:
            place.verdict.require(False, kind, f"few descriptors: {text}")
    place.verdict.counts["few_files_p99_ratio"] = few.counts.get("p99_ratio", 0.0)
    return place.verdict


SCENARIO = Scenario(
    name="floods",
    law="what is too much is cut off, and whoever behaves is served",
    unit="connections",
    quick=2_000,
    long=2_000,
    planted=200,
    run=run,
    seconds=60.0,
)
