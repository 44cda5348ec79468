"""Parts that have no shard yet as a source of shards: `LiveSource`.

A collector in the reader's own process offers parts as soon as they are durable; a `ShardReader`
finds them beside the shards of a root and takes each ordinal once, wherever it comes from. Parts
stay here until the reader has taken them. What there is no room for comes from its shard, or, where
there are no shards, keeps the collector from taking more (`full`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from storage.experience.episode import Part
from storage.experience.range_set import RangeSet
from storage.reading.ledger import Ledger
from storage.reading.listing import ShardFile
from storage.reading.sources import DirectorySource, ScanIncomplete
from storage.shards.part_block import PartBlock, UnwrittenParts

_FAILED_WAIT = 0.05  # s, how often it is looked whether what came before a failure has been read


class LiveSource:
    """Unwritten parts of one schema, and the shards under `root` if there is one.

    `max_parts` and `max_bytes` (raw) bound what waits here. `taken` is the reader's ledger; set it
    before the first scan. `offer`, `written` and `fail` are called by the collector's thread, the
    rest by the reader's.
    """

    def __init__(
        self, root: Path | None, schema_id: str, *, max_parts: int = 20, max_bytes: int = 64_000_000
    ) -> None:
        for name, value in (("max_parts", max_parts), ("max_bytes", max_bytes)):
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value!r}")
        self.taken: Callable[[], Ledger] = Ledger
        self.dropped = 0  # parts that there was no room for
        self._directory = None if root is None else DirectorySource(root)
        self._schema_id = schema_id
        self._max_parts, self._max_bytes = max_parts, max_bytes
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._waiting: dict[ShardFile, UnwrittenParts] = {}
        self._missing: dict[str, RangeSet] = {}  # dropped ordinals whose shard is not there yet
        self._due = 0 if root is None else 1  # times that the directory had something for us
        self._listing = self._listed = 0
        self._error: BaseException | None = None
        self._closed = False

    # the collector's side

    @property
    def full(self) -> bool:
        """Whether the collector has to wait: never with a root, whose shards have room."""
        return self._directory is None and not self._room()

    @property
    def waiting(self) -> int:
        """How many parts nobody has read yet."""
        with self._lock:
            self._forget_taken()
            return self._parts()

    def offer(self, stream: str, canonical_json: str, parts: Sequence[Part]) -> None:
        """Parts with their ordinals, ascending; those of another schema are passed by."""
        if parts[0].schema_id != self._schema_id:
            return
        room = self._directory is None or self._room()
        with self._lock:
            for _, run in groupby(enumerate(parts), key=lambda pair: pair[1].ordinal - pair[0]):
                self._add(stream, canonical_json, [part for _, part in run], room)
        self._changed.set()

    def _add(self, stream: str, canonical_json: str, run: list[Part], room: bool) -> None:
        first, last = run[0].ordinal, run[-1].ordinal
        if room:
            shard = ShardFile(stream, first, last, "", f"{stream}: parts {first} to {last}")
            self._waiting[shard] = UnwrittenParts(canonical_json, PartBlock.of(run))
        else:
            self.dropped += len(run)
            self._missing.setdefault(stream, RangeSet()).add_range(first, last)

    def written(self, stream: str, first: int, last: int) -> None:
        """The shard of these ordinals is there: look, if something of it was dropped."""
        with self._lock:
            missing = self._missing.get(stream)
            if missing is None or not missing.touching(first, last):
                return
            missing.discard_range(first, last)
            self._due += 1
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """No part will come any more: `scan` raises this once everything here is taken."""
        self._error = error
        self._changed.set()

    def _room(self) -> bool:
        with self._lock:
            if self._parts() >= self._max_parts or self._size() >= self._max_bytes:
                self._forget_taken()
            return self._parts() < self._max_parts and self._size() < self._max_bytes

    def _parts(self) -> int:
        return sum(len(found.block.scalars.steps) for found in self._waiting.values())

    def _size(self) -> int:
        return sum(found.block.nbytes for found in self._waiting.values())

    def _forget_taken(self) -> None:
        taken = self.taken()
        for shard in list(self._waiting):
            if not taken.missing(shard.stream, shard.first, shard.last):
                del self._waiting[shard]

    # the reader's side: a ShardSource

    def scan(self) -> list[ShardFile]:
        """What waits here, and the directory when it may have something new.

        Raises what `fail` was given, once nothing waits.
        """
        self._changed.clear()
        with self._lock:
            self._forget_taken()
            found = list(self._waiting)
            due = self._due
        if self._directory is not None and self._listed < due:
            try:
                found += self._directory.scan()
            except ScanIncomplete as partial:  # and look again
                raise ScanIncomplete(sorted(found + partial.found), partial.errors) from None
        self._listing = due
        if self._error is not None and not found:
            raise self._error
        return sorted(found)

    def changes(self, *, thorough: bool, afresh: bool = False) -> list[ShardFile]:
        """As `scan`: what waits is little, and the directory is looked at when there is a reason.

        What was named once, and cannot be read for now, need not be named again.
        """
        if afresh:
            self._listed = 0
        return self.scan()

    def read(self, shard: ShardFile) -> bytes | UnwrittenParts:
        with self._lock:
            found = self._waiting.get(shard)
        if found is not None:
            return found
        if self._directory is None or not shard.digest16:
            raise FileNotFoundError(shard.place)  # taken meanwhile
        return self._directory.read(shard)

    def wait(self, timeout: float) -> bool:
        """Called after a whole pass over what `scan` listed: the directory has been read."""
        self._listed = self._listing
        if self._error is not None:
            timeout = min(timeout, _FAILED_WAIT)
        return self._closed or self._changed.wait(timeout)

    def wake(self) -> None:
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()
