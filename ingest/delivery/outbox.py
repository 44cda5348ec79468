"""The queue between logging calls and the thread that sends: events in, batches out.

An event is *pending* from when it is added until the collector has judged it. It waits in the
queue, is in the batch in flight, or is *pulled*: sent with a `get_action` of its own episode.
Queued events have consecutive indices; an event whose index is below `fixed` has been sent, so its
content is fixed. Start numbers are assigned here, because they belong to the current instance. An
episode that was started under another instance is a *stray*.

A signal handler, or a finalizer that the garbage collector runs in any thread, may call the client
in the middle of another call. So the lock is reentrant, and another complete call may run inside
every section that holds it. State that must agree is therefore changed by statements without a call
between them, also none on the right of an augmented assignment. An index is read before its event
is added: it may be too low but never too high. Where this is impossible (`_is_solid`), and in the
client's own threads, which would wait for themselves, such an inner call does not wait.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ingest.delivery.batches import BATCH_BYTES, BatchSize, fitting, whole_runs
from ingest.delivery.declarations import Draft
from ingest.delivery.dropped import DroppedEpisodes
from ingest.delivery.events import (
    EVENT_BYTES,
    broken_end,
    is_late,
    merge_infos,
    too_large,
    weight,
)
from ingest.delivery.shared_spool import RETRY_SECONDS, SharedSpool
from ingest.delivery.spool import Spool
from ingest.protocol.agent_names import Name, label_of, name_of
from ingest.protocol.errors import BufferFull, ClientError
from ingest.protocol.messages import Decision, End, Event, LogAction, LogReturns, Start
from storage.wording import counted

_ADVICE = {
    "raise": "; on_full='block' waits for it, 'spool' keeps them on disk, 'drop' drops new episodes"
}
OPEN_SHARE = 0.25
"""With `drop`: the share of the queue that is reserved for episodes that are already open."""

LOOK_SECONDS = 1.0
"""Seconds between checks during a wait, because an inner call may have consumed the wake-up."""

_DRAFTS_AT_ONCE = 64  # encoded before the lock is released, so that callers get their turn

OnFull = Literal["raise", "drop", "block", "spool"]


@dataclass(frozen=True)
class Reward:
    """A reward for the step that was queued at `index`, and the event to queue otherwise."""

    index: int
    step: LogAction | Decision | None
    amount: float
    info: Any
    event: LogReturns


@dataclass(frozen=True)
class Pulled:
    """Events of some episodes, all of one instance, in order, taken ahead of the queue.

    `ticket` is for `judged` or `return_pulled`, which must follow.
    """

    events: list[Event]
    instance: str
    ids: Collection[Name]
    ticket: int


class Outbox:
    """A bounded queue of events. Every method may be called from any thread.

    `max_events` and `max_bytes` bound pending events; `batch` (events) and `size` (bytes) bound a
    batch, `request_bytes` any request. `linger`: seconds that a batch waits for more events when
    nothing is in flight.

    `on_full` is the behaviour of a full queue. "raise" and "block" wait for `max_wait` or `timeout`
    seconds, then raise BufferFull. "drop" drops starting episodes and cuts open ones short, without
    waiting. "spool" writes every event to disk, in `spool`, within `max_wait`, and keeps events
    that do not fit only there.

    `asked` makes the sending thread ask for the collector's declarations before it sends more;
    `drafted` says that drafts in the queue wait for them.
    """

    def __init__(
        self,
        *,
        max_events: int,
        max_bytes: int,
        batch: int,
        on_full: OnFull,
        timeout: float,
        linger: float,
        max_wait: float = 0.01,
        spool: Spool | None = None,
    ) -> None:
        self._files = spool
        self.max_events = max_events
        self.max_bytes = max_bytes
        self.batch = batch
        self.request_bytes = max_bytes
        self.size = BatchSize(min(max_bytes, BATCH_BYTES))
        self.on_full = on_full
        self.patience = timeout if on_full == "block" else max_wait
        self.linger = linger
        self.closed = False  # no new events are accepted
        self.reset()

    def reset(self) -> None:
        """Empty the queue and renew the locks, also in a forked child."""
        self.lock = threading.RLock()
        self._is_solid = False  # a section is running during which no inner call may wait
        self.own_threads: set[int] = set()  # that must not wait
        self._filled = threading.Condition(self.lock)
        self.changed = threading.Condition(self.lock)
        self.instance: str | None = None  # of new episodes; None: not registered yet
        self.events: list[Event | None] = []  # the queue; None: pulled
        self.flight: list[Event] = []  # the events in flight that are not judged yet
        self.pending = 0  # events in memory that are not judged
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
        self.dropped = DroppedEpisodes(self.lock)
        self._wake_at = sys.maxsize
        self._urgent = 0
        self._lingering = False  # a batch waits for more events
        self._hurried = False  # it must not wait any longer
        self.asked = False
        self.drafted = False
        self._draft_end = 0  # the index after the last draft
        self.has_cut = False  # an open episode was cut short
        self.owed = False  # dropped steps are to be reported, if need be without events
        self.spool: SharedSpool | None = None
        if self._files is not None:
            self._files.close(forked=True)
            self.spool = SharedSpool(self._files, self)
        self.trouble: Exception | None = None  # why the collector accepts nothing

    def bound(self, max_events: int, max_body: int | None) -> None:
        """Set the collector's limits of a request."""
        self.batch = min(self.batch, max_events)
        if max_body is not None:
            self.request_bytes = min(self.max_bytes, max_body * 9 // 10)
            self.size.bound(self.request_bytes)

    # --- in ----------------------------------------------------------------------------------

    def put(self, event: Event, size: int, *, draft: bool = False) -> int:
        """Queue one event of `weight` size; return its index, -1 if it was dropped.

        `draft`: it has values that are drafts. Raises BufferFull if it could not be queued.
        """
        with self.lock:
            if self.dropped.names and event.episode_id in self.dropped.names:
                self.dropped.count([event])
                return -1
            if self.spool is not None:
                return self.spool.put([event], size)[0]
            if self.pending >= self.max_events or self.nbytes + size > self.max_bytes:
                if self.on_full != "drop":
                    self._wait_for_room(1, size)
                elif self._lacks_room([event], size):
                    self._drop([event])
                    return -1
            events = self.events
            index = self._taken + len(events)
            if self.closed:
                raise ClientError("the client is closed")
            self.pending += 1
            self.nbytes += size
            events.append(event)
            if len(events) == 1:
                self._marks.append((self._taken, time.monotonic()))
            if draft:
                self._note_draft()
            if len(events) >= self._wake_at:
                self._wake_at = sys.maxsize
                self._filled.notify()
            return index

    def hurry(self) -> None:
        """Send a batch without waiting for more events, because an episode has ended."""
        self._hurried = True
        if self._lingering:
            with self.lock:
                self._filled.notify()

    def put_all(self, events: Sequence[Event]) -> Sequence[int]:
        """Queue events together; return their indices, -1 for those that were dropped.

        Each Start gets its number here. Raises BufferFull, with none queued.
        """
        with self.lock:
            kept = events
            if dropped := self.dropped.names:
                kept = [event for event in events if event.episode_id not in dropped]
                self.dropped.count([event for event in events if event.episode_id in dropped])
            size = sum(map(weight, kept))
            if self.spool is not None:
                indices = self.spool.put(kept, size) if kept else ()
                if len(kept) == len(events):
                    return indices
                spooled = dict(zip(map(id, kept), indices, strict=True))
                return [spooled.get(id(event), -1) for event in events]
            if self.on_full == "drop":
                if self._lacks_room(kept, size):
                    self._drop(kept)
                    kept = []
            else:
                self._wait_for_room(len(kept), size)
            first = self._extend(kept, size, is_new=True)
            if len(kept) == len(events):
                return range(first, first + len(kept))
            places = {id(event): place for place, event in enumerate(kept, first)}
            return [places.get(id(event), -1) for event in events]

    def _extend(self, events: Sequence[Event], size: int, *, is_new: bool = False) -> int:
        """Add events and number their starts; return the index of the first. With the lock held.

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
        if any(map(_drafts_of, events)):
            self._note_draft()
        if len(self.events) >= self._wake_at:
            self._wake_at = sys.maxsize
            self._filled.notify()
        return first

    def enter_spooled(self, events: Sequence[Event], size: int, left: bool) -> Sequence[int]:
        """Queue events that are on disk, unless they stay only there. With the lock held."""
        if not left:
            first = self._extend(events, size)
            return range(first, first + len(events))
        self._filled.notify()
        return [-1] * len(events)

    def _note_draft(self) -> None:
        self._draft_end = self.end
        self.drafted = self.asked = True

    def ask(self) -> None:
        """Have the sending thread ask for the collector's declarations."""
        with self.lock:
            self.asked = True
            self._filled.notify()

    def _wait_for_room(self, count: int, size: int) -> None:
        """With the lock held."""
        if self.has_room(count, size):
            return
        if not self._await(lambda: self.has_room(count, size), self.patience):
            raise self.full()

    def full(self) -> BufferFull:
        """The error of a full queue."""
        why = f", which refuses them: {self.trouble}" if self.trouble else ""
        size, most = (
            f"{self.nbytes} bytes",
            f"{counted(self.max_events, 'event')} and {self.max_bytes} bytes",
        )
        if self.spool is not None:
            files = self.spool.files
            taken = 0 if files.own is None else files.own.nbytes
            size = f"{taken} bytes on disk"
            most = f"{files.max_bytes} bytes on disk, in {files.directory}"
        error = BufferFull(
            f"{counted(self.waiting, 'event')} ({size}) waiting for the collector{why}; the "
            f"client holds at most {most}{_ADVICE.get(self.on_full, '')}"
        )
        error.__cause__ = self.trouble
        return error

    def has_room(self, count: int, size: int, share: float = 1.0) -> bool:
        """An event that alone is over `max_bytes` may pass an empty queue."""
        fits = (
            self.pending + count <= self.max_events * share
            and self.nbytes + size <= self.max_bytes * share
        )
        return fits or self.pending == 0 or self.closed

    # --- dropped -----------------------------------------------------------------------------

    def _lacks_room(self, events: Sequence[Event], size: int) -> bool:
        """Whether events must be dropped: starts before the queue is full, and ends never."""
        if all(isinstance(event, End) for event in events):
            return False
        share = 1.0 - OPEN_SHARE if _starts(events) else 1.0
        return not self.has_room(len(events), size, share)

    def _drop(self, events: Sequence[Event]) -> None:
        """Drop events that do not fit, and all later events of their episodes.

        An open episode gets a `broken` end in place of its first dropped event, with that event's
        number. With the lock held.
        """
        begun = {name_of(event) for event in events if isinstance(event, Start)}
        for event in events:
            self.dropped.add(event)
        cut: dict[str, End] = {}
        for event in events:
            if not is_late(event) and name_of(event) not in begun:
                cut.setdefault(event.episode_id, broken_end(event, "client_dropped"))
        self.dropped.count(events)
        self.has_cut = self.has_cut or bool(cut)
        self._extend(list(cut.values()), EVENT_BYTES * len(cut))

    def over(self, episode_id: str) -> None:
        """Note that an episode has ended: no more events follow, so its batch need not wait."""
        self.dropped.over(episode_id)
        self.hurry()

    def owe(self) -> None:
        """Have the sending thread report the dropped steps."""
        with self.lock:
            self.owed = True
            self._filled.notify()

    def fold(self, index: int, step: Any, reward: float, info: Any) -> bool:
        """Add a reward to the queued step at `index`; False if the step has left the queue."""
        with self.lock:
            return self._folds(index, step, reward, info) and self._fold(index, step, reward, info)

    def put_rewards(self, rewards: Sequence[Reward]) -> list[bool]:
        """Add each reward to its queued step, or queue its event; return which were added.

        All or none: raises BufferFull, and ValueError for a sum that is not finite.
        """
        with self.lock:
            folds = [self._folds(r.index, r.step, r.amount, r.info) for r in rewards]
            rest = [r.event for r, folded in zip(rewards, folds, strict=True) if not folded]
            if rest:
                self.put_all(rest)
            for place, reward in enumerate(rewards):
                if not folds[place]:
                    continue
                folds[place] = self._fold(reward.index, reward.step, reward.amount, reward.info)
                if not folds[place]:  # the step has left meanwhile
                    self._extend([reward.event], weight(reward.event))
            return folds

    def _folds(self, index: int, step: Any, reward: float, info: Any) -> bool:
        """Whether a reward can be added to the step at `index`. Raises ValueError if infinite."""
        if step is None or index < self.fixed or self.spool is not None:
            return False  # events on disk are not changed
        if info is not None and weight(step) + memoryview(info).nbytes > self.request_bytes:
            return False
        total = reward if step.reward is None else step.reward + reward
        if not math.isfinite(total):
            raise ValueError(f"expected rewards with a finite sum, got {total}")
        return True

    def _fold(self, index: int, step: Any, reward: float, info: Any) -> bool:
        """Add a reward to a queued step; return False if an inner call has sent the step."""
        merged, more = step.info, 0
        if info is not None:
            merged = info if step.info is None else merge_infos(step.info, info)
            more = memoryview(merged).nbytes
            more -= 0 if step.info is None else memoryview(step.info).nbytes
        if index < self.fixed:
            return False
        step.reward = reward if step.reward is None else step.reward + reward
        step.info = merged
        self.nbytes += more
        return True

    # --- out ---------------------------------------------------------------------------------

    def take(self) -> tuple[list[Event], str | None] | None:
        """Wait for the next batch; return it and its instance, or None when closed and empty.

        Without events and instance: the collector must be asked for something first. Without
        events: dropped steps are to be reported.
        """
        while True:
            has_disk = self._read_spooled()
            with self.lock:
                if self.asked:
                    return [], None
                queue = self.events
                idle = not queue
                while not queue and not (self.spool and self.spool.files.unread):
                    if self.asked:
                        return [], None
                    if self.owed:
                        return [], self.instance
                    if self.closed and not (self.spool and self.spool.is_unwritten()):
                        return None
                    self._wake_at = 1
                    self._filled.wait(LOOK_SECONDS)
                if not queue:
                    if not has_disk:
                        self._filled.wait(RETRY_SECONDS)
                    continue
                at_once = self._urgent or self._hurried or self.closed
                if idle and not at_once and len(queue) < self.batch:
                    self._wake_at = self.batch
                    self._lingering = True
                    self._filled.wait(self.linger)
                    self._lingering = False
                self._wake_at = sys.maxsize
                if self.asked or self.instance is None:
                    return [], None
                flight = self._cut()
                if flight:
                    return flight, self.owner(name_of(flight[0]))

    def _read_spooled(self) -> bool:
        """Queue events that are only on disk, from one read, if a batch has room for them.

        Returns False if the disk hangs.
        """
        spool = self.spool
        if spool is None or not spool.files.unread or self.asked:
            return True
        if len(self.events) >= self.batch:
            return True
        try:
            return spool.read(min(self.batch, self.max_events), self._enter_read)
        finally:
            self.wake()

    def _enter_read(self, found: Sequence[tuple[Event, str | None]]) -> None:
        """Queue events that were read from disk, with their instances. With the lock held."""
        for event, owner in found:
            if owner is not None and not is_late(event):
                self.strays.setdefault(name_of(event), owner)
        events = [event for event, _ in found]
        if events:
            self.requeues += 1
        self._extend(events, sum(map(weight, events)))

    def _cut(self) -> list[Event]:
        """Take the next flight from the queue. With the lock held."""
        self._hurried = False
        count = whole_runs(self.events, self._fitting(self.events[: self.batch]))
        flight = [event for event in self.events[:count] if event is not None]
        del self.events[:count]
        self._done = self._taken
        self._taken += count
        self.fixed = max(self.fixed, self._taken)
        self._marks.append((self._taken + len(self.events), time.monotonic()))
        while len(self._marks) > 1 and self._marks[1][0] <= self._done:
            self._marks.popleft()
        self.flight = list(flight)
        self._land(())
        self.changed.notify_all()
        return flight

    def _land(self, events: Collection[Event]) -> None:
        """Remove events from the flight; when it is empty, the next batch can be sent."""
        if len(events) == len(self.flight):
            self.flight = []
        elif events:
            landed = set(map(id, events))
            self.flight = [event for event in self.flight if id(event) not in landed]
        if not self.flight:
            self._done = self._taken

    def _fitting(self, events: Sequence[Event | None]) -> int:
        """The number of events that fit in one batch, by bytes and with one instance."""
        count = len(events)
        most = self.size.nbytes
        if self.nbytes > most:
            count = fitting(events, most)
        if strays := self.strays:
            owners = [e and strays.get(name_of(e), "") for e in events[:count]]
            first = next((owner for owner in owners if owner is not None), None)
            count = next(
                (i for i, owner in enumerate(owners) if owner is not None and owner != first), count
            )
        return count

    def pull(self, ids: Collection[Name], since: int, deadline: float) -> Pulled | None:
        """Take the queued events of some episodes ahead of the queue, for their `get_action`.

        Waits until `deadline` (time.monotonic) while events of these episodes are in flight, or
        more are queued than fit in a request. `since` is a lower bound of their indices. Episodes
        of another instance than the first one's need another request. Returns None if an instance
        must be registered first. Raises TimeoutError.
        """
        with self.lock:

            def ready() -> bool:
                return (
                    self.closed
                    or self.trouble is not None
                    or (
                        not self.drafted
                        and not (self.spool and self.spool.has_unread(own=True))
                        and not (self.spool and self.spool.is_unwritten(ids))
                        and not any(name_of(event) in ids for event in self.flight)
                        and self._fits_request(self._places(ids, since))
                    )
                )

            was_solid, self._is_solid = self._is_solid, True
            try:
                in_time = ready()
                if not in_time:  # the thread is not woken, and does not compete, for nothing
                    self._is_solid = was_solid
                    in_time = self._await_urgent(ready, deadline)
                    self._is_solid = True
                    in_time = in_time and ready()
                if self.trouble is not None:
                    raise self.trouble
                if not in_time:
                    waiting = counted(self.pending, "event waits", "events wait")
                    raise TimeoutError(f"{waiting} for the collector")
                return self._pull(ids, since)
            finally:
                self._is_solid = was_solid

    def _await_urgent(self, ready: Callable[[], bool], deadline: float) -> bool:
        """Wait until `ready`, while the queue is sent without delay. With the lock held."""
        self._urgent += 1
        self._filled.notify()
        try:
            return self._await(ready, _until(deadline))
        finally:
            self._urgent -= 1

    def _pull(self, ids: Collection[Name], since: int) -> Pulled | None:
        """With the lock held."""
        instance = self.owner(next(iter(ids)))
        if instance is None:
            return None
        mine = {name for name in ids if self.owner(name) == instance}
        places = self._places(mine, since)
        events = self._take_from(places)
        self._next_pull += 1
        if events:
            self._pulls[self._next_pull] = self._taken + places[0]
        return Pulled(events, instance, mine, self._next_pull)

    def _places(self, ids: Collection[Name], since: int) -> list[int]:
        """Where in the queue events of some episodes are; `since` is a lower bound of an index."""
        found = []
        for place in range(max(0, since - self._taken), len(self.events)):
            event = self.events[place]
            if event is not None and name_of(event) in ids:
                found.append(place)
        return found

    def _take_from(self, places: Sequence[int]) -> list[Event]:
        events = []
        for place in places:
            event = self.events[place]
            if event is not None:
                events.append(event)
            self.events[place] = None
        return events

    def _fits_request(self, places: Sequence[int]) -> bool:
        events = [event for place in places if (event := self.events[place]) is not None]
        if len(events) > self.batch:
            return False
        return len(events) < 2 or sum(map(weight, events)) <= self.request_bytes

    def owner(self, name: Name) -> str | None:
        """The instance under which an episode was started; None if it is not registered yet."""
        return self.strays.get(name) or self.instance

    # --- drafts ------------------------------------------------------------------------------

    def encode_drafts(self, *, is_last_try: bool) -> Iterator[tuple[Event, ValueError | None]]:
        """Encode the drafts in the queue; yield the removed events, with the error or None.

        An event with an invalid value is replaced by a `broken` end of its episode; the later
        events of the episode are removed too, without an error. Call it in the sending thread while
        nothing is in flight. Drafts of policies that are not settled stay. Raises unexpected
        errors; with `is_last_try` they are the event's errors.
        """
        over: set[str] = set()
        place, is_left = self._taken, False
        while True:
            with self.lock:
                at = place - self._taken
                chunk = self.events[at : at + _DRAFTS_AT_ONCE]
                if not chunk or (place >= self._draft_end and not over):
                    self.drafted = is_left
                    self.asked = self.asked or is_left
                    self.changed.notify_all()
                    return
            for index, event in enumerate(chunk, place):
                if event is None:
                    continue
                if event.episode_id in over and not is_late(event):
                    self._replace(index, event, None)
                    yield event, None
                elif drafts := _drafts_of(event):
                    if not all(draft.policy.is_settled for draft in drafts.values()):
                        is_left = True
                        continue
                    try:
                        error = self._encode(event, drafts)
                    except Exception as cause:
                        if not is_last_try:
                            raise
                        error = ValueError(f"Episode {label_of(event)}: {cause!r}")
                    if error is not None:
                        over.add(event.episode_id)
                        self._replace(index, event, broken_end(event, "client_invalid"))
                        yield event, error
            place += len(chunk)

    def _encode(self, event: Any, drafts: dict[str, Draft]) -> ValueError | None:
        """Replace an event's drafts with canonical bytes; return the error of an invalid one."""
        name = label_of(event)
        policy = next(iter(drafts.values())).policy
        if event.schema_id not in (None, policy.schema_id):  # one value is encoded by another
            return ValueError(f"Episode {name}: its policy has been redeclared in the meantime")
        event.schema_id = policy.schema_id
        try:
            values = {field: draft.encode(name) for field, draft in drafts.items()}
        except ValueError as error:
            return error
        more = sum(map(len, values.values())) - sum(map(len, drafts.values()))
        with self.lock:
            size = weight(event) + more
            if size > self.request_bytes:
                return too_large(name, size, self.request_bytes)
            self.nbytes += more
            for field, value in values.items():
                setattr(event, field, value)
        return None

    def _replace(self, index: int, event: Event, other: End | None) -> None:
        with self.lock:
            more = (0 if other is None else weight(other)) - weight(event)
            self.events[index - self._taken] = other
            self.nbytes += more
            self.pending -= other is None
            if self.spool is not None:
                self.spool.note([event])
            self.has_cut = self.has_cut or other is not None

    # --- judged, or back again ---------------------------------------------------------------

    def judged(self, events: Collection[Event], pull: int | None = None) -> None:
        """Note that the collector has judged these events of the flight or a pull."""
        with self.lock:
            if self.spool is not None:
                self.spool.note(events)
            size, count = sum(map(weight, events)), len(events)
            for event in events if self.strays else ():
                if isinstance(event, End):
                    self.strays.pop(name_of(event), None)
            self.nbytes -= size
            self.pending -= count
            if pull is None:
                self._land(events)
            else:
                self._pulls.pop(pull, None)
            self.changed.notify_all()

    def return_flight(self, events: Sequence[Event], lost: Sequence[Event] = ()) -> None:
        """Put events of the flight back to the head of the queue, to be sent again.

        `lost` events, which had left as judged and must be judged again, go before them. Indices of
        later events do not change.
        """
        with self.lock:
            self._readmit(lost)
            count = len(lost) + len(events)
            self._taken -= count
            self.events[:0] = [*lost, *events]
            self._done = min(self._done, self._taken)
            self._land(events)
            self.changed.notify_all()

    def put_off(self, events: Sequence[Event]) -> None:
        """Put events of the flight, and later ones of their episodes, at the end of the queue."""
        with self.lock:
            later = self._take_from(self._places(set(map(name_of, events)), 0))
            self.requeues += 1
            self.events += [*events, *later]
            self._land(events)
            self.changed.notify_all()

    def in_flight(self, events: Sequence[Event]) -> list[Event]:
        """The events of a batch that are still in flight."""
        with self.lock:
            left = set(map(id, self.flight))
        return [event for event in events if id(event) in left]

    def return_rest(self) -> int:
        """Put the rest of the flight back to the head of the queue; return its number of events."""
        with self.lock:
            rest = self.flight
            self.return_flight(rest)
            return len(rest)

    def return_pulled(self, events: Sequence[Event], pull: int) -> None:
        """Put events of a pull at the end of the queue, to be sent again."""
        with self.lock:
            self.requeues += 1
            self.events.extend(events)
            self._pulls.pop(pull, None)
            self._filled.notify()
            self.changed.notify_all()

    def put_again(self, events: Sequence[Event]) -> None:
        """Queue events that had left as judged and must be judged again."""
        with self.lock:
            self._readmit(events)
            self.events.extend(events)
            self._filled.notify()

    def _readmit(self, events: Sequence[Event]) -> None:
        """Count events as pending again that had left as judged, before they are put back."""
        size, count = sum(map(weight, events)), len(events)
        self.nbytes += size
        self.pending += count
        self.requeues += bool(count)

    def carries(self, name: Name) -> bool:
        """Whether events of an episode are queued or in flight."""
        with self.lock:
            waiting = (*self.flight, *self.events)
            queued = any(e is not None and name_of(e) == name for e in waiting)
            return queued or (self.spool is not None and self.spool.is_unwritten({name}))

    def renew(self, dead: str, again: Sequence[Event], open_ids: Iterable[Name]) -> None:
        """Number starts under a new instance, because the collector does not know `dead` any more.

        `again` are events that were certainly not applied; their starts and those in the queue get
        numbers of the new instance. Episodes that were started before stay with the old instance: a
        start that may have been applied is never repeated under another one.
        """
        with contextlib.nullcontext() if self.spool is None else self.spool.disk:
            with self.lock:
                was_solid, self._is_solid = self._is_solid, True
                try:
                    is_current = self._renew(dead, again, open_ids)
                finally:
                    self._is_solid = was_solid
                queued = [event for event in self.events if event is not None]
                mine = [e for e in (*again, *queued) if name_of(e) not in self.strays]
            if self.spool is not None and is_current:
                self.spool.files.renew(mine)

    def _renew(self, dead: str, again: Sequence[Event], open_ids: Iterable[Name]) -> bool:
        """Return whether `dead` was the current instance. With the lock held."""
        fresh = [event for event in again if isinstance(event, Start)]
        is_current = self.instance == dead
        if is_current:
            self.instance = None
            self.next_start = 0  # before the next line: an inner call may add starts
            queued = [event for event in self.events if event is not None]
            later = (*queued, *(() if self.spool is None else self.spool.unwritten))
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

    # --- spooled -----------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """The number of events that are pending, not on disk yet, or only on disk."""
        return self.pending if self.spool is None else self.pending + self.spool.outside

    def note_instance(self, instance: str) -> None:
        """Use an instance from now on. Raises BufferFull if it cannot be written to disk."""
        if self.spool is not None:
            self.spool.note_instance(instance)
        with self.lock:
            self.instance = instance

    def is_foreign(self, instance: str | None, event: Event | None = None) -> bool:
        """As `Spool.is_foreign`."""
        return self.spool is not None and self.spool.files.is_foreign(instance, event)

    def go_on(self, refused: Sequence[Event]) -> tuple[list[Event], list[Event], list[Event]]:
        """Continue episodes that the collector has closed in new ones, from their next action.

        Returns the starts of the new episodes, the refused events that belong to them now
        (including rewards for their steps), and the events that wait because the disk hangs. Only
        spooled episodes of one agent are continued.
        """
        starts: list[Event] = []
        theirs: list[Event] = []
        if self.spool is None:
            return starts, theirs, []
        files = self.spool.files
        spooled = [e for e in refused if e.agent_id is None and files.is_spooled(e)]
        if not spooled:
            return starts, theirs, []
        with self.spool.try_disk() as is_held:
            if not is_held:
                return starts, theirs, spooled
            for event in spooled:
                before = event.episode_id
                segment = files.segment_of(event)
                segment.translate(event)
                if event.episode_id == before:
                    if not isinstance(event, (LogAction, Decision)):
                        continue
                    started = files.go_on(event, self.next_start)
                    if started is None:
                        continue
                    start, owner = started
                    starts.append(start)
                    segment.translate(event)
                    with self.lock:
                        self.next_start += owner is None
                        if owner is not None:
                            self.strays[start.episode_id] = owner
                        for waiting in self.events:
                            if waiting is not None and waiting.episode_id == before:
                                segment.translate(waiting)
                theirs.append(event)
        return starts, theirs, []

    # --- waiting -----------------------------------------------------------------------------

    def wait_until(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until `ready()`, which is checked after each `wake`; return whether it is true."""
        with self.lock:
            return self._await(ready, timeout)

    def _await(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until `ready()`; return whether it is true. With the lock held."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not ready():
            left = deadline - time.monotonic()
            if left <= 0 or self._is_solid or self.is_own_thread():
                return False
            self.changed.wait(min(left, LOOK_SECONDS))
        return True

    def may_wait(self) -> bool:
        """Whether a call in this thread may wait: not within a section that no other may enter."""
        with self.lock:
            return not self._is_solid and not self.is_own_thread()

    def is_own_thread(self) -> bool:
        """Whether this is one of the client's own threads, which must not wait."""
        return threading.get_ident() in self.own_threads

    def oldest(self) -> float:
        """The approximate age of the oldest pending event in seconds; 0 if there is none."""
        with self.lock:
            now = time.monotonic()
            unwritten = None if self.spool is None else self.spool.oldest_since
            return now - min(self._oldest_since or now, unwritten or now)

    def drained(
        self,
        timeout: float | None,
        stop: Callable[[], bool],
        *,
        before: int | None = None,
        own: bool = False,
    ) -> bool:
        """Wait until all pending events are judged; return False at the timeout or if `stop()`.

        `before`: only events with a lower index. `own`: without events of earlier processes.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self.lock:
            if before is None and not self._written(deadline, stop):
                return False
            target = self.end if before is None else before
            seen = self.requeues
            has_unread = self.spool is not None and bool(self.spool.files.own_unread)

            def judged() -> bool:
                if before is None and self.spool is not None and self.spool.has_unread(own=own):
                    return False
                return self._is_judged(target)

            def done() -> bool:
                nonlocal target, seen, has_unread
                if stop():
                    return True
                if self.requeues != seen and before is None:
                    if has_unread or not own:
                        target = self.end
                    seen = self.requeues
                    has_unread = self.spool is not None and self.spool.has_unread(own=own)
                return judged()

            self._await_urgent(done, deadline)
            return judged()

    def _is_judged(self, before: int) -> bool:
        """Whether no event with a lower index is pending."""
        return self._done >= before and all(low >= before for low in self._pulls.values())

    @property
    def _oldest_since(self) -> float | None:
        """About when the oldest pending event was queued (time.monotonic); None without one."""
        if not self.pending:
            return None
        low = min((self._done, *self._pulls.values()))
        since = None
        for index, at in list(self._marks):
            if since is None or index <= low:
                since = at
        return since

    def _written(self, deadline: float, stop: Callable[[], bool]) -> bool:
        """Wait until the events logged so far are on disk; return whether. With the lock held."""
        newest = None if self.spool is None else self.spool.newest
        if newest is None:
            return True
        self._await(lambda: newest.is_settled or stop(), _until(deadline))
        return newest.is_settled

    @property
    def end(self) -> int:
        """The index of the next event."""
        with self.lock:
            return self._taken + len(self.events)

    def wake(self) -> None:
        """Have all waiting calls check their conditions again."""
        with self.lock:
            self._filled.notify_all()
            self.changed.notify_all()

    def close(self) -> None:
        """Accept no new events; queued ones are still sent."""
        with self.lock:
            self.closed = True
        self.wake()


def _until(deadline: float) -> float | None:
    """Seconds until a `time.monotonic` deadline; None for an infinite one."""
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())


def _unnumbered(events: Iterable[Event]) -> list[Start]:
    return [event for event in events if isinstance(event, Start) and event.start is None]


def _starts(events: Sequence[Event]) -> bool:
    """Whether all of the events belong to episodes or tracks that start among them."""
    begun = {name_of(event) for event in events if isinstance(event, Start)}
    return all(name_of(event) in begun for event in events)


def _drafts_of(event: Event) -> dict[str, Draft]:
    """An event's drafts, by field."""
    if not isinstance(event, (LogAction, End)):
        return {}
    action = event.action if isinstance(event, LogAction) else None
    if type(event.obs) is not Draft and type(action) is not Draft:
        return {}
    values = {"obs": event.obs, "action": action}
    return {field: value for field, value in values.items() if type(value) is Draft}
