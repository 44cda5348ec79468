"""Random histories over a journal, files and a clock in memory, with a crash at every step.

Clients log episodes that cuts, time-outs, full disks and dying writers run across, and reward steps
of each other's episodes by their numbers, within their windows and after. Each
history is replayed once for each point where a process may die (before and after every commit and
every shard), then with more crashes behind it. In the end every acknowledged step is in exactly one
shard with the reward that it was given, ordinals are dense, and nothing of the history is left in
the journal or in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from ingest import wire
from ingest.errors import CollectorFailed, Refusal
from ingest.recovery import CARRY
from ingest.sealed import Limits
from storage.declarations import PolicyDeclaration
from storage.episode import Part
from storage.spaces import parse_space
from tests.faults.scenario import Scenario, Trial, Verdict
from tests.faults.stepped import Answer, Crash, Points, World

POLICIES = {
    "default": PolicyDeclaration(
        observation=parse_space("box:1"),
        action=parse_space("discrete:3"),
        part_steps=3,
        part_seconds=20.0,
        seal_seconds=1.0,
        episode_timeout=50.0,
    ),
    "other": PolicyDeclaration(
        policy_id="other",
        observation=parse_space("box:1"),
        action=parse_space("discrete:2"),
        seal_bytes=150,
        episode_timeout=50.0,
    ),
    "patient": PolicyDeclaration(
        policy_id="patient",
        observation=parse_space("box:1"),
        action=parse_space("discrete:3"),
        part_steps=3,
        part_seconds=20.0,
        seal_seconds=1.0,
        episode_timeout=50.0,
        reward_window=10.0,
    ),
}
LIMITS = Limits(finished=500, instances=50)
TURNS = 60
CLIENTS = 3
SECONDS = (0.3, 0.3, 1.5, 1.5, 1.5, 25.0, 60.0)  # what passes at once; 60 abandons what is quiet
REWARD = 0.5  # what one log_returns adds
MORE_CRASHES = 0.01  # at each later point


@dataclass
class Ledger:
    """What the world's clients know: steps are named by numbers, which are their observations."""

    next_step: int = 0
    expected: dict[int, float] = field(default_factory=dict)  # acknowledged step -> its reward
    possible: dict[int, float] = field(default_factory=dict)  # ... with all that was ever sent
    refused: set[int] = field(default_factory=set)
    codes: Counter[str] = field(default_factory=Counter)
    late: bool = False  # whether clients name the steps that they reward
    named: deque[tuple[str, int, int]] = field(default_factory=lambda: deque(maxlen=9))
    keys: int = 0
    doubtful: Counter[int] = field(default_factory=Counter)  # step -> rewards that may have come

    def new_step(self) -> int:
        self.next_step += 1
        return self.next_step


