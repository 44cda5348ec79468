"""Episodes between programs that make calls and a worker that polls: one lock, no lost step.

Programs call `start`, `ask`, `tell`, `reward` and `end`, one thread at a time for each episode; the
worker calls `poll` and `send`. An open episode is in one of three states:

| state | how it gets there | what may be called |
|---|---|---|
| free | start; tell; the answer of an ask was taken | everything |
| asking | ask: its news waits to be polled, or for the worker's action | only send |
| unanswered | the ask timed out after it was polled: the worker will act | the same ask again |

An ask that times out before its news was polled is taken back: the episode is free again.

Each episode has a queue of news. A poll takes one item from each queue, in order, so that a logging
program never waits for the worker, except for room if there are `max_pending` items. Values are by
agent, and are passed on unchanged.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from ingest.client.arguments import acting_of, require_actions, require_going_on
from ingest.client.open_episodes import REMEMBERED, Missed, no_action
from ingest.protocol.agent_names import label
from ingest.protocol.errors import (
    BufferFull,
    ClientError,
    Refusal,
    ServingStopped,
    already_started,
    completed,
    not_found,
)
from storage.experience.episode import ALL_AGENTS, DEFAULT_AGENT, LoggedAction
from storage.wording import counted

ByAgent: TypeAlias = dict[Any, Any]
OwnAction: TypeAlias = Callable[[str, Any, Any], Any]
Poll: TypeAlias = tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]


class _Reports(NamedTuple):
    """What a program reported about the agents' latest actions."""

    rewards: ByAgent
    infos: ByAgent
    gone: dict[Any, bool]  # agents that ended: whether a limit cut them off


class _EpisodeNews(NamedTuple):
    """One item of news about one episode, for one poll."""

    obs: ByAgent
    logged: ByAgent  # agent -> LoggedAction; empty if the worker is asked, and at the end
    over: str  # "", "terminated", "truncated"
    reports: _Reports


class _ServedEpisode:
    """An open episode. `reports` collects rewards, infos and ended agents since the latest news."""

    __slots__ = (
        "acted",
        "answer",
        "answered",
        "asked",
        "episode_id",
        "gone",
        "key",
        "missed",
        "news",
        "reports",
        "training_enabled",
        "waiting",
    )

    def __init__(self, episode_id: str, training_enabled: bool, answered: Any) -> None:
        self.episode_id = episode_id
        self.training_enabled = training_enabled
        self.news: deque[_EpisodeNews] = deque()
        self.reports = _Reports({}, {}, {})
        self.acted: set[Any] = set()  # agents that can get rewards
        self.missed: dict[Any, Missed] = {}  # their latest action was taken, but not recorded
        self.gone: set[Any] = set()  # agents whose end was reported, or will be with the next news
        self.asked: _EpisodeNews | None = None  # the question that the worker must answer
        self.key: Any = None  # its observations, to compare with a repetition
        self.answer: ByAgent | None = None
        self.answered: threading.Condition = answered
        self.waiting = False  # a thread is in `ask`

    def require_agents(self, obs: Mapping[Any, Any]) -> None:
        """Raise ValueError for agents that have ended, or if no agent can act."""
        ended = self.gone - self.reports.gone.keys()
        require_going_on(self.episode_id, ended & obs.keys())

    def acting(self, obs: Mapping[Any, Any]) -> set[Any]:
        """The agents that act on these observations. Raises ValueError if there is none."""
        self.require_agents(obs)
        return set(acting_of(self.episode_id, obs, self.gone))

    def act(self, agents: Iterable[Any]) -> None:
        """Note which agents have acted: later rewards are for these actions."""
        for agent in agents:
            self.acted.add(agent)
            self.missed.pop(agent, None)

    def note(self, obs: ByAgent, logged: ByAgent, over: str = "") -> _EpisodeNews:
        """Queue news, together with the reports since the previous news."""
        news = _EpisodeNews(obs, logged, over, self.reports)
        self.reports = _Reports({}, {}, {})
        self.news.append(news)
        return news


