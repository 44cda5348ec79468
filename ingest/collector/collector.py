"""The collector: the shell around the assembler, without HTTP.

    accept -> assembler (in memory) -> journal row -> group commit -> acknowledgement
    ended or cut parts -> plan (ordinals, durable) -> writer process -> record (rows dropped)

Everything here runs on one event loop. The journal has its own thread (`Committer`), so has the
waiting for the writer process (`Sealer`); both report back onto the loop. The state in memory runs
ahead of the disk; nothing is acknowledged before its row is durable, and when a write fails the
state is thrown away and rebuilt from the journal.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ingest.access.log_rate import BrokenLines
from ingest.access.tokens import NOBODY, Caller
from ingest.collector.flow_control import FlowControl
from ingest.collector.group_commit import Committer, Transaction
from ingest.collector.part_feed import DurableGate, Tap
from ingest.collector.quotas import owned
from ingest.collector.recovery import POLICY, Recovered, Totals, policies_state, recover
from ingest.collector.sealing import Sealing
from ingest.collector.statistics import CollectorStats, DroppedByClients
from ingest.collector.version_metrics import VersionMetrics
from ingest.collector.writer_thread import Sealer, Writer
from ingest.episodes.idempotency import Given
from ingest.episodes.journal_events import Ended, Event, Keyed, Started, encode_event, encode_row
from ingest.episodes.judge import Judge
from ingest.episodes.open_episode import WORTH_CUTTING
from ingest.episodes.redaction import Redactor
from ingest.episodes.sealed_parts import Limits
from ingest.histogram import Histogram
from ingest.protocol import messages as wire
from ingest.protocol.agent_names import Name, name_of
from ingest.protocol.errors import CollectorFailed, Refusal, disk_full
from storage.declarations.declaration import PolicyDeclaration
from storage.experience.episode import Part
from storage.journal.sqlite_journal import Journal

log = logging.getLogger("headrace.collector")

T = TypeVar("T")

CHECK_TOGETHER = 32
"""From so many events on, validating a batch's values at once is cheaper than one by one."""

_GROWING = (wire.Start, wire.LogAction, wire.Decision)

REWARDS_SHARE = 1.25
"""Of the memory for open episodes, until which plain rewards are taken."""

TICK_SECONDS = 0.1
TIMEOUT_CHECK_SECONDS = 1.0


