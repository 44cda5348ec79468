"""Client instances: who started which episodes, so that a late retry is refused and never doubled.

An instance is one run of a client, or one import (with a name, so that it may resume). A name is
its token's: under another token it is another instance's. An instance numbers its starts; the
numbers it used are kept for the instances that were active last, bounded by a count. A start from
a forgotten instance can therefore be told from a new one: it is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from ingest.episodes.journal_events import Opened, Receipt
from ingest.protocol.agent_names import Name
from ingest.protocol.errors import Refusal
from storage.experience.range_set import RangeSet

IMPORT = "bulk:"
"""Begins the name of a keyed import's instance, and no name that a client chooses."""

MOST_RANGES, MOST_NAMED_RANGES = 1_000, 100_000
"""So many ranges may the start numbers of an instance make: all are written down again after each
start. A named one has more: an import leaves out the numbers of what it cannot send."""


class Instance(msgspec.Struct):
    """A client instance and the numbers of the episodes that it has started.

    `names` has the episodes of these that are known: the open, and the latest ended.
    `receipt` is what the key of a bulk import stands for.
    """

    number: int
    name: str | None = None
    starts: RangeSet = msgspec.field(default_factory=RangeSet)
    names: dict[int, Name] = msgspec.field(default_factory=dict)
    open: int = 0  # its episodes that are open now
    owner: str = ""  # the id of the token whose name it is
    receipt: Receipt | None = None


class Instances:
    """The instances that are known, the one that was active longest ago first."""

    def __init__(self) -> None:
        self.next_number = 0
        self.touched: set[str] = set()  # changed since they were last written down
        self._known: OrderedDict[str, Instance] = OrderedDict()
        self._imports: dict[tuple[str, str], str] = {}  # (owner, name) -> id

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def get(self, instance: str) -> Instance | None:
        return self._known.get(instance)

    def named(self, name: str | None, owner: str) -> str | None:
        """The id of the owner's import of that name, if it was here before."""
        return None if name is None else self._imports.get((owner, name))

    def are_imports(self, *instances: str) -> bool:
        """Whether all of them are one owner's imports, of which each takes a part of an episode."""
        known = [self._known.get(instance) for instance in instances]
        names = {one.owner for one in known if one and one.name and one.name.startswith(IMPORT)}
        return len(names) == 1 and all(one and one.name for one in known)

    def starts_of(self, instance: str) -> list[tuple[int, int]]:
        """The numbers of the starts that are known of an instance, as ranges."""
        known = self._known.get(instance)
        return [] if known is None else known.starts.ranges()

    def receipt(self, receipt: Receipt) -> None:
        """Note what an import's key stands for. An earlier receipt, replayed, changes nothing."""
        known = self._known.get(receipt.instance)
        if known is not None and (known.receipt is None or receipt.rows > known.receipt.rows):
            known.receipt = receipt
            self.touched.add(receipt.instance)

    def add(self, opened: Opened) -> None:
        """Note a registered instance."""
        self.next_number = max(self.next_number, opened.number + 1)
        if opened.instance not in self._known:
            self.restore(opened.instance, Instance(opened.number, opened.name, owner=opened.owner))
        self.touched.add(opened.instance)

    def restore(self, instance: str, known: Instance) -> None:
        """Take up an instance as it was written down."""
        self._known[instance] = known
        if known.name is not None:
            self._imports[known.owner, known.name] = instance

    def started(self, instance: str, start: int) -> None:
        """Note a start. Replaying one of an instance that was forgotten since changes nothing."""
        known = self._known.get(instance)
        if known is None:
            return
        known.starts.add(start)
        self._known.move_to_end(instance)
        self.touched.add(instance)

    def knows(self, instance: str, start: int, name: Name) -> None:
        """Note what a start began, for as long as it is known."""
        known = self._known.get(instance)
        if known is not None:
            known.names[start] = name

    def unknow(self, instance: str, start: int) -> None:
        """Note that the episode of a start is not known any more."""
        known = self._known.get(instance)
        if known is not None:
            known.names.pop(start, None)

    def count_open(self, instance: str, change: int) -> None:
        """Count an episode of the instance that is open from now on (+1), or no longer (-1)."""
        known = self._known.get(instance)
        if known is not None:
            known.open += change

    def forget(self, clients: int, imports: int) -> list[str]:
        """Drop the least active beyond so many clients and imports; answers their ids.

        One with an open episode stays.
        """
        dropped: list[str] = []
        excess = {
            True: len(self._imports) - imports,
            False: len(self._known) - len(self._imports) - clients,
        }
        if max(excess.values()) <= 0:
            return dropped
        for instance, known in self._known.items():
            named = known.name is not None
            if excess[named] > 0 and not known.open:
                excess[named] -= 1
                dropped.append(instance)
        for instance in dropped:
            gone = self._known.pop(instance)
            self.touched.discard(instance)
            if gone.name is not None:
                del self._imports[gone.owner, gone.name]
        return dropped


def require_range(instance: str, known: Instance, start: int, episode_id: str) -> None:
    """Raise Refusal for a new start number that would make one range too many.

    A client goes on under a new instance. An import has its name, and would find the same again.
    """
    most = MOST_RANGES if known.name is None else MOST_NAMED_RANGES
    if known.starts.pieces < most or known.starts.touching(start, start):
        return
    text = (
        f"client instance {instance!r}: expected a start number beside those that it has used, in "
        f"{most} ranges with gaps between them, such as {(known.starts.last or 0) + 1}, got {start}"
    )
    if known.name is None:
        raise Refusal("unknown_instance", f"{text}: register a new one", "start", episode_id)
    raise Refusal("gap", text, "start", episode_id)
