"""The background thread that delivers queued events.

One batch is in flight at a time, so that an episode's events arrive in order. A batch is encoded
once and repeated with identical bytes until the collector answers. The collector recognises a
repeated event by (episode, seq), so an event counts exactly once. If the collector is unreachable
nothing is discarded: the queue fills, and then raises, drops or blocks (see Outbox).

Before it sends the first event, the thread asks for the collector's declarations, and again when an
episode names an unknown policy. Drafts of values are encoded after that.

The collector's results for an event, and the reactions:

    accepted, duplicate       the event is done
    refused                   the episode's next call and `flush` raise the refusal
    busy (of a start)         the episode's events are sent again later
    unknown_instance          a new instance is registered for new episodes. If a start was refused
                              like this at its first attempt, it was certainly not applied, and its
                              episode's events are sent under the new instance. After an attempt
                              without an answer it may have been applied: it is not repeated but
                              reported

After an unexpected error, the batch in flight goes back to the queue and is sent again later. If
that fails too, the batch is sent in parts. An event that fails alone, while a request without
events succeeds, is refused (`client_error`), together with its episode's events in flight.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from ingest.delivery.batches import cut_at
from ingest.delivery.client_stats import ClientStats, export
from ingest.delivery.declarations import CollectorSpec, Declarations
from ingest.delivery.events import is_late
from ingest.delivery.outbox import Outbox
from ingest.delivery.results import EventResults, summary, to_repeat
from ingest.delivery.shared_spool import RETRY_SECONDS, SharedSpool
from ingest.delivery.transport import (
    RETRY_DELAYS,
    UNAVAILABLE,
    Delivery,
    M,
    Transport,
    refusal_from_json,
)
from ingest.delivery.unconfirmed import undecided
from ingest.protocol import messages as wire
from ingest.protocol.agent_names import Name, name_of
from ingest.protocol.errors import (
    STATUS,
    BufferFull,
    ClientError,
    CollectorUnavailable,
    Refusal,
)
from ingest.protocol.messages import End, Event, GetAction, Start
from storage.system.forks import notice_fork, renewed_by_fork
from storage.wording import counted

log = logging.getLogger("headrace.client")

EXIT_SECONDS = 10.0
"""Seconds that the end of the process waits for queued events."""

TRIES = 3
"""Unexpected errors in a row after which the sender searches for the event that causes them."""

_MSGPACK = {"Content-Type": wire.MSGPACK}
_SPLIT = ("malformed", "too_large", "invalid")  # one event may have caused it
_encode = msgspec.msgpack.Encoder().encode
R = TypeVar("R")
Parts: TypeAlias = deque[tuple[list[Event], bool]]
"""Parts of a batch, and whether each may have been sent before."""


def _as_is(message: M) -> M:
    return message


class _Closing(Exception):
    """The sender is being closed in the middle of a wait."""


class Book(Protocol):
    """The sender's interface to the client's episodes."""

    def open_ids(self) -> Iterable[Name]: ...

    def refuse(self, event: Event, refusal: Refusal) -> None: ...

    def take_refusal(self, name: Name) -> Refusal | None: ...

    def clear(self) -> None: ...


class Sender:
    """Delivers the events of an outbox, and passes refusals to the book of episodes."""

    def __init__(
        self,
        transport: Transport,
        outbox: Outbox,
        book: Book,
        declarations: Declarations,
        *,
        on_error: Callable[[Refusal], None] | None = None,
    ) -> None:
        self.transport = transport
        self.outbox = outbox
        self.declarations = declarations
        self.results = EventResults(book.refuse, self.learn_anew, on_error)
        self.serial = next(_serials)
        self.weights_refused: Callable[[], int] = int
        self._book = book
        self._reset()
        _senders.add(self)
        _export()

    def _reset(self) -> None:
        self._state = threading.RLock()  # a signal handler may call in the middle of a call
        self._registering = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_over = True  # there is no thread, or it has finished
        self.running = False  # a thread will send queued events
        self._is_late = False  # the process ends, and has waited for earlier events
        self._has_warned_late = False
        self._failure: Exception | None = None  # the latest turn's unexpected error
        self._failures = 0  # of those, in a row
        self._unsure = 0  # events at the head of the queue that may have been sent before
        self._trouble: Refusal | None = None
        self._away: Exception | None = None  # the reason without an answer
        self._postponed: Refusal | None = None  # why the collector takes an event only later
        self._reported_drops = self._base = (0, 0)  # dropped: reported, and by earlier instances
        self._logged_drops = self._reported_unreadable = 0
        self.held: dict[str, int] = {}  # policy -> its held version

    def after_fork(self) -> None:
        """Start a forked child with an empty queue, no thread, and its own instance."""
        self.outbox.reset()
        self.results.reset()
        self._book.clear()
        self.declarations.forget_wanted()
        self._reset()

    @property
    def pending(self) -> int:
        """Events that are not acknowledged yet."""
        return self.outbox.waiting + len(self.results.kept)

    @property
    def stats(self) -> ClientStats:
        notice_fork()
        counts, refused = self.results.counts()
        spool = self.outbox.spool
        spooled, nbytes, unwritten = (0, 0, 0) if spool is None else spool.counts
        if spool is not None and spool.files.unreadable:
            refused["unreadable"] = spool.files.unreadable
        dropped = self.outbox.dropped
        return ClientStats(
            waiting=self.pending,
            spooled=spooled,
            spooled_bytes=nbytes,
            unwritten=unwritten,
            refused=refused,
            dropped_episodes=dropped.episodes,
            dropped_steps=dropped.steps,
            dropped_rewards=dropped.rewards,
            unsampled_episodes=dropped.unsampled_episodes,
            unsampled_rewards=dropped.unsampled_rewards,
            oldest_waiting=self.outbox.oldest(),
            weights_refused=self.weights_refused(),
            **counts,
        )

    # --- the thread --------------------------------------------------------------------------

    def ensure_running(self) -> None:
        """Start the thread if there is none. Raises ClientError if that is impossible."""
        if self.running or self.outbox.is_own_thread():
            return
        if self._is_late and not self._has_warned_late:
            self._has_warned_late = True
            log.warning("the process is exiting: from now on, only flush() and close() deliver")
        with self._state:
            if self.outbox.closed:
                raise ClientError("the client is closed")
            if self._thread is None or not self._thread.is_alive():
                self.outbox.asked = True
                if self.outbox.spool is not None:
                    self.outbox.spool.taking_up = True
                thread = threading.Thread(target=self._run, name="headrace-sender", daemon=True)
                self._is_over = False
                self.outbox.own_threads.add(threading.get_ident())  # a call in between waits for us
                try:
                    thread.start()
                except RuntimeError as error:  # no more threads, or the interpreter ends
                    self._is_over = True
                    raise ClientError(f"the sending thread cannot be started: {error}") from error
                finally:
                    self.outbox.own_threads.discard(threading.get_ident())
                self._thread = thread
                self.running = not self._is_late
                _finish_with_host(self)

    def _run(self) -> None:
        self.outbox.own_threads.add(threading.get_ident())
        try:
            self._put_back()  # what a thread left that a callback ended, by SystemExit
            while self._goes_on():
                continue
        finally:
            self.running = False
            if self.outbox.closed and self.outbox.spool is not None:
                self.outbox.spool.close()
            self.outbox.own_threads.discard(threading.get_ident())
            self._is_over = True
            self.outbox.wake()

    def _goes_on(self) -> bool:
        """Do one turn of the thread; return whether there is another."""
        try:
            is_over = not self._turn()
        except _Closing:
            return False
        except Exception as error:
            self._failures += 1
            self.results.count(errors=1)
            if self._failure is None:
                log.exception("unexpected error; sending %s again", counted(self.pending, "event"))
            self._failure = error
            self._put_back()
            return not self.transport.closing.wait(RETRY_DELAYS.delay(self._failures))
        if self._failure is not None:
            errors = counted(self._failures, "unexpected error")
            log.warning("sending resumed after %s", errors)
            self._failure, self._failures = None, 0
        return not is_over

    def _turn(self) -> bool:
        """Send a batch, or a request that must precede it; return False at the end."""
        if self.outbox.spool is not None and self.outbox.spool.taking_up:
            self._take_up(self.outbox.spool)
        taken = self.outbox.take()
        if taken is None:
            return False
        events, instance = taken
        if events and instance is not None:
            self._deliver(events, instance)
        elif instance is not None:
            self._tell_drops(instance)
        elif self.outbox.asked:
            self._learn()
        else:
            self._register_patiently()
        return True

    def _put_back(self) -> None:
        self._unsure += self.outbox.return_rest()

    def _take_up(self, spool: SharedSpool) -> None:
        """Deliver the segments of earlier processes too.

        A segment without an instance was never sent; its new instance is written to it first.
        """
        for segment in spool.take_up():
            found = self._patiently(self._registration(), wire.Registered, _as_is)
            self._note(partial(spool.note_instance, found.instance, segment))
        spool.taking_up = False
        self.outbox.wake()

    # --- declarations ------------------------------------------------------------------------

    def _learn(self) -> None:
        """Ask for the collector's declarations until it answers, and encode drafts."""
        self.outbox.asked = False  # a later request for declarations asks again
        try:
            self._learn_all()
        except Exception:
            self.outbox.asked = True
            raise
        self.outbox.wake()

    def _learn_all(self) -> None:
        if not self.declarations.is_complete:
            delivery = Delivery(self.transport, "GET", "/v1/spec")
            self.take_up(
                self._patiently(
                    delivery,
                    dict[str, Any],
                    lambda document: CollectorSpec(document, self.transport.address),
                )
            )
        for event, error in self.outbox.encode_drafts(is_last_try=self._failures + 1 >= TRIES):
            if error is None:
                self.results.count_refused("broken")
            else:
                foreign = self.outbox.is_foreign(self.outbox.owner(name_of(event)), event)
                refusal = Refusal("invalid", str(error), None, event.episode_id)
                self.results.refuse(event, refusal.with_broken_episode(), foreign=foreign)

    def take_up(self, spec: CollectorSpec) -> None:
        """Use the collector's declarations and limits."""
        self.declarations.learn(spec)
        self.outbox.bound(spec.max_events, spec.max_body)
        self.outbox.wake()

    def learn_anew(self) -> None:
        """Ask for the collector's declarations again, because the known ones are outdated."""
        self.declarations.is_outdated = True
        self.outbox.ask()

    def hold_back(self, events: Iterable[Event | GetAction]) -> None:
        """Reset the fields that the collector does not list to their defaults."""
        unlisted = self.declarations.unlisted
        for event in events if unlisted else ():
            for field in msgspec.structs.fields(event):
                if f"{event.__struct_config__.tag}.{field.name}" in unlisted:
                    setattr(event, field.name, field.default)

    def connect(self, timeout: float | None, ready: Callable[[], bool]) -> None:
        """Wait until `ready()` is true, as after the collector's answer.

        Raises Refusal if the collector refuses the client, CollectorUnavailable without an answer
        in time, or at once if the next request is later than that (as after a certificate that is
        not trusted).
        """

        def pause() -> float:
            return getattr(self._away, "retry_after", None) or 0.0

        def hopeless() -> bool:
            return self._is_stuck() or (timeout is not None and 0.0 < timeout <= pause())

        self.ensure_running()
        self.outbox.wait_until(lambda: ready() or hopeless(), timeout)
        if ready():
            return
        if self._trouble is not None:
            raise self._trouble
        if timeout is not None and 0.0 < timeout <= pause():
            text = f"{self._away}; the next request is in {pause():.0f} s"
            raise CollectorUnavailable(text, maybe_applied=False) from self._away
        raise self.no_answer(timeout)

    def no_answer(self, timeout: float | None) -> CollectorUnavailable:
        """The error of a call without an answer in `timeout` seconds, with the latest reason.

        0: it did not wait.
        """
        latest = repr(self._failure) if self._failure else self._away or self._postponed
        why = f": {latest}" if latest else ""
        within = f"within {timeout} s" if timeout else "yet"
        return CollectorUnavailable(
            f"{self.transport.address}: no answer {within}{why}", maybe_applied=False
        )

    def await_start(self, event: Start, index: int, timeout: float) -> None:
        """Wait up to `timeout` seconds for the answer to a queued start. Raises its Refusal."""
        self.outbox.hurry()
        if not self.outbox.drained(timeout, self._is_stuck, before=index + 1):
            return
        refusal = self._book.take_refusal(event.episode_id)
        if refusal is not None:
            self.results.take_unreported(lambda one: one is refusal)
            raise refusal

    # --- batches -----------------------------------------------------------------------------

    def _deliver(self, events: list[Event], instance: str) -> None:
        """Send a batch until each of its events is judged or back in the queue."""
        self.hold_back(events)
        todo = deque([(events, self._unsure > 0)])
        while todo:
            chunk, tried = todo.popleft()
            if not chunk:
                continue
            try:
                self._send(chunk, tried, instance, todo)
            except _Closing:
                raise
            except Exception as error:
                if self._failures + 1 < TRIES:
                    raise
                self._narrow(chunk, instance, todo, error)
        self._unsure = max(0, self._unsure - len(events))
        self.results.count(batches=1)
        self._log_drops()
        self.outbox.owed = self._owes_drops()

    def _send(self, chunk: list[Event], tried: bool, instance: str, todo: Parts) -> None:
        """Send a part of a batch; if it must be divided, add its smaller parts to `todo`."""
        dropped = self.outbox.dropped.total
        packed, body = self._pack(chunk, instance, dropped)
        if chunk and not packed:
            return
        chunk = packed
        delivery = Delivery(self.transport, "POST", "/v1/events", body, _MSGPACK)
        delivery.maybe_applied = tried
        try:
            reply = self._patiently(delivery, wire.EventsReply, _as_is)
        except Refusal as refusal:
            if len(chunk) > 1 and refusal.code in _SPLIT:
                todo.extendleft(_halves(chunk, delivery.maybe_applied))
                if refusal.code == "too_large":  # split other oversized parts, too
                    most = self.outbox.size.refused(len(body))
                    rest = [(piece, t) for part, t in todo for piece in cut_at(part, most)]
                    todo.clear()
                    todo.extend(rest)
                return
            errors = [(index, refusal) for index in range(len(chunk))]
            self._settle(chunk, errors, 0, instance, delivery.maybe_applied)
        else:
            errors = [(item.index, refusal_from_json(item.error)) for item in reply.refused]
            self.outbox.size.passed()
            self.held.update(reply.hold)
            self._reported_drops = dropped
            if reply.redeclared:
                self.learn_anew()
            self._settle(chunk, errors, reply.duplicates, instance, delivery.maybe_applied)
        self.results.count(resent=delivery.failures * len(chunk))

    def _narrow(self, chunk: list[Event], instance: str, todo: Parts, error: Exception) -> None:
        """Search a part of a batch for the event that causes an error.

        It is refused if it fails before and after a request without events that succeeds. Raises
        an error that no event causes.
        """
        chunk = self.outbox.in_flight(chunk)
        if not chunk:
            raise error
        if len(chunk) > 1:
            todo.extendleft(_halves(chunk, True))
            return
        self._send([], False, instance, todo)
        try:
            self._send(chunk, True, instance, todo)
            return  # the error has just passed
        except _Closing:
            raise
        except Exception as again:
            text = f"cannot be sent: {again!r}"
        (event,), parts = chunk, list(todo)
        gone = [event, *(one for part, _ in parts for one in part if _same(one, event))]
        todo.clear()
        todo.extend(([one for one in part if not _same(one, event)], t) for part, t in parts)
        for one in gone:
            refusal = Refusal("invalid", text, None, one.episode_id)
            foreign = self.outbox.is_foreign(instance, one)
            self.results.refuse(one, refusal, foreign=foreign, reason="client_error")
        self.outbox.judged(gone)

    def _logged(self, events: Sequence[Event]) -> int:
        """The number of events that the caller logged, without the client's own `broken` ends."""
        return len(events) - (sum(map(_is_cut, events)) if self.outbox.has_cut else 0)

    def _owes_drops(self) -> bool:
        """Whether dropped steps are to be reported."""
        return self.outbox.dropped.total > self._reported_drops

    def _tell_drops(self, instance: str) -> None:
        """Report dropped steps in a request without events."""
        self.outbox.owed = False  # later drops set it again
        try:
            self._send([], False, instance, deque())
        except Exception:
            self.outbox.owed = True
            raise

    def _await_reported(self, deadline: float) -> None:
        """Wait until the steps dropped so far are reported."""
        dropped = self.outbox.dropped.total
        if self._owes_drops() and not self.outbox.closed:
            self.ensure_running()
            self.outbox.owe()
            left = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
            self.outbox.wait_until(
                lambda: self._reported_drops >= dropped or self._is_stuck(), left
            )

    def _log_drops(self) -> None:
        """Log the totals of dropped steps once, when the queue is no longer full."""
        dropped, steps = self.outbox.dropped.total
        if dropped > self._logged_drops and not self.outbox.pending:
            self._logged_drops = dropped
            counts = counted(dropped, "episode"), counted(steps, "step")
            log.warning("the queue was full: %s, %s dropped so far", *counts)

    def _pack(
        self, events: list[Event], instance: str, dropped: tuple[int, int]
    ) -> tuple[list[Event], bytes]:
        """Encode a batch; events that cannot be encoded are refused one by one."""
        batch = wire.Batch(instance=instance, events=events)
        if dropped > self._base:
            episodes, steps = (now - then for now, then in zip(dropped, self._base, strict=True))
            batch.dropped = wire.Dropped(episodes=episodes, steps=steps)
        try:
            return events, _encode(batch)
        except (TypeError, ValueError, OverflowError):
            fine, raw = [], []
            for event in events:
                try:
                    raw.append(msgspec.Raw(_encode(event)))
                    fine.append(event)
                except (TypeError, ValueError, OverflowError) as error:
                    text = f"cannot be encoded: {error}"
                    self.results.refuse(event, Refusal("invalid", text, None, event.episode_id))
                    self.outbox.judged([event])
            batch.events = raw  # type: ignore[assignment]  # encoded events instead of events
            return fine, _encode(batch)

    def _settle(
        self,
        events: Sequence[Event],
        errors: Sequence[tuple[int, Refusal]],
        duplicates: int,
        instance: str,
        maybe_applied: bool,
    ) -> None:
        """Handle the reply to a part of the flight: done, refused, or to be sent again."""
        self._postponed = next((one for _, one in errors if STATUS[one.code] in UNAVAILABLE), None)
        if not errors:
            self.results.release(events)
            self.results.count(acknowledged=self._logged(events), duplicates=duplicates)
            self.outbox.judged(events)
            return
        refused = {index: refusal for index, refusal in errors if 0 <= index < len(events)}
        foreign = self.outbox.is_foreign(instance)  # that process may have sent them before
        again, wait, forgotten = to_repeat(events, refused, maybe_applied or foreign)
        starts, gone_on, put_off = self.outbox.go_on(_closed(events, refused))
        again += gone_on
        lost = self.results.take_lost(
            (name_of(events[i]), refusal) for i, refusal in refused.items()
        )
        again += [undecided(events[i]) for i in refused if name_of(events[i]) in lost]
        repeated = set(map(id, (*again, *put_off)))
        for index, refusal in refused.items():
            if id(events[index]) not in repeated and not _is_cut(events[index]):
                is_theirs = self.outbox.is_foreign(instance, events[index])
                self.results.refuse(events[index], refusal, foreign=is_theirs)
        if forgotten and not foreign:
            self.forget(instance, again)
        done = [event for index, event in enumerate(events) if index not in refused]
        self.results.release(done)
        self.results.count(acknowledged=self._logged(done), duplicates=duplicates)
        self.outbox.judged([event for event in events if id(event) not in repeated])
        if again:
            self.results.count(resent=len(again))
            kept = [event for events in lost.values() for event in events]
            self.outbox.return_flight(again, [*starts, *kept])
        if put_off:
            self.outbox.put_off(put_off)
            wait = max(wait, RETRY_SECONDS)
        if wait and self.transport.closing.wait(RETRY_DELAYS.delay(4, wait)):
            raise _Closing

    def forget(self, instance: str, again: Sequence[Event]) -> None:
        log.error(
            "%s does not know this client instance, or accepts no more starts from it: registering "
            "a new one. Episodes whose start may have arrived are not sent again",
            self.transport.address,
        )
        self._base = self._reported_drops
        self.outbox.renew(instance, again, self._book.open_ids())

    def _patiently(self, delivery: Delivery, kind: type[M], read: Callable[[M], R]) -> R:
        """Repeat a request until there is an answer, or until the sender is closed."""
        while True:
            try:
                message = read(delivery.attempt(kind))
                self._set_trouble(None, None)
                return message
            except CollectorUnavailable as error:
                self._set_trouble(error, None)
                retry_after = error.retry_after
            except Refusal as refusal:
                if kind is wire.EventsReply and (refusal.code in _SPLIT or refusal.status == 409):
                    raise
                self._set_trouble(refusal, refusal)  # such as a wrong token or path
                delivery.failures += 1
                retry_after = 1.0
            self.results.count(retries=1)
            if not delivery.wait(retry_after):
                raise _Closing

    def _set_trouble(self, error: Exception | None, refusal: Refusal | None) -> None:
        if error is not None and self._away is None:
            at = "" if self.transport.address in str(error) else f"{self.transport.address}: "
            log.warning("%s%s; logged events wait", at, error)  # the first event is not queued yet
        elif error is None and self._away is not None:
            waiting = counted(self.outbox.waiting, "event waits", "events wait")
            log.warning("%s answers again; %s", self.transport.address, waiting)
        is_news, self._away = (error is None) != (self._away is None), error
        if is_news:
            self.outbox.wake()
        if refusal is not self._trouble:
            self._trouble = self.outbox.trouble = refusal
            self.outbox.wake()

    # --- instances ---------------------------------------------------------------------------

    def _registration(self) -> Delivery:
        return Delivery(self.transport, "POST", "/v1/instances", _encode(wire.Register()), _MSGPACK)

    def _register_patiently(self) -> None:
        with self._registering:
            if self.outbox.instance is None:
                found = self._patiently(self._registration(), wire.Registered, _as_is)
                self._note(partial(self._registered, found))

    def _note(self, note: Callable[[], None]) -> None:
        """Write an instance to disk before it is used; repeat this while the disk is full."""
        failures = 0
        while True:
            try:
                note()
                break
            except (OSError, BufferFull) as error:
                failures += 1
                if failures == 1:
                    log.error("%s: sending waits until the instance can be written", error)
                if self.transport.closing.wait(RETRY_DELAYS.delay(failures)):
                    raise _Closing from error
        if failures:
            log.warning("the instance was written after %s", counted(failures, "failure"))

    def register(self, timeout: float | None = None) -> str:
        """The current instance, registered if there is none. Raises as `Delivery.run`."""
        if timeout is None:
            timeout = self.transport.timeout
        self._require_other_thread()
        if not self._registering.acquire(timeout=timeout):  # the thread holds it, and waits
            raise CollectorUnavailable(
                f"{self.transport.address}: no answer within {timeout:.1f} s", maybe_applied=False
            )
        try:
            if self.outbox.instance is None:
                self._registered(self._registration().run(wire.Registered, timeout))
            return self.outbox.instance or ""
        finally:
            self._registering.release()

    def _registered(self, registered: wire.Registered) -> None:
        self.outbox.note_instance(registered.instance)

    # --- the end -----------------------------------------------------------------------------

    def flush(self, timeout: float | None, episode_id: str | None = None) -> None:
        """Wait until all earlier events are acknowledged; see PolicyClient.flush."""
        self._require_other_thread()
        self._settle_kept()
        if (self.outbox.spool is not None or self.pending) and not self.outbox.closed:
            self.ensure_running()  # for the events of earlier processes, too
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        done, trouble = self._drain(timeout)
        if not done:
            if trouble is not None:
                raise trouble
            failure = self._failure
            latest = self._away or self._postponed
            why = f"; sending them fails: {failure!r}" if failure else ""
            why = why or (f"; last error: {latest}" if latest else "")
            waiting = counted(self.outbox.waiting, "event still waits", "events still wait")
            raise TimeoutError(f"{waiting} for {self.transport.address}{why}") from (
                failure or latest
            )
        self._await_reported(deadline)
        refused = self.results.take_unreported(lambda one: episode_id in (None, one.episode_id))
        if refused:
            raise summary(refused)
        if episode_id is not None:
            return
        if self.outbox.spool is None:
            return
        files = self.outbox.spool.files
        if lost := files.unreadable_own - self._reported_unreadable:
            self._reported_unreadable += lost
            raise ClientError(
                f"{files.directory}: {counted(lost, 'event')} cannot be read; the files are kept"
            )

    def _require_other_thread(self) -> None:
        if self.outbox.is_own_thread():
            raise ClientError(
                "expected a call from another thread than the client's own, which runs `on_error` "
                "and finalizers: the call would wait for itself"
            )

    def _settle_kept(self) -> None:
        """Have all kept events acknowledged, which the collector could still lose."""
        kept = self.results.kept.copies()
        if kept:
            self.ensure_running()
            self.outbox.put_again(kept)

    def _drain(self, timeout: float | None) -> tuple[bool, Refusal | None]:
        """(whether everything was delivered in time, the refusal that prevents it).

        If the refusal has ended by the time it is checked, the wait continues.
        """
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while True:
            left = None if timeout is None else max(0.0, deadline - time.monotonic())
            done, trouble = self.outbox.drained(left, self._is_stuck), self._trouble
            if done or trouble is not None or time.monotonic() >= deadline:
                return done, trouble
            if not self.outbox.may_wait():
                return False, None

    def _is_stuck(self) -> bool:
        return self._trouble is not None

    def close(self, timeout: float) -> None:
        """Flush for at most `timeout` seconds, then stop. Raises as `flush`.

        Spooled events are not lost: they wait for the next process, and the log says so. Called in
        the client's own thread it does not wait: the thread delivers the queue, then ends.
        """
        if self.outbox.is_own_thread():
            return self.retire()
        spool = self.outbox.spool
        try:
            self.flush(timeout)
        except TimeoutError as error:
            if spool is None:
                raise
            log.warning("%s: the next process sends the events in %s", error, spool.files.directory)
        finally:
            self.retire()
            self.transport.close()
            self.outbox.wait_until(lambda: self._is_over, 1.0)
            if spool is not None:
                spool.close()
        return None

    def retire(self) -> None:
        """Accept no new events; the thread ends when the queue is empty."""
        with contextlib.suppress(ClientError):
            self._settle_kept()
        self.running = False
        self.outbox.close()

    def finish(self) -> None:
        """At the end of the process: deliver the queue within EXIT_SECONDS."""
        notice_fork()
        if self.transport.closing.is_set():
            return
        try:
            if self.pending or self._owes_drops():
                self.flush(min(EXIT_SECONDS, self.transport.timeout))
        except Exception as error:
            spool = self.outbox.spool
            left = f"{counted(self.pending, 'event was', 'events were')} not delivered"
            if spool is not None:
                left += f", of which {spool.counts[0]} are in {spool.files.directory}"
            log.error("at exit: %s (%s)", error, left)
        self._is_late, self.running = True, False


