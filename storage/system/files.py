"""Files that survive a crash: locks, synced directories, atomic replacement.

A rename is durable if these steps are in order: write the new file next to the old one, sync it,
rename it, sync the directory. A root has to be on Linux or macOS. On other systems clients can
import this module, but its locks and synced directories raise OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from storage.system.forks import notice_fork, renewed_by_fork

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]  # a module or nothing

_READ = os.O_RDONLY | sum(
    getattr(os, name, 0)  # each exists on some systems only
    for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")
)


class NotRegular(OSError):
    """Not a regular file: a FIFO, socket, device or folder, or a file that is too long."""


def read_regular(
    path: Path, limit: int = 2**28, *, begin: int = 0, end: int | None = None
) -> bytes:
    """Read at most `limit` bytes of a regular file; a FIFO does not make it wait.

    `begin`, `end`: the range of bytes, the whole file by default. Raises NotRegular for anything
    else at that path, and OSError.
    """
    try:
        fd = os.open(path, _READ)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise NotRegular(f"{path}: expected a regular file") from error
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotRegular(f"{path}: expected a regular file")
        size = max(0, min(status.st_size, status.st_size if end is None else end) - begin)
        if size > limit:
            raise NotRegular(f"{path}: expected at most {limit} bytes, got {size}")
        with open(fd, "rb", closefd=False) as file:
            file.seek(begin)
            # Python allocates the number of bytes requested, whatever the size of the file.
            data = file.read(size + (end is None))
    finally:
        os.close(fd)
    if len(data) > size:
        raise NotRegular(f"{path}: expected a file that is only replaced, got one that grows")
    return data


class FileLock:
    """A `flock` on a file, exclusive or shared; the kernel releases it when the holder dies.

    It belongs to the process that took it: a forked child closes its copy of the descriptor, which
    would hold the lock for as long as the child lives. The file contains the process id of its last
    exclusive holder, for messages only. Only its holder may remove it; whoever waited for the
    removed file then locks the one that has its name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def acquire(self, *, blocking: bool = True, shared: bool = False) -> bool:
        """Take the lock, and return True. Without `blocking`, return False if another holds it.

        A `shared` lock is for readers, of which several can hold it. It writes nothing, so it works
        on a read-only file system, and it raises FileNotFoundError if there is no file.
        """
        _require_posix(self.path)
        notice_fork()
        _locks.add(self)  # a fork may copy the descriptor before this thread knows it
        try:
            self._fd = self._locked(blocking, shared)
        finally:
            if self._fd < 0:
                _locks.discard(self)
        if self._fd >= 0 and not shared:
            with contextlib.suppress(OSError):  # a full disk must not prevent locking
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        return self._fd >= 0

    def _locked(self, blocking: bool, shared: bool) -> int:
        """The locked file's descriptor; -1 if another holds the lock."""
        flags = os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        while True:
            fd, has_name = os.open(self.path, flags | os.O_CLOEXEC, 0o644), False
            try:
                fcntl.flock(fd, kind | (0 if blocking else fcntl.LOCK_NB))
                with contextlib.suppress(FileNotFoundError):  # removed by its last holder
                    has_name = os.path.samestat(os.fstat(fd), self.path.stat())
            except BlockingIOError:
                return -1
            finally:
                if not has_name:
                    os.close(fd)
            if has_name:
                return fd

    @property
    def has_name(self) -> bool:
        """Whether the locked file is still the one at its path. Raises OSError."""
        return os.path.samestat(os.fstat(self._fd), self.path.stat())

    def holder(self) -> str:
        """The process id in the file, that of the last exclusive holder, or "unknown"."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = self.path.read_text().strip()
            if text.isdigit():
                return text
        return "unknown"

    def release(self) -> None:
        fd, self._fd = self._fd, -1  # in this order: a fork's child may find the number used again
        _locks.discard(self)
        if fd >= 0:
            os.close(fd)

    def disown(self) -> None:
        """Close a forked child's copy of the descriptor; the parent keeps the lock.

        While the parent was acquiring or releasing it, only the file is known, not the number: then
        all descriptors of the file are closed, among them those of other locks.
        """
        if self._fd >= 0:
            with contextlib.suppress(OSError):  # closed for another lock of the same file
                self.release()
            return
        with contextlib.suppress(OSError):
            ours = self.path.stat()
            for name in os.listdir("/dev/fd"):
                with contextlib.suppress(OSError):  # that of the listing, which is closed by now
                    if os.path.samestat(os.fstat(int(name)), ours):
                        os.close(int(name))
        _locks.discard(self)

    def __enter__(self) -> FileLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_locks = renewed_by_fork(FileLock.disown)


def _require_posix(path: Path) -> None:
    if fcntl is None:
        text = "expected Linux or macOS: this system has no file locks"
        raise OSError(errno.ENOTSUP, text, str(path))


def sync_directory(directory: Path, fsync: Callable[[int], None] | None = None) -> None:
    """Make the names in `directory` durable. `fsync` is called instead of the system's."""
    _require_posix(directory)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        (fsync or os.fsync)(fd)
    finally:
        os.close(fd)


def make_directory(directory: Path, *, parents: bool = True) -> None:
    """Create `directory` and, by default, its parents, with durable names.

    An existing one is synced as well: its creator may have been killed before that.
    """
    if directory.is_dir():
        with contextlib.suppress(PermissionError):  # a folder that may be entered but not read
            sync_directory(directory.parent)
        return
    if parents:
        make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    sync_directory(directory.parent)


def write_synced(path: Path | str, data: bytes, *, private: bool = False) -> None:
    """Write a new file and sync its content, but not yet its name.

    `private`: only the owner may read it. The mode is set on opening: a umask would affect all
    threads, and processes that they start meanwhile.
    """

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600 if private else 0o666)

    with open(path, "xb", opener=opened) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, *, private: bool = False, durable: bool = True) -> None:
    """Replace a file atomically and durably: readers see the old content or the new, as a whole.

    `private`: only the owner may read it. With `durable=False` nothing is synced. Raises OSError;
    the old file is then unchanged.
    """
    temporary = f"{path.parent}/.{path.name}.{secrets.token_hex(6)}.tmp"
    try:
        if durable:
            write_synced(temporary, data, private=private)
        else:
            with open(temporary, "wb") as file:
                file.write(data)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    if durable:
        sync_directory(path.parent)
