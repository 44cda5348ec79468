"""A client of a simulated world, and the knowledge shared by all of its clients.

It logs episodes of one agent and of two. With two, each agent has its own track, in the stream of
any policy: the second may join late, the first may leave early, and the agents that end with the
episode report how many acted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from ingest.protocol import messages as wire
from ingest.protocol.agent_names import Name, name_in, name_of
from ingest.protocol.errors import CollectorFailed, Refusal
from storage.experience.episode import DEFAULT_AGENT
from tests.faults.stepped_collector import Answer, World

REWARD = 0.5  # what one log_returns adds
AGENTS = (DEFAULT_AGENT, "b")  # of an episode of two; the first is called as a lone agent is stored
NO_TRACK = -1  # the environment's step of an episode of one agent, and the agents that it told

Place = tuple[str, str, int]
"""Where a step belongs: its episode, its agent, the environment's step."""


@dataclass
class Ledger:
    """The steps that all simulated clients logged. Each step has a number, which is its
    observation."""

    next_step: int = 0
    expected: dict[int, float] = field(default_factory=dict)  # acknowledged step -> its reward
    possible: dict[int, float] = field(default_factory=dict)  # ... with all that was ever sent
    places: dict[int, Place] = field(default_factory=dict)
    agents: dict[tuple[str, str], int] = field(default_factory=dict)  # (episode, agent) -> agents
    refused: set[int] = field(default_factory=set)
    codes: Counter[str] = field(default_factory=Counter)
    apart: list[str] = field(default_factory=list)  # episodes of which one batch was half refused
    late: bool = False  # whether clients name the steps that they reward
    named: deque[tuple[Name, int, int]] = field(default_factory=lambda: deque(maxlen=9))
    keys: int = 0
    doubtful: Counter[int] = field(default_factory=Counter)  # step -> rewards that may have come

    def new_step(self, place: Place) -> int:
        self.next_step += 1
        self.places[self.next_step] = place
        return self.next_step


@dataclass
class Track:
    """An open episode of one agent, or one agent's run through its episode."""

    episode_id: str
    agent: str | None = None
    seq: int = 1  # the next
    step: int | None = None  # the latest
    env_t: int = NO_TRACK  # of the latest

    @property
    def name(self) -> Name:
        return name_in(self.episode_id, self.agent)


