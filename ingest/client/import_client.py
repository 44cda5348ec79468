"""The client of an import: whole episodes of a log, which may be delivered again after a crash.

Every event of an imported episode is known before the first is sent, and is the same in every run:
its episode's id and start number, its seq, its content. So the collector tells what it has from
what it lacks, and an import that was killed anywhere is repeated without doubling anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ingest.client.declarations import ClientPolicy
from ingest.client.event_queue import EVENT_BYTES
from ingest.client.events import check_id, check_tags, number, propensity, too_large
from ingest.client.open_episodes import fetch_state
from ingest.client.policy_client import PolicyClient
from ingest.client.transport import Token
from ingest.protocol.errors import Refusal
from ingest.protocol.messages import End, Event, LogAction, Start


class ImportedStep(NamedTuple):
    """One step of a log. `ts`: microseconds since the epoch, None: when the collector took it."""

    observation: Any
    action: Any
    reward: float
    action_prob: float | None = None
    action_logp: float | None = None
    ts: int | None = None


class EpisodeState(NamedTuple):
    """Where an episode stands in the collector: open, an ending, or unknown (also: forgotten)."""

    state: str
    steps: int = 0
    cause: str = ""


class ImportClient(PolicyClient):
    """A PolicyClient that delivers whole episodes of a log.

    Args:
        name: of the import: the same for the same content, however often it is run.
        policy_id: of all its episodes; default: the collector's only one.
        timeout: seconds to wait for the collector.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        policy_id: str | None = None,
        token: Token = None,
        ca: Path | None = None,
        timeout: float = 60.0,
    ) -> None:
        super().__init__(
            address,
            "remote",
            policy_id=policy_id,
            token=token,
            ca=ca,
            timeout=timeout,
            max_pending=20_000,
            on_full="block",
            instance_name=name,
        )

    @property
    def policy(self) -> ClientPolicy:
        """The declared policy of the import's episodes. Raises ValueError, ClientError."""
        return self._declared(None)

    def log_episode(
        self,
        episode_id: str,
        steps: Sequence[ImportedStep],
        *,
        start_number: int,
        truncated: bool = False,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Queue an episode, all of it or nothing: ValueError names the step that does not fit."""
        check_id("episode_id", episode_id)
        policy = self.policy
        events: list[Event] = [
            Start(
                episode_id=episode_id,
                start=start_number,
                policy_id=policy.policy_id,
                tags=check_tags(tags) if tags else None,
                ts=steps[0].ts if steps else None,
            )
        ]
        for seq, step in enumerate(steps, 1):
            try:
                events.append(self._event(policy, episode_id, seq, step))
            except ValueError as error:
                raise StepError(seq - 1, str(error)) from error
        events.append(End(episode_id=episode_id, seq=len(events), truncated=truncated))
        self._put_started(events)

    def _event(
        self, policy: ClientPolicy, episode_id: str, seq: int, step: ImportedStep
    ) -> LogAction:
        obs, act = policy.encode(episode_id, step.observation, step.action)
        prob, logp = step.action_prob, step.action_logp
        if prob is not None or logp is not None:
            prob, logp = propensity(episode_id, prob, logp)
        size, largest = EVENT_BYTES + len(obs) + len(act), self._outbox.request_bytes
        if size > largest:
            raise too_large(episode_id, size, largest)
        return LogAction(
            episode_id=episode_id,
            seq=seq,
            obs=obs,
            action=act,
            action_prob=prob,
            action_logp=logp,
            reward=number(episode_id, "reward", step.reward),
            ts=step.ts,
            replayed=True,
        )

    def state_of(self, episode_id: str) -> EpisodeState:
        """Ask the collector about an episode. Raises CollectorUnavailable, Refusal."""
        try:
            found = fetch_state(self._transport, episode_id)
        except Refusal as refusal:
            if refusal.code != "not_found":
                raise
            return EpisodeState("unknown")
        return EpisodeState(found.state, found.steps or 0, found.cause or "")

    def deliver(self) -> bool:
        """Wait for the acknowledgement of all that is queued; False if some of it was refused.

        What the refused episodes met is then in `refusal`. Raises Refusal when the collector
        refuses the client itself, TimeoutError when nothing was acknowledged for `timeout` seconds.
        """
        while True:
            waiting = self.stats.pending
            try:
                self.flush(self._timeout)
                return True
            except Refusal:
                if self.stats.pending:
                    raise
                return False
            except TimeoutError:
                if self.stats.pending >= waiting:
                    raise

    def refusal(self, episode_id: str) -> Refusal | None:
        """Why the collector refused an episode, if it did, of the latest 10,000 that it refused."""
        return self._book.cause(episode_id)


def declared_policy(
    address: str,
    policy_id: str | None = None,
    *,
    token: Token = None,
    ca: Path | None = None,
    timeout: float = 60.0,
) -> ClientPolicy:
    """What a collector declares, before an import has its name. Raises as `ImportClient`."""
    with PolicyClient(
        address, "remote", policy_id=policy_id, token=token, ca=ca, timeout=timeout
    ) as client:
        return client._declared(None)


class StepError(ValueError):
    """A step of an episode does not fit its policy; `index` counts from 0."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index
