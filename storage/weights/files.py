"""The files of a weight store: readers never wait for a writer, and see only whole files."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from storage.errors import WeightsDamaged, WeightsNotFound, WeightStoreError
from storage.system.files import (
    FileLock,
    NotRegular,
    make_directory,
    read_regular,
    sync_directory,
    write_synced,
)
from storage.weights.manifest import Json, open_document

__all__ = [
    "ABANDONED_SECONDS",
    "MAX_DOCUMENT",
    "MAX_WEIGHTS",
    "locked",
    "number_of",
    "publish_directory",
    "read_document",
    "read_file",
    "remove_abandoned",
    "remove_directory",
    "visible",
]

ABANDONED_SECONDS = 3600.0
LOCK_SECONDS = 10.0
"""Seconds for which a publication or a claim waits for another one to finish."""
_NUMBER = re.compile("[1-9][0-9]{0,17}")
MAX_DOCUMENT = 256 * 2**20
"""The largest size in bytes of a manifest or a lineage."""
MAX_POINTER = 2**20
"""The largest size in bytes of a document that collectors read repeatedly. All threads of the
process wait while one is parsed: parsing 114 MB took 8 seconds."""
_POINTERS = frozenset({"live", "store", "numbers", "served", "fence", "off_chain"})
MAX_WEIGHTS = 16 * 2**30
"""The largest size in bytes of a file of weights."""


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of the store in `directory`.

    Raises WeightStoreError, caused by a BlockingIOError, if another process holds the lock for
    `LOCK_SECONDS`. The text names that process, which may have been suspended while it published.
    """
    lock, deadline = FileLock(directory / "lock"), time.monotonic() + LOCK_SECONDS
    while not lock.acquire(blocking=False):
        if time.monotonic() >= deadline:
            text = f"process {lock.holder()} holds {lock.path}: it is publishing, or was suspended"
            raise WeightStoreError(f"{directory.name}: {text}") from BlockingIOError(
                errno.EAGAIN, text
            )
        threading.Event().wait(0.02)
    try:
        yield
    finally:
        lock.release()


def read_file(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises WeightsNotFound if there is none, WeightsDamaged for anything else at that path, and
    OSError. A FIFO, a socket or a device never makes the caller wait.
    """
    try:
        return read_regular(path, limit)
    except FileNotFoundError as error:
        raise WeightsNotFound(f"expected {path}, which does not exist") from error
    except NotRegular as error:
        raise WeightsDamaged(str(error)) from error


def read_document(kind: str, path: Path) -> dict[str, Json]:
    """Read the body of a document. Raises WeightsNotFound, WeightsDamaged, OSError."""
    limit = MAX_POINTER if kind in _POINTERS else MAX_DOCUMENT
    return open_document(kind, read_file(path, limit), path)


def number_of(name: str) -> int | None:
    """The positive number that a name spells without leading zeros; None for other names."""
    return int(name) if _NUMBER.fullmatch(name) else None


def visible(folder: Path) -> list[Path]:
    """The entries of a folder whose names do not begin with a dot; none if there is no folder."""
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except FileNotFoundError:
        return []


def publish_directory(target: Path, files: Mapping[str, bytes]) -> None:
    """Create `target` with `files` (name -> content) in one step, durably.

    Raises FileExistsError if `target` exists, and WeightStoreError if it cannot be written.
    """
    try:
        make_directory(target.parent)
    except OSError as error:  # including FileExistsError, which has another meaning to the caller
        raise WeightStoreError(f"{target.parent} cannot be made: {error}") from error
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    temporary.mkdir()
    try:
        for name, data in files.items():
            write_synced(temporary / name, data)
        sync_directory(temporary)
        os.rename(temporary, target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(target) from error
        raise WeightStoreError(f"{target} cannot be written: {error}") from error
    sync_directory(target.parent)


def remove_directory(path: Path) -> None:
    """Remove a directory in one step; a process killed meanwhile leaves a dot-directory behind."""
    with contextlib.suppress(FileNotFoundError):
        hidden = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Remove temporary directories older than `ABANDONED_SECONDS`: their writers are dead."""
    limit = time.time() - ABANDONED_SECONDS
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < limit:
                shutil.rmtree(path)
