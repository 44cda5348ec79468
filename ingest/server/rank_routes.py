"""Rank, reward and activate: events of candidates by their ids, as episodes of the events' names.

A ranked event is an episode of one step, or of one step for each slot, with the candidates of a
slate as observations; those that an earlier slot has are masked. Its start, its decisions and its
end are one journal row. Rewards come by the number of the step, within the policy's reward window,
and steps without any get the default. An event that is not `active` begins with training disabled
and stays open; `activate` ends it and enables training.

The info of a step has the ids and the probabilities, under `rank`, so that shards have them, and so
that a repeated request gets its first reply: `{"item", "items", "probabilities"}`.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ingest.access.tokens import LOGGING, NOBODY, Caller
from ingest.collector.collector import Collector, OpenRow
from ingest.collector.live_policies import LivePolicies
from ingest.episodes.journal_events import Ended
from ingest.episodes.open_episode import OpenEpisode
from ingest.episodes.policy_rules import PolicyRules
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from storage.spaces.action_mask import ACTION_MASK, inner_spaces
from storage.spaces.candidates import CANDIDATES, Candidates
from storage.spaces.descriptors import Array, SpaceError
from storage.spaces.named_features import LARGEST

RANK = "rank"
"""The key of the info."""
EPSILON = 0.1
"""The share of explored events before the first version, if the policy's spec declares no floor."""


class RankedStep(msgspec.Struct, kw_only=True):
    """What the info has: the chosen id, all ids in the order of the candidates, probabilities."""

    item: str
    items: list[str]
    probabilities: list[float]

    def ranking(self) -> wire.Ranking:
        """The chosen one first, then by falling probability, then in the request's order."""
        pairs = zip(self.items, self.probabilities, strict=True)
        found = sorted(pairs, key=lambda pair: (pair[0] != self.item, -pair[1]))
        ranking = [wire.Probability(id=name, probability=share) for name, share in found]
        return wire.Ranking(reward_action_id=self.item, ranking=ranking)


class _Info(msgspec.Struct):
    rank: RankedStep


_read_info = msgspec.json.Decoder(_Info).decode


@dataclass
class _Asked:
    """A request with what it means to its policy; `taken` are the candidates of earlier slots."""

    message: wire.Rank
    policy_id: str
    rules: PolicyRules
    candidates: Candidates
    rows: list[list[float]]
    items: list[str]

    @property
    def names(self) -> list[str]:
        """The keys of a context: those of the observation but for the candidates and their mask."""
        inner = inner_spaces(self.rules.observation.space)
        return sorted(inner.keys() - {CANDIDATES, ACTION_MASK})

    @property
    def start(self) -> int:
        """The number of the first action."""
        return self.candidates.mask.start[0]

    @property
    def slots(self) -> Sequence[wire.RankedSlot]:
        return self.message.slots or (wire.RankedSlot(),)

    def observed(self, slot: int, taken: set[str]) -> tuple[bytes, Array]:
        """A slot's observation in canonical bytes, and the mask (k,) of the candidates.

        Raises Refusal.
        """
        asked = self.slots[slot]
        place = f"$.slots[{slot}]" if self.message.slots else "$"
        gone = {*self.message.excluded, *asked.excluded, *taken}
        allowed = np.array([item not in gone for item in self.items], np.int8)
        if not allowed.any():
            text = f"expected at least one of {len(self.items)} actions to choose from, got none"
            raise Refusal("invalid", text, f"{place}.excluded")
        context = {**self.message.context, **asked.context}
        if set(context) != set(self.names):
            text = f"expected the keys {self.names}, got {sorted(context)!r:.300}"
            raise Refusal("invalid", text, f"{place}.context")
        try:
            seen = self.candidates.observed({**context, ACTION_MASK: allowed}, self.rows)
            return self.rules.observation.from_wire(seen, "context"), allowed
        except SpaceError as error:
            where, _, text = str(error).partition(": ")
            if self.rules.declaration.redact:
                text = "expected a value of the policy's space, got one that redaction hides"
            raise Refusal("invalid", text, f"$.{where}") from None


