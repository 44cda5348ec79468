"""`journal/address`: where the collector of a root serves, and whether it still does.

The collector keeps a lock on the file itself from the moment it serves. The kernel drops that lock
when the process dies, nobody but collectors takes it, and only the owner of the root may open the
file: so a locked file was written by the collector that lives now. An address without that proof is
not to be asked, and gets no token: whoever likes may listen on a dead collector's port.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from storage.system.files import FileLock, write_synced

if TYPE_CHECKING:
    from urllib3.util import Url

log = logging.getLogger("headrace.server")

ADDRESS = "address"
"""The file beside the journal. Its lines: the address; the network in which it means that."""

_HERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def say_address(directory: Path, address: str) -> FileLock | None:
    """Say in a journal's directory where its collector serves, until the lock is released.

    None, and a warning, when it cannot be said, as on a full disk: that stops no collector.
    """
    try:
        return _say(directory, address)
    except OSError as error:
        log.warning("nobody can look up where this serves: %s", error)
        return None


def forget_address(directory: Path) -> None:
    """Take away what the collector before said. Nothing proves it any more, should it stay."""
    with contextlib.suppress(OSError):  # a folder in its place stops no collector
        (directory / ADDRESS).unlink()


def _say(directory: Path, address: str) -> FileLock:
    """In a new file, which takes the place of the old: nobody who looks at that is in the way."""
    path = directory / ADDRESS
    temporary = path.with_name(f".{ADDRESS}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    write_synced(temporary, b"", private=True)
    lock = FileLock(temporary)
    try:
        lock.acquire()
        temporary.write_text(f"{address}\n{_network()}\n")
        os.replace(temporary, path)
    except BaseException:
        lock.release()
        temporary.unlink(missing_ok=True)
        raise
    return lock


class LiveAddress:
    """An address, and whether the collector that said so still lives."""

    def __init__(self, fd: int, address: str) -> None:
        self._fd = fd
        self.address = address

    @classmethod
    def of(cls, directory: Path) -> LiveAddress | None:
        """What a living collector says in a journal's directory; None when nothing proves it."""
        try:
            fd = os.open(directory / ADDRESS, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        live = cls(fd, "")
        with contextlib.suppress(OSError, UnicodeDecodeError):
            address, _, network = os.pread(fd, 4096, 0).decode().strip().partition("\n")
            private = os.fstat(fd).st_mode & 0o077 == 0  # who may open it may also lock it
            if private and network == _network() and live.holds():
                live.address = _called_here(address)
                return live
        live.close()
        return None

    def holds(self) -> bool:
        """Whether the collector that wrote the file is alive at this moment."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def private(self) -> bool:
        """Whether what is sent there can be read by nobody on the way."""
        return _parsed(self.address).scheme == "https" or self.loopback()

    def loopback(self) -> bool:
        """Whether what is sent there does not leave this machine."""
        host = _parsed(self.address).host or ""
        return host == "[::1]" or host.startswith("127.")

    def close(self) -> None:
        os.close(self._fd)


def _called_here(address: str) -> str:
    """An address that can be called: one bound to every address is so by loopback."""
    url = _parsed(address)
    host = url.host or ""
    return f"{url.scheme}://{_HERE.get(host, host)}:{url.port}"


def _parsed(address: str) -> Url:
    """An address as the client that will call it reads it."""
    # lazy: the collector itself says where it is, and loads no client
    from urllib3.util import parse_url  # noqa: PLC0415

    return parse_url(address)


def _network() -> str:
    """What tells this machine's network, since it was started, from that of any container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:  # no Linux
        return socket.gethostname()
