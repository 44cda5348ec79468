"""The names of shard files, the description of a written shard, and errors.

A shard is called `{first:012}-{last:012}-{digest16}.parquet`: the ordinals that it covers, and the
first 16 hex digits of its digest. This module does not need Arrow: a collector only sends parts
and receives a `ShardInfo`.

Errors:
    StorageError
     +-- ShardError
          +-- ShardDamaged     the bytes on disk are not the bytes that were written
          +-- ShardWriteError  a shard could not be written; `errno` if the system reported it
          +-- WriterDied       the writer process has ended; whether the shard exists is unknown
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path
from typing import Literal

import msgspec

from storage.errors import StorageError
from storage.objects.interface import Objects
from storage.objects.opening import Root, objects_at

SUFFIX = ".parquet"
MAX_SHARD = 2**40
"""The largest size in bytes of a shard."""
_SHARD = re.compile(r"(\d{12,})-(\d{12,})-([0-9a-f]{16})\.parquet")
_TEMPORARY = re.compile(r"\.\d{12,}-\d{12,}-(\d+)\.tmp")
_STREAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


class ShardError(StorageError):
    """An error about a shard; the text names the file."""


class ShardDamaged(ShardError):
    """A shard's bytes are not those that were written, or the file is not a Headrace shard.

    `reason` is "damaged" if the bytes do not match the digest in the name, else "content".
    """

    def __init__(self, message: str, reason: Literal["damaged", "content"] = "content") -> None:
        super().__init__(message)
        self.reason: Literal["damaged", "content"] = reason


class ShardWriteError(ShardError):
    """A shard was not written, and no part of it is visible. `errno` is None or the system's."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class WriterDied(ShardError):
    """The writer process ended before it answered; look for the shard, then write it again."""


class ShardInfo(msgspec.Struct, frozen=True):
    """A shard in its place: ordinals `first`..`last`, digest in hex, counts, size in bytes."""

    path: Path
    stream: str
    first: int
    last: int
    digest: str
    rows: int
    parts: int
    nbytes: int


class ShardName(msgspec.Struct, frozen=True):
    """The ordinals and the digest in a shard's file name."""

    first: int
    last: int
    digest16: str

    @classmethod
    def parse(cls, name: str) -> ShardName | None:
        """Parse a file name; None if it is not the name of a shard."""
        match = _SHARD.fullmatch(name)
        return cls(int(match[1]), int(match[2]), match[3]) if match else None

    def __str__(self) -> str:
        return f"{self.first:012}-{self.last:012}-{self.digest16}{SUFFIX}"


def streams(shards: Objects, owner: str = "") -> list[str]:
    """The names of the folders of streams, of all or of one collector. Raises OSError."""
    prefix = f"{check_stream(owner)}-" if owner else ""
    return sorted(name[:-1] for name in shards.names(prefix) if name.endswith("/"))


def shard_names(shards: Objects, stream: str, start_after: str = "") -> list[ShardName]:
    """The names in a stream's folder that are names of shards, by first ordinal. Raises OSError."""
    names = (name.rpartition("/")[2] for name in shards.names(f"{stream}/", start_after))
    found = (name for one in names if (name := ShardName.parse(one)))
    return sorted(found, key=lambda name: name.first)


def is_shard(shards: Objects, stream: str, name: ShardName) -> bool:
    """Whether a shard has this name, and not a folder, a pipe, a device or a dangling link."""
    with contextlib.suppress(OSError):  # links in a circle
        status = shards.status(f"{stream}/{name}")
        return status is not None and status.is_object
    return False


def is_about_the_file(error: OSError) -> bool:
    """Whether a failed read is due to the file, and not to the process or the machine."""
    return error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)


def next_ordinals(shards: Root, collector_id: str) -> dict[str, int]:
    """Stream -> the ordinal after the highest one in a shard of this collector."""
    objects, found = objects_at(shards), {}
    for stream in streams(objects, collector_id):
        names = sorted(shard_names(objects, stream), key=lambda name: name.last, reverse=True)
        last = next((name.last for name in names if is_shard(objects, stream, name)), None)
        if last is not None:
            found[stream] = last + 1
    return found


def check_stream(stream: str) -> str:
    """Return the stream's name if it is a valid folder name; else raise ShardError."""
    if not _STREAM.fullmatch(stream):
        raise ShardError(f"stream: expected letters, digits, '-' and '_', got {stream!r:.200}")
    return stream


def remove_leftovers(directory: Path, owner: str, *, own: bool = True) -> list[Path]:
    """Remove incomplete files of killed writers from the streams `{owner}-*`; return their paths.

    Files of a live process stay: it may be a compaction. Those of this process go if `own` is set:
    it has written none yet, and an earlier process had its id. Only a local folder has any: other
    stores have the files of writers (`Objects.staging`) elsewhere.
    """
    removed = []
    for folder in sorted(directory.glob(f"{check_stream(owner)}-*")):
        for path in sorted(folder.glob(".*.tmp")):
            match = _TEMPORARY.fullmatch(path.name)
            mine = match is not None and int(match[1]) == os.getpid()
            if match and (own if mine else not _another_lives(int(match[1]))):
                with contextlib.suppress(OSError):  # a folder with that name, which does no harm
                    path.unlink(missing_ok=True)
                    removed.append(path)
    return removed


def _another_lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
