"""Admission of requests, before every route: checks of Host, Origin and token.

Any web page can make a browser on this machine send requests to a collector. Two headers show it:
`Host` is the name that the browser connected to (which exposes DNS rebinding), and `Origin` is the
page's origin. Programs send no Origin.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import msgspec

from ingest.access.log_rate import FewLines
from ingest.access.logins import cookies, is_secure, set_cookie
from ingest.access.tokens import LOCAL, NOBODY, Caller, TokenBook, masked, require_allowance
from ingest.protocol.errors import Refusal

_audit = logging.getLogger("headrace.audit")
_audit.setLevel(logging.INFO)  # audit lines are written at any --log-level

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]+)?")
_NAME = re.compile(r"(?:[a-z0-9_-]+\.)*[a-z0-9_-]+")
"""Labels of letters, digits, hyphens, and underscores, which some private networks use."""

_MET = 16
"""How many valid Host headers are cached."""

AUDIT_RATE = 10.0
"""Audit lines of refusals per second, at most; further refusals are only counted."""


def audit(event: str, **fields: Any) -> None:
    """Write one audit line: the event and its fields as JSON, with secrets masked."""
    _audit.info("%s", masked(msgspec.json.encode({"audit": event, **fields}).decode()))


class Hosts:
    """The hosts by which a collector may be addressed: its own, loopback, and `allowed`.

    A collector that is bound to every address (`0.0.0.0`, `::`) accepts any IP address; other names
    must be in `allowed`.
    """

    def __init__(self, bound: str, allowed: Iterable[str] = ()) -> None:
        hosts = {host_of(name) or name for name in allowed}
        self._names = {"localhost", "127.0.0.1", "::1", bound.lower(), *hosts}
        address = _address(bound)
        self._any_address = address is not None and address.is_unspecified
        self._met: set[str] = set()

    def known(self, host: str) -> bool:
        """Whether a `Host` header, with or without its port, names this collector."""
        if host in self._met:
            return True
        found = self._is_known(host)
        if found and len(self._met) < _MET:
            self._met.add(host)
        return found

    def _is_known(self, host: str) -> bool:
        name = _name(host)
        if name is None:
            return False
        if name in self._names:
            return True
        address = _address(name)
        if address is None:
            return name.endswith(".localhost")
        return self._any_address or address.is_loopback or str(address) in self._names

    def check(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Raise Refusal: 400 for repeated headers, 403 for an unknown Host or a foreign Origin."""
        host = _only(headers, b"host")
        if host is None or not self.known(host):
            raise Refusal(
                "forbidden",
                f"Host: expected a name of this collector, got {host or ''!r:.80}; "
                "start it with --allow-host to accept another name",
            )
        origin = _only(headers, b"origin")
        if origin is not None:
            scheme, _, place = origin.partition("://")
            if scheme not in ("http", "https") or place.lower() != host.lower():
                raise Refusal(
                    "forbidden",
                    f"Origin: expected none, or this collector's own, got {origin!r:.80}: pages "
                    "of other origins may not call it",
                )


def _name(host: str) -> str | None:
    """The host of a `Host` header, lower case, without port and brackets; None if invalid."""
    found = _HOST.fullmatch(host)
    return None if found is None else host_of(found[1])


def host_of(text: str) -> str | None:
    """Normalise a host name or an IP address (with or without brackets), given without a port.

    The result is lower case, without brackets and without a final dot; None if `text` is neither.
    """
    name = text.lower().removesuffix(".")
    if _NAME.fullmatch(name):
        return name
    inner = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    return inner if ":" in inner and "%" not in inner and _address(inner) else None


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _only(headers: Sequence[tuple[bytes, bytes]], name: bytes) -> str | None:
    found = [value for key, value in headers if key == name]
    if len(found) > 1:
        raise Refusal("malformed", f"expected one header {name.decode()}, got {len(found)}")
    return found[0].decode("latin-1") if found else None


class Admission:
    """Admits or refuses a request before its body is read.

    `book` has the tokens, `clock` gives seconds that never jump, `wall` seconds since the epoch.
    """

    def __init__(
        self,
        book: TokenBook,
        hosts: Hosts,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.book = book
        self._hosts = hosts
        self._clock, self._wall = clock, wall
        self._lines = FewLines(AUDIT_RATE, since=clock())
        self.refused = 0

    def __call__(self, scope: MutableMapping[str, Any], needed: frozenset[str]) -> Caller:
        """The caller of a request (an ASGI scope), checked for one of the `needed` token scopes.

        Raises Refusal: 400, 401, 403, 429.
        """
        try:
            self._hosts.check(scope["headers"])
            caller = self._caller(scope, needed)
            caller.require(needed, f"{scope['method']} {scope['path']:.80}")
        except Refusal as refusal:
            self.tell(scope, refusal)
            raise
        if needed:
            require_allowance(caller, self._clock())
        return caller

    def log_in(self, headers: Mapping[bytes, bytes], token: str) -> str:
        """The `Set-Cookie` header for a browser that sent a token. Raises Refusal: 401, 403.

        `__call__` has compared the origin with the host.
        """
        host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
        secure, wall = is_secure(origin or None), self._wall()
        if not self.book.required:
            raise Refusal("forbidden", "this collector has no tokens: nobody needs to log in")
        caller = self.book.caller(b"Bearer " + token.encode("latin-1", "replace"), wall)
        value, seconds = self.book.login(caller.token_id, wall)
        audit("login", token=caller.token_id, seconds=seconds)
        return set_cookie(value, host, seconds, secure=secure)

    def _caller(self, scope: MutableMapping[str, Any], needed: frozenset[str]) -> Caller:
        if not self.book.required:
            return LOCAL
        headers, wall = scope["headers"], self._wall()
        text = _only(headers, b"authorization")
        if text is None and scope["method"] in ("GET", "HEAD") and needed:
            refused: Refusal | None = None
            for value in cookies(headers, _only(headers, b"host") or ""):
                try:
                    return self.book.caller_of_login(value, wall)
                except Refusal as refusal:  # try the others: the name differs with TLS
                    refused = refusal
            if refused is not None:
                raise refused
        given = None if text is None else text.encode("latin-1")
        try:
            return self.book.caller(given, wall)
        except Refusal:
            if needed:
                raise
            return NOBODY  # a health probe must not fail because its token has expired

    def tell(self, scope: MutableMapping[str, Any], refusal: Refusal) -> None:
        """Write an audit line for a refused request, at a limited rate."""
        self.refused += 1
        untold = self._lines.take(self._clock())
        if untold is None:
            return
        peer = scope.get("client")
        audit(
            "refused",
            code=refusal.code,
            why=refusal.message,
            token=refusal.token_id,
            method=scope["method"],
            path=scope["path"][:200],
            peer=peer[0] if peer else None,
            untold=untold,
        )
