"""HTTP to one collector: single attempts, their outcomes, and retries.

`Transport.attempt` sends one request. Its outcome is an `Answer`, a `Refusal` (the collector judged
the request), or `CollectorUnavailable` (try again). `Delivery` repeats a request with identical
bytes until it is answered, which is safe because a collector recognises the repetition of every
request of protocol v1 that changes state.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  # as a thread connects: a child forked meanwhile has half of it
import errno
import io
import re
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http.client import HTTPResponse
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import NewConnectionError, ProtocolError, ReadTimeoutError
from urllib3.util import Url, parse_url

from ingest.protocol import messages as wire
from ingest.protocol.errors import STATUS, CollectorUnavailable, Refusal
from storage.system.backoff import LONGEST_RETRY_AFTER, Backoff
from storage.system.forks import notice_fork, renewed_by_fork

UNAVAILABLE = frozenset({408, 425, 429, 500, 502, 503, 504, 507})
"""Statuses that do not depend on the request, which can be sent again unchanged."""

_NOT_APPLIED = frozenset({425, 429, 503, 507})  # those that the collector itself sends
_FALLBACK_CODES = {
    400: "malformed",
    401: "unauthorized",
    403: "forbidden",
    404: "no_route",
    405: "method_not_allowed",
    409: "conflict",
    413: "too_large",
    415: "unsupported_media",
    422: "invalid",
}
RETRY_DELAYS = Backoff(0.05, 5.0)
_IDLE_SECONDS = 50.0  # a connection that was idle for longer may be dead
_CONNECTIONS = 64  # the most that stay open; further threads open and close their own

_READ, _READ_MOST = 65_536, 1_048_576  # bytes per read
_LARGEST_HEAD = 65_536
_LONGEST_LENGTH = 15  # digits of a Content-Length

_ONE_PIECE = 65_536  # longer bodies are sent separately from their head, without a copy

_AS_IT_IS = "Accept-Encoding: identity"
_UNKNOWN_AUTHORITY = ("issuer", "self-signed", "self signed", "the first certificate")  # OpenSSL's
_PLAIN_ANSWERS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "record layer failure")
"""What OpenSSL says, by its version, of a server that answers a handshake with text."""
_IN_BATCH = re.compile(r"^\$\.(?:events|actions)\[\d+\]\.?")
_TOKEN = re.compile(r"[\x21-\x7e]+")

M = TypeVar("M")
_RawReply: TypeAlias = tuple[int, Mapping[str, str], bytes]
TokenSource: TypeAlias = str | Callable[[], str] | None
"""A bearer token, or a function that returns the current one."""


class HttpSession(Protocol):
    """The methods that are used of the caller's `requests.Session`."""

    @property
    def request(self) -> Callable[..., Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Answer:
    """A 2xx response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def decode(self, kind: type[M]) -> M:
        """The body as a wire message. Raises CollectorUnavailable if it is not protocol v1."""
        content_type = self.headers.get("content-type", "").partition(";")[0].strip()
        try:
            return wire.decode(self.body, content_type, kind)
        except Refusal as error:
            raise CollectorUnavailable(
                f"expected a {kind.__name__} of protocol v{wire.PROTOCOL_VERSION} from a Headrace "
                f"collector, got HTTP {self.status} with {content_type or 'no content type'}: "
                f"{error}"
            ) from error


class _Connections:
    """A pool of open connections to one server.

    urllib3 opens them (names, timeouts, TLS). http.client reads answers without a Content-Length.
    The common case, a complete request and an answer with a Content-Length, is handled here: for it
    both libraries need more CPU time than all the rest of a remote action (`benchmarks/acting.py`).
    """

    def __init__(self, url: Url, ca: str | Path | None) -> None:
        self._url, self._ca = url, None if ca is None else str(ca)
        self._idle: deque[HTTPConnection] = deque(maxlen=_CONNECTIONS)
        weakref.finalize(self, _close_all, self._idle)

    def close(self) -> None:
        """Close idle connections; the others are closed after their answers."""
        _close_all(self._idle)

    def exchange(
        self, head: bytes, body: bytes, timeout: float, *, keep: Callable[[], bool]
    ) -> _RawReply:
        """Send a request once, and read the answer. Raises OSError, HTTPError, HTTPException."""
        connection = self._take(timeout)
        try:
            sock = connection.sock
            sock.settimeout(timeout)
            was_sent = _send(sock, head, body)
            status, headers, body, is_open = _read_answer(sock)
        except BaseException:
            connection.close()
            raise
        if was_sent and is_open and keep() and len(self._idle) < _CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.close()
        return status, headers, body

    def _take(self, timeout: float) -> HTTPConnection:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if connection.is_connected:
                return connection
            connection.close()
        host, port = (self._url.host or "").strip("[]"), self._url.port
        if self._url.scheme == "https":
            connection = HTTPSConnection(host, port, timeout=timeout, ca_certs=self._ca)
        else:
            connection = HTTPConnection(host, port, timeout=timeout)
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        return connection


def _close_all(connections: deque[HTTPConnection]) -> None:
    while connections:
        connections.pop().close()


def _send(sock: Any, head: bytes, body: bytes) -> bool:
    """Send a request; return False if the server closed early, after an answer to the head."""
    try:
        if len(body) < _ONE_PIECE:
            sock.sendall(head + body)
        else:
            sock.sendall(head)
            sock.sendall(body)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ECONNRESET, errno.EPROTOTYPE):
            raise
        return False
    return True


def _read_answer(sock: Any) -> tuple[int, Mapping[str, str], bytes, bool]:
    """(status, headers, body, whether the connection can be used again)."""
    read = sock.recv(_READ)
    while (end := read.find(b"\r\n\r\n")) < 0:
        if len(read) > _LARGEST_HEAD:
            raise ProtocolError(f"expected headers of at most {_LARGEST_HEAD} bytes")
        more = sock.recv(_READ)
        if not more:
            raise ProtocolError("the connection was closed without an answer")
        read += more
    head = _read_head(read[:end])
    if head is None:
        return _read_by_library(sock, read)
    status, headers, length, is_open = head
    body = read[end + 4 :]
    if len(body) < length:
        whole = bytearray(body)
        while len(whole) < length:
            more = sock.recv(min(_READ_MOST, length - len(whole)))
            if not more:
                raise ProtocolError(f"expected a body of {length} bytes, got {len(whole)}")
            whole += more
        body = bytes(whole)
    return status, headers, body[:length], is_open and len(body) == length


@lru_cache(maxsize=64)
def _read_head(head: bytes) -> tuple[int, Mapping[str, str], int, bool] | None:
    """(status, headers, length of the body, whether the connection stays open).

    None if http.client must read the answer. Cached, because a collector's heads repeat.
    """
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, status = first.partition(" ")
    is_plain = version == "HTTP/1.1" and status[:3].isdecimal() and status[0] != "1"
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        name = name.lower()
        is_plain &= name != "transfer-encoding" and (
            name != "content-length" or name not in headers
        )
        headers[name] = value.strip()
    length = "0" if status[:3] in ("204", "304") else headers.get("content-length", "")
    if not is_plain or not length.isdecimal() or len(length) > _LONGEST_LENGTH:
        return None
    is_open = "close" not in headers.get("connection", "").lower()
    return int(status[:3]), MappingProxyType(headers), int(length), is_open


def _read_by_library(sock: Any, read: bytes) -> tuple[int, dict[str, str], bytes, bool]:
    """`_read_answer` through http.client, for other answers; the connection is not used again."""
    response = HTTPResponse(_Replay(read, sock), method="POST")  # type: ignore[arg-type]  # it only calls makefile
    response.begin()
    return response.status, _lower(dict(response.headers)), response.read(), False


class _Replay(io.RawIOBase):
    """A socket whose first bytes, which were read already, are read again."""

    def __init__(self, read: bytes, sock: Any) -> None:
        self._read, self._sock = read, sock

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._read[: len(buffer)] or self._sock.recv(len(buffer))
        self._read = self._read[len(piece) :]
        buffer[: len(piece)] = piece
        return len(piece)


def _url_of(address: str) -> Url:
    """Parse a collector's address. Raises ValueError."""
    expected = f"address: expected http://HOST[:PORT] or https://..., got {address!r:.200}"
    try:
        url = parse_url(address if "://" in address else f"http://{address}")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{expected} ({error})") from error
    is_plain = not any(one.isspace() or not one.isprintable() for one in address)
    if url.scheme not in ("http", "https") or not url.host or not is_plain:
        raise ValueError(expected)
    return url


class Flag:
    """A `threading.Event` that a signal handler can set during another call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # with a reentrant lock
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(self.is_set, timeout)


class Transport:
    """Requests to `address`, on its own connections or through the caller's session.

    `timeout` is in seconds, per attempt. `closing` ends every wait between attempts. `clock` must
    advance while the machine is suspended, because connections can die unnoticed then.
    """

    def __init__(
        self,
        address: str,
        *,
        session: HttpSession | None = None,
        token: TokenSource = None,
        ca: str | Path | None = None,
        timeout: float = 30.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        url = _url_of(address)
        self._url = url
        self._prefix, self._host = (url.path or "").rstrip("/"), str(url.netloc)
        self.address = f"{url.scheme}://{url.netloc}{self._prefix}"
        self.timeout = timeout
        self._session = session
        self._headers = {"Accept": wire.MSGPACK, "User-Agent": "headrace"}
        if not (token is None or callable(token) or isinstance(token, str)):
            raise ValueError(f"token: expected a string or a function, got {type(token)}")
        if isinstance(token, str) and not _TOKEN.fullmatch(token):
            # the text must not contain the token
            raise ValueError("token: expected printable ASCII without spaces")
        self._token = token
        if ca is not None and session is not None:
            raise ValueError("ca: expected none with a session: set session.verify instead")
        require_ca(ca)
        self.closing = Flag()
        self._clock = clock
        self._used = clock()
        self._connections = _Connections(url, ca)
        self._is_known = False  # somebody has answered here
        _transports.add(self)

    def after_fork(self) -> None:
        """Drop the parent's connections in a forked child, without writing to them."""
        self.closing = Flag()
        self._connections.close()  # the child's copies
        if self._session is not None:
            self._session.close()  # drops the child's copies; a session opens new ones when used

    def close(self) -> None:
        """Close this transport's connections; the caller closes a given session."""
        self.closing.set()
        self._connections.close()

    def attempt(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """Send a request once.

        Raises CollectorUnavailable if it may be sent again, Refusal if the collector judged it.
        """
        notice_fork()
        sent = {**self._headers, **(headers or {})}
        if self._token is not None:
            sent["Authorization"] = _authorization(self._token)
        status, found, content = self._exchange(method, path, body, sent, timeout or self.timeout)
        if 200 <= status < 300 or status == _NOT_MODIFIED:
            return Answer(status, found, content)
        refusal = refusal_of(status, content, self.address)
        if status in UNAVAILABLE and refusal.code != "no_version":
            raise CollectorUnavailable(
                f"{self.address}: HTTP {status}: {refusal.message}",
                maybe_applied=status not in _NOT_APPLIED,
                retry_after=refusal.retry_after or _retry_after(found),
            )
        raise refusal

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str], timeout: float
    ) -> tuple[int, Mapping[str, str], bytes]:
        head = b"" if self._session is not None else self._head(method, path, body, headers)
        try:
            if self._session is not None:
                # without `verify` here, the environment would override the session's authority
                verify = getattr(self._session, "verify", None)
                answer = self._session.request(
                    method,
                    self.address + path,
                    data=body,
                    headers=headers,
                    timeout=timeout,
                    allow_redirects=False,
                    **({"verify": verify} if isinstance(verify, str) else {}),
                )
                self._is_known = True
                return answer.status_code, _lower(answer.headers), answer.content
            if abs(self._clock() - self._used) > _IDLE_SECONDS:
                self._connections.close()
            self._used = self._clock()
            reply = self._connections.exchange(head, body or b"", timeout, keep=self._is_open)
            self._used = self._clock()
            self._is_known = True
            return reply
        except Exception as error:  # a session can raise any error; none may end the sending thread
            raise CollectorUnavailable(
                f"{self.address}: {_reason(self._url, error, known=self._is_known)}",
                maybe_applied=not _never_connected(error),
                retry_after=LONGEST_RETRY_AFTER if _is_distrusted(error) else None,
            ) from error

    def _head(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> bytes:
        length = None if body is None and method == "GET" else len(body or b"")
        return _head(f"{method} {self._prefix}{path}", self._host, (*headers.items(),), length)

    def _is_open(self) -> bool:
        return not self.closing.is_set()


_transports = renewed_by_fork(Transport.after_fork)


@lru_cache(maxsize=64)
def _head(
    target: str, host: str, headers: tuple[tuple[str, str], ...], length: int | None
) -> bytes:
    """A request without its body. Raises ValueError for spaces or line breaks in a header."""
    lines = [f"{target} HTTP/1.1", f"Host: {host}", _AS_IT_IS]
    lines += [f"{name}: {value}" for name, value in headers]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    if any("\n" in line or "\r" in line for line in lines) or lines[0].count(" ") != 2:
        raise ValueError(f"expected no spaces or line breaks in {target!r:.80} and its headers")
    return "\r\n".join((*lines, "", "")).encode("latin-1")


def require_ca(ca: str | Path | None) -> None:
    """Raise ValueError unless `ca` is a file, or None."""
    if ca is not None and not Path(ca).is_file():
        raise ValueError(f"ca: expected a file of PEM certificates, got {str(ca)!r}")


def _authorization(token: str | Callable[[], str]) -> str:
    """The header of a token. Raises Refusal (401) for an invalid one, without its text."""
    try:
        text = token if isinstance(token, str) else token()
    except Exception as error:
        name = type(error).__name__
        raise Refusal("unauthorized", f"token: its function raised {name}") from error
    if not isinstance(text, str) or not _TOKEN.fullmatch(text):
        raise Refusal("unauthorized", "token: expected printable ASCII without spaces")
    return f"Bearer {text}"


_NOT_MODIFIED = 304  # the answer to a conditional request


class Delivery:
    """One request, repeated with identical bytes until it is answered.

    `maybe_applied` says whether an attempt without an answer may have had an effect.
    """

    def __init__(
        self,
        transport: Transport,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        backoff: Backoff = RETRY_DELAYS,
    ) -> None:
        self._transport = transport
        self._request = (method, path, body, headers)
        self._backoff = backoff
        self.failures = 0
        self.maybe_applied = False

    def attempt(self, kind: type[M], timeout: float | None = None) -> M:
        """Make one more attempt; return the reply's message. Raises as Transport.attempt."""
        try:
            return self._transport.attempt(*self._request, timeout=timeout).decode(kind)
        except CollectorUnavailable as error:
            self.failures += 1
            self.maybe_applied |= error.maybe_applied
            raise

    def wait(self, retry_after: float | None = None, *, at_most: float = float("inf")) -> bool:
        """Wait until the next attempt, at most `at_most` seconds; return False when closing."""
        delay = self._backoff.delay(max(self.failures, 1), retry_after)
        return not self._transport.closing.wait(min(delay, at_most))

    def run(self, kind: type[M], timeout: float | None = None) -> M:
        """Make attempts for up to `timeout` seconds in total (default: the transport's).

        Raises CollectorUnavailable after that time, Refusal if the collector refuses.
        """
        deadline = time.monotonic() + (self._transport.timeout if timeout is None else timeout)
        while True:
            left = deadline - time.monotonic()
            try:
                return self.attempt(kind, max(left, 0.001))
            except CollectorUnavailable as error:
                left = deadline - time.monotonic()
                asked = error.retry_after or 0.0
                if asked >= left or not self.wait(error.retry_after, at_most=left):
                    error.maybe_applied = self.maybe_applied
                    raise
                if time.monotonic() >= deadline:
                    error.maybe_applied = self.maybe_applied
                    raise


def refusal_of(status: int, body: bytes, address: str) -> Refusal:
    """The Refusal of an error response; derived from the status if a proxy answered."""
    try:
        error = msgspec.json.decode(body)["error"]
        return refusal_from_json(error, _FALLBACK_CODES.get(status, "busy"))
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, RecursionError):
        text = body[:200].decode(errors="replace").strip() or "no text"
        if text.startswith("<"):
            text = "a page of HTML"
        if text.startswith(("a page", "{")) or status in (404, 405):
            text += f"; this is not a Headrace collector's answer: is {address} the right address?"
        return Refusal(_FALLBACK_CODES.get(status, "busy"), f"HTTP {status}: {text}")


