"""Connections with the limits that the HTTP server lacks.

`BoundedProtocol` is uvicorn's protocol over httptools (llhttp), which does the parsing. It adds:

- a limit on connections: above it, the longest half-open or a long idle connection is closed; if
  there is none, the new connection gets 429;
- limits on the time, size and number of lines of a header; the framing of a body (chunk extensions,
  trailers) is limited by the body's size, and its chunks must not all be tiny;
- a peer that does not read its answer, or keeps sending after it, is disconnected;
- an answer's head and body are one write;
- input that is not HTTP is answered in the JSON format of errors;
- unfinished TLS handshakes count as connections, and are closed as half-open ones are: the event
  loop's TLS server calls its protocol only after the handshake.

A `ConnectionWatch` checks all connections once a second, so that requests need no timers.
"""

from __future__ import annotations

import asyncio
import http
import ssl
from collections.abc import Callable, Coroutine
from enum import Enum
from functools import partial
from typing import Any, Protocol

import httptools
import msgspec
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ingest.protocol.errors import Refusal
from ingest.web.limits import Budget, ServerLimits

SWEEP_SECONDS = 1.0
MIN_IDLE_SECONDS = 1.0
"""Seconds that a connection must wait for its next request to count as idle."""

MANY_CHUNKS, SMALL_CHUNK = 1_000, 64
"""A body of more chunks than this must have this mean size, because each chunk has a fixed cost."""

LINGER_SECONDS = 2.0
"""Seconds in which a client that still sends may read an early answer, such as 413."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Sent before an answer to a client that asks whether to send its body."""

_ONE_WRITE = 16_384
"""The most bytes of a body that is written together with its head."""


class Phase(Enum):
    """The state of reading from a connection."""

    WAITING = "waiting"  # for a request, or for the answer to a complete one
    HEADER = "header"
    BODY = "body"
    LINGERING = "lingering"  # discarding a body whose request is answered


class Connection(Protocol):
    """The watch's view of a connection, or of one in its TLS handshake."""

    since: float
    transport: asyncio.Transport

    @property
    def answering(self) -> bool: ...
    def overdue(self, now: float) -> str | None: ...
    def refuse(self, refusal: Refusal) -> None: ...
    def let_go(self) -> None: ...
    def nudge(self) -> None: ...


class ConnectionWatch:
    """All connections of a server: their number, their common budget, and which are too slow."""

    def __init__(self, limits: ServerLimits, *, max_connections: int, budget: Budget) -> None:
        self.limits = limits
        self.max_connections = max_connections
        self.budget = budget
        self.open: set[Connection] = set()
        # Connections without a request, the longest first: those that never had one, and the
        # others.
        self.half_open: dict[Connection, None] = {}
        self.idle: dict[Connection, None] = {}
        self.refused = 0
        whys = ("handshake", "header", "idle", "body", "send", "linger", "room")
        self.cut_off = dict.fromkeys(whys, 0)
        self.malformed = 0

    def protocol(self) -> Any:
        """The factory for uvicorn's `http=`."""
        return partial(BoundedProtocol, watch=self)

    def admit(self, connection: Connection) -> bool:
        """Whether a new connection may stay; if necessary, another one is closed for it."""
        if len(self.open) >= self.max_connections:
            other = self._dispensable(connection.since)
            if other is None:
                self.refused += 1
                return False
            self.cut(other, "room")
        self.open.add(connection)
        self.half_open[connection] = None
        return True

    def _dispensable(self, now: float) -> Connection | None:
        """A connection to close: a half-open one, or one that has been idle for a while."""
        for half_open in self.half_open:
            return half_open
        for idle in self.idle:
            return idle if now - idle.since > MIN_IDLE_SECONDS else None
        return None

    def forget(self, connection: Connection) -> None:
        self.open.discard(connection)
        self.engage(connection)

    def engage(self, connection: Connection) -> None:
        """Note that a connection has a request."""
        self.half_open.pop(connection, None)
        self.idle.pop(connection, None)

    def cut(self, connection: Connection, why: str) -> None:
        """Close a connection without an answer."""
        self.cut_off[why] += 1
        self.forget(connection)
        connection.let_go()
        connection.transport.abort()

    async def follow(self) -> None:
        """Check all connections, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.sweep(loop.time())

    def sweep(self, now: float) -> None:
        for connection in list(self.open):
            why = connection.overdue(now)
            if why == "slow":
                connection.nudge()
            elif why == "header" and connection.answering is False:
                connection.refuse(
                    Refusal("too_slow", "expected the whole header within the limit header_seconds")
                )
                self.cut_off[why] += 1
            elif why is not None:
                self.cut(connection, why)


class _OneWrite(asyncio.Transport):
    """A transport that writes an answer's head together with its body.

    Two writes would be two system calls and two packets for every request.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._head: bytes | None = None
        self._begun = False

    def write(self, data: Any) -> None:
        if self._begun and len(data) > _ONE_WRITE:  # not copied for each client
            self._transport.write(self._taken())
            self._transport.write(data)
        elif self._begun:
            self._transport.write(self._taken() + data)
        elif data == _CONTINUE:
            self._transport.write(data)
        else:
            self._begun, self._head = True, data

    def close(self) -> None:
        self._transport.write(self._taken())
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _taken(self) -> bytes:
        """The head, once."""
        head, self._head = self._head or b"", None
        return head


