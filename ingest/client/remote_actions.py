"""`get_action` in remote mode: the collector's live version acts and records the decision.

An episode's queued events are sent with the request for its next action. If the reply is lost, the
request can be repeated with the same observation. The reply is sent before the decision is on the
collector's disk. So the events that it acknowledges are kept until they are durable, and sent again
if the collector was killed and does not know them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from time import time_ns
from typing import Any, TypeVar

import msgspec

from ingest.client.open_episodes import ClientEpisode, EpisodeBook
from ingest.delivery.outbox import Outbox, Pulled
from ingest.delivery.results import to_repeat
from ingest.delivery.sender import Sender
from ingest.delivery.transport import Delivery, refusal_from_json
from ingest.delivery.unconfirmed import LOST, undecided
from ingest.protocol import messages as wire
from ingest.protocol.agent_names import Name, label, label_of, name_of
from ingest.protocol.errors import ClientError, CollectorUnavailable, Refusal
from ingest.protocol.messages import ActionReply, Decision, Event, GetAction

HOLD_SECONDS = 30.0
"""Seconds that a client waits for a newer version while its policy is held, as in local mode."""

_ENDING = frozenset(
    {"completed", "abandoned", "broken", "not_found", "conflict", "gap", "unknown_instance"}
    | {"other_schema"}
)
_MSGPACK = {"Content-Type": wire.MSGPACK}
N = TypeVar("N", bound=Name)
_encode = msgspec.msgpack.Encoder().encode


class RemoteActor:
    """Asks for the actions of one client. `wait_for_disk`: replies are durable."""

    def __init__(
        self,
        book: EpisodeBook,
        outbox: Outbox,
        sender: Sender,
        timeout: float,
        *,
        wait_for_disk: bool,
    ) -> None:
        self._book = book
        self._outbox = outbox
        self._sender = sender
        self._timeout = timeout
        self._wait_for_disk = wait_for_disk

    def act(self, observations: Mapping[N, Any], env_t: Mapping[N, int | None]) -> dict[N, Any]:
        """Actions for some episodes, or tracks, with their `env_t` through one request.

        Raises BufferFull for an episode that was dropped because the queue was full.
        """
        if any(map(self._outbox.dropped.is_dropped, observations)):
            raise self._outbox.full()
        episodes = {name: self._book.find(name, answered=False) for name in observations}
        wanted: dict[Name, GetAction] = {
            name: self._request(episode, observations[name], env_t[name])
            for name, episode in episodes.items()
        }
        for episode in episodes.values():
            episode.step = None  # its queued events are sent with this request
        since = min((episode.since for episode in episodes.values()), default=0)
        end = self._outbox.end
        replies: dict[Name, ActionReply] = {}
        try:
            self._ask(wanted, since, replies)
        except CollectorUnavailable as error:
            for name, episode in episodes.items():
                if error.maybe_applied or name in replies:
                    episode.unanswered = wanted[name]
            raise
        except TimeoutError as error:
            for name, episode in episodes.items():
                if name in replies:  # decided, but not returned to the caller
                    episode.unanswered = wanted[name]
            raise TimeoutError(
                f"Episode {', '.join(map(label, episodes))}: no action in time: {error}"
            ) from error
        self._raise_refused(episodes, wanted, replies)
        for name, episode in episodes.items():
            episode.seq += 1
            episode.acted = True
            episode.decided = replies[name].decision
            episode.unanswered = None
            episode.since = end
        return {
            name: episode.policy.action_value(replies[name].action)
            for name, episode in episodes.items()
        }

    def _request(self, episode: ClientEpisode, observation: Any, env_t: int | None) -> GetAction:
        name = label_of(episode)
        obs = episode.policy.observe(name, observation)
        before = episode.unanswered
        if before is None:
            return GetAction(
                episode_id=episode.episode_id,
                agent_id=episode.agent_id,
                seq=episode.seq,
                obs=obs,
                ts=time_ns() // 1000,
                decided=episode.decided,
                env_t=env_t,
                pass_prob=episode.pass_prob,
                schema_id=episode.schema_id,
            )
        if before.obs != obs:
            raise ClientError(
                f"Episode {name}: the answer to its last get_action was lost; expected the same "
                f"observation again"
            )
        return before

    def _ask(
        self, wanted: dict[Name, GetAction], since: int, replies: dict[Name, ActionReply]
    ) -> None:
        """Add the actions for some episodes to `replies`; send their queued events along.

        Raises TimeoutError, CollectorUnavailable, or Refusal if the whole request failed.
        """
        sender, deadline = self._sender, time.monotonic() + self._timeout
        while missing := wanted.keys() - replies.keys():
            sender.register(max(0.0, deadline - time.monotonic()))
            pulled = self._outbox.pull(missing, since, deadline)
            if pulled is not None:
                requests = [request for name, request in wanted.items() if name in pulled.ids]
                replies |= self._exchange(pulled, requests, deadline)

    def _exchange(
        self, pulled: Pulled, requests: list[GetAction], deadline: float
    ) -> dict[Name, ActionReply]:
        """Send one request; return the replies, except of episodes that must be asked again."""
        back: Sequence[Event] = pulled.events
        try:
            delivery = self._delivery(pulled, requests, deadline)
            answer = delivery.run(wire.ActionsReply, max(0.0, deadline - time.monotonic()))
            replies = {name_of(reply): reply for reply in answer.actions}
            unexpected = set(map(name_of, requests)) ^ replies.keys()
            if unexpected:
                raise CollectorUnavailable(
                    f"expected one action per episode, mismatched: {unexpected}"
                )
            errors = {item.index: refusal_from_json(item.error) for item in answer.refused}
            if answer.redeclared:
                self._sender.learn_anew()
            fine = [event for i, event in enumerate(pulled.events) if i not in errors]
            if answer.durable or not self._sender.declarations.is_durable:  # nothing to keep for it
                self._sender.results.count(acknowledged=len(fine))
            else:
                self._keep(fine, requests, replies)
            back, wait = self._again(pulled, errors, replies, delivery.maybe_applied)
            for request in requests:
                if name_of(request) not in replies:
                    undecided(request)
            wait = max(wait, _without_busy(replies))
            if wait and not delivery.wait(wait, at_most=max(0.0, deadline - time.monotonic())):
                raise ClientError("the client is closed")
            return replies
        finally:
            self._finish(pulled, back)

    def _delivery(self, pulled: Pulled, requests: list[GetAction], deadline: float) -> Delivery:
        self._sender.hold_back([*pulled.events, *requests])
        batch = wire.ActionBatch(
            instance=pulled.instance,
            events=pulled.events,
            actions=requests,
            durable=self._wait_for_disk,
            wait=min(HOLD_SECONDS, max(0.0, deadline - time.monotonic()) / 2),
        )
        return Delivery(self._sender.transport, "POST", "/v1/actions", _encode(batch), _MSGPACK)

    def _again(
        self,
        pulled: Pulled,
        errors: Mapping[int, Refusal],
        replies: dict[Name, ActionReply],
        maybe_applied: bool,
    ) -> tuple[list[Event], float]:
        """(events to send again, after how many seconds); removes their episodes' replies."""
        events, sender = pulled.events, self._sender
        again, wait, forgotten = to_repeat(events, errors, maybe_applied)
        lost = self._take_lost(events, errors, replies)
        again += [undecided(events[i]) for i in errors if name_of(events[i]) in lost]
        repeated = set(map(id, again))
        for index, refusal in errors.items():
            if id(events[index]) not in repeated:
                sender.results.refuse(events[index], refusal)
        if forgotten:
            sender.forget(pulled.instance, again)
        for name in lost.union(map(name_of, again)):
            replies.pop(name, None)
        return again, wait

    def _take_lost(
        self,
        events: Sequence[Event],
        errors: Mapping[int, Refusal],
        replies: Mapping[Name, ActionReply],
    ) -> set[Name]:
        """The episodes whose events the collector has lost; queues the kept events again."""
        refusals = [(name_of(events[index]), refusal) for index, refusal in errors.items()]
        for name, reply in replies.items():
            if reply.error is not None:
                refusals.append((name, refusal_from_json(reply.error)))
        lost = self._sender.results.take_lost(refusals)
        for kept in lost.values():
            self._outbox.put_again(kept)
        carried = {name for name, refusal in refusals if refusal.code in LOST}
        return {name for name in carried if name in lost or self._outbox.carries(name)}

    def _keep(
        self,
        events: Sequence[Event],
        requests: Sequence[GetAction],
        replies: Mapping[Name, ActionReply],
    ) -> None:
        """Keep the events and decisions of a reply until they are durable."""
        kept = self._sender.results.kept
        for event in events:
            kept.keep(name_of(event), [event])
        for request in requests:
            name = name_of(request)
            reply = replies[name]
            if reply.error is None:
                kept.keep(name, [_decision(request, reply)])
                durable = kept.durable(name, reply.durable_seq)
                self._sender.results.count(acknowledged=len(durable))

    def _finish(self, pulled: Pulled, back: Sequence[Event]) -> None:
        again = set(map(id, back))
        if back:
            self._outbox.return_pulled(back, pulled.ticket)
        done = [event for event in pulled.events if id(event) not in again]
        self._outbox.judged(done, pulled.ticket)

    def _raise_refused(
        self,
        episodes: Mapping[N, ClientEpisode],
        wanted: Mapping[Name, GetAction],
        replies: Mapping[Name, ActionReply],
    ) -> None:
        """Raise the first refusal of a request; every episode can repeat the request."""
        first: Refusal | None = None
        for name, episode in episodes.items():
            error = replies[name].error
            if error is None:
                continue
            refusal = episode.error or refusal_from_json(error)
            first = first or refusal
            if refusal.code in _ENDING:
                self._book.end(name, refusal)
        if first is None:
            return
        for name, episode in episodes.items():
            if replies[name].error is None:
                episode.unanswered = wanted[name]
        raise first


def _without_busy(replies: dict[Name, ActionReply]) -> float:
    """Remove the replies that say `busy`; return after how many seconds to repeat, else 0."""
    wait = 0.0
    for name, reply in list(replies.items()):
        refusal = None if reply.error is None else refusal_from_json(reply.error)
        if refusal is not None and refusal.code == "busy":
            del replies[name]
            wait = max(wait, refusal.retry_after or 0.1)
    return wait


def _decision(request: GetAction, reply: ActionReply) -> Decision:
    """The full decision event of a reply, for a collector that has lost it."""
    return Decision(
        episode_id=request.episode_id,
        agent_id=request.agent_id,
        env_t=request.env_t,
        seq=request.seq,
        obs=request.obs,
        action=reply.stored,
        action_logp=reply.action_logp,
        policy_version=reply.policy_version,
        action_dist_inputs=reply.action_dist_inputs,
        pass_prob=request.pass_prob,
        ts=request.ts,
        answered=True,
        schema_id=request.schema_id,
    )
