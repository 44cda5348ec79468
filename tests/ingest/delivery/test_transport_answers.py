"""Any bytes on a connection give an answer or CollectorUnavailable."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ingest.delivery.transport import Transport
from ingest.protocol import messages as wire
from ingest.protocol.errors import CollectorUnavailable, Refusal
from tests.collector_process import CollectorProcess, declare

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-One: 1\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNKED += b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
LARGE = b"x" * 3_000_000
Play = Callable[[socket.socket], None]


@contextmanager
def server(*plays: Play):
    """A server that plays one of these on each connection; yields the connections so far."""
    listening, accepted = socket.create_server(("127.0.0.1", 0)), []

    def serve() -> None:
        for play in plays:
            peer, _ = listening.accept()
            accepted.append(peer)
            with peer:
                play(peer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", accepted
    finally:
        listening.close()
        thread.join(60)


def heard(peer: socket.socket) -> bytes:
    """Read one whole request."""
    read = peer.recv(65536)
    head, _, body = read.partition(b"\r\n\r\n")
    left = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0) - len(body)
    while left > 0:
        left -= len(peer.recv(65536))
    return read


def say(*pieces: bytes) -> Play:
    def play(peer: socket.socket) -> None:
        for piece in pieces:
            heard(peer)
            peer.sendall(piece)

    return play


def slowly(peer: socket.socket) -> None:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    heard(peer)
    for byte in OK:
        peer.sendall(bytes([byte]))


@pytest.mark.parametrize(
    ("play", "body"),
    [
        (slowly, b"hello"),
        (say(CHUNKED), b"hello"),
        (say(b"HTTP/1.1 200 OK\r\n\r\nhello"), b"hello"),
        (say(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello"), b"hello"),
        (say(b"HTTP/1.1 100 Continue\r\n\r\n" + OK), b"hello"),
        (say(b"HTTP/1.1 204 No Content\r\n\r\n"), b""),
        (say(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n"), b""),
        (say(b"HTTP/1.1 200 OK\r\nContent-Length: 3000000\r\n\r\n" + LARGE), LARGE),
    ],
)  # fmt: skip
def test_an_answer_is_read_however_it_is_framed(play: Play, body: bytes) -> None:
    with server(play) as (address, _):
        transport = Transport(address, timeout=60.0)
        assert transport.attempt("GET", "/").body == body
        transport.close()


@pytest.mark.parametrize(
    ("first", "kept"),
    [
        (OK, True),
        (OK.replace(b"X-One: 1", b"Set-Cookie: a=1\r\nSet-Cookie: b=2"), True),
        (OK.replace(b"X-One: 1", b"Connection: close"), False),
        (OK + b"more", False),
    ],
)
def test_a_connection_is_kept_while_its_answers_are_whole(first: bytes, kept: bool) -> None:
    plays = [say(first, OK)] if kept else [say(first), say(OK)]
    with server(*plays) as (address, accepted):
        transport = Transport(address, timeout=60.0)
        for _ in range(2):
            assert transport.attempt("POST", "/", b"body").body == b"hello"
        assert len(accepted) == (1 if kept else 2)
        transport.close()


def test_a_collectors_answers_need_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector's answers have a Content-Length, and are read without http.client."""
    declare(tmp_path)
    monkeypatch.setattr("ingest.delivery.transport.HTTPResponse", None)
    with CollectorProcess(tmp_path) as collector:
        transport = Transport(collector.address, timeout=60.0)
        assert transport.attempt("GET", "/v1/spec").status == 200
        for path, message in (("instances", wire.Register()), ("events", wire.Batch(events=[]))):
            body = wire.encode(message, wire.MSGPACK)
            transport.attempt("POST", f"/v1/{path}", body, {"Content-Type": wire.MSGPACK})
        transport.close()


def test_a_body_that_is_refused_unread_is_a_refusal() -> None:
    """The answer is read although the rest of the request could not be sent."""

    def refuse(peer: socket.socket) -> None:
        peer.recv(100)
        peer.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(65536):
            pass

    with server(refuse) as (address, _):
        transport = Transport(address, timeout=60.0)
        with pytest.raises(Refusal) as caught:
            transport.attempt("POST", "/", LARGE)
        assert caught.value.code == "too_large"
        transport.close()


def test_a_reset_is_no_answer() -> None:
    def reset(peer: socket.socket) -> None:
        heard(peer)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with server(reset) as (address, _):
        transport = Transport(address, timeout=60.0)
        with pytest.raises(CollectorUnavailable) as caught:
            transport.attempt("POST", "/", b"body")
        assert caught.value.maybe_applied
        transport.close()


HEADS = st.sampled_from(
    [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 2", b"HTTP/1.1 \xb2\xb2\xb2 \r\n", b"HTTP/0.9 200\r\n", b""]
)
LINES = st.lists(
    st.sampled_from(
        [b"Content-Length: 2\r\n", b"Content-Length: -1\r\n", b"Content-Length: \xb2\r\n",
         b"Content-Length: " + b"9" * 5000 + b"\r\n", b"Transfer-Encoding: chunked\r\n",
         b": \r\n", b" folded\r\n", b"\x00\r\n"]
    ),
    max_size=3,
)  # fmt: skip


@given(head=HEADS, lines=LINES, rest=st.binary(max_size=20))
@example(head=b"HTTP/1.1 200 OK\r\n", lines=[], rest=b"x" * 70_000)
def test_any_bytes_are_an_answer_or_none(head: bytes, lines: list[bytes], rest: bytes) -> None:
    """No other error leaves an attempt: it would end the sending thread."""
    with server(say(head + b"".join(lines) + b"\r\n" + rest)) as (address, _):
        transport = Transport(address, timeout=60.0)
        try:
            transport.attempt("GET", "/")
        except (CollectorUnavailable, Refusal):
            pass
        finally:
            transport.close()


@pytest.mark.parametrize("path", ["/a b", "/a\r\nX: 1", "/\n"])
def test_a_path_is_never_more_than_a_path(path: str) -> None:
    transport = Transport("http://127.0.0.1:9")
    with pytest.raises(ValueError, match="expected no spaces or line breaks"):
        transport.attempt("GET", path)
    transport.close()