class Client:
    """One instance. It has one batch under way, which it sends until it is answered."""

    def __init__(self, number: int, ledger: Ledger, chance: Random) -> None:
        self._number, self._ledger, self._chance = number, ledger, chance
        self._instance: str | None = None
        self._starts = 0
        self._open: dict[str, tuple[int, int | None]] = {}  # episode -> next seq, latest step
        self._events: list[tuple[wire.Event, int | None]] = []  # with the step that it is about
        self._answer: Answer | None = None
        self._times: Counter[str] = Counter()  # episode -> its actions so far
        self._attempts = 0  # of the batch that is under way, as far as they were taken

    @property
    def idle(self) -> bool:
        return not self._events

    def compose(self, *, last: bool = False) -> None:
        """The next batch; `last` ends every episode."""
        if not last and len(self._open) < 2:
            name = f"{self._number}-{self._starts}"
            kinds = ("default", "default", "other", *("patient", "patient") * self._ledger.late)
            policy_id = self._chance.choice(kinds)
            start = wire.Start(episode_id=name, start=self._starts, policy_id=policy_id)
            self._events.append((start, None))
            self._starts += 1
            self._open[name] = (1, None)
        self._reward_late()
        for name in list(self._open):
            for _ in range(0 if last else self._chance.choice((0, 1, 1, 2, 5))):
                self._act(name)
            if last or self._chance.random() < 0.25:
                seq, _ = self._open.pop(name)
                self._events.append((wire.End(episode_id=name, seq=seq), None))

    def _reward_late(self) -> None:
        """Rewards that name their steps, of anybody's episodes, the ended ones too."""
        ledger = self._ledger
        for _ in range(self._chance.choice((0, 0, 1, 2)) if ledger.named else 0):
            name, t, step = self._chance.choice(list(ledger.named))
            ledger.keys += 1
            key = f"reward-{ledger.keys}"
            event = wire.LogReturns(episode_id=name, step=t, reward=REWARD, reward_id=key)
            self._events.append((event, step))
            ledger.possible[step] += REWARD

    def _act(self, name: str) -> None:
        seq, step = self._open[name]
        if step is not None and self._chance.random() < 0.3:
            self._events.append((wire.LogReturns(episode_id=name, seq=seq, reward=REWARD), step))
            self._ledger.possible[step] += REWARD
        else:
            step = self._ledger.new_step()
            action = wire.LogAction(
                episode_id=name, seq=seq, obs=[float(step)], action=0, reward=float(step)
            )
            self._events.append((action, step))
            self._ledger.possible[step] = action.reward
        self._open[name] = (seq + 1, step)

    def send(self, world: World) -> None:
        """Send what is under way (again)."""
        self.hang_up()
        collector = world.collector
        try:
            if self._instance is None:
                reply, row = collector.register(wire.Register())
            else:
                events = [event for event, _ in self._events]
                reply, row = collector.accept(wire.Batch(instance=self._instance, events=events))
                self._attempts += 1
            self._answer = Answer(reply, collector.durable(row))
        except (Refusal, CollectorFailed):
            return

    def deliver(self, world: World) -> None:
        """Send what is under way until it is answered."""
        for _ in range(9):
            if self.idle:
                return
            self.send(world)
            world.pump()
            self.listen()

    def listen(self) -> None:
        """Take the answer if it has come."""
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
            self._heard({item.index: item.error["code"] for item in reply.refused})

    def _heard(self, refused: dict[int, str]) -> None:
        ledger = self._ledger
        again, self._attempts = self._attempts > 1, 0
        for index, (event, step) in enumerate(self._events):
            late = isinstance(event, wire.LogReturns) and event.step is not None
            if index in refused:
                ledger.codes[refused[index]] += 1
                if late and step is not None:
                    ledger.doubtful[step] += again  # it may be why the window's end came later
                else:
                    self._open.pop(event.episode_id, None)
            if isinstance(event, wire.LogAction) and step is not None:
                if index in refused:
                    ledger.refused.add(step)
                else:
                    ledger.expected[step] = event.reward
                    self._note(event.episode_id, step)
            elif isinstance(event, wire.LogReturns) and step in ledger.expected:
                ledger.expected[step] += 0.0 if index in refused else event.reward
        self._events = []

    def _note(self, name: str, step: int) -> None:
        """An acknowledged action is the episode's next step: anybody may reward it."""
        if self._ledger.late:
            self._ledger.named.append((name, self._times[name], step))
            self._times[name] += 1

    def forget_unless(self, known: Callable[[str], bool]) -> None:
        """Register anew, for what comes, when the instance is not known any more."""
        if self._instance is not None and not known(self._instance):
            self._instance = None

    def hang_up(self) -> None:
        if self._answer is not None:
            self._answer.drop()
            self._answer = None


class History:
    """One seeded run. The same seed and points are the same history."""

    def __init__(
        self, seed: int, points: Points, make: type[World] = World, *, late: bool = False
    ) -> None:
        self.points = points
        self._chance = Random(seed)
        self.ledger = Ledger(late=late)
        self.failures: list[str] = []
        self.world = make(POLICIES, self._chance, points, LIMITS)
        self._clients = [Client(n, self.ledger, Random(seed + n)) for n in range(CLIENTS)]

    def run(self) -> None:
        for _ in range(TURNS):
            self.survive(self.turn)
        self.survive(self.end)

    def survive(self, action: Any) -> None:
        """Do it; a process that died, or gave up, is started again."""
        while True:
            try:
                action()
                if self.world.collector.failure is None:
                    return
                self.failures.append(repr(self.world.collector.failure))
                if len(self.failures) > 3:
                    return
            except Crash:
                pass
            for client in self._clients:
                client.hang_up()
            self.world.start()

    def turn(self) -> None:
        world, chance = self.world, self._chance
        action = chance.random()
        if action < 0.35:
            client = chance.choice(self._clients)
            if client.idle:
                client.compose()
            client.send(world)
        elif action < 0.6:
            world.commit()
        elif action < 0.7:
            world.seal(writer_dies=chance.random() < 0.2)
        elif action < 0.9:
            world.deliver()
            for client in self._clients:
                client.listen()
        else:
            world.pass_time(chance.choice(SECONDS))

    def end(self) -> None:
        """Every client is answered and ends what it began; what is left is abandoned and sealed."""
        world = self.world
        for last in (False, True):
            for client in self._clients:
                if last and client.idle:
                    client.compose(last=True)
                client.deliver(world)
        world.finish()
        if self.world.collector.failure is None:
            world.start()
            world.pump()


# --- what has to hold in the end -----------------------------------------------------------------


def stored_steps(parts: Iterable[Part]) -> dict[int, list[float]]:
    """step -> the rewards with which it lies in shards."""
    stored: dict[int, list[float]] = defaultdict(list)
    for part in parts:
        steps = np.frombuffer(part.obs, np.float32).tolist()
        for step, reward in zip(steps, np.frombuffer(part.rewards).tolist(), strict=True):
            stored[int(step)].append(reward)
    return stored


def _fits(found: float, reward: float, doubtful: int) -> bool:
    """Whether a stored reward is the acknowledged one, with or without each one in doubt."""
    return any(math.isclose(found, reward + n * REWARD) for n in range(doubtful + 1))


