"""Admission, before every route: which hosts are meant, which pages may call, and who calls.

A browser on this machine can be made to send requests to a collector by any page that it shows.
Two headers tell: `Host` names what the browser believes to talk to (a page whose name was bound
anew to our address gives itself away), and `Origin` names the page. Programs send no Origin.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import time
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import msgspec

from ingest.access.log_rate import FewLines
from ingest.access.tokens import LOCAL, NOBODY, Caller, TokenBook, masked, require_allowance
from ingest.protocol.errors import Refusal

__all__ = ["Admission", "Hosts", "audit", "host_of"]

_audit = logging.getLogger("headrace.audit")
_audit.setLevel(logging.INFO)  # what may not be missing is not a matter of verbosity

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]+)?")
_NAME = re.compile(r"(?:[a-z0-9_-]+\.)*[a-z0-9_-]+")
"""Labels of letters, digits and hyphens; some private networks have underscores in them."""

_MET = 16
"""Of so many headers that were right it is remembered that they were."""

AUDIT_RATE = 10.0
"""Refusals told in the log a second at most; those beyond are counted."""


def audit(event: str, **fields: Any) -> None:
    """One line for whoever looks later: the event and its fields as JSON. Never a secret."""
    _audit.info("%s", masked(msgspec.json.encode({"audit": event, **fields}).decode()))


class Hosts:
    """The names by which a collector may be called: its own, loopback's, and those allowed.

    Bound to every address (`0.0.0.0`, `::`), any address is its own; a name has to be allowed.
    `allowed` are names for which `host_of` has an answer.
    """

    def __init__(self, bound: str, allowed: Iterable[str] = ()) -> None:
        told = {host_of(name) or name for name in allowed}
        self._names = {"localhost", "127.0.0.1", "::1", bound.lower(), *told}
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
        """Raise Refusal: 400 for headers that are there twice, 403 for a foreign Host or Origin."""
        host = _only(headers, b"host")
        if host is None or not self.known(host):
            raise Refusal(
                "forbidden",
                f"Host: expected a name of this collector, got {host or ''!r:.80}; "
                "a name that is meant is told by --allow-host",
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
    """The host of a `Host` header, lower case, without port and brackets; None if it is none."""
    found = _HOST.fullmatch(host)
    return None if found is None else host_of(found[1])


def host_of(text: str) -> str | None:
    """A name, or an address with or without brackets, as it is compared: None if it is neither.

    Lower case, without brackets and the dot at the end. There is no port in it.
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
    """Lets a request in or refuses it, before its body is read."""

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
        """The caller of an ASGI scope, who has one of the scopes that the route needs.

        Raises Refusal: 400, 401, 403, 429.
        """
        try:
            self._hosts.check(scope["headers"])
            caller = self._caller(scope["headers"], needed)
            caller.require(needed, f"{scope['method']} {scope['path']:.80}")
        except Refusal as refusal:
            self.tell(scope, refusal)
            raise
        if needed:
            require_allowance(caller, self._clock())
        return caller

    def _caller(self, headers: Sequence[tuple[bytes, bytes]], needed: frozenset[str]) -> Caller:
        if not self.book.required:
            return LOCAL
        text = _only(headers, b"authorization")
        given = None if text is None else text.encode("latin-1")
        try:
            return self.book.caller(given, self._wall())
        except Refusal:
            if needed:
                raise
            return NOBODY  # a probe whose token has ended is not about the collector's health

    def tell(self, scope: MutableMapping[str, Any], refusal: Refusal) -> None:
        """An audit line of who may not, but no flood of them."""
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
