"""The episodes that a client has open, and those that it remembers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias
from urllib.parse import quote

from ingest.client.arguments import ONE, SEVERAL, Arguments
from ingest.delivery.declarations import ClientPolicy
from ingest.delivery.events import check_id, unsampled_names
from ingest.delivery.transport import Delivery, Transport
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

Agent: TypeAlias = str | None

REMEMBERED = 10_000
"""Ended episodes that a client remembers for its errors; older ones are "not found"."""

_PASSING = frozenset({"window_closed"})  # refuses one event, not the episode


def fetch_state(transport: Transport, episode_id: str) -> EpisodeState:
    """An episode's state at the collector. Raises Refusal (`not_found`), CollectorUnavailable."""
    path = f"/v1/episodes/{quote(episode_id, safe='')}"
    return Delivery(transport, "GET", path).run(EpisodeState)


def require_free(transport: Transport, episode_id: str) -> None:
    """Raise the Refusal that a start would get, if the collector knows the id."""
    try:
        state = fetch_state(transport, episode_id).state
    except Refusal as refusal:
        if refusal.code != "not_found":
            raise
    else:
        raise already_started(episode_id) if state == "open" else completed(episode_id)


@dataclass(frozen=True)
class Missed:
    """The error that the log_action of a step raised."""

    kind: type[ClientError | TimeoutError] | None  # None: a ValueError, or another
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Missed:
        kinds = (BufferFull, ClientError, TimeoutError)
        kind = next((one for one in kinds if isinstance(error, one)), None)
        return cls(kind, f"{error}" or type(error).__name__)


def no_action(name: str, missed: Missed | None) -> Exception:
    """The error of a reward for the last action of an episode or track that has none."""
    if missed is None:
        text = f"Episode {name}: a reward came before any action"
        return Refusal("no_action", text, "reward", name)
    text = (
        f"Episode {name}: the action of this step is not logged ({missed.text}); repeat that call, "
        "or end the episode"
    )
    return Refusal("no_action", text, "reward", name) if missed.kind is None else missed.kind(text)


