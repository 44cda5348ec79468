"""AsyncPolicyClient: the calls of PolicyClient for a service on an asyncio loop.

    async with AsyncPolicyClient("http://localhost:9900", "remote") as client:
        episode = client.start_episode()
        action = await client.get_action(episode, observation)
        client.log_returns(episode, 1.0)
        client.end_episode(episode)

Logging calls are not coroutines and do not wait. `get_action` has no effect until it returns: the
collector chooses an action without recording it, and the decision is queued like any step when the
caller gets the action. A cancelled call therefore has no effect on the episode.

Calls that wait at the same time share requests, which are made by a few threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import monotonic, time_ns
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from ingest.client.arguments import by_episode
from ingest.client.open_episodes import ClientEpisode
from ingest.client.policy_client import PolicyClient
from ingest.delivery.declarations import ClientPolicy
from ingest.delivery.transport import Delivery, HttpSession, refusal_from_json
from ingest.protocol import messages as wire
from ingest.protocol.agent_names import Name, name_of
from ingest.protocol.errors import ClientError, CollectorUnavailable, Refusal
from ingest.protocol.messages import ActionReply, ActionsReply, Decision, GetAction, RankReply
from storage.system.forks import notice_fork, renewed_by_fork

REQUESTS = 4
"""The maximum number of requests for actions in flight."""

HOLD_SECONDS = 30.0
"""Seconds that a reply may wait for a newer version while flow control holds the policy."""

T = TypeVar("T")
_MSGPACK = {"Content-Type": wire.MSGPACK}
_encode = msgspec.msgpack.Encoder().encode


@dataclass(eq=False)
class _PendingAction:
    """One observation, and the future for its action."""

    request: GetAction
    answer: asyncio.Future[ActionReply]
    deadline: float
    refused: Refusal | None = None  # the last time that the collector was busy


class AsyncPolicyClient(PolicyClient):
    """A PolicyClient with `get_action`, `rank`, `activate`, `connect`, `flush`,
    `update_policy_weights` as coroutines.

    The arguments are those of PolicyClient without `sync`. `max_wait` is 0 by default, because a
    call that waits blocks the loop, and 0.01 with a spool, so that events can be written to disk.
    Use `aclose` instead of `close`, or `async with`. Use a client from one loop only.
    """

    def __init__(
        self,
        address: str,
        inference_mode: str = "local",
        update_interval: float | None = 10.0,
        session: HttpSession | None = None,
        *,
        max_wait: float | None = None,
        **options: Any,
    ) -> None:
        if max_wait is None:
            max_wait = 0.01 if options.get("on_full") == "spool" else 0.0
        if options.get("sync"):
            raise ValueError("sync: expected False: waiting would block the event loop")
        super().__init__(
            address, inference_mode, update_interval, session, max_wait=max_wait, **options
        )
        self._reset()
        _clients.add(self)

    def _reset(self) -> None:
        """Start without requests in flight, also in a forked child, which has no threads."""
        self._questions: list[_PendingAction] = []
        self._requests = 0  # on their way
        self._threads = ThreadPoolExecutor(REQUESTS, "headrace-actions")

    async def get_action(
        self, episode_id: str | Sequence[str], observation: Any
    ) -> Any | dict[str, Any]:
        """The live version's action on an observation, recorded as the episode's next step.

        Like PolicyClient.get_action. A call that is cancelled or times out has no effect: the next
        call may be a different one, or have another observation.
        """
        notice_fork()
        actions = await self._act(by_episode(episode_id, observation))
        return actions[episode_id] if isinstance(episode_id, str) else actions

    async def connect(self, timeout: float | None = None) -> None:  # type: ignore[override]  # as above
        """Like PolicyClient.connect."""
        await asyncio.to_thread(super().connect, timeout)

    async def flush(  # type: ignore[override]  # as above
        self, timeout: float | None = None, *, episode_id: str | None = None
    ) -> None:
        """Like PolicyClient.flush."""
        await asyncio.to_thread(super().flush, timeout, episode_id=episode_id)

    async def update_policy_weights(self, policy_id: str | None = None) -> int | None:  # type: ignore[override]  # as above
        """Like PolicyClient.update_policy_weights."""
        return await asyncio.to_thread(super().update_policy_weights, policy_id)

    async def rank(self, *arguments: Any, **named: Any) -> RankReply:  # type: ignore[override]  # as above
        """Like PolicyClient.rank."""
        return await asyncio.to_thread(super().rank, *arguments, **named)

    async def activate(self, event_id: str) -> None:  # type: ignore[override]  # as above
        """Like PolicyClient.activate."""
        await asyncio.to_thread(super().activate, event_id)

    async def aclose(self, timeout: float | None = None) -> None:
        """Like PolicyClient.close."""
        try:
            await asyncio.to_thread(self.close, timeout)
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> AsyncPolicyClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await asyncio.to_thread(super().__exit__, kind, error, trace)
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> PolicyClient:
        raise TypeError("expected `async with`")

    # --- acting ------------------------------------------------------------------------------

    async def _act(self, observations: Mapping[str, Any]) -> dict[str, Any]:
        """Actions of some episodes; recorded once all are chosen."""
        calls, wholes = self._calls, {}
        for name, seen in observations.items():
            whole = wholes[name] = self._book.find_whole(name)
            for agent in whole.arguments.by_agent(name, "obs", seen):
                await self._prepare(whole.policy(agent), is_local=calls.acts_here(name))
        turns = calls.turns(observations)
        asked = [
            (track, turn.obs[agent])
            for name, turn in turns.items()
            for agent, track in turn.acting.items()
            if not calls.acts_here(name)
        ]
        replies: dict[Name, tuple[ActionReply, bytes]] = {}
        if asked:
            chosen = await self._choose(asked)
            for (track, obs), reply in zip(asked, chosen, strict=True):
                replies[name_of(track)] = reply, obs
            turns = calls.turns(observations)  # other calls may have come between
        for name, turn in turns.items():
            if turn.whole is not wholes[name]:
                raise ClientError(f"Episode {name}: it ended while its action was being chosen")

        def decide(track: ClientEpisode, seen: Any, obs: bytes) -> tuple[Decision, Any]:
            if name_of(track) in replies:
                reply, obs = replies[name_of(track)]
                return _decided(track, obs, reply)
            return self._actor.decide(track, seen, obs, waits=False)

        return calls.decide(turns, decide)

    async def _prepare(self, policy: ClientPolicy, *, is_local: bool) -> None:
        """Wait in a thread for the declaration and the weights that an action needs."""
        if not policy.is_declared:
            await self._in_time(self._policies.require_declared, policy)
        if is_local and policy.paced:
            await self._in_thread(self._actor.wait, policy)
        elif is_local and self._actor.must_wait(policy):
            await self._in_time(self._actor.wait, policy)
        elif is_local:
            await asyncio.sleep(0)  # nothing else here gives other tasks their turn

    async def _in_time(self, function: Callable[..., T], *arguments: Any) -> T:
        """`_in_thread` for at most `timeout` seconds, including the wait for a free thread."""
        try:
            return await asyncio.wait_for(self._in_thread(function, *arguments), self._timeout)
        except TimeoutError:
            raise self._sender.no_answer(self._timeout) from None

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    # --- remote choices ----------------------------------------------------------------------

    async def _choose(self, asked: Sequence[tuple[ClientEpisode, bytes]]) -> list[ActionReply]:
        """The live version's action for each; nothing is recorded. Raises Refusal, ClientError."""
        loop = asyncio.get_running_loop()
        mine = []
        for episode, obs in asked:
            request = GetAction(
                episode_id=episode.episode_id,
                agent_id=episode.agent_id,
                obs=obs,
                policy_id=episode.policy.policy_id,
                schema_id=episode.policy.schema_id,
            )
            mine.append(_PendingAction(request, loop.create_future(), monotonic() + self._timeout))
        if not self._questions:
            loop.call_soon(self._send)
        self._questions += mine
        try:
            return await asyncio.gather(*(question.answer for question in mine))
        finally:  # after an error, the other replies are not needed
            for question in mine:
                question.answer.cancel()

    def _send(self) -> None:
        """Send the waiting observations, in at most `REQUESTS` requests at a time."""
        for question in self._questions:
            if not question.answer.done() and monotonic() >= question.deadline:
                error = question.refused or self._sender.no_answer(self._timeout)
                question.answer.set_exception(error)
        self._questions = [one for one in self._questions if not one.answer.done()]
        while self._questions and self._requests < REQUESTS:
            size, count = 0, 0
            for question in self._questions[: self._outbox.batch]:
                size += 256 + len(question.request.obs)
                if count and size > self._outbox.request_bytes:
                    break
                count += 1
            batch, self._questions = self._questions[:count], self._questions[count:]
            self._requests += 1
            loop = asyncio.get_running_loop()
            sent = loop.run_in_executor(
                self._threads, self._exchange, [question.request for question in batch]
            )
            sent.add_done_callback(partial(self._answered, batch))

    def _exchange(self, requests: list[GetAction]) -> ActionsReply:
        wait = min(HOLD_SECONDS, self._timeout / 2)
        self._sender.hold_back(requests)
        batch = wire.ActionBatch(actions=requests, durable=False, wait=wait, record=False)
        delivery = Delivery(self._transport, "POST", "/v1/actions", _encode(batch), _MSGPACK)
        reply = delivery.run(ActionsReply, self._timeout)
        if len(reply.actions) != len(requests):
            raise CollectorUnavailable("expected one action for each observation")
        if any(one.error and one.error.get("code") == "other_schema" for one in reply.actions):
            self._sender.learn_anew()
        return reply

    def _answered(
        self, batch: Sequence[_PendingAction], sent: asyncio.Future[ActionsReply]
    ) -> None:
        self._requests -= 1
        error = ClientError("the client is closed") if sent.cancelled() else sent.exception()
        for index, question in enumerate(batch):
            if question.answer.done():
                continue
            if error is not None:
                question.answer.set_exception(error)
                continue
            reply = sent.result().actions[index]
            refusal = None if reply.error is None else refusal_from_json(reply.error)
            if refusal is None:
                question.answer.set_result(reply)
            elif refusal.code == "busy":  # as with PolicyClient, it is asked again
                question.refused = refusal
                wait = min(refusal.retry_after or 0.1, max(0.0, question.deadline - monotonic()))
                asyncio.get_running_loop().call_later(wait, self._ask, question)
            else:
                question.answer.set_exception(refusal)
        self._send()

    def _ask(self, question: _PendingAction) -> None:
        """Ask again, unless the client has been closed meanwhile."""
        if not self._outbox.closed:
            self._questions.append(question)
            self._send()
        elif not question.answer.done():
            question.answer.set_exception(ClientError("the client is closed"))


def _decided(episode: ClientEpisode, obs: bytes, reply: ActionReply) -> tuple[Decision, Any]:
    """The decision event of an episode's next step, and the action for the environment."""
    event = Decision(
        episode_id=episode.episode_id,
        agent_id=episode.agent_id,
        seq=episode.seq,
        obs=obs,
        action=reply.stored,
        action_logp=reply.action_logp,
        policy_version=reply.policy_version,
        action_dist_inputs=reply.action_dist_inputs,
        ts=time_ns() // 1000,
        pass_prob=episode.pass_prob,
        schema_id=episode.schema_id,
    )
    return event, episode.policy.action_value(reply.action)


_clients = renewed_by_fork(AsyncPolicyClient._reset)