def refusal_from_json(error: Mapping[str, Any], fallback: str = "conflict") -> Refusal:
    """The Refusal of the protocol's error object; an unknown code becomes `fallback`.

    Its path begins at the event: the program that logged it has not seen the batch.
    """
    code = str(error["code"])
    message = str(error.get("message", ""))
    if code not in STATUS:
        code, message = fallback, f"{code}: {message}"
    known = ("path", "episode_id", "expected_seq", "agent_id")
    wait = error.get("retry_after")
    if not isinstance(wait, (int, float)) or not 0.0 <= wait < float("inf"):
        wait = None
    fields = {name: error.get(name) for name in known}
    if isinstance(fields["path"], str):
        fields["path"] = _IN_BATCH.sub("", fields["path"]) or None
    return Refusal(code, message, retry_after=wait, **fields)


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds of a Retry-After header, which is a number or an HTTP date."""
    text = headers.get("retry-after", "").strip()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time.time()
        except ValueError:
            return None
    return seconds if 0.0 <= seconds < float("inf") else 0.0


def _never_connected(error: BaseException) -> bool:
    """Whether no connection was made, so that nothing of the request was sent."""
    return _has_cause(error, (NewConnectionError, ssl.SSLCertVerificationError))


def _is_distrusted(error: BaseException) -> bool:
    """Whether the server's certificate is not trusted, which a retry soon will not change."""
    return _has_cause(error, (ssl.SSLCertVerificationError,))


