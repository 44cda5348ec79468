"""`LiveSource`: a source that also contains parts which have no shard yet.

A collector in the reader's own process offers parts as soon as they are durable. A `ShardReader`
finds them along with the shards of a root and takes each ordinal once, wherever it comes from.
Parts stay here until the reader has taken them. Parts that exceed the limits are read from their
shard later. Without a root there are no shards, and the collector has to wait instead (`full`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import groupby

from storage.experience.episode import Part
from storage.experience.range_set import RangeSet
from storage.objects.opening import Root
from storage.reading.ledger import Ledger
from storage.reading.listing import ShardFile
from storage.reading.objects_source import source_at
from storage.reading.sources import ScanIncomplete, WaitingSource
from storage.shards.part_block import PartBlock, UnwrittenParts

_FAILED_WAIT = 0.05  # s between checks whether everything before a failure has been read


class LiveSource(WaitingSource):
    """Unwritten parts of one schema, and the shards under `root` if it is given.

    `max_parts` and `max_bytes` (raw) limit the parts that wait here. `taken` returns the reader's
    ledger; set it before the first scan. The collector's thread calls `offer`, `written` and
    `fail`, the reader's thread everything else.
    """

    def __init__(
        self, root: Root | None, schema_id: str, *, max_parts: int = 20, max_bytes: int = 64_000_000
    ) -> None:
        super().__init__()
        for name, value in (("max_parts", max_parts), ("max_bytes", max_bytes)):
            if value < 1:
                raise ValueError(f"{name}: expected 1 or more, got {value!r}")
        self.taken: Callable[[], Ledger] = Ledger
        self.dropped = 0  # parts beyond the limits
        self._shards = None if root is None else source_at(root)
        self._schema_id = schema_id
        self._max_parts, self._max_bytes = max_parts, max_bytes
        self._lock = threading.Lock()
        self._waiting: dict[ShardFile, UnwrittenParts] = {}
        self._missing: dict[str, RangeSet] = {}  # dropped ordinals whose shard does not exist yet
        self._due = 0 if root is None else 1  # how often the root had something new
        self._listing = self._listed = 0
        self._error: BaseException | None = None

    # the collector's side

    @property
    def full(self) -> bool:
        """Whether the collector has to wait; never with a root, whose shards can be read later."""
        return self._shards is None and not self._room()

    @property
    def waiting(self) -> int:
        """The number of parts that have not been read yet."""
        with self._lock:
            self._forget_taken()
            return self._parts()

    def offer(self, stream: str, canonical_json: str, parts: Sequence[Part]) -> None:
        """Add parts with their ordinals, ascending; parts of another schema are ignored."""
        if parts[0].schema_id != self._schema_id:
            return
        room = self._shards is None or self._room()
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
        """Scan the root if the new shard of these ordinals contains dropped parts."""
        with self._lock:
            missing = self._missing.get(stream)
            if missing is None or not missing.touching(first, last):
                return
            missing.discard_range(first, last)
            self._due += 1
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """No more parts will come: `scan` raises this error once everything here is taken."""
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
        """The parts that wait here, and the root's shards if there may be new ones.

        Raises the error given to `fail`, once nothing waits.
        """
        self._changed.clear()
        with self._lock:
            self._forget_taken()
            found = list(self._waiting)
            due = self._due
        if self._shards is not None and self._listed < due:
            try:
                found += self._shards.scan()
            except ScanIncomplete as partial:  # it will be scanned again
                raise ScanIncomplete(sorted(found + partial.found), partial.errors) from None
        self._listing = due
        if self._error is not None and not found:
            raise self._error
        return sorted(found)

    def changes(self, *, thorough: bool, afresh: bool = False) -> list[ShardFile]:
        """As `scan`, which is cheap: few parts wait, and the root is scanned only if needed.

        A shard that was listed once and cannot be read now need not be listed again.
        """
        if afresh:
            self._listed = 0
        return self.scan()

    def read(self, shard: ShardFile) -> bytes | UnwrittenParts:
        with self._lock:
            found = self._waiting.get(shard)
        if found is not None:
            return found
        if self._shards is None or not shard.digest16:
            raise FileNotFoundError(shard.place)  # taken meanwhile
        return self._shards.read(shard)

    def wait(self, timeout: float) -> bool:
        """Wait for a change. By now, a pass over all of `scan` has read the root."""
        self._listed = self._listing
        if self._error is not None:
            timeout = min(timeout, _FAILED_WAIT)
        return super().wait(timeout)
