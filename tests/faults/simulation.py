"""Random histories over a journal, files and a clock in memory, with a crash at every step.

Clients log episodes of one agent and of two, during cuts, timeouts, full disks and dying writers,
and reward steps of each other's episodes by number, within their windows and later. Each history is
replayed once for each point where a process may die (before and after every commit and every
shard), then with further crashes. At the end every acknowledged step is in exactly one shard, with
its agent, its step of the environment and its reward; ordinals are dense, and nothing of the
history is left in the journal or in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any

import numpy as np

from ingest.collector.recovery import CARRY
from ingest.episodes.sealed_parts import Limits
from storage.declarations.declaration import PolicyDeclaration
from storage.experience.episode import Part
from storage.spaces.descriptors import parse_space
from tests.faults.scenario import Scenario, Trial, Verdict
from tests.faults.simulated_client import NO_TRACK, REWARD, Client, Ledger
from tests.faults.stepped_collector import Crash, Points, World

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
SECONDS = (0.3, 0.3, 1.5, 1.5, 1.5, 30.0, 30.0, 60.0)  # at once; 60 abandons what is quiet
MORE_CRASHES = 0.01  # at each later point


class History:
    """One seeded run. The same seed and points are the same history."""

    def __init__(
        self, seed: int, points: Points, make: type[World] = World, *, late: bool = False
    ) -> None:
        self.points = points
        self._chance = Random(seed)
        self.ledger = Ledger(late=late)
        self.failures: list[str] = []
        self.over = False  # a start failed, and so would the next one
        self.world = make(POLICIES, self._chance, points, LIMITS)
        self._clients = [Client(n, self.ledger, Random(seed + n)) for n in range(CLIENTS)]

    def run(self) -> None:
        for _ in range(TURNS):
            self.survive(self.turn)
        self.survive(self.end)

    def survive(self, action: Any) -> None:
        """Run an action; restart the collector if it dies or gives up meanwhile."""
        while not self.over:
            try:
                action()
                if self.world.collector.journal.failure is None:
                    return
                self.failures.append(repr(self.world.collector.journal.failure))
                if len(self.failures) > 3:
                    return
            except Crash:
                pass
            for client in self._clients:
                client.hang_up()
            self._start()

    def _start(self) -> None:
        try:
            self.world.start()
        except Exception as error:  # any exception that prevents a start is a violation
            self.failures.append(f"no start: {error!r}")
            self.over = True

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
        """Answer every client and end its episodes; abandon and seal the others."""
        world = self.world
        for last in (False, True):
            for client in self._clients:
                if last and client.idle:
                    client.compose(last=True)
                client.deliver(world)
        world.finish()
        if self.world.collector.journal.failure is None:
            self._start()
        if not self.over:
            world.pump()


# --- what has to hold in the end -----------------------------------------------------------------


def stored_steps(parts: Iterable[Part]) -> dict[int, list[float]]:
    """The rewards in the shards by step."""
    stored: dict[int, list[float]] = defaultdict(list)
    for part in parts:
        steps = np.frombuffer(part.obs, np.float32).tolist()
        for step, reward in zip(steps, np.frombuffer(part.rewards).tolist(), strict=True):
            stored[int(step)].append(reward)
    return stored


def _fits(found: float, reward: float, doubtful: int) -> bool:
    """Whether a stored reward is the acknowledged sum, with any of the unanswered ones added."""
    return any(math.isclose(found, reward + n * REWARD) for n in range(doubtful + 1))


def judge(history: History, verdict: Verdict, where: str) -> None:
    """Check every invariant that the end of a history can show."""
    world, ledger = history.world, history.ledger
    verdict.require(not history.failures, "failed", f"{where}: {history.failures}")
    if history.over:
        return
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
    verdict.require(not ledger.apart, "apart", f"{where}: {ledger.apart}")
    _judge_tracks(world, ledger, verdict, where)
    _judge_ordinals(world, verdict, where)
    _judge_leftovers(world, verdict, where)
    verdict.count("acknowledged", len(ledger.expected))
    verdict.count("window_closed", ledger.codes["window_closed"])
    verdict.count("lost", len(lost))
    verdict.count("doubled", len(doubled))


def _judge_tracks(world: World, ledger: Ledger, verdict: Verdict, where: str) -> None:
    """Every step has its agent and its environment step, and ends give the number of agents."""
    wrong = []
    for part in world.writer.parts:
        env_t = np.frombuffer(part.env_t, np.int64).tolist() or [NO_TRACK] * part.steps
        for step, t in zip(np.frombuffer(part.obs, np.float32).tolist(), env_t, strict=True):
            place = (part.episode_id, part.agent_id, t)
            if ledger.places.get(int(step)) != place:
                wrong.append((int(step), place))
        agents = ledger.agents.get((part.episode_id, part.agent_id)) if part.ended else NO_TRACK
        if part.agents != (NO_TRACK if part.ended == "abandoned" else agents):
            wrong.append((part.episode_id, part.agent_id, part.agents))
    verdict.require(not wrong, "misplaced", f"{where}: {wrong}")
    verdict.count("steps_of_tracks", sum(part.steps for part in world.writer.parts if part.env_t))


def _judge_ordinals(world: World, verdict: Verdict, where: str) -> None:
    streams: dict[str, list[int]] = defaultdict(list)
    episodes: dict[tuple[str, str], list[Part]] = defaultdict(list)
    for (stream, _, _), shard in world.writer.shards.items():
        streams[stream] += [part.ordinal for part in shard.parts]
    for stream, ordinals in streams.items():
        dense = sorted(ordinals) == list(range(world.journal.next_ordinal(stream)))
        verdict.require(dense, "hole", f"{where}: {stream} has {sorted(ordinals)}")
    for part in sorted(world.writer.parts, key=lambda part: part.part):
        episodes[part.episode_id, part.agent_id].append(part)
    for name, parts in episodes.items():
        numbers = [part.part for part in parts]
        ends = [part.ended is not None for part in parts]
        first = {part.episode_ordinal for part in parts} == {parts[0].ordinal}
        whole = numbers == list(range(len(parts))) and ends == [False] * (len(parts) - 1) + [True]
        verdict.require(whole and first, "parts", f"{where}: {name} has parts {numbers}, {ends}")
    verdict.require(not world.writer.conflicts, "hole", f"{where}: a plan came out differently")


def _judge_leftovers(world: World, verdict: Verdict, where: str) -> None:
    """Nothing is kept per episode except bounded counts and ranges."""
    assembler, sealing = world.collector.assembler, world.collector.sealing
    left = {
        "rows": [number for number, _ in world.journal.replay()],
        "plans": world.journal.plans(),
        "carries": list(world.journal.state(CARRY)),
        "episodes": [*assembler.episodes, *assembler.closing],
        "needed": assembler.needed,
        "ordinals": sealing._episode_ordinals,
        "bytes": world.collector.sealing.pending_bytes,
    }
    kept = {name: found for name, found in left.items() if found}
    verdict.require(not kept, "leaked", f"{where}: {kept}")
    totals = sealing.totals
    counted = (totals.steps, totals.rows) == (sum(p.steps for p in world.writer.parts),) * 2
    verdict.require(counted, "totals", f"{where}: {totals}")


def play(seed: int, crash: int | None) -> History:
    """The history of a seed, with further crashes after the first, and sometimes a full disk."""
    chance = Random(f"{seed} {crash}")
    crashes = set() if crash is None else {crash}
    if crash is not None:
        crashes |= {crash + n for n in range(1, 500) if chance.random() < MORE_CRASHES}
    full = {n for n in range(2, 200) if chance.random() < 0.02} if seed % 2 else set()
    history = History(seed, Points(crashes, full), late=True)
    history.run()
    return history


ALONE = 10
"""One history of so many comes without a crash, before the others: each is a script of its own."""


def run(trial: Trial) -> Verdict:
    verdict = Verdict(counts={"histories": 0, "crashes": 0, "scripts": 0})

    async def main() -> None:
        seed = trial.seed * 1_000_000
        while trial.goes_on(ALONE * verdict.counts["histories"], verdict):
            seed += 1
            _one(seed, None, verdict)
        while trial.goes_on(verdict.counts["histories"], verdict):
            seed += 1
            verdict.count("scripts")
            points = _one(seed, None, verdict)
            for crash in range(1, points + 1):
                if trial.is_caught(verdict):
                    break
                _one(seed, crash, verdict)

    with trial.planted(), quiet():
        asyncio.run(main())
    return verdict


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the collector's log, which would be long for a history of faults."""
    log = logging.getLogger("headrace")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def _one(seed: int, crash: int | None, verdict: Verdict) -> int:
    """Play and check one history; return its number of points."""
    try:
        history = play(seed, crash)
    except Exception as error:  # no history may make a collector raise this
        verdict.count("histories")
        verdict.require(False, "broke", f"history {seed}, crash at {crash}: {error!r}")
        return 0
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
    planted=12_500,  # some broken builds show in only one of five hundred histories
    run=run,
)
