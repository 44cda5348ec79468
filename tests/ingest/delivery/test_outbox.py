"""The outbox: each event leaves it once, in its episode's order, through any interleaving.

Also of `ingest.delivery.dropped`.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from ingest.delivery.events import weight
from ingest.delivery.outbox import Outbox
from ingest.protocol.errors import BufferFull
from ingest.protocol.messages import End, Event, LogAction, LogReturns, Start


def outbox(**changes: Any) -> Outbox:
    settings_ = {
        "max_events": 1_000,
        "max_bytes": 1_000_000,
        "batch": 8,
        "on_full": "raise",
        "timeout": 0.1,
        "linger": 0.0,
    }
    made = Outbox(**(settings_ | changes))
    made.instance = "i0"
    return made


def put(box: Outbox, event: Event) -> int:
    return box.put(event, weight(event))


class OutboxMachine(RuleBasedStateMachine):
    """Each episode's events are acknowledged or refused once each and in order, under one instance
    each, through any interleaving of batches, pulls, returns and forgotten instances."""

    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.box = outbox()
        self.instances = 1
        self.logged: dict[str, int] = {}
        self.judged: dict[str, list[int]] = {}
        self.owners: dict[str, str] = {}
        self.numbers: set[tuple[str, int]] = set()
        self.flight: list[Event] = []
        self.instance = ""
        self.pulled: Any = None

    @rule(target=names)
    def start(self) -> str:
        name = f"e{len(self.logged)}"
        self.box.put_all([Start(episode_id=name)])
        self.logged[name] = 1
        return name

    @rule(name=names, size=st.integers(0, 40))
    def log(self, name: str, size: int) -> None:
        if self.pulled is None or name not in self.pulled.ids:  # one episode is used by one thread
            put(self.box, LogReturns(episode_id=name, seq=self.logged[name], reward=float(size)))
            self.logged[name] += 1

    @precondition(lambda self: not self.flight and self.box.events)
    @rule()
    def take(self) -> None:
        if all(event is None for event in self.box.events):
            return
        taken = self.box.take()
        assert taken is not None
        self.flight, instance = taken
        if instance is None:
            self.box.instance = f"i{self.instances}"
            self.instances += 1
        else:
            self.instance = instance

    @precondition(lambda self: self.flight)
    @rule(back=st.booleans())
    def land(self, back: bool) -> None:
        flight, self.flight = self.flight, []
        if back:
            self.box.return_flight(flight)
        else:
            self.box.judged(flight)
            self.note(flight, self.instance)

    @precondition(lambda self: self.flight)
    @rule()
    def forget(self) -> None:
        """A batch with starts was refused: its instance is no longer known."""
        ids = {event.episode_id for event in self.flight if isinstance(event, Start)}
        again = [event for event in self.flight if event.episode_id in ids]
        done = [event for event in self.flight if event.episode_id not in ids]
        if not ids:
            return
        self.box.renew(self.instance, again, list(self.logged))
        self.box.judged(done)
        self.note(done, self.instance)
        self.box.return_flight(again)
        self.flight = []

    @precondition(lambda self: self.pulled is None)
    @rule(name=names)
    def pull(self, name: str) -> None:
        in_flight = any(event.episode_id == name for event in self.flight)
        waiting = [e for e in self.box.events if e is not None and e.episode_id == name]
        if not in_flight and len(waiting) <= self.box.batch:
            self.pulled = self.box.pull({name}, 0, time.monotonic() + 60.0)

    @precondition(lambda self: self.pulled is not None)
    @rule(back=st.booleans())
    def finish_pull(self, back: bool) -> None:
        pulled, self.pulled = self.pulled, None
        if back:
            self.box.return_pulled(pulled.events, pulled.ticket)
        else:
            self.box.judged(pulled.events, pulled.ticket)
            self.note(pulled.events, pulled.instance)

    def note(self, events: list[Event], instance: str) -> None:
        for event in events:
            seen = self.judged.setdefault(event.episode_id, [])
            if isinstance(event, Start):
                assert event.start is not None
                assert (instance, event.start) not in self.numbers
                self.numbers.add((instance, event.start))
                self.owners[event.episode_id] = instance
                seen.append(0)
            else:
                assert event.seq is not None
                assert self.owners[event.episode_id] == instance
                seen.append(event.seq)
            assert seen == list(range(len(seen)))

    @invariant()
    def counts_agree(self) -> None:
        total = sum(self.logged.values()) - sum(map(len, self.judged.values()))
        assert self.box.pending == total
        if total == 0:
            assert self.box.nbytes == 0
            if not self.box.events:  # gaps left by pulled events go with the next batch
                assert self.box.drained(0.0, lambda: False)
        else:
            assert not self.box.drained(0.0, lambda: False)


OutboxMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestOutbox = OutboxMachine.TestCase


def step(name: str, seq: int = 1) -> LogAction:
    return LogAction(episode_id=name, seq=seq, obs=b"o", action=b"a")


def test_a_short_episode_is_not_torn_between_two_batches() -> None:
    """A batch is one journal row: an episode that fits goes into it whole or not at all."""
    box = outbox(batch=8)
    for number in range(6):
        name = str(number)
        box.put_all([Start(episode_id=name), step(name), End(episode_id=name, seq=2)])
    sizes = []
    for _ in range(3):
        taken = box.take()
        assert taken is not None
        sizes.append(len(taken[0]))
        box.judged(taken[0])
    assert sizes == [6, 6, 6]


def test_a_reward_joins_only_a_step_whose_content_is_not_fixed() -> None:
    """The bytes of a step may have been sent once it has left the queue."""
    box = outbox()
    event = step("e")
    index = put(box, event)
    assert box.fold(index, event, 1.0, None)
    box.take()
    assert not box.fold(index, event, 1.0, None)
    assert event.reward == 1.0


def test_a_batch_is_bounded_in_bytes() -> None:
    """An event over the bound goes alone, and the collector decides about it."""
    box = outbox(batch=100)
    box.size.bound(3 * weight(step("e")))
    for seq in range(1, 8):
        put(box, step("e", seq))
    sizes = []
    for _ in range(3):
        taken = box.take()
        assert taken is not None
        sizes.append(len(taken[0]))
        box.judged(taken[0])
    assert sizes == [3, 3, 1]


def test_a_full_outbox_refuses_a_piece_as_a_whole() -> None:
    """When a piece does not fit into the queue, none of its events is queued."""
    box = outbox(max_events=4)
    put(box, step("a"))
    put(box, step("a", 2))
    with pytest.raises(BufferFull, match="2 events"):
        box.put_all([Start(episode_id="b"), step("b"), End(episode_id="b", seq=2)])
    assert box.pending == 2
    assert box.end == 2


def test_a_blocked_caller_goes_on_when_there_is_room() -> None:
    """An acknowledgement wakes the caller before its time-out."""
    box = outbox(max_events=1, on_full="block", timeout=30.0)
    put(box, step("a"))
    blocked = threading.Thread(target=put, args=(box, step("a", 2)))
    blocked.start()
    taken = box.take()
    assert taken is not None
    box.judged(taken[0])
    blocked.join(60)
    assert not blocked.is_alive()
    assert box.pending == 1


def test_a_pull_waits_no_longer_than_asked() -> None:
    """After the time-out, the episode's events are still in flight."""
    box = outbox()
    put(box, step("a"))
    box.take()
    with pytest.raises(TimeoutError, match="1 event waits"):
        box.pull({"a"}, 0, time.monotonic() + 0.05)


