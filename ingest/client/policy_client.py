"""PolicyClient: how a program logs its episodes and asks for actions.

    with PolicyClient("http://localhost:9900") as client:
        episode = client.start_episode()
        client.log_action(episode, observation, action, action_prob=0.25)
        client.log_returns(episode, 1.0)
        client.end_episode(episode)

A logging call validates its values, queues an event and returns. A background thread delivers the
queued events in batches, exactly once. `flush` waits until all are acknowledged. Even if the
collector is down, a logging call waits for at most `max_wait` seconds.

Values are validated in the call once the policy's declaration is known: from `policy_file`, from
`cache_dir`, or from the collector, which the thread asks (`connect` waits for that). Until then
they are copied, and validated before they are sent. An invalid value then ends its episode as
broken at its last valid step, is counted, and is reported to `on_error`, the episode's next call
and `flush`.

Several threads may use one client for different episodes; one episode is used by one thread at a
time. After a fork the child's client is empty: the parent's episodes stay with the parent.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from time import monotonic, time_ns
from types import TracebackType
from typing import Any, get_args
from urllib.parse import quote
from uuid import uuid4

import msgspec
import numpy as np
from msgspec import Struct

from ingest.client.calls import PolicyLookup, Queueing
from ingest.client.episode_calls import EpisodeCalls, PolicyMapping, checked_mapping
from ingest.client.local_actions import LocalActor
from ingest.client.open_episodes import ClientWhole, EpisodeBook, require_free
from ingest.client.remote_actions import RemoteActor
from ingest.delivery.client_stats import ClientStats
from ingest.delivery.declarations import CollectorSpec, Declarations, Draft
from ingest.delivery.events import (
    EVENT_BYTES,
    ID_CHARACTERS,
    check_id,
    check_pass_prob,
    check_sample_rate,
    encode_info,
    flag,
    late_reward,
    now_or,
    number,
    propensity,
    size_of,
    start_event,
    unsampled_names,
    version,
)
from ingest.delivery.outbox import OnFull, Outbox
from ingest.delivery.sender import Sender
from ingest.delivery.spool import Spool
from ingest.delivery.traces import require_tracing, with_trace
from ingest.delivery.transport import Delivery, HttpSession, TokenSource, Transport
from ingest.protocol.agent_names import UNSAMPLED
from ingest.protocol.errors import ClientError, Refusal
from ingest.protocol.messages import (
    MSGPACK,
    Activate,
    End,
    EventsReply,
    LogAction,
    M,
    Rank,
    RankedAction,
    RankedSlot,
    RankReply,
    Start,
)
from storage.experience.hashed import SAMPLING, hash_fraction
from storage.system.forks import notice_fork
from storage.wording import counted

log = logging.getLogger("headrace.client")


def _plain(value: Any) -> Any:
    """The numbers of numpy as Python's."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"expected numbers, texts, lists and objects, got {type(value).__name__}")


_encode_plain = msgspec.msgpack.Encoder(enc_hook=_plain).encode


