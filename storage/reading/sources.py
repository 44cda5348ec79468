"""Where shards come from. Only a scan decides what exists; anything else suggests when to scan.

A `ShardSource` lists shards, reads one, and waits until another listing may find something. It
watches before it scans: `wait` returns at once if something happened after the last `scan` began,
so no shard is missed between the two.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

from watchdog.events import (
    DirCreatedEvent,
    DirMovedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from storage.errors import ObjectNotFound, ObjectUnusable
from storage.experience.interfaces import MixedSchemas, ReaderError
from storage.objects.folder import FolderObjects
from storage.objects.interface import Objects
from storage.objects.ranged import RangedFile
from storage.reading.deletion import close_if_deleted
from storage.reading.ledger import Ledger
from storage.reading.listing import ListedPath, RootListing, ShardFile, scan_target
from storage.shards.names import MAX_SHARD, ShardDamaged
from storage.shards.part_block import UnwrittenParts
from storage.shards.replacements import REPLACED

log = logging.getLogger("headrace.reader")

Content: TypeAlias = bytes | memoryview | UnwrittenParts
T = TypeVar("T")
POLL_INTERVAL = 2.0  # s


class ScanIncomplete(ReaderError):
    """Some folders could not be listed: `errors` by folder; `found`: the shards of the others."""

    def __init__(self, found: list[ShardFile], errors: dict[str, OSError]) -> None:
        listed = "; ".join(f"{folder}: {error}" for folder, error in errors.items())
        super().__init__(f"expected folders that can be listed: {listed}")
        self.found, self.errors = found, errors


class ShardSource(Protocol):
    """A place that holds shards.

    `read` raises FileNotFoundError if the shard was removed, and OSError or MemoryError for causes
    that may be temporary.
    """

    def scan(self) -> list[ShardFile]:
        """All shards that exist now, sorted. A stream or root that does not exist yet has none.

        Raises ScanIncomplete if a part of it cannot be listed now.
        """

    def read(self, shard: ShardFile) -> Content:
        """The whole content of a shard, not verified; or the parts of a shard not yet written."""

    def wait(self, timeout: float) -> bool:
        """Wait for `timeout` seconds at most; True if something happened since the last `scan`."""

    def wake(self) -> None:
        """Make a `wait` in another thread return at once."""

    def close(self) -> None:
        """Stop watching; from now on `wait` returns at once."""


@runtime_checkable
class GrowingSource(ShardSource, Protocol):
    """A source that can list new shards without listing all of them."""

    def changes(self, *, thorough: bool, afresh: bool = False) -> list[ShardFile]:
        """The shards that came since the last call, sorted; a shard may be listed again.

        `thorough`: look also where nothing indicates a change. `afresh`: list all shards. Raises
        ScanIncomplete if a part of it cannot be listed now.
        """


class WaitingSource(GrowingSource):
    """What waits: a subclass sets `_changed` if something happens, and clears it in `scan`."""

    def __init__(self) -> None:
        self._changed = threading.Event()
        self._closed = False

    def wait(self, timeout: float) -> bool:
        return self._closed or self._changed.wait(timeout)

    def wake(self) -> None:
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StoredSource(WaitingSource):
    """A source of shards that are objects."""

    @property
    def home(self) -> Objects:
        """The first root."""
        raise NotImplementedError

    def _place(self, shard: ShardFile) -> tuple[Objects, str]:
        """The store and the name of a shard."""
        raise NotImplementedError

    def read(self, shard: ShardFile) -> bytes:
        return self._found(shard, lambda objects, name: objects.read(name, limit=MAX_SHARD))

    def open(self, shard: ShardFile) -> RangedFile:
        """A shard, to read parts of it. Raises the errors of `read`."""
        return self._found(shard, RangedFile)

    def _found(self, shard: ShardFile, get: Callable[[Objects, str], T]) -> T:
        """What `get` returns for a shard, also if it was replaced since it was listed."""
        objects, name = self._place(shard)
        try:
            return get(objects, name)
        except ObjectNotFound as gone:
            try:
                return get(objects, name + REPLACED)
            except ObjectNotFound:
                raise gone from None
        except ObjectUnusable as error:
            raise ShardDamaged(str(error)) from error


class DirectorySource(StoredSource):
    """The shards under one or more local roots.

    A path may also be the `shards/` of a root, a stream's folder or a shard. With `follow`, a path
    that does not exist yet is waited for; `check` raises for it.

    With `follow`, watchdog events name new shards, which are read at once, without waiting for the
    interval. An event is only a hint: a burst can overflow the kernel's queue, and network file
    systems send none. So every `poll_interval` seconds the folders are checked for changes, and
    listed where they may hold a name that no event named (`RootListing`). Without `follow` nothing
    is watched.
    """

    def __init__(
        self,
        roots: Path | str | Sequence[Path | str],
        *,
        follow: bool = False,
        poll_interval: float = POLL_INTERVAL,
    ) -> None:
        super().__init__()
        given = [roots] if isinstance(roots, (str, Path)) else list(roots)
        if not given:
            raise ValueError("roots: expected one or more directories, got none")
        self.roots = tuple(dict.fromkeys(Path(root) for root in given))
        self._poll_interval = poll_interval
        self._listings: dict[Path, RootListing] = {}
        self._swept = float("-inf")
        self._event_paths: deque[str] = deque()  # paths that events named
        self._follow = follow
        self._watched: set[Path] = set()
        self._observer: BaseObserver | None = None
        self._deleted: weakref.finalize[Any, Any] | None = None

    def __repr__(self) -> str:
        return f"DirectorySource({', '.join(repr(str(root)) for root in self.roots)})"

    @property
    def home(self) -> Objects:
        """The first root, also if its `shards/` or something in it was given."""
        return FolderObjects(ListedPath.of(self.roots[0]).folder.parent)

    def check(self) -> None:
        """Raise ReaderError if one of the paths holds nothing that may contain shards."""
        for root in self.roots:
            with contextlib.suppress(OSError):  # listing it will report the error, and be retried
                ListedPath.of(root).check(root)

    def scan(self) -> list[ShardFile]:
        self._changed.clear()
        errors: dict[str, OSError] = {}
        targets = [one for root in self.roots if (one := _target(root, errors))]
        self._watch(targets)
        found = [shard for target in targets for shard in scan_target(target, errors)]
        return complete(found, errors)

    def changes(self, *, thorough: bool, afresh: bool = False) -> list[ShardFile]:
        self._changed.clear()
        if afresh or not self._listings:
            self._listings.clear()
            self._swept = float("-inf")
        errors: dict[str, OSError] = {}
        now = time.monotonic()
        if thorough or now >= self._swept + self._poll_interval:
            self._find_targets(errors)
        found: list[ShardFile] = []
        for _ in range(len(self._event_paths)):
            path = self._event_paths.popleft()
            thorough |= not path  # a new folder
            found += [s for s in (one.note_event(path) for one in self._listings.values()) if s]
        if thorough or now >= self._swept + self._poll_interval:
            self._swept = now
            for listing in self._listings.values():
                found += listing.new(thorough=thorough, errors=errors)
            if errors:
                self._swept = float("-inf")
        return complete(found, errors)

    def _find_targets(self, errors: dict[str, OSError]) -> None:
        """Interpret the roots again: what a path refers to may change when it is created."""
        for root in self.roots:
            target, known = _target(root, errors), self._listings.get(root)
            if target is None:
                continue
            if known is None or known.target != target:
                self._listings[root] = RootListing(target, self._poll_interval)
                if self._follow and not os.path.isdir(target.folder):
                    log.warning("%s: not there yet, waiting for it", target.folder)
        self._watch([listing.target for listing in self._listings.values()])

    def _place(self, shard: ShardFile) -> tuple[Objects, str]:
        folder, _, name = shard.place.rpartition("/")
        return FolderObjects(folder), name

    def close(self) -> None:
        super().close()
        if self._observer is not None:
            if self._deleted is not None:
                self._deleted.detach()
            self._observer.stop()
            self._observer.join()
            self._observer = None

    def _watch(self, targets: Sequence[ListedPath]) -> None:
        """Watch the folders that exist by now; the others are tried again at each scan."""
        wanted = {target.folder for target in targets} - self._watched if self._follow else set()
        ready = [folder for folder in wanted if os.path.isdir(folder)]
        if not ready or self._closed:
            return
        if self._observer is None:
            self._observer = Observer()
            self._observer.start()
            self._deleted = close_if_deleted(self, self._observer.stop)
        for folder in ready:
            handler = _PathCollector(self._event_paths, self._changed)
            try:
                self._observer.schedule(handler, str(folder), recursive=True, event_filter=_EVENTS)
            except OSError:  # out of inotify watches, or removed again: polling remains
                continue
            self._watched.add(folder)


def _target(root: Path, errors: dict[str, OSError]) -> ListedPath | None:
    try:
        return ListedPath.of(root)
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
        return None
    except OSError as error:
        errors[str(root)] = error
        return None


def complete(found: list[ShardFile], errors: dict[str, OSError]) -> list[ShardFile]:
    """The shards sorted, each once. Raises ScanIncomplete if there were errors."""
    shards = sorted({(s.stream, s.name): s for s in reversed(found)}.values())
    if errors:
        raise ScanIncomplete(shards, errors)
    return shards


_EVENTS: list[type[FileSystemEvent]] = [
    FileCreatedEvent,
    FileMovedEvent,
    FileClosedEvent,  # a copied file is complete then
    DirCreatedEvent,
    DirMovedEvent,
]


class _PathCollector(FileSystemEventHandler):
    """Collects the path of every new file, "" for a new folder, and sets a flag."""

    def __init__(self, paths: deque[str], changed: threading.Event) -> None:
        self._paths, self._changed = paths, changed

    def on_created(self, event: FileSystemEvent) -> None:
        self._note(event, event.src_path)

    def on_closed(self, event: FileSystemEvent) -> None:
        self._note(event, event.src_path)

    def on_moved(self, event: FileSystemEvent) -> None:
        self._note(event, event.dest_path)

    def _note(self, event: FileSystemEvent, path: bytes | str) -> None:
        name = "" if event.is_directory else os.fsdecode(path)
        if os.path.basename(name).startswith("."):  # not a shard yet
            return
        self._paths.append(name)
        self._changed.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardChoice:
    """Selects the shards of one schema or policy, and of `manifest` if it is given.

    Without `schema_id` and `policy_id`, all shards have to be of one schema. A policy's schema can
    only be found in its rows.
    """

    policy_id: str | None = None
    schema_id: str | None = None
    manifest: Ledger | None = None
    seen: dict[str, set[str]] = field(default_factory=dict)  # schema -> its streams

    def wanted(self, shards: Sequence[ShardFile], taken: Ledger) -> list[ShardFile]:
        """The newly found shards, in order, that may hold parts which are not in `taken`.

        Raises MixedSchemas.
        """
        mine = [s for s in shards if self.schema_id in (None, s.schema_id) and self._listed(s)]
        if self.schema_id is None and self.policy_id is None:
            for shard in mine:
                self.seen.setdefault(shard.schema_id, set()).add(shard.stream)
            refuse_mixture(self.seen)
        return [s for s in mine if taken.missing(s.stream, s.first, s.last)]

    def _listed(self, shard: ShardFile) -> bool:
        if self.manifest is None:
            return True
        span = shard.last - shard.first + 1
        return len(self.manifest.missing(shard.stream, shard.first, shard.last)) < span


def refuse_mixture(streams: Mapping[str, set[str]]) -> None:
    """Raise MixedSchemas, with the list, if there are streams of several schemas.

    `streams`: schema id -> streams.
    """
    if len(streams) > 1:
        listed = "; ".join(f"{key}: {', '.join(sorted(v))}" for key, v in sorted(streams.items()))
        raise MixedSchemas(
            f"expected shards of one schema, found {len(streams)} ({listed}): pass schema_id= "
            "(--schema-id), or policy_id= (--policy-id) if each is of another policy"
        )