@pytest.mark.parametrize("late", [False, True])
def test_the_end_of_an_episode_waits_for_no_company(late: bool) -> None:
    """The batch leaves at once, whatever the linger, with the sender waiting or not."""
    box = outbox(linger=3600.0)
    box.instance = "i"
    taken: list[Any] = []
    sender = threading.Thread(target=lambda: taken.append(box.take()), daemon=True)
    if late:
        sender.start()
        while not box._lingering and sender.is_alive():
            if box._wake_at == 1 and not box.events:  # waits for a first event
                put(box, step("a"))
    else:
        put(box, step("a"))
    box.hurry()
    if not late:
        sender.start()
    sender.join(60)
    ((events, instance),) = taken
    assert ([event.episode_id for event in events], instance) == (["a"], "i")


def test_what_was_sent_takes_no_reward_although_others_of_its_batch_come_back() -> None:
    """Positions in a flight shift when a part of it is sent again; events that were sent stay
    final.
    """
    box = outbox()
    busy, fine = step("busy"), step("fine")
    put(box, busy)
    index = put(box, fine)
    box.take()
    box.judged([fine])
    box.return_flight([busy])
    assert not box.fold(index, fine, 1.0, None)
    assert fine.reward is None


def test_a_flush_waits_for_what_a_later_pull_carries() -> None:
    """A flush waits for events queued before it, even if a later get_action carries them."""
    box = outbox()
    put(box, step("a"))
    pulled = box.pull({"a"}, 0, time.monotonic() + 60.0)
    assert pulled is not None
    put(box, step("b"))
    box.judged(box.take()[0])  # type: ignore[index]  # there is a batch
    assert not box.drained(0.0, lambda: False)
    box.judged(pulled.events, pulled.ticket)
    assert box.drained(0.0, lambda: False)
