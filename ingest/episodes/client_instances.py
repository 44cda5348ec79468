"""Client instances: which client started which episodes, so that late retries start none twice.

An instance is one run of a client, or one import, which has a name so that it can resume. Names
belong to a token: the same name under another token is another instance. An instance numbers its
starts. The used numbers are kept for the most recently active instances, up to a limit. A start
from a forgotten instance is refused, because it could be a retry.
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
"""The prefix of the instance name of a keyed import; clients cannot choose such names."""

MOST_RANGES, MOST_NAMED_RANGES = 1_000, 100_000
"""The most ranges that an instance's start numbers may form, as all are stored after each start.

Named instances may have more, because an import skips the numbers of invalid episodes.
"""


class Instance(msgspec.Struct):
    """A client instance and the numbers of the episodes that it has started.

    `names` maps these numbers to the known episodes: open ones, and those that ended last.
    `receipt` is the content that the key of a bulk import stands for.
    """

    number: int
    name: str | None = None
    starts: RangeSet = msgspec.field(default_factory=RangeSet)
    names: dict[int, Name] = msgspec.field(default_factory=dict)
    open: int = 0  # the number of its open episodes
    owner: str = ""  # the id of the token that it belongs to
    receipt: Receipt | None = None


class Instances:
    """The known instances, the least recently active first."""

    def __init__(self) -> None:
        self.next_number = 0
        self.touched: set[str] = set()  # changed since they were last stored
        self._known: OrderedDict[str, Instance] = OrderedDict()
        self._imports: dict[tuple[str, str], str] = {}  # (owner, name) -> id

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def get(self, instance: str) -> Instance | None:
        return self._known.get(instance)

    def named(self, name: str | None, owner: str) -> str | None:
        """The id of the owner's import of that name, if it is known."""
        return None if name is None else self._imports.get((owner, name))

    def are_imports(self, *instances: str) -> bool:
        """Whether all are imports of one owner, so that each may bring tracks of an episode."""
        known = [self._known.get(instance) for instance in instances]
        names = {one.owner for one in known if one and one.name and one.name.startswith(IMPORT)}
        return len(names) == 1 and all(one and one.name for one in known)

    def starts_of(self, instance: str) -> list[tuple[int, int]]:
        """The known start numbers of an instance, as ranges."""
        known = self._known.get(instance)
        return [] if known is None else known.starts.ranges()

    def receipt(self, receipt: Receipt) -> None:
        """Note the content that an import's key stands for, unless it has been noted before."""
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
        """Restore an instance from its stored form."""
        self._known[instance] = known
        if known.name is not None:
            self._imports[known.owner, known.name] = instance

    def started(self, instance: str, start: int) -> None:
        """Note a start; replaying one of an instance that has been forgotten has no effect."""
        known = self._known.get(instance)
        if known is None:
            return
        known.starts.add(start)
        self._known.move_to_end(instance)
        self.touched.add(instance)

    def started_all(self, instance: str, starts: RangeSet) -> None:
        """Note several starts, as `started` does."""
        known = self._known.get(instance)
        if known is not None:
            known.starts.update(starts)
            self._known.move_to_end(instance)
            self.touched.add(instance)

    def knows(self, instance: str, start: int, name: Name) -> None:
        """Note which episode a start began."""
        known = self._known.get(instance)
        if known is not None:
            known.names[start] = name

    def unknow(self, instance: str, start: int) -> None:
        """Forget the episode of a start."""
        known = self._known.get(instance)
        if known is not None:
            known.names.pop(start, None)

    def count_open(self, instance: str, change: int) -> None:
        """Change the number of the instance's open episodes by `change` (+1 or -1)."""
        known = self._known.get(instance)
        if known is not None:
            known.open += change

    def forget(self, clients: int, imports: int) -> list[str]:
        """Drop the least active clients and imports above these counts; return their ids.

        Instances with open episodes are kept.
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
    """Raise Refusal for a new start number that would form one range too many.

    A client then continues under a new instance. An import cannot, because its name leads to the
    same instance again.
    """
    most = MOST_RANGES if known.name is None else MOST_NAMED_RANGES
    if known.starts.pieces < most or known.starts.touching(start, start):
        return
    text = (
        f"client instance {instance!r}: its start numbers form {most} ranges with gaps; expected "
        f"one next to a used one, such as {(known.starts.last or 0) + 1}, got {start}"
    )
    if known.name is None:
        raise Refusal("unknown_instance", f"{text}: register a new one", "start", episode_id)
    raise Refusal("gap", text, "start", episode_id)
