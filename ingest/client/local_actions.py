"""`get_action` in local mode: the client's own policies act, and the decisions are queued.

With flow control a client stays close to the collector: it delivers its decisions in windows, and
waits while the version that it acts with is held. The wait is bounded and counted, so that a
trainer that has ended does not block clients for ever.
"""

from __future__ import annotations

from math import isnan
from time import time_ns
from typing import Any

from ingest.client.local_inference import LocalPolicy
from ingest.client.open_episodes import ClientEpisode
from ingest.delivery.declarations import ClientPolicy
from ingest.delivery.outbox import Outbox
from ingest.delivery.sender import Sender
from ingest.delivery.traces import with_trace
from ingest.delivery.transport import Transport
from ingest.protocol.agent_names import label_of
from ingest.protocol.errors import Refusal
from ingest.protocol.messages import Decision

HOLD_SECONDS = 30.0
WINDOWS_PER_VERSION = 8
"""The number of deliveries of decisions per version."""


class LocalActor:
    """The local policies of one client. `holds` counts waits."""

    def __init__(
        self,
        transport: Transport,
        outbox: Outbox,
        sender: Sender,
        update_interval: float | None,
        *,
        long_poll: bool,
        trace: bool = False,
    ) -> None:
        self._trace = trace
        self._transport = transport
        self._outbox = outbox
        self._sender = sender
        self._interval = update_interval
        self._long_poll = long_poll
        self._policies: dict[str, LocalPolicy] = {}
        self._undelivered: dict[str, int] = {}
        self._closed = False
        self.holds = 0
        self.holds_given_up = 0

    def count_refused(self) -> int:
        """The number of refused publications: damaged, or older than the weights in use."""
        return sum(one.refused + one.refused_older for one in self._policies.values())

    def policy(self, policy_id: str) -> LocalPolicy:
        """The client's copy of a policy; nothing is fetched yet."""
        found = self._policies.get(policy_id)
        if found is None:
            fresh = LocalPolicy(
                self._transport, policy_id, self._interval, long_poll=self._long_poll
            )
            found = self._policies.setdefault(policy_id, fresh)
            if self._closed:
                found.close()
        return found

    def decide(
        self,
        episode: ClientEpisode,
        observation: Any,
        obs: bytes | None = None,
        *,
        waits: bool = True,
    ) -> tuple[Decision, Any]:
        """The decision event of an episode's next step, and the action for the environment.

        `obs`: the observation's canonical bytes, if known. `waits`: whether to wait for newer
        weights, if these are due or flow control requires it.
        """
        policy = episode.policy
        if obs is None:
            obs = policy.observe(label_of(episode), observation)
        if policy.is_rewritten:
            observation = policy.observation.decode(obs)
        name = policy.policy_id or ""
        local = self._policies.get(name) or self.policy(name)
        if policy.paced and waits:
            self._pace(policy, local)
        try:
            chosen, version = local.act(observation, episode, asks=waits)
        except Refusal as refusal:
            refusal.episode_id, refusal.agent_id = episode.episode_id, episode.agent_id
            raise
        event = Decision(
            episode_id=episode.episode_id,
            agent_id=episode.agent_id,
            seq=episode.seq,
            obs=obs,
            action=policy.encode_decision(chosen.action),
            action_logp=None if isnan(chosen.logp) else float(chosen.logp),
            policy_version=version,
            action_dist_inputs=chosen.dist_inputs.tobytes(),
            info=with_trace(label_of(episode)) if self._trace else None,
            ts=time_ns() // 1000,
            pass_prob=episode.pass_prob,
            schema_id=episode.schema_id,
        )
        return event, policy.action.named(chosen.action_env)

    def must_wait(self, policy: ClientPolicy) -> bool:
        """Whether the next action of a policy would wait for the collector."""
        return policy.paced or self.policy(policy.policy_id or "").asks

    def wait(self, policy: ClientPolicy) -> None:
        """Wait as an action of this policy would; raises the same errors."""
        local = self.policy(policy.policy_id or "")
        if policy.paced:
            self._pace(policy, local)
        local.ensure()

    def _pace(self, policy: ClientPolicy, local: LocalPolicy) -> None:
        """Deliver a full window, then wait while the version that acts is held."""
        name = policy.policy_id or ""
        waiting = self._undelivered.get(name, 0) + 1
        quota = policy.steps_per_version
        if quota is not None and waiting > max(1, quota // WINDOWS_PER_VERSION):
            self._outbox.drained(HOLD_SECONDS, lambda: False, own=True)
            waiting = 1
        self._undelivered[name] = waiting
        held = self._sender.held.get(name)
        if held is None or local.version > held:
            return
        self.holds += 1
        self._outbox.drained(HOLD_SECONDS, lambda: False, own=True)
        if not local.wait_newer(held, HOLD_SECONDS):
            self.holds_given_up += 1
            self._sender.held.pop(name, None)

    def close(self) -> None:
        """Stop polling; the threads end after their current requests."""
        self._closed = True
        for policy in list(self._policies.values()):  # another thread may add one
            policy.close()
