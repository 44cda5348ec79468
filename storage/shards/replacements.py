"""Which shards were replaced by which, and which parts were removed: the records of maintenance.

    maintenance/{plan}/plan.json                the plan that was applied
    maintenance/{plan}/{stream}/{shard}.json    a shard that it made, and those that it replaced
    maintenance/{plan}/{stream}/none-{shard}.json    a shard that it replaced by none

A record is written before its shard has its name. So a record whose shard is missing means nothing,
and where both a shard and its replacement are there, the record tells which one counts. A replaced
shard gets the suffix `.replaced`, with which no listing finds it. Until its grace period is over, a
reader that has listed it before can read it. The journal and manifests name the shards that were
replaced for good, so records are never deleted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import msgspec

from storage.experience.range_set import RangeSet
from storage.objects.interface import Objects
from storage.objects.opening import Root, objects_at
from storage.shards.names import next_ordinals, streams
from storage.system.formats import require_format

FORMAT_VERSION = 1
FOLDER = "maintenance"
REPLACED = ".replaced"
"""The suffix of a replaced shard."""


class MadeShard(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a shard that maintenance made. `at`: microseconds since the epoch.

    The new shard has the ordinals of the old ones and their rows, except `removed`. Ordinals are
    inclusive ranges. `new` is "" if no row is left.
    """

    format: int = FORMAT_VERSION
    command: str
    plan: str
    at: int
    by: str
    why: str
    stream: str
    new: str
    old: tuple[str, ...]
    ordinals: tuple[tuple[int, int], ...]
    rows: int
    removed: tuple[tuple[int, int], ...] = ()
    removed_rows: int = 0

    @property
    def place(self) -> str:
        """The record's name under a root."""
        return f"{FOLDER}/{self.plan}/{self.stream}/{self.new or f'none-{self.old[0]}'}.json"


_decode = msgspec.json.Decoder(MadeShard).decode
_decode_object = msgspec.json.Decoder(dict).decode


class Replacements:
    """The records under a root, as they were read."""

    def __init__(self) -> None:
        self._by_old: dict[tuple[str, str], list[MadeShard]] = defaultdict(list)
        self.made: dict[tuple[str, str], MadeShard] = {}
        """The records by (stream, new shard)."""
        self._removals: dict[tuple[str, str], MadeShard] = {}

    @classmethod
    def of(cls, root: Objects) -> Replacements:
        """Read all records. Raises NewerFormat, OSError, and ValueError for one that is damaged."""
        found = cls()
        for name in _names(root):
            data = root.read(name)
            try:
                require_format(_decode_object(data), FORMAT_VERSION, f"{root}/{name}")
                found.add(_decode(data))
            except msgspec.MsgspecError as error:
                text = f"{root}/{name}: expected a record of maintenance: {error}"
                raise ValueError(text) from error
        return found

    def add(self, record: MadeShard) -> None:
        """Add a record.

        Of two plans that made the same shard, as when one was killed first, the later one counts.
        """
        key = record.stream, record.place.rpartition("/")[2]
        known = self._removals.get(key)
        if record.new:
            self.made[record.stream, record.new] = record
        if record.removed and (known is None or known.at <= record.at):
            self._removals[key] = record
        for old in record.old:
            self._by_old[record.stream, old].append(record)

    @property
    def removals(self) -> list[MadeShard]:
        """The records with removed parts."""
        return list(self._removals.values())

    def since(self, stream: str, name: str) -> int:
        """When a shard was replaced, in microseconds since the epoch; -1 if it never was."""
        return max((record.at for record in self._by_old.get((stream, name), ())), default=-1)

    def by(self, stream: str, name: str, is_there: Callable[[str, str], bool]) -> MadeShard | None:
        """The record of the shard that has a replaced shard's rows now; None if there is none.

        That one may have been replaced in turn, also by no shard, if no row was left.
        `is_there(stream, name)`: whether a shard exists.
        """
        waiting = [name]
        while waiting:
            for record in self._by_old.get((stream, waiting.pop()), ()):
                if not record.new or is_there(stream, record.new):
                    return record
                waiting.append(record.new)
        return None

    def removed(self, is_there: Callable[[str, str], bool]) -> Iterator[tuple[MadeShard, RangeSet]]:
        """The removals that have come into effect, with their ordinals.

        A record whose shard never got its name means nothing: nothing replaced it either.
        """
        for record in self.removals:
            new = record.new
            if not new or is_there(record.stream, new) or self.by(record.stream, new, is_there):
                yield record, RangeSet(record.removed)


def given_ordinals(root: Root, collector_id: str) -> dict[str, int]:
    """Stream -> the ordinal after the highest one of this collector in a shard, or removed."""
    objects = objects_at(root)
    found = next_ordinals(objects.under("shards"), collector_id)
    for record in Replacements.of(objects).removals:
        if record.stream.startswith(f"{collector_id}-"):
            found[record.stream] = max(found.get(record.stream, 0), record.removed[-1][1] + 1)
    return found


def replaced_shards(root: Root) -> list[str]:
    """The names of all replaced shards that are still there."""
    shards = objects_at(root).under("shards")
    found = (name for stream in streams(shards) for name in shards.names(f"{stream}/"))
    return [name for name in found if name.endswith(REPLACED)]


def traces(root: Root) -> list[str]:
    """Names that change with everything that maintenance does to shards."""
    return [*replaced_shards(root), *_names(objects_at(root))]


def _names(root: Objects) -> Iterator[str]:
    """The names of all records."""
    for plan in root.names(f"{FOLDER}/"):
        for stream in root.names(plan) if plan.endswith("/") else ():
            yield from root.names(stream) if stream.endswith("/") else ()
