"""TLS handshakes that are not over count as connections, and make room as half-open ones do.

The loop's own TLS server tells its protocol of a connection once the handshake is over: until then
nothing would count it, and nothing could close it for another.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

from ingest.protocol.errors import Refusal
from ingest.web.connections import ConnectionWatch


class Handshake(asyncio.Protocol):
    """A connection until its handshake is over; then what `serve` makes has it."""

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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base
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
        # Its first step takes the transport over. In a task that would be a turn of the loop later:
        # the client's greeting might be here by then, and lost.
        over: asyncio.Future[None] = shaking.send(None)
        over.add_done_callback(lambda _: self._over(shaking, served))

    def _over(self, shaking: Coroutine[Any, Any, Any], served: asyncio.Protocol) -> None:
        secured = None
        try:
            shaking.send(None)
        except StopIteration as end:
            secured = end.value
        except OSError:  # an ssl.SSLError is one, so is a reset
            self.transport.abort()
        self._watch.forget(self)
        if secured is not None and not self.transport.is_closing():
            served.connection_made(secured)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.forget(self)

    def overdue(self, now: float) -> str | None:
        """Why this connection should be closed now, None when it should not."""
        late = now - self.since > self._watch.limits.header_seconds
        return "handshake" if late else None

    def refuse(self, refusal: Refusal) -> None:
        """There is no answer before the handshake is over."""
        self.transport.abort()

    def nudge(self) -> None:
        """Nobody waits for a body here."""

    def let_go(self) -> None:
        """Nobody works for this connection yet."""