class BoundedProtocol(HttpToolsProtocol):
    """One connection. See the module's docstring."""

    parser: httptools.HttpRequestParser  # calls the methods below that begin with `on_`

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        watch: ConnectionWatch,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._watch = watch
        self._limits = watch.limits
        self._phase = Phase.WAITING
        self.since = self.loop.time()
        self._raw = 0  # bytes read since the request began, without those of its first read
        self._body = 0  # the bytes of these that are body
        self._chunks = 0  # number of chunks of a chunked body
        self._names = 0  # number of the request's header lines
        self._header = 0  # bytes of its complete header lines
        self._held = 0  # bytes of the common budget, for an incomplete header
        self._refusal: Refusal | None = None
        self._running: RequestResponseCycle | None = None
        self._unread = 0  # bytes of an answer that the peer has not read
        self._unread_since = self.since

    @property
    def answering(self) -> bool:
        """Whether a request is being answered."""
        return self._running is not None and not self._running.response_complete

    # --- lifetime of a connection ----------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base
        self.since = self.loop.time()
        if self._watch.admit(self):
            super().connection_made(transport)
            return
        self.transport = transport
        text = f"{self._watch.max_connections} connections are open"
        self._write(Refusal("busy", text, retry_after=1.0))
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.forget(self)
        self._give_back()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._raw += len(data)
        super().data_received(data)
        if self._phase is Phase.HEADER:
            self._hold(len(data))
        elif self._phase is Phase.LINGERING and self._raw > self._limits.max_message:
            self._watch.cut(self, "linger")
        elif self._phase is Phase.BODY and self._is_mostly_framing():
            self._watch.cut(self, "body")

    def _is_mostly_framing(self) -> bool:
        """Whether a body is mostly chunk extensions and trailers. A 1-byte chunk has 5 more."""
        return self._raw - self._body > self._limits.max_header + 16 * self._body

    def overdue(self, now: float) -> str | None:
        """Why this connection should be closed now, None if it should not.

        "slow": it is refused with an answer before it is closed.
        """
        limits, waited = self._limits, now - self.since
        if self._is_stuck(now):
            return "send"
        if self.transport.is_closing():
            return None
        if self._phase is Phase.HEADER and waited > limits.header_seconds:
            return "header"
        if self._phase is Phase.LINGERING and waited > LINGER_SECONDS:
            return "linger"
        if self._phase is Phase.BODY and waited > limits.body_seconds + LINGER_SECONDS:
            return "body"
        if self._phase is Phase.BODY and waited > limits.body_seconds:
            return "slow"
        if self._phase is Phase.WAITING and not self.answering:
            if self.cycle is None and waited > limits.header_seconds:
                return "idle"
            if waited > limits.idle_seconds:
                return "idle"
        return None

    def _is_stuck(self, now: float) -> bool:
        """Whether the peer has not read written data for too long."""
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread != self._unread:
            self._unread, self._unread_since = unread, now
            return False
        return now - self._unread_since > self._limits.send_seconds

    # --- calls of the parser ---------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._enter(Phase.HEADER)
        self._raw = self._body = self._chunks = self._names = self._header = 0
        if len(self.pipeline) >= self._limits.max_pipelined:
            raise self._refused(
                "malformed", f"expected at most {self._limits.max_pipelined} pipelined requests"
            )
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A line of the header, or of the trailer after a chunked body, which is ignored."""
        self._names += 1
        self._count(len(name) + len(value))
        if self._names > self._limits.max_headers:
            text = f"expected at most {self._limits.max_headers} header lines"
            raise self._refused("header_too_large", text)
        if name.lower() == b"transfer-encoding" and value.strip().lower() != b"chunked":
            raise self._refused("malformed", "expected no transfer encoding but chunked")
        if self._phase is Phase.HEADER:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            raise self._refused("malformed", "expected HTTP/1.1")
        if self.parser.get_http_version() == "1.0" and self._is_coded():
            raise self._refused("malformed", "expected no transfer encoding in HTTP/1.0")
        if self.parser.should_upgrade():
            raise self._refused("malformed", "expected HTTP/1.1 without an upgrade or CONNECT")
        if not self.url.startswith(b"/"):
            self._take_target_host()
        self._give_back()
        self._enter(Phase.BODY)
        self._watch.engage(self)
        super().on_headers_complete()

    def _is_coded(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.headers)

    def _take_target_host(self) -> None:
        """Use the host in a target (RFC 9112, 3.2.2) instead of the `Host` header."""
        try:
            target = httptools.parse_url(self.url)
        except httptools.HttpParserInvalidURLError:
            target = None
        if target is None or not target.host or target.userinfo or not target.path:
            shown = self.url[:80].decode("latin-1")
            raise self._refused("malformed", f"expected a path as the target, got {shown!r}")
        host: bytes = b"[%b]" % target.host if b":" in target.host else target.host
        authority = host if target.port is None else b"%b:%d" % (host, target.port)
        given = [place for place, (name, _) in enumerate(self.headers) if name == b"host"]
        for place in given:
            self.headers[place] = (b"host", authority)
        if not given:
            self.headers.append((b"host", authority))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle  # with pipelining, the base's `cycle` is the latest request instead
        if cycle.scope["method"] != "HEAD":  # its answer has a head only
            cycle.transport = _OneWrite(self.transport)
        super()._start_asgi_task(cycle, app)

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > MANY_CHUNKS and self._body < SMALL_CHUNK * self._chunks:
            raise self._refused("malformed", f"expected chunks of {SMALL_CHUNK} bytes on average")

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body. The first is kept without the two copies that uvicorn makes."""
        self._body += len(body)
        cycle = self.cycle
        if cycle.body:
            cycle.body = bytearray(cycle.body) if isinstance(cycle.body, bytes) else cycle.body
            super().on_body(body)
        elif not cycle.response_complete:
            cycle.body = body  # type: ignore[assignment]  # uvicorn only calls bytes() on it
            super().on_body(b"")

    def on_message_complete(self) -> None:
        self._enter(Phase.WAITING)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._phase is Phase.BODY and self.cycle.response_complete:
            self._enter(Phase.LINGERING)
        else:
            self.since = self.loop.time()
        super().on_response_complete()
        if not self.answering and not self.transport.is_closing():
            self._watch.idle[self] = None

    # --- refusing --------------------------------------------------------------------------

    def refuse(self, refusal: Refusal) -> None:
        """Answer input that is not a valid request, and close."""
        self._write(refusal)
        self.let_go()
        self.transport.close()

    def let_go(self) -> None:
        """Tell the handlers of this connection that the client is gone."""
        for cycle in (self._running, self.cycle):
            if cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()

    def nudge(self) -> None:
        """Wake a handler that waits for the rest of a body, so that it checks the time."""
        if self._running is not None:
            self._running.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """Answer input that the parser refuses, in the JSON format of errors.

        It is not answered if that would look like the answer to another request of a pipeline, or
        like a second one.
        """
        self._watch.malformed += 1
        if self._may_answer():
            self._write(self._refusal or Refusal("malformed", f"expected HTTP/1.1: {msg}"))
        self.let_go()
        self.transport.close()

    def _may_answer(self) -> bool:
        """Whether nothing is due or sent before an answer to the input that is being read."""
        if self._phase is Phase.LINGERING:
            return False
        running = self._running
        if running is None or running.response_complete:
            return True
        reading = self._phase is Phase.BODY and running is self.cycle
        return reading and not running.response_started

    def _write(self, refusal: Refusal) -> None:
        body = msgspec.json.encode({"error": refusal.to_json()})
        phrase = http.HTTPStatus(refusal.status).phrase
        head = f"HTTP/1.1 {refusal.status} {phrase}\r\ncontent-type: application/json\r\n"
        if refusal.retry_after is not None:
            head += f"retry-after: {max(1, round(refusal.retry_after))}\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)

    def _refused(self, code: str, text: str) -> Refusal:
        """The refusal to raise in a call of the parser: the parser stops, and it is sent."""
        self._refusal = Refusal(code, text)
        return self._refusal

    def _count(self, nbytes: int) -> None:
        self._header += nbytes
        if self._header > self._limits.max_header:
            raise self._refused("header_too_large", self._too_large())

    def _too_large(self) -> str:
        return f"expected a header of at most {self._limits.max_header} bytes"

    def _hold(self, nbytes: int) -> None:
        """Count a read that left the header incomplete: the parser keeps its bytes."""
        if self._raw > self._limits.max_header:
            self.refuse(Refusal("header_too_large", self._too_large()))
        elif self._watch.budget.take(nbytes):
            self._held += nbytes
        else:
            self.refuse(self._watch.budget.refusal())

    def _give_back(self) -> None:
        self._watch.budget.give(self._held)
        self._held = 0

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self.since = self.loop.time()


