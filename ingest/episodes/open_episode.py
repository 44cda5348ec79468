"""An open episode (or track): its columns as growing buffers, its numbers, its journal rows.

Nothing is judged here: `EpisodeAssembler` accepts events, and this stores them in the form that a
part needs, with one buffer per column and no Python object per step.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

import msgspec

from ingest.episodes.infos import KEY_BYTES, MergedInfo
from ingest.episodes.journal_events import (
    LONG_OBS,
    Acted,
    Cut,
    Ended,
    JournalEvent,
    RewardedStep,
    Started,
    decision_hash,
    digest,
    encode_event,
)
from ingest.episodes.policy_rules import PolicyRules
from ingest.protocol.agent_names import Whole
from storage.experience.endings import Ending
from storage.experience.episode import DEFAULT_AGENT, Part
from storage.experience.hashed import ARM
from storage.experience.step_columns import ADDED_COLUMNS, NUMBER_BYTES, SOURCES, STEP_COLUMNS
from storage.spaces.codec import Codec

DIGEST_SIZE = 8
ON_POLICY = SOURCES.index("on_policy")

OPEN_BYTES = 2_500
"""Bytes that an open episode uses in addition to its columns: buffer objects and map entries."""

STEP_BYTES = NUMBER_BYTES + 25
"""Bytes of a buffered step without its values: its numbers, and what late rewards need."""

WORTH_CUTTING = 0.25
"""The least share of closed steps for a cut by size, because a cut copies the remaining steps."""


class Carry(msgspec.Struct, array_like=True, frozen=True):
    """The state of an open episode at the cut of its latest recorded part, where replay begins."""

    started: Started
    seq: int  # of the action that opens the step after the cut
    t: int  # of that step
    part: int
    episode_ordinal: int  # -1: none of its parts has one yet
    collector_id: str = ""  # whose stream has that ordinal

    def with_ordinal(self, episode_ordinal: int, collector_id: str) -> Carry:
        return msgspec.structs.replace(
            self, episode_ordinal=episode_ordinal, collector_id=collector_id
        )


class OpenEpisode:
    """The state of one open episode since its latest cut."""

    __slots__ = (
        "actions",
        "actions_lengths",
        "counted",
        "digests",
        "dist_inputs",
        "dist_lengths",
        "durable_seq",
        "ended",
        "first_seq",
        "info_bytes",
        "info_keys",
        "infos",
        "late_rows",
        "next_seq",
        "obs",
        "obs_lengths",
        "open_row",
        "open_seq",
        "opened",
        "part",
        "part_since",
        "reward_ids",
        "rewarded",
        "rows",
        "rules",
        "seen",
        "seqs",
        "started",
        "step_rows",
        "t0",
        "unsynced",
        "whole",
        *(column.name for column in STEP_COLUMNS),
    )
    rewards: array[float]
    action_logp: array[float]
    policy_version: array[int]
    source: array[int]
    pass_prob: array[float]
    ts: array[int]
    received_ts: array[int]
    env_t: array[int]  # of tracks; else empty

    def __init__(self, started: Started, rules: PolicyRules, row: int, now: float) -> None:
        self.started = started
        self.rules = rules
        self.rows = [row]  # journal rows that the buffered steps need
        self.open_row = row  # the row of the open step's action
        self.open_seq = 0
        self.next_seq = 1  # the start is 0
        self.first_seq = 1  # seq of digests[0]
        self.ended: Ended | None = None  # ended, but its steps accept late rewards
        self.late_rows: set[int] = set()  # of rewards by step number
        self.reward_ids: dict[tuple[int, str], bytes] = {}  # (t, reward_id) -> digest
        self.durable_seq = -1  # of the events that replies acknowledged
        self.unsynced: deque[tuple[int, int]] = deque()  # (row, seq) replied to before durable
        self.digests = bytearray()
        self.counted = 0  # bytes of `held` that are included in a total
        self.part = 0
        self.t0 = 0
        self.seen = now
        self.part_since = now
        self.whole: Whole | None = None  # state shared with the other tracks
        self._clear()

    @classmethod
    def resumed(cls, carry: Carry, rules: PolicyRules, now: float) -> OpenEpisode:
        """The episode as it was just before the action that `carry` names."""
        episode = cls(carry.started, rules, -1, now)
        episode.rows = []
        episode.next_seq = episode.first_seq = carry.seq
        episode.t0 = carry.t
        episode.part = carry.part
        return episode

    def _clear(self) -> None:
        self.obs = bytearray()
        self.actions = bytearray()
        self.obs_lengths = array("I")
        self.actions_lengths = array("I")
        for name, typecode in _ARRAYS:
            setattr(self, name, array(typecode))
        self.rewarded = bytearray()  # whether the step has a reward
        self.opened = array("d")  # seconds of running time
        self.seqs = array("q")
        self.step_rows = array("q")  # the journal rows of the actions
        self.dist_inputs = bytearray()
        self.dist_lengths = array("I")
        self.infos: dict[int, str | MergedInfo] = {}  # text if it came in one piece
        self.info_bytes = 0
        self.info_keys = 0  # of the merged infos

    @property
    def steps(self) -> int:
        """The number of buffered steps, including the open one."""
        return len(self.rewards)

    @property
    def t_next(self) -> int:
        return self.t0 + len(self.rewards)

    @property
    def nbytes(self) -> int:
        """The size in bytes of a part with the buffered steps."""
        columns = len(self.obs) + len(self.actions) + len(self.dist_inputs) + self.info_bytes
        return columns + STEP_BYTES * len(self.rewards)

    @property
    def held(self) -> int:
        """The approximate memory of this object in bytes."""
        return (
            OPEN_BYTES
            + len(self.started.tags)
            + (0 if self.ended is None else len(self.ended.final_obs or b""))
            + self.nbytes
            + len(self.digests)
            + 40 * len(self.rows)
            + 200 * len(self.reward_ids)
            + KEY_BYTES * self.info_keys
        )

    def remember(self, seq: int, digest: bytes, row: int, now: float) -> bool:
        """Note that event `seq` was applied from `row`; return whether that row is new here."""
        self.digests += digest
        self.next_seq = seq + 1
        self.see(now)
        return self.hold(row)

    def see(self, now: float) -> None:
        """Note the time of an event, for the time-outs of this track and of the whole episode."""
        self.seen = now
        if self.whole is not None:
            self.whole.seen = now

    def correct(self, seq: int, digest: bytes, row: int, now: float) -> bool:
        """Note that `row` replaced the latest event, `seq`; return whether the row is new here."""
        at = (seq - self.first_seq) * DIGEST_SIZE
        del self.digests[at:]
        return self.remember(seq, digest, row, now)

    def repeats(self, event: JournalEvent, seq: int) -> bool:
        """Whether an event equals the one applied as `seq` since the latest recorded cut."""
        at = (seq - self.first_seq) * DIGEST_SIZE
        if self.digests[at : at + DIGEST_SIZE] != digest(event, encode_event(event)):
            return False
        if not isinstance(event, Acted) or len(event.obs) < LONG_OBS:
            return True
        step = bisect_left(self.seqs, seq)
        begin, end = (
            _offset(self.obs_lengths, self.rules.observation, n) for n in (step, step + 1)
        )
        return self.obs[begin:end] == event.obs

    def repeats_decision(self, seq: int | None, obs: bytes) -> bool:
        """Whether a request for an action on `obs` as event `seq` is the one of the open step."""
        on_policy = bool(self.source) and self.source[-1] == ON_POLICY
        latest = seq is not None and seq == self.open_seq == self.next_seq - 1
        return on_policy and latest and self.obs.endswith(obs)

    def open_action(self) -> bytes:
        """The open step's action in canonical bytes."""
        return bytes(
            self.actions[self._prefix(self.actions, self.actions_lengths, self.rules.action) :]
        )

    def decision(self) -> bytes:
        """The hash of the open step's decision; empty if no policy decided."""
        if not self.source or self.source[-1] != ON_POLICY:
            return b""
        obs = self.obs[self._prefix(self.obs, self.obs_lengths, self.rules.observation) :]
        return decision_hash(
            bytes(obs),
            self.open_action(),
            self.action_logp[-1],
            self.policy_version[-1],
            self.open_dist_inputs(),
        )

    def open_dist_inputs(self) -> bytes:
        """The inputs of the open step's action distribution, float32; empty if unknown."""
        return bytes(self.dist_inputs[len(self.dist_inputs) - self._open_dist() :])

    def replied(self, row: int, seq: int) -> None:
        """Note that a reply for event `seq` is sent before row `row` is durable."""
        self.unsynced.append((row, seq))

    def synced(self, row: int) -> int:
        """The latest replied seq that is durable, given that row `row` is durable."""
        while self.unsynced and self.unsynced[0][0] <= row:
            self.durable_seq = self.unsynced.popleft()[1]
        return self.durable_seq

    def redecide(self, event: Acted, received: int) -> None:
        """Replace the open step's decision, which no event follows yet."""
        opened, last = self.opened[-1], len(self.rewards) - 1
        reward, came, info = self.rewards[-1], self.rewarded[-1], self.infos.pop(last, "")
        self._count_info(info, -1)
        del self.obs[self._prefix(self.obs, self.obs_lengths, self.rules.observation) :]
        del self.actions[self._prefix(self.actions, self.actions_lengths, self.rules.action) :]
        del self.dist_inputs[len(self.dist_inputs) - self._open_dist() :]
        for name in _PER_STEP:
            del getattr(self, name)[-1:]
        self.act(event, received, self.open_row, opened)
        if came:  # a reward by step number is kept
            self.rewards[-1], self.rewarded[-1] = reward, came
        if info:
            self._take_back(info, event.info)

    def _open_dist(self) -> int:
        return self.dist_lengths[-1] if self.dist_lengths else 0

    def act(self, event: Acted, received: int, row: int, running: float) -> None:
        """Open the next step; the previous one now accepts rewards by its number only."""
        if event.dist_inputs and not self.dist_lengths:
            self.dist_lengths.extend([0] * len(self.rewards))
        self.obs += event.obs
        self.actions += event.action
        if self.rules.observation.itemsize is None:
            self.obs_lengths.append(len(event.obs))
        if self.rules.action.itemsize is None:
            self.actions_lengths.append(len(event.action))
        came = event.reward == event.reward  # not NaN
        self.rewards.append(event.reward if came else self.started.reward_default)
        self.rewarded.append(came)
        self.opened.append(running)
        self.seqs.append(event.seq)
        self.step_rows.append(row)
        self.action_logp.append(event.action_logp)
        self.policy_version.append(event.policy_version)
        self.source.append(event.source)
        self.pass_prob.append(event.pass_prob)
        self.ts.append(received if event.ts is None else event.ts)
        self.received_ts.append(received)
        for column in ADDED_COLUMNS:
            getattr(self, column.name).append(getattr(event, column.name))
        if self.started.agent_id is not None:
            self.env_t.append(event.env_t)
            if self.whole is not None:
                self.whole.acted.add(self.started.agent_id)
        if event.dist_inputs or self.dist_lengths:
            self.dist_inputs += event.dist_inputs
            self.dist_lengths.append(len(event.dist_inputs))
        if event.info:
            self._note(event.info)
        self.open_row = row
        self.open_seq = event.seq

    def take(self, part: Part, row: int, running: float) -> None:
        """Append a part's steps as if they had come one by one, each with its reward."""
        steps, first = part.steps, self.next_seq
        self.obs += part.obs
        self.actions += part.actions
        for name in _OF_PARTS[:-1]:  # nobody states action distributions in bulk
            getattr(self, name).frombytes(getattr(part, name))
        self.infos.update((len(self.rewarded) + at, text) for at, text in part.infos.items())
        self.info_bytes += sum(map(len, part.infos.values()))
        self.rewarded += b"\1" * steps
        self.opened.extend([running] * steps)
        self.seqs.extend(range(first, first + steps))
        self.step_rows.extend([row] * steps)
        self.next_seq = first + steps
        self.hold(row)

    def closed(self, running: float) -> int:
        """The number of leading steps that accept no more rewards and can be cut off."""
        steps = len(self.rewards) - (self.ended is None and bool(self.rewards))
        window = self.rules.declaration.reward_window
        return steps if not window else min(steps, bisect_right(self.opened, running - window))

    @property
    def waits(self) -> bool:
        """Whether steps would still accept rewards if the episode ended now."""
        return self.rules.declaration.reward_window > 0 and bool(self.rewards)

    @property
    def is_long(self) -> bool:
        """Whether the buffered steps exceed the size of a part."""
        policy = self.rules.declaration
        return self.steps > policy.part_steps or self.nbytes > policy.part_bytes

    def cut_due(self, running: float, least: float = 0.0) -> Cut | None:
        """The cut of the closed steps, if there are any and they are at least this share of all."""
        closed = self.closed(running)
        if closed == 0 or closed < least * self.steps:
            return None
        windowed = self.rules.declaration.reward_window > 0
        return Cut(self.started.key, self.part, closed if windowed else -1)

    def takes_reward(self, t: int, running: float) -> bool:
        """Whether step `t` accepts a reward: it is open, or in its reward window."""
        at, last = t - self.t0, len(self.rewards) - 1
        if 0 <= at == last and self.ended is None:
            return True
        window = self.rules.declaration.reward_window
        return 0 <= at <= last and running - self.opened[at] < window

    def combined(self, amount: float, at: int = -1) -> float:
        """The reward of a buffered step (default: the open one) combined with `amount`."""
        if not self.rewarded[at]:
            return amount
        known, rule = self.rewards[at], self.started.reward_combination
        if rule == "sum":
            return known + amount
        if rule == "max":
            return max(known, amount)
        return known if rule == "first" else amount

    def reward(self, amount: float, info: str, at: int = -1) -> None:
        """Add a reward and an info to those of a buffered step."""
        self.rewards[at] = self.combined(amount, at)
        self.rewarded[at] = True
        if info:
            self._note(info, at)

    def info_size(self, at: int = -1) -> int:
        """Characters of the info of a buffered step (default: the open one), 0 without one."""
        return len(self.infos.get(at % len(self.rewards), ""))

    def _note(self, info: str, at: int = -1) -> None:
        """Add to the info of a buffered step."""
        at %= len(self.rewards)
        known = self.infos.get(at, "")
        if not known:
            self.infos[at] = info
            self._count_info(info)
            return
        self._count_info(known, -1)
        merged = MergedInfo.of(known) if isinstance(known, str) else known
        merged.add(info)
        self.infos[at] = merged
        self._count_info(merged)

    def _take_back(self, known: str | MergedInfo, decided: str) -> None:
        """Restore the open step's info after another decision replaced the first.

        `decided` is the new decision's info; keys that are known keep their values.
        """
        at = len(self.rewards) - 1
        if decided:
            self._count_info(decided, -1)
            known = MergedInfo.of(known) if isinstance(known, str) else known
            known.add(decided, first=True)
        self.infos[at] = known
        self._count_info(known)

    def _count_info(self, info: str | MergedInfo, sign: int = 1) -> None:
        self.info_bytes += sign * len(info)
        self.info_keys += 0 if isinstance(info, str) else sign * info.keys

    def reward_step(self, event: RewardedStep, digest: bytes, row: int, now: float) -> bool:
        """Apply a reward by step number from `row`; return whether that row is new here."""
        self.reward(event.reward, event.info, event.t - self.t0)
        if event.reward_id:
            self.reward_ids[event.t, event.reward_id] = digest
        self.late_rows.add(row)
        self.see(now)
        return self.hold(row)

    def hold(self, row: int) -> bool:
        """Note that `row` is needed here; return whether that is new."""
        new = not self.rows or self.rows[-1] != row
        if new:
            self.rows.append(row)
        return new

    def finish(self, ended: Ended) -> Part | None:
        """The last part; None if no step is buffered."""
        if not self.rewards:
            return None
        how: Ending = ended.how  # type: ignore[assignment]  # checked before it was journaled
        return self._part(len(self.rewards), ended.final_obs, how, self.infos, ended.agents)

    def cut(self, closed: int) -> tuple[Part, set[int]]:
        """Cut off the first `closed` steps; return them as a part, and its journal rows.

        The first observation of the remaining steps ends the part.
        """
        rows = {row for row in self.rows if row <= self.step_rows[closed]} | self.late_rows
        begin, end = (
            _offset(self.obs_lengths, self.rules.observation, n) for n in (closed, closed + 1)
        )
        infos = {row: text for row, text in self.infos.items() if row < closed}
        part = self._part(closed, bytes(self.obs[begin:end]), None, infos)
        self._drop(closed)
        return part, rows

    def _prefix(self, buffer: bytearray, lengths: array[int], codec: Codec) -> int:
        """The size in bytes of all values but the last."""
        return len(buffer) - (codec.itemsize if codec.itemsize is not None else lengths[-1])

    def _drop(self, closed: int) -> None:
        """Drop the first `closed` steps, which are in a part now."""
        row, seq = self.step_rows[closed], self.seqs[closed]
        for name, size in (
            ("obs", _offset(self.obs_lengths, self.rules.observation, closed)),
            ("actions", _offset(self.actions_lengths, self.rules.action, closed)),
            ("dist_inputs", sum(self.dist_lengths[:closed])),
        ):
            del getattr(self, name)[:size]
        for name in _PER_STEP:
            setattr(self, name, getattr(self, name)[closed:])
        self.infos = {at - closed: text for at, text in self.infos.items() if at >= closed}
        self.info_bytes = self.info_keys = 0
        for info in self.infos.values():
            self._count_info(info)
        self.t0 += closed
        self.part += 1
        self.reward_ids = {
            key: value for key, value in self.reward_ids.items() if key[0] >= self.t0
        }
        self.rows = [held for held in self.rows if held >= row]
        self.late_rows = {held for held in self.late_rows if held >= row}
        self.digests = self.digests[(seq - self.first_seq) * DIGEST_SIZE :]
        self.first_seq = seq

    def _part(
        self,
        steps: int,
        final_obs: bytes | None,
        ended: Ending | None,
        infos: Mapping[int, str | MergedInfo],
        agents: int = -1,
    ) -> Part:
        obs, actions, dist = len(self.obs), len(self.actions), len(self.dist_inputs)
        columns: Iterable[array[Any]] = _columns_of(self)
        if steps < len(self.rewards):
            columns = [column[:steps] for column in columns]
            obs = _offset(self.obs_lengths, self.rules.observation, steps)
            actions = _offset(self.actions_lengths, self.rules.action, steps)
            dist = sum(self.dist_lengths[:steps])
        started = self.started
        packed = [column.tobytes() for column in columns]
        buffers: dict[str, Any] = dict(zip(_OF_PARTS, packed, strict=True))
        return Part(
            episode_id=started.episode_id,
            part=self.part,
            t0=self.t0,
            steps=steps,
            schema_id=started.schema_id,
            obs=_first(self.obs, obs),
            actions=_first(self.actions, actions),
            dist_inputs=_first(self.dist_inputs, dist),
            **buffers,
            infos={row: str(info) for row, info in infos.items()},
            final_obs=final_obs,
            ended=ended,
            policy_id=started.policy_id,
            agent_id=DEFAULT_AGENT if started.agent_id is None else started.agent_id,
            agents=agents,
            training_enabled=started.training_enabled,
            continues=started.continues,
            tags=_with_arm(started),
        )


def _first(buffer: bytearray, size: int) -> bytes:
    """Copy the first bytes of a buffer, once."""
    with memoryview(buffer) as view:
        return bytes(view[:size])


def _offset(lengths: array[int], codec: Codec, count: int) -> int:
    """The size in bytes of the first `count` values."""
    return sum(lengths[:count]) if codec.itemsize is None else codec.itemsize * count


def _with_arm(started: Started) -> str:
    """The tags of an episode's rows: the caller's, and the canary arm."""
    if not started.arm:
        return started.tags
    tags = {**json.loads(started.tags), ARM: started.arm}
    return json.dumps(tags, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


_ARRAYS = tuple((column.name, column.typecode) for column in STEP_COLUMNS)
_OF_PARTS = (
    *(column.name for column in STEP_COLUMNS),
    *("obs_lengths", "actions_lengths", "dist_lengths"),
)
_PER_STEP = (*_OF_PARTS, "rewarded", "opened", "seqs", "step_rows")
_columns_of = attrgetter(*_OF_PARTS)