class Exchange:
    """The episodes of one environment whose program makes the calls.

    Args:
        timeout: seconds that `ask` waits for the worker's action, and any call for room.
        max_pending: the most items of news that may wait for the worker.

    Errors are those of PolicyClient: ValueError (Refusal) for an episode that is unknown, ended or
    already used; ClientError for one whose last ask has no answer yet. TimeoutError names the
    episode. ServingStopped is raised when the other side has ended.
    """

    def __init__(self, *, timeout: float = 300.0, max_pending: int = 100_000) -> None:
        if not timeout > 0 or max_pending < 1:
            raise ValueError(
                f"expected timeout > 0 and max_pending >= 1, got {timeout} and {max_pending}"
            )
        self._timeout = timeout
        self._max_pending = max_pending
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)  # for `poll`
        self._room = threading.Condition(self._lock)  # for programs
        self._open: dict[str, _ServedEpisode] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._ready: dict[str, _ServedEpisode] = {}  # with news for the next poll
        self._pending = 0
        self._finished = False  # the program has ended
        self._error: BaseException | None = None  # why it ended
        self._closed: ServingStopped | None = None

    # --- the program's calls -----------------------------------------------------------------

    def start(self, episode_id: str, training_enabled: bool) -> None:
        """Open an episode."""
        with self._lock:
            self._require_open()
            if episode_id in self._open:
                raise already_started(episode_id)
            if episode_id in self._ended:
                raise completed(episode_id)
            answered = threading.Condition(self._lock)
            self._open[episode_id] = _ServedEpisode(episode_id, training_enabled, answered)

    def ask(self, episode_id: str, obs: ByAgent, key: Any) -> ByAgent:
        """Return the worker's actions by agent. `key` identifies the observations."""
        with self._lock:
            episode = self._find(episode_id, answered=False)
            if episode.asked is None:
                episode.acting(obs)
                episode.asked, episode.key = episode.note(obs, {}), key
                self._put(episode)
            elif episode.key != key:
                raise ClientError(
                    f"Episode {episode_id}: the answer to its last get_action is missing; "
                    f"expected the same observation again"
                )
            answer = self._await(episode)
            episode.asked = episode.answer = None
            episode.act(answer.keys())
            return answer

    def tell(self, episode_id: str, obs: ByAgent, logged: Mapping[Any, LoggedAction]) -> None:
        """Record observations, and the actions that the program took on them."""
        with self._lock:
            episode = self._find(episode_id)
            acting = episode.acting(obs)
            require_actions(episode_id, acting, logged)
            if self._pending >= self._max_pending:
                self._await_room(episode)
            episode.note(obs, dict(logged))
            episode.act(acting)
            self._put(episode)

    def miss(self, episode_id: str, agents: Iterable[Any] | None, error: BaseException) -> None:
        """Note that agents (None: all that acted) took actions that could not be recorded.

        Later rewards then do not belong to their earlier steps.
        """
        with self._lock:
            episode = self._open.get(episode_id)
            if episode is not None:
                who = episode.acted if agents is None else agents
                episode.missed |= dict.fromkeys(who, Missed.of(error))

    def reward(
        self,
        episode_id: str,
        rewards: Mapping[Any, float],
        infos: Mapping[Any, Mapping[str, Any]],
        gone: Mapping[Any, bool],
    ) -> None:
        """Add to the rewards and infos of the agents' latest actions.

        `gone` maps agents that have ended to whether a limit cut them off; the first report of an
        agent's end counts.
        """
        with self._lock:
            episode = self._find(episode_id)
            agents = rewards.keys() | infos.keys() | gone.keys()
            missed = agents & episode.missed.keys()
            if early := agents - episode.acted - missed:
                raise Refusal(
                    "no_action",
                    f"Episode {episode_id}: a reward came before any action{_who(early)}",
                    "reward",
                    episode_id,
                )
            for agent in sorted(missed, key=str):
                name = episode_id if agent == DEFAULT_AGENT else label((episode_id, agent))
                raise no_action(name, episode.missed[agent])
            total, known_infos, ended = episode.reports
            for agent, amount in rewards.items():
                total[agent] = total.get(agent, 0.0) + amount
            for agent, info in infos.items():
                known_infos[agent] = {**known_infos.get(agent, {}), **info}
            ended |= {agent: cut for agent, cut in gone.items() if agent not in episode.gone}
            episode.gone |= gone.keys()

    def end(self, episode_id: str, obs: ByAgent, *, truncated: bool) -> None:
        """End the episode."""
        with self._lock:
            episode = self._find(episode_id)
            episode.require_agents(obs)
            if self._pending >= self._max_pending:
                self._await_room(episode)
            episode.note(obs, {}, "truncated" if truncated else "terminated")
            self._put(episode)
            del self._open[episode_id]
            self._ended[episode_id] = None
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)

    def finish(self, error: BaseException | None) -> None:
        """End the program's side: the worker polls the remaining news, then gets ServingStopped."""
        with self._lock:
            self._finished = True
            self._error = error
            self._arrived.notify_all()

    # --- the worker's calls ------------------------------------------------------------------

    def poll(self) -> Poll:
        """Return one item of news of every episode that has some; wait for the first.

        Raises ServingStopped after the program has ended and all its news was polled.
        """
        with self._lock:
            self._arrived.wait_for(lambda: self._ready or self._finished or self._closed)
            if self._closed is not None:
                raise ServingStopped(str(self._closed))
            if not self._ready:
                self._close(_stopped(self._error))
                raise _stopped(self._error) from self._error
            return self._take()

    def send(self, actions: Mapping[str, Mapping[Any, Any]], own: OwnAction) -> None:
        """Answer the episodes that ask; actions for others are ignored.

        `own(episode_id, agent, action)` checks an action and returns it as the program gets it.
        Raises ValueError for an unknown episode, and for agents other than those that ask, and the
        errors of `own`; then no episode is answered.
        """
        with self._lock:
            answers = []
            for name, by_agent in actions.items():
                episode = self._asking(name)
                if episode is not None:
                    _require_answer(episode, by_agent)
                    answers.append((episode, {a: own(name, a, x) for a, x in by_agent.items()}))
            for episode, answer in answers:
                episode.answer = answer
                episode.answered.notify()

    def close(self) -> None:
        """End the worker's side: waiting and later calls get ServingStopped."""
        with self._lock:
            self._close(ServingStopped("The worker has stopped: it takes no more episodes."))

    # --- with the lock held ------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed is not None:
            raise ServingStopped(str(self._closed))

    def _find(self, episode_id: str, *, answered: bool = True) -> _ServedEpisode:
        self._require_open()
        episode = self._open.get(episode_id)
        if episode is None:
            raise completed(episode_id) if episode_id in self._ended else not_found(episode_id)
        if episode.waiting:
            raise ClientError(
                f"Episode {episode_id}: another call for it is waiting; only one thread at a time "
                f"may use an episode"
            )
        if answered and episode.asked is not None:
            raise ClientError(
                f"Episode {episode_id}: the answer to its last get_action is missing; call "
                f"get_action again with the same observation"
            )
        return episode

    def _put(self, episode: _ServedEpisode) -> None:
        self._pending += 1
        self._ready[episode.episode_id] = episode
        self._arrived.notify()

    def _await_room(self, episode: _ServedEpisode) -> None:
        episode.waiting = True
        try:
            if not self._room.wait_for(self._has_room, self._timeout):
                waiting = counted(self._pending, "step waits", "steps wait")
                raise BufferFull(
                    f"Episode {episode.episode_id}: {waiting} for the worker, "
                    f"and it took none within {self._timeout:g} s"
                )
        finally:
            episode.waiting = False
        self._require_open()

    def _has_room(self) -> bool:
        return self._pending < self._max_pending or self._closed is not None

    def _await(self, episode: _ServedEpisode) -> ByAgent:
        """Wait for the answer. Raises TimeoutError, and takes back an unpolled question."""
        episode.waiting = True
        try:
            episode.answered.wait_for(
                lambda: episode.answer is not None or self._closed, self._timeout
            )
        finally:
            episode.waiting = False
        if episode.answer is not None:
            return episode.answer
        self._require_open()
        if episode.news:  # the last item is the question, as no news can follow it
            episode.reports = episode.news.pop().reports
            episode.asked = None
            self._pending -= 1
            if not episode.news:
                del self._ready[episode.episode_id]
        raise TimeoutError(f"Episode {episode.episode_id}: no action in {self._timeout:g} s")

    def _take(self) -> Poll:
        poll: Poll = ({}, {}, {}, {}, {}, {})
        left: dict[str, _ServedEpisode] = {}
        for episode_id, episode in self._ready.items():
            _tell(poll, episode, episode.news.popleft())
            if episode.news:
                left[episode_id] = episode
        self._pending -= len(self._ready)
        self._ready = left
        self._room.notify_all()
        return poll

    def _asking(self, episode_id: str) -> _ServedEpisode | None:
        """The episode, if the worker has polled its question and not answered it."""
        episode = self._open.get(episode_id)
        if episode is None:
            if episode_id in self._ended:
                return None
            raise not_found(episode_id)
        owed = episode.asked is not None and not episode.news and episode.answer is None
        return episode if owed else None

    def _close(self, why: ServingStopped) -> None:
        if self._closed is None:
            self._closed = why
        self._arrived.notify_all()
        self._room.notify_all()
        for episode in self._open.values():
            episode.answered.notify_all()