def judge(history: History, verdict: Verdict, where: str) -> None:
    """Every law that the end of a history can show."""
    world, ledger = history.world, history.ledger
    stored = stored_steps(world.writer.parts)
    lost = [step for step in ledger.expected if step not in stored]
    doubled = [step for step, found in stored.items() if len(found) > 1]
    wrong = [
        (step, stored[step], reward)
        for step, reward in ledger.expected.items()
        if any(not _fits(found, reward, ledger.doubtful[step]) for found in stored.get(step, ()))
    ]
    unknown = [step for step in stored if step not in ledger.expected]
    verdict.require(not lost, "lost", f"{where}: {lost}")
    verdict.require(not doubled, "doubled", f"{where}: {doubled}")
    verdict.require(not wrong, "wrong", f"{where}: {wrong}")
    verdict.require(not unknown, "unknown", f"{where}: {unknown}")
    usual = ("abandoned", "window_closed")
    odd = {code: n for code, n in ledger.codes.items() if code not in usual}
    verdict.require(not odd, "refused", f"{where}: {odd}")
    verdict.require(not history.failures, "failed", f"{where}: {history.failures}")
    _judge_ordinals(world, verdict, where)
    _judge_leftovers(world, verdict, where)
    verdict.count("acknowledged", len(ledger.expected))
    verdict.count("window_closed", ledger.codes["window_closed"])
    verdict.count("lost", len(lost))
    verdict.count("doubled", len(doubled))


def _judge_ordinals(world: World, verdict: Verdict, where: str) -> None:
    streams: dict[str, list[int]] = defaultdict(list)
    episodes: dict[str, list[Part]] = defaultdict(list)
    for (stream, _, _), shard in world.writer.shards.items():
        streams[stream] += [part.ordinal for part in shard.parts]
    for stream, ordinals in streams.items():
        dense = sorted(ordinals) == list(range(world.journal.next_ordinal(stream)))
        verdict.require(dense, "hole", f"{where}: {stream} has {sorted(ordinals)}")
    for part in sorted(world.writer.parts, key=lambda part: part.part):
        episodes[part.episode_id].append(part)
    for name, parts in episodes.items():
        numbers = [part.part for part in parts]
        ends = [part.ended is not None for part in parts]
        first = {part.episode_ordinal for part in parts} == {parts[0].ordinal}
        whole = numbers == list(range(len(parts))) and ends == [False] * (len(parts) - 1) + [True]
        verdict.require(whole and first, "parts", f"{where}: {name} has parts {numbers}, {ends}")
    verdict.require(not world.writer.conflicts, "hole", f"{where}: a plan came out differently")


def _judge_leftovers(world: World, verdict: Verdict, where: str) -> None:
    """Nothing is kept per episode but the counts and ranges that have a bound."""
    assembler, sealing = world.collector.assembler, world.collector._sealing
    left = {
        "rows": [number for number, _ in world.journal.replay()],
        "plans": world.journal.plans(),
        "carries": list(world.journal.state(CARRY)),
        "episodes": [*assembler.episodes, *assembler.closing],
        "needed": assembler.needed,
        "ordinals": sealing._episode_ordinals,
        "bytes": world.collector.pending_bytes,
    }
    kept = {name: found for name, found in left.items() if found}
    verdict.require(not kept, "leaked", f"{where}: {kept}")
    totals = sealing.totals
    counted = (totals.steps, totals.rows) == (sum(p.steps for p in world.writer.parts),) * 2
    verdict.require(counted, "totals", f"{where}: {totals}")


def play(seed: int, crash: int | None) -> History:
    """The history of a seed; with more crashes behind the first one, and sometimes a full disk."""
    chance = Random(f"{seed} {crash}")
    crashes = set() if crash is None else {crash}
    if crash is not None:
        crashes |= {crash + n for n in range(1, 500) if chance.random() < MORE_CRASHES}
    full = {n for n in range(2, 200) if chance.random() < 0.02} if seed % 2 else set()
    history = History(seed, Points(crashes, full), late=True)
    history.run()
    return history


def run(trial: Trial) -> Verdict:
    verdict = Verdict(counts={"histories": 0, "crashes": 0, "scripts": 0})

    async def main() -> None:
        seed = trial.seed * 1_000_000
        while verdict.counts["histories"] < trial.size and trial.in_time:
            seed += 1
            verdict.count("scripts")
            points = _one(seed, None, verdict)
            for crash in range(1, points + 1):
                _one(seed, crash, verdict)

    with trial.planted(), quiet():
        asyncio.run(main())
    return verdict


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the collector's log: a history of faults is a long story."""
    log = logging.getLogger("headrace")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def _one(seed: int, crash: int | None, verdict: Verdict) -> int:
    """Play and judge one history; answers how many points it had."""
    history = play(seed, crash)
    judge(history, verdict, f"history {seed}, crash at {crash}")
    verdict.count("histories")
    verdict.count(
        "crashes", len([n for n in history.points.crashes if n <= history.points.reached])
    )
    return history.points.reached


SCENARIO = Scenario(
    name="simulation",
    law="whatever a crash interrupts, every acknowledged step comes out once and nothing stays",
    unit="histories",
    quick=2_500,
    long=50_000,
    planted=300,
    run=run,
)
