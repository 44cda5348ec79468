"""Decide whether an event becomes a journal event, is a known retry, or is refused.

    wire event --judge--> journal event

Judging changes nothing: a `Judge` has no state of its own, and reads the assembler's through the
read-only `KnownEpisodes`. `ingest.episodes.assembler` has the table of states and events.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from msgspec.structs import replace as replace_fields

from ingest.episodes.client_instances import Instance, require_range
from ingest.episodes.event_checks import (
    CheckedValues,
    agents_of,
    check_rewarded_step,
    check_values,
    decision_unknown,
    info_of,
    invalid,
    judge_action,
    judge_reward,
    other_schema,
    require_part,
    require_schema,
    tags_of,
    window_closed,
)
from ingest.episodes.journal_events import (
    Acted,
    Ended,
    JournalEvent,
    Redecided,
    RewardedStep,
    Started,
    digest,
    encode_event,
)
from ingest.episodes.open_episode import OpenEpisode
from ingest.episodes.policy_rules import Policies, PolicyRules
from ingest.episodes.redaction import Redactor
from ingest.episodes.sealed_parts import Finished, Limits
from ingest.protocol import messages as wire
from ingest.protocol.agent_names import UNSAMPLED, Name, Whole, label, label_of, name_of
from ingest.protocol.errors import Refusal, already_started, completed, erased, not_found
from storage.declarations.tombstones import Tombstones
from storage.experience.episode import Array
from storage.experience.range_set import RangeSet
from storage.spaces.descriptors import SpaceError
from storage.wording import counted

E = TypeVar("E", bound=wire.Event)


class KnownInstances(Protocol):
    """Read-only access to client instances."""

    def get(self, instance: str, /) -> Instance | None: ...

    def are_imports(self, *instances: str) -> bool: ...


class KnownEpisodes(Protocol):
    """Read-only access to the state that events are judged by."""

    @property
    def policies(self) -> Policies: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def episodes(self) -> Mapping[Name, OpenEpisode]: ...
    @property
    def closing(self) -> Mapping[Name, OpenEpisode]: ...
    @property
    def finished(self) -> Mapping[Name, Finished]: ...
    @property
    def wholes(self) -> Mapping[str, Whole]: ...
    @property
    def instances(self) -> KnownInstances: ...
    @property
    def next_key(self) -> int: ...
    @property
    def anonymous_starts(self) -> int: ...


class Judge:
    """Judges events by the known state, and by what was erased.

    A `redactor` is needed only if a policy redacts.
    """

    def __init__(
        self,
        known: KnownEpisodes,
        redactor: Redactor | None = None,
        erased: Tombstones | None = None,
    ) -> None:
        self._known, self._redactor = known, redactor
        self._erased = Tombstones(b"") if erased is None else erased

    def judge(
        self,
        instance: str | None,
        event: wire.Event,
        values: CheckedValues | None = None,
        *,
        now: float = 0.0,
    ) -> tuple[JournalEvent, bytes] | None:
        """The journal event for a wire event and its encoding, or None for a known retry.

        `values` are an action event's observation and action in canonical bytes, if they were
        validated already (see `check_values`). `now` decides which reward windows are over. Raises
        Refusal.
        """
        try:
            return self._judge(instance, event, values, now)
        except Refusal as refusal:
            refusal.agent_id = event.agent_id
            raise

    def _judge(
        self, instance: str | None, event: wire.Event, values: CheckedValues | None, now: float
    ) -> tuple[JournalEvent, bytes] | None:
        if not event.episode_id:
            raise Refusal("invalid", "expected an episode id, got none", "episode_id")
        if isinstance(event, wire.Start):
            started = self.judge_start(instance, event)
            return None if started is None else (started, encode_event(started))
        if isinstance(event, wire.LogReturns) and self.is_left_out(event):
            return None
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
                f"Episode {label_of(event)}: expected seq {episode.next_seq}, got {seq}",
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

    def is_left_out(self, event: wire.Event) -> bool:
        """Whether an event belongs to an episode that its client left out of its sample."""
        name, known = name_of(event), self._known
        return event.episode_id.startswith(UNSAMPLED) and not (
            name in known.episodes or name in known.closing or name in known.finished
        )

    def _judge_repeated(
        self, episode: OpenEpisode, event: wire.Event, seq: int
    ) -> Redecided | None:
        """Judge a known sequence number: a retry, unless its content differs.

        A decision that the client acted on replaces the open step's, which nothing follows yet.
        """
        if seq > 0:
            if seq < episode.first_seq:  # before the latest cut
                return None
            with contextlib.suppress(Refusal):  # content refused now was not accepted before
                judged = self._judge_event(episode, event, seq, None)
                if episode.repeats(judged, seq):
                    return None
                answered = isinstance(event, wire.Decision) and event.answered
                latest = seq == episode.open_seq == episode.next_seq - 1
                if answered and latest and isinstance(judged, Acted) and episode.decision():
                    return Redecided(judged)
        raise Refusal(
            "conflict",
            f"Episode {label_of(event)}: seq {seq} was acknowledged with other content"
            if seq
            else f"Episode {label_of(event)}: expected a seq of 1 or more: the start is 0",
            "seq",
            event.episode_id,
            episode.next_seq,
        )

    def judge_start(
        self, instance: str | None, event: wire.Start, ahead: int = 0
    ) -> Started | None:
        """The event that a start becomes; `ahead` judged starts before it are not applied yet."""
        name = event.episode_id
        start = self._known.anonymous_starts + ahead
        if instance is not None:
            known = self._known.instances.get(instance)
            if known is None:
                raise Refusal(
                    "unknown_instance",
                    f"client instance {instance!r} is unknown: register a new one",
                    "instance",
                    name,
                )
            if event.start is None:
                raise Refusal("invalid", "expected a start number, got none", "start", name)
            if event.start in known.starts:
                self._judge_repeated_start(instance, known.names.get(event.start), event)
                return None
            require_range(instance, known, event.start, name)
            start = event.start
        if name.startswith(UNSAMPLED):
            text = f"expected an id that does not begin with {UNSAMPLED!r}: its rewards are dropped"
            raise Refusal("invalid", text, "episode_id", name)
        self._require_free(instance or "", event)
        if (count := len(self._known.episodes)) >= self._known.limits.open_episodes:
            text = f"{counted(count, 'episode is', 'episodes are')} open"
            raise Refusal("busy", text, None, name, retry_after=1.0)
        policy_id, rules = self.policy_of(event)
        event = self._redacted(event, rules)
        return Started(
            key=self._known.next_key + ahead,
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
            agent_id=event.agent_id,
        )

    def judge_whole(
        self,
        instance: str | None,
        names: Sequence[str],
        agents: Sequence[str],
        starts: Array | None,
        policy_id: str,
    ) -> Array | None:
        """The start numbers (int64) of new whole episodes, or tracks of new episodes.

        `agents` is empty if episodes have one agent. None if any of them has to be judged on its
        own, because it may be known or be refused.
        """
        known = self._known
        keys: Sequence[Any] = [*zip(names, agents, strict=True)] if agents else names
        if policy_id not in known.policies.rules or len({*keys}) < len(keys):
            return None
        if UNSAMPLED in "".join(names) and any(name.startswith(UNSAMPLED) for name in names):
            return None
        if self._erased and any(self._erased.hide(name) for name in names):
            return None
        for there in (known.episodes, known.finished, known.closing, known.wholes):
            if there and not there.keys().isdisjoint(names):
                return None
        if agents and not known.closing.keys().isdisjoint(keys):
            return None
        if len(known.episodes) >= known.limits.open_episodes:
            return None
        if instance is None:
            first = known.anonymous_starts
            return np.arange(first, first + len(names))
        found = known.instances.get(instance)
        if found is None or starts is None:
            return None
        numbers = RangeSet.of_array(starts)
        if found.starts.intersection(numbers):
            return None
        try:
            for first, _ in numbers.ranges():
                require_range(instance, found, first, names[0])
        except Refusal:
            return None
        return starts.astype(np.int64)

    def stored_tags(
        self, episode_id: str, tags: Mapping[str, str] | None, rules: PolicyRules
    ) -> str:
        """An episode's tags as they are stored. Raises Refusal."""
        start = wire.Start(episode_id=episode_id, tags=dict(tags) if tags else None)
        return tags_of(self._redacted(start, rules))

    def _require_kept(self, episode_id: str) -> None:
        """Raise Refusal if an episode was erased."""
        if self._erased.hide(episode_id):
            raise erased(episode_id)

    def _require_free(self, instance: str, event: wire.Start) -> None:
        """Raise Refusal if the episode of a start is known, or cannot start here."""
        episode_id, name, known = event.episode_id, name_of(event), self._known
        self._require_kept(episode_id)
        self._require_kept(event.continues or "")
        whole = known.wholes.get(episode_id)
        if name in known.episodes:
            raise already_started(episode_id, event.agent_id)
        if name in known.finished:
            raise known.finished[name].refusal()
        waiting = known.closing.get(name)  # it may be forgotten before its reward window closes
        if waiting is not None and waiting.ended is not None:
            raise Finished.of(waiting, waiting.ended).refusal()
        if event.agent_id is None:  # an id has either one agent or several
            if whole is not None:
                raise already_started(episode_id) if whole.open else completed(episode_id)
            return
        if episode_id in known.episodes:
            raise already_started(episode_id)
        if episode_id in known.finished:
            raise known.finished[episode_id].refusal()
        if whole is None:
            return
        if whole.instance != instance and not known.instances.are_imports(whole.instance, instance):
            raise _others(episode_id)
        stopped = None if whole.stopped is None else known.finished.get((episode_id, whole.stopped))
        if stopped is not None:
            raise stopped.refusal()
        if whole.is_complete:
            raise completed(episode_id)

    def _judge_repeated_start(self, instance: str, began: Name | None, event: wire.Start) -> None:
        """Judge a known start number: a retry, if the start equals what is known of it.

        `began` is the episode that it started. All fields are known while that is open, only the
        name afterwards, and nothing once it is forgotten.
        """
        name = name_of(event)
        episode = self._known.episodes.get(name)
        known = self._known.finished.get(name) if episode is None else episode.started
        text = ""
        if began not in (None, name):
            text = f"start {event.start} of this client instance was used by episode {label(began)}"
        elif known is not None and (known.instance, known.start) != (instance, event.start):
            text = f"start {event.start} of this client instance was used by another episode"
        elif episode is not None and (fields := self._other_fields(episode, event)):
            others = " and ".join(fields)
            text = (
                f"Episode {label(name)}: start {event.start} was acknowledged with other {others}"
            )
        if text:
            raise Refusal("conflict", text, "start", event.episode_id)

    def _other_fields(self, episode: OpenEpisode, event: wire.Start) -> list[str]:
        """The fields in which a start differs from the one that an open episode started with.

        The time is not compared: after a lost answer, a caller may send another.
        """
        started = episode.started
        same = {
            # no name means the default policy, which may have changed at a restart
            "policy_id": event.policy_id in (None, started.policy_id),
            "training_enabled": event.training_enabled == started.training_enabled,
            "tags": self._has_tags(episode, event),
            "continues": event.continues == started.continues,
            "schema_id": event.schema_id in (None, started.schema_id),
        }
        return [field for field, holds in same.items() if not holds]

    def _has_tags(self, episode: OpenEpisode, event: wire.Start) -> bool:
        """Whether a start has an open episode's tags.

        Today's rules may redact more than those of the episode's start. So each tag must equal the
        stored one, or the stored one as redacted today.
        """
        kept = episode.started.tags
        try:
            tags = tags_of(self._redacted(event, episode.rules))
        except Refusal:  # tags that are refused now were not accepted before
            return False
        if tags == kept or not episode.rules.declaration.redact:
            return tags == kept
        before, came = json.loads(kept), json.loads(tags)
        now = self._redacted(replace_fields(event, tags=before), episode.rules)
        again = json.loads(tags_of(now))  # this hashes stored pseudonyms again
        return all(came.get(tag) in (before.get(tag), again.get(tag)) for tag in {**before, **came})

    def policy_of(self, event: wire.Start | wire.GetAction) -> tuple[str, PolicyRules]:
        """The policy that an event names, with the rules that its values are judged by.

        These are the current rules, except for a start that names an earlier declaration. Raises
        Refusal.
        """
        policies = self._known.policies
        name = policies.named(event.policy_id)
        today = policies.rules.get(name)
        if today is None:
            raise Refusal(
                "invalid",
                f"expected a policy of {sorted(policies.rules)}, got {name!r}",
                "policy_id",
                event.episode_id,
            )
        rules = policies.of(name, event.schema_id)
        if rules is None or (rules is not today and not isinstance(event, wire.Start)):
            raise other_schema(event, today)
        return name, rules

    def _find(self, instance: str | None, event: Any) -> OpenEpisode | None:
        """The open episode of an event; None if the event is a retry for an ended one."""
        name = name_of(event)
        episode = self._known.episodes.get(name)
        if episode is None:
            self._require_kept(event.episode_id)
            ended = self._known.finished.get(name)
            if ended is None:
                raise self.missing(event.episode_id, event.agent_id)
            mine = event.seq is not None and ended.instance == (instance or "")
            if mine and 0 < event.seq < ended.client_seq:
                return None
            breaks = isinstance(event, wire.End) and event.broken is not None
            if mine and breaks and ended.how == "broken":
                return None
            raise ended.refusal()
        if episode.started.instance != (instance or ""):
            raise _others(event.episode_id)
        return episode

    def missing(self, episode_id: str, agent_id: str | None) -> Refusal:
        """The refusal for an episode, or an agent of one, that is not known."""
        if self._erased.hide(episode_id):
            return erased(episode_id)
        refusal, known = not_found(episode_id, agent_id), self._known
        if agent_id is None and episode_id in known.wholes:
            refusal.message += " It has several agents: expected an agent_id."
        elif agent_id is not None and (
            episode_id in known.episodes or episode_id in known.finished
        ):
            refusal.message += " It has one agent: expected no agent_id."
        return refusal

    def _judge_rewarded_step(
        self, event: wire.LogReturns, t: int, now: float
    ) -> RewardedStep | None:
        """Judge a reward for a step by its number, which any client may send; it has no seq."""
        name = name_of(event)
        episode = self._known.episodes.get(name) or self._known.closing.get(name)
        if episode is None:
            self._require_kept(event.episode_id)
        if episode is None and name not in self._known.finished:
            raise self.missing(event.episode_id, event.agent_id)
        if episode is None:
            raise window_closed(event, t, f"its episode is {self._known.finished[name].how}")
        event = self._redacted(event, episode.rules)
        reward_id = event.reward_id or ""
        try:
            info = info_of(event)
        except SpaceError as error:
            raise invalid(event, str(error)) from error
        judged = RewardedStep(episode.started.key, t, reward_id, event.reward, info)
        known = episode.reward_ids.get((t, reward_id))
        if known is not None and known == digest(judged, encode_event(judged)):
            return None
        if known is not None:
            text = (
                f"Episode {label(name)}: reward {reward_id!r} of step {t} was acknowledged with "
                "another amount or info"
            )
            raise Refusal("conflict", text, "reward_id", event.episode_id)
        check_rewarded_step(episode, event, t, judged.info, now)
        return judged

    def _judge_event(
        self, episode: OpenEpisode, event: Any, seq: int, values: CheckedValues | None
    ) -> JournalEvent:
        if not isinstance(event, wire.LogReturns):
            require_schema(event, episode.rules)
        event = self._redacted(event, episode.rules)
        try:
            if isinstance(event, wire.LogReturns):
                return judge_reward(episode, event, seq)
            if isinstance(event, wire.End):
                final = None
                if event.obs is not None:
                    final = episode.rules.observation.from_wire(event.obs, "obs")
                how = "truncated" if event.truncated else "terminated"
                agents = agents_of(episode, event)
                return Ended(
                    episode.started.key, seq, how, final, waits=episode.waits, agents=agents
                )
            require_part(episode, event)
            return judge_action(episode, event, seq, values)
        except SpaceError as error:
            raise invalid(event, str(error)) from error

    def _redacted(self, event: E, rules: PolicyRules) -> E:
        """The event as its policy redacts it. Raises Refusal.

        If the rules redact, an event is never stored as it came: without a redactor it is refused.
        """
        declared = rules.declaration
        if not declared.redact:
            return event
        if self._redactor is None:
            raise TypeError(f"policy {declared.policy_id}: expected a redactor for its rules")
        return self._redactor.event(event, rules)

    def is_owner(self, instance: str | None, name: Name) -> bool:
        """Whether an open episode was started by this client instance."""
        episode = self._known.episodes.get(name)
        return episode is not None and episode.started.instance == (instance or "")

    def check_values(self, batch: wire.Batch) -> dict[int, CheckedValues]:
        """Validate a batch's values together; see `event_checks.check_values`."""
        return check_values(batch, self._rules_of)

    def rules_for(self, event: wire.Event) -> PolicyRules | None:
        """The rules of an event, also of an ended episode; None if they are not known."""
        if isinstance(event, wire.Start):
            return self._known.policies.of(event.policy_id, event.schema_id)
        name = name_of(event)
        ended = self._known.finished.get(name)
        if ended is not None and ended.policy_id:
            return self._known.policies.schemas.get((ended.policy_id, ended.schema_id))
        return self._rules_of(name, {})

    def _rules_of(self, name: Name, starting: Mapping[Name, wire.Start]) -> PolicyRules | None:
        episode = self._known.episodes.get(name) or self._known.closing.get(name)
        if episode is not None:
            return episode.rules
        start = starting.get(name)
        if start is None:
            return None
        return self._known.policies.of(start.policy_id, start.schema_id)


def _others(episode_id: str) -> Refusal:
    text = f"Episode {episode_id} was started by another client"
    return Refusal("conflict", text, "instance", episode_id)
