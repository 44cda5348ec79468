"""Rejected requests get a bounded share of the loop's time, and other requests do not wait."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import select
import socket
import time
import weakref
import zlib
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import urllib3

from ingest.access.key_files import create_token
from ingest.protocol.errors import Refusal
from ingest.protocol.messages import ARROW, JSON, MSGPACK
from ingest.web import cost_limits
from ingest.web.asgi import Request, Response, Router
from ingest.web.cost_limits import (
    FREE_SECONDS,
    FREE_SMALL_SECONDS,
    MAX_HELD_SECONDS,
    MAX_PENALTY_SECONDS,
    MAX_TRUSTED,
    MAX_WAIT_SECONDS,
    SHARE,
    Metered,
    Penalties,
    Requester,
    in_thread,
)
from ingest.web.limits import LONG_BODY
from tests.attack.costly_bodies import short_import
from tests.collector_process import CollectorProcess, declare
from tests.ingest.raw_http import HOST, PATIENCE, connect
from tests.ingest.web import long_penalties

EVENT = {"type": "log_action", "episode_id": "e", "action": 0}
MAPS = msgspec.msgpack.encode(
    {"events": [EVENT | {"obs": msgspec.Raw(b"\xdd\x00\x1e\x84\x80" + b"\x80" * 2_000_000)}]}
)


def test_a_refused_body_costs_a_penalty_of_a_hundred_times_its_time() -> None:
    """It applies to the account that sent the body, on every connection, and to no other
    account.
    """
    penalties = Penalties()
    assert penalties.remaining("a", "x", 10.0) == 0.0
    assert penalties.charge("a", 0.01, 10.0) == pytest.approx(0.01 / SHARE)
    assert penalties.remaining("a", "x", 10.0) == pytest.approx(1.0)
    assert penalties.remaining("a", "y", 10.0) == pytest.approx(1.0)
    assert penalties.remaining("b", "z", 10.0) == 0.0
    assert penalties.charge("a", 0.02, 10.5) == pytest.approx(2.5)
    assert penalties.remaining("a", "x", 13.0) == 0.0
    assert penalties.charged == pytest.approx(0.03)


def test_a_penalty_has_a_maximum() -> None:
    """The penalty of one refusal ends before a waiting body gets 429, that of a thousand within a
    minute.
    """
    penalties = Penalties()
    assert penalties.charge("a", 100.0, 0.0) == MAX_HELD_SECONDS
    assert penalties.remaining("a", "x", 0.0) == MAX_HELD_SECONDS < MAX_WAIT_SECONDS
    for _ in range(1_000):
        assert penalties.charge("a", 100.0, 0.0) == MAX_HELD_SECONDS
    assert penalties.remaining("a", "x", 0.0) == MAX_PENALTY_SECONDS


def test_a_cheap_refusal_is_free() -> None:
    """Neither accepted requests nor refusals up to the free limit are charged."""
    penalties = Penalties()
    sender = Requester(penalties)
    assert sender.settle(FREE_SMALL_SECONDS, 1.0, accepted=False) == 0.0
    assert sender.settle(100.0, 0.0, accepted=True) == 0.0
    sender.is_costly = True
    assert sender.settle(FREE_SECONDS, 1.0, accepted=False) == 0.0
    assert sender.settle(100.0, FREE_SECONDS / 100.0, accepted=True) == 0.0
    assert penalties.charged == sender.penalty == 0.0
    assert sender.settle(1.0, 0.5, accepted=True) == MAX_HELD_SECONDS
    assert penalties.charged == 0.5 - FREE_SECONDS


def test_a_connection_is_trusted_by_its_latest_costly_body() -> None:
    """If it was accepted, the connection need not wait; if it was refused, it must."""
    penalties = Penalties()
    one, other = Requester(penalties, "a", "one"), Requester(penalties, "a", "other")
    one.is_costly = other.is_costly = True
    one.settle(0.0, 0.0, accepted=True)
    other.settle(0.0, 0.0, accepted=True)
    other.settle(1.0, 1.0, accepted=False)
    assert one.penalty == 0.0
    assert other.penalty > 0.0
    one.settle(0.0, 0.0, accepted=False)  # refused for a reason other than its content, such as 429
    assert one.penalty == 0.0
    one.is_costly = False  # small bodies are no evidence
    one.settle(0.0, 1.0, accepted=False)
    assert one.penalty == 0.0


def test_so_many_trusted_connections_are_remembered_and_no_more() -> None:
    penalties = Penalties()
    penalties.charge("a", 1.0, 0.0)
    for number in range(MAX_TRUSTED + 1):
        penalties.trust(str(number), True)
    assert penalties.remaining("a", "0", 0.0) > 0.0
    assert penalties.remaining("a", "1", 0.0) == 0.0


def test_only_the_own_steps_of_a_coroutine_are_metered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of other tasks is not included; value, errors and cancellation pass through."""
    clock = 0.0
    monkeypatch.setattr(cost_limits, "perf_counter", lambda: clock)

    def work(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    async def request(others: asyncio.Event, fails: bool = False) -> str:
        work(1.0)
        await others.wait()
        work(2.0)
        if fails:
            raise KeyError("x")
        return "done"

    async def run() -> None:
        others = asyncio.Event()
        metered = Metered(request(others))

        async def other() -> None:
            work(100.0)
            others.set()

        beside = asyncio.create_task(other())
        assert await metered == "done"
        assert metered.seconds == 3.0
        await beside
        with pytest.raises(KeyError):
            await Metered(request(others, fails=True))
        threaded = Metered(in_thread(busy, 0.02))
        assert await threaded == "done"
        assert threaded.seconds >= 0.02  # by the thread's own clock

        async def waiting() -> None:
            await Metered(asyncio.sleep(10))

        task = asyncio.create_task(waiting())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def busy(seconds: float) -> str:
    """Use a processor for the given time."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        continue
    return "done"


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[CollectorProcess]:
    """A held answer never comes, and a body that would have to wait gets 429 at once."""
    declare(tmp_path)
    with CollectorProcess(tmp_path, plant=long_penalties.__name__) as process:
        yield process


def connection(collector: CollectorProcess, token: str = "") -> urllib3.HTTPConnectionPool:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return urllib3.HTTPConnectionPool(
        "127.0.0.1", collector.port, PATIENCE, headers=headers, retries=False
    )


def post(pool: urllib3.HTTPConnectionPool, body: bytes, kind: str = JSON) -> int:
    """Return the status."""
    path = "/v1/steps" if kind == ARROW else "/v1/events"
    headers = {"content-type": kind, "headrace-crc32": f"{zlib.crc32(body):08x}"}
    return pool.request("POST", path, body, headers={**pool.headers, **headers}).status


def steps(name: str, *more: dict[str, Any]) -> bytes:
    """An episode that makes a long body."""
    event = EVENT | {"episode_id": name, "obs": [0.5] * 4}
    return msgspec.json.encode(
        {"events": [{"type": "start", "episode_id": name}, *[event] * 1_500, *more]}
    )


def charged(pool: urllib3.HTTPConnectionPool) -> float:
    lines = pool.request("GET", "/metrics").data.decode().splitlines()
    (line,) = [line for line in lines if line.startswith("headrace_refused_work_seconds_total ")]
    return float(line.split()[1])


@contextlib.contextmanager
def refused(
    pool: urllib3.HTTPConnectionPool, body: bytes, kind: str = JSON, token: str = ""
) -> Iterator[None]:
    """Another connection's body is charged, and its answer is held back from then on.

    What `pool` is answered meanwhile was processed later, so a held answer is not late by chance.
    """
    path = "/v1/steps" if kind == ARROW else "/v1/events"
    head = f"POST {path} HTTP/1.1\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    head += f"Headrace-CRC32: {zlib.crc32(body):08x}\r\n"
    head += f"Authorization: Bearer {token}\r\n" if token else ""
    with connect(pool.port or 0) as sender:
        sender.sendall(head.encode() + HOST + b"\r\n" + body)
        while charged(pool) == 0.0:
            assert not is_answered(sender)
        yield
        assert not is_answered(sender)


def is_answered(sender: socket.socket) -> bool:
    return bool(select.select([sender], [], [], 0.0)[0])


def test_no_token_waits_for_what_another_sends(tmp_path: Path) -> None:
    """A sender's first long body is accepted at once, whatever refused work another token
    causes.
    """
    declare(tmp_path)
    web, two = (create_token(tmp_path, name, ["log"])[1] for name in ("web", "two"))
    unknown = msgspec.json.encode({"events": [EVENT | {"obs": [0.5] * 4}] * 8_000})
    with (
        CollectorProcess(tmp_path, plant=long_penalties.__name__) as collector,
        connection(collector, web) as pool,
        connection(collector, two) as other,
        refused(pool, unknown, token=two),
    ):
        assert post(pool, steps("e")) == 200
        assert post(other, steps("f")) == 429


def test_one_bad_event_keeps_nobody_out(collector: CollectorProcess) -> None:
    """Accepted work is never charged; the next long bodies are accepted at once."""
    bad = EVENT | {"episode_id": "bad", "obs": [0.5] * 4, "action": 9}
    with connection(collector) as pool, connection(collector) as another:
        assert post(pool, steps("bad", bad)) == 200
        assert collector.get("/v1/episodes/bad")[1]["state"] == "broken"
        assert charged(pool) == 0.0
        assert post(another, steps("after")) == 200


def test_one_costly_event_among_good_ones_is_charged(collector: CollectorProcess) -> None:
    """Refused events are charged by their bytes, however many good events come with them."""
    costly = EVENT | {"episode_id": "costly", "obs": [0.5] * 400_000}
    with connection(collector) as pool, refused(pool, steps("costly", costly)):
        assert collector.get("/v1/episodes/costly")[1]["state"] == "broken"


def test_a_short_import_of_many_rows_is_charged_and_waits(collector: CollectorProcess) -> None:
    """A refused import is charged whatever the length of its body; small requests do not wait."""
    first, second = short_import("one-"), short_import("two-")
    assert len(first) < LONG_BODY
    with connection(collector) as pool, refused(pool, first, ARROW):
        assert post(pool, b'{"events":[]}') == 200
        assert post(pool, second, ARROW) == 429


def test_a_refusal_that_waits_keeps_nothing_of_its_body() -> None:
    """Neither the bytes nor the decoded body are held while the answer waits."""
    held: list[weakref.ref[Decoded]] = []

    async def handler(request: Request) -> Response:
        decoded = Decoded(request.body)
        held.append(weakref.ref(decoded))
        busy(0.02)
        raise Refusal("invalid", f"expected none of {len(decoded)} bytes")

    async def run() -> bool:
        router = Router()
        router.add("POST", "/", handler, frozenset())
        scope = {"type": "http", "method": "POST", "path": "/", "raw_path": b"/"}
        scope |= {"headers": [], "query_string": b"", "client": ("here", 1)}
        sent: list[MutableMapping[str, Any]] = []

        async def receive() -> MutableMapping[str, Any]:
            return {"type": "http.request", "body": b"x"}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        task = asyncio.create_task(router(scope, receive, send))
        while not router.penalties.charged:
            await asyncio.sleep(0)
        waiting, kept = not sent, held[0]() is not None
        await task
        return waiting and not kept and sent[0]["status"] == 422

    gc.disable()
    try:
        assert asyncio.run(run())
    finally:
        gc.enable()


class Decoded(bytearray):
    """The decoded body that a handler makes."""


def test_a_new_connection_waits_and_others_do_not(collector: CollectorProcess) -> None:
    """During costly refusals, short requests and trusted connections do not wait."""
    with connection(collector) as trusted, connection(collector) as new:
        assert post(trusted, steps("e")) == 200
        with refused(trusted, MAPS, MSGPACK):
            assert post(trusted, steps("f")) == 200
            assert post(new, steps("g")) == 429
            assert post(new, b'{"events":[]}') == 200
