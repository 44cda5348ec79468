"""Only bodies that are costly to refuse, on several old and new connections, without pause.

Each of them costs time on the collector's event loop, so refused work must have a bounded share.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import zlib
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
import pyarrow as pa

from ingest.protocol.messages import ARROW, JSON, MSGPACK
from tests.attack.attacked_collector import PAIRS, Arena, arena
from tests.attack.json_bodies import open_episode
from tests.faults.scenario import Scenario, Trial, Verdict
from tests.ingest.raw_http import HOST, connect, listen

WINDOW_SECONDS = 4.0
PATIENCE_SECONDS = 10.0
SHORT = 4  # simultaneous short bodies of each attacker


def refused_import(rows: int, **columns: pa.Array) -> bytes:
    """One-step episodes whose columns are valid, except that every action is outside its space."""
    table = pa.table(
        {
            "eps_id": [f"refused-{row}" for row in range(rows)],
            "obs": pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4 * rows), pa.float32()), 4),
            "actions": pa.array(np.full(rows, 7)),
            "rewards": pa.array(np.ones(rows)),
            **columns,
        }
    )
    return encoded(table)


def unread_import() -> bytes:
    """A batch whose last row is no event, so that checking the others is wasted."""
    rows = 40_000
    return refused_import(rows, t=pa.array([0] * (rows - 1) + [1]))


def encoded(table: pa.Table) -> bytes:
    """A table as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def short_import(tag: str, rows: int = 3_500) -> bytes:
    """Thousands of refused episodes in a short body; each `tag` has its own."""
    nothing = pa.FixedSizeListArray.from_buffers(
        pa.list_(pa.float32(), 0), rows, [None], children=[pa.array([], pa.float32())]
    )
    return encoded(
        pa.table(
            {
                "eps_id": [f"{tag}{row:x}" for row in range(rows)],
                "obs": nothing,
                "actions": pa.array(np.zeros(rows, np.int8)),
                "rewards": pa.array(np.zeros(rows, np.float16)),
            }
        )
    )


def accepted_import() -> bytes:
    """One episode of one step."""
    row = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4), pa.float32()), 4)
    return encoded(pa.table({"eps_id": ["fine"], "obs": row, "actions": [0], "rewards": [1.0]}))


def bodies(tag: str) -> list[tuple[str, bytes]]:
    """(content type, body): maps in maps, too many numbers, unknown episodes, imports.

    The third from last is a short one.
    """
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
        (ARROW, short_import(tag)),
        (ARROW, refused_import(5_000)),
        (ARROW, unread_import()),
    ]


def request(kind: str, body: bytes) -> bytes:
    """A body as a whole request."""
    return (
        f"POST /v1/{'steps' if kind == ARROW else 'events'} HTTP/1.1\r\n".encode()
        + HOST
        + f"Headrace-CRC32: {zlib.crc32(body):08x}\r\nContent-Type: {kind}\r\n".encode()
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def send_until(place: Arena, deadline: float, turn: int, every: list[bytes]) -> None:
    """One attacker: every third request is on a new connection."""
    number = turn
    connection = connect(place.collector.port)
    while time.monotonic() < deadline and place.alive:
        if number % 3 == 0:
            connection.close()
            connection = connect(place.collector.port)
        send(place, connection, every[number % len(every)])
        number += 1
    connection.close()


def send(place: Arena, connection: socket.socket, data: bytes) -> None:
    """Send one request; return its answer if it comes in time."""
    connection.settimeout(PATIENCE_SECONDS)
    with contextlib.suppress(OSError):
        connection.sendall(data)
        heard = listen(connection, answers=1)
        place.verdict.count("answers", len(heard.statuses))
        wrong = [status for status in heard.statuses if status >= 500]
        place.verdict.require(not wrong, "5xx", heard.data[:200])


def send_short(place: Arena, data: bytes) -> None:
    """One of many attackers that send a short body simultaneously, each on its own connection."""
    with connect(place.collector.port) as connection:
        send(place, connection, data)


def attackers(place: Arena, size: int, window: int) -> list[Callable[[float], None]]:
    """Attack until a time in one window; its bodies are prepared before it begins.

    It continues in the sequence of bodies after those of the previous window.
    """
    turns = range(window * size, (window + 1) * size)
    every = [[request(*one) for one in bodies(f"a{turn:x}-")] for turn in turns]
    shorts = [
        request(ARROW, short_import(f"s{turn:x}-{number:x}-"))
        for turn in turns
        for number in range(SHORT)
    ]
    return [
        *(
            lambda until, turn=turn, own=own: send_until(place, until, turn, own)
            for turn, own in zip(turns, every, strict=True)
        ),
        *(lambda _, data=data: send_short(place, data) for data in shorts),
    ]


def attack(every: list[Callable[[float], None]]) -> None:
    deadline = time.monotonic() + WINDOW_SECONDS
    threads = [threading.Thread(target=one, args=(deadline,)) for one in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run(trial: Trial) -> Verdict:
    with arena(trial) as place:
        open_episode(place)
        with connect(place.collector.port) as connection:
            send(place, connection, request(ARROW, accepted_import()))  # which loads Arrow
        place.begin()
        for window in range(PAIRS):
            every = attackers(place, trial.size, window)
            place.pair(partial(attack, every))
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
