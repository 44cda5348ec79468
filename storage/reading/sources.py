"""Where shards come from: the truth is a scan; everything else is a hint that a scan may pay.

A `ShardSource` lists shards, reads one, and waits until it may pay to list again. Watch before
scan: `wait` returns at once when something happened after the last `scan` began, so that no shard
falls between the two.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeAlias

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from storage.experience.interfaces import ReaderError
from storage.shards.names import ShardName, require_regular
from storage.shards.part_block import UnwrittenParts

Content: TypeAlias = bytes | memoryview | UnwrittenParts
SHARDS = "shards"
POLL_INTERVAL = 2.0  # s


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


class ScanIncomplete(ReaderError):
    """Some folders could not be listed: `errors` by folder, and what was `found` in the others."""

    def __init__(self, found: list[ShardFile], errors: dict[str, OSError]) -> None:
        listed = "; ".join(f"{folder}: {error}" for folder, error in errors.items())
        super().__init__(f"expected folders that can be listed: {listed}")
        self.found, self.errors = found, errors


class ShardSource(Protocol):
    """A place that holds shards. `read` raises FileNotFoundError when one is gone meanwhile, and
    OSError or MemoryError for what may pass."""

    def scan(self) -> list[ShardFile]:
        """Every shard there now, sorted; a stream or a root that is not there yet has none.

        Raises ScanIncomplete when a part of it cannot be listed for now.
        """

    def read(self, shard: ShardFile) -> Content:
        """The whole content of one shard, unchecked; or the parts of one that is not written."""

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds; True when something happened since `scan` was called."""

    def wake(self) -> None:
        """Make a `wait` in another thread return at once."""

    def close(self) -> None:
        """Stop watching; `wait` returns at once from now on."""


class DirectorySource:
    """The shards under one or more local roots.

    With `follow`, watchdog events cut the wait short. An event is only a hint: bursts overflow the
    kernel's queue with no more than a log line, network file systems send none, and so a reader
    scans again every few seconds in any case. Without `follow` nothing is watched.
    """

    def __init__(self, roots: Path | str | Sequence[Path | str], *, follow: bool = False) -> None:
        given = [roots] if isinstance(roots, (str, Path)) else list(roots)
        if not given:
            raise ValueError("roots: expected one or more directories, got none")
        self.roots = tuple(Path(root) for root in given)
        self._changed = threading.Event()
        self._closed = False
        self._unwatched = {root / SHARDS for root in self.roots} if follow else set()
        self._observer: BaseObserver | None = None

    def scan(self) -> list[ShardFile]:
        self._changed.clear()
        self._watch()
        found: dict[tuple[str, str], ShardFile] = {}
        errors: dict[str, OSError] = {}
        for root in self.roots:
            for shard in _scan_root(root / SHARDS, errors):
                found.setdefault((shard.stream, shard.name), shard)
        if errors:
            raise ScanIncomplete(sorted(found.values()), errors)
        return sorted(found.values())

    def read(self, shard: ShardFile) -> bytes:
        require_regular(Path(shard.place))
        return Path(shard.place).read_bytes()

    def wait(self, timeout: float) -> bool:
        return self._closed or self._changed.wait(timeout)

    def wake(self) -> None:
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()
        if self._observer is not None:
            self._observer.stop()
            self._observer.join()
            self._observer = None

    def __enter__(self) -> DirectorySource:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _watch(self) -> None:
        """Watch what is there by now; a folder that does not exist yet is tried at each scan."""
        ready = [folder for folder in self._unwatched if folder.is_dir()]
        if not ready or self._closed:
            return
        if self._observer is None:
            self._observer = Observer()
            self._observer.start()
        for folder in ready:
            try:
                self._observer.schedule(_Flag(self._changed), str(folder), recursive=True)
            except OSError:  # out of inotify watches, or gone again: polling goes on alone
                continue
            self._unwatched.discard(folder)


class MemorySource:
    """Shards held in memory: the twin of `DirectorySource` for simulation and tests.

    `put` adds a shard under a stream and the name that proves its content; `remove` takes it away.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shards: dict[ShardFile, bytes] = {}
        self._changed = threading.Event()
        self._closed = False

    def put(self, stream: str, name: str, content: bytes) -> ShardFile:
        """Raises ValueError unless `name` is the name of a shard."""
        parsed = ShardName.parse(name)
        if parsed is None:
            raise ValueError(f"expected the name of a shard, got {name!r:.200}")
        shard = ShardFile(stream, parsed.first, parsed.last, parsed.digest16, f"{stream}/{name}")
        with self._lock:
            self._shards[shard] = content
        self._changed.set()
        return shard

    def remove(self, shard: ShardFile) -> None:
        with self._lock:
            self._shards.pop(shard, None)
        self._changed.set()

    def scan(self) -> list[ShardFile]:
        self._changed.clear()
        with self._lock:
            return sorted(self._shards)

    def read(self, shard: ShardFile) -> bytes:
        with self._lock:
            content = self._shards.get(shard)
        if content is None:
            raise FileNotFoundError(shard.place)
        return content

    def wait(self, timeout: float) -> bool:
        return self._closed or self._changed.wait(timeout)

    def wake(self) -> None:
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()


class _Flag(FileSystemEventHandler):
    """Sets a flag for every event that may mean a new shard, and does nothing else."""

    def __init__(self, changed: threading.Event) -> None:
        self._changed = changed

    def on_created(self, event: FileSystemEvent) -> None:
        if not os.path.basename(os.fsdecode(event.src_path)).startswith("."):  # not yet a shard
            self._changed.set()

    def on_moved(self, event: FileSystemEvent) -> None:
        self._changed.set()

    def on_deleted(self, event: FileSystemEvent) -> None:
        self._changed.set()


def _scan_root(shards: Path, errors: dict[str, OSError]) -> Iterable[ShardFile]:
    for stream in _entries(shards, errors):
        if not stream.name.startswith(".") and _is_folder(stream, errors):
            yield from _scan_stream(stream, errors)


def _scan_stream(stream: os.DirEntry[str], errors: dict[str, OSError]) -> Iterable[ShardFile]:
    """Names alone, no stat: ten thousand of them cost milliseconds."""
    for entry in _entries(Path(stream.path), errors):
        name = ShardName.parse(entry.name)
        if name is not None:
            yield ShardFile(stream.name, name.first, name.last, name.digest16, entry.path)


def _is_folder(entry: os.DirEntry[str], errors: dict[str, OSError]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:  # a link in a circle leads nowhere
            errors[entry.path] = error
        return False


def _entries(folder: Path, errors: dict[str, OSError]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):  # not there yet, or gone meanwhile
        return []
    except OSError as error:
        errors[str(folder)] = error
        return []