class PolicyClient:
    """A client of one collector.

    Args:
        address: `http://HOST:PORT` or `https://...`, with a path if a proxy needs one.
        inference_mode: where `get_action` chooses actions, "local" or "remote".
        update_interval: seconds after which local inference asks for newer weights, while the old
            ones act; 0: in every action, which waits for the answer; None: never.
        session: a `requests.Session` to use for everything; the caller closes it.
        policy_id: the policy of new episodes; default: the collector's only one, or `default`.
        sync: every logging call waits until its event is acknowledged (at most `timeout` seconds),
            and raises its refusal.
        token: sent as `Authorization: Bearer`; a function is called before each request, so that a
            token can be renewed.
        ca: a file of PEM certificates to trust instead of the system's, for `https`; not with a
            session, which has its own.
        timeout: maximum seconds of a call that needs an answer: `get_action`, `connect`.
        max_wait: maximum seconds of a logging call, which may wait for room in the queue, for the
            declaration (the first call), or for the answer to a start with the caller's own id.
        max_pending: the maximum number of events that wait for the collector.
        max_pending_bytes: the same in bytes.
        on_full: what happens to a call when the queue is full.
            "raise": BufferFull after `max_wait`.
            "drop": a starting episode is dropped: all its calls are counted and do nothing, except
            that `get_action` still acts in local mode. A quarter of the queue is reserved for open
            episodes; one that still does not fit ends as broken, with the reason `client_dropped`.
            "block": it waits for `timeout`, then raises BufferFull.
            "spool": it waits up to `max_wait` until its event is on disk. Events that do not fit in
            memory are read back later. BufferFull if the spool has `spool_bytes` or the disk is
            full.
        spool_dir: the folder of the spool, on a volume that outlives the process. The next process
            delivers the events of a process that ended, also by SIGKILL, each once.
        spool_bytes: the maximum bytes of this process's spool.
        spool_sync: sync each event to the disk, so that it survives a power failure; without it an
            event survives the process. `max_wait` bounds the wait for either; events that are not
            written by then are counted in `stats.unwritten`.
        sample_rate: the share of the episodes that are logged, in (0, 1]. A hash of an episode's id
            decides for the whole episode; `pass_prob` is stored with its steps. For other episodes
            `start_episode` returns the id "unsampled:...": calls on it check their values and log
            nothing, and `get_action` acts with the client's own copy of the policy. Rewards for
            such an id are only counted, in any client and at the collector.
        policy_file: the policy's file under `policies/`, the same as the collector's.
        cache_dir: a folder in which the declarations are cached for the next process.
        trace: add `traceparent`, the current OpenTelemetry span, to the infos of each step that is
            logged or that the client's own policy chooses. Needs headrace[otel].
        on_error: a function that is called with each Refusal of an event in the background, in the
            thread that receives it. Errors that it raises are logged. It may log events and call
            `close`, but not `flush`.
        batch: the maximum number of events in a request.
        linger: seconds that an event waits for others before it is sent; the end of an episode is
            sent at once.
        long_poll: in local mode, keep a request open at the collector, which brings a new version
            at once; without it the client asks every `update_interval` seconds.
        policy_mapping_fn: makes episodes of several agents. The function maps an agent's id (or
            that and the episode's id) to a policy id when the agent first appears; None stands for
            `policy_id`. `start_episode(policy_id="...")` still starts an episode of one agent.

    Nothing is sent before the first call. An invalid value raises ValueError and leaves the episode
    unchanged. If the collector refuses a queued event, the next call on its episode and `flush`
    raise the refusal.
    """

    def __init__(
        self,
        address: str,
        inference_mode: str = "local",
        update_interval: float | None = 10.0,
        session: HttpSession | None = None,
        *,
        policy_id: str | None = None,
        sync: bool = False,
        token: TokenSource = None,
        ca: str | Path | None = None,
        timeout: float = 30.0,
        max_pending: int = 100_000,
        max_pending_bytes: int = 256_000_000,
        on_full: OnFull = "raise",
        batch: int = 1_000,
        linger: float = 0.005,
        long_poll: bool = True,
        policy_mapping_fn: PolicyMapping | None = None,
        max_wait: float = 0.01,
        policy_file: str | Path | None = None,
        cache_dir: str | Path | None = None,
        on_error: Callable[[Refusal], None] | None = None,
        spool_dir: str | Path | None = None,
        spool_bytes: int = 1_000_000_000,
        spool_sync: bool = False,
        sample_rate: float = 1.0,
        trace: bool = False,
    ) -> None:
        if inference_mode not in ("local", "remote"):
            raise ValueError("inference_mode must be either 'local' or 'remote'")
        _require_bounds(
            max_pending=(max_pending, 3),
            max_pending_bytes=(max_pending_bytes, 1),
            batch=(batch, 3),
            timeout=(timeout, 0),
            linger=(linger, 0),
            max_wait=(max_wait, 0),
            spool_bytes=(spool_bytes, 1),
        )
        _require_callable(on_error)
        self.inference_mode = inference_mode
        self.policy_mapping_fn = checked_mapping(policy_mapping_fn)
        self.update_interval = update_interval
        self.policy_id = policy_id
        self._sample_rate = check_sample_rate(sample_rate)
        if trace:
            require_tracing()
        self._trace = trace
        self._sync = sync
        self._timeout = timeout
        self._max_wait = timeout if sync else max_wait
        self._book = EpisodeBook()
        self._transport = Transport(address, session=session, token=token, ca=ca, timeout=timeout)
        self._declarations = Declarations(self._transport.address, policy_file, cache_dir)
        spool = _checked_spool(on_full, spool_dir, spool_bytes, spool_sync, self._declarations)
        self._outbox = Outbox(
            max_events=max_pending,
            max_bytes=max_pending_bytes,
            batch=batch,
            on_full=on_full,
            timeout=timeout,
            linger=linger,
            max_wait=max_wait,
            spool=spool,
        )
        if self._declarations.spec is not None:
            self._outbox.bound(self._declarations.spec.max_events, self._declarations.spec.max_body)
        waits = sync or spool is not None  # sent events leave the spool
        self._make_sides(on_error, long_poll=long_poll, waits=waits)
        self._put = self._outbox.put
        weakref.finalize(self, _let_go, self._actor, self._sender).atexit = False

    def _make_sides(
        self,
        on_error: Callable[[Refusal], None] | None,
        *,
        long_poll: bool,
        waits: bool,
    ) -> None:
        """Make the sender, the local and the remote actor, and the parts that calls share."""
        self._sender = Sender(
            self._transport,
            self._outbox,
            self._book,
            self._declarations,
            on_error=on_error,
        )
        self._actor = LocalActor(
            self._transport,
            self._outbox,
            self._sender,
            self.update_interval,
            long_poll=long_poll,
            trace=self._trace,
        )
        self._sender.weights_refused = self._actor.count_refused
        self._remote = RemoteActor(
            self._book, self._outbox, self._sender, self._timeout, wait_for_disk=waits
        )
        self._policies = PolicyLookup(
            self._declarations,
            self._outbox,
            self._sender,
            default=self.policy_id,
            timeout=self._timeout,
            max_wait=self._max_wait,
        )
        wait = self._timeout if self._sync else None
        self._queueing = Queueing(self._outbox, self._sender, self._book, wait)
        self._calls = EpisodeCalls(
            self._book,
            self._outbox,
            self._actor,
            self._remote,
            self._policies,
            self._queueing,
            is_local=self.inference_mode == "local",
            trace=self._trace,
        )

    # --- episodes ----------------------------------------------------------------------------
    #
    # The calls are in EpisodeCalls. Here are the starts, and short cuts for episodes of one agent:
    # `log_action`, a reward for a queued step, an end, and an action of the client's own policy.

    def start_episode(
        self,
        episode_id: str | None = None,
        training_enabled: bool = True,
        *,
        policy_id: str | Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        continues: str | None = None,
        ts: int | None = None,
        pass_prob: float = 1.0,
    ) -> str:
        """Start an episode and return its id.

        The start is queued. Without `episode_id` a random id of 24 hex digits is generated. If the
        id is taken, a ValueError ("Episode X is already started" or "Episode X has already
        completed.") is raised here if the collector answers within `max_wait`, else by the
        episode's next call. (With several agents always by the next call, unless `sync`; an import
        does not wait.)

        With a mapping agent -> policy as `policy_id`, or with the client's `policy_mapping_fn`, the
        episode has several agents: observations, actions, rewards and infos of its calls are
        mappings by agent. An agent joins with its first observation.

        Args:
            training_enabled: False: only readers that ask for such episodes read it.
            tags: a few strings (tenant, experiment) to filter by.
            continues: the id of the abandoned episode that this one continues.
            ts: when it began, in microseconds since the epoch; default: now.
            pass_prob: the probability that this episode is logged, in (0, 1].
        """
        notice_fork()
        passed = check_pass_prob(pass_prob) * self._sample_rate
        deadline = monotonic() + self._max_wait
        start = start_event(episode_id, training_enabled, tags, continues, ts)
        name = start.episode_id
        self._book.require_new(name)
        mapping = self.policy_mapping_fn if policy_id is None else policy_id
        if mapping is not None and not isinstance(mapping, str):
            return self._start_whole(start, mapping, passed, is_own=episode_id is not None)
        policy = self._policies.find(mapping)
        start.policy_id, start.schema_id = policy.policy_id, policy.schema_id
        whole = ClientWhole.of_one(start, policy, self._outbox.end, passed)
        if self._is_left_out(name):
            return self._leave_out(name, whole)
        asks = episode_id is not None and (self._sync or self._outbox.oldest() <= self._max_wait)
        index = self._queueing.put_started([start])
        self._book.begin(whole, name)
        if asks and index >= 0:
            self._sender.await_start(start, index, max(0.0, deadline - monotonic()))
        self._queueing.settle(name)
        return name

    def get_action(self, episode_id: str | Sequence[str], observation: Any) -> Any | dict[str, Any]:
        """The live version's action for an observation, recorded as the episode's next step.

        With a list of ids and a mapping id -> observation it returns a dict id -> action, in remote
        mode through one request. In local mode the client's own copy of the policy acts, and the
        decision is queued like any event.

        Raises Refusal (a ValueError) if the collector refuses, with code `no_version` while nothing
        is published. Raises CollectorUnavailable or TimeoutError without an answer in time; then
        repeat the same call or, in local mode, log an action of your own.
        """
        notice_fork()
        track = self._book.open.get(episode_id) if isinstance(episode_id, str) else None
        if track is None or not track.is_free:
            return self._calls.get_action(episode_id, observation)
        self._policies.require_declared(track.policy)
        name = track.episode_id
        if not self._calls.acts_here(name):
            return self._remote.act({name: observation}, {name: None})[name]
        event, action = self._actor.decide(track, observation)
        size = EVENT_BYTES + len(event.obs) + len(event.action)
        track.act(event, self._queueing.put(event, size))
        self._queueing.settle(name)
        return action

    def log_action(
        self,
        episode_id: str,
        observation: Any,
        action: Any,
        *,
        action_prob: float | Mapping[str, float] | None = None,
        action_logp: float | Mapping[str, float] | None = None,
        policy_version: int = -1,
        ts: int | None = None,
    ) -> None:
        """Log an action that the caller chose, and the observation it was chosen for.

        `action_prob`, in (0, 1], or its logarithm `action_logp` is the propensity; off-policy
        estimates need one of them. `policy_version` is the version that acted, if known. `ts`:
        microseconds since the epoch; default: now.

        If it raises, the step is not logged, and `log_returns` for the last action raises the same
        kind of error until a call succeeds: repeat the call, or end the episode.
        """
        notice_fork()
        try:
            self._log_action(
                episode_id, observation, action, action_prob, action_logp, policy_version, ts
            )
        except BaseException as error:
            self._book.miss(episode_id, observation, error)
            raise
        return self._queueing.settle(episode_id) if self._sync else None

    def _log_action(
        self,
        episode_id: str,
        observation: Any,
        action: Any,
        action_prob: float | Mapping[str, float] | None,
        action_logp: float | Mapping[str, float] | None,
        policy_version: int,
        ts: int | None,
    ) -> None:
        # This is the hot path of the services that log: few calls, few attributes.
        episode = self._book.open.get(episode_id)
        if episode is None or episode.error is not None or episode.unanswered is not None:
            return self._calls.log_action(
                episode_id, observation, action, action_prob, action_logp, policy_version, ts
            )
        obs, act = episode.policy.encode(episode_id, observation, action)
        seq = episode.seq
        step = LogAction(
            episode_id=episode_id,
            seq=seq,
            obs=obs,
            action=act,
            ts=time_ns() // 1000 if ts is None else now_or(ts),
        )
        if action_prob is not None or action_logp is not None:
            step.action_prob, step.action_logp = propensity(
                episode_id, action_prob, action_logp, has_densities=episode.policy.has_densities
            )
        if policy_version != -1:
            step.policy_version = version(episode_id, policy_version)
        if episode.decided is not None:
            step.decided = episode.decided
        if episode.pass_prob != 1.0:
            step.pass_prob = episode.pass_prob
        if episode.says_schema:
            step.schema_id = episode.policy.schema_id
        size = EVENT_BYTES + len(obs) + len(act)
        if self._trace:
            step.info = with_trace(episode_id)
            size += size_of(step.info)
        if size > self._outbox.request_bytes or not self._sender.running:
            self._queueing.require_room(episode_id, size)
        draft = isinstance(obs, Draft) or isinstance(act, Draft)
        episode.step_index = self._put(step, size, draft=draft)
        episode.step = step
        episode.decided = None
        episode.seq = seq + 1
        episode.acted = True
        return None

    def log_returns(
        self,
        episode_id: str,
        reward: float | Mapping[str, float],
        info: Mapping[str, Any] | None = None,
        multiagent_done_dict: Mapping[str, bool] | None = None,
        *,
        multiagent_truncated_dict: Mapping[str, bool] | None = None,
        step: int | None = None,
        reward_id: str | None = None,
        ts: int | None = None,
    ) -> None:
        """Log a reward for the episode's last action.

        Several rewards of a step are combined as the policy declares. `info` belongs to the step.
        `step` is the number of a step of any episode, also of another client's: the reward is
        accepted while the policy's `reward_window` is open after the action, and refused later
        (`window_closed`). With a `reward_id` as well, it counts once, even if it is sent again.

        In an episode of several agents rewards and infos are mappings by agent.
        `multiagent_done_dict` marks agents that have terminated, `multiagent_truncated_dict` those
        that were truncated: they do not act any more, but the next call with observations may have
        their final ones.
        """
        notice_fork()
        if ts is not None:
            ts = now_or(ts)
        over = multiagent_done_dict, multiagent_truncated_dict
        named = step is not None or reward_id is not None
        if self._book.is_left_out(episode_id) and (
            named or not self._outbox.dropped.is_unsampled(episode_id)
        ):
            for paid in reward.values() if isinstance(reward, Mapping) else (reward,):
                amount = number(episode_id, "reward", paid)
                if named:
                    late_reward(episode_id, amount, None, step, reward_id, ts)
            return self._outbox.dropped.count_unsampled_reward()
        if named:
            return self._calls.log_late(episode_id, reward, info, step, reward_id, ts)
        if not info and over == (None, None) and not isinstance(reward, Mapping):
            track = self._book.open.get(episode_id)  # of one agent
            if track is not None and track.acted and track.is_free and track.policy.sums:
                amount = number(episode_id, "reward", reward)
                if self._outbox.fold(track.step_index, track.step, amount, None):
                    return None
        return self._calls.log_returns(episode_id, reward, info, *over, ts)

    def end_episode(
        self,
        episode_id: str,
        observation: Any = None,
        *,
        truncated: bool = False,
        ts: int | None = None,
    ) -> None:
        """End an episode, with its final observation if there is one.

        `truncated`: it was cut off, not ended by the environment.
        """
        notice_fork()
        truncated = flag("truncated", truncated)
        track = self._book.open.get(episode_id)
        if track is None or not track.is_free:
            return self._calls.end_episode(episode_id, observation, truncated=truncated, ts=ts)
        name = track.episode_id
        obs = None if observation is None else track.policy.observe(name, observation)
        end = End(episode_id=name, seq=track.seq, obs=obs, truncated=truncated, ts=now_or(ts))
        if track.decided is not None:
            end.decided = track.decided
        if track.says_schema:
            end.schema_id = track.policy.schema_id
        size = EVENT_BYTES if obs is None else EVENT_BYTES + len(obs)
        self._queueing.put(end, size, draft=isinstance(obs, Draft))
        self._outbox.over(name)
        self._book.end_whole(self._book.wholes[name])
        return self._queueing.settle(name) if self._sync else None

    def log_step(
        self,
        observation: Any,
        action: Any,
        reward: float,
        *,
        action_prob: float | None = None,
        action_logp: float | None = None,
        info: Mapping[str, Any] | None = None,
        episode_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        policy_id: str | None = None,
        ts: int | None = None,
        final_obs: Any = None,
        terminated: bool = True,
        training_enabled: bool = True,
        pass_prob: float = 1.0,
    ) -> str:
        """Log a complete episode of one step, such as a bandit's decision; return its id.

        Its events are queued together. A taken `episode_id` is refused in the background.
        `terminated=False` marks a truncated episode. The other arguments are those of
        `start_episode`, `log_action` and `log_returns`.
        """
        notice_fork()
        policy = self._policies.find(policy_id)
        start = start_event(episode_id, training_enabled, tags, None, ts)
        start.policy_id, start.schema_id = policy.policy_id, policy.schema_id
        name = start.episode_id
        self._book.require_new(name)
        obs, act = policy.encode(name, observation, action)
        if action_prob is not None or action_logp is not None:
            action_prob, action_logp = propensity(
                name, action_prob, action_logp, has_densities=policy.has_densities
            )
        step = LogAction(
            episode_id=name,
            seq=1,
            obs=obs,
            action=act,
            action_prob=action_prob,
            action_logp=action_logp,
            reward=number(name, "reward", reward),
            info=encode_info(name, info) if info else None,
            ts=start.ts,
            pass_prob=check_pass_prob(pass_prob) * self._sample_rate,
        )
        if self._trace:
            step.info = with_trace(name, step.info)
        final = None if final_obs is None else policy.observe(name, final_obs)
        end = End(
            episode_id=name,
            seq=2,
            obs=final,
            truncated=not flag("terminated", terminated),
            ts=start.ts,
        )
        if start.schema_id is None:
            step.schema_id = end.schema_id = policy.schema_id
        if self._is_left_out(name):
            name = self._leave_out(name, None)
            self._outbox.over(name)
            self._book.end(name)
            return name
        self._queueing.put_started([start, step, end])
        self._book.end(name)
        self._queueing.settle(name)
        return name

    # --- candidates by id --------------------------------------------------------------------

    def rank(
        self,
        context: Mapping[str, Any],
        actions: Mapping[str, Any],
        *,
        excluded: Sequence[str] = (),
        slots: Sequence[Mapping[str, Any]] = (),
        event_id: str | None = None,
        policy_id: str | None = None,
        active: bool = True,
        apprentice: bool = False,
        action_prob: float | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> RankReply:
        """Choose one of the actions, which are candidates by their ids, and log the choice.

        The collector chooses, whatever the `inference_mode`, and the answer is on its disk. The
        event is an episode that has ended; `reward` adds rewards within the policy's
        `reward_window`. Without a published version the first action that is not excluded is the
        baseline, and others are explored.

        Args:
            context: the other leaves of the observation, by name.
            actions: the features of each candidate by id: a list of numbers, or an object if the
                policy declares `candidate_features`.
            excluded: ids that must not be chosen.
            slots: choose several, each for one of these: objects with `context` and `excluded` of
                their own. What an earlier slot has is not chosen again.
            event_id: the episode's id; the same call again gets the same answer. Default: random.
            active: False: the event counts only if `activate` is called within the reward window.
            apprentice: the caller takes the baseline in any case, which is logged as its choice,
                with its propensity `action_prob` (None: unknown).
            tags: a few strings to filter by.

        Returns an object with `event_id`, `reward_action_id` (the chosen id), `ranking` (all, with
        `id` and `probability`), `slots` (the same for each) and `policy_version` (-1: baseline).
        Raises Refusal (a ValueError) for an invalid call, and CollectorUnavailable without an
        answer in time; then repeat the call with the same `event_id`.
        """
        notice_fork()
        message = Rank(
            context=dict(context),
            actions=[RankedAction(id=name, features=given) for name, given in actions.items()],
            excluded=list(excluded),
            slots=[RankedSlot(**slot) for slot in slots],
            event_id=uuid4().hex if event_id is None else event_id,
            policy_id=self.policy_id if policy_id is None else policy_id,
            active=active,
            apprentice=apprentice,
            action_prob=action_prob,
            tags=None if tags is None else dict(tags),
        )
        return self._round_trip("/v1/rank", message, RankReply)

    def reward(
        self,
        event_id: str,
        reward: float,
        *,
        slot: int = 0,
        info: Mapping[str, Any] | None = None,
        reward_id: str | None = None,
    ) -> None:
        """Log a reward of a ranked event, also of another client's; `slot` counts from 0.

        Like `log_returns` with `step=slot`: it is queued, and counts once.
        """
        self.log_returns(event_id, reward, info, step=slot, reward_id=reward_id)

    def activate(self, event_id: str) -> None:
        """Let an event count that was ranked with `active=False`. Raises as `rank`."""
        notice_fork()
        self._round_trip(f"/v1/activate/{quote(event_id, safe='')}", Activate(), EventsReply)

    def _round_trip(self, path: str, message: Struct, kind: type[M]) -> M:
        """Send a message, again until it is answered. Raises Refusal, CollectorUnavailable."""
        body = _encode_plain(message)
        delivery = Delivery(self._transport, "POST", path, body, {"Content-Type": MSGPACK})
        return delivery.run(kind)

    # --- the policy --------------------------------------------------------------------------

    def update_policy_weights(self, policy_id: str | None = None) -> int | None:
        """The number of a policy's live version; None if nothing is published.

        `policy_id` defaults to the client's policy. In local mode the version is fetched first and
        used from now on. In remote mode the collector always acts with the live version.
        """
        notice_fork()
        if self.inference_mode == "local":
            policy = self._policies.find_declared(policy_id)
            return self._actor.policy(policy.policy_id or "").refresh()
        spec = CollectorSpec.fetch(self._transport)
        self._sender.take_up(spec)
        name = self.policy_id if policy_id is None else policy_id
        return spec.live_versions[spec.policy(name).policy_id or ""]

    def acting_version(self, policy_id: str | None = None, *, episode_id: str | None = None) -> int:
        """The live version that local mode has now; -1 without one, and in remote mode.

        With the id of an open episode of one agent: the version that acts in this episode now,
        which may be a canary. The version that chose a step is its `policy_version` in the shards.
        """
        notice_fork()
        if episode_id is None:
            name = self._policies.find_declared(policy_id).policy_id
            return self._actor.policy(name or "").version
        if policy_id is not None:
            raise ValueError(f"policy_id: expected none with an episode_id, got {policy_id!r:.80}")
        whole = self._book.find_whole(episode_id, answered=False)
        if not whole.arguments.has_one:
            raise ValueError(f"Episode {episode_id}: expected an episode of one agent, got several")
        if not self._calls.acts_here(episode_id):
            return -1
        episode = whole.tracks[None]
        self._policies.require_declared(episode.policy)
        return self._actor.policy(episode.policy.policy_id or "").version_in(episode)

    # --- delivery ----------------------------------------------------------------------------

    def connect(self, timeout: float | None = None) -> None:
        """Wait for at most `timeout` seconds (default: the client's) until the collector answers.

        From then on calls validate their values. Raises CollectorUnavailable without an answer, and
        Refusal if the collector refuses the client (as with a wrong token).
        """
        notice_fork()
        seconds = self._timeout if timeout is None else timeout
        known = self._declarations
        self._sender.connect(seconds, lambda: known.is_confirmed and not known.is_outdated)

    def flush(self, timeout: float | None = None, *, episode_id: str | None = None) -> None:
        """Wait until everything that was logged before this call is acknowledged.

        Raises TimeoutError after `timeout` seconds (None: no limit), with the number of events that
        still wait; Refusal if the collector has refused events since the last flush, or refuses the
        client (as with a wrong token). Events that wait stay queued.

        With `episode_id` it raises only refusals of that episode, which no other flush raises
        again. This is for request handlers that share a client.
        """
        notice_fork()
        self._sender.flush(timeout, episode_id)

    def close(self, timeout: float | None = None) -> None:
        """Flush for at most `timeout` seconds (default: the client's), then stop.

        Raises as `flush`. Events that are not delivered then are lost (unless they are spooled);
        the error has their number.
        """
        notice_fork()
        self._actor.close()
        if self._outbox.closed:
            return
        self._sender.close(self._timeout if timeout is None else timeout)

    def __getstate__(self) -> None:
        """Raise TypeError: a client belongs to one process."""
        raise TypeError("a PolicyClient cannot be pickled: make one in each process")

    def __enter__(self) -> PolicyClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return self.close()
        try:
            return self.close()
        except (ClientError, TimeoutError, Refusal) as other:  # the first error is raised
            log.error("while closing: %s", other)

    def __repr__(self) -> str:
        stats = self.stats
        closed = "; closed" if self._outbox.closed else ""
        return (
            f"{type(self).__name__}({self._transport.address!r}, {self.inference_mode!r}, "
            f"policy_id={self.policy_id!r}; {counted(stats.acknowledged, 'event')} acknowledged, "
            f"{stats.waiting} waiting{closed})"
        )

    @property
    def stats(self) -> ClientStats:
        """Counts of waiting, acknowledged, refused and repeated events, among others."""
        return self._sender.stats

    # --- inside ------------------------------------------------------------------------------

    def _start_whole(
        self,
        start: Start,
        mapping: PolicyMapping | Mapping[str, str],
        pass_prob: float,
        *,
        is_own: bool,
    ) -> str:
        """Open an episode of several agents; nothing is sent before its first observation."""
        name = start.episode_id
        if is_own and self._sync:
            require_free(self._transport, name)
        left_out = self._is_left_out(name)
        whole = self._calls.start(start, mapping, pass_prob)
        if left_out:
            return self._leave_out(name, whole)
        self._book.begin(whole, name)
        return name

    # --- the sample --------------------------------------------------------------------------

    def _is_left_out(self, episode_id: str) -> bool:
        """Whether a starting episode is not sampled; its id decides, in every client."""
        if episode_id.startswith(UNSAMPLED):
            return True
        rate, longest = self._sample_rate, ID_CHARACTERS - len(UNSAMPLED)
        if rate < 1.0 and len(episode_id) > longest:
            raise ValueError(
                f"episode_id: expected at most {longest} characters with a sample_rate, "
                f"got {len(episode_id)}"
            )
        return rate < 1.0 and hash_fraction(SAMPLING, episode_id) >= rate

    def _leave_out(self, episode_id: str, whole: ClientWhole | None) -> str:
        """Note that an episode is not sampled, under its own id and the one with the prefix."""
        own, name = unsampled_names(episode_id)
        check_id("episode_id", name)
        if whole is not None:
            self._book.begin(whole, own, name)
        self._outbox.dropped.leave_out((own, name))
        return name


def _let_go(actor: LocalActor, sender: Sender) -> None:
    """Have the threads of a client that was deleted without `close` end.

    Its queue is still delivered. Any thread may run this, also theirs: nothing here waits.
    """
    notice_fork()
    actor.close()
    sender.retire()


def _require_callable(on_error: object) -> None:
    if on_error is not None and not callable(on_error):
        raise ValueError(f"on_error: expected a function of one Refusal, got {on_error!r:.100}")


def _require_bounds(**values: tuple[Any, float]) -> None:
    """Check numbers by name: (value, least value). Raises ValueError."""
    for name, (value, least) in values.items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or not value >= least or (name == "timeout" and value == 0):
            bound = "> 0" if name == "timeout" else f">= {least}"
            raise ValueError(f"{name}: expected a number {bound}, got {value!r:.100}")


def _checked_spool(
    on_full: OnFull,
    directory: str | Path | None,
    max_bytes: int,
    sync: bool,
    declarations: Declarations,
) -> Spool | None:
    """The spool of these arguments, if any. Raises ValueError, and OSError for its folder."""
    if on_full not in get_args(OnFull):
        raise ValueError(f"on_full: expected one of {get_args(OnFull)}, got {on_full!r}")
    if (on_full == "spool") != (directory is not None):
        raise ValueError("spool_dir: expected with on_full='spool', and only with it")
    if directory is None:
        return None
    address, policy = declarations.address, declarations.policy
    return Spool(Path(directory), max_bytes, sync=sync, address=address, policy=policy)