class ClientEpisode:
    """The state of an open episode or track."""

    __slots__ = (
        "acted",
        "agent_id",
        "arm",
        "decided",
        "episode_id",
        "error",
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
        self.policy = policy
        self.says_schema = policy.schema_id is None  # the start may not have it
        self.seq = 1  # of the next event; the start has 0
        self.acted = False  # whether its last action is logged
        self.arm: int | None = None  # the version that local inference assigned at its start
        self.decided: bytes | None = None  # the name of a remote decision of the open step
        self.step: LogAction | Decision | None = None  # gets rewards while it is queued
        self.step_index = -1
        self.since = since  # a lower bound of the indices of its queued events
        self.error: Refusal | None = None
        self.unanswered: GetAction | None = None  # sent, and the reply was lost

    @property
    def is_free(self) -> bool:
        """Whether no earlier call prevents the next one."""
        return self.error is None and self.unanswered is None

    def act(self, step: LogAction | Decision, index: int) -> None:
        """Note that a step is queued at an index."""
        self.step, self.step_index = step, index
        self.seq += 1
        self.decided = None
        self.acted = True

    @property
    def schema_id(self) -> str | None:
        """The `schema_id` of its events; None if its start has it."""
        return self.policy.schema_id if self.says_schema else None


class ClientWhole:
    """An open episode, whose agents' tracks are ClientEpisodes.

    The only agent of an episode of one is None, from the start on. Others join with their first
    observation. Agents that have ended are in `gone` (-> whether they were truncated) until the
    next observations, which may include their final ones; then their tracks are ended. `parting`
    are final observations that were sent with a get_action without a reply, so that the call can be
    repeated.
    """

    __slots__ = (
        "acted",
        "arguments",
        "ended",
        "env_t",
        "episode_id",
        "gone",
        "missed",
        "names",
        "parting",
        "pass_prob",
        "policies",
        "policy_of",
        "start",
        "tracks",
    )

    def __init__(
        self,
        start: Start,
        policy_of: Callable[[Any], ClientPolicy],
        pass_prob: float,
        arguments: Arguments = SEVERAL,
    ) -> None:
        self.episode_id = start.episode_id
        self.arguments = arguments
        self.pass_prob = pass_prob
        self.start = start  # the template of its tracks' starts
        self.policy_of = policy_of
        self.policies: dict[Agent, ClientPolicy] = {}  # by agent, for the whole episode
        self.tracks: dict[Agent, ClientEpisode] = {}
        self.gone: dict[Agent, bool] = {}
        self.ended: set[Agent] = set()
        self.parting: dict[Agent, bytes | None] = {}
        self.acted: set[Agent] = set()  # at any time
        self.missed: dict[Agent, Missed] = {}  # why an agent's last action is not logged
        self.env_t = 0  # calls in which agents acted
        self.names: tuple[str, ...] = ()  # under which the book has it

    @classmethod
    def of_one(
        cls, start: Start, policy: ClientPolicy, since: int, pass_prob: float
    ) -> ClientWhole:
        """An episode of one agent."""
        whole = cls(start, lambda _: policy, pass_prob, ONE)
        whole.policies[None] = policy
        whole.tracks[None] = ClientEpisode(start.episode_id, policy, since, pass_prob=pass_prob)
        return whole

    @property
    def clock(self) -> int | None:
        """The `env_t` of the next step; None for one agent, whose steps are its track's."""
        return None if self.arguments.has_one else self.env_t

    def policy(self, agent: Agent) -> ClientPolicy:
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
        """Forget everything, as in a forked child."""
        self.open: dict[Name, ClientEpisode] = {}
        self.wholes: dict[str, ClientWhole] = {}
        self._ended: OrderedDict[Name, Refusal | None] = OrderedDict()

    def open_ids(self) -> Iterable[Name]:
        """The ids of the open episodes at this moment."""
        return list(self.open)

    def find(self, name: Name, *, answered: bool = True) -> ClientEpisode:
        """The open episode with this name.

        Raises ValueError if it is unknown or ended, the Refusal of an earlier event of it, and (if
        `answered`) ClientError if the reply to its last get_action was lost.
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

    def foreign(self, name: Name) -> Refusal | None:
        """The refusal of a reward without a step for an episode that this client does not know."""
        if name in self.wholes or name in self._ended:
            return None
        unknown = self._missing(name)
        hint = "It is not open in this client: name a step (step=0 for the first)."
        return replace(unknown, message=f"{unknown.message} {hint}")

    def _met(self, episode: ClientEpisode) -> Refusal:
        """The refusal of an earlier event: raised once if it is in `_PASSING`, else always."""
        refusal, episode.error = episode.error, None
        if refusal is None:  # another thread has raised it
            return not_found(episode.episode_id, episode.agent_id)
        if refusal.code not in _PASSING:
            self.end(name_of(episode), refusal)
        return replace(refusal)

    def miss(self, episode_id: str, observation: Any, error: BaseException) -> None:
        """Note that an action could not be logged: later rewards are not the earlier step's."""
        whole = self.wholes.get(episode_id)
        if whole is None:
            return
        several = isinstance(observation, Mapping) and not whole.arguments.has_one
        for agent in observation if several else list(whole.tracks):
            whole.missed[agent] = Missed.of(error)
            if agent in whole.tracks:
                whole.tracks[agent].acted = False

    def require_new(self, episode_id: str) -> None:
        """Raise ValueError if an open or a remembered ended episode has the id."""
        if episode_id in self.wholes:
            raise already_started(episode_id)
        if episode_id in self._ended:
            raise completed(episode_id)

    def begin(self, whole: ClientWhole, *names: str) -> None:
        """Note an episode as open, under these ids."""
        whole.names = names
        for name in names:
            self.wholes[name] = whole
            if whole.arguments.has_one:
                self.open[name] = whole.tracks[None]

    def find_whole(self, episode_id: str, *, answered: bool = True) -> ClientWhole:
        """The open episode with this id. Raises as `find`, for any agent."""
        whole = self.wholes.get(episode_id)
        if whole is None:
            raise self._missing(episode_id)
        try:
            for track in whole.tracks.values():
                self.find(name_of(track), answered=answered)
        except Refusal as refusal:
            self.end_refused(whole, refusal)
            raise
        return whole

    def end_refused(self, whole: ClientWhole, refusal: Refusal) -> None:
        """End the whole episode after a track was refused for good."""
        if any(name_of(track) not in self.open for track in whole.tracks.values()):
            self.end_whole(whole, refusal)

    def end_whole(self, whole: ClientWhole, cause: Refusal | None = None) -> None:
        """Note that an episode has ended."""
        for name in whole.names:
            if self.wholes.get(name) is whole:
                self.end(name, cause)
        for agent in whole.tracks:
            if agent is not None:
                self.open.pop((whole.episode_id, agent), None)

    def is_left_out(self, episode_id: str) -> bool:
        """Whether an episode, open or remembered, is not sampled."""
        _, name = unsampled_names(episode_id)
        known = name in self.wholes or name in self._ended
        return name == episode_id or known

    def end(self, name: Name, cause: Refusal | None = None) -> None:
        """Note that an episode or a track has ended."""
        self.open.pop(name, None)
        if isinstance(name, str):
            self.wholes.pop(name, None)
        self._ended[name] = cause
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def refuse(self, event: Event, refusal: Refusal) -> None:
        """Note a refused event: the episode's next call raises the first such refusal."""
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
        """The refusal of an episode's start, if any; the episode is then removed."""
        episode = self.open.get(name)
        refusal = None if episode is None else episode.error
        if refusal is not None and episode is not None:
            self.open.pop(name)
            self.wholes.pop(episode.episode_id, None)
        return refusal

    def note_seen(self, name: Name) -> None:
        """Note that the caller has seen a refusal; one in `_PASSING` is not raised again."""
        episode = self.open.get(name)
        if episode is not None and episode.error is not None and episode.error.code in _PASSING:
            episode.error = None
