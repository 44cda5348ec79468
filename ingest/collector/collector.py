"""The collector without HTTP: it connects the assembler with the journal and the shard writer.

    accept -> assembler (in memory) -> journal row -> group commit -> acknowledgement
    ended or cut parts -> plan (ordinals, durable) -> writer process -> record (rows dropped)

Everything here runs on one event loop. Two threads report to it: `Committer` writes the journal,
`Sealer` waits for the writer process. The state in memory is ahead of the disk (`LoopJournal`).
Nothing is acknowledged before its row is durable; if a write fails, the state is discarded and
rebuilt from the journal.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ingest.access.log_rate import BrokenLines
from ingest.access.tokens import NOBODY, Caller
from ingest.collector.flow_control import FlowControl
from ingest.collector.group_commit import LoopJournal
from ingest.collector.part_feed import Tap
from ingest.collector.quotas import owned
from ingest.collector.recovery import POLICY, Recovered, policies_state, recover
from ingest.collector.sealing import Sealing
from ingest.collector.statistics import CollectorStats, DroppedByClients, LateRewards, late_reward
from ingest.collector.version_metrics import VersionMetrics
from ingest.collector.writer_thread import Sealer, Writer
from ingest.episodes.assembler import EpisodeAssembler
from ingest.episodes.idempotency import Given
from ingest.episodes.journal_events import (
    Ended,
    JournalEvent,
    Keyed,
    Started,
    encode_event,
    encode_row,
)
from ingest.episodes.judge import Judge
from ingest.episodes.open_episode import WORTH_CUTTING
from ingest.episodes.redaction import Redactor
from ingest.episodes.sealed_parts import Limits
from ingest.protocol import messages as wire
from ingest.protocol.agent_names import Name, name_of
from ingest.protocol.errors import CollectorFailed, Refusal
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.tombstones import Tombstones
from storage.experience.episode import Part
from storage.journal.records import Journal

log = logging.getLogger("headrace.collector")

T = TypeVar("T")

CHECK_TOGETHER = 32
"""From this number of events, validating a batch's values at once is faster than one by one."""

_GROWING = (wire.Start, wire.LogAction, wire.Decision)

REWARDS_SHARE = 1.25
"""Plain rewards are accepted until open episodes exceed their memory limit by this factor."""

TICK_SECONDS = 0.1
TIMEOUT_CHECK_SECONDS = 1.0


class OpenRow:
    """A journal row under construction: events, applied to the assembler in order, at one time.

    A replay of the row has the same effect on an assembler in the same state.
    """

    __slots__ = ("_assembler", "_stats", "_tell_broken", "encoded", "now", "number", "received")

    def __init__(
        self,
        assembler: EpisodeAssembler,
        stats: CollectorStats,
        tell_broken: Callable[[Name, str], None],
        number: int,
        received: int,
        now: float,
    ) -> None:
        self._assembler, self._stats, self._tell_broken = assembler, stats, tell_broken
        self.number, self.received, self.now = number, received, now
        self.encoded: list[bytes] = []

    def apply(self, event: JournalEvent, blob: bytes | None = None) -> None:
        """Apply an event (`blob` is its encoding, if known), then cut the episode if it is due."""
        assembler, now = self._assembler, self.now
        blob = encode_event(event) if blob is None else blob
        assembler.apply(event, blob, row=self.number, received=self.received, now=now)
        self.encoded.append(blob)
        if isinstance(event, Ended):
            self._stats.ended[event.how] += 1
        key = getattr(event, "key", None)
        cut = assembler.cut_for_size(key, now) if key is not None else None
        if cut is not None:
            self.apply(cut)

    def break_episode(self, name: Name, cause: str) -> None:
        """End an episode, with the tracks of all agents, as broken."""
        for ended in self._assembler.break_episode(name, cause):
            self._tell_broken(name, cause)
            self.apply(ended)

    def encode(self) -> bytes:
        return encode_row(self.received, self._assembler.steps, self.encoded, self.now)


