"""The episodes that a client has open, and those that it remembers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from ingest.client.declarations import ClientPolicy
from ingest.client.events import check_id, unsampled_names
from ingest.client.transport import Delivery, Transport
from ingest.protocol.agent_names import Name, label, name_of
from ingest.protocol.errors import (
    BufferFull,
    ClientError,
    Refusal,
    already_started,
    completed,
    not_found,
)
from ingest.protocol.messages import Decision, EpisodeState, Event, GetAction, LogAction, Start

REMEMBERED = 10_000
"""Ended episodes that a client remembers, to name the right error; older ones are "not found"."""

_PASSING = frozenset({"window_closed"})  # refuses one event and leaves the episode as it was


def fetch_state(transport: Transport, episode_id: str) -> EpisodeState:
    """What the collector says of an episode. Raises Refusal (`not_found`), CollectorUnavailable."""
    path = f"/v1/episodes/{quote(episode_id, safe='')}"
    return Delivery(transport, "GET", path).run(EpisodeState)


def require_free(transport: Transport, episode_id: str) -> None:
    """Raise Refusal for an id that the collector knows, with the answer that a start would get."""
    try:
        state = fetch_state(transport, episode_id).state
    except Refusal as refusal:
        if refusal.code != "not_found":
            raise
    else:
        raise already_started(episode_id) if state == "open" else completed(episode_id)


@dataclass(frozen=True)
class Missed:
    """The error that the log_action of a step met."""

    kind: type[ClientError | TimeoutError] | None  # None: a ValueError, or another
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Missed:
        kinds = (BufferFull, ClientError, TimeoutError)
        kind = next((one for one in kinds if isinstance(error, one)), None)
        return cls(kind, f"{error}" or type(error).__name__)


def no_action(name: str, missed: Missed | None) -> Exception:
    """The error of a reward for the last action of an episode or track, where there is none."""
    if missed is None:
        text = f"Episode {name}: a reward came before any action"
        return Refusal("no_action", text, "reward", name)
    text = (
        f"Episode {name}: the action of this step is not logged ({missed.text}); repeat that call, "
        "or end the episode"
    )
    return Refusal("no_action", text, "reward", name) if missed.kind is None else missed.kind(text)


class ClientEpisode:
    """An open episode, or track: where it stands, and what happened to it."""

    __slots__ = (
        "acted",
        "agent_id",
        "arm",
        "decided",
        "episode_id",
        "error",
        "is_unsampled",
        "missed",
        "pass_prob",
        "policy",
        "says_schema",
        "seq",
        "since",
        "step",
        "step_index",
        "unanswered",
    )

    def __init__(
        self,
        episode_id: str,
        policy: ClientPolicy,
        since: int,
        agent_id: str | None = None,
        *,
        pass_prob: float = 1.0,
    ) -> None:
        self.episode_id = episode_id
        self.agent_id = agent_id  # of a track
        self.pass_prob = pass_prob  # of every step
        self.is_unsampled = False  # nothing of it is sent
        self.policy = policy
        self.says_schema = policy.schema_id is None  # in each event: the start may not know it
        self.seq = 1  # of the next event; the start is 0
        self.acted = False  # and its last action is logged
        self.missed: Missed | None = None  # why that is not
        self.arm: int | None = None  # the version that local inference assigned it to, as it began
        self.decided: bytes | None = None  # the name of a remote decision of the open step
        self.step: LogAction | Decision | None = None  # takes rewards while it is queued
        self.step_index = -1
        self.since = since  # no event of it that waits in the outbox has a lower index
        self.error: Refusal | None = None
        self.unanswered: GetAction | None = None  # sent, and its answer was lost

    @property
    def schema_id(self) -> str | None:
        """What its events say of how they are encoded; None where its start says it."""
        return self.policy.schema_id if self.says_schema else None


class ClientWhole:
    """An open episode of several agents, whose tracks are ClientEpisodes.

    Agents join with their first observation. Those that were said to have ended are `gone`, with
    whether a limit ended them, until the next observations may have brought their last; then their
    tracks are told to be over. `parting` are the last observations that went out with a get_action
    which had no answer: the call may be repeated as it was.
    """

    __slots__ = (
        "acted",
        "ended",
        "env_t",
        "episode_id",
        "gone",
        "missed",
        "parting",
        "pass_prob",
        "policies",
        "policy_of",
        "start",
        "tracks",
    )

    def __init__(
        self, start: Start, policy_of: Callable[[str], ClientPolicy], pass_prob: float
    ) -> None:
        self.episode_id = start.episode_id
        self.pass_prob = pass_prob
        self.start = start  # what the starts of its tracks are made of
        self.policy_of = policy_of
        self.policies: dict[str, ClientPolicy] = {}  # by agent, for the whole episode
        self.tracks: dict[str, ClientEpisode] = {}
        self.gone: dict[str, bool] = {}
        self.ended: set[str] = set()
        self.parting: dict[str, bytes | None] = {}
        self.acted: set[str] = set()
        self.missed: dict[str, Missed] = {}  # whose last action is not logged
        self.env_t = 0  # calls in which agents acted

    def policy(self, agent: str) -> ClientPolicy:
        """The policy of an agent, chosen when it first appears. Raises ValueError."""
        found = self.policies.get(agent)
        if found is None:
            check_id("agent_id", agent)
            found = self.policies[agent] = self.policy_of(agent)
        return found


class EpisodeBook:
    """The episodes of one client. Different episodes may be used by different threads."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything: how a forked child begins."""
        self.open: dict[Name, ClientEpisode] = {}
        self.wholes: dict[str, ClientWhole] = {}
        self._ended: OrderedDict[Name, Refusal | None] = OrderedDict()

    def open_ids(self) -> Iterable[Name]:
        """The ids of the open episodes at this moment."""
        return list(self.open)

    def find(self, name: Name, *, answered: bool = True) -> ClientEpisode:
        """The open episode of that id.

        Raises ValueError for one that is unknown or ended, the Refusal that an earlier event of it
        met, and (if `answered`) ClientError while the answer to a get_action is outstanding.
        """
        episode = self.open.get(name)
        if episode is None:
            raise self._missing(name)
        if episode.error is not None:
            raise self._met(episode)
        if answered and episode.unanswered is not None:
            raise ClientError(
                f"Episode {label(name)}: the answer to its last get_action was lost; call "
                f"get_action again with the same observation"
            )
        return episode

    def _missing(self, name: Name) -> Refusal:
        ids = (name, None) if isinstance(name, str) else name
        if name not in self._ended:
            return not_found(*ids)
        cause = self._ended[name]
        return completed(*ids) if cause is None else replace(cause)

    def _met(self, episode: ClientEpisode) -> Refusal:
        """The refusal that an earlier event met, once for one that passes, else for ever."""
        refusal, episode.error = episode.error, None
        if refusal is None:  # another thread was told
            return not_found(episode.episode_id, episode.agent_id)
        if refusal.code not in _PASSING:
            self.end(name_of(episode), refusal)
        return replace(refusal)

    def miss(self, episode_id: str, observation: Any, error: BaseException) -> None:
        """An action was taken and not logged: a reward that follows is not the earlier step's."""
        missed = Missed.of(error)
        whole, episode = self.wholes.get(episode_id), self.open.get(episode_id)
        if whole is not None:
            agents = observation if isinstance(observation, Mapping) else whole.tracks
            whole.missed |= dict.fromkeys(agents, missed)
        elif episode is not None:
            episode.acted, episode.missed = False, missed

    def require_new(self, episode_id: str) -> None:
        """Raise ValueError if the id is of an open or a recently ended episode."""
        if episode_id in self.open or episode_id in self.wholes:
            raise already_started(episode_id)
        if episode_id in self._ended:
            raise completed(episode_id)

    def find_whole(self, episode_id: str, *, answered: bool = True) -> ClientWhole:
        """The open episode of several agents of that id. Raises as `find`, for any agent."""
        whole = self.wholes.get(episode_id)
        if whole is None:
            raise self._missing(episode_id)
        try:
            for agent in whole.tracks:
                self.find((whole.episode_id, agent), answered=answered)
        except Refusal as refusal:
            self.end_refused(whole, refusal)
            raise
        return whole

    def end_refused(self, whole: ClientWhole, refusal: Refusal) -> None:
        """With a track that was refused for good the whole episode is over."""
        if any((whole.episode_id, agent) not in self.open for agent in whole.tracks):
            self.end_whole(whole, refusal)

    def end_whole(self, whole: ClientWhole, cause: Refusal | None = None) -> None:
        """Note that an episode of several agents is over."""
        for agent in whole.tracks:
            self.open.pop((whole.episode_id, agent), None)
        for name in (whole.episode_id, *unsampled_names(whole.episode_id)):
            if self.wholes.get(name) is whole:
                del self.wholes[name]
                self.end(name, cause)

    def is_left_out(self, episode_id: str) -> bool:
        """Whether an episode, open or of the REMEMBERED ended, is not in the sample."""
        _, name = unsampled_names(episode_id)
        known = name in self.open or name in self.wholes or name in self._ended
        return name == episode_id or known

    def end(self, name: Name, cause: Refusal | None = None) -> None:
        """Note that an episode is over."""
        ended = self.open.pop(name, None)
        if ended is not None and ended.is_unsampled:
            for one in unsampled_names(ended.episode_id):
                self.open.pop(one, None)
                self._ended[one] = cause
        self._ended[name] = cause
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def refuse(self, event: Event, refusal: Refusal) -> None:
        """An event of an episode was refused: its next call raises the first such refusal."""
        name = name_of(event)
        episode = self.open.get(name)
        if episode is not None:
            if episode.error is None or episode.error.code in _PASSING:
                episode.error = refusal
        elif refusal.code not in _PASSING and self._ended.get(name) is None:
            self.end(name, refusal)
            if event.episode_id in self._ended and self._ended[event.episode_id] is None:
                self._ended[event.episode_id] = refusal  # of all agents

    def take_refusal(self, name: Name) -> Refusal | None:
        """What the start of an episode met, if it was refused: then there is no such episode."""
        episode = self.open.get(name)
        refusal = None if episode is None else episode.error
        if refusal is not None:
            self.open.pop(name)
        return refusal

    def cause(self, episode_id: str) -> Refusal | None:
        """The refusal that ended one of the REMEMBERED ended episodes, if one did."""
        return self._ended.get(episode_id)

    def told(self, name: Name) -> None:
        """The caller has been told what an event met: what passes need not be raised again."""
        episode = self.open.get(name)
        if episode is not None and episode.error is not None and episode.error.code in _PASSING:
            episode.error = None
