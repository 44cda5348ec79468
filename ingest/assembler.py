"""EpisodeAssembler: the state machine of episodes, without input or output.

    wire event --judge--> journal event --apply--> state --> sealed parts

`judge` reads state and never changes it; it answers a journal event, or None for a retry that is
known already, or raises Refusal. `apply` is the only thing that changes state, so that applying the
journal's rows again is the same history. Time is an argument (`now`: seconds that the collector has
been running; `received`: microseconds since the epoch).

What each event means in each state of its episode:

    state       start            log_action, decision   log_returns   end
    ABSENT      -> IDLE          not_found              not_found     not_found
    IDLE        already_started  -> ACTING              no_action     -> ended, no rows
    ACTING      already_started  closes a step, opens   adds to the   -> ended
                                 the next               open step
    ended       completed        completed              completed     completed
    abandoned   abandoned        abandoned              abandoned     abandoned
    broken      broken           broken                 broken        broken

A repeated sequence number with equal content is a retry in every state; with other content it is a
conflict; a number too far on is a gap. Content is compared back to the episode's latest cut: what
lies before it, or in an episode that is over, counts as a retry by its number alone.

An event that follows a get_action names the decision that was acted on. Where the open step holds
another one (the collector was killed before its disk had it, and was asked once more), the event is
refused as `decision_unknown`, and the `decision` that the client sends then takes its place.
"""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from typing import Any

from ingest import wire
from ingest.errors import Refusal, already_started, not_found
from ingest.events import (
    Acted,
    Cut,
    Ended,
    Event,
    Imported,
    Opened,
    Redecided,
    Rewarded,
    RewardedStep,
    Started,
    digest,
    encode_event,
)
from ingest.imported import sealed_episodes
from ingest.instances import Instances
from ingest.judgements import (
    ON_POLICY,
    Values,
    check_rewarded_step,
    check_values,
    decision_unknown,
    info_of,
    invalid,
    judge_action,
    judge_reward,
    tags_of,
    window_closed,
)
from ingest.open_episode import Carry, OpenEpisode, PolicyRules
from ingest.sealed import Finished, Limits, Sealed
from storage.declarations import PolicyDeclaration
from storage.episode import DEFAULT_POLICY
from storage.ranges import RangeSet
from storage.spaces import SpaceError


