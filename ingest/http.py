"""Requests and responses over ASGI, with the limits that the HTTP server does not have.

A `Router` is an ASGI application: it reads a bounded body, finds the handler of method and path,
and turns every Refusal into the one JSON shape of an error. A request cannot end in a 500 because
of its content.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import unquote

import msgspec

from ingest import wire
from ingest.auth import LOCAL, NOBODY, Caller
from ingest.errors import CollectorFailed, Refusal

log = logging.getLogger("headrace.server")

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY_SECONDS = 30.0
"""How long a client may take to send a body."""


@dataclass(frozen=True)
class Request:
    """One HTTP request with its whole body; header names are lower case."""

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    body: bytes
    params: Mapping[str, str] = field(default_factory=dict)
    query: str = ""
    caller: Caller = NOBODY

    @property
    def content_type(self) -> str:
        """The media type without its parameters; JSON when the client names none."""
        text = self.headers.get(b"content-type", b"").decode("latin-1")
        return text.partition(";")[0].strip().lower() or wire.JSON

    @property
    def instance(self) -> str | None:
        """The client instance that a single call belongs to."""
        value = self.headers.get(b"headrace-instance")
        return None if value is None else value.decode("latin-1")

    def decode(self, kind: type[wire.M]) -> wire.M:
        """The body as a message. Raises Refusal."""
        return wire.decode(self.body, self.content_type, kind)


@dataclass(frozen=True)
class Response:
    """A whole answer."""

    status: int
    body: bytes = b""
    content_type: str = wire.JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @classmethod
    def of(cls, message: Any, request: Request, status: int = 200) -> Response:
        """A message in the encoding of its request: msgpack for msgpack, else JSON."""
        kind = wire.MSGPACK if request.content_type == wire.MSGPACK else wire.JSON
        return cls(status, wire.encode(message, kind), kind)

    @classmethod
    def refused(cls, refusal: Refusal) -> Response:
        headers: tuple[tuple[bytes, bytes], ...] = ()
        if refusal.retry_after is not None:
            headers = ((b"retry-after", str(max(1, round(refusal.retry_after))).encode()),)
        if refusal.code == "unauthorized":
            headers += ((b"www-authenticate", b'Bearer realm="headrace"'),)
        body = msgspec.json.encode({"error": refusal.to_json()})
        return cls(refusal.status, body, headers=headers)


Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
Admit: TypeAlias = Callable[[Scope, frozenset[str]], Caller]


class Route(NamedTuple):
    """A handler, and the scopes of which its caller needs one."""

    handler: Handler
    needed: frozenset[str]


class Router:
    """Routes by method and path; `{name}` in a path matches one segment.

    `admit` answers who makes a request, given the scopes that its route needs, or raises Refusal;
    without one everybody is a local caller.
    """

    def __init__(self, max_body: int, *, admit: Admit | None = None) -> None:
        self._max_body = max_body
        self._admit = admit or (lambda scope, needed: LOCAL)
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[list[str], dict[str, Route]]] = []

    def add(self, method: str, path: str, handler: Handler, needed: frozenset[str]) -> None:
        route = Route(handler, needed)
        if "{" not in path:
            self._exact.setdefault(path, {})[method] = route
            return
        parts = path.split("/")
        for known, methods in self._patterns:
            if known == parts:
                methods[method] = route
                return
        self._patterns.append((parts, {method: route}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            response = await self._respond(scope, receive)
        except Refusal as refusal:
            response = Response.refused(refusal)
        except CollectorFailed as error:
            response = Response.refused(Refusal("draining", str(error), retry_after=1.0))
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            body = b'{"error":{"code":"internal","message":"internal error; see the log"}}'
            response = Response(500, body)
        await _send(send, response)

    async def _respond(self, scope: Scope, receive: Receive) -> Response:
        route, params = self._find(scope["method"], scope["path"], scope["raw_path"])
        caller = self._admit(scope, route.needed)
        headers = dict(scope["headers"])
        encoding = headers.get(b"content-encoding", b"identity").lower()
        if encoding != b"identity":
            raise Refusal(
                "unsupported_media",
                f"expected an uncompressed body, got {encoding.decode('latin-1')}",
            )
        body = await self._body(headers, receive)
        query = scope["query_string"].decode("latin-1")
        request = Request(scope["method"], scope["path"], headers, body, params, query, caller)
        return await route.handler(request)

    def _find(self, method: str, path: str, raw_path: bytes) -> tuple[Route, Mapping[str, str]]:
        methods = self._exact.get(path)
        params: Mapping[str, str] = {}
        if methods is None:
            methods, params = self._match(raw_path)
        if method == "HEAD" and "GET" in methods:
            method = "GET"
        if method not in methods:
            expected = ", ".join(sorted(methods))
            raise Refusal("method_not_allowed", f"expected {expected} for {path}, got {method}")
        return methods[method], params

    def _match(self, raw_path: bytes) -> tuple[dict[str, Route], Mapping[str, str]]:
        """Segments are decoded one by one: an id may hold a slash, as %2F."""
        given = [unquote(part) for part in raw_path.decode("latin-1").split("/")]
        for parts, methods in self._patterns:
            if len(parts) != len(given):
                continue
            pairs = list(zip(parts, given, strict=True))
            if all(part == text or (part[:1] == "{" and text) for part, text in pairs):
                return methods, {part[1:-1]: text for part, text in pairs if part[:1] == "{"}
        raise Refusal("no_route", f"there is nothing at {'/'.join(given)[:200]!r}")

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        declared = headers.get(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > self._max_body:
            raise self._too_large(declared.decode())
        chunks: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more:
                    message = await receive()
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > self._max_body:
                        raise self._too_large(f"{size} or more")
                    more = message.get("more_body", False)
        except TimeoutError as error:
            text = f"expected the whole body within {BODY_SECONDS:.0f} s"
            raise Refusal("malformed", text) from error
        if message["type"] == "http.disconnect":
            raise Refusal("malformed", "the client went away within its body")
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _too_large(self, size: str) -> Refusal:
        return Refusal("too_large", f"expected at most {self._max_body} bytes, got {size}")


async def _send(send: Send, response: Response) -> None:
    headers = [
        (b"content-type", response.content_type.encode()),
        (b"content-length", str(len(response.body)).encode()),
        *response.headers,
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
