"""`ObjectsSource`: the shards of any store, found by listing."""

from __future__ import annotations

import threading

from storage.errors import ObjectUnusable
from storage.objects.interface import Objects
from storage.reading.listing import SHARDS, ShardFile
from storage.reading.sources import GrowingSource, ScanIncomplete
from storage.shards.names import MAX_SHARD, ShardDamaged, shard_names, streams

__all__ = ["ObjectsSource"]


class ObjectsSource(GrowingSource):
    """The shards under `shards/` in a store.

    A listing goes on after the last known name of each stream. A thorough one lists all names: a
    shard may come before a known one, when a backup was restored.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._shards = objects.under(SHARDS)
        self._known: set[ShardFile] = set()
        self._last: dict[str, str] = {}  # stream -> the greatest name
        self._changed = threading.Event()
        self._closed = False

    def __repr__(self) -> str:
        return f"ObjectsSource({self._objects!r})"

    def scan(self) -> list[ShardFile]:
        self._changed.clear()
        found: list[ShardFile] = []
        errors: dict[str, OSError] = {}
        for stream in self._streams(errors):
            found += self._list(stream, "", errors)
        return _complete(found, errors)

    def changes(self, *, thorough: bool, afresh: bool = False) -> list[ShardFile]:
        self._changed.clear()
        if afresh:
            self._known, self._last = set(), {}
        found: list[ShardFile] = []
        errors: dict[str, OSError] = {}
        for stream in self._streams(errors):
            found += self._list(stream, "" if thorough else self._last.get(stream, ""), errors)
        new = [shard for shard in found if shard not in self._known]
        self._known.update(new)
        return _complete(new, errors)

    def read(self, shard: ShardFile) -> bytes:
        try:
            return self._shards.read(shard.place, limit=MAX_SHARD)
        except ObjectUnusable as error:
            raise ShardDamaged(str(error)) from error

    def wait(self, timeout: float) -> bool:
        return self._closed or self._changed.wait(timeout)

    def wake(self) -> None:
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    def _streams(self, errors: dict[str, OSError]) -> list[str]:
        try:
            return streams(self._shards)
        except OSError as error:
            errors[str(self._shards)] = error
            return []

    def _list(self, stream: str, after: str, errors: dict[str, OSError]) -> list[ShardFile]:
        try:
            names = shard_names(self._shards, stream, after)
        except OSError as error:
            errors[f"{self._shards}/{stream}"] = error
            return []
        if names:
            self._last[stream] = max(f"{stream}/{name}" for name in names)
        return [
            ShardFile(stream, name.first, name.last, name.digest16, f"{stream}/{name}")
            for name in names
        ]


def _complete(found: list[ShardFile], errors: dict[str, OSError]) -> list[ShardFile]:
    if errors:
        raise ScanIncomplete(sorted(found), errors)
    return sorted(found)