class Ranker:
    """Answers requests with the live policies, and submits their events to the collector."""

    def __init__(self, collector: Collector, live: LivePolicies) -> None:
        self._collector, self._live = collector, live
        self._rng = np.random.default_rng()

    async def rank(self, message: wire.Rank, caller: Caller = NOBODY) -> wire.RankReply:
        """Choose, and log what was chosen. Raises Refusal."""
        caller.require(LOGGING, "a ranked event")
        policies = self._collector.assembler.policies
        await self._live.look_for_first([policies.named(message.policy_id)])
        caller.require_live(time.time())
        asked = self._asked(message)
        caller.charge(2 + len(asked.slots))
        name = message.event_id or secrets.token_hex(12)
        known = self._known(name)
        if known is not None:
            steps, row = self._repeated(asked, known), self._collector.journal.submitted_row
            version = known.policy_version[0]
        else:
            arm = self._live.arm(asked.policy_id, name)
            canary = self._live.in_canary(asked.policy_id, arm)
            steps, events = self._decided(asked, canary)
            version = events[0].policy_version
            row = self._log(asked, name, events, caller)
        await self._collector.journal.durable(row)
        first, *more = [step.ranking() for step in steps]
        return wire.RankReply(
            event_id=name,
            reward_action_id=first.reward_action_id,
            ranking=first.ranking,
            slots=[first, *more] if message.slots else [],
            policy_version=version,
            durable=self._collector.keeps,
        )

    def _known(self, name: str) -> OpenEpisode | None:
        assembler = self._collector.assembler
        return assembler.episodes.get(name) or assembler.closing.get(name)

    # --- what a request means ----------------------------------------------------------------

    def _asked(self, message: wire.Rank) -> _Asked:
        start = wire.Start(policy_id=message.policy_id, episode_id=message.event_id or "")
        policy_id, rules = self._collector.judge.policy_of(start)
        found = rules.candidates
        if found is None:
            text = f"policy {policy_id!r}: expected an observation with {CANDIDATES}, got none"
            raise Refusal("invalid", text, "$.policy_id")
        if not rules.declaration.reward_window:
            text = "expected a reward_window above 0, because rewards come later, got 0"
            raise Refusal("invalid", f"policy {policy_id!r}: {text}", "$.policy_id")
        items = [action.id for action in message.actions]
        if not 0 < len(items) <= found.most:
            text = f"expected 1 to {found.most} actions, got {len(items)}"
            raise Refusal("invalid", text, "$.actions")
        known = {*items}
        if len(known) < len(items):
            at = next(i for i, item in enumerate(items) if item in items[:i])
            text = f"expected different ids, got {items[at]!r:.80} twice"
            raise Refusal("invalid", text, f"$.actions[{at}].id")
        for place, excluded in _excluded(message):
            unknown = next((item for item in excluded if item not in known), None)
            if unknown is not None:
                text = f"expected ids of the actions, got {unknown!r:.80}"
                raise Refusal("invalid", text, f"{place}.excluded")
        prob = message.action_prob
        if prob is not None and not (message.apprentice and 0.0 < prob <= 1.0):
            wanted = "a number in (0, 1]" if message.apprentice else "none without apprentice"
            raise Refusal("invalid", f"expected {wanted}, got {prob}", "$.action_prob")
        rows = [
            _row(action.features, rules, found.width, f"$.actions[{at}].features")
            for at, action in enumerate(message.actions)
        ]
        return _Asked(message, policy_id, rules, found, rows, items)

    # --- choosing ----------------------------------------------------------------------------

    def _decided(
        self, asked: _Asked, canary: bool
    ) -> tuple[list[RankedStep], list[wire.Decision | wire.LogAction]]:
        """The steps of a new event, and the events that log them. Raises Refusal."""
        steps: list[RankedStep] = []
        events: list[wire.Decision | wire.LogAction] = []
        for slot in range(len(asked.slots)):
            obs, allowed = asked.observed(slot, {step.item for step in steps})
            event, at, shares = self._choose(asked, obs, allowed, canary)
            step = RankedStep(item=asked.items[at], items=asked.items, probabilities=shares)
            event.info = {RANK: msgspec.to_builtins(step)}
            steps.append(step)
            events.append(event)
        return steps, events

    def _choose(
        self, asked: _Asked, obs: bytes, allowed: Array, canary: bool
    ) -> tuple[wire.Decision | wire.LogAction, int, list[float]]:
        """The event that logs a choice, the chosen candidate, and the policy's probability of each.

        Raises Refusal.
        """
        live, rules, apprentice = self._live, asked.rules, asked.message.apprentice
        if live.version(asked.policy_id) is None:
            refusal = live.nothing_served(asked.policy_id)
            if refusal.code == "busy":
                raise refusal
            shares = _baseline(allowed, _epsilon(rules))
        else:
            choice, shares = live.ranked(asked.policy_id, rules.schema_id, obs, canary=canary)
            shares = shares[: len(allowed)]
            if not apprentice:
                at = rules.action.decode(choice.action) - asked.start
                shares[at] = math.exp(choice.logp)
                decision = wire.Decision(
                    obs=obs,
                    action=choice.action,
                    action_logp=choice.logp,
                    policy_version=choice.version,
                    action_dist_inputs=choice.dist_inputs,
                )
                return decision, at, shares.tolist()
        at = int(allowed.argmax()) if apprentice else int(self._rng.choice(len(shares), p=shares))
        prob = asked.message.action_prob if apprentice else float(shares[at])
        action = rules.action.encode(asked.start + at, "action")
        return wire.LogAction(obs=obs, action=action, action_prob=prob), at, shares.tolist()

    def _log(
        self,
        asked: _Asked,
        name: str,
        steps: Sequence[wire.Decision | wire.LogAction],
        caller: Caller,
    ) -> int:
        """Accept a new event as one row, which is returned. Raises Refusal."""
        message = asked.message
        start = wire.Start(
            policy_id=asked.policy_id,
            tags=message.tags,
            training_enabled=message.active,
        )
        events: list[wire.Event] = [start, *steps, *([wire.End()] if message.active else ())]
        for event in events:
            event.episode_id, event.ts = name, message.ts
        reply, row = self._collector.accept(wire.Batch(events=events), caller=caller)
        for refused in reply.refused:
            error = {key: value for key, value in refused.error.items() if key != "path"}
            raise Refusal(**error, path="$")
        return row

    # --- known events ------------------------------------------------------------------------

    def _repeated(self, asked: _Asked, known: OpenEpisode) -> list[RankedStep]:
        """The steps of a known event. Raises Refusal if the request is another one."""
        name, redactor = known.started.episode_id, self._collector.redactor
        other = Refusal(
            "conflict",
            f"Episode {name}: expected the same request as before for this event_id, got another "
            "one, or what it got is no longer known",
            "$.event_id",
            name,
        )
        steps = _steps_of(known)
        spaces = known.started.policy_id, known.started.schema_id
        if len(steps) != len(asked.slots) or spaces != (asked.policy_id, asked.rules.schema_id):
            raise other
        taken = [step.item for step in steps]
        again = (asked.observed(slot, {*taken[:slot]})[0] for slot in range(len(steps)))
        seen = b"".join(redactor.observation(obs, asked.rules) for obs in again)
        if bytes(known.obs) != seen or any(step.items != asked.items for step in steps):
            raise other
        return steps

    def reward(self, name: str, message: wire.RankedReward) -> wire.LogReturns:
        """The reward as an event. Raises Refusal (409) for an event that is not known."""
        known = self._known(name)
        if known is None:
            self._require_ranked(name)
        several = known is not None and known.t_next > 1
        if several and message.slot is None:
            text = (
                "expected a slot: a reward for the whole slate does not say which choice it is for"
            )
            raise Refusal("invalid", f"Episode {name}: {text}", "$.slot", name)
        return wire.LogReturns(
            episode_id=name,
            reward=message.reward,
            step=message.slot or 0,
            reward_id=message.reward_id,
            info=message.info,
            ts=message.ts,
        )

    def _require_ranked(self, name: str) -> None:
        """Raise Refusal (409) unless an event that is not open has been one."""
        if name not in self._collector.assembler.finished:
            refusal = self._collector.judge.missing(name, None)
            if refusal.code == "not_found":
                text = f"Episode {name}: expected a ranked event, got one that is not known"
                raise Refusal("conflict", text, "$", name)
            raise refusal

    async def activate(self, name: str) -> wire.EventsReply:
        """End an event that was not active, so that it counts. Raises Refusal."""
        collector = self._collector
        ended = collector.assembler.finished.get(name)
        if ended is not None and ended.how == "terminated":
            await collector.journal.durable(collector.journal.submitted_row)
            return wire.EventsReply(durable=collector.keeps, accepted=0, duplicates=1)
        known = collector.assembler.episodes.get(name)
        if known is None:
            self._require_ranked(name)
        if known is None or not _steps_of(known):
            how = f"it was {ended.how}" if ended else "it was not ranked"
            text = f"Episode {name}: expected an event that waits for its activation, but {how}"
            raise Refusal("conflict", text, "$", name)
        window = known.rules.declaration.reward_window
        if known.part or collector.now - known.opened[0] >= window:
            text = f"Episode {name}: expected activation within the reward_window of {window:g} s"
            raise Refusal("window_closed", text, "$", name)
        key, seq = known.started.key, known.next_seq

        def fill(row: OpenRow) -> None:
            row.apply(Ended(key, seq, "terminated", None, waits=True, activates=True))

        await collector.journal.durable(collector.compose(fill))
        collector.stats.accepted += 1
        return wire.EventsReply(durable=collector.keeps, accepted=1)


