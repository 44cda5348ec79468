"""`FolderObjects`: objects as files under a local folder.

A file is written under a name that begins with a dot, synced, and then renamed or linked to its own
name; the directory is synced last. A group is a directory that is filled and renamed in the same
way. So a killed writer leaves only dot-files, which are never listed.

A local file system can compare and replace only under a lock, which is the file of `exclusive`.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from storage.errors import ObjectChanged, ObjectExists, ObjectNotFound, ObjectUnusable
from storage.objects.interface import MAX_OBJECT, ObjectContent, Objects, Status, check_name
from storage.system.files import (
    FileLock,
    NotRegular,
    make_directory,
    read_regular,
    replace_file,
    sync_directory,
    write_synced,
)

ABANDONED_SECONDS = 3600.0
LOCK_SECONDS = 10.0
"""Seconds for which `exclusive` waits for another holder."""


class FolderObjects(Objects):
    """The files under `root` as objects. Any number of processes may use a folder.

    With `make=False` a missing root is an error, as that of a root that was moved away. `fsync` is
    called with the descriptor of a folder instead of the system's; tests replace it.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        make: bool = True,
        fsync: Callable[[int], None] | None = None,
    ) -> None:
        self.root = Path(root)
        self._make, self._fsync = make, fsync
        self._durable: set[Path] = set()  # folders whose names are
        self._holding: set[tuple[int, Path]] = set()  # (thread, its lock)

    def __repr__(self) -> str:
        return f"FolderObjects({str(self.root)!r})"

    def __str__(self) -> str:
        return str(self.root)

    def names(self, prefix: str = "", start_after: str = "") -> list[str]:
        folder, slash, start = prefix.rpartition("/")
        if folder:
            check_name(folder)
        try:
            with os.scandir(self.root / folder) as entries:
                found = [
                    f"{folder}{slash}{entry.name}{'/' if _is_folder(entry) else ''}"
                    for entry in entries
                    if entry.name.startswith(start) and not entry.name.startswith(".")
                ]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in found if name > start_after)

    def read(
        self, name: str, *, begin: int = 0, end: int | None = None, limit: int = MAX_OBJECT
    ) -> bytes:
        path = self._path(name)
        try:
            return read_regular(path, limit, begin=begin, end=end)
        except (FileNotFoundError, NotADirectoryError) as error:
            if path.is_symlink():
                text = f"{path}: expected a regular file, found a link that leads nowhere"
                raise ObjectUnusable(text) from error
            raise ObjectNotFound(f"expected {path}, which does not exist") from error
        except NotRegular as error:
            raise ObjectUnusable(str(error)) from error
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise ObjectUnusable(f"{path}: expected a file, found links in a circle") from error

    def status(self, name: str) -> Status | None:
        path = f"{self.root}/{check_name(name)}"  # a collector asks for thousands of policies
        try:
            found = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISLNK(found.st_mode):
            # a link that leads nowhere takes the name, too
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found = os.stat(path)
        # a copied file may keep its modification time or its inode
        stamp = found.st_mtime_ns, found.st_ctime_ns, found.st_ino
        is_file = stat.S_ISREG(found.st_mode)
        return Status(stamp, found.st_mtime_ns // 1000, found.st_size, is_file)

    def under(self, folder: str) -> FolderObjects:
        below = copy.copy(self)
        below.root = self._path(folder)
        return below

    def staging(self, name: str) -> Path:
        path = self._path(name)
        self._make_folder(path.parent)
        return path.with_name(f".{path.name}-{os.getpid()}.tmp")

    def settle(self, name: str) -> None:
        path = self._path(name)
        self._make_folder(path.parent)
        sync_directory(path.parent, self._fsync)

    def put_if_absent(self, name: str, content: ObjectContent | Mapping[str, bytes]) -> None:
        path = self._path(name)
        if isinstance(content, Mapping):
            content = {check_name(one): data for one, data in content.items()}
        self._make_folder(path.parent)
        try:
            if isinstance(content, Mapping):
                _put_group(path, content)
            else:
                _put_file(path, content)
        except FileExistsError as error:
            raise ObjectExists(f"{path}: expected no such name, found one") from error
        sync_directory(path.parent)

    def replace(self, name: str, content: ObjectContent, *, durable: bool = True) -> None:
        path = self._path(name)
        if durable:
            self._make_folder(path.parent)
        if isinstance(content, bytes):
            try:
                replace_file(path, content, durable=durable)
            except IsADirectoryError:  # nobody makes one; it must not stay
                os.rename(path, f"{path}.damaged")
                replace_file(path, content, durable=durable)
            except (FileNotFoundError, NotADirectoryError):
                path.parent.mkdir(exist_ok=True)  # a root that was moved away is not made again
                replace_file(path, content, durable=durable)
            return
        os.rename(content, path)
        try:
            sync_directory(path.parent, self._fsync)
        except BaseException:
            # If a second sync succeeds, it is still unknown whether this name is durable.
            path.unlink(missing_ok=True)
            raise

    def replace_if_unchanged(self, name: str, content: bytes, before: bytes | None) -> None:
        lock = f"{check_name(name).rpartition('/')[0]}/lock".lstrip("/")
        is_held = (threading.get_ident(), self._path(lock)) in self._holding
        with contextlib.nullcontext() if is_held else self.exclusive(lock):
            try:
                known: bytes | None = self.read(name)
            except ObjectNotFound:
                known = None
            if known != before:
                raise ObjectChanged(f"{self._path(name)}: expected other content, it was replaced")
            self.replace(name, content)

    def append(self, name: str, content: bytes) -> None:
        path = self._path(name)
        self._make_folder(path.parent)
        if os.path.lexists(path) and not path.is_file():  # opening a FIFO would block
            os.replace(path, f"{path}.damaged")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        sync_directory(path.parent)

    def delete(self, name: str) -> None:
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                path.unlink()
                return
            hidden = _hidden(path)  # in one step for readers
            os.rename(path, hidden)
            shutil.rmtree(hidden, ignore_errors=True)
            _remove_abandoned(path.parent)

    @contextlib.contextmanager
    def exclusive(self, name: str) -> Iterator[None]:
        path = self._path(name)
        self._make_folder(path.parent)
        lock, deadline = FileLock(path), time.monotonic() + LOCK_SECONDS
        while not lock.acquire(blocking=False):
            if time.monotonic() >= deadline:
                text = f"process {lock.holder()} holds {path}: it is writing, or was suspended"
                raise BlockingIOError(errno.EAGAIN, text)
            threading.Event().wait(0.02)
        mine = threading.get_ident(), path
        self._holding.add(mine)
        try:
            yield
        finally:
            self._holding.discard(mine)
            lock.release()

    def _path(self, name: str) -> Path:
        return self.root / check_name(name)

    def _make_folder(self, folder: Path) -> None:
        """Create a folder, durably, unless this store did so before."""
        if folder not in self._durable or not folder.is_dir():
            make_directory(folder, parents=self._make)
            self._durable.add(folder)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links in a circle
        return False


def _hidden(path: Path) -> Path:
    """A name for an unfinished file or directory next to `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def _put_file(path: Path, content: ObjectContent) -> None:
    if isinstance(content, Path):
        os.link(content, path)
        content.unlink()
        return
    temporary = _hidden(path)
    try:
        write_synced(temporary, content)
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _put_group(path: Path, files: Mapping[str, bytes]) -> None:
    _remove_abandoned(path.parent)
    temporary = _hidden(path)
    temporary.mkdir()
    try:
        for name, data in files.items():
            write_synced(temporary / name, data)
        sync_directory(temporary)
        os.rename(temporary, path)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise FileExistsError(path) from error
        raise


def _remove_abandoned(folder: Path) -> None:
    """Remove unfinished groups older than `ABANDONED_SECONDS`: their writers are dead."""
    limit = time.time() - ABANDONED_SECONDS
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < limit:
                shutil.rmtree(path)
