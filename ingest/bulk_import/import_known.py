"""What a keyed import finds of the requests before it with its key.

An episode that is known was taken to its end, and is skipped; or it was broken or abandoned, and is
named as refused each time; or it is still open: one that goes in pieces, whose request was killed.
With that one the import goes on, event by event.
"""

from __future__ import annotations

from typing import Protocol

from ingest.bulk_import.import_reply import ImportReply
from ingest.episodes.assembler import EpisodeAssembler
from ingest.protocol.errors import Refusal
from storage.experience.range_set import RangeSet


class Outline(Protocol):
    """The episodes of an import by their number, which are behind each other in its rows."""

    @property
    def count(self) -> int: ...

    def bounds(self, number: int) -> tuple[int, int]:
        """The rows [begin, end) of an episode."""

    def name(self, number: int) -> str:
        """Its id."""

    def long(self) -> list[int]:
        """The numbers of those that go in pieces where rows are looked at one by one."""


def events_of(found: Outline, numbers: RangeSet) -> int:
    """How many events the episodes of these numbers have: a start, the steps, an end each."""
    total = 0
    for first, last in numbers.ranges():
        last = min(last, found.count - 1)
        if first <= last:
            rows = found.bounds(last)[1] - found.bounds(first)[0]
            total += rows + 2 * (last - first + 1)
    return total


def still_open(found: Outline, instance: str | None, assembler: EpisodeAssembler) -> RangeSet:
    """The numbers of the episodes that a request before has begun and not ended."""
    known = None if instance is None else assembler.instances.get(instance)
    numbers = RangeSet()
    if known is None or not known.open:
        return numbers
    for number in found.long():
        episode = assembler.episodes.get(found.name(number))
        if episode is not None:
            started = episode.started
            if (started.instance, started.start) == (instance, number):
                numbers.add(number)
    return numbers


def tell_torn(
    found: Outline,
    instance: str | None,
    known: RangeSet,
    assembler: EpisodeAssembler,
    reply: ImportReply,
) -> None:
    """Name the known episodes that were not taken whole: duplicates to the reply until now."""
    before = None if instance is None else assembler.instances.get(instance)
    if before is None:
        return
    for number in before.torn:
        if number >= found.count:
            break
        if number not in known:  # until just now, when this request was to go on with it
            continue
        begin, end = found.bounds(number)
        reply.take(0, -(end - begin + 2))
        reply.refused += end - begin + 2
        refusal = _refusal(found.name(number), (instance, number), assembler)
        reply.refuse(begin, refusal.to_json(), f"$.eps_id[{begin}]")


def _refusal(name: str, begun: tuple[str | None, int], assembler: EpisodeAssembler) -> Refusal:
    """Why the episode with that (instance, start) was not taken whole, as far as that is known."""
    over = assembler.finished.get(name)
    if over is not None and (over.instance, over.start) == begun:
        return over.refusal()
    text = f"Episode {name} was not taken whole: it was broken or abandoned"
    return Refusal("broken", text, episode_id=name)