class Client:
    """One client instance with one batch in flight, which it sends until it is answered."""

    def __init__(self, number: int, ledger: Ledger, chance: Random) -> None:
        self._number, self._ledger, self._chance = number, ledger, chance
        self._instance: str | None = None
        self._starts = self._episodes = 0
        self._open: dict[str, list[Track]] = {}  # episode -> the tracks that are open
        self._awaited: set[str] = set()  # episodes whose second agent has not come yet
        self._acted: dict[str, set[str]] = {}  # agents, of an open episode of several
        self._events: list[tuple[wire.Event, int | None]] = []  # with the step that it is about
        self._answer: Answer | None = None
        self._times: Counter[Name] = Counter()  # episode or track -> its actions so far
        self._attempts = 0  # of the batch that is under way, as far as they were taken

    @property
    def idle(self) -> bool:
        return not self._events

    # --- what it says ----------------------------------------------------------------------

    def compose(self, *, last: bool = False) -> None:
        """The next batch; `last` ends every episode."""
        if not last and len(self._open) < 2:
            self._begin()
        self._reward_late()
        for episode_id in list(self._open):
            if not last and episode_id in self._awaited and self._chance.random() < 0.4:
                self._join(episode_id, AGENTS[1])
            for track in self._acting(episode_id):
                for _ in range(0 if last else self._chance.choice((0, 1, 1, 2, 5))):
                    self._act(track)
            if last or self._chance.random() < 0.25:
                self._end(episode_id, leaves_early=not last and self._chance.random() < 0.5)

    def _acting(self, episode_id: str) -> list[Track]:
        """The agents that act next: all at once, or one while the others wait."""
        tracks = self._open[episode_id]
        if len(tracks) > 1 and self._chance.random() < 0.6:
            return [self._chance.choice(tracks)]
        return tracks

    def _begin(self) -> None:
        episode_id = f"{self._number}-{self._episodes}"
        self._episodes += 1
        self._open[episode_id] = []
        several = self._chance.random() < 0.4
        if several:
            self._awaited.add(episode_id)
            self._acted[episode_id] = set()
        self._join(episode_id, AGENTS[0] if several else None)

    def _join(self, episode_id: str, agent: str | None) -> None:
        kinds = ("default", "default", "other", *("patient", "patient") * self._ledger.late)
        start = wire.Start(
            episode_id=episode_id,
            start=self._starts,
            policy_id=self._chance.choice(kinds),
            agent_id=agent,
        )
        self._starts += 1
        self._events.append((start, None))
        self._open[episode_id].append(Track(episode_id, agent))
        if agent == AGENTS[1]:
            self._awaited.discard(episode_id)

    def _reward_late(self) -> None:
        """Rewards for named steps of any client's episodes, including ended ones."""
        ledger = self._ledger
        for _ in range(self._chance.choice((0, 0, 1, 2)) if ledger.named else 0):
            name, t, step = self._chance.choice(list(ledger.named))
            episode_id, agent = (name, None) if isinstance(name, str) else name
            ledger.keys += 1
            event = wire.LogReturns(
                episode_id=episode_id,
                agent_id=agent,
                step=t,
                reward=REWARD,
                reward_id=f"reward-{ledger.keys}",
            )
            self._events.append((event, step))
            ledger.possible[step] += REWARD

    def _act(self, track: Track) -> None:
        whose = {"episode_id": track.episode_id, "agent_id": track.agent, "seq": track.seq}
        if track.step is not None and self._chance.random() < 0.3:
            self._events.append((wire.LogReturns(**whose, reward=REWARD), track.step))
            self._ledger.possible[track.step] += REWARD
        else:
            if track.agent is not None:
                self._step_environment(track)
            agent = DEFAULT_AGENT if track.agent is None else track.agent
            step = self._ledger.new_step((track.episode_id, agent, track.env_t))
            action = wire.LogAction(
                **whose,
                obs=[float(step)],
                action=0,
                reward=float(step),
                env_t=None if track.agent is None else track.env_t,
            )
            self._events.append((action, step))
            self._ledger.possible[step] = action.reward
            track.step = step
        track.seq += 1

    def _step_environment(self, track: Track) -> None:
        """The agent acts in the current step if it has not acted in it yet, else in the next."""
        now = max(other.env_t for other in self._open[track.episode_id])
        track.env_t = now if now > track.env_t else track.env_t + 1
        self._acted[track.episode_id].add(track.agent or "")

    def _end(self, episode_id: str, *, leaves_early: bool) -> None:
        """End an episode, or the track of the first agent alone while the other goes on."""
        tracks = self._open[episode_id]
        if leaves_early and (len(tracks) > 1 or episode_id in self._awaited):
            self._tell_end(tracks.pop(0), None)
            if not tracks:  # the other comes at once
                self._join(episode_id, AGENTS[1])
            return
        agents = len(self._acted.get(episode_id, ())) or None
        for track in tracks:
            self._tell_end(track, agents)
        self._forget(episode_id)

    def _tell_end(self, track: Track, agents: int | None) -> None:
        end = wire.End(
            episode_id=track.episode_id, agent_id=track.agent, seq=track.seq, agents=agents
        )
        self._events.append((end, None))
        agent = DEFAULT_AGENT if track.agent is None else track.agent
        self._ledger.agents[track.episode_id, agent] = NO_TRACK if agents is None else agents

    def _forget(self, episode_id: str) -> None:
        self._open.pop(episode_id, None)
        self._acted.pop(episode_id, None)
        self._awaited.discard(episode_id)

    # --- what it does ----------------------------------------------------------------------

    def send(self, world: World) -> None:
        """Send the batch in flight (again)."""
        self.hang_up()
        collector = world.collector
        try:
            if self._instance is None:
                reply, row = collector.register(wire.Register())
            else:
                events = [event for event, _ in self._events]
                reply, row = collector.accept(wire.Batch(instance=self._instance, events=events))
                self._attempts += 1
            self._answer = Answer(reply, collector.journal.durable(row))
        except (Refusal, CollectorFailed):
            return

    def deliver(self, world: World) -> None:
        """Send the batch in flight until it is answered."""
        for _ in range(9):
            if self.idle:
                return
            self.send(world)
            world.pump()
            self.listen()

    # --- what it hears ---------------------------------------------------------------------

    def listen(self) -> None:
        """Process the answer if it has arrived."""
        if self._answer is None:
            return
        try:
            if not self._answer.poll():
                return
        except (Refusal, CollectorFailed):
            self._answer = None
            return
        reply, self._answer = self._answer.reply, None
        if isinstance(reply, wire.Registered):
            self._instance = reply.instance
        else:
            self._heard(self._codes({item.index: item.error["code"] for item in reply.refused}))

    def _codes(self, refused: dict[int, str]) -> dict[int, str]:
        """Event -> the code of its refusal; events of a track whose start was refused are left
        out."""
        unborn = {
            name_of(event): refused[index]
            for index, (event, _) in enumerate(self._events)
            if index in refused and isinstance(event, wire.Start)
        }
        return {
            index: unborn.get(name_of(self._events[index][0]), code)
            if code == "not_found"
            else code
            for index, code in refused.items()
        }

    def _heard(self, refused: dict[int, str]) -> None:
        ledger = self._ledger
        again, self._attempts = self._attempts > 1, 0
        ledger.apart += self._apart(refused)
        for index, (event, step) in enumerate(self._events):
            late = isinstance(event, wire.LogReturns) and event.step is not None
            if index in refused:
                ledger.codes[refused[index]] += 1
                if late and step is not None:
                    ledger.doubtful[step] += again  # it may be why the window's end came later
                else:
                    self._forget(event.episode_id)
            if isinstance(event, wire.LogAction) and step is not None:
                if index in refused:
                    ledger.refused.add(step)
                else:
                    ledger.expected[step] = event.reward
                    self._note(name_of(event), step)
            elif isinstance(event, wire.LogReturns) and step in ledger.expected:
                ledger.expected[step] += 0.0 if index in refused else event.reward
        self._events = []

    def _apart(self, refused: dict[int, str]) -> Iterator[str]:
        """Episodes that have ended for some of their agents, but not for all."""
        answers: dict[str, set[str | None]] = {}
        for index, (event, _) in enumerate(self._events):
            if not (isinstance(event, wire.LogReturns) and event.step is not None):
                answers.setdefault(event.episode_id, set()).add(refused.get(index))
        yield from (name for name, found in answers.items() if len(found) > 1)

    def _note(self, name: Name, step: int) -> None:
        """Record an acknowledged action as the episode's next step, which any client may reward."""
        if self._ledger.late:
            self._ledger.named.append((name, self._times[name], step))
            self._times[name] += 1

    def forget_unless(self, known: Callable[[str], bool]) -> None:
        """Register a new instance when the old one is no longer known."""
        if self._instance is not None and not known(self._instance):
            self._instance = None

    def hang_up(self) -> None:
        if self._answer is not None:
            self._answer.drop()
            self._answer = None
