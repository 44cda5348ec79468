"""Shards in memory, as a source of readers."""

from __future__ import annotations

import threading

from storage.reading.listing import ShardFile
from storage.shards.names import ShardName


class MemorySource:
    """A source whose shards tests put and remove.

    `put` adds a shard to a stream, under the name that contains its digest; `remove` removes it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shards: dict[ShardFile, bytes] = {}
        self._changed = threading.Event()
        self._closed = False

    def put(self, stream: str, name: str, content: bytes) -> ShardFile:
        """Add a shard. Raises ValueError unless `name` is the name of a shard."""
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
