"""Listing a root's shards repeatedly, at a cost that grows with the number of new shards.

A folder is listed if its `stat` shows that its entries may have changed. A listing is final only
once the last change is older than the coarsest clock of a file system. If file system events name
all new shards, listings only confirm this, and become less frequent as long as they find nothing
else.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from storage.experience.interfaces import ReaderError
from storage.shards.names import ShardName

Errors: TypeAlias = dict[str, OSError]

GRANULARITY = 2.5  # s; FAT counts in 2 s, and two changes within one tick look like one
MOST_INTERVAL = 30.0  # s between listings of a folder that changes while events name all new shards
FORCED_INTERVAL = 60.0  # s after which a folder is listed even if its `stat` is unchanged
BURST = 64
"""A folder is listed at once when events have named this many files, and at least a 64th of its
names: more events may be lost, because queues overflow."""


@dataclass(frozen=True, slots=True, order=True)
class ShardFile:
    """One shard found by a scan; sorts by stream, then by the ordinals in its name."""

    stream: str
    first: int
    last: int
    digest16: str
    place: str  # a path or key that only the source interprets

    @property
    def name(self) -> str:
        """The name of the shard's file."""
        return str(ShardName(self.first, self.last, self.digest16))

    @property
    def schema_id(self) -> str:
        """The last part of the stream's name, `{collector_id}-{schema_id}`."""
        return self.stream.rpartition("-")[2]

    @classmethod
    def at(cls, folder: str, stream: str, name: str) -> ShardFile | None:
        """The shard at a path; None if `name` is not the name of a shard."""
        parsed = ShardName.parse(name)
        if parsed is None:
            return None
        place = os.path.join(folder, name)
        return cls(stream, parsed.first, parsed.last, parsed.digest16, place)


