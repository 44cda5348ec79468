"""EpisodeAssembler: the state machine of episodes, without input or output.

    wire event --judge--> journal event --apply--> state --> sealed parts

A `Judge` (`ingest.episodes.judge`) reads this state and never changes it. It returns a journal
event, or None for a known retry, or raises Refusal. Only `apply` changes the state, so that
replaying the journal's rows gives the same state. Time is an argument (`now`: seconds that the
collector has been running; `received`: microseconds since the epoch).

The effect of each event in each state of its episode:

    state       start            log_action, decision   log_returns   end
    ABSENT      -> IDLE          not_found              not_found     not_found
    IDLE        already_started  -> ACTING              no_action     -> ended, no rows
    ACTING      already_started  closes a step, opens   adds to the   -> ended
                                 the next               open step
    ended       completed        completed              completed     completed
    abandoned   abandoned        abandoned              abandoned     abandoned
    broken      broken           broken                 broken        broken

In every state, a repeated sequence number with equal content is a retry, with other content a
conflict; a number beyond the next one is a gap. Content is compared only back to the episode's
latest cut. Before the cut, and in episodes that have ended, the number alone makes an event a
retry. The content of a start is compared while its episode is open, and its episode's name while
that is remembered.

An episode of this table has one agent, or is one agent's track in an episode of several
(ingest.protocol.agent_names). All tracks of an episode are started by one client instance, and none
once the number of agents given by an end is reached. The time-out counts from the latest event of
any agent. The episode is abandoned or broken as a whole.

An event that follows a get_action names the decision that was acted on. The open step can hold a
different decision, if the collector was killed before it stored the first one and the client asked
again. The event is then refused as `decision_unknown`, and the client sends a `decision` event that
replaces the stored one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from heapq import heappop, heappush

import numpy as np
from msgspec.structs import replace

from ingest.episodes.client_instances import Instances
from ingest.episodes.imported import Staged, columns_of, finished_of, parts_of
from ingest.episodes.journal_events import (
    Acted,
    Cut,
    Ended,
    Imported,
    ImportedBlock,
    ImportedEpisode,
    JournalEvent,
    Opened,
    Receipt,
    Redecided,
    Rewarded,
    RewardedStep,
    Started,
    digest,
    encode_event,
)
from ingest.episodes.open_episode import ON_POLICY, WORTH_CUTTING, Carry, OpenEpisode
from ingest.episodes.policy_rules import Policies, PolicyRules
from ingest.episodes.sealed_parts import Finished, Limits, Sealed
from ingest.protocol.agent_names import Name, Whole
from storage.declarations.declaration import PolicyDeclaration
from storage.experience.endings import UNOBSERVED
from storage.experience.range_set import RangeSet


class EpisodeAssembler:
    """The known episodes, and the parts made of their events. See the module's table."""

    def __init__(
        self,
        policies: Mapping[str, PolicyDeclaration],
        *,
        past: Iterable[PolicyDeclaration] = (),
        limits: Limits | None = None,
    ) -> None:
        """`past` are earlier declarations, for the episodes that started under them."""
        self.policies, self.limits = Policies(policies, past), limits or Limits()
        self.episodes: dict[Name, OpenEpisode] = {}
        self.closing: dict[Name, OpenEpisode] = {}  # ended, but accepting late rewards
        self.finished: dict[Name, Finished] = {}
        self._remembered: deque[Finished] = deque()  # oldest first; may hold replaced ones
        self.wholes: dict[str, Whole] = {}  # the known episodes of several agents
        self.instances = Instances()
        self.next_key = 0
        self.anonymous_starts = 0
        self._due: list[tuple[float, int]] = []  # a heap of (end of the last reward window, key)
        self.open_of: Counter[str] = Counter()  # token id -> its open episodes
        self.sealed: list[Sealed] = []
        self.on_closed: Callable[[str, int], None] | None = None  # (policy, version) per step
        self.steps = 0
        self.open_bytes = 0  # the approximate memory of open episodes
        self.steps_awaiting_rewards = 0  # of ended episodes; earlier parts do not count
        self.running = 0.0  # the latest running time of any event
        self.needed: dict[int, int] = {}  # journal row -> unrecorded parts that need it
        self.staged: dict[int, Staged] = {}  # key of a long imported episode -> its pieces
        self._by_key: dict[int, OpenEpisode] = {}
        self.done = RangeSet()  # keys of the episodes that are recorded completely
        self.torn: set[int] = set()  # keys of episodes with lost journal rows

    # --- proposing -------------------------------------------------------------------------

    def break_episode(self, name: Name, cause: str) -> list[Ended]:
        """Return the events that end an open episode at its last good step; none if it is not open.

        A broken track breaks its whole episode, because the other tracks would be incomplete.
        """
        if name not in self.episodes:
            return []
        whole = None if isinstance(name, str) else self.wholes[name[0]]
        broken = [name] if whole is None else [(name[0], agent) for agent in whole.open]
        if not isinstance(name, str):
            cause = f"agent {name[1]}: {cause}"
        return [_closed(self.episodes[one], "broken", cause) for one in broken]

    def cut_for_size(self, key: int, now: float) -> Cut | None:
        """Return the cut for an episode that has become too large, if any."""
        episode = self._by_key.get(key)
        if episode is None or episode.ended is not None or not episode.is_long:
            return None
        return episode.cut_due(now, WORTH_CUTTING)

    def torn_episodes(self) -> list[Name]:
        """Open episodes with lost journal rows, which their clients cannot continue."""
        return [self._by_key[key].started.name for key in self.torn if key in self._by_key]

    def cuts(self, policies: Collection[str], now: float, *, least: float = 0.0) -> Iterator[Cut]:
        """Cut off all closed steps of open episodes of the given policies.

        `least`: skip episodes with a smaller share of closed steps than this.
        """
        for episode in self.episodes.values():
            if episode.started.policy_id in policies:
                cut = episode.cut_due(now, least)
                if cut is not None:
                    yield cut

    def tick(self, now: float) -> Iterator[JournalEvent]:
        """Return the events that are due at `now`.

        They end abandoned episodes, cut parts that have waited long enough, and seal ended episodes
        after their reward windows.
        """
        silent = {name for name, whole in self.wholes.items() if self._is_silent(name, whole, now)}
        for episode in list(self.episodes.values()):
            policy, one = episode.rules.declaration, episode.whole is None
            if episode.started.episode_id in silent or (
                one and now - episode.seen >= policy.episode_timeout
            ):
                yield _closed(episode, "abandoned")
            elif now - episode.part_since >= policy.part_seconds:
                cut = episode.cut_due(now)
                if cut is not None:
                    yield cut
        while self._due and self._due[0][0] <= now:
            _, key = heappop(self._due)
            if key in self._by_key:
                yield Cut(key, self._by_key[key].part, self._by_key[key].steps)

    def _is_silent(self, episode_id: str, whole: Whole, now: float) -> bool:
        """Whether no agent sent an event for the longest time-out among the open tracks."""
        return bool(whole.open) and now - whole.seen >= max(
            self.episodes[episode_id, agent].rules.declaration.episode_timeout
            for agent in whole.open
        )

    def open_instance(self, token: str, name: str | None, owner: str = "") -> Opened:
        """Return the event that registers a client instance; `token` makes its id hard to guess."""
        number = self.instances.next_number
        return Opened(f"{number:x}-{token}", number, name, owner)

    def find_instance(
        self, token: str, name: str | None, owner: str, content: tuple[bytes, int] | None
    ) -> tuple[str, list[Opened | Receipt]]:
        """Find or create the owner's instance of that name; return its id and the new events."""
        events: list[Opened | Receipt] = []
        instance = self.instances.named(name, owner)
        if instance is None:
            events.append(opened := self.open_instance(token, name, owner))
            instance = opened.instance
        if content is not None:
            events.append(Receipt(instance, *content))
        return instance, events

    # --- applying --------------------------------------------------------------------------

    def apply(
        self,
        event: JournalEvent,
        encoded: bytes,
        *,
        row: int,
        received: int,
        now: float,
    ) -> None:
        """Change the state by one journal event, except for steps that are in a recorded part.

        `now` is the running time at which the event came, in seconds over the journal's life.
        """
        self.running = max(self.running, now)
        if isinstance(event, (Acted, Rewarded, Ended)):  # most events
            self._apply_next(event, encoded, row, received, now)
        elif isinstance(event, Started):
            self._apply_started(event, row, now)
        elif isinstance(event, Cut):
            self._apply_cut(event, row, now)
        elif isinstance(event, ImportedBlock):
            self._apply_block(event, row, received)
        elif isinstance(event, Imported):
            self._apply_imported(event, row, received, now)
        elif isinstance(event, RewardedStep):
            self._apply_rewarded_step(event, encoded, row, now)
        elif isinstance(event, Redecided):
            self._apply_redecided(event, row, received, now)
        elif isinstance(event, Opened):
            self.instances.add(event)
        else:
            self.instances.receipt(event)

    def _apply_next(
        self, event: Acted | Rewarded | Ended, encoded: bytes, row: int, received: int, now: float
    ) -> None:
        """Apply an event to an open episode."""
        episode = self._by_key.get(event.key)
        if episode is None or episode.ended is not None or event.seq < episode.next_seq:
            return
        if event.seq > episode.next_seq:  # only if journal rows were lost
            self.torn.add(event.key)
            return
        if episode.remember(event.seq, digest(event, encoded), row, now):
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
            return
        self._count_bytes(episode)

    def _count_bytes(self, episode: OpenEpisode, held: int | None = None) -> None:
        """Set an episode's share of `open_bytes` to its current size, or to `held`."""
        now = episode.held if held is None else held
        self.open_bytes += now - episode.counted
        episode.counted = now

    def _tell_closed(self, episode: OpenEpisode) -> None:
        """Report the step that is now closed, if on-policy training can use it."""
        started = episode.started
        known = episode.steps and episode.source[-1] == ON_POLICY and started.training_enabled
        if known and self.on_closed is not None:
            self.on_closed(started.policy_id, episode.policy_version[-1])

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
        episode = OpenEpisode(event, self._rules_of(event), row, now)
        self._need(row)
        self._open(episode)

    def _rules_of(self, started: Started) -> PolicyRules:
        return self.policies.schemas[started.policy_id, started.schema_id]

    def _open(self, episode: OpenEpisode) -> None:
        started = episode.started
        self.episodes[started.name] = episode
        if started.agent_id is not None:
            episode.whole = self._whole(started.episode_id, started.instance)
            episode.whole.open[started.agent_id] = None
            episode.whole.arms.setdefault(started.policy_id, started.arm)
            episode.whole.seen = max(episode.whole.seen, episode.seen)
            if episode.t0:
                episode.whole.acted.add(started.agent_id)
        self._by_key[started.key] = episode
        self._count_bytes(episode)
        self.instances.count_open(started.instance, 1)
        self.instances.knows(started.instance, started.start, started.name)
        if started.owner:
            self.open_of[started.owner] += 1

    def _apply_imported(self, event: Imported, row: int, received: int, now: float) -> None:
        for number in event.skipped:
            self.instances.started(event.instance, number)
        for episode, parts in parts_of(event, received):
            key = episode.started.key
            self.next_key = max(self.next_key, key + 1)
            if key in self.done:
                self._note_start(episode.started)
                continue
            staged = self.staged.pop(key, None) or Staged()
            if staged.steps != episode.t0:  # journal rows were lost
                self._release(staged.rows)
                continue
            staged.add(parts, row, self._rules_of(episode.started).observation.itemsize)
            for _ in parts:
                self._need(row)
            if not episode.how:
                self.staged[key] = staged
            elif event.waits:
                self._wait_imported(staged, episode, row, now)
            else:
                self._seal_imported(staged, episode, row)

    def _apply_block(self, event: ImportedBlock, row: int, received: int) -> None:
        """Seal a block of whole episodes; a replay skips those whose shards are recorded."""
        count = len(event.episode_ids)
        last = event.key + count - 1
        starts = RangeSet.of_array(np.frombuffer(event.starts, np.int64))
        self.next_key = max(self.next_key, last + 1)
        if event.instance:
            self.instances.started_all(event.instance, starts)
        else:
            self.anonymous_starts = max(self.anonymous_starts, (starts.last or 0) + 1)
        if self.done.contains_range(event.key, last):
            return
        finished = finished_of(event)
        sealed = Sealed(event.key, columns_of(event, received), (row,), ended=finished)
        found = [sealed]
        if self.done.intersection(RangeSet([(event.key, last)])):  # some were found in shards
            found = [one for one in sealed.split() if one.key not in self.done]
        for _ in found:
            self._need(row)
        self.steps += len(event.rewards) // 8
        self.sealed += found
        if event.agent_ids:
            for one in finished:
                self.remember_finished(one)
            return
        self._remembered.extend(finished)
        self.finished.update(zip(event.episode_ids, finished, strict=True))
        self._forget_oldest()

    def split(self, item: Sealed) -> list[Sealed]:
        """A sealed item as its parts, each of which needs the item's rows."""
        found = item.split()
        for row in item.rows:
            self.needed[row] += len(found) - 1
        return found

    def _seal_imported(self, staged: Staged, episode: ImportedEpisode, row: int) -> None:
        self._note_start(episode.started)
        sealed, finished = staged.sealed(episode, row)
        if staged.rows[-1] != row:
            self._need(row)
        self.steps += staged.steps
        self.sealed += sealed
        self.remember_finished(finished)

    def _wait_imported(
        self, staged: Staged, episode: ImportedEpisode, row: int, now: float
    ) -> None:
        """Keep an imported episode that has ended until its steps' reward windows are over."""
        started = episode.started
        self._note_start(started)
        waiting = OpenEpisode(started, self._rules_of(started), row, now)
        waiting.rows.clear()
        for part, held in zip(staged.parts, staged.rows, strict=True):
            waiting.take(part, held, now)
        if waiting.hold(row):
            self._need(row)
        rows = Counter(staged.rows)
        self._release(held for held, count in rows.items() for _ in range(count - 1))
        self._by_key[started.key] = waiting
        self.steps += staged.steps
        how, final = episode.how, episode.final_obs
        ended = Ended(
            started.key, waiting.next_seq, how, final, episode.cause, True, episode.agents
        )
        waiting.next_seq += 1
        self._let_wait(waiting, ended)

    def drop_staged(self, key: int) -> list[int]:
        """Drop the pieces of an unfinished episode; return the rows that are no longer needed."""
        staged = self.staged.pop(key, None)
        return [] if staged is None else self._release(staged.rows)

    def _apply_cut(self, event: Cut, row: int, now: float) -> None:
        episode = self._by_key.get(event.key)
        if episode is None or event.part != episode.part:
            return
        if episode.ended is not None and event.steps == episode.steps:
            if episode.hold(row):
                self._need(row)
            self._count_bytes(episode, 0)
            self._seal_last(episode, episode.ended)
            return
        closed = episode.steps - 1 if event.steps < 0 else event.steps
        if not 0 < closed < episode.steps:
            return
        before = {*episode.rows}
        self.steps_awaiting_rewards -= closed if episode.ended is not None else 0
        part, needed = episode.cut(closed)
        self._count_bytes(episode)
        # The cut's own row is needed too: without it a replay would not make this part again.
        rows = {row, *needed}
        for held in rows.intersection(episode.rows) | (rows - before):
            self._need(held)
        episode.part_since = now
        carry = Carry(episode.started, episode.first_seq, episode.t0, episode.part, -1)
        self.sealed.append(Sealed(event.key, part, tuple(sorted(rows)), carry=carry))

    def _apply_rewarded_step(
        self, event: RewardedStep, encoded: bytes, row: int, now: float
    ) -> None:
        episode = self._by_key.get(event.key)
        if episode is None or event.t < episode.t0:
            return  # its part is recorded
        if event.t >= episode.t_next:  # only if journal rows were lost
            self.torn.add(event.key)
        else:
            if episode.reward_step(event, digest(event, encoded), row, now):
                self._need(row)
            self._count_bytes(episode)

    def _apply_redecided(self, event: Redecided, row: int, received: int, now: float) -> None:
        episode = self._by_key.get(event.key)
        if episode is None or not event.seq == episode.open_seq == episode.next_seq - 1:
            return  # its part is recorded
        acted = event.acted
        if episode.correct(event.seq, digest(acted, encode_event(acted)), row, now):
            self._need(row)
        episode.redecide(acted, received)
        self._count_bytes(episode)

    def _apply_ended(self, episode: OpenEpisode, event: Ended) -> None:
        name = episode.started.name
        if event.activates:
            episode.started = replace(episode.started, training_enabled=True)
        del self.episodes[name]
        if episode.whole is not None:
            episode.whole.open.pop(episode.started.agent_id or "", None)
        self.instances.count_open(episode.started.instance, -1)
        if episode.started.owner:
            self.open_of[episode.started.owner] -= 1
        if event.waits and episode.steps:
            self._let_wait(episode, event)
        else:
            self._count_bytes(episode, 0)
            self._seal_last(episode, event)

    def _let_wait(self, episode: OpenEpisode, event: Ended) -> None:
        """Keep an ended episode until its steps' reward windows are over."""
        episode.ended = event
        self.closing[episode.started.name] = episode
        self.steps_awaiting_rewards += episode.steps
        due = episode.opened[-1] + episode.rules.declaration.reward_window
        heappush(self._due, (due, event.key))
        self.remember_finished(Finished.of(episode, event))
        self._count_bytes(episode)

    def _seal_last(self, episode: OpenEpisode, event: Ended) -> None:
        """Seal the remaining steps of an episode."""
        started = episode.started
        if episode.ended is not None:
            self.steps_awaiting_rewards -= episode.steps
        if self.closing.get(started.name) is episode:
            del self.closing[started.name]
        finished = Finished.of(episode, event)
        part = episode.finish(event)
        self.sealed.append(Sealed(started.key, part, tuple(episode.rows), finished=finished))
        del self._by_key[started.key]
        self.remember_finished(finished)

    def _need(self, row: int) -> None:
        self.needed[row] = self.needed.get(row, 0) + 1

    def release(self, sealed: Sealed) -> list[int]:
        """Note that a part is recorded; return the rows that are no longer needed."""
        if sealed.finished is not None:
            self.done.add(sealed.key)
        elif sealed.ended:
            self.done.add_range(sealed.key, sealed.key + len(sealed.ended) - 1)
        return self._release(sealed.rows)

    def _release(self, rows: Iterable[int]) -> list[int]:
        """Decrease the need counts of rows; return the rows that are no longer needed."""
        free: list[int] = []
        for row in rows:
            self.needed[row] -= 1
            if not self.needed[row]:
                del self.needed[row]
                free.append(row)
        return free

    def remember_finished(self, finished: Finished) -> None:
        """Keep what answers to late events need; above the limit, drop the oldest."""
        self._remembered.append(finished)
        self.finished[finished.name] = finished
        self.instances.knows(finished.instance, finished.start, finished.name)
        if finished.agent_id is not None:
            whole = self._whole(finished.episode_id, finished.instance)
            whole.ended[finished.agent_id] = None
            if finished.has_steps:
                whole.acted.add(finished.agent_id)
            whole.agents = max(whole.agents, finished.agents)
            if finished.how in UNOBSERVED:
                whole.stopped = finished.agent_id
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Drop the oldest ended episodes above the limit."""
        finished, most = self.finished, self.limits.finished
        while len(finished) > most:
            gone = self._remembered.popleft()
            name = gone.episode_id if gone.agent_id is None else gone.name
            if finished.get(name) is not gone:
                continue
            del finished[name]
            if gone.instance:
                self.instances.unknow(gone.instance, gone.start)
            if gone.agent_id is not None:
                self._forget_track(gone)

    def _whole(self, episode_id: str, instance: str) -> Whole:
        """Return the state that an episode's tracks share; create it with the first track."""
        return self.wholes.setdefault(episode_id, Whole(instance))

    def _forget_track(self, finished: Finished) -> None:
        """Drop a finished track; drop its episode's shared state with the last track."""
        whole = self.wholes.get(finished.episode_id)
        if finished.agent_id is not None and whole is not None:
            whole.ended.pop(finished.agent_id, None)
            whole.acted.discard(finished.agent_id)
            if not whole.open and not whole.ended:
                del self.wholes[finished.episode_id]

    def forget_instances(self) -> list[str]:
        """Drop the instances that have been idle longest, above the limits; return their ids."""
        return self.instances.forget(self.limits.instances, self.limits.imports)

    @property
    def waits(self) -> bool:
        """Whether any step has a reward window, so that the journal must store the running time."""
        windowed = any(rules.declaration.reward_window for rules in self.policies.rules.values())
        return bool(self.closing) or (windowed and bool(self.episodes))

    def resume(self, now: float) -> None:
        """Restart the time-outs after the journal's rows have been replayed."""
        self.running = max(self.running, now)
        for episode in self.episodes.values():
            episode.seen = episode.part_since = now
        for whole in self.wholes.values():
            whole.seen = now

    # --- restoring (before any row is replayed) --------------------------------------------

    def restore(
        self,
        done: RangeSet,
        finished: Iterable[Finished],
        carries: Iterable[Carry],
    ) -> None:
        """Restore the state after recorded parts: ended episodes, and open ones at their cuts."""
        self.done = done
        self.next_key = max((last + 1 for _, last in done.ranges()), default=0)
        for item in finished:
            self.remember_finished(item)
        for carry in carries:
            started = carry.started
            self.next_key = max(self.next_key, started.key + 1)
            self._open(OpenEpisode.resumed(carry, self._rules_of(started), 0.0))


def _closed(episode: OpenEpisode, how: str, cause: str = "") -> Ended:
    """Return the end of an open episode for which the client sent none."""
    key, waits = episode.started.key, episode.waits
    return Ended(key, episode.next_seq, how, None, cause, waits)
