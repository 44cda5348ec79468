"""The files of a weight store: read without ever waiting for a writer, made whole or not at all."""

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
"""How long a publication or a claim waits for another one that is under way."""
_NUMBER = re.compile("[1-9][0-9]{0,17}")
MAX_DOCUMENT = 256 * 2**20
"""Bytes of a document: a manifest, a lineage."""
MAX_POINTER = 2**20
"""Bytes of a document that collectors read again and again. Parsing one keeps all of a process's
threads waiting, logging among them: 114 MB did for 8 seconds."""
_POINTERS = frozenset({"live", "store", "numbers", "served", "fence", "off_chain"})
MAX_WEIGHTS = 16 * 2**30
"""Bytes of a file of weights."""


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of the store in `directory`.

    Raises WeightStoreError, of a BlockingIOError, which names who holds it for too long: a process
    that was stopped while it published must not stop others without a word.
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
    """The content of a regular file of at most `limit` bytes.

    Raises WeightsNotFound, WeightsDamaged for anything else at that path, OSError. A FIFO, a socket
    or a device never keeps the caller waiting.
    """
    try:
        return read_regular(path, limit)
    except FileNotFoundError as error:
        raise WeightsNotFound(f"expected {path}, which does not exist") from error
    except NotRegular as error:
        raise WeightsDamaged(str(error)) from error


def read_document(kind: str, path: Path) -> dict[str, Json]:
    """The body of a document. Raises WeightsNotFound, WeightsDamaged, OSError."""
    limit = MAX_POINTER if kind in _POINTERS else MAX_DOCUMENT
    return open_document(kind, read_file(path, limit), path)


def number_of(name: str) -> int | None:
    """The number that a name is, written the one way that this package writes it."""
    return int(name) if _NUMBER.fullmatch(name) else None


def visible(folder: Path) -> list[Path]:
    """What is in a folder under its own name; nothing when there is no folder."""
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except FileNotFoundError:
        return []


def publish_directory(target: Path, files: Mapping[str, bytes]) -> None:
    """Make `target` with `files` in it appear at once. Raises FileExistsError when it is there."""
    try:
        make_directory(target.parent)
    except OSError as error:  # also FileExistsError, which means another thing here
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
    """Make a directory disappear at once; what a kill leaves of it is a dot-directory."""
    with contextlib.suppress(FileNotFoundError):
        hidden = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Remove what killed processes left in a folder, once nobody can still be filling it."""
    limit = time.time() - ABANDONED_SECONDS
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < limit:
                shutil.rmtree(path)
