"""Remote inference: requests for actions, answered by one forward pass for all that wait.

Requests that arrive during a forward pass are answered by the next one. There is no timer, so a
lone request is answered at once. If flow control holds a policy, a request waits for a new version
as long as its caller says, then uses the live one. An error in one request affects only that
request.

A reply that does not wait for the disk may be lost with the collector. It says up to which event
its episode is durable, and the client sends the later events again (see `wire.ActionBatch`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from ingest.access.tokens import NOBODY, Caller
from ingest.collector.collector import Collector
from ingest.collector.live_policies import Choice, LivePolicies
from ingest.episodes.event_checks import require_schema
from ingest.episodes.idempotency import Given
from ingest.episodes.open_episode import OpenEpisode
from ingest.episodes.policy_rules import PolicyRules
from ingest.protocol import messages as wire
from ingest.protocol.agent_names import Name, label_of, name_of
from ingest.protocol.errors import Refusal, disk_full
from storage.spaces.descriptors import SpaceError

MAX_HOLD_SECONDS = 60.0
MAX_AHEAD = 1024
"""The most journal rows that replies may be ahead of the disk; then replies wait for it."""


@dataclass(eq=False)
class _ActionRequest:
    """The calls of one request, their answers so far, and the future that its caller awaits."""

    instance: str | None
    calls: list[wire.GetAction]
    held: Mapping[str, int]
    durable: bool
    done: asyncio.Future[int]  # the journal row of its decisions
    given: Given | None  # the key of a request for one action
    record: bool = True
    answers: list[wire.ActionReply] = field(init=False)

    def __post_init__(self) -> None:
        self.answers = [
            wire.ActionReply(episode_id=call.episode_id, agent_id=call.agent_id)
            for call in self.calls
        ]

    @property
    def over(self) -> bool:
        """Whether no caller waits for this request: it has failed, or its caller has
        disconnected."""
        return self.done.done()

    def fail(self, error: Exception) -> None:
        if not self.over:
            self.done.set_exception(error)

    def refuse(self, index: int, refusal: Refusal) -> None:
        """Answer one of the calls with a refusal."""
        call = self.calls[index]
        path = refusal.path and f"$.actions[{index}].{refusal.path}"
        named = replace(refusal, path=path, episode_id=call.episode_id, agent_id=call.agent_id)
        self.answers[index].error = named.to_json()


class _ForwardKey(msgspec.Struct, frozen=True):
    """The key of calls that one forward pass can answer together."""

    policy_id: str
    schema_id: str
    explore: bool
    canary: bool


class _Question(msgspec.Struct, frozen=True):
    request: _ActionRequest
    index: int
    obs: bytes


class Acting:
    """Chooses actions with the live policies, and submits them to the collector as decisions.

    `requests` and `forwards` are counts; `holds` counts requests that waited for a newer version,
    `holds_given_up` those for which none came.
    """

    def __init__(self, collector: Collector, live: LivePolicies) -> None:
        self._collector = collector
        self._live = live
        self._waiting: list[_ActionRequest] = []
        self.requests = self.forwards = self.holds = self.holds_given_up = 0

    async def act(
        self,
        message: wire.ActionBatch,
        caller: Caller = NOBODY,
        given: Given | None = None,
    ) -> wire.ActionsReply:
        """Apply pending events, then choose one action for each observation."""
        if message.events and not message.record:
            raise Refusal("invalid", "expected no events with record: false", "$.events")
        events = wire.Batch(instance=message.instance, events=message.events)
        reply, row = self._collector.accept(events, caller=caller)
        epoch = self._collector.journal.epoch
        held = await self._unheld(reply.hold, message)
        caller.require_live(time.time())
        done = asyncio.get_running_loop().create_future()
        request = _ActionRequest(
            message.instance, message.actions, held, message.durable, done, given, message.record
        )
        self._submit(request)
        decided = await done
        if self._collector.journal.epoch != epoch:  # the events were discarded meanwhile
            raise disk_full()
        row = max(row, decided)
        if not message.record:
            return wire.ActionsReply(durable=self._collector.keeps, actions=request.answers)
        await self._collector.journal.durable(row if message.durable else row - MAX_AHEAD)
        return wire.ActionsReply(
            durable=message.durable and self._collector.keeps,
            actions=request.answers,
            refused=reply.refused,
            redeclared=reply.redeclared,
        )

    def _submit(self, request: _ActionRequest) -> None:
        self.requests += 1
        self._waiting.append(request)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._drain)

    async def _unheld(
        self, hold: Mapping[str, int], message: wire.ActionBatch
    ) -> Mapping[str, int]:
        """Wait for newer versions than the held ones; return what is still held at the end."""
        assembler = self._collector.assembler
        episodes, named = assembler.episodes, set(map(name_of, message.actions))
        acting = {episodes[name].started.policy_id for name in named if name in episodes}
        if not message.record:
            policies = assembler.policies
            acting = {policies.named(call.policy_id) for call in message.actions}
            acting &= policies.rules.keys()
        await self._live.look_for_first(acting)
        held = {policy: hold[policy] for policy in acting if policy in hold}
        if not held:
            return held
        self.holds += 1
        try:
            async with asyncio.timeout(min(message.wait, MAX_HOLD_SECONDS)):
                while (held := self._still(held)) and not self._live.closing:
                    await self._live.changed(next(iter(held)))
        except TimeoutError:
            self.holds_given_up += 1
        return held

    def _still(self, held: Mapping[str, int]) -> dict[str, int]:
        return {name: old for name, old in held.items() if self._live.version(name) == old}

    # --- one forward pass for all ------------------------------------------------------------

    def _drain(self) -> None:
        """Answer all waiting requests."""
        waiting, self._waiting = self._waiting, []
        try:
            self._answer([request for request in waiting if not request.over])
        except Exception as error:  # not of one request: all must be answered
            for request in waiting:
                request.fail(error)

    def _answer(self, waiting: list[_ActionRequest]) -> None:
        """Answer each request; an error in one does not affect the others."""
        groups: dict[_ForwardKey, list[_Question]] = {}
        for request in waiting:
            with _alone(request):
                self._ask(request, groups)
        chosen: dict[_ActionRequest, list[tuple[_Question, Choice]]] = {}
        for group, questions in groups.items():
            for question, choice in self._choose(group, questions):
                chosen.setdefault(question.request, []).append((question, choice))
        for request in waiting:
            if request.over:
                continue
            with _alone(request):
                row = self._decide(request, chosen.get(request, []))
                if not request.durable and request.record:
                    self._mark(request.answers, row)
                request.done.set_result(row)

    def _ask(self, request: _ActionRequest, groups: dict[_ForwardKey, list[_Question]]) -> None:
        """Add a request's calls to groups, except for those that are answered at once."""
        named: set[Name] = set()
        for index, call in enumerate(request.calls):
            try:
                if name_of(call) in named:
                    text = f"Episode {label_of(call)}: expected at most once in a request"
                    raise Refusal("invalid", text, "episode_id", call.episode_id)
                named.add(name_of(call))
                if request.record:
                    episode = self._episode(call)
                    policy_id, rules = episode.started.policy_id, episode.rules
                    require_schema(call, rules)
                    arm = episode.started.arm
                else:
                    policy_id, rules = self._collector.judge.policy_of(call)
                    arm = self._live.arm(policy_id, call.episode_id)
                obs = self._observed(call, rules)
            except Refusal as refusal:
                request.refuse(index, refusal)
                continue
            known = request.record and self._repeat(request, call, obs, request.answers[index])
            if not known:
                canary = self._live.in_canary(policy_id, arm)
                group = _ForwardKey(policy_id, rules.schema_id, call.explore, canary)
                groups.setdefault(group, []).append(_Question(request, index, obs))

    def _episode(self, call: wire.GetAction) -> OpenEpisode:
        assembler = self._collector.assembler
        episode = assembler.episodes.get(name_of(call))
        if episode is None:
            ended = assembler.finished.get(name_of(call))
            if ended is not None:
                raise ended.refusal()
            raise self._collector.judge.missing(call.episode_id, call.agent_id)
        return episode

    def _observed(self, call: wire.GetAction, rules: PolicyRules) -> bytes:
        """A call's observation in canonical bytes."""
        redaction = self._collector.redactor.of(rules)
        try:
            if redaction is not None and redaction.of_observations:
                observed = redaction.checked(call, call.obs)
            else:
                observed = rules.observation.from_wire(call.obs, "obs")
            rules.require_allowed(observed)
            return observed
        except SpaceError as error:
            place, _, text = str(error).partition(": ")
            text = f"Episode {label_of(call)}: {text}"
            raise Refusal("invalid", text, place, call.episode_id) from error

    def _choose(
        self, group: _ForwardKey, questions: list[_Question]
    ) -> list[tuple[_Question, Choice]]:
        """The choices for questions; those without one have been refused or failed."""
        answers: Sequence[Choice | Refusal]
        try:
            answers = self._live.act(
                group.policy_id,
                group.schema_id,
                [item.obs for item in questions],
                group.explore,
                canary=group.canary,
            )
            self.forwards += 1
        except Refusal as refusal:
            answers = [refusal] * len(questions)
        except Exception as error:
            if len(questions) > 1:  # find the one that failed, and answer the others
                return [found for item in questions for found in self._choose(group, [item])]
            questions[0].request.fail(error)
            return []
        chosen = []
        for question, answer in zip(questions, answers, strict=True):
            if isinstance(answer, Refusal):
                question.request.refuse(question.index, answer)
            else:
                chosen.append((question, answer))
        return chosen

    def _decide(self, request: _ActionRequest, chosen: list[tuple[_Question, Choice]]) -> int:
        """Accept a request's decisions; return the row that must be durable before its answers."""
        if not request.record:
            for question, choice in chosen:
                self._tell(request, request.answers[question.index], question, choice)
        if not chosen or not request.record:
            return self._collector.journal.submitted_row
        decisions: list[wire.Event] = [
            _decision(request.calls[question.index], question.obs, choice)
            for question, choice in chosen
        ]
        batch = wire.Batch(instance=request.instance, events=decisions)
        reply, row = self._collector.accept(batch, single=True, given=request.given)
        refused = {item.index: item.error for item in reply.refused}
        for i, (question, choice) in enumerate(chosen):
            answer = request.answers[question.index]
            if i in refused:
                answer.error = {k: v for k, v in refused[i].items() if k != "path"}
                continue
            answer.action = plain(choice.action_env)
            self._fill(answer, request)
        return max(row, self._collector.journal.submitted_row)

    def _tell(
        self, request: _ActionRequest, answer: wire.ActionReply, question: _Question, choice: Choice
    ) -> None:
        """Put a choice that is not recorded here into the answer, with all its fields."""
        answer.action = plain(choice.action_env)
        answer.stored, answer.action_dist_inputs = choice.action, choice.dist_inputs
        answer.action_logp = choice.logp if math.isfinite(choice.logp) else None
        answer.policy_version = choice.version
        call = request.calls[question.index]
        policies = self._collector.assembler.policies
        answer.hold = policies.named(call.policy_id) in request.held

    def _repeat(
        self, request: _ActionRequest, call: wire.GetAction, obs: bytes, answer: wire.ActionReply
    ) -> bool:
        """Answer a repeated request with the decision of its lost first answer."""
        episode = self._collector.assembler.episodes[name_of(call)]
        mine = episode.started.instance == (request.instance or "")
        if not mine or not episode.repeats_decision(
            call.seq, self._collector.redactor.observation(obs, episode.rules)
        ):
            return False
        sent = self._live.sent(episode.rules.action, episode.open_action())
        answer.action = plain(sent)
        self._fill(answer, request)
        return True

    def _fill(self, answer: wire.ActionReply, request: _ActionRequest) -> None:
        """Fill in the decision of the open step of an answer's episode."""
        episode = self._collector.assembler.episodes[name_of(answer)]
        logp = episode.action_logp[-1]
        answer.action_logp = logp if math.isfinite(logp) else None
        answer.policy_version = episode.policy_version[-1]
        answer.hold = episode.started.policy_id in request.held

    # --- ahead of the disk -------------------------------------------------------------------

    def _mark(self, answers: list[wire.ActionReply], row: int) -> None:
        """Say in answers up to where episodes are durable; repeat decisions that may not be."""
        for answer in answers:
            episode = self._collector.assembler.episodes.get(name_of(answer))
            if answer.error is None and episode is not None:
                answer.decision = episode.decision()
                answer.stored = episode.open_action()
                answer.action_dist_inputs = episode.open_dist_inputs()
                episode.replied(row, episode.open_seq)
                answer.durable_seq = episode.synced(self._collector.journal.durable_row)


@contextlib.contextmanager
def _alone(request: _ActionRequest) -> Iterator[None]:
    """Make an error fail only the given request."""
    try:
        yield
    except Exception as error:
        request.fail(error)


def _decision(call: wire.GetAction, obs: bytes, choice: Choice) -> wire.Decision:
    return wire.Decision(
        episode_id=call.episode_id,
        seq=call.seq,
        obs=obs,
        action=choice.action,
        action_logp=choice.logp if math.isfinite(choice.logp) else None,
        policy_version=choice.version,
        action_dist_inputs=choice.dist_inputs,
        ts=call.ts,
        decided=call.decided,
        agent_id=call.agent_id,
        env_t=call.env_t,
        pass_prob=call.pass_prob,
    )


def plain(value: Any) -> Any:
    """Convert an action for JSON and msgpack: arrays become nested lists."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
