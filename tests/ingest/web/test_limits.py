"""The cost of any one client is bounded, and other clients are not affected."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
import urllib3

from ingest.protocol import messages as wire
from ingest.web.limits import Budget, ServerLimits, room_for_connections
from tests.collector_process import CollectorProcess, declare
from tests.ingest.raw_http import HOST, Heard, connect, exchange, listen

GET = b"GET /healthz HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST /v1/events HTTP/1.1\r\n" + HOST
SHORT = ("header_seconds=0.5", "body_seconds=0.5", "idle_seconds=1.5")
OBS = [0.1, -0.2, 0.3, 0.4]


def limited(root: Path, *limits: str) -> CollectorProcess:
    return CollectorProcess(root, options=[word for name in limits for word in ("--limit", name)])


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    root = tmp_path_factory.mktemp("root")
    declare(root)
    with limited(root, "max_connections=20", "max_message=100000") as process:
        yield process


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[CollectorProcess]:
    declare(tmp_path)
    with limited(tmp_path, *SHORT) as process:
        yield process


def metric(collector: CollectorProcess, name: str) -> float:
    """The value of one line of /metrics."""
    heard = exchange(collector.port, b"GET /metrics HTTP/1.0\r\n" + HOST + b"\r\n", answers=0)
    (line,) = [text for text in heard.data.decode().splitlines() if text.rpartition(" ")[0] == name]
    return float(line.rpartition(" ")[2])


def wait_until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Ask until the condition holds; each question is a request, which takes its time."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
NOT_HTTP = {
    "a TLS greeting": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 4,
    "both lengths": POST
    + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    + GET,
    "two lengths": POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef" + GET,
    "an unknown coding": POST + b"Transfer-Encoding: cow, chunked\r\n\r\n0\r\n\r\n" + GET,
    "a coding behind chunked": POST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunks over HTTP/1.0": POST.replace(b"/1.1", b"/1.0")
    + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "a chunk size that is no number": CHUNKED + b"xyz\r\n{}\r\n0\r\n\r\n" + GET,
    "a chunk longer than its size": CHUNKED + b"1\r\n{}\r\n0\r\n\r\n" + GET,
    "a chunk size of 17 digits": CHUNKED + b"F" * 17 + b"\r\n{}\r\n",
    "a negative chunk size": CHUNKED + b"-1\r\n{}\r\n",
    "no last line end": CHUNKED + b"2\r\n{}\r\n0\r\nx" + GET,
    "a bad line in a trailer": CHUNKED + b"2\r\n{}\r\n0\r\nA B: x\r\n\r\n",
    "2,000 tiny chunks": CHUNKED + b"1\r\n1\r\n" * 2_000,
    "an upgrade": b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: h2c\r\n" + HOST + b"\r\n",
    "CONNECT": b"CONNECT example:1 HTTP/1.1\r\n" + HOST + b"\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/0.9": b"GET /healthz\r\n\r\n",
    "a folded header": b"GET /healthz HTTP/1.1\r\nX: a\r\n b\r\n" + HOST + b"\r\n",
    "a space before the colon": b"GET /healthz HTTP/1.1\r\nX : a\r\n" + HOST + b"\r\n",
    "a negative length": POST + b"Content-Length: -1\r\n\r\n",
    "a length of 21 digits": POST + b"Content-Length: 999999999999999999999\r\n\r\n",
    "bytes beyond ASCII in the path": b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n",
    "a broken address": b"GET http://[::1 HTTP/1.1\r\n" + HOST + b"\r\n",
}


@pytest.mark.parametrize("name", NOT_HTTP)
def test_what_is_no_request_gets_one_answer_and_the_end(
    collector: CollectorProcess, name: str
) -> None:
    """One 400 in the error format, then the connection is closed: nothing after it is read.

    Also if it comes in pieces.
    """
    data = NOT_HTTP[name]
    for heard in (exchange(collector.port, data, answers=0), piecewise(collector.port, data)):
        assert (heard.statuses, heard.closed) == ([400], True)
        body = heard.data.partition(b"\r\n\r\n")[2]
        assert json.loads(body)["error"]["code"] == "malformed"


def piecewise(port: int, data: bytes) -> Heard:
    """Send the header and the rest apart; the collector has read the header by then."""
    head, end, rest = data.partition(b"\r\n\r\n")
    with connect(port) as connection:
        connection.sendall(head + end)
        exchange(port, GET)
        with contextlib.suppress(OSError):
            connection.sendall(rest)
        return listen(connection, answers=0)


def test_a_bad_chunk_after_an_answer_gets_no_second_one(collector: CollectorProcess) -> None:
    """A request that was refused before its body was read is answered once."""
    nowhere = CHUNKED.replace(b"/v1/events", b"/v1/nowhere")
    with connect(collector.port) as connection:
        connection.sendall(nowhere + b"2\r\n{}\r\n")
        first = listen(connection)
        assert first.statuses == [404]
        with contextlib.suppress(OSError):
            connection.sendall(b"xyz\r\n")
        assert listen(connection, answers=0).statuses == []


@pytest.mark.parametrize(
    ("header", "text"),
    [(b"X: " + b"a" * 40_000, "32768 bytes"), (b"\r\n".join([b"X: a"] * 200), "100 header lines")],
)
def test_a_large_header_is_refused(collector: CollectorProcess, header: bytes, text: str) -> None:
    heard = exchange(collector.port, b"GET /healthz HTTP/1.1\r\n" + header + b"\r\n\r\n", answers=0)
    assert (heard.statuses, heard.closed) == ([431], True)
    assert text in heard.data.decode()


def test_a_second_request_behind_close_is_not_answered(collector: CollectorProcess) -> None:
    """`Connection: close` ends the requests of a connection, whatever follows it."""
    first = b"GET /healthz HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n"
    assert exchange(collector.port, first + GET, answers=0).statuses == [200]


def test_a_long_pipeline_is_cut(collector: CollectorProcess) -> None:
    """A few pipelined requests are answered in order; hundreds are not kept in memory."""
    assert exchange(collector.port, GET * 10, answers=10).statuses == [200] * 10
    assert exchange(collector.port, GET * 500, answers=0).closed


def test_who_is_slow_is_cut_off(impatient: CollectorProcess) -> None:
    """A header, a body, a first request and a next one each have a time limit."""
    before = metric(impatient, 'headrace_connections_cut_total{why="idle"}')
    half, body = connect(impatient.port), connect(impatient.port)
    silent, idle = connect(impatient.port), connect(impatient.port)
    half.sendall(b"GET /healthz HTTP/1.1\r\nHo")
    body.sendall(POST + b"Content-Length: 10\r\n\r\n{")
    idle.sendall(GET)
    assert listen(half, answers=0).statuses == [408]
    assert listen(body, answers=0).statuses == [408]
    assert listen(silent, answers=0).closed
    heard = listen(idle, answers=0)
    assert (heard.statuses, heard.closed) == ([200], True)
    assert metric(impatient, 'headrace_connections_cut_total{why="idle"}') - before == 2
    for connection in (half, body, silent, idle):
        connection.close()


def test_blank_lines_do_not_keep_a_connection(impatient: CollectorProcess) -> None:
    """Bytes that begin no request do not count as a request."""
    with connect(impatient.port) as connection:
        connection.sendall(GET)
        listen(connection)
        for _ in range(1_000):
            connection.settimeout(0.05)
            heard = listen(connection, answers=0)
            if heard.closed:
                break
            with contextlib.suppress(OSError):
                connection.sendall(b"\r\n")
        assert heard.closed


def test_a_body_of_chunk_extensions_is_cut_off(collector: CollectorProcess) -> None:
    """Endless chunk extensions and trailers count towards the limit too."""
    chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    assert exchange(collector.port, chunked + b"1;a=" + b"x" * 900_000, answers=0).closed
    assert exchange(collector.port, chunked + b"0\r\nT: " + b"x" * 900_000, answers=0).closed


@pytest.mark.parametrize(
    "head", [b"Content-Length: 9000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"]
)
def test_a_large_body_is_refused_before_it_is_read(
    collector: CollectorProcess, head: bytes
) -> None:
    """413 is sent at once; a client that keeps sending is cut off."""
    with connect(collector.port) as connection:
        connection.sendall(POST + head)
        chunk = b"2000\r\n" + b"x" * 8_192 + b"\r\n"
        with contextlib.suppress(OSError):
            for _ in range(13):
                connection.sendall(chunk)
        assert listen(connection).statuses == [413]
        with pytest.raises(OSError, match=r"reset|pipe"):
            connection.sendall(chunk * 100_000)


def test_a_refused_request_leaves_the_connection_usable(collector: CollectorProcess) -> None:
    """A 404 sent before the body arrived does not desynchronise the connection."""
    with connect(collector.port) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\n" + HOST + b"Content-Length: 3\r\n\r\n")
        assert listen(connection).statuses == [404]
        connection.sendall(b"abc" + GET)
        assert listen(connection).statuses == [200]


def test_all_bodies_share_one_bound(tmp_path: Path) -> None:
    """While other bodies fill it, the next one gets 429 with Retry-After; then there is space
    again.
    """
    declare(tmp_path)
    body = b"x" * 99_000
    head = POST + f"Content-Length: {len(body) + 1}\r\n\r\n".encode()
    with limited(tmp_path, "max_bodies=150000") as collector, connect(collector.port) as first:
        first.sendall(head + body)
        wait_until(lambda: metric(collector, "headrace_body_bytes") >= len(body))
        heard = exchange(collector.port, head + body + b"x")
        assert heard.statuses == [429]
        assert b"retry-after: 1" in heard.data
        first.sendall(b"x")
        assert listen(first).statuses == [400]
        assert metric(collector, "headrace_body_bytes") == 0


def test_half_open_connections_make_room(collector: CollectorProcess) -> None:
    """Many of them lock nobody out, and close no connection that was served; the limit holds."""
    served = connect(collector.port)
    served.sendall(GET)
    assert listen(served).statuses == [200]
    crowd = [connect(collector.port) for _ in range(40)]
    assert exchange(collector.port, GET).statuses == [200]
    served.sendall(GET)
    assert listen(served).statuses == [200]
    served.close()
    assert metric(collector, "headrace_connections") <= 20
    for connection in crowd:
        connection.close()


def test_busy_connections_are_not_driven_out(tmp_path: Path) -> None:
    """When all connections are at work, a new one gets 429."""
    declare(tmp_path)
    with limited(tmp_path, "max_connections=3") as collector:
        busy = [connect(collector.port) for _ in range(3)]
        for connection in busy:
            connection.sendall(POST + b"Content-Length: 13\r\n\r\n{")
            connection.sendall(b'"events":')
        heard = exchange(collector.port, b"", answers=0)
        assert heard.statuses == [429]
        for connection in busy:
            connection.sendall(b"[]}")
            assert b'"durable":true' in listen(connection).data
            connection.close()


def test_open_episodes_share_one_bound(tmp_path: Path) -> None:
    """Beyond the bound of all open episodes, new steps get 429 and ends are accepted; a cut or an
    end frees space."""
    declare(tmp_path, observation="box:1000")
    with limited(tmp_path, "max_open=20000") as collector:
        step = {"obs": [0.5] * 1000, "action": 0}
        statuses = []
        for name in ("a", "b", "c", "d", "e"):
            collector.post("/v1/episodes", {"episode_id": name})
            statuses.append(collector.post(f"/v1/episodes/{name}/log_action", step)[0])
        status, answer = collector.post("/v1/episodes/a/log_action", step)
        assert (status, answer["error"]["code"]) == (429, "busy")
        assert statuses[:3] == [200, 200, 200]
        assert collector.post("/v1/episodes/a/end", {})[0] == 200
        assert collector.post("/v1/episodes/b/end", {})[0] == 200
        assert collector.post("/v1/episodes/c/log_action", step)[0] == 200


def test_rewards_and_infos_find_the_bound_too(tmp_path: Path) -> None:
    """Rewards and infos count as memory of their step; the end is accepted and frees it.

    Events that a client sends before an end in one batch are accepted with it: otherwise the
    episode could never end.
    """
    declare(tmp_path)
    with limited(tmp_path, "max_open=20000") as collector:
        collector.post("/v1/episodes", {"episode_id": "a"})
        collector.post("/v1/episodes/a/log_action", {"obs": [0, 0, 0, 0], "action": 0})
        late = {"type": "log_returns", "episode_id": "a", "step": 0, "reward": 1.0}
        many = [{**late, "reward_id": str(i)} for i in range(90)]
        assert collector.post("/v1/events", {"events": many})[0] == 200
        for body in ({"step": 0, "reward_id": "x"}, {"info": {"page": 3}}):
            status, answer = collector.post("/v1/episodes/a/log_returns", {"reward": 1.0, **body})
            assert (status, answer["error"]["code"]) == (429, "busy")
        assert collector.post("/v1/episodes/a/log_returns", {"reward": 1.0})[0] == 200
        last = {"type": "log_returns", "episode_id": "a", "reward": 1.0, "info": {"page": 4}}
        end = {"type": "end", "episode_id": "a"}
        assert collector.post("/v1/events", {"events": [last]})[0] == 429
        assert collector.post("/v1/events", {"events": [last, end]})[0] == 200
        collector.post("/v1/episodes", {"episode_id": "b"})
        collector.post("/v1/episodes/b/log_action", {"obs": [0, 0, 0, 0], "action": 0})
        assert collector.post("/v1/episodes/b/log_returns", {"reward": 1.0})[0] == 200


def test_many_small_values_are_refused(tmp_path: Path) -> None:
    """A byte that becomes 70 bytes of memory is counted before it is decoded."""
    declare(tmp_path)
    with limited(tmp_path, "max_values=70000") as collector:
        head = b"\x82\xa3obs\xdd" + (100_000).to_bytes(4, "big")
        bomb = head + b"\x90" * 100_000 + b"\xa6action\x00"
        packed = {"content-type": wire.MSGPACK}
        status, answer = collector.request("POST", "/v1/episodes/e/log_action", bomb, packed)
        assert (status, answer["error"]["code"]) == (413, "too_large")
        text = b'{"obs":[' + b"[]," * 100_000 + b'[]],"action":0}'
        assert collector.request("POST", "/v1/episodes/e/log_action", text)[0] == 413
        raw = msgspec.msgpack.encode({"obs": b"\x90" * 100_000, "action": 0})
        assert collector.request("POST", "/v1/episodes/e/log_action", raw, packed)[0] == 404


PIXELS = random.Random(7).randbytes(28_224)


def event_of(obs: Any) -> dict[str, Any]:
    return {"type": "log_action", "episode_id": "e", "seq": 1, "obs": obs, "action": 0}


@pytest.mark.parametrize(
    ("obs", "containers"),
    [
        (PIXELS, 0),
        ({"dtype": "uint8", "shape": [84, 84, 4], "data": PIXELS}, 2),
        ({"camera": {"dtype": "uint8", "shape": [84, 84, 4], "data": PIXELS}, "speed": 0.5}, 3),
        ([PIXELS, PIXELS], 1),
    ],
    ids=["canonical", "an array", "a Dict space", "a Tuple space"],
)
@pytest.mark.parametrize("kind", [wire.Batch, wire.ActionBatch])
def test_pixels_are_not_counted_as_containers(obs: Any, containers: int, kind: Any) -> None:
    """An image's raw bytes may look like anything, in every message and value that holds them."""
    acts = kind is wire.ActionBatch
    outside: dict[str, Any] = (
        {"durable": False, "record": True, "wait": 1.0} if acts else {"dropped": None}
    )
    body = {"instance": "0-a", "events": [event_of(obs)] * 20, **outside}
    if acts:
        asked = {"episode_id": "e", "seq": 2, "obs": obs}
        body["actions"] = [asked] * 20
        containers += 1 + containers  # of the ones that ask
    assert body.keys() >= set(kind.__struct_fields__)
    packed = msgspec.msgpack.encode(body)
    lists = len(kind.__struct_fields__) - 1 - len(outside)  # events, actions
    found = wire.count_containers(packed, wire.MSGPACK, 500_000)
    assert found == 1 + lists + 20 * (containers + 1)


