"""`journal/address`: the address of a root's collector, and whether that collector is running.

A serving collector holds a lock on the file. The kernel releases the lock when the process dies,
only collectors take it, and only the owner of the root can open the file. So a locked file was
written by the running collector. An address without a lock must not be called or sent a token:
another program may listen on the port of a collector that has ended.
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
"""The file's name. Its lines are the address, and the network namespace where it is valid."""

_HERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def say_address(directory: Path, address: str) -> FileLock | None:
    """Write a collector's address to its journal's directory; it is valid while the lock is held.

    Returns None after logging a warning if the file cannot be written; the collector runs anyway.
    """
    try:
        return _say(directory, address)
    except OSError as error:
        log.warning("this collector's address cannot be written to its root: %s", error)
        return None


def forget_address(directory: Path) -> None:
    """Remove the previous collector's address. If that fails, the file is unlocked and invalid."""
    with contextlib.suppress(OSError):  # as when there is a folder of that name
        (directory / ADDRESS).unlink()


def _say(directory: Path, address: str) -> FileLock:
    """Write and lock a new file, then rename it over the old one, which readers may have open."""
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
    """An address, and whether the collector that wrote it is still running."""

    def __init__(self, fd: int, address: str) -> None:
        self._fd = fd
        self.address = address

    @classmethod
    def of(cls, directory: Path) -> LiveAddress | None:
        """The address in a journal's directory; None unless its collector is running."""
        try:
            fd = os.open(directory / ADDRESS, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        live = cls(fd, "")
        with contextlib.suppress(OSError, ValueError):  # a damaged address is none
            address, _, network = os.pread(fd, 4096, 0).decode().strip().partition("\n")
            private = os.fstat(fd).st_mode & 0o077 == 0  # otherwise others could lock the file
            if private and network == _network() and live.holds():
                live.address = _called_here(address)
                return live
        live.close()
        return None

    def holds(self) -> bool:
        """Whether the collector that wrote the file is running now."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def private(self) -> bool:
        """Whether requests to the address cannot be read on the way: https, or loopback."""
        return _parsed(self.address).scheme == "https" or self.loopback()

    def loopback(self) -> bool:
        """Whether requests to the address stay on this machine."""
        host = _parsed(self.address).host or ""
        return host == "[::1]" or host.startswith("127.")

    def close(self) -> None:
        os.close(self._fd)


def _called_here(address: str) -> str:
    """The address to call: loopback for a collector that is bound to every address.

    Raises ValueError for text that is no address.
    """
    url = _parsed(address)
    host = url.host or ""
    if url.scheme not in ("http", "https") or not host or not url.port:
        raise ValueError(f"expected an address of http or https, got {address!r:.80}")
    return f"{url.scheme}://{_HERE.get(host, host)}:{url.port}"


def _parsed(address: str) -> Url:
    """Parse an address as the HTTP client does."""
    # imported here because collectors write the file and do not need the client
    from urllib3.util import parse_url  # noqa: PLC0415

    return parse_url(address)


def _network() -> str:
    """An id of the network namespace, which differs between a machine and its containers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()
