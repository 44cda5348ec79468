"""Requests and responses over ASGI, with the limits that the HTTP server lacks.

A `Router` is an ASGI application: it reads a bounded body, finds the handler for the method and
path, and converts every Refusal to the JSON format of errors. No request can end in a 500 because
of its content.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias
from urllib.parse import unquote

import msgspec

from ingest.access.tokens import ANY, LOCAL, NOBODY, Caller
from ingest.histogram import Histogram
from ingest.protocol import messages as wire
from ingest.protocol.errors import CollectorFailed, Refusal
from ingest.web.cost_limits import Metered, Penalties, Requester
from ingest.web.limits import LONG_BODY, Budget, ServerLimits

log = logging.getLogger("headrace.server")

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_REFUSED_PATH = 200

SINGLE_VALUED = frozenset(
    {
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"headrace-crc32",
        b"headrace-instance",
        b"host",
        b"idempotency-key",
        b"if-none-match",
        b"origin",
        b"prefer",
    }
)
"""Headers that are used here and have one value."""

OF_CONTENT = frozenset({400, 404, 405, 413, 415, 422})
"""Statuses of requests that are invalid in themselves."""


@lru_cache(maxsize=16)
def _media_type(header: bytes) -> str:
    return header.decode("latin-1").partition(";")[0].strip().lower() or wire.JSON


class Request(msgspec.Struct, frozen=True):
    """One HTTP request with its whole body; header names are lower case."""

    method: str
    path: str
    headers: Mapping[bytes, bytes]
    body: bytes
    params: Mapping[str, str] = msgspec.field(default_factory=dict)
    query: str = ""
    caller: Caller = NOBODY
    max_values: int = ServerLimits.max_values
    sender: Requester = msgspec.field(default_factory=lambda: Requester(Penalties()))

    @property
    def content_type(self) -> str:
        """The media type without its parameters; JSON if the client names none."""
        return _media_type(self.headers.get(b"content-type", b""))

    @property
    def instance(self) -> str | None:
        """The client instance that a single call belongs to."""
        value = self.headers.get(b"headrace-instance")
        return None if value is None else value.decode("latin-1")

    def decode(self, kind: type[wire.M]) -> wire.M:
        """Decode the body as a message. Raises Refusal."""
        try:
            return self._decode(kind)
        except MemoryError:
            text = "no memory is left to decode the body"
            raise Refusal("busy", text, retry_after=1.0) from None

    def _decode(self, kind: type[wire.M]) -> wire.M:
        if len(self.body) <= LONG_BODY:
            return wire.decode(self.body, self.content_type, kind)
        # Each collection would traverse everything decoded so far, which takes seconds for
        # megabytes.
        collecting = gc.isenabled()
        gc.disable()
        try:
            if len(self.body) > self.max_values:
                self._require_few_values()
            return wire.decode(self.body, self.content_type, kind)
        finally:
            if collecting:
                gc.enable()

    def _require_few_values(self) -> None:
        """Refuse a body whose lists and objects would use many times its size in memory."""
        count = wire.count_containers(self.body, self.content_type, self.max_values)
        if count > self.max_values:
            raise Refusal(
                "too_large",
                f"expected at most {self.max_values} lists and objects, got about {count}: send "
                "arrays as bytes",
            )


class Response(msgspec.Struct, frozen=True):
    """A complete response."""

    status: int
    body: bytes = b""
    content_type: str = wire.JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()
    wasted: float = 0.0  # the share of a body that was refused for its content, 0 to 1

    @classmethod
    def of(
        cls, message: Any, request: Request, status: int = 200, *, wasted: float = 0.0
    ) -> Response:
        """A message in the encoding of its request: msgpack for msgpack, otherwise JSON."""
        kind = wire.MSGPACK if request.content_type == wire.MSGPACK else wire.JSON
        return cls(status, wire.encode(message, kind), kind, wasted=wasted)

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
WHO_MAY = frozenset({"unauthorized", "forbidden"})
"""Codes that refuse the caller."""


class Admit(Protocol):
    """Authorizes the callers of requests, and logs those that are refused."""

    def __call__(self, scope: Scope, needed: frozenset[str], /) -> Caller:
        """Return the caller, who has one of the needed scopes. Raises Refusal, after logging it."""

    def tell(self, scope: Scope, refusal: Refusal, /) -> None:
        """Log a refusal of a caller that was admitted first."""

    def log_in(self, headers: Mapping[bytes, bytes], token: str, /) -> str:
        """Return the `Set-Cookie` header for a browser that sent a token. Raises Refusal."""


class _Everybody:
    """Admits everybody as a local caller."""

    def __call__(self, scope: Scope, needed: frozenset[str]) -> Caller:
        return LOCAL

    def tell(self, scope: Scope, refusal: Refusal) -> None: ...

    def log_in(self, headers: Mapping[bytes, bytes], token: str) -> str:
        raise Refusal("forbidden", "this collector has no tokens: nobody needs to log in")


class Route(NamedTuple):
    """A handler, and the scopes of which its caller needs one."""

    handler: Handler
    needed: frozenset[str]
    limit: int  # of its body, in bytes; 0 if none is read


class Router:
    """Routes by method and path; `{name}` in a path matches one segment.

    `admit` returns a request's caller, given the scopes that its route needs, or raises Refusal;
    without it everybody is a local caller. All bodies in memory share `budget`. `login` is the page
    for browsers that ask for `/` without a token.
    """

    def __init__(
        self,
        limits: ServerLimits | None = None,
        *,
        budget: Budget | None = None,
        admit: Admit | None = None,
        login: Response | None = None,
    ) -> None:
        self._limits, self._login = limits or ServerLimits(), login
        self.admit = admit or _Everybody()
        self.penalties = Penalties()
        self.budget = budget or Budget(self._limits.max_bodies)
        self.latency = Histogram()  # from complete body to 2xx answer, for changes
        self.statuses: Counter[int] = Counter()  # number of answers
        self.refusals: Counter[str] = Counter()  # number of refusals by code
        self._exact: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[list[str], dict[str, Route]]] = []

    def add(
        self,
        method: str,
        path: str,
        handler: Handler,
        needed: frozenset[str],
        *,
        limit: int | None = None,
    ) -> None:
        """Bind a handler; bodies above `limit` bytes are refused, if possible before reading."""
        route = Route(handler, needed, self._limits.max_message if limit is None else limit)
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
        held = _Held(self.budget)
        try:
            response = await self._respond(scope, receive, held)
        except Refusal as refusal:
            self.refusals[refusal.code] += 1
            # without the traceback, whose frames refer to the refusal in a cycle
            response = self._refused(scope, refusal.with_traceback(None))
        except CollectorFailed as error:
            self.refusals["draining"] += 1
            response = Response.refused(Refusal("draining", str(error), retry_after=1.0))
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            body = b'{"error":{"code":"internal","message":"internal error; see the log"}}'
            response = Response(500, body)
        finally:
            held.give_back()
        self.statuses[response.status] += 1
        if log.isEnabledFor(logging.DEBUG):
            self._log(scope, response)
        await _send(send, response)

    def _refused(self, scope: Scope, refusal: Refusal) -> Response:
        page = scope["path"] == "/" and scope["method"] in ("GET", "HEAD")
        if page and refusal.code == "unauthorized" and self._login is not None:
            return self._login
        return Response.refused(refusal)

    async def _respond(self, scope: Scope, receive: Receive, held: _Held) -> Response:
        try:
            route, params = self._find(scope["method"], scope["path"], scope["raw_path"])
        except Refusal:
            self.admit(scope, ANY)  # without a token nobody may learn which routes exist
            raise
        caller = self.admit(scope, route.needed)
        try:
            answer = await self._admitted(scope, receive, held, route, params, caller)
            if answer.wait:  # the body is no longer needed
                held.give_back()
                await asyncio.sleep(answer.wait)
            return answer.response_or_raise()
        except Refusal as refusal:
            if refusal.code in WHO_MAY:  # its token has expired, or the body requires more scopes
                self.admit.tell(scope, refusal)
            raise

    async def _admitted(
        self,
        scope: Scope,
        receive: Receive,
        held: _Held,
        route: Route,
        params: Mapping[str, str],
        caller: Caller,
    ) -> _HandlerResult:
        headers = _by_name(scope["headers"])
        encoding = headers.get(b"content-encoding", b"identity").lower()
        if encoding != b"identity":
            raise Refusal(
                "unsupported_media",
                f"expected an uncompressed body, got {encoding[:40].decode('latin-1')!r}",
            )
        sender = Requester(self.penalties, caller.token_id or "", f"{scope.get('client')}")
        declared = _declared(headers, route.limit)
        if declared > LONG_BODY:
            await sender.wait()  # before reading, so that waiting takes no memory
        held.belongs(sender.account or sender.connection, declared)
        body = await self._body(receive, held, route.limit)
        query = scope["query_string"].decode("latin-1")
        most = self._limits.max_values
        request = Request(
            scope["method"], scope["path"], headers, body, params, query, caller, most, sender
        )
        began = time.perf_counter()
        if len(body) > LONG_BODY:
            await sender.wait()  # again, because others may have been refused meanwhile
        caller.require_live(time.time())  # a body may be slow, and wait for long
        if not body:
            answer = _HandlerResult(await route.handler(request))
        else:
            work = Metered(_answer(route.handler, request))
            answer = await work
            accepted = answer.response.status < 300
            wait = sender.settle(work.seconds, answer.refused, accepted)
            answer = answer._replace(wait=wait)
        if request.method == "POST" and answer.refusal is None:
            self.latency.observe(time.perf_counter() - began)
        return answer

    def _log(self, scope: Scope, response: Response) -> None:
        number, code = self.statuses.total(), response.status
        client, path = scope.get("client"), scope["path"][:MAX_REFUSED_PATH]
        log.debug("request %d of %s: %s %s -> %d", number, client, scope["method"], path, code)

    def _find(self, method: str, path: str, raw_path: bytes) -> tuple[Route, Mapping[str, str]]:
        methods = self._exact.get(path)
        params: Mapping[str, str] = {}
        if methods is None:
            methods, params = self._match(raw_path)
        if method == "HEAD" and "GET" in methods:
            method = "GET"
        if method not in methods:
            expected = ", ".join(sorted(methods))
            shown = path[:MAX_REFUSED_PATH]
            raise Refusal("method_not_allowed", f"expected {expected} for {shown}, got {method}")
        return methods[method], params

    def _match(self, raw_path: bytes) -> tuple[dict[str, Route], Mapping[str, str]]:
        """Match segments after decoding each, because an id may contain a slash, as %2F."""
        given = [unquote(part) for part in raw_path.decode("latin-1").split("/")]
        for parts, methods in self._patterns:
            if len(parts) != len(given):
                continue
            pairs = list(zip(parts, given, strict=True))
            if all(part == text or (part[:1] == "{" and text) for part, text in pairs):
                return methods, {part[1:-1]: text for part, text in pairs if part[:1] == "{"}
        raise Refusal("no_route", f"there is nothing at {'/'.join(given)[:MAX_REFUSED_PATH]!r}")

    async def _body(self, receive: Receive, held: _Held, limit: int) -> bytes:
        """Read a whole body. Slow ones are detected when a piece or a nudge comes."""
        chunks: list[bytes] = []
        size, more = 0, True
        until = time.monotonic() + self._limits.body_seconds
        while more:
            message = await receive()
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > limit:
                raise _too_large(limit, f"{size} or more")
            held.take(len(chunks[-1]))
            more = message.get("more_body", False)
            if more and time.monotonic() > until:
                text = f"expected the whole body within {self._limits.body_seconds:.0f} s"
                raise Refusal("too_slow", text)
        if message["type"] == "http.disconnect":
            raise Refusal("malformed", "the client disconnected before its body was complete")
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class _Held:
    """The bytes of the shared budget that one request holds."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._account = ""
        self._declared = 0
        self._size = 0
        self._long = 0  # the bytes of it that were taken for a long body

    def belongs(self, account: str, declared: int) -> None:
        """Set the body's account and its length, if that is known."""
        self._account, self._declared = account, declared

    def take(self, nbytes: int) -> None:
        """Raises Refusal if other bodies fill the budget."""
        long = max(self._declared, self._size + nbytes) > LONG_BODY
        if not self._budget.take(nbytes, self._account if long else "", self._long):
            raise self._budget.refusal()
        self._size += nbytes
        self._long += nbytes if long else 0

    def give_back(self) -> None:
        self._budget.give(self._long, self._account)
        self._budget.give(self._size - self._long)
        self._long = self._size = 0


