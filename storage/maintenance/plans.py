"""Plans of maintenance and their application.

    plan = plan_compaction(root, recorded)    # what would happen
    digest = save(root, plan)                 # maintenance/{digest}/plan.json
    apply(root, load(root, digest, "compact"), by="me", why="one million small files")

A plan names the files that it changes, so it stays valid beside a collector that writes new ones.
Each step of its application can be repeated: after a kill, applying the plan again finishes it.
For every new shard the record is written first, then the shard gets its name, then the old ones get
the suffix `.replaced`. So readers find each row in at least one place at any time, and count it
once by its ordinal; `verify` knows from the record which of two files counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from storage.errors import ObjectNotFound
from storage.experience.interfaces import ReaderError
from storage.experience.range_set import RangeSet
from storage.maintenance.merging import MergedShard, merge, reduce
from storage.objects.folder import FolderObjects
from storage.objects.interface import Objects
from storage.objects.opening import Root, objects_at
from storage.objects.ranged import RangedFile
from storage.reading.position import Position
from storage.shards.names import (
    MAX_SHARD,
    ShardDamaged,
    ShardName,
    remove_leftovers,
    shard_names,
    streams,
)
from storage.shards.replacements import FOLDER, REPLACED, MadeShard, Replacements
from storage.shards.shard import shard_metadata
from storage.system.formats import require_format
from storage.verify.audit import OnProgress, no_progress
from storage.verify.quarantine import SUFFIX
from storage.verify.shard_check import check_shard

FORMAT_VERSION = 1
NONE = RangeSet()
_DIGITS = 16


class Merge(msgspec.Struct, frozen=True, tag="merge"):
    """Shards of one stream with adjacent ordinals that become one, or few if one is too large."""

    stream: str
    shards: tuple[str, ...]
    rows: int
    nbytes: int


class Delete(msgspec.Struct, frozen=True, tag="delete"):
    """Replaced shards of one stream whose grace period is over, by their former names."""

    stream: str
    shards: tuple[str, ...]


class Remove(msgspec.Struct, frozen=True, tag="remove"):
    """Parts of one shard that are removed, as ranges of ordinals, and the rows that they have."""

    stream: str
    shard: str
    ordinals: tuple[tuple[int, int], ...]
    rows: int
    of_rows: int  # all rows of the shard


class Discard(msgspec.Struct, frozen=True, tag="discard"):
    """A file that is deleted whole: a replaced shard, or one in quarantine, with rows to erase.

    `rows`: those that `verify` counts for it, 0 if another shard has them.
    """

    stream: str
    shard: str
    place: str
    rows: int


class MaintenancePlan(msgspec.Struct, frozen=True):
    """What a command would do. Plans with equal content have equal digests.

    `tombstones`: keyed hashes of what is erased.
    """

    command: str
    steps: tuple[Merge | Delete | Remove | Discard, ...]
    format: int = FORMAT_VERSION
    tombstones: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:_DIGITS]


@dataclass
class Applied:
    """What an application has done; less than the plan says if it was applied before."""

    made: list[MadeShard] = field(default_factory=list)
    deleted: int = 0
    removed: int = 0  # rows
    left: dict[str, str] = field(default_factory=dict)  # shard -> why it was left as it was


_decode = msgspec.json.Decoder(MaintenancePlan).decode
_decode_object = msgspec.json.Decoder(dict).decode


def save(root: Root, plan: MaintenancePlan) -> str:
    """Write a plan to `maintenance/`, and return its digest."""
    objects_at(root).replace(_place(plan.digest), msgspec.json.encode(plan))
    return plan.digest


def load(root: Root, digest: str, command: str) -> MaintenancePlan:
    """Read a plan of a command. Raises ValueError, also for another's, and NewerFormat."""
    objects = objects_at(root)
    try:
        data = objects.read(_place(digest))
        document = _decode_object(data)
        require_format(document, FORMAT_VERSION, f"{objects}/{_place(digest)}")
        plan = _decode(data)
    except (ObjectNotFound, msgspec.MsgspecError) as error:
        raise ValueError(
            f"{objects}: expected the digest of a plan that was made here, got {digest!r:.80}"
        ) from error
    if plan.digest != digest:
        raise ValueError(f"{objects}/{_place(digest)}: expected plan {digest}, got {plan.digest}")
    if plan.command != command:
        raise ValueError(f"plan {digest}: expected one of {command}, got one of {plan.command}")
    return plan