def _steps_of(known: OpenEpisode) -> list[RankedStep]:
    """The ranked steps of an episode; none if it was not ranked, or its info is redacted."""
    try:
        return [_read_info(str(known.infos[at])).rank for at in range(known.steps)]
    except (KeyError, msgspec.MsgspecError):
        return []


def _excluded(message: wire.Rank) -> Iterator[tuple[str, Sequence[str]]]:
    """(place, ids) of each list of exclusions."""
    yield "$", message.excluded
    for at, slot in enumerate(message.slots):
        yield f"$.slots[{at}]", slot.excluded


def _row(given: Any, rules: PolicyRules, width: int, place: str) -> list[float]:
    """The features of a candidate as numbers. Raises Refusal."""
    try:
        if isinstance(given[0] if isinstance(given, list) and given else given, dict):
            if not rules.declaration.candidate_features:
                text = f"expected a list of {width} numbers, got an object: the policy's file has "
                raise SpaceError(text + "no candidate_features")
            return rules.named_features.row(given)
    except SpaceError as error:
        raise Refusal("invalid", str(error), place) from error
    row: list[float] = given if isinstance(given, list) else []
    numbers = all(type(x) in (float, int) and abs(x) <= LARGEST for x in row)
    if len(row) != width or not numbers:
        text = (
            f"expected {width} finite numbers, or an object of features by name, got {given!r:.80}"
        )
        raise Refusal("invalid", text, place)
    return row


def _epsilon(rules: PolicyRules) -> float:
    """The share of exploration of the declared spec, or the default."""
    spec: Mapping[str, Any] = rules.declaration.spec or {}
    rule = spec.get("action_rule")
    given = rule.get("explore") if isinstance(rule, Mapping) else None
    return float(given) if isinstance(given, (int, float)) and 0 < given <= 1 else EPSILON


def _baseline(allowed: Array, epsilon: float) -> Array:
    """(n,) probabilities: the first that is allowed, and `epsilon` spread over all of them."""
    shares: Array = allowed * (epsilon / allowed.sum())
    shares[int(allowed.argmax())] += 1.0 - epsilon
    shares /= shares.sum()
    return shares
