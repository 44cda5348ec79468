"""Cookies of browsers that logged in with a token: made, found and checked.

A cookie is `<id>.<expires>.<signature>`: the token's public id, the second of its end, and an HMAC
keyed by the token's SHA-256, which only its owner and the collector know. It is not the token, so
that whoever gets hold of it can read as the token may, for hours, and change nothing: cookies count
for GET alone. Nothing is stored; a restart keeps logins, and revoking the token ends them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator

from ingest.protocol.errors import Refusal

SECONDS = 12 * 3600
"""A login lasts half a day, or as long as its token."""

_COOKIE = re.compile(r"([0-9a-f]{8})\.([0-9]{1,12})\.([0-9a-f]{64})")


def signed(token_id: str, sha256: str, until: int) -> str:
    """The value of a cookie."""
    signature = hmac.new(
        bytes.fromhex(sha256), f"headrace login {token_id} {until}".encode(), hashlib.sha256
    )
    return f"{token_id}.{until}.{signature.hexdigest()}"


def parsed(value: str) -> tuple[str, int] | None:
    """The token's id and the end that a cookie names, unchecked; None for another form."""
    found = _COOKIE.fullmatch(value)
    return None if found is None else (found[1], int(found[2]))


def set_cookie(value: str, host: str, seconds: int, *, secure: bool) -> str:
    """The `Set-Cookie` header of a login."""
    safe = "; Secure" if secure else ""
    rules = f"Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{safe}"
    return f"{_names(host)[secure]}={value}; {rules}"


def cookies(headers: Iterable[tuple[bytes, bytes]], host: str) -> Iterator[str]:
    """The values of this collector's cookies in a request."""
    for name, line in headers:
        if name == b"cookie":
            for pair in line.decode("latin-1").split(";"):
                key, _, value = pair.strip().partition("=")
                if key in _names(host):
                    yield value


def _names(host: str) -> tuple[str, str]:
    """The cookie's name without TLS and with it.

    Cookies belong to a host with all its ports, so the name has the port: each collector of a
    machine has its own. A `__Host-` cookie cannot be set by another host of the same domain.
    """
    found = re.search(r":([0-9]+)$", host)
    name = f"headrace_{found[1]}" if found else "headrace"
    return name, f"__Host-{name}"


def is_secure(origin: str | None) -> bool:
    """Whether the browser came over TLS. Raises Refusal (403) without an origin.

    A proxy may have ended the TLS, so the origin counts, which the admission has compared with the
    host. Browsers send it with every POST.
    """
    if origin is None:
        raise Refusal(
            "forbidden", "Origin: expected this collector's own, got none: only browsers log in"
        )
    return origin.startswith("https://")
