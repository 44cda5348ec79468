"""The address of a collector, and the protection that it requires.

Loopback needs none. Any other address needs a live token and TLS; otherwise the collector does not
start, and `ServeError` says what to do. The certificate is read again when its file changes, so
that a renewal needs no restart, and so are the tokens, so that a revocation takes effect within a
second.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

from ingest.access.admission import Admission, Hosts, audit, host_of
from ingest.access.key_files import TokenFile
from ingest.access.tokens import TokenBook, TokenError
from ingest.collector.address_file import LiveAddress
from ingest.protocol.errors import IngestError
from ingest.server.options import Listening
from storage.errors import FolderMoved, JournalFailed, JournalFull, JournalLocked

log = logging.getLogger("headrace.server")

LOOK_SECONDS = 0.5
"""Seconds between checks of the tokens' and the certificate's files."""


TROUBLE, WRONG, TAKEN = 1, 2, 3
"""Exit statuses of a failed start.

TROUBLE: of the disk or system, another start may succeed; WRONG: of the options, no start can
succeed; TAKEN: the root or port is in use.
"""


class ServeError(IngestError):
    """The collector cannot start; the text says why and what to do."""

    def __init__(self, text: str, exit_status: int = WRONG) -> None:
        super().__init__(text)
        self.exit_status = exit_status


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Convert errors of the system during a start to a ServeError with an exit status."""
    try:
        yield
    except JournalLocked as error:
        raise ServeError(str(error), TAKEN) from error
    except (FolderMoved, JournalFailed, JournalFull, OSError) as error:
        raise ServeError(str(error), TROUBLE) from error


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """The address of a name, IPv4 if it has both. Raises ServeError.

    A name that is unknown may be known at another start, as when a machine boots; only a syntax
    error in the name or port is permanent.
    """
    name = host.removeprefix("[").removesuffix("]")
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ServeError(
            f"host and port: expected a name or an address and 0 to 65535, got {host!r} and "
            f"{port}: {error}",
            WRONG if _wrong_for_good(error) else TROUBLE,
        ) from error
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, (str(address[0]), int(address[1]))


def _wrong_for_good(error: Exception) -> bool:
    return not isinstance(error, OSError) or error.errno == socket.EAI_SERVICE


_STATUS = {
    errno.EADDRINUSE: TAKEN,
    errno.EACCES: WRONG,
    errno.EINVAL: WRONG,
    errno.EAFNOSUPPORT: WRONG,
}
"""Permanent reasons why an address cannot be bound; others may pass, as a lack of memory."""


def bind(where: Listening) -> socket.socket:
    """Return a bound socket. Raises ServeError, as when the port is taken."""
    family, address = resolve(where.host, where.port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        status = _STATUS.get(error.errno or 0, TROUBLE)
        hint = "; give it another port (--port), or 0 for a free one" if status == TAKEN else ""
        text = f"cannot bind {where.host}:{where.port}: {error}{hint}"
        raise ServeError(text, status) from error
    return listener


def bind_of(root: Path | None, where: Listening) -> socket.socket:
    """`bind` for a root's collector. The error names one that runs already."""
    try:
        return bind(where)
    except ServeError as error:
        live = None if root is None else LiveAddress.of(root / "journal")
        if live is None:
            raise
        with contextlib.closing(live):
            text = f"{error}; a collector of {root} already serves {live.address}"
            raise ServeError(text, error.exit_status) from error


def require_safe(where: Listening, book: TokenBook, root: Path | None) -> None:
    """Raise ServeError unless the address is loopback, or has a live token and TLS."""
    address = resolve(where.host, where.port)[1][0]
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return
    if root is None:
        raise ServeError(
            f"host {where.host!r} is not loopback, and without a root there is no place for "
            "tokens: give it a root, or bind to 127.0.0.1"
        )
    if not book.live(time.time()):
        raise ServeError(
            f"host {where.host!r} is not loopback, and there is no valid token: make one with "
            f"`headrace token create --root {root} --scope log NAME`, or bind to 127.0.0.1"
        )
    if where.tls_cert is None and not where.insecure:
        raise ServeError(
            f"host {where.host!r} is not loopback, and without TLS tokens are sent in clear "
            "text: give --tls-cert and --tls-key, or --insecure-no-tls if a proxy or the "
            "network encrypts"
        )


class Access:
    """One collector's admission and certificate, kept up to date by `follow`.

    Without a root, when nothing is on disk, there are no tokens.
    """

    def __init__(self, root: Path | None, where: Listening) -> None:
        self.book = TokenBook()
        self._where = where
        self._file = TokenFile(root)
        try:
            self.book.replace(self._file.changed() or (), time.monotonic())
        except TokenError as error:
            raise ServeError(f"the tokens cannot be read: {error}") from error
        require_safe(where, self.book, root)
        self.tls = _context(where)
        self._certified = self._certificate()
        self.admission = Admission(self.book, _hosts(where))

    async def follow(self) -> None:
        """Apply changes of the files, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Apply changes of the files; a file that cannot be used changes nothing."""
        try:
            tokens = self._file.changed()
        except (TokenError, OSError) as error:
            log.error("the tokens cannot be reloaded; the known ones stay in use: %s", error)
        else:
            for change in self.book.replace(tokens, time.monotonic()) if tokens is not None else ():
                audit(f"token_{change.what}", id=change.token_id, name=change.name)
        self._renew()

    def _renew(self) -> None:
        try:
            found = self._certificate()
            if found != self._certified and self.tls is not None:
                self._certified = found
                _context(self._where)  # a mismatched pair would leave `tls` without a key
                _load(self.tls, self._where)
                audit("certificate_renewed", path=str(self._where.tls_cert))
        except (ServeError, OSError) as error:
            log.error("the certificate cannot be reloaded; the known one stays in use: %s", error)

    def _certificate(self) -> tuple[int, ...]:
        paths = (self._where.tls_cert, self._where.tls_key)
        return tuple(Path(path).stat().st_mtime_ns for path in paths if path is not None)


_OF_A_PATH = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


def _hosts(where: Listening) -> Hosts:
    """The accepted host names. Raises ServeError for one that no `Host` header could match."""
    for name in where.allow_hosts:
        if host_of(name) is None:
            raise ServeError(
                "--allow-host: expected a name or an address, without scheme and port (any port "
                f"is accepted), got {name!r:.80}"
            )
    return Hosts(where.host.strip("[]"), where.allow_hosts)


def _context(where: Listening) -> ssl.SSLContext | None:
    if where.tls_cert is None:
        if where.tls_key is not None:
            raise ServeError("expected --tls-cert with --tls-key")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, where)
    return context


def _load(context: ssl.SSLContext, where: Listening) -> None:
    """Read certificate and key. Raises ServeError, also for a key with a passphrase."""
    try:
        # without this function, OpenSSL would ask for a passphrase on the terminal
        context.load_cert_chain(str(where.tls_cert), where.tls_key, password=lambda: b"")
    except (ssl.SSLError, OSError, ValueError) as error:
        named = isinstance(error, (ssl.SSLError, ValueError, *_OF_A_PATH))
        raise ServeError(
            f"TLS: expected a PEM chain in {where.tls_cert} and its key, without a passphrase, in "
            f"{where.tls_key or where.tls_cert}: {error}",
            WRONG if named else TROUBLE,
        ) from error