def _tell(poll: Poll, episode: _ServedEpisode, news: _EpisodeNews) -> None:
    """Put one item of an episode's news into a poll, with an entry for every agent."""
    name = episode.episode_id
    rewards, infos, gone = news.reports
    agents = dict.fromkeys([*news.obs, *rewards, *infos, *gone])
    if news.over:
        agents |= dict.fromkeys(episode.acted - episode.gone)
    terminated, truncated = news.over == "terminated", news.over == "truncated"
    marks = {} if episode.training_enabled else {"training_enabled": False}
    poll[0][name] = news.obs
    poll[1][name] = {a: rewards.get(a, 0.0) for a in agents}
    cut = {a: gone.get(a, truncated) for a in agents}
    over = {a: a in gone or bool(news.over) for a in agents}
    poll[2][name] = {**{a: over[a] and not cut[a] for a in agents}, ALL_AGENTS: terminated}
    poll[3][name] = {**cut, ALL_AGENTS: truncated}
    poll[4][name] = {a: {**infos.get(a, {}), **marks} for a in agents}
    if news.logged:
        poll[5][name] = news.logged


def _require_answer(episode: _ServedEpisode, actions: Mapping[Any, Any]) -> None:
    asked = episode.asked
    waiting = asked.obs.keys() - asked.reports.gone.keys() if asked else set()
    if actions.keys() != waiting:
        raise ValueError(
            f"send_actions: episode {episode.episode_id}: expected actions of the agents "
            f"{sorted(map(str, waiting))}, got {sorted(map(str, actions))}"
        )


def _who(agents: set[Any]) -> str:
    """The agents as text, if there are several to distinguish."""
    named = sorted(str(agent) for agent in agents if agent != DEFAULT_AGENT)
    return f" of {', '.join(named)}" if named else ""


def _stopped(error: BaseException | None) -> ServingStopped:
    why = "" if error is None else f" run() raised {type(error).__name__}: {error}"
    return ServingStopped(f"Serving thread has stopped.{why}")