class Collector:
    """Accepts events, makes them durable, turns them into shards.

    `journal` is open; `writer` is not started yet. `max_pending` bounds the bytes of parts that
    wait for a shard, `max_open` what open episodes hold: beyond them events get 429. After a full
    disk nothing is taken for `retry_seconds`. `tap` gets parts as soon as they are durable.
    `arm(policy_id, episode_id)` is what a canary assigns an episode to, "" where none is on.
    `durable` is what replies say of what they acknowledge: False for a journal in memory.
    `redaction_key` makes the pseudonyms of redacted fields.
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
        redaction_key: bytes = b"",
        limits: Limits | None = None,
        max_pending: int = 40_000_000,
        max_open: int = 1_000_000_000,
        retry_seconds: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self.policies, self.stats, self._broken = dict(policies), CollectorStats(), BrokenLines()
        self.dropped = DroppedByClients()
        self.failure: Exception | None = None
        self._last_event: float | None = None
        self.draining, self.keeps = False, durable
        self.redactor = Redactor(redaction_key)
        self._flow, self._arm, self._tap = flow, arm, tap
        self._gate = DurableGate(tap) if tap is not None else None
        self._limits, self._retry_seconds = limits, retry_seconds
        self._max_pending, self._max_open = max_pending, max_open
        self._clock, self._wall, self._began = clock, wall, clock()
        self._loop = asyncio.get_running_loop()
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._rebuilding: Refusal | None = None  # what requests hear meanwhile
        self._ticker: asyncio.Task[None] | None = None
        self._committer = Committer(
            journal,
            notify=self._notify,
            on_durable=self._on_durable,
            on_full=self._on_full,
            on_failed=self._on_failed,
        )
        self.played = VersionMetrics()
        self._sealer = Sealer(
            writer, notify=self._notify, on_moved=self._on_failed, on_written=self.played.note
        )
        self._last_timeout_check = 0.0
        self.failed = asyncio.Event()
        self._declare(journal)
        recovered = recover(journal, self.policies, limits)
        self._began -= recovered.assembler.running
        self._take_up(recovered)

    def _declare(self, journal: Journal) -> None:
        """Keep the declarations in the journal. When they are known no disk is needed to start."""
        known = journal.state(POLICY)
        fresh = dict(policies_state(self.policies).items() - known.items())
        if fresh:
            journal.commit(put=fresh)

    # --- life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the journal and writer threads and finish what an earlier run had planned."""
        self._committer.start()
        self._sealer.start()
        self._resume()
        self._ticker = asyncio.ensure_future(self._tick_forever())

    async def drain(self, timeout: float = 3.0) -> None:
        """Refuse new events, seal what has ended, wait for its shards, close the journal.

        When the journal has failed nobody waits: no shard can be recorded any more.
        """
        self.draining = True
        if self._ticker is not None:
            self._ticker.cancel()
        deadline = self._clock() + timeout
        await self._until(lambda: self._rebuilding is None, deadline)
        if self._rebuilding is None and self.failure is None:
            self._sealing.add(self.now)
            self._sealing.plan_all()
            await self._until(lambda: not self._sealing.in_flight, deadline)
        self._sealer.stop()
        if self.failure is not None or not await self._ended(self._sealer, deadline):
            if self.failure is None:  # else that is the cause, and the writer may be well
                log.warning("the shard writer does not answer: killed; its plan is kept")
            self._sealer.kill()
            await self._ended(self._sealer)
        await asyncio.sleep(0)  # a last shard's record is submitted before the journal closes
        if self._rebuilding is None and self.failure is None:
            self._sealing.settle(all_rows=True)
        self._committer.stop()
        await self._ended(self._committer)
        self._on_failed(CollectorFailed("the collector was stopped"))

    async def _until(self, done: Callable[[], bool], deadline: float) -> None:
        while not done() and self._clock() < deadline and self.failure is None:
            await asyncio.sleep(0.01)

    async def _ended(self, worker: Sealer | Committer, deadline: float = math.inf) -> bool:
        """Wait for a thread without one of our own: at interpreter exit none can be started."""
        while worker.running and self._clock() < deadline:
            await asyncio.sleep(0.01)
        return not worker.running

    def _notify(self, function: Callable[..., Any], *args: Any) -> None:
        """Run a function on the loop, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call, function, *args)

    def _call(self, function: Callable[..., Any], *args: Any) -> None:
        """What the threads report must not get lost in an error: then the collector is over."""
        try:
            function(*args)
        except Exception as error:
            log.exception("the collector cannot go on")
            self._on_failed(error)

    @property
    def now(self) -> float:
        """Seconds that the collector has been running, over its journal's whole life."""
        return self._clock() - self._began

    @property
    def submitted_row(self) -> int:
        """The latest journal row: once it is durable, everything applied so far is."""
        return self._committer.next_row - 1

    @property
    def sealing(self) -> Sealing:
        """What was sealed and is not in a recorded shard yet."""
        return self._sealing

    async def ask_journal(self, job: Callable[[Journal], T]) -> T:
        """Run a short job on the journal, after all that was submitted so far."""
        if self.failure is not None:
            raise CollectorFailed(str(self.failure))
        answer: asyncio.Future[T] = self._loop.create_future()

        def tell(found: T) -> None:
            if not answer.done():  # nobody waits any more
                answer.set_result(found)

        self._committer.call(job, tell)
        return await answer

    @property
    def epoch(self) -> int:
        """Changes when what was not durable is thrown away: row numbers are given again."""
        return self._committer.epoch

    @property
    def durable_row(self) -> int:
        """The latest journal row that is on disk."""
        return self._durable

    @property
    def rows(self) -> int:
        """Journal rows that are kept because shards do not hold all of them yet."""
        return len(self.assembler.needed) + len(self._sealing.idle_rows)

    @property
    def commits(self) -> Histogram:
        """How long commits took."""
        return self._committer.latency

    @property
    def writer_failures(self) -> int:
        """Writes of a shard that had to be repeated."""
        return self._sealer.failures

    def held(self) -> dict[str, int]:
        """Policies whose live version has acted enough steps, and that version."""
        return {} if self._flow is None else self._flow.held()

    def stalled(self) -> dict[str, float]:
        """Seconds for which clients of each policy under flow control wait; 0 if they do not."""
        return {} if self._flow is None else self._flow.stalled()

    @property
    def steps(self) -> int:
        """Steps accepted over the journal's whole life."""
        return self.assembler.steps

    @property
    def pending_bytes(self) -> int:
        """What parts that wait for a plan or for their shard hold in memory, about."""
        return self._sealing.pending_bytes

    @property
    def is_behind(self) -> bool:
        """Whether so much waits for the shard writer that nothing more is taken."""
        return self.pending_bytes > self._max_pending

    @property
    def next_ordinals(self) -> dict[str, int]:
        """Stream -> the ordinal that its next part gets."""
        return self._sealing.next_ordinals

    @property
    def totals(self) -> Totals:
        """Counts over the journal's whole life, as of the latest recorded shard."""
        return self._sealing.totals

    # --- accepting -------------------------------------------------------------------------

    def accept(
        self,
        batch: wire.Batch,
        *,
        single: bool = False,
        caller: Caller = NOBODY,
        given: Given | None = None,
    ) -> tuple[wire.EventsReply, int]:
        """Judge and apply a batch; answers the reply, to be sent once the row is durable.

        A refused event names itself in the reply. Unless `single`, one that is refused for its
        content closes its episode as broken, if its client instance started that. `caller` owns
        the episodes that start; `given` is the key of a batch of one. Raises Refusal when nothing
        can be accepted now.
        """
        if self.known(given) is not None:
            self.stats.duplicates += 1
            return wire.EventsReply(durable=self.keeps, accepted=1), self.submitted_row
        self.require_room(batch)
        return self._taken(batch, single, caller, given)

    def accept_slice(
        self, batch: wire.Batch, first: int, caller: Caller
    ) -> tuple[wire.EventsReply, int]:
        """`accept` for the events from `first` on of a batch that there was room for."""
        self._require_open()
        return self._taken(batch, False, caller, None, first)

    def _taken(
        self,
        batch: wire.Batch,
        single: bool,
        caller: Caller,
        given: Given | None,
        first: int = 0,
    ) -> tuple[wire.EventsReply, int]:
        try:
            return self._accept(batch, single, caller, given, first)
        except Refusal:
            raise
        except Exception:
            # Part of the batch may be applied already, and none of it is in the journal.
            log.exception("a batch cannot be applied; rebuilding from the journal")
            self._rebuild(Refusal("busy", "the state is being rebuilt", retry_after=1.0))
            raise

    @property
    def silent_seconds(self) -> float | None:
        """Since the last event was taken; None where none was since the start."""
        return None if self._last_event is None else self._clock() - self._last_event

    def known(self, given: Given | None) -> Keyed | None:
        """A key that came before. Raises Refusal: with other content, or when nothing is taken."""
        self._require_open()
        return None if given is None else self.keys.find(given)

    def compose(self, fill: Callable[[Callable[[Event, bytes], None]], None]) -> int:
        """One journal row of what `fill` applies, an event and its encoding at a time.

        Answers the row that the answer waits for. Raises Refusal when nothing can be accepted.
        """
        self._require_open()
        row, received, encoded = self._committer.next_row, self._wall(), list[bytes]()
        try:
            fill(lambda event, blob: self._apply(event, blob, encoded, row, received))
        except Exception:
            log.exception("an import cannot be applied; rebuilding from the journal")
            self._rebuild(Refusal("busy", "the state is being rebuilt", retry_after=1.0))
            raise
        self._last_event = self._clock()
        return self._append(encoded, received)

    def drop_staged(self, key: int) -> None:
        """Forget the pieces of an episode whose import stopped, unless it is over."""
        self._sealing.idle_rows += self.assembler.drop_staged(key)

    def tell_broken(self, name: Name, cause: str) -> None:
        """Count an episode that was broken, and tell the log of it, within its rate."""
        self.stats.broken += 1
        self._broken.tell(name, cause, self.now)

    @property
    def is_full(self) -> bool:
        """Whether open episodes, and those in their reward windows, fill their memory."""
        return self.assembler.open_bytes > self._max_open

    def _arm_of(self, started: Started) -> str:
        """What a canary assigns a start to: an agent that joins, to what its episode was."""
        whole = self.assembler.wholes.get(started.episode_id)
        known = None if whole is None else whole.arms.get(started.policy_id)
        return self._arm(started.policy_id, started.episode_id) if known is None else known

    def _accept(
        self, batch: wire.Batch, single: bool, caller: Caller, given: Given | None, first: int
    ) -> tuple[wire.EventsReply, int]:
        assembler, judge, received = self.assembler, self.judge, self._wall()
        many = len(batch.events) >= CHECK_TOGETHER
        values = judge.check_values(batch) if many else {}
        row = self._committer.next_row
        encoded: list[bytes] = []
        reply = wire.EventsReply(durable=self.keeps, accepted=0)
        for index, event in enumerate(batch.events):
            try:
                judged = judge.judge(batch.instance, event, values.get(index), now=self.now)
                if judged is not None and isinstance(started := judged[0], Started):
                    arm = self._arm_of(started)
                    if arm or caller.token_id:
                        judged = owned(started, caller, assembler.open_of, arm)
            except Refusal as refusal:
                self.stats.refused += 1
                self.stats.refused_by[refusal.code] += 1
                reply.refused.append(wire.ItemError.of(first + index, refusal))
                breaks = refusal.breaks_episode and not isinstance(event, wire.Start)
                if breaks and not single and judge.is_owner(batch.instance, name_of(event)):
                    self._break(name_of(event), str(refusal), encoded, row, received)
                continue
            if judged is None:
                reply.duplicates += 1
                self.stats.unsampled += judge.is_left_out(event)
            else:
                reply.accepted += 1
                if isinstance(event, wire.End) and event.broken is not None:
                    self._break(name_of(event), event.broken, encoded, row, received)
                else:
                    self._apply(*judged, encoded, row, received)
        if batch.dropped is not None and assembler.instances.get(batch.instance or "") is not None:
            self.dropped.note(batch.instance or "", batch.dropped)
        if given is not None and reply.accepted:
            encoded.append(self.keys.note(given, assembler.episodes.get(given.track)))
        if reply.accepted:
            self._last_event = self._clock()
        self.stats.accepted += reply.accepted
        self.stats.duplicates += reply.duplicates
        fresh = self._hold(reply, encoded, row, received)
        waits_for = self._append(encoded, received)
        if fresh:
            self._sealing.plan_all()
        return reply, waits_for

    def _hold(
        self, reply: wire.EventsReply, encoded: list[bytes], row: int, received: int
    ) -> list[str]:
        """Tell which policies are held; those that are so for the first time are cut at once."""
        flow = self._flow
        if flow is None or not flow.active:
            return []
        reply.hold = flow.told()
        fresh = flow.newly_held(flow.held())
        for cut in list(self.assembler.cuts(fresh, self.now)) if fresh else ():
            self._apply(cut, encode_event(cut), encoded, row, received)
        return fresh

    def register(
        self, request: wire.Register, owner: str = "", content: tuple[bytes, int] | None = None
    ) -> tuple[wire.Registered, int]:
        """Register a client instance, or find the import of that name of that token again.

        `content` is what a bulk import's key stands for from now on: (digest, rows).
        """
        self._require_open()
        secret = secrets.token_hex(8)
        instance, events = self.assembler.find_instance(secret, request.name, owner, content)
        encoded: list[bytes] = []
        row, received = self._committer.next_row, self._wall()
        for event in events:
            self._apply(event, encode_event(event), encoded, row, received)
        row = self._append(encoded, received)
        starts = self.assembler.instances.starts_of(instance)
        return wire.Registered(instance=instance, starts=starts, durable=self.keeps), row

    async def durable(self, row: int) -> None:
        """Wait until journal row `row` is on disk.

        Raises Refusal (disk_full) when it will not be, CollectorFailed when the journal is gone.
        """
        if self.failure is not None or row > self._durable:
            await self.when_durable(row)

    def when_durable(self, row: int) -> asyncio.Future[None]:
        """The same as a future, which hears from here on what becomes of the row."""
        future = self._loop.create_future()
        if self.failure is not None:
            future.set_exception(CollectorFailed(str(self.failure)))
        elif row <= self._durable:
            future.set_result(None)
        else:
            self._waiters.append((row, future))
        return future

    def _require_open(self) -> None:
        if self.failure is not None:
            raise CollectorFailed(str(self.failure))
        if self.draining:
            raise Refusal("draining", "the collector is shutting down", retry_after=1.0)
        if self._rebuilding is not None:
            raise replace(self._rebuilding)
        if self.is_behind:
            text = f"{self.pending_bytes} bytes wait to be written to shards"
            raise Refusal("busy", text, retry_after=0.2)
        if self._tap is not None and self._tap.full:
            raise Refusal("busy", "nobody reads what is here already", retry_after=0.5)

    def require_room(self, batch: wire.Batch) -> None:
        """Refuse what makes open episodes larger while they fill their memory.

        Ends may come, with any rewards in the same batch; for a while also rewards alone, which a
        client may have to send ahead of an end, and of which little is kept beside a sum.
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
            text = f"open episodes hold {held} bytes, at most {self._max_open} are set aside"
            raise Refusal("busy", text, retry_after=1.0)

    def _apply(
        self, event: Event, blob: bytes, encoded: list[bytes], row: int, received: int
    ) -> None:
        """Apply one event that goes into row `row`, and the cut that it may call for."""
        assembler, now = self.assembler, self.now
        assembler.apply(event, blob, row=row, received=received, now=now)
        encoded.append(blob)
        if isinstance(event, Ended):
            self.stats.ended[event.how] += 1
        key = getattr(event, "key", None)
        cut = assembler.cut_for_size(key, now) if key is not None else None
        if cut is not None:
            blob = encode_event(cut)
            assembler.apply(cut, blob, row=row, received=received, now=now)
            encoded.append(blob)

    def _break(self, name: Name, cause: str, encoded: list[bytes], row: int, received: int) -> None:
        for ended in self.assembler.break_episode(name, cause):
            self.tell_broken(name, cause)
            self._apply(ended, encode_event(ended), encoded, row, received)

    def _append(self, encoded: list[bytes], received: int, *, ticks: bool = False) -> int:
        """Submit the row of the events; answers the row that an acknowledgement waits for.

        `ticks`: one without events too, which says how long the collector has been running.
        """
        if not (encoded or ticks):
            return self._committer.next_row - 1
        row = self._committer.append(encode_row(received, self.assembler.steps, encoded, self.now))
        if row not in self.assembler.needed:
            self._sealing.idle_rows.append(row)
        self._sealing.add(self.now)
        return row

    # --- journal results -------------------------------------------------------------------

    def _on_durable(self, row: int) -> None:
        self._durable = row
        if self._gate is not None:
            self._gate.open(row)
        waiters = self._waiters
        while waiters and waiters[0][0] <= row:
            future = waiters.popleft()[1]
            if not future.done():
                future.set_result(None)

    def _on_full(self, error: Exception) -> None:
        """The disk is full: refuse what is not durable, and rebuild from what is."""
        log.error("journal: %s; refusing events until there is room", error)
        self._fail_waiters(disk_full())
        self._rebuild(disk_full(), after=self._retry_seconds)

    def _rebuild(self, meanwhile: Refusal, *, after: float = 0.0) -> None:
        """Throw the state away and read it back from the journal; requests hear `meanwhile`."""
        self._rebuilding = meanwhile
        self.stats.rebuilt += 1
        self._committer.new_epoch()
        rebuilt = self._guard(self._rebuilt)
        self._loop.call_later(after, self._committer.call, self._recover, rebuilt)

    def _recover(self, journal: Journal) -> Recovered:
        return recover(journal, self.policies, self._limits, self.now)

    def _rebuilt(self, recovered: Recovered) -> None:
        self._committer.restart_rows(recovered.last_row)
        self._take_up(recovered)
        self._rebuilding = None
        self._resume()

    def _guard(self, function: Callable[[T], None]) -> Callable[[T], None]:
        """The function as long as the state is not rebuilt; nothing from then on."""
        epoch = self._committer.epoch

        def run(value: T) -> None:
            if epoch == self._committer.epoch:
                function(value)

        return run

    def _transact(self, change: Transaction, then: Callable[[], None]) -> None:
        self._committer.transact(change, self._guard(lambda _: then()))

    def _on_failed(self, error: Exception) -> None:
        if self.failure is None:
            self.failure = error
        self._fail_waiters(CollectorFailed(str(error)))
        self.failed.set()

    def _fail_waiters(self, error: Exception) -> None:
        while self._waiters:
            future = self._waiters.popleft()[1]
            if not future.done():
                future.set_exception(error)

    def _take_up(self, recovered: Recovered) -> None:
        """Continue from a journal's state."""
        self.assembler = recovered.assembler
        self.judge = Judge(self.assembler, self.redactor)
        if self._flow is not None and self._flow.active:
            self.assembler.on_closed = self._flow.count
        self.collector_id, self.keys = recovered.collector_id, recovered.keys
        self.damage = recovered.damage
        if self.damage:
            log.error("journal damage: %s", self.damage)
        self._durable = recovered.last_row
        if self._gate is not None:
            self._gate.forget()
        self._sealing = Sealing(
            recovered,
            self._sealer,
            transact=self._transact,
            guard=self._guard,
            fresh=self._hold_back if self._tap is not None else None,
            written=self._tap.written if self._tap is not None else None,
        )

    def _hold_back(self, stream: str, canonical_json: str, parts: list[Part]) -> None:
        """Parts go to the tap once the row that sealed them, the latest one, is on disk."""
        if self._gate is not None:
            self._gate.hold(self.submitted_row, stream, canonical_json, parts)
            self._gate.open(self._durable)

    def _resume(self) -> None:
        """Go on with what was planned, waiting or torn when the state was taken up."""
        self._sealing.resume(self.now)
        encoded: list[bytes] = []
        row, received = self._committer.next_row, self._wall()
        for name in self.assembler.torn_episodes():
            self._break(name, "the journal lost rows of it", encoded, row, received)
        self._append(encoded, received)

    # --- time ------------------------------------------------------------------------------

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            if self._rebuilding is None and self.failure is None:
                self._call(self.tick)

    def tick(self) -> None:
        """What time calls for: time-outs, cuts, shards that waited long enough."""
        now = self.now
        if now - self._last_timeout_check >= TIMEOUT_CHECK_SECONDS:
            self._last_timeout_check = now
            self._apply_due(now)
        self._sealing.plan_due(now)
        self._sealing.settle()
        self._broken.rest(now)

    def _apply_due(self, now: float) -> None:
        encoded: list[bytes] = []
        row, received = self._committer.next_row, self._wall()
        for event in self.assembler.tick(now):
            if getattr(event, "how", None) == "abandoned":
                self.stats.abandoned += 1
            self._apply(event, encode_event(event), encoded, row, received)
        if self.assembler.open_bytes > self._max_open * 3 // 4:
            for cut in list(self.assembler.cuts(self.policies, now, least=WORTH_CUTTING)):
                self._apply(cut, encode_event(cut), encoded, row, received)
        self._append(encoded, received, ticks=self.assembler.waits)