class EpisodeAssembler:
    """Turns events into parts. See the module's table."""

    def __init__(
        self,
        policies: Mapping[str, PolicyDeclaration],
        *,
        past: Iterable[PolicyDeclaration] = (),
        limits: Limits | None = None,
    ) -> None:
        """`past` are earlier declarations, for the episodes that began under them."""
        self.limits = limits or Limits()
        self.rules = {name: PolicyRules.of(policy) for name, policy in policies.items()}
        every = [*(PolicyRules.of(policy) for policy in past), *self.rules.values()]
        self._schemas = {(r.declaration.policy_id, r.schema_id): r for r in every}
        self.redacts = any(rules.declaration.redact for rules in every)
        self.episodes: dict[str, OpenEpisode] = {}
        self.finished: OrderedDict[str, Finished] = OrderedDict()
        self.closing: dict[str, OpenEpisode] = {}  # ended, and still taking rewards
        self._due: list[tuple[float, int]] = []  # when the last window of each is over: a heap
        self.instances = Instances()
        self.open_of: Counter[str] = Counter()  # token id -> its open episodes
        self.sealed: list[Sealed] = []
        self.next_key = 0
        self.anonymous_starts = 0
        self.on_closed: Callable[[str, int], None] | None = None  # (policy, version) per step
        self.steps = 0
        self.open_bytes = 0  # what the open episodes take in memory, about
        self.running = 0.0  # the latest running time that any event came at
        self.needed: dict[int, int] = {}  # journal row -> unrecorded parts that need it
        self._by_key: dict[int, OpenEpisode] = {}
        self.done = RangeSet()  # keys of the episodes that are recorded to their end
        self.torn: set[int] = set()  # keys of episodes whose history lacks journal rows

    # --- judging ---------------------------------------------------------------------------

    def judge(
        self,
        instance: str | None,
        event: wire.Event,
        values: Values | None = None,
        *,
        now: float = 0.0,
    ) -> tuple[Event, bytes] | None:
        """The journal event for a wire event and its encoding, or None for a known retry.

        `values` are an action event's observation and action in canonical bytes, if they were
        validated already (see `check_values`). `now` tells which reward windows are over. Raises
        Refusal.
        """
        if not event.episode_id:
            raise Refusal("invalid", "expected an episode id, got none", "episode_id")
        if isinstance(event, wire.Start):
            started = self.judge_start(instance, event)
            return None if started is None else (started, encode_event(started))
        if isinstance(event, wire.LogReturns) and event.seq is None and event.step is not None:
            rewarded = self._judge_rewarded_step(event, event.step, now)
            return None if rewarded is None else (rewarded, encode_event(rewarded))
        episode = self._find(instance, event)
        if episode is None:
            return None
        seq = episode.next_seq if event.seq is None else event.seq
        if seq > episode.next_seq:
            raise Refusal(
                "gap",
                f"Episode {event.episode_id}: expected seq {episode.next_seq}, got {seq}",
                "seq",
                event.episode_id,
                episode.next_seq,
            )
        if seq < episode.next_seq:
            redecided = self._judge_repeated(episode, event, seq)
            return None if redecided is None else (redecided, encode_event(redecided))
        if event.decided is not None and event.decided != episode.decision():
            raise decision_unknown(episode)
        judged = self._judge_event(episode, event, seq, values)
        return judged, encode_event(judged)

    def _judge_repeated(
        self, episode: OpenEpisode, event: wire.Event, seq: int
    ) -> Redecided | None:
        """A number that is known: a retry, unless it comes with other content than before.

        The decision that a client acted on wins over the open step's, as nothing follows it yet.
        """
        if seq > 0:
            known = episode.digest_of(seq)
            if known is None:
                return None
            with contextlib.suppress(Refusal):  # content that is refused now was not taken then
                judged = self._judge_event(episode, event, seq, None)
                if known == digest(encode_event(judged)):
                    return None
                answered = isinstance(event, wire.Decision) and event.answered
                latest = seq == episode.open_seq == episode.next_seq - 1
                if answered and latest and isinstance(judged, Acted) and episode.decision():
                    return Redecided(judged)
        raise Refusal(
            "conflict",
            f"Episode {event.episode_id}: seq {seq} was acknowledged with other content"
            if seq
            else f"Episode {event.episode_id}: expected a seq of 1 or more: the start is 0",
            "seq",
            event.episode_id,
            episode.next_seq,
        )

    def judge_start(
        self, instance: str | None, event: wire.Start, ahead: int = 0
    ) -> Started | None:
        """What a start becomes, with `ahead` others judged before it that are not applied yet."""
        name = event.episode_id
        start = self.anonymous_starts + ahead
        if instance is not None:
            known = self.instances.get(instance)
            if known is None:
                raise Refusal(
                    "unknown_instance",
                    f"client instance {instance!r} is not known (any more): register a new one",
                    "instance",
                    name,
                )
            if event.start is None:
                raise Refusal("invalid", "expected a start number, got none", "start", name)
            if event.start in known.starts:
                self._judge_repeated_start(instance, event)
                return None
            start = event.start
        if name in self.episodes:
            raise already_started(name)
        if name in self.finished:
            raise self.finished[name].refusal()
        if len(self.episodes) >= self.limits.open_episodes:
            raise Refusal(
                "busy", f"{len(self.episodes)} episodes are open", None, name, retry_after=1.0
            )
        policy_id, rules = self._policy(event)
        return Started(
            key=self.next_key + ahead,
            episode_id=name,
            instance=instance or "",
            start=start,
            policy_id=policy_id,
            schema_id=rules.schema_id,
            training_enabled=event.training_enabled,
            tags=tags_of(event),
            continues=event.continues,
            ts=event.ts,
            reward_combination=rules.declaration.reward_combination,
            reward_default=rules.declaration.reward_default,
        )

    def _judge_repeated_start(self, instance: str, event: wire.Start) -> None:
        """A start number that is known: a retry, unless it named another episode."""
        episode = self.episodes.get(event.episode_id)
        known = self.finished.get(event.episode_id) if episode is None else episode.started
        if known is not None and (known.instance, known.start) != (instance, event.start):
            raise Refusal(
                "conflict",
                f"start {event.start} of this client instance was another episode's",
                "start",
                event.episode_id,
            )

    def _policy(self, event: wire.Start) -> tuple[str, PolicyRules]:
        name = self._named(event.policy_id)
        rules = self.rules.get(name)
        if rules is None:
            raise Refusal(
                "invalid",
                f"expected a policy of {sorted(self.rules)}, got {name!r}",
                "policy_id",
                event.episode_id,
            )
        return name, rules

    def _find(self, instance: str | None, event: Any) -> OpenEpisode | None:
        """The open episode of an event; None when the event is a retry for an ended one."""
        name = event.episode_id
        episode = self.episodes.get(name)
        if episode is None:
            ended = self.finished.get(name)
            if ended is None:
                raise not_found(name)
            mine = event.seq is not None and ended.instance == (instance or "")
            if mine and 0 < event.seq < ended.client_seq:
                return None
            raise ended.refusal()
        if episode.started.instance != (instance or ""):
            raise Refusal(
                "conflict", f"Episode {name} was started by another client", "instance", name
            )
        return episode

    def _judge_rewarded_step(
        self, event: wire.LogReturns, t: int, now: float
    ) -> RewardedStep | None:
        """A reward for a step by its number, from any client: it has its own key, and no seq."""
        name = event.episode_id
        episode = self.episodes.get(name) or self.closing.get(name)
        if episode is None and name not in self.finished:
            raise not_found(name)
        if episode is None:
            raise window_closed(name, t, self.finished[name].how)
        reward_id = event.reward_id or ""
        judged = RewardedStep(episode.started.key, t, reward_id, event.reward, info_of(event))
        known = episode.reward_ids.get((t, reward_id))
        if known is not None and known == digest(encode_event(judged)):
            return None
        if known is not None:
            text = f"Episode {name}: reward {reward_id!r} of step {t} has another amount or info"
            raise Refusal("conflict", text, "reward_id", name)
        check_rewarded_step(episode, event, t, now)
        return judged

    def _judge_event(
        self, episode: OpenEpisode, event: Any, seq: int, values: Values | None
    ) -> Event:
        try:
            if isinstance(event, wire.LogReturns):
                return judge_reward(episode, event, seq)
            if isinstance(event, wire.End):
                final = None
                if event.obs is not None:
                    final = episode.rules.observation.from_wire(event.obs, "obs")
                how = "truncated" if event.truncated else "terminated"
                return Ended(episode.started.key, seq, how, final, waits=episode.waits)
            return judge_action(episode, event, seq, values)
        except SpaceError as error:
            raise invalid(event, str(error)) from error

    def check_values(self, batch: wire.Batch) -> dict[int, Values]:
        """The batch's values that are valid, checked together; see `judgements.check_values`."""
        return check_values(batch, self._rules_of)

    def rules_of(self, policy_id: str, schema_id: str) -> PolicyRules:
        """The rules that an episode began under: today's declaration or an earlier one."""
        return self._schemas[policy_id, schema_id]

    def rules_for(self, event: wire.Event) -> PolicyRules | None:
        """The rules that an event is judged by; None where it will be refused anyway."""
        if isinstance(event, wire.Start):
            return self._rules_of("", {"": event.policy_id})
        return self._rules_of(event.episode_id, {})

    def _rules_of(self, episode_id: str, starting: Mapping[str, str | None]) -> PolicyRules | None:
        episode = self.episodes.get(episode_id)
        if episode is not None:
            return episode.rules
        if episode_id not in starting:
            return None
        return self.rules.get(self._named(starting[episode_id]))

    def _named(self, policy_id: str | None) -> str:
        alone = next(iter(self.rules)) if len(self.rules) == 1 else DEFAULT_POLICY
        return alone if policy_id is None else policy_id

    # --- proposing -------------------------------------------------------------------------

    def break_episode(self, episode_id: str, cause: str) -> Ended | None:
        """The event that closes an open episode at its last good step; None if it is not open."""
        episode = self.episodes.get(episode_id)
        if episode is None:
            return None
        return Ended(episode.started.key, episode.next_seq, "broken", None, cause, episode.waits)

    def cut_for_size(self, key: int, now: float) -> Cut | None:
        """The cut that an episode's size calls for, if any."""
        episode = self._by_key.get(key)
        if episode is None or episode.ended is not None or not episode.is_long:
            return None
        return episode.cut_due(now)

    def torn_episodes(self) -> list[str]:
        """Open episodes whose history lacks journal rows, so that their clients cannot go on."""
        return [self._by_key[key].started.episode_id for key in self.torn if key in self._by_key]

    def cuts(self, policies: Collection[str], now: float) -> Iterator[Cut]:
        """The cuts that make parts of all closed steps of some policies' open episodes."""
        for episode in self.episodes.values():
            if episode.started.policy_id in policies:
                cut = episode.cut_due(now)
                if cut is not None:
                    yield cut

    def tick(self, now: float) -> Iterator[Event]:
        """What the passing of time calls for.

        Abandoned episodes, parts that waited long enough, ended episodes whose windows are over.
        """
        for episode in list(self.episodes.values()):
            policy = episode.rules.declaration
            if now - episode.seen >= policy.episode_timeout:
                key, waits = episode.started.key, episode.waits
                yield Ended(key, episode.next_seq, "abandoned", None, "", waits)
            elif now - episode.part_since >= policy.part_seconds:
                cut = episode.cut_due(now)
                if cut is not None:
                    yield cut
        while self._due and self._due[0][0] <= now:
            _, key = heappop(self._due)
            if key in self._by_key:
                yield Cut(key, self._by_key[key].part, self._by_key[key].steps)

    def open_instance(self, token: str, name: str | None) -> Opened:
        """The event that registers a client instance; `token` makes its id hard to guess."""
        number = self.instances.next_number
        return Opened(f"{number:x}-{token}", number, name)

    # --- applying --------------------------------------------------------------------------

    def apply(
        self,
        event: Event,
        encoded: bytes,
        *,
        row: int,
        received: int,
        now: float,
    ) -> None:
        """Change the state by one journal event. What a recorded part holds already is skipped.

        `now` is the collector's running time when the event came, over the journal's life.
        """
        self.running = max(self.running, now)
        if isinstance(event, Opened):
            self.instances.add(event)
        elif isinstance(event, Started):
            self._apply_started(event, row, now)
        elif isinstance(event, Cut):
            self._apply_cut(event, row, now)
        elif isinstance(event, Redecided):
            self._apply_redecided(event, row, received, now)
        elif isinstance(event, RewardedStep):
            self._apply_rewarded_step(event, encoded, row)
        elif isinstance(event, Imported):
            self._apply_imported(event, row, received)
        else:
            episode = self._by_key.get(event.key)
            if episode is None or episode.ended is not None or event.seq < episode.next_seq:
                return
            if event.seq > episode.next_seq:  # only when the journal has lost rows
                self.torn.add(event.key)
                return
            held = episode.held
            if episode.remember(event.seq, digest(encoded), row, now):
                self._need(row)
            if self.on_closed is not None and not isinstance(event, Rewarded):
                self._tell_closed(episode)
            if isinstance(event, Acted):
                episode.act(event, received, row, now)
                self.steps += 1
            elif isinstance(event, Rewarded):
                episode.reward(event.reward, event.info)
            else:
                self._apply_ended(episode, event)
            self.open_bytes += episode.held - held

    def _tell_closed(self, episode: OpenEpisode) -> None:
        """Tell of the step that is closed now, if it is experience for on-policy training."""
        started = episode.started
        known = episode.steps and episode.source[-1] == ON_POLICY and started.training_enabled
        if known and self.on_closed is not None:
            self.on_closed(started.policy_id, episode.version[-1])

    def _note_start(self, event: Started) -> None:
        self.next_key = max(self.next_key, event.key + 1)
        if event.instance:
            self.instances.started(event.instance, event.start)
        else:
            self.anonymous_starts = max(self.anonymous_starts, event.start + 1)

    def _apply_started(self, event: Started, row: int, now: float) -> None:
        self._note_start(event)
        if event.key in self.done or event.key in self._by_key:
            return
        rules = self._schemas[event.policy_id, event.schema_id]
        episode = OpenEpisode(event, rules, row, now)
        self._need(row)
        self._open(episode)

    def _open(self, episode: OpenEpisode) -> None:
        started = episode.started
        self.episodes[started.episode_id] = episode
        self._by_key[started.key] = episode
        self.open_bytes += episode.held
        self.instances.count_open(started.instance, 1)
        if started.owner:
            self.open_of[started.owner] += 1

    def _apply_imported(self, event: Imported, row: int, received: int) -> None:
        for episode, sealed, finished in sealed_episodes(event, row, received):
            self._note_start(episode.started)
            if sealed.key not in self.done:
                self._need(row)
                self.steps += episode.steps
                self.sealed.append(sealed)
                self.remember_finished(finished)

    def _apply_cut(self, event: Cut, row: int, now: float) -> None:
        episode = self._by_key.get(event.key)
        if episode is None or event.part != episode.part:
            return
        if episode.ended is not None and event.steps == episode.steps:
            if episode.hold(row):
                self._need(row)
            self.open_bytes -= episode.held
            self._seal_last(episode, episode.ended)
            return
        closed = episode.steps - 1 if event.steps < 0 else event.steps
        if not 0 < closed < episode.steps:
            return
        before, held = {*episode.rows}, episode.held
        part, needed = episode.cut(closed)
        self.open_bytes += episode.held - held
        # The cut's own row too: without it a replay would not make this part again.
        rows = {row, *needed}
        for held in rows.intersection(episode.rows) | (rows - before):
            self._need(held)
        episode.part_since = now
        carry = Carry(episode.started, episode.first_seq, episode.t0, episode.part, -1)
        self.sealed.append(Sealed(event.key, part, tuple(sorted(rows)), carry=carry))

    def _apply_rewarded_step(self, event: RewardedStep, encoded: bytes, row: int) -> None:
        episode = self._by_key.get(event.key)
        if episode is None or event.t < episode.t0:
            return  # its part is recorded already
        if event.t >= episode.t_next:  # only when the journal has lost rows
            self.torn.add(event.key)
        else:
            held = episode.held
            if episode.reward_step(event, digest(encoded), row):
                self._need(row)
            self.open_bytes += episode.held - held

    def _apply_redecided(self, event: Redecided, row: int, received: int, now: float) -> None:
        episode = self._by_key.get(event.key)
        if episode is None or not event.seq == episode.open_seq == episode.next_seq - 1:
            return  # its part is recorded already
        if episode.correct(event.seq, digest(encode_event(event.acted)), row, now):
            self._need(row)
        episode.redecide(event.acted, received)

    def _apply_ended(self, episode: OpenEpisode, event: Ended) -> None:
        name = episode.started.episode_id
        del self.episodes[name]
        self.instances.count_open(episode.started.instance, -1)
        if episode.started.owner:
            self.open_of[episode.started.owner] -= 1
        if event.waits and episode.steps:
            episode.ended = event
            self.closing[name] = episode
            due = episode.opened[-1] + episode.rules.declaration.reward_window
            heappush(self._due, (due, event.key))
            self.remember_finished(Finished.of(episode, event))
        else:
            self.open_bytes -= episode.held
            self._seal_last(episode, event)

    def _seal_last(self, episode: OpenEpisode, event: Ended) -> None:
        """All that is left of an episode is ready for a shard."""
        started = episode.started
        finished = Finished.of(episode, event)
        part = episode.finish(event)
        self.sealed.append(Sealed(started.key, part, tuple(episode.rows), finished=finished))
        del self._by_key[started.key]
        self.closing.pop(started.episode_id, None)
        self.remember_finished(finished)

    def _need(self, row: int) -> None:
        self.needed[row] = self.needed.get(row, 0) + 1

    def release(self, sealed: Sealed) -> list[int]:
        """Note that a part is recorded; answers the rows that nothing needs any more."""
        free: list[int] = []
        for row in sealed.rows:
            self.needed[row] -= 1
            if not self.needed[row]:
                del self.needed[row]
                free.append(row)
        if sealed.finished is not None:
            self.done.add(sealed.key)
        return free

    def remember_finished(self, finished: Finished) -> None:
        """Keep what late events need to know; the oldest is forgotten beyond the limit."""
        self.finished[finished.episode_id] = finished
        while len(self.finished) > self.limits.finished:
            self.finished.popitem(last=False)

    def forget_instances(self) -> list[str]:
        """Drop the instances that were idle longest, beyond the limits; answers their ids."""
        return self.instances.forget(self.limits.instances, self.limits.imports)

    @property
    def waits(self) -> bool:
        """Whether any step takes rewards for a while: then the journal must know the time."""
        windowed = any(rules.declaration.reward_window for rules in self.rules.values())
        return bool(self.closing) or (windowed and bool(self.episodes))

    def resume(self, now: float) -> None:
        """Time-outs begin anew once the journal's rows are applied."""
        self.running = max(self.running, now)
        for episode in self.episodes.values():
            episode.seen = episode.part_since = now

    # --- restoring (before any row is replayed) --------------------------------------------

    def restore(
        self,
        done: RangeSet,
        finished: Iterable[Finished],
        carries: Iterable[Carry],
    ) -> None:
        """Take up what recorded parts left behind: ended episodes, and open ones at their cuts."""
        self.done = done
        self.next_key = max((last + 1 for _, last in done.ranges()), default=0)
        for item in finished:
            self.remember_finished(item)
        for carry in carries:
            started = carry.started
            self.next_key = max(self.next_key, started.key + 1)
            rules = self._schemas[started.policy_id, started.schema_id]
            self._open(OpenEpisode.resumed(carry, rules, 0.0))