class Collector:
    """Accepts events as journal rows, and passes completed parts on to be sealed.

    `journal` has the durable rows and the state of the journal, `sealing` the parts that wait for a
    shard, `sealer` the shard writer's thread, `flow` the held policies. `assembler`, `keys` and
    `sealing` belong to one state of the journal and are replaced together when that is read back,
    so they may be other objects after an `await`.

    Args:
        journal: open; only this collector may use it from now on.
        writer: not started yet.
        arm: `arm(policy_id, episode_id)` returns the canary arm of an episode, "" without a canary.
        tap: receives parts as soon as they are durable.
        durable: the `durable` field of replies; False for a journal in memory.
        root: the folder with the histories of rewards; None: they are in memory only.
        redaction_key: the key of the pseudonyms of redacted fields, and of tombstones.
        max_pending: bytes of parts that may wait for a shard; above it, events get 429.
        max_open: bytes that open episodes may use; above it, events get 429.
        retry_seconds: seconds without accepting events after the disk was full.
        loop: the event loop that the threads report to; default: the running one.
    """

    def __init__(
        self,
        journal: Journal,
        writer: Writer,
        policies: Mapping[str, PolicyDeclaration],
        *,
        flow: FlowControl | None = None,
        arm: Callable[[str, str], str] = lambda policy_id, episode_id: "",
        tap: Tap | None = None,
        durable: bool = True,
        root: Path | None = None,
        redaction_key: bytes = b"",
        limits: Limits | None = None,
        max_pending: int = 40_000_000,
        max_open: int = 1_000_000_000,
        retry_seconds: float = 0.5,
        loop: asyncio.AbstractEventLoop | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self.policies, self.stats, self._broken = dict(policies), CollectorStats(), BrokenLines()
        self.dropped, self.late = DroppedByClients(), LateRewards()
        self.played = VersionMetrics(root, self.policies)
        self._last_event: float | None = None
        self.draining, self.keeps = False, durable
        self.redactor, self._redaction_key = Redactor(redaction_key), redaction_key
        self.flow = FlowControl({}, lambda policy_id: None) if flow is None else flow
        self._arm, self._tap = arm, tap
        self._max_pending, self._max_open = max_pending, max_open
        self._clock, self._wall, self._began = clock, wall, clock()
        self._ticker: asyncio.Task[None] | None = None
        self._last_timeout_check = 0.0
        self.journal = LoopJournal(
            journal,
            loop=loop or asyncio.get_running_loop(),
            recover=lambda journal: recover(journal, self.policies, limits, self.now),
            take_up=self._go_on,
            retry_seconds=retry_seconds,
        )
        self.sealer = Sealer(
            writer,
            notify=self.journal.notify,
            on_moved=self.journal.fail,
            on_written=self.played.note,
        )
        self._declare(journal)
        recovered = recover(journal, self.policies, limits)
        self._began -= recovered.assembler.running
        self._take_up(recovered)

    def _declare(self, journal: Journal) -> None:
        """Store the declarations in the journal, unless it has them: most starts write nothing."""
        known = journal.state(POLICY)
        fresh = dict(policies_state(self.policies).items() - known.items())
        if fresh:
            journal.commit(put=fresh)

    # --- life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the journal's and the writer's thread, and complete the plans of earlier runs."""
        self.journal.committer.start()
        self.sealer.start()
        self._resume()
        self._ticker = asyncio.ensure_future(self._tick_forever())

    async def drain(self, timeout: float = 3.0) -> None:
        """Refuse new events, seal ended episodes, wait for their shards, close the journal.

        It waits up to `timeout` seconds, and not at all if the journal has failed, because no shard
        can be recorded then.
        """
        self.draining = True
        if self._ticker is not None:
            self._ticker.cancel()
        deadline = self._clock() + timeout
        journal, sealer, failed = self.journal, self.sealer, self.journal.failed.is_set
        await self._until(lambda: journal.rebuilding is None or failed(), deadline)
        if journal.is_usable:
            self.sealing.add(self.now)
            self.sealing.plan_all()
            await self._until(lambda: not self.sealing.in_flight or failed(), deadline)
        sealer.stop()
        if failed() or not await self._until(lambda: not sealer.running, deadline):
            if not failed():  # a failed journal is another cause
                log.warning("the shard writer does not respond: killed; its plan is kept")
            sealer.kill()
            await self._until(lambda: not sealer.running)
        await asyncio.sleep(0)  # lets the last shard's record be submitted first
        if journal.is_usable:
            self.sealing.settle(all_rows=True)
        journal.committer.stop()
        await self._until(lambda: not journal.committer.running)
        journal.fail(CollectorFailed("the collector was stopped"))

    async def _until(self, done: Callable[[], bool], deadline: float = math.inf) -> bool:
        """Poll instead of using a thread: none can be started while the interpreter exits."""
        while not done() and self._clock() < deadline:
            await asyncio.sleep(0.01)
        return done()

    @property
    def now(self) -> float:
        """The running time: seconds that collectors have run on this journal, in total."""
        return self._clock() - self._began

    @property
    def is_behind(self) -> bool:
        """Whether no events are accepted because too many bytes wait for the shard writer."""
        return self.sealing.pending_bytes > self._max_pending

    # --- accepting -------------------------------------------------------------------------

    def accept(
        self,
        batch: wire.Batch,
        *,
        single: bool = False,
        caller: Caller = NOBODY,
        given: Given | None = None,
    ) -> tuple[wire.EventsReply, int]:
        """Judge and apply a batch; return the reply and the row that must be durable before it.

        The reply names refused events. Unless `single`, an event that is refused for its content
        ends its episode as broken, if the batch's client instance started the episode. `caller`
        owns the episodes that start; `given` is the Idempotency-Key of a batch with one event.
        Raises Refusal if nothing can be accepted now.
        """
        if self.known(given) is not None:
            self.stats.duplicates += 1
            return wire.EventsReply(durable=self.keeps, accepted=1), self.journal.submitted_row
        self.require_room(batch)
        return self._accept(batch, single=single, caller=caller, given=given)

    def accept_slice(
        self, batch: wire.Batch, first: int, caller: Caller
    ) -> tuple[wire.EventsReply, int]:
        """`accept` for events of a batch from index `first`, after `require_room` for all."""
        self._require_open()
        return self._accept(batch, first=first, caller=caller)

    def _accept(
        self,
        batch: wire.Batch,
        *,
        first: int = 0,
        single: bool = False,
        caller: Caller,
        given: Given | None = None,
    ) -> tuple[wire.EventsReply, int]:
        reply = wire.EventsReply(durable=self.keeps, accepted=0)

        def fill(row: OpenRow) -> list[str]:
            self._judge(batch, row, reply, first, single, caller)
            if given is not None and reply.accepted:
                row.encoded.append(self.keys.note(given, self.assembler.episodes.get(given.track)))
            return self._hold(reply, row)

        cut, waits_for = self._composed(fill)
        if reply.accepted:
            self._last_event = self._clock()
        if cut:
            self.sealing.plan_all()
        return reply, waits_for

    @property
    def silent_seconds(self) -> float | None:
        """Seconds since the last event was accepted; None if there was none since the start."""
        return None if self._last_event is None else self._clock() - self._last_event

    def known(self, given: Given | None) -> Keyed | None:
        """The earlier request with this key, if any.

        Raises Refusal if it had another content, or if nothing can be accepted now.
        """
        self._require_open()
        return None if given is None else self.keys.find(given)

    def compose(self, fill: Callable[[OpenRow], None]) -> int:
        """Submit a journal row with the events that `fill` applies to it.

        Returns the row that must be durable before the reply is sent. Raises Refusal if nothing can
        be accepted now.
        """
        self._require_open()
        _, waits_for = self._composed(fill)
        self._last_event = self._clock()
        return waits_for

    def _composed(self, fill: Callable[[OpenRow], T]) -> tuple[T, int]:
        """The result of `fill`, and the row that must be durable before the acknowledgement."""
        row = self._row()
        try:
            return fill(row), self._submit(row)
        except Exception:
            # Some events may be applied already, but none is in the journal.
            log.exception("events cannot be applied; rebuilding from the journal")
            self.journal.rebuild(Refusal("busy", "the state is being rebuilt", retry_after=1.0))
            raise

    def _row(self) -> OpenRow:
        number, now = self.journal.submitted_row + 1, self._clock() - self._began
        return OpenRow(self.assembler, self.stats, self.tell_broken, number, self._wall(), now)

    def _submit(self, row: OpenRow, *, ticks: bool = False) -> int:
        """Submit a row; return the row that must be durable before an acknowledgement.

        `ticks`: submit it even without events, to store the running time.
        """
        if not (row.encoded or ticks):
            return self.journal.submitted_row
        number = self.journal.append(row.encode())
        if number not in self.assembler.needed:
            self.sealing.idle_rows.append(number)
        self.sealing.add(row.now)
        return number

    def drop_staged(self, key: int) -> None:
        """Drop the pieces of an episode whose import stopped, unless the episode has ended."""
        self.sealing.idle_rows += self.assembler.drop_staged(key)

    def tell_broken(self, name: Name, cause: str) -> None:
        """Count a broken episode, and log it at a limited rate."""
        self.stats.broken += 1
        self._broken.tell(name, cause, self.now)

    @property
    def is_full(self) -> bool:
        """Whether open episodes, and those in reward windows, have reached their memory limit."""
        return self.assembler.open_bytes > self._max_open

    def _arm_of(self, started: Started) -> str:
        """The canary arm of a start; an agent that joins gets its episode's arm."""
        whole = self.assembler.wholes.get(started.episode_id)
        known = None if whole is None else whole.arms.get(started.policy_id)
        return self._arm(started.policy_id, started.episode_id) if known is None else known

    def _judge(
        self,
        batch: wire.Batch,
        row: OpenRow,
        reply: wire.EventsReply,
        first: int,
        single: bool,
        caller: Caller,
    ) -> None:
        """Apply the events that are not refused, and fill in the reply."""
        assembler, judge, stats, now = self.assembler, self.judge, self.stats, row.now
        many = len(batch.events) >= CHECK_TOGETHER
        values = judge.check_values(batch) if many else {}
        for index, event in enumerate(batch.events):
            try:
                judged = judge.judge(batch.instance, event, values.get(index), now=now)
                if judged is not None and isinstance(started := judged[0], Started):
                    today = assembler.policies.rules[started.policy_id]
                    reply.redeclared |= started.schema_id != today.schema_id
                    arm = self._arm_of(started)
                    if arm or caller.token_id:
                        judged = owned(started, caller, assembler.open_of, arm)
            except Refusal as refusal:
                stats.refused += 1
                stats.refused_by[refusal.code] += 1
                if refusal.code == "window_closed":
                    self._note_late(event, row.received)
                breaks = refusal.breaks_episode and not isinstance(event, wire.Start)
                if breaks and not single and judge.is_owner(batch.instance, name_of(event)):
                    row.break_episode(name_of(event), str(refusal))
                    refusal = refusal.with_broken_episode()
                reply.refused.append(wire.ItemError.of(first + index, refusal))
                continue
            if judged is None:
                reply.duplicates += 1
                stats.unsampled += judge.is_left_out(event)
            else:
                reply.accepted += 1
                if isinstance(event, wire.End) and event.broken is not None:
                    row.break_episode(name_of(event), event.broken)
                else:
                    row.apply(*judged)
        if batch.dropped is not None and assembler.instances.get(batch.instance or "") is not None:
            self.dropped.note(batch.instance or "", batch.dropped)
        stats.accepted += reply.accepted
        stats.duplicates += reply.duplicates

    def _note_late(self, event: Any, received: int) -> None:
        """Count a reward that came after its step's window."""
        kind = late_reward(self.assembler, name_of(event), event.step, received)
        if kind is not None:
            reward = (name_of(event), event.step, event.reward_id or "", event.seq, event.reward)
            self.late.note(reward, kind)

    def _hold(self, reply: wire.EventsReply, row: OpenRow) -> list[str]:
        """Set the held policies in the reply; cut the episodes of newly held ones at once."""
        flow = self.flow
        if not flow.active:
            return []
        reply.hold = flow.versions_to_hold()
        fresh = flow.newly_held(flow.held())
        for cut in list(self.assembler.cuts(fresh, row.now)) if fresh else ():
            row.apply(cut)
        return fresh

    def register(
        self, request: wire.Register, owner: str = "", content: tuple[bytes, int] | None = None
    ) -> tuple[wire.Registered, int]:
        """Register a client instance, or find the token's earlier import of the same name.

        `content` is that of a bulk import, which its key will stand for: (digest, rows).
        """
        self._require_open()
        secret = secrets.token_hex(8)
        instance, events = self.assembler.find_instance(secret, request.name, owner, content)

        def fill(row: OpenRow) -> None:
            for event in events:
                row.apply(event)

        _, waits_for = self._composed(fill)
        starts = self.assembler.instances.starts_of(instance)
        return wire.Registered(instance=instance, starts=starts, durable=self.keeps), waits_for

    def _require_open(self) -> None:
        journal = self.journal
        if journal.failure is not None:
            raise CollectorFailed(str(journal.failure))
        if self.draining:
            raise Refusal("draining", "the collector is shutting down", retry_after=1.0)
        if journal.rebuilding is not None:
            raise replace(journal.rebuilding)
        if self.is_behind:
            text = f"{self.sealing.pending_bytes} bytes wait to be written to shards"
            raise Refusal("busy", text, retry_after=0.2)
        if self._tap is not None and self._tap.full:
            raise Refusal(
                "busy", "the queue is full: the trainer has not read it yet", retry_after=0.5
            )

    def require_room(self, batch: wire.Batch) -> None:
        """Refuse events that make open episodes larger while these are at their memory limit.

        Ends are accepted, with rewards in the same batch. Up to `REWARDS_SHARE` of the limit,
        rewards alone are accepted too: clients may have to send them before an end, and most are
        stored only as a sum.
        """
        if not self.is_full:
            return
        held = self.assembler.open_bytes
        ends = {name_of(event) for event in batch.events if isinstance(event, wire.End)}
        far = held > REWARDS_SHARE * self._max_open
        if any(
            (event.grows or far) and name_of(event) not in ends
            if isinstance(event, wire.LogReturns)
            else isinstance(event, _GROWING)
            for event in batch.events
        ):
            text = f"expected open episodes of at most {self._max_open} bytes, got {held} bytes"
            raise Refusal("busy", text, retry_after=1.0)

    # --- one state of the journal ----------------------------------------------------------

    def _take_up(self, recovered: Recovered) -> None:
        """Use the state that was read from the journal."""
        self.assembler = recovered.assembler
        self.erased = Tombstones(self._redaction_key, recovered.tombstones)
        self.judge = Judge(self.assembler, self.redactor, self.erased)
        if self.flow.active:
            self.assembler.on_closed = self.flow.count
        self.collector_id, self.keys = recovered.collector_id, recovered.keys
        self.damage = recovered.damage
        if self.damage:
            log.error("journal damage: %s", self.damage)
        self.sealing = Sealing(
            recovered,
            self.sealer.submit,
            transact=self.journal.transact,
            guard=self.journal.guard,
            fresh=None if self._tap is None else partial(self._offer, self._tap),
            written=None if self._tap is None else self._tap.written,
        )

    def _offer(self, tap: Tap, stream: str, canonical_json: str, parts: list[Part]) -> None:
        """Offer parts to the tap once the row that sealed them (the latest row) is on disk."""

        def offer(lost: Exception | None) -> None:
            if lost is None:  # otherwise a replay offers them again, if the journal has them
                tap.offer(stream, canonical_json, parts)

        self.journal.tell(self.journal.submitted_row, offer)

    def _resume(self) -> None:
        """Continue with open plans, waiting parts and incomplete episodes of the read state."""
        self.sealing.resume(self.now)
        row = self._row()
        for name in self.assembler.torn_episodes():
            row.break_episode(name, "the journal lost some of its rows")
        self._submit(row)

    def _go_on(self, recovered: Recovered) -> None:
        self._take_up(recovered)
        self._resume()

    # --- time ------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self.journal.is_usable:
                self.journal.call(self.tick)

    def tick(self) -> None:
        """Apply everything that is due: timeouts, cuts, and plans of shards."""
        now = self.now
        if now - self._last_timeout_check >= TIMEOUT_CHECK_SECONDS:
            self._last_timeout_check = now
            self._apply_due(now)
        self.sealing.plan_due(now)
        self.sealing.settle()
        self._broken.rest(now)

    def _apply_due(self, now: float) -> None:
        row = self._row()
        for event in self.assembler.tick(now):
            row.apply(event)
        if self.assembler.open_bytes > self._max_open * 3 // 4:
            for cut in list(self.assembler.cuts(self.policies, now, least=WORTH_CUTTING)):
                row.apply(cut)
        self._submit(row, ticks=self.assembler.waits)
