"""HTTP for calls outside the hot path: publishing, and the ledger for `verify`.

These calls use `requests`, so that a caller can pass a session with its own proxies, certificates
and headers. Without one, `admin_session` makes a plain one.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from ingest.delivery.transport import require_ca


class _Adapter(HTTPAdapter):
    """Verifies certificates by `ca`, or by the system's authorities, as the client does.

    By default, requests does not use the system's authorities.
    """

    def __init__(self, ca: Path | str | None, *, named: bool) -> None:
        try:
            context = ssl.create_default_context(cafile=ca)
        except ssl.SSLError as error:
            raise ValueError(f"ca: expected PEM certificates in {str(ca)!r}: {error}") from error
        self._trust: dict[str, Any] = {"ssl_context": context}
        if not named:
            self._trust["assert_hostname"] = context.check_hostname = False
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **{**kwargs, **self._trust})


def admin_session(ca: str | Path | None = None, *, named: bool = True) -> requests.Session:
    """A session that verifies by `ca` (PEM), or by the system's authorities.

    It ignores the environment: a proxy would receive the token, and a .netrc would replace it.
    `named`: whether a certificate must also name the address. Raises ValueError for a `ca` without
    certificates.
    """
    require_ca(ca)
    session = requests.Session()
    session.trust_env = False
    session.verify = True if ca is None else str(ca)
    session.mount("https://", _Adapter(ca, named=named))
    return session