def _halves(events: list[Event], tried: bool) -> list[tuple[list[Event], bool]]:
    """Two halves, in reverse order for `extendleft`."""
    half = len(events) // 2
    return [(events[half:], tried), (events[:half], tried)]


def _is_cut(event: Event) -> bool:
    """Whether an event is the client's own `broken` end, instead of a refused or dropped event."""
    return isinstance(event, End) and event.broken is not None


def _closed(events: Sequence[Event], refused: Mapping[int, Refusal]) -> list[Event]:
    """Refused events that may belong to episodes which continue in new ones.

    These are events of abandoned episodes, and rewards for named steps, which have other codes.
    """
    late = ("invalid", "window_closed")
    return [
        event
        for event, code in ((events[index], refused[index].code) for index in sorted(refused))
        if code == "abandoned" or (code in late and is_late(event))
    ]


def _same(event: Event, other: Event) -> bool:
    """Whether two events belong to the same episode or track."""
    return name_of(event) == name_of(other)


_senders = renewed_by_fork(Sender.after_fork)
_serials = itertools.count()


@functools.cache
def _export() -> bool:
    """Export the counts of this process's clients; done once per process."""
    return export(_clients)


def _clients() -> Iterable[tuple[Mapping[str, str], ClientStats]]:
    for sender in list(_senders):
        yield {"address": sender.transport.address, "client": str(sender.serial)}, sender.stats


def _finish_all(*_: Any, **__: Any) -> None:
    for sender in list(_senders):
        sender.finish()


def _finish_with_host(sender: Sender) -> None:
    """Deliver at the end of a multiprocessing child or Celery worker, which do not use atexit."""
    celery = sys.modules.get("celery.signals")
    if celery is not None:
        celery.worker_process_shutdown.connect(_finish_all, weak=False, dispatch_uid=__name__)
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is not None and process is not None and process.parent_process() is not None:
        util.Finalize(None, sender.finish, exitpriority=10)


atexit.register(_finish_all)