def _reason(url: Url, error: BaseException, *, known: bool) -> str:
    """What is wrong in plain words, if they are known, and then in the library's.

    `known`: whether the server has answered before, so that its scheme cannot be the cause.
    """
    if _has_cause(error, (ReadTimeoutError, TimeoutError)):
        return "no answer came in time"
    cause = _causes(error)[-1]
    library = f"{type(cause).__name__}: {cause}"
    plain = _in_plain_words(url, error, cause, known=known)
    return f"{plain} ({library})" if plain else library


def _in_plain_words(url: Url, error: BaseException, cause: BaseException, *, known: bool) -> str:
    if isinstance(cause, ssl.SSLCertVerificationError):
        why = getattr(cause, "verify_message", "") or "it cannot be verified"
        if "mismatch" in why:
            return "the server's certificate does not name this address"
        text = f"the server's certificate is not trusted: {why}"
        if any(sign in why for sign in _UNKNOWN_AUTHORITY):
            text += "; pass the CA certificate as --ca, HEADRACE_CA or ca="
        return text
    if isinstance(cause, NewConnectionError) and "refused" in str(cause):
        return "no collector is listening there"
    if known:
        return ""
    if url.scheme == "https":
        if any(sign in str(error) for sign in _PLAIN_ANSWERS):
            return f"the server seems to speak plain http: try http://{url.netloc}"
    elif _has_cause(error, (ProtocolError, ConnectionResetError)):
        return f"no HTTP answer; if the server speaks TLS, its address is https://{url.netloc}"
    return ""


def _has_cause(error: BaseException, kinds: tuple[type[BaseException], ...]) -> bool:
    return any(isinstance(one, kinds) for one in _causes(error))


def _causes(error: BaseException) -> list[BaseException]:
    """An error and what it wraps, the innermost last: requests wraps MaxRetryError, which wraps."""
    found = [error]
    while len(found) < 5:
        seen = found[-1]
        inner = getattr(seen, "reason", None) or (seen.args[0] if seen.args else None)
        if not isinstance(inner, BaseException):
            break
        found.append(inner)
    return found
