"""Plans of maintenance and their application.

    plan = plan_compaction(root, recorded)    # what would happen
    digest = save(root, plan)                 # maintenance/{digest}/plan.json
    apply(root, load(root, digest), by="me", why="one million small files")

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
from storage.maintenance.merging import merge
from storage.objects.folder import FolderObjects
from storage.objects.interface import Objects
from storage.objects.opening import Root, objects_at
from storage.reading.position import Position
from storage.shards.names import MAX_SHARD, ShardName, remove_leftovers
from storage.shards.replacements import FOLDER, REPLACED, MadeShard, Replacements
from storage.system.formats import require_format
from storage.verify.audit import OnProgress, no_progress

__all__ = [
    "Applied",
    "Delete",
    "MaintenancePlan",
    "Merge",
    "apply",
    "load",
    "save",
]

FORMAT_VERSION = 1
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


class MaintenancePlan(msgspec.Struct, frozen=True):
    """What a command would do. Plans with equal steps have equal digests."""

    command: str
    steps: tuple[Merge | Delete, ...]
    format: int = FORMAT_VERSION

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:_DIGITS]


@dataclass
class Applied:
    """What an application has done; less than the plan says if it was applied before."""

    made: list[MadeShard] = field(default_factory=list)
    deleted: int = 0
    left: dict[str, str] = field(default_factory=dict)  # shard -> why it was left as it was


_decode = msgspec.json.Decoder(MaintenancePlan).decode
_decode_object = msgspec.json.Decoder(dict).decode


def save(root: Root, plan: MaintenancePlan) -> str:
    """Write a plan to `maintenance/`, and return its digest."""
    objects_at(root).replace(_place(plan.digest), msgspec.json.encode(plan))
    return plan.digest


def load(root: Root, digest: str) -> MaintenancePlan:
    """Read a plan. Raises ValueError, NewerFormat."""
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
            for name in step.shards if isinstance(step, Merge) else ():
                known = self._is_there(step.stream, name) or self._successor(step.stream, name)
                if not known:
                    place = f"{self._shards}/{step.stream}/{name}"
                    raise ValueError(f"plan {self._plan.digest} is stale: {place} is gone")

    def clean(self) -> None:
        """Remove the incomplete files of an application that was killed."""
        if isinstance(self._root, FolderObjects):
            for owner in sorted({step.stream.rpartition("-")[0] for step in self._plan.steps}):
                remove_leftovers(self._root.root / "shards", owner, own=False)

    def run(self, step: Merge | Delete) -> None:
        if isinstance(step, Delete):
            self._delete(step)
            return
        left = []
        for name in map(_parsed, step.shards):
            if self._successor(step.stream, str(name)):  # an application before was ended here
                self._set_aside(step.stream, str(name))
            else:
                left.append(name)
        while len(left) > 1:
            left = left[self._merge(step.stream, left) :]
        self._shards.settle(f"{step.stream}/{step.shards[0]}")

    def _merge(self, stream: str, names: Sequence[ShardName]) -> int:
        """Merge the first shards that fit into one; return how many are done with."""
        found = merge(self._shards, stream, names, self.applied.left)
        if found is None:
            return 1
        record = MadeShard(
            command=self._plan.command,
            plan=self._plan.digest,
            at=int(self._clock() * 1_000_000),
            by=self._by,
            why=self._why,
            stream=stream,
            new=str(found.name),
            old=tuple(map(str, found.old)),
            ordinals=found.metadata.ranges,
            rows=found.metadata.rows,
        )
        self._root.replace(record.place, msgspec.json.encode(record))
        self._replacements.add(record)
        self._shards.replace(f"{stream}/{found.name}", found.path)
        for name in record.old:
            self._set_aside(stream, name)
        self.applied.made.append(record)
        return len(record.old)

    def _set_aside(self, stream: str, name: str) -> None:
        """Give a replaced shard its suffix. This need not be durable, because of the record."""
        place = f"{stream}/{name}"
        if isinstance(self._shards, FolderObjects):
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