class Handshake(asyncio.Protocol):
    """A connection during its TLS handshake; then the protocol that `serve` makes takes it over."""

    answering = False

    def __init__(
        self,
        watch: ConnectionWatch,
        context: ssl.SSLContext,
        serve: Callable[[], asyncio.Protocol],
    ) -> None:
        self._watch, self._context, self._serve = watch, context, serve
        self._loop = asyncio.get_running_loop()
        self.since = self._loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base
        self.transport = transport
        if not self._watch.admit(self):
            transport.abort()
            return
        served = self._serve()
        shaking = self._loop.start_tls(
            transport,
            served,
            self._context,
            server_side=True,
            ssl_handshake_timeout=self._watch.limits.header_seconds,
        )
        # Run the first step, which takes over the transport, at once. In a task it would run in a
        # later turn of the loop, and the client's first bytes might be lost.
        over: asyncio.Future[None] = shaking.send(None)
        over.add_done_callback(lambda _: self._over(shaking, served))

    def _over(self, shaking: Coroutine[Any, Any, Any], served: asyncio.Protocol) -> None:
        secured = None
        try:
            shaking.send(None)
        except StopIteration as end:
            secured = end.value
        except OSError:  # ssl.SSLError and resets are OSErrors
            self.transport.abort()
        self._watch.forget(self)
        if secured is not None and not self.transport.is_closing():
            served.connection_made(secured)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.forget(self)

    def overdue(self, now: float) -> str | None:
        """Why this connection should be closed now, None if it should not."""
        late = now - self.since > self._watch.limits.header_seconds
        return "handshake" if late else None

    def refuse(self, refusal: Refusal) -> None:
        """Do nothing: there is no answer during the handshake."""
        self.transport.abort()

    def nudge(self) -> None:
        """Do nothing: there is no handler that waits for a body."""

    def let_go(self) -> None:
        """Do nothing: there is no handler."""
