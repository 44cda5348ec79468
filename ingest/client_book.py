"""What a client knows: the policies of its collector, and its own episodes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ingest import wire
from ingest.errors import (
    ClientError,
    CollectorUnavailable,
    Refusal,
    already_started,
    completed,
    not_found,
)
from ingest.transport import Delivery, Transport
from ingest.wire import Decision, Event, GetAction, LogAction
from storage.codec import Codec
from storage.spaces import Space, SpaceError, space_from_json

REMEMBERED = 10_000
"""Ended episodes that a client remembers, to name the right error; older ones are "not found"."""

_PASSING = frozenset({"window_closed"})  # refuses one event and leaves the episode as it was


class ClientPolicy:
    """The spaces of one policy, as codecs whose errors name the episode."""

    def __init__(
        self,
        policy_id: str,
        observation: Space,
        action: Space,
        steps_per_version: int | None = None,
        reward_combination: str = "sum",
        max_policy_lag: int | None = None,
    ) -> None:
        self.policy_id = policy_id
        self.sums = reward_combination == "sum"  # rewards may be added up before they are sent
        self.steps_per_version = steps_per_version
        self.paced = steps_per_version is not None or max_policy_lag is not None
        self.observation = Codec(observation)
        self.action = Codec(action)
        self._encode_observation = self.observation.encode
        self._encode_action = self.action.encode

    def encode(self, episode_id: str, observation: Any, action: Any) -> tuple[bytes, bytes]:
        """Canonical bytes of both; raises SpaceError (a ValueError) for what does not fit."""
        try:
            obs = self._encode_observation(observation, "obs")
            return obs, self._encode_action(action, "action")
        except SpaceError as error:
            raise SpaceError(f"Episode {episode_id}: {error}") from error

    def observe(self, episode_id: str, observation: Any) -> bytes:
        """Canonical bytes of an observation; raises SpaceError."""
        try:
            return self.observation.encode(observation, "obs")
        except SpaceError as error:
            raise SpaceError(f"Episode {episode_id}: {error}") from error

    def encode_action(self, episode_id: str, action: Any) -> bytes:
        """Canonical bytes of an action; raises SpaceError."""
        try:
            return self._encode_action(action, "action")
        except SpaceError as error:
            raise SpaceError(f"Episode {episode_id}: {error}") from error

    def encode_decision(self, action: Any) -> bytes:
        """Canonical bytes of an action that the policy chose: Box parts may leave their bounds."""
        return self._encode_action(action, "action", check_range=False)

    def action_value(self, sent: Any) -> Any:
        """An action as the space's value; its Box parts may lie outside their bounds."""
        return self.action.decode(self.action.from_wire(sent, "action", check_range=False))


class CollectorSpec:
    """What `GET /v1/spec` says."""

    def __init__(self, document: dict[str, Any]) -> None:
        if document["protocol"] != wire.PROTOCOL_VERSION:
            raise ClientError(
                f"expected a collector of protocol {wire.PROTOCOL_VERSION}, got "
                f"{document['protocol']!r}: use the client of the collector's version"
            )
        self.durable: bool = document.get("durable", True)
        limits = document.get("limits", {})
        self.max_body: int | None = limits.get("max_body")
        self.max_events: int = limits.get("max_events", wire.MAX_EVENTS)
        self.live_versions: dict[str, int | None] = {}
        self.policies: dict[str, ClientPolicy] = {}
        for name, policy in document["policies"].items():
            observation, action = (space_from_json(policy[k]) for k in ("observation", "action"))
            flow = policy.get("flow", {})
            quota, lag = flow.get("steps_per_version"), flow.get("max_policy_lag")
            combination = policy.get("reward_combination", "sum")
            self.policies[name] = ClientPolicy(name, observation, action, quota, combination, lag)
            self.live_versions[name] = policy.get("live_version")

    @classmethod
    def fetch(cls, transport: Transport) -> CollectorSpec:
        """Ask the collector. Raises CollectorUnavailable, Refusal, ClientError."""
        document = Delivery(transport, "GET", "/v1/spec").run(dict[str, Any])
        try:
            return cls(document)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CollectorUnavailable(
                f"{transport.address}: expected a collector's /v1/spec, got {error!r}"
            ) from error

    def policy(self, policy_id: str | None) -> ClientPolicy:
        """The policy of that id; without an id, the only one. Raises ValueError."""
        if policy_id is None and len(self.policies) == 1:
            return next(iter(self.policies.values()))
        found = self.policies.get(policy_id or "")
        if found is None:
            raise ValueError(
                f"policy_id: expected one of {sorted(self.policies)}, got {policy_id!r}"
            )
        return found


