"""A client's pending events in order: which of them wait, were sent, or are judged.

An event is *pending* from when it is added until the collector has judged it. It waits in the
queue, is in the batch in flight, or is *pulled*: sent with a `get_action` of its own episode.
Queued events have consecutive indices; an event whose index is below `fixed` has been sent, so its
content is fixed.

Start numbers are assigned here, because they belong to the current instance. An episode that was
started under another instance is a *stray*.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from ingest.delivery.events import weight
from ingest.protocol.agent_names import Name, name_of
from ingest.protocol.errors import ClientError
from ingest.protocol.messages import End, Event, Start


class EventQueue:
    """The state of an Outbox, which changes it only with its lock held.

    Nothing here waits. Another call may run inside each of these calls (see
    `ingest.delivery.outbox`). So an index is read before its event is added: it may be too low but
    never too high; and an augmented assignment has no call on its right, because what an inner call
    adds meanwhile would be lost. `closed`: no new events are accepted.
    """

    def __init__(self, *, closed: bool = False) -> None:
        self.closed = closed
        self.instance: str | None = None
        self.events: list[Event | None] = []  # None: pulled
        self.flight: list[Event] = []  # the events in flight that are not judged yet
        self.pending = 0
        self.nbytes = 0  # of the pending events, by `weight`
        self.requeues = 0  # how often events came into the queue that are not new
        self.fixed = 0  # events below this index have been sent: their content is fixed
        self.strays: dict[Name, str] = {}  # episode -> its instance, if that is another one
        self._taken = 0  # the index of events[0]
        self._done = 0  # events below this index have been judged or wait to be sent again
        self._pulls: dict[int, int] = {}  # ticket -> the first index it took
        self._next_pull = 0
        self.next_start = 0
        self._marks: deque[tuple[int, float]] = deque()  # from an index on: queued since

    @property
    def first(self) -> int:
        """The index of the first queued event."""
        return self._taken

    @property
    def end(self) -> int:
        """The index of the next event."""
        return self._taken + len(self.events)

    def part(self, index: int, count: int) -> list[Event | None]:
        """At most `count` queued events from this index on."""
        at = index - self._taken
        return self.events[at : at + count]

    # --- in ----------------------------------------------------------------------------------

    def add(self, event: Event, size: int) -> int:
        """Add a new event of `weight` size; return its index. Raises ClientError after `close`."""
        events = self.events
        index = self._taken + len(events)
        if self.closed:
            raise ClientError("the client is closed")
        self.pending += 1
        self.nbytes += size
        events.append(event)
        if len(events) == 1:
            self._marks.append((self._taken, time.monotonic()))
        return index

    def extend(self, events: Sequence[Event], size: int, *, is_new: bool = False) -> int:
        """Add events and number their starts; return the index of the first.

        Raises ClientError for new ones after `close`.
        """
        if not self.events and events:
            self._marks.append((self._taken, time.monotonic()))
        first, count = self._taken + len(self.events), len(events)
        fresh = _unnumbered(events)
        while True:
            owner = self.instance
            for start in fresh:
                self._number(start)
            if owner == self.instance:  # and not renewed by an inner call
                break
        if is_new and self.closed:
            raise ClientError("the client is closed")
        self.pending += count
        self.nbytes += size
        self.events.extend(events)
        return first

    def replace(self, index: int, event: Event, other: End | None) -> None:
        """Put another event, or none, in the place of one."""
        more = (0 if other is None else weight(other)) - weight(event)
        self.events[index - self._taken] = other
        self.nbytes += more
        self.pending -= other is None

    # --- out ---------------------------------------------------------------------------------

    def cut(self, count: int) -> list[Event]:
        """Take the events in the first `count` places as the next flight."""
        flight = [event for event in self.events[:count] if event is not None]
        del self.events[:count]
        self._done = self._taken
        self._taken += count
        self.fixed = max(self.fixed, self._taken)
        self._marks.append((self._taken + len(self.events), time.monotonic()))
        while len(self._marks) > 1 and self._marks[1][0] <= self._done:
            self._marks.popleft()
        self.flight = list(flight)
        self.land(())
        return flight

    def land(self, events: Collection[Event]) -> None:
        """Remove events from the flight; when it is empty, the next batch can be sent."""
        if len(events) == len(self.flight):
            self.flight = []
        elif events:
            landed = set(map(id, events))
            self.flight = [event for event in self.flight if id(event) not in landed]
        if not self.flight:
            self._done = self._taken

    def places(self, ids: Collection[Name], since: int) -> list[int]:
        """Where in `events` those of some episodes are; `since` is a lower bound of their index."""
        found = []
        for place in range(max(0, since - self._taken), len(self.events)):
            event = self.events[place]
            if event is not None and name_of(event) in ids:
                found.append(place)
        return found

    def pull(self, ids: Collection[Name], since: int) -> tuple[int, list[Event]]:
        """Take the queued events of some episodes out; return a ticket, and the events."""
        places = self.places(ids, since)
        events = self._take_from(places)
        self._next_pull += 1
        if events:
            self._pulls[self._next_pull] = self._taken + places[0]
        return self._next_pull, events

    def _take_from(self, places: Sequence[int]) -> list[Event]:
        events = []
        for place in places:
            event = self.events[place]
            if event is not None:
                events.append(event)
            self.events[place] = None
        return events

    # --- judged, or back again ---------------------------------------------------------------

    def judged(self, events: Collection[Event], pull: int | None = None) -> None:
        """Note that the collector has judged these events of the flight or a pull."""
        size, count = sum(map(weight, events)), len(events)
        for event in events if self.strays else ():
            if isinstance(event, End):
                self.strays.pop(name_of(event), None)
        self.nbytes -= size
        self.pending -= count
        if pull is None:
            self.land(events)
        else:
            self._pulls.pop(pull, None)

    def is_judged(self, before: int) -> bool:
        """Whether no event with a lower index is pending."""
        return self._done >= before and all(low >= before for low in self._pulls.values())

    def return_flight(self, events: Sequence[Event]) -> None:
        """Put events at the head of the queue; indices of later events do not change."""
        count = len(events)
        self._taken -= count
        self.events[:0] = events
        self._done = min(self._done, self._taken)

    def return_pulled(self, events: Sequence[Event], pull: int) -> None:
        """Put events of a pull at the end of the queue."""
        self.requeues += 1
        self.events.extend(events)
        self._pulls.pop(pull, None)

    def put_off(self, events: Sequence[Event]) -> None:
        """Put events of the flight, and later ones of their episodes, at the end of the queue."""
        later = self._take_from(self.places(set(map(name_of, events)), 0))
        if events:
            self.requeues += 1
        self.events += [*events, *later]
        self.land(events)

    def readmit(self, events: Sequence[Event]) -> None:
        """Count events as pending again that had left as judged, before they are put back."""
        size, count = sum(map(weight, events)), len(events)
        self.nbytes += size
        self.pending += count
        if count:
            self.requeues += 1

    def put_again(self, events: Sequence[Event]) -> None:
        """Put events that had left as judged at the end of the queue."""
        self.readmit(events)
        self.events.extend(events)

    # --- instances ---------------------------------------------------------------------------

    def owner(self, name: Name) -> str | None:
        """The instance under which an episode was started; None if it is not registered yet."""
        return self.strays.get(name) or self.instance

    def _number(self, start: Start) -> None:
        number = self.next_start
        self.next_start = number + 1
        start.start = number

    def number(self, events: Sequence[Event]) -> Callable[[], None]:
        """Number the starts; return a function that undoes it."""
        before, fresh = self.next_start, _unnumbered(events)
        for start in fresh:
            self._number(start)

        def take_back() -> None:
            self.next_start = before
            for start in fresh:
                start.start = None

        return take_back

    def continued(self, start: Start, owner: str | None) -> None:
        """Note a start that continues an episode under an instance (None: the current one)."""
        self.next_start += owner is None
        if owner is not None:
            self.strays[start.episode_id] = owner

    def renew(
        self,
        dead: str,
        again: Sequence[Event],
        unwritten: Callable[[], Sequence[Event]],
        open_ids: Iterable[Name],
    ) -> bool:
        """As `Outbox.renew`; return whether `dead` was the current instance.

        `unwritten` returns the events that are not on disk yet.
        """
        fresh = [event for event in again if isinstance(event, Start)]
        is_current = self.instance == dead
        if is_current:
            self.instance = None
            self.next_start = 0  # before the next line: an inner call may add starts
            queued = [event for event in self.events if event is not None]
            later = (*queued, *unwritten())
            begins = {name_of(event) for event in later if isinstance(event, Start)}
            for name in (*open_ids, *map(name_of, (*again, *later))):
                if name not in begins:
                    self.strays.setdefault(name, dead)
            fresh += [event for event in queued if isinstance(event, Start)]
        for start in fresh:
            self._number(start)
        for event in again:
            if isinstance(event, Start):
                self.strays.pop(name_of(event), None)
        return is_current

    # --- age ---------------------------------------------------------------------------------

    @property
    def oldest_since(self) -> float | None:
        """About when the oldest pending event was queued (time.monotonic); None without one."""
        if not self.pending:
            return None
        low = min((self._done, *self._pulls.values()))
        since = None
        for index, at in list(self._marks):
            if since is None or index <= low:
                since = at
        return since


def _unnumbered(events: Iterable[Event]) -> list[Start]:
    return [event for event in events if isinstance(event, Start) and event.start is None]