class _HandlerResult(NamedTuple):
    """A handler's response or refusal, and how long it is held back, in seconds."""

    response: Response
    refusal: Refusal | None = None
    wait: float = 0.0

    @property
    def refused(self) -> float:
        """The share of the request that was refused for its content, 0 to 1."""
        of_content = self.refusal is not None and self.refusal.status in OF_CONTENT
        return 1.0 if of_content else self.response.wasted

    def response_or_raise(self) -> Response:
        if self.refusal is not None:
            raise self.refusal
        return self.response


async def _answer(handler: Handler, request: Request) -> _HandlerResult:
    """Await a handler; return its response or refusal.

    The refusal's traceback is removed, because its frames would keep the body and all that was made
    of it in memory while the answer waits, or longer.
    """
    try:
        return _HandlerResult(await handler(request))
    except Refusal as refusal:
        refusal.__cause__ = refusal.__context__ = None
        return _HandlerResult(Response(refusal.status), refusal.with_traceback(None))


def _by_name(lines: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Header lines by name; the lines of a header that is a list are joined (RFC 9110, 5.3).

    Raises Refusal for a second line of a header with one value: a proxy might use the one, and the
    collector the other.
    """
    found: dict[bytes, bytes] = {}
    for name, value in lines:
        if name not in found:
            found[name] = value
        elif name in SINGLE_VALUED:
            raise Refusal("malformed", f"expected one header {name.decode('latin-1')}, got two")
        else:
            found[name] += b", " + value
    return found


def _declared(headers: Mapping[bytes, bytes], limit: int) -> int:
    """The length that a header declares, 0 for none. Raises Refusal if it is above the limit."""
    text = headers.get(b"content-length", b"")
    size = int(text) if text.isdigit() else 0
    if size > limit:
        raise _too_large(limit, text.decode())
    return size


def _too_large(limit: int, size: str) -> Refusal:
    return Refusal("too_large", f"expected at most {limit} bytes, got {size[:40]}")


async def _send(send: Send, response: Response) -> None:
    headers = [
        (b"content-type", response.content_type.encode()),
        (b"content-length", str(len(response.body)).encode()),
        *response.headers,
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
