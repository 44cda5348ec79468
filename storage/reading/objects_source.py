"""`ObjectsSource`: the shards of any store, found by listing; `source_at` chooses the source."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from storage.experience.interfaces import ReaderError
from storage.objects.folder import FolderObjects
from storage.objects.interface import Objects
from storage.objects.opening import Root, objects_at
from storage.reading.listing import SHARDS, ShardFile
from storage.reading.sources import (
    POLL_INTERVAL,
    DirectorySource,
    StoredSource,
    complete,
)
from storage.shards.names import shard_names, streams

Roots: TypeAlias = Root | Sequence[Root]


class ObjectsSource(StoredSource):
    """The shards under `shards/` in one or more stores.

    A listing goes on after the last known name of each stream. A thorough one lists all names: a
    shard may come before a known one, when a backup was restored.
    """

    def __init__(self, *stores: Objects) -> None:
        super().__init__()
        self._stores = stores
        self._shards = {f"{store}/{SHARDS}/": store.under(SHARDS) for store in stores}
        self._known: set[ShardFile] = set()
        self._last: dict[str, str] = {}  # place of a stream -> the greatest name

    def __repr__(self) -> str:
        return f"ObjectsSource({', '.join(map(repr, self._stores))})"

    @property
    def home(self) -> Objects:
        return self._stores[0]

    def scan(self) -> list[ShardFile]:
        self._changed.clear()
        return complete(*self._listed(thorough=True))

    def changes(self, *, thorough: bool, afresh: bool = False) -> list[ShardFile]:
        self._changed.clear()
        if afresh:
            self._known, self._last = set(), {}
        found, errors = self._listed(thorough=thorough)
        new = [shard for shard in found if shard not in self._known]
        self._known.update(new)
        return complete(new, errors)

    def _place(self, shard: ShardFile) -> tuple[Objects, str]:
        for place, shards in self._shards.items():
            if shard.place.startswith(place):
                return shards, shard.place.removeprefix(place)
        raise FileNotFoundError(f"{shard.place}: expected a shard of {self}")

    def _listed(self, *, thorough: bool) -> tuple[list[ShardFile], dict[str, OSError]]:
        found: list[ShardFile] = []
        errors: dict[str, OSError] = {}
        for place, shards in self._shards.items():
            try:
                there = streams(shards)
            except OSError as error:
                errors[place] = error
                continue
            for stream in there:
                try:
                    found += self._list(shards, place, stream, thorough=thorough)
                except OSError as error:
                    errors[place + stream] = error
        return found, errors

    def _list(self, shards: Objects, place: str, stream: str, *, thorough: bool) -> list[ShardFile]:
        after = "" if thorough else self._last.get(place + stream, "")
        names = shard_names(shards, stream, after)
        if names:
            self._last[place + stream] = max(f"{stream}/{name}" for name in names)
        return [
            ShardFile(stream, name.first, name.last, name.digest16, f"{place}{stream}/{name}")
            for name in names
        ]


def stores_at(roots: Roots) -> list[Objects]:
    """The stores of one or more roots."""
    return list(map(objects_at, [roots] if isinstance(roots, (Path, str, Objects)) else roots))


def source_at(
    roots: Roots, *, follow: bool = False, poll_interval: float = POLL_INTERVAL
) -> StoredSource:
    """The source of one or more roots. Raises ReaderError if there is none.

    Local folders are watched with `follow`, and a stream's folder or a shard is a root, too.
    """
    stores = stores_at(roots)
    if not stores:
        raise ReaderError("roots: expected one or more, got none")
    folders = [store.root for store in stores if isinstance(store, FolderObjects)]
    if len(folders) == len(stores):
        return DirectorySource(folders, follow=follow, poll_interval=poll_interval)
    return ObjectsSource(*stores)
