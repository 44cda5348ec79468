"""What the assembler knows of episodes, and what it answers to an event: the half that reads.

    wire event --judge--> journal event

`judge` never changes the state that it reads; only `EpisodeAssembler`, whose docstring has the
table of states and events, does so, by applying journal events.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from ingest import wire
from ingest.errors import Refusal, already_started, not_found
from ingest.events import (
    Acted,
    Ended,
    Event,
    Redecided,
    RewardedStep,
    Started,
    digest,
    encode_event,
)
from ingest.instances import Instances
from ingest.judgements import (
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
from ingest.open_episode import OpenEpisode, PolicyRules
from ingest.sealed import Finished, Limits
from storage.declarations import PolicyDeclaration
from storage.episode import DEFAULT_POLICY
from storage.spaces import SpaceError


class Judge:
    """The episodes that are known, and the judgements of events on them."""

    def __init__(
        self,
        policies: Mapping[str, PolicyDeclaration],
        past: Iterable[PolicyDeclaration],
        limits: Limits,
    ) -> None:
        self.limits = limits
        self.rules = {name: PolicyRules.of(policy) for name, policy in policies.items()}
        every = [*(PolicyRules.of(policy) for policy in past), *self.rules.values()]
        self._schemas = {(r.declaration.policy_id, r.schema_id): r for r in every}
        self.redacts = any(rules.declaration.redact for rules in every)
        self.episodes: dict[str, OpenEpisode] = {}
        self.finished: OrderedDict[str, Finished] = OrderedDict()
        self.closing: dict[str, OpenEpisode] = {}  # ended, and still taking rewards
        self.instances = Instances()
        self.next_key = 0
        self.anonymous_starts = 0

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
