"""Bytes that no HTTP client would send: smuggling, framing, pipelines, odd requests.

Each complete and valid request gets at most one answer; a request hidden behind an invalid one is
never carried out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from tests.attack.attacked_collector import PAIRS, Arena, arena
from tests.faults.scenario import Scenario, Trial, Verdict
from tests.ingest.raw_http import HOST, exchange

HIDDEN = (
    b"POST /v1/episodes HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
    b'Content-Length: 25\r\n\r\n{"episode_id":"smuggled"}'
)
POST = b"POST /v1/events HTTP/1.1\r\n" + HOST


def cases() -> dict[str, bytes]:
    """Each: bytes that hide a request which must not be carried out."""
    found: dict[str, bytes] = {}
    chunked = (b"chunked", b" chunked", b"Chunked", b"chunked\t", b"x, chunked", b"chunked, x")
    chunked += (b'"chunked"', b"\x0bchunked", b"chunked;q=1", b"identity", b"chunked, chunked")
    lengths = (b"0", b"1", b"+5", b"-1", b"5 5", b"0x5", b"5,5", b"9" * 40, b"", b"\xb2", b"1e1")
    names = (
        b"Transfer-Encoding",
        b"Transfer-Encoding ",
        b"\tTransfer-Encoding",
    )
    for coding, name, length in itertools.product(chunked, names, (b"0", b"5", b"99999")):
        head = POST + b"%s: %s\r\nContent-Length: %s\r\n\r\n" % (name, coding, length)
        found[f"{name!r} {coding!r} with length {length!r}"] = head + b"0\r\n\r\n" + HIDDEN
    for first, second in itertools.product(lengths, lengths):
        head = POST + b"Content-Length: %s\r\nContent-Length: %s\r\n\r\n" % (first, second)
        found[f"lengths {first!r:.12} and {second!r:.12}"] = head + HIDDEN
    for size in (b"-1", b"0x5", b"5;", b" 5", b"5 ", b"F" * 20, b"G", b"", b"5\n", b"+5", b"5\r"):
        head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
        found[f"chunk size {size!r}"] = head + size + b"\r\n" + HIDDEN
    for end in (b"\n", b"\r", b"\n\r", b"\r\r\n", b"\x00\r\n", b"\x85"):
        line = b"GET /healthz HTTP/1.1" + end + HOST.replace(b"\r\n", end) + end
        found[f"lines end in {end!r}"] = b"X" + line + HIDDEN
    for name in (b"A B", b"A\x00", b"", b"A\x7f", b"A(", b"\xe9", b"A\r"):
        found[f"header {name!r}"] = (
            b"GET /healthz HTTP/1.1\r\n" + HOST + name + b": x\r\n\r\n" + HIDDEN
        )
    for version in (b"HTTP/1.1 ", b"HTTP/9.9", b"HTTP/2.0", b"HTTP/1.", b"http/1.1", b"HTTP/1.1x"):
        found[f"version {version!r}"] = b"GET / " + version + b"\r\n" + HOST + b"\r\n" + HIDDEN
    for ahead in (b"\x16\x03\x01\x02\x00\x01", b"\x00" * 50, b"SSH-2.0-x\r\n", b"PING\r\n", b"%"):
        found[f"begins with {ahead!r:.20}"] = ahead + HIDDEN
    found["close"] = b"GET /healthz HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n" + HIDDEN
    found["CONNECT"] = b"CONNECT a:1 HTTP/1.1\r\n" + HOST + b"\r\n" + HIDDEN
    for kind in (b"h2c", b"websocket", b"TLS/1.0"):
        found[f"upgrade to {kind!r}"] = (
            b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: %s\r\n" % kind
            + HOST
            + b"\r\n"
            + HIDDEN
        )
    return found


def lawful(place: Arena) -> Iterator[tuple[str, bytes, list[int]]]:
    """(name, bytes, statuses): unusual but unambiguous; the connection stays open."""
    get = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
    yield "three in a row", get * 3, [200] * 3
    yield "blank lines first", b"\r\n\r\n" + get, [200]
    yield "a body with GET", get[:-2] + b"Content-Length: 3\r\n\r\nabc" + get, [413, 200]
    yield (
        "chunks of a byte",
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n" + get),
        [422, 200],
    )
    yield (
        "a trailer",
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nHost: evil\r\n\r\n" + get),
        [422, 200],
    )


def run(trial: Trial) -> Verdict:
    with arena(trial) as place:
        verdict, port = place.verdict, place.collector.port
        place.begin()

        def attack(every: Sequence[tuple[str, bytes]]) -> None:
            for label, data in every:
                verdict.count("sent")
                heard = exchange(port, data, patience=1.0, answers=2)
                answered = heard.closed or bool(heard.statuses)
                verdict.require(answered, "silent", f"{label}: neither an answer nor a close")
                wrong = [status for status in heard.statuses if status >= 500]
                verdict.require(not wrong, "5xx", f"{label}: {heard.data[:200]!r}")
                verdict.require(201 not in heard.statuses, "smuggled", f"{label}: {heard.data!r}")
            for label, data, expected in lawful(place):
                verdict.count("sent")
                heard = exchange(port, data, answers=len(expected))
                verdict.require(heard.statuses == expected, "wrong", f"{label}: {heard.statuses}")

        every = list(cases().items())[: trial.size]
        for part in range(PAIRS):
            share = every[part::PAIRS]
            place.pair(lambda share=share: attack(share), again=True)  # type: ignore[misc]
        status, _ = place.collector.get("/v1/episodes/smuggled")
        verdict.require(status == 404, "smuggled", "the hidden request was carried out")
        verdict.count("cases", len(cases()) + 5)
    return place.verdict


SCENARIO = Scenario(
    name="raw_sockets",
    law="a request that is not whole and lawful hides no other",
    unit="cases",
    quick=10_000,
    long=10_000,
    planted=10_000,
    run=run,
)