def _place(digest: str) -> str:
    if len(digest) != _DIGITS or not digest.isalnum():
        raise ValueError(f"plan: expected {_DIGITS} hexadecimal digits, got {digest!r:.80}")
    return f"{FOLDER}/{digest}/plan.json"


def apply(
    root: Root,
    plan: MaintenancePlan,
    *,
    by: str,
    why: str,
    clock: Callable[[], float] = time.time,
    on_progress: OnProgress = no_progress,
) -> Applied:
    """Apply a plan, or finish its application. Excludes other applications to the root.

    Raises ValueError if the plan is stale, BlockingIOError while another one is applied, and the
    errors of the store.
    """
    objects = objects_at(root)
    with objects.exclusive(f"{FOLDER}/lock"):
        work = _Application(objects, plan, by, why, clock)
        work.check()
        work.clean()
        for done, step in enumerate(plan.steps, 1):
            work.run(step)
            on_progress(f"applying {plan.command}", done, len(plan.steps))
    return work.applied


class _Application:
    """One run of a plan, under the lock."""

    def __init__(
        self, root: Objects, plan: MaintenancePlan, by: str, why: str, clock: Callable[[], float]
    ) -> None:
        self._root, self._shards, self._plan = root, root.under("shards"), plan
        self._by, self._why, self._clock = by, why, clock
        self._replacements = Replacements.of(root)
        self.applied = Applied()

    def check(self) -> None:
        """Raise ValueError if a shard of the plan is gone and was not replaced."""
        for step in self._plan.steps:
            names = step.shards if isinstance(step, Merge) else ()
            for name in (step.shard,) if isinstance(step, Remove) else names:
                known = self._is_there(step.stream, name) or self._successor(step.stream, name)
                if not known:
                    place = f"{self._shards}/{step.stream}/{name}"
                    raise ValueError(f"plan {self._plan.digest} is stale: {place} is gone")

    def clean(self) -> None:
        """Finish what applications that were killed have left, also those of other plans.

        They are incomplete files, and replaced shards that still have their names.
        """
        if isinstance(self._root, FolderObjects):
            for owner in sorted({step.stream.rpartition("-")[0] for step in self._plan.steps}):
                remove_leftovers(self._root.root / "shards", owner, own=False)
        for stream in streams(self._shards):
            for name in map(str, shard_names(self._shards, stream)):
                if (record := self._successor(stream, name)) is not None:
                    self._set_aside(stream, name, record.command)

    def run(self, step: Merge | Delete | Remove | Discard) -> None:
        if isinstance(step, Delete):
            self._delete(step)
        elif isinstance(step, Remove):
            self._remove(step)
        elif isinstance(step, Discard):
            self._discard(step)
        else:
            self._join(step)

    def _join(self, step: Merge) -> None:
        # an application before may have been ended here
        names = (name for name in step.shards if not self._successor(step.stream, name))
        left = [*map(_parsed, names)]
        while len(left) > 1:
            left = left[self._merge(step.stream, left) :]
        self._shards.settle(f"{step.stream}/{step.shards[0]}")

    def _merge(self, stream: str, names: Sequence[ShardName]) -> int:
        """Merge the first shards that fit into one; return how many are done with."""
        found = merge(self._shards, stream, names, self.applied.left)
        if found is None:
            return 1
        self._replace(stream, found.old, found)
        return len(found.old)

    def _remove(self, step: Remove) -> None:
        """Remove parts of a shard, wherever compaction or an application before has put them."""
        stream, name = step.stream, step.shard
        while (record := self._successor(stream, name)) is not None:
            self._set_aside(stream, name)
            if not (name := record.new):
                return
        place = RangedFile(self._shards, f"{stream}/{name}")
        try:
            known = RangeSet(shard_metadata(place).ranges)
            gone = known.intersection(RangeSet(step.ordinals))
            if not gone:
                return
            if gone == known:
                rows = check_shard(place, _parsed(name)).metadata.rows
                self._replace(stream, [_parsed(name)], None, gone, rows)
                return
        except ShardDamaged as error:
            self.applied.left[f"{stream}/{name}"] = str(error)
            return
        found = reduce(self._shards, stream, _parsed(name), gone, self.applied.left)
        if found is not None:
            rows = shard_metadata(place).rows - found.metadata.rows
            self._replace(stream, found.old, found, gone, rows)

    def _discard(self, step: Discard) -> None:
        """Delete a file whole; its rows, if they count, are recorded as removed before."""
        if step.rows and not self._successor(step.stream, step.shard):
            name = _parsed(step.shard)
            whole = RangeSet([(name.first, name.last)])
            self._replace(step.stream, [name], None, whole, step.rows)
        for place in (step.place, step.place + SUFFIX):
            if self._root.status(place) is not None:
                self._root.delete(place)
                self.applied.deleted += place == step.place

    def _replace(
        self,
        stream: str,
        old: Sequence[ShardName],
        found: MergedShard | None,
        removed: RangeSet = NONE,
        removed_rows: int = 0,
    ) -> None:
        """Put a new shard, or nothing, in the place of old ones; the record is written before."""
        record = MadeShard(
            command=self._plan.command,
            plan=self._plan.digest,
            at=int(self._clock() * 1_000_000),
            by=self._by,
            why=self._why,
            stream=stream,
            new="" if found is None else str(found.name),
            old=tuple(map(str, old)),
            ordinals=() if found is None else found.metadata.ranges,
            rows=0 if found is None else found.metadata.rows,
            removed=tuple(removed.ranges()),
            removed_rows=removed_rows,
        )
        self._root.replace(record.place, msgspec.json.encode(record))
        self._replacements.add(record)
        self.applied.made.append(record)
        self.applied.removed += removed_rows
        if found is not None:
            self._shards.replace(f"{stream}/{found.name}", found.path)
        for name in old:
            self._set_aside(stream, str(name))

    def _set_aside(self, stream: str, name: str, command: str = "") -> None:
        """Give a replaced shard its suffix. This need not be durable, because of the record.

        An erased one is deleted: nobody can be asked to wait for that. `command`: what replaced
        it, by default this plan's.
        """
        place = f"{stream}/{name}"
        if (command or self._plan.command) == "erase":
            for one in (place, place + REPLACED):
                if self._shards.status(one) is not None:
                    self._shards.delete(one)
                    self.applied.deleted += 1
        elif isinstance(self._shards, FolderObjects):
            with contextlib.suppress(FileNotFoundError):
                os.rename(self._shards.root / place, self._shards.root / (place + REPLACED))
        elif self._is_there(stream, name):
            self._shards.replace(place + REPLACED, self._shards.read(place, limit=MAX_SHARD))
            self._shards.delete(place)

    def _delete(self, step: Delete) -> None:
        why = "a reader that was saved in readers/ holds rows of it"
        try:
            held = _held_ordinals(self._root, step.stream)
        except (ReaderError, msgspec.MsgspecError) as error:
            held, why = RangeSet([(0, 2**63 - 1)]), f"readers/: {error}"
        for name in step.shards:
            place, shard = f"{step.stream}/{name}{REPLACED}", _parsed(name)
            if not self._successor(step.stream, name):
                self.applied.left[place] = "no shard has its rows"
            elif held.intersection(RangeSet([(shard.first, shard.last)])):
                self.applied.left[place] = why
            elif self._shards.status(place) is not None:
                self._shards.delete(place)
                self.applied.deleted += 1

    def _successor(self, stream: str, name: str) -> MadeShard | None:
        return self._replacements.by(stream, name, self._is_there)

    def _is_there(self, stream: str, name: str) -> bool:
        return self._shards.status(f"{stream}/{name}") is not None


def _held_ordinals(root: Objects, stream: str) -> RangeSet:
    """The ordinals of rows that saved readers (`readers/`) have taken and not delivered.

    Raises ReaderError or MsgspecError for a position that cannot be read.
    """
    held = RangeSet()
    for name in root.names("readers/"):
        if name.endswith(".json"):
            pending = Position.from_json(msgspec.json.decode(root.read(name))).pending()
            held.update(pending.streams().get(stream, RangeSet()).ranges())
    return held


def _parsed(name: str) -> ShardName:
    found = ShardName.parse(name)
    if found is None:
        raise ValueError(f"plan: expected names of shards, got {name!r:.80}")
    return found
