"""Nothing but bodies that are dear to refuse, on several connections, old and new, without a pause.

What each of them costs the collector's one loop is why refused work has a bounded share of it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib

import msgspec
import numpy as np
import pyarrow as pa

from ingest.wire import ARROW, JSON, MSGPACK
from tests.attack.arena import PAIRS, Arena, arena
from tests.attack.json_bodies import open_episode
from tests.faults.scenario import Scenario, Trial, Verdict
from tests.ingest.raw_http import HOST, connect, listen

WINDOW_SECONDS = 4.0
PATIENCE_SECONDS = 10.0


def refused_import(rows: int, **columns: pa.Array) -> bytes:
    """One-step episodes with columns that fit, but that none has an action of the space."""
    table = pa.table(
        {
            "eps_id": [f"refused-{row}" for row in range(rows)],
            "obs": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4 * rows), pa.float32()), 4),
            "actions": pa.array(np.full(rows, 7)),
            "rewards": pa.array(np.ones(rows)),
            **columns,
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def unread_import() -> bytes:
    """One whose last row is no event, so that all of them are looked at for nothing."""
    rows = 40_000
    return refused_import(rows, t=pa.array([0] * (rows - 1) + [1]))


def bodies() -> list[tuple[str, bytes]]:
    """(content type, body): maps in maps, too many numbers, unknown episodes, imports."""
    event = {"type": "log_action", "episode_id": "x", "action": 0}
    bomb = msgspec.Raw(b"\xdd\x00\x1e\x84\x80" + b"\x80" * 2_000_000)
    lists = msgspec.Raw(b"\xdd\x00\x07\x53\x00" + b"\x90" * 480_000)
    numbers = msgspec.Raw(b"[" + b"0.1," * 500_000 + b"0]")
    unknown = [event | {"obs": [0.0] * 4} for _ in range(5_000)]
    return [
        (MSGPACK, msgspec.msgpack.encode({"events": [event | {"obs": bomb}]})),
        (MSGPACK, msgspec.msgpack.encode({"events": [event | {"obs": lists}]})),
        (JSON, msgspec.json.encode({"events": [event | {"obs": numbers}]})),
        (JSON, msgspec.json.encode({"events": unknown})),
        (ARROW, refused_import(5_000)),
        (ARROW, unread_import()),
    ]


def requests() -> list[bytes]:
    """The bodies as whole requests."""
    return [
        f"POST /v1/{'steps' if kind == ARROW else 'events'} HTTP/1.1\r\n".encode()
        + HOST
        + f"Headrace-CRC32: {zlib.crc32(body):08x}\r\nContent-Type: {kind}\r\n".encode()
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
        for kind, body in bodies()
    ]


def send_until(place: Arena, deadline: float, turn: int) -> None:
    """One attacker: every third request is on a new connection."""
    every, number = requests(), turn
    connection = connect(place.collector.port)
    while time.monotonic() < deadline and place.alive:
        if number % 3 == 0:
            connection.close()
            connection = connect(place.collector.port)
        connection.settimeout(PATIENCE_SECONDS)
        with contextlib.suppress(OSError):
            connection.sendall(every[number % len(every)])
            heard = listen(connection, answers=1)
            place.verdict.count("answers", len(heard.statuses))
            wrong = [status for status in heard.statuses if status >= 500]
            place.verdict.require(not wrong, "5xx", heard.data[:200])
        number += 1
    connection.close()


def attack(place: Arena, attackers: int) -> None:
    deadline = time.monotonic() + WINDOW_SECONDS
    threads = [
        threading.Thread(target=send_until, args=(place, deadline, turn))
        for turn in range(attackers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run(trial: Trial) -> Verdict:
    with arena(trial) as place:
        open_episode(place)
        place.begin()
        for _ in range(PAIRS):
            place.pair(lambda: attack(place, trial.size))
    return place.verdict


SCENARIO = Scenario(
    name="costly_bodies",
    law="what is refused takes a bounded share of the time, and whoever behaves is served",
    unit="attackers",
    quick=4,
    long=16,
    planted=4,
    run=run,
)
