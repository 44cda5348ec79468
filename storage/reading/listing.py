"""Listing a root's shards again and again, at a cost that grows with what is new.

A folder is listed when its entries may have changed: its `stat` says so, until a listing is younger
than the coarsest clock of a file system. Where events tell of every new name anyway, listings only
prove it, and come the less often the longer they found nothing that events had not told.
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

GRANULARITY = 2.5  # s; FAT's clock has 2, and two changes within one tick look like one
MOST_INTERVAL = 30.0  # s between listings of a folder that changes while events tell all
FORCED_INTERVAL = 60.0  # s, after which a folder is listed whatever its `stat` says
BURST = 64
"""So many names told by events, and a 64th of the folder, pay for a listing: queues overflow."""


@dataclass(frozen=True, slots=True, order=True)
class ShardFile:
    """One shard as a scan saw it; sorts by stream, then by the ordinals that its name covers."""

    stream: str
    first: int
    last: int
    digest16: str
    place: str  # what only the source understands: a path, a key

    @property
    def name(self) -> str:
        return str(ShardName(self.first, self.last, self.digest16))

    @property
    def schema_id(self) -> str:
        """A stream is called `{collector_id}-{schema_id}`."""
        return self.stream.rpartition("-")[2]

    @classmethod
    def at(cls, folder: str, stream: str, name: str) -> ShardFile | None:
        """None unless `name` is a shard's."""
        parsed = ShardName.parse(name)
        if parsed is None:
            return None
        place = os.path.join(folder, name)
        return cls(stream, parsed.first, parsed.last, parsed.digest16, place)


@dataclass(slots=True)
class _Folder:
    """What is known of one folder's entries."""

    path: str
    known: set[str] = field(default_factory=set)  # as of the last listing
    told: set[str] = field(default_factory=set)  # by events since
    key: tuple[int, ...] = ()  # what `stat` said last
    seen: float = 0.0  # when it first said so
    listed: float = float("-inf")
    interval: float = 0.0  # s until the next listing while entries change

    def is_due(self, now: float, *, thorough: bool) -> bool:
        """Whether to list it. Raises OSError."""
        status = os.stat(self.path)
        key = (status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)
        if key != self.key:
            self.key, self.seen = key, now
        if self.listed >= self.seen + GRANULARITY:  # nothing can have come unseen
            return now >= self.listed + FORCED_INTERVAL
        burst = len(self.told) >= max(BURST, len(self.known) // BURST)
        return thorough or burst or now >= self.listed + self.interval

    def list(self, now: float, interval: float) -> set[str]:
        """The names that are new since the last listing and that no event told. Raises OSError."""
        names = set(os.listdir(self.path))
        new = names - self.known - self.told
        proven = bool(self.known or self.told) and not new
        longer = min(2 * max(self.interval, interval), max(MOST_INTERVAL, interval))
        self.interval = longer if proven else interval
        self.known, self.listed = names, now
        self.told.clear()
        return new


SHARDS = "shards"


@dataclass(frozen=True, slots=True)
class ListedPath:
    """The shards that a path stands for: in a folder of streams, of one of them, or one alone."""

    folder: Path
    stream: str | None = None
    name: str | None = None

    @classmethod
    def of(cls, path: Path) -> ListedPath:
        """Of a root, its `shards/`, a stream's folder or a shard; what is not there may be a root.

        Raises OSError when it cannot be asked for now.
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
        """Raises ReaderError unless there may be shards at the path, as in a root that is new and
        empty; OSError."""
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
    """Raises OSError when it cannot be asked for now."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


class RootListing:
    """The shards of a target as they come."""

    def __init__(self, target: ListedPath, interval: float) -> None:
        self.target = target
        self._streams = _Folder(str(target.folder))
        self._folders: dict[str, _Folder] = {}
        self._others: set[str] = set()  # beside the streams, and no folders
        self._interval = interval

    def told(self, path: str) -> ShardFile | None:
        """What an event's path means: a shard, None if it is none of ours."""
        parent, name = os.path.split(path)
        top, stream = os.path.split(parent)
        if top != self._streams.path or not self._is_wanted(stream, name):
            return None
        shard = ShardFile.at(parent, stream, name)
        if shard is not None and stream in self._folders:
            self._folders[stream].told.add(name)
        return shard

    def _is_wanted(self, stream: str, name: str | None = None) -> bool:
        if stream.startswith(".") or self.target.stream not in (None, stream):
            return False
        return name is None or self.target.name in (None, name)

    def new(self, *, thorough: bool, errors: Errors) -> list[ShardFile]:
        """The shards that are new since the last call. What cannot be listed goes to `errors`."""
        now = time.monotonic()
        self._find_streams(now, thorough=thorough, errors=errors)
        found: list[ShardFile] = []
        for stream, folder in list(self._folders.items()):
            try:
                if not folder.is_due(now, thorough=thorough):
                    continue
                names = folder.list(now, self._interval)
            except (FileNotFoundError, NotADirectoryError):  # gone; it may come again
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
        except (FileNotFoundError, NotADirectoryError):  # not there yet, or gone meanwhile
            self._streams, self._folders = _Folder(streams.path), {}
            return
        except OSError as error:
            errors[streams.path] = error
            return
        for name in streams.known - self._folders.keys() - self._others:
            path = os.path.join(streams.path, name)
            try:
                if self._is_wanted(name) and is_folder(path):
                    self._folders[name] = _Folder(path)
                else:
                    self._others.add(name)
            except OSError as error:  # asked again the next time
                errors[path] = error


def scan_target(target: ListedPath, errors: Errors) -> list[ShardFile]:
    """Every shard there now. What cannot be listed goes to `errors`."""
    return RootListing(target, 0.0).new(thorough=True, errors=errors)


def is_folder(path: Path | str) -> bool:
    """Through links: a stream may be one. Raises OSError when it cannot be asked for now."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if error.errno != errno.ELOOP:  # a link in a circle leads nowhere
            raise
        return False