def test_lists_are_counted() -> None:
    """In every encoding: each decoded list takes 70 bytes of memory."""
    body = msgspec.msgpack.encode({"instance": "0-a", "events": [event_of([[]] * 500)] * 2})
    assert wire.count_containers(body, wire.MSGPACK, 10_000) == 2 + 2 * 502
    assert wire.count_containers(body, wire.MSGPACK, 10) > 10
    assert wire.count_containers(b"\x90" * 50, wire.MSGPACK, 10) == 50
    assert wire.count_containers(b'{"a":[[],{}]}', wire.JSON, 1) == 4
    deep = b"\x91" * 100_000 + b"\x90"
    assert wire.count_containers(deep, wire.MSGPACK, 500_000) == 100_001


def test_a_budget_gives_what_it_has() -> None:
    budget = Budget(10)
    assert [budget.take(6), budget.take(5), budget.take(4)] == [True, False, True]
    budget.give(6)
    assert (budget.held, budget.refused, budget.take(6)) == (4, 1, True)


def test_a_budget_tells_its_peak_once() -> None:
    budget = Budget(10)
    budget.take(7)
    budget.give(5)
    assert [budget.peak(), budget.peak()] == [7, 2]


@pytest.mark.parametrize(
    ("word", "text"),
    [("x=1", "NAME=NUMBER"), ("max_open", "a number"), ("max_open=0", "more than 0")],
)
def test_a_wrong_limit_is_named(word: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ServerLimits.of([word])


def test_connections_leave_descriptors_for_the_collector() -> None:
    """However many connections are allowed, the journal and the shards can still be opened."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert room_for_connections(10) == 10
    assert room_for_connections(10**9) < soft or soft == resource.RLIM_INFINITY


def test_a_reader_that_does_not_read_is_cut_off(tmp_path: Path) -> None:
    """An unread answer is not kept in memory for ever, and is not logged as an error."""
    declare(tmp_path / "root")
    log = tmp_path / "log"
    options = ["--limit", "send_seconds=0.5"]
    with CollectorProcess(tmp_path / "root", options=options, log=log) as collector:
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        deaf.connect(("127.0.0.1", collector.port))
        ask = b"GET /openapi.json HTTP/1.1\r\n" + HOST + b"\r\n"
        asked = scrapes = 0

        def is_cut() -> bool:
            """Ask again while answers are sent, until none is and time is up."""
            nonlocal asked, scrapes
            served = metric(collector, 'headrace_requests_total{status="200"}') if scrapes else 0
            if served - scrapes >= asked:
                deaf.sendall(ask)
                asked += 1
            scrapes += 2 if scrapes else 1
            return metric(collector, 'headrace_connections_cut_total{why="send"}') == 1

        wait_until(is_cut)
        assert metric(collector, "headrace_connections") == 1
        deaf.close()
    assert log.read_text() == ""


def test_an_info_is_not_deeper_than_its_readers(tmp_path: Path) -> None:
    """32 levels are kept, 33 are refused with their place; nothing stored is unreadable."""
    declare(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        collector.post("/v1/episodes", {"episode_id": "e"})
        for levels, expected in ((31, 200), (32, 422), (900, 422)):
            info = b'{"a":' + b"[" * levels + b"]" * levels + b"}"
            body = b'{"obs":[1,2,3,4],"action":0,"info":' + info + b"}"
            status, answer = collector.request("POST", "/v1/episodes/e/log_action", body)
            assert (levels, status) == (levels, expected)
        assert answer["error"]["path"] == "$.info"


def secured(folder: Path, *limits: str) -> CollectorProcess:
    """A collector with TLS."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(folder / "tls.pem")
    declare(folder / "root")
    options = [word for name in limits for word in ("--limit", name)]
    options += ["--tls-cert", str(folder / "tls.pem")]
    return CollectorProcess(folder / "root", options=options, ca=folder / "ca.pem")


def test_a_tls_handshake_has_its_time_too(tmp_path: Path) -> None:
    """A peer that connects and never sends a greeting is cut off before HTTP begins."""
    with (
        secured(tmp_path, "header_seconds=0.5") as collector,
        connect(collector.port) as silent,
        connect(collector.port) as plain,
    ):
        assert listen(silent, answers=0).closed
        plain.sendall(GET)
        assert listen(plain, answers=0).closed
        assert collector.get("/healthz")[0] == 200


def test_tls_handshakes_count_as_connections(tmp_path: Path) -> None:
    """Many silent peers stay within the limit, make way for others, and are closed."""
    with secured(tmp_path, "max_connections=5") as collector:
        pool = urllib3.PoolManager(ca_certs=str(tmp_path / "ca.pem"), retries=False)

        def scraped(name: str) -> float:
            text = pool.request("GET", f"{collector.address}/metrics").data.decode()
            (line,) = [line for line in text.splitlines() if line.rpartition(" ")[0] == name]
            return float(line.rpartition(" ")[2])

        crowd = [connect(collector.port) for _ in range(20)]
        assert scraped("headrace_connections") == 5
        assert scraped('headrace_connections_cut_total{why="room"}') >= 16
        for connection in crowd:
            connection.close()
        wait_until(lambda: scraped("headrace_connections") == 1)
        pool.clear()