class ClientEpisode:
    """An open episode: where it stands, and what happened to it."""

    __slots__ = (
        "acted",
        "decided",
        "episode_id",
        "error",
        "policy",
        "seq",
        "since",
        "step",
        "step_index",
        "unanswered",
    )

    def __init__(self, episode_id: str, policy: ClientPolicy, since: int) -> None:
        self.episode_id = episode_id
        self.policy = policy
        self.seq = 1  # of the next event; the start is 0
        self.acted = False
        self.decided: bytes | None = None  # the name of a remote decision of the open step
        self.step: LogAction | Decision | None = None  # takes rewards while it is queued
        self.step_index = -1
        self.since = since  # no event of it that waits in the outbox has a lower index
        self.error: Refusal | None = None
        self.unanswered: GetAction | None = None  # sent, and its answer was lost


class EpisodeBook:
    """The episodes of one client. Different episodes may be used by different threads."""

    def __init__(self) -> None:
        self.open: dict[str, ClientEpisode] = {}
        self._ended: OrderedDict[str, Refusal | None] = OrderedDict()

    def clear(self) -> None:
        """Forget everything: how a forked child begins."""
        self.open = {}
        self._ended = OrderedDict()

    def open_ids(self) -> Iterable[str]:
        """The ids of the open episodes at this moment."""
        return list(self.open)

    def find(self, episode_id: str, *, answered: bool = True) -> ClientEpisode:
        """The open episode of that id.

        Raises ValueError for one that is unknown or ended, the Refusal that an earlier event of it
        met, and (if `answered`) ClientError while the answer to a get_action is outstanding.
        """
        episode = self.open.get(episode_id)
        if episode is None:
            raise self._missing(episode_id)
        if episode.error is not None:
            raise self._met(episode)
        if answered and episode.unanswered is not None:
            raise ClientError(
                f"Episode {episode_id}: the answer to its last get_action was lost; call "
                f"get_action again with the same observation"
            )
        return episode

    def _missing(self, episode_id: str) -> Refusal:
        if episode_id not in self._ended:
            return not_found(episode_id)
        cause = self._ended[episode_id]
        return completed(episode_id) if cause is None else replace(cause)

    def _met(self, episode: ClientEpisode) -> Refusal:
        """The refusal that an earlier event met, once for one that passes, else for ever."""
        refusal, episode.error = episode.error, None
        if refusal is None:  # another thread was told
            return not_found(episode.episode_id)
        if refusal.code not in _PASSING:
            self.end(episode.episode_id, refusal)
        return replace(refusal)

    def require_new(self, episode_id: str) -> None:
        """Raise ValueError if the id is of an open or a recently ended episode."""
        if episode_id in self.open:
            raise already_started(episode_id)
        if episode_id in self._ended:
            raise completed(episode_id)

    def end(self, episode_id: str, cause: Refusal | None = None) -> None:
        """Note that an episode is over."""
        self.open.pop(episode_id, None)
        self._ended[episode_id] = cause
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def refuse(self, event: Event, refusal: Refusal) -> None:
        """An event of an episode was refused: its next call raises the first such refusal."""
        episode = self.open.get(event.episode_id)
        if episode is not None:
            if episode.error is None or episode.error.code in _PASSING:
                episode.error = refusal
        elif refusal.code not in _PASSING and self._ended.get(event.episode_id) is None:
            self.end(event.episode_id, refusal)

    def cause(self, episode_id: str) -> Refusal | None:
        """The refusal that ended one of the REMEMBERED ended episodes, if one did."""
        return self._ended.get(episode_id)

    def told(self, episode_id: str) -> None:
        """The caller has been told what an event met: what passes need not be raised again."""
        episode = self.open.get(episode_id)
        if episode is not None and episode.error is not None and episode.error.code in _PASSING:
            episode.error = None
