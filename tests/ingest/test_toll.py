"""What a refused request has cost is waited off by strangers, and by nobody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import urllib3

from ingest.toll import FREE_SECONDS, LONGEST_SECONDS, MAX_KNOWN, SHARE, Metered, Toll
from ingest.wire import JSON
from tests.collector_process import CollectorProcess, declare
from tests.ingest.raw_http import HOST, connect, listen

EVENT = {"type": "log_action", "episode_id": "e", "action": 0}
MAPS = msgspec.msgpack.encode(
    {"events": [EVENT | {"obs": msgspec.Raw(b"\xdd\x00\x1e\x84\x80" + b"\x80" * 2_000_000)}]}
)
BOMB = (
    b"POST /v1/events HTTP/1.1\r\nContent-Type: application/msgpack\r\n"
    + HOST
    + b"Content-Length: %d\r\n\r\n" % len(MAPS)
    + MAPS
)


def test_a_refused_body_is_owed_a_hundred_times() -> None:
    """Such work has its share of the time, whoever sends it, however many they are."""
    toll = Toll()
    assert toll.wait("a", 10.0) == 0.0
    assert toll.refused("a", FREE_SECONDS + 0.01, 10.0) == pytest.approx(0.01 / SHARE)
    assert toll.wait("a", 10.0) == toll.wait("b", 10.0) == pytest.approx(1.0)
    assert toll.refused("b", FREE_SECONDS + 0.02, 10.5) == pytest.approx(2.5)
    assert toll.wait("c", 13.0) == 0.0
    assert toll.charged == pytest.approx(0.03)


def test_a_cheap_refusal_is_free() -> None:
    toll = Toll()
    assert toll.refused("a", FREE_SECONDS, 0.0) == 0.0
    assert toll.wait("b", 0.0) == 0.0


def test_nobody_waits_for_ever() -> None:
    toll = Toll()
    assert toll.refused("a", 100.0, 0.0) == LONGEST_SECONDS


def test_who_sends_what_is_fine_does_not_wait() -> None:
    """One long body that was accepted is enough, and one that was not is enough to lose it."""
    toll = Toll()
    toll.accepted("honest")
    toll.accepted("turncoat")
    toll.refused("turncoat", 1.0, 0.0)
    assert toll.wait("honest", 0.0) == 0.0
    assert toll.wait("turncoat", 0.0) > 0.0


def test_so_many_are_remembered_and_no_more() -> None:
    toll = Toll()
    toll.refused("x", 1.0, 0.0)
    for number in range(MAX_KNOWN + 1):
        toll.accepted(str(number))
    assert toll.wait("0", 0.0) > 0.0
    assert toll.wait("1", 0.0) == 0.0


def test_only_the_own_steps_of_a_coroutine_are_metered() -> None:
    """Not what others do while it waits; its value, errors and cancellation pass through."""

    async def work(busy: float, fails: bool = False) -> str:
        until = time.perf_counter() + busy
        while time.perf_counter() < until:
            pass
        await asyncio.sleep(0.05)
        if fails:
            raise KeyError("x")
        return "done"

    async def run() -> None:
        metered = Metered(work(0.01))
        assert await metered == "done"
        assert 0.01 <= metered.seconds < 0.04
        with pytest.raises(KeyError):
            await Metered(work(0.0, fails=True))

        async def waiting() -> None:
            await Metered(asyncio.sleep(10))

        task = asyncio.create_task(waiting())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    root: Path = tmp_path_factory.mktemp("root")
    declare(root)
    with CollectorProcess(root) as process:
        yield process


def post(pool: urllib3.HTTPConnectionPool, body: bytes) -> tuple[int, float]:
    """The status, and how long it took."""
    began = time.monotonic()
    response = pool.request("POST", "/v1/events", body, headers={"content-type": JSON})
    return response.status, time.monotonic() - began


def steps(name: str) -> bytes:
    """An episode that makes a long body."""
    event = EVENT | {"episode_id": name, "obs": [0.5] * 4}
    return msgspec.json.encode(
        {"events": [{"type": "start", "episode_id": name}, *[event] * 1_500]}
    )


def owed(pool: urllib3.HTTPConnectionPool) -> float:
    lines = pool.request("GET", "/metrics").data.decode().splitlines()
    (line,) = [line for line in lines if line.startswith("headrace_refused_work_seconds_total ")]
    return float(line.split()[1])


def test_a_stranger_waits_and_others_do_not(collector: CollectorProcess) -> None:
    """Law: beside costly refusals a short request, and a known sender's long one, have no wait."""
    known, stranger = (
        urllib3.HTTPConnectionPool("127.0.0.1", collector.port, maxsize=1, retries=False)
        for _ in range(2)
    )
    assert post(known, steps("e"))[0] == 200
    with connect(collector.port) as attacker:
        attacker.sendall(BOMB)
        while owed(known) == 0.0:
            pass
        (_, short), (status, long) = post(known, b'{"events":[]}'), post(known, steps("f"))
        assert status == 200
        status, waited = post(stranger, steps("g"))
        assert status in (200, 429)  # the latter where the bomb took this machine very long
        assert max(short, long) < waited
        assert listen(attacker).statuses[:1] == [413]
    known.close()
    stranger.close()