@dataclass(slots=True)
class _Folder:
    """The known entries of one folder."""

    path: str
    of_shards: bool = False  # then only files count
    known: set[str] = field(default_factory=set)  # as of the last listing
    event_names: set[str] = field(default_factory=set)  # named by events since then
    key: tuple[int, ...] = ()  # the latest identity and times from `stat`
    seen: float = 0.0  # when `stat` first returned it
    listed: float = float("-inf")
    interval: float = 0.0  # s until the next listing of a folder that changes

    def is_due(self, now: float, *, thorough: bool) -> bool:
        """Whether the folder is to be listed now. Raises OSError."""
        status = os.stat(self.path)
        key = (status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)
        if key != self.key:
            self.key, self.seen = key, now
        if self.listed >= self.seen + GRANULARITY:  # the listing is later than any change
            return now >= self.listed + FORCED_INTERVAL
        burst = len(self.event_names) >= max(BURST, len(self.known) // BURST)
        return thorough or burst or now >= self.listed + self.interval

    def list(self, now: float, interval: float) -> set[str]:
        """List the folder, and return the new names that no event named. Raises OSError.

        `interval`: seconds until the next listing if there are such names.
        """
        with os.scandir(self.path) as entries:
            names = {one.name for one in entries if not self.of_shards or _may_be_file(one)}
        new = names - self.known - self.event_names
        proven = bool(self.known or self.event_names) and not new
        longer = min(2 * max(self.interval, interval), max(MOST_INTERVAL, interval))
        self.interval = longer if proven else interval
        self.known, self.listed = names, now
        self.event_names.clear()
        return new


SHARDS = "shards"


@dataclass(frozen=True, slots=True)
class ListedPath:
    """The shards that a path refers to: all streams of a folder, one stream, or one shard."""

    folder: Path
    stream: str | None = None
    name: str | None = None

    @classmethod
    def of(cls, path: Path) -> ListedPath:
        """Interpret the path of a root, its `shards/`, a stream's folder or a shard.

        A path that does not exist is taken for a root. Raises OSError if the file system does not
        answer.
        """
        if ShardName.parse(path.name) is not None:
            return cls(path.absolute().parent.parent, path.absolute().parent.name, path.name)
        within = path / SHARDS
        if is_folder(within):
            return cls(within)
        if is_folder(path):
            names = os.listdir(path)
            if any(ShardName.parse(name) for name in names):
                return cls(path.absolute().parent, path.absolute().name)
            below = [path / name for name in names if is_folder(path / name)]
            if any(ShardName.parse(name) for folder in below for name in os.listdir(folder)):
                return cls(path)
        return cls(path if path.name == SHARDS else within)

    def check(self, path: Path) -> None:
        """Raise ReaderError unless the path may hold shards, as a new and empty root may.

        Also raises OSError.
        """
        there = self.folder / (self.stream or "") / (self.name or "")
        if _exists(there) or any(is_folder(path / name) for name in _OF_A_ROOT):
            return
        if is_folder(path) and not os.listdir(path):
            return
        raise ReaderError(
            f"{path}: expected a root (with a folder {SHARDS}/), its {SHARDS}/, the folder of a "
            f"stream or a shard; found {'none of them' if _exists(path) else 'nothing'}"
        )


_OF_A_ROOT = ("policies", "journal", "weights")


def _exists(path: Path) -> bool:
    """Whether the path exists. Raises OSError if the file system does not answer."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


class RootListing:
    """Finds the new shards of a target."""

    def __init__(self, target: ListedPath, interval: float) -> None:
        self.target = target
        self._streams = _Folder(str(target.folder))
        self._folders: dict[str, _Folder] = {}
        self._others: set[str] = set()  # entries next to the streams that are not folders
        self._interval = interval

    def note_event(self, path: str) -> ShardFile | None:
        """The shard at a path that an event named; None if the target does not include it."""
        parent, name = os.path.split(path)
        top, stream = os.path.split(parent)
        if top != self._streams.path or not self._is_wanted(stream, name):
            return None
        shard = ShardFile.at(parent, stream, name)
        if shard is None or _is_no_file(path):
            return None
        if stream in self._folders:
            self._folders[stream].event_names.add(name)
        return shard

    def _is_wanted(self, stream: str, name: str | None = None) -> bool:
        if stream.startswith(".") or self.target.stream not in (None, stream):
            return False
        return name is None or self.target.name in (None, name)

    def new(self, *, thorough: bool, errors: Errors) -> list[ShardFile]:
        """The shards that are new since the last call.

        `thorough` lists every folder that may have changed, without waiting for its interval.
        Folders that cannot be listed go to `errors`.
        """
        now = time.monotonic()
        self._find_streams(now, thorough=thorough, errors=errors)
        found: list[ShardFile] = []
        for stream, folder in list(self._folders.items()):
            try:
                if not folder.is_due(now, thorough=thorough):
                    continue
                names = folder.list(now, self._interval)
            except (FileNotFoundError, NotADirectoryError):  # removed; it may appear again
                del self._folders[stream]
                continue
            except OSError as error:
                errors[folder.path] = error
                continue
            wanted = (name for name in names if self._is_wanted(stream, name))
            shards = (ShardFile.at(folder.path, stream, name) for name in wanted)
            found += [shard for shard in shards if shard is not None]
        return found

    def _find_streams(self, now: float, *, thorough: bool, errors: Errors) -> None:
        streams = self._streams
        try:
            if streams.is_due(now, thorough=thorough):
                streams.list(now, self._interval)
                streams.interval = self._interval
                self._others.clear()
        except (FileNotFoundError, NotADirectoryError):  # not created yet, or removed
            self._streams, self._folders = _Folder(streams.path), {}
            return
        except OSError as error:
            errors[streams.path] = error
            return
        for name in streams.known - self._folders.keys() - self._others:
            path = os.path.join(streams.path, name)
            try:
                if self._is_wanted(name) and is_folder(path):
                    self._folders[name] = _Folder(path, of_shards=True)
                else:
                    self._others.add(name)
            except OSError as error:  # tried again next time
                errors[path] = error


def scan_target(target: ListedPath, errors: Errors) -> list[ShardFile]:
    """All shards that exist now. Folders that cannot be listed go to `errors`."""
    return RootListing(target, 0.0).new(thorough=True, errors=errors)


def _may_be_file(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a file, or a link that may lead to one. Raises OSError."""
    if entry.is_symlink():
        return not _is_no_file(entry.path)
    return entry.is_file(follow_symlinks=False)


def _is_no_file(path: str) -> bool:
    """Whether a path leads to a folder, a pipe, a socket or a device: it is no shard.

    A link that leads nowhere may be a shard on a file system that is not mounted.
    """
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def is_folder(path: Path | str) -> bool:
    """Whether the path is a folder or a link to one, as streams may be.

    Raises OSError if the file system does not answer.
    """
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno != errno.ELOOP:  # links in a circle
            raise
        return False
