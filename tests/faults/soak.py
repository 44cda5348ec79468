"""Very many episodes: the collector's memory, files and threads do not grow with their number.

Episodes, one in five of two agents, come in batches over always new connections and client
instances, and the shard writer is killed now and then. Between rounds, at rest, the collector
reports its use (measured_collector.py). During the first fifth the writer is stopped for a round:
this makes the largest backlog of the run, so that memory which a backlog takes and keeps (SQLite's
cache, the arenas of small objects) is taken before anything is compared. From then on

    objects and blocks of memory   less than 0.1 more per episode
    files and threads              none more
    bytes in memory                at most 16 more per episode over the second half of a run of
                                   100,000 or more; before that the allocator still takes its steps
                                   of a megabyte
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import urllib3

from tests.collector_process import PLAIN, CollectorProcess, declare
from tests.faults.power_loss import wait_until
from tests.faults.scenario import Scenario, Trial, Verdict

SEVERAL = 5  # one episode in this many has two agents
STEP = {"type": "log_action", "obs": [0.0, 1.0, 2.0, 3.0], "action": 1}
ROUNDS = 20
BATCH = 50
WARM_ROUNDS = 4
BLOCKS, BYTES = 0.1, 16.0
JUDGE_BYTES_FROM = 100_000
PATIENCE = 30.0


class Rounds:
    """Sends episodes of one to three steps of each agent."""

    def __init__(self, collector: CollectorProcess, chance: random.Random) -> None:
        self._collector, self._chance = collector, chance
        self.episodes = self.steps = self._starts = 0

    def send(self, episodes: int) -> None:
        """One client instance on connections of its own."""
        with urllib3.PoolManager(retries=False, timeout=30.0) as pool:
            instance = self._post(pool, "/v1/instances", {})["instance"]
            self._starts = 0
            for first in range(0, episodes, BATCH):
                batch = range(first, min(first + BATCH, episodes))
                events = [event for _ in batch for event in self._episode()]
                answer = self._post(pool, "/v1/events", {"instance": instance, "events": events})
                if answer.get("refused"):
                    raise RuntimeError(f"refused: {answer['refused'][0]}")

    def _episode(self) -> list[dict[str, Any]]:
        name = f"episode-{self.episodes}"
        self.episodes += 1
        if self.episodes % SEVERAL:
            return self._track({"episode_id": name}, {})
        agents = [{"episode_id": name, "agent_id": agent} for agent in ("agent0", "b")]
        return [event for agent in agents for event in self._track(agent, {"agents": len(agents)})]

    def _track(self, whose: dict[str, Any], fields: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a lone agent's episode, or of one agent of several."""
        steps = self._chance.randrange(1, 4)
        self.steps += steps
        events = [{"type": "start", **whose, "start": self._starts}]
        self._starts += 1
        for seq in range(1, steps + 1):
            step = {**STEP, **whose, "seq": seq, "reward": float(seq)}
            events.append({**step, "env_t": seq} if fields else step)
        return [*events, {"type": "end", **whose, **fields, "seq": steps + 1}]

    def _post(self, pool: urllib3.PoolManager, path: str, body: Any) -> Any:
        headers = {"content-type": "application/msgpack"}
        url, data = self._collector.address + path, msgspec.msgpack.encode(body)
        while True:
            answer = pool.request("POST", url, body=data, headers=headers)
            if answer.status < 300:
                return msgspec.msgpack.decode(answer.data)
            if answer.status != 429:
                raise RuntimeError(f"{answer.status}: {answer.data!r:.200}")
            wait_until(lambda: False, float(answer.headers["retry-after"]))

    def rest(self) -> None:
        """Wait until all steps are in shards."""

        def is_idle() -> bool:
            counts = self._collector.get("/readyz")[1]
            idle: bool = counts["episodes_open"] == counts["bytes_waiting"] == 0
            return idle

        if not wait_until(is_idle, PATIENCE):
            raise TimeoutError("the collector does not come to rest")


def ask(folder: Path) -> dict[str, int]:
    """The collector's current use of memory, files and threads."""
    (folder / "answer").unlink(missing_ok=True)
    (folder / "ask").touch()
    if not wait_until((folder / "answer").exists, PATIENCE):
        raise TimeoutError("the collector does not answer")
    found: dict[str, int] = json.loads((folder / "answer").read_text())
    return found


def run(trial: Trial) -> Verdict:
    verdict, chance = Verdict(), random.Random(trial.seed)
    root, samples = trial.folder / "root", []
    declare(root, seal_seconds=0.2)
    mutant = trial.mutant.name if trial.mutant else "none"
    program = ("-m", "tests.faults.measured_collector", str(trial.folder), mutant, PLAIN)
    with CollectorProcess(root, program=program) as collector:
        rounds = Rounds(collector, chance)
        for number in range(ROUNDS):
            writer = collector.writer_pid()
            with contextlib.ExitStack() as stack:
                if number < WARM_ROUNDS and writer is not None:
                    os.kill(writer, signal.SIGSTOP)
                    stack.callback(os.kill, writer, signal.SIGCONT)
                rounds.send(trial.size // ROUNDS)
            rounds.rest()
            samples.append((rounds.episodes, ask(trial.folder)))
            if number % 5 == 3 and writer is not None:
                os.kill(writer, signal.SIGKILL)
        totals = collector.get("/readyz")[1]
        status = collector.stop()
    verdict.require(status == 0, "drain", f"expected exit status 0, got {status}")
    stored = totals["steps_in_shards"]
    verdict.require(stored == rounds.steps, "lost", f"{stored} of {rounds.steps} steps")
    verdict.counts |= {"episodes": rounds.episodes, "steps": rounds.steps}
    _judge(samples[WARM_ROUNDS:], verdict)
    return verdict


def growth(samples: list[tuple[int, dict[str, int]]], name: str) -> float:
    """The growth per episode: the minimum of the later samples minus that of the earlier ones.

    Minima, because a quantity that is bounded by a count fluctuates below its bound.
    """
    half = len(samples) // 2
    early, late = samples[:half], samples[half:]
    least = [min(held[name] for _, held in part) for part in (early, late)]
    return (least[1] - least[0]) / (late[0][0] - early[0][0])


def _judge(samples: list[tuple[int, dict[str, int]]], verdict: Verdict) -> None:
    for name in ("objects", "blocks"):
        slope = growth(samples, name)
        verdict.counts[f"{name}_per_episode"] = slope
        verdict.require(slope <= BLOCKS, name, f"{slope:.3f} more per episode")
    latest = samples[-ROUNDS // 2 :]
    episodes = [number for number, _ in latest]
    slope = float(np.polyfit(episodes, [held["resident"] for _, held in latest], 1)[0])
    verdict.counts["bytes_per_episode"] = slope
    if episodes[-1] >= JUDGE_BYTES_FROM:
        verdict.require(slope <= BYTES, "bytes", f"{slope:.1f} more per episode")
    for name in ("files", "threads"):
        first, last = samples[0][1][name], samples[-1][1][name]
        verdict.counts[name] = last
        verdict.require(last <= first, name, f"{last}, and it had {first}")


SCENARIO = Scenario(
    name="soak",
    law="memory, files and threads do not grow with the number of episodes",
    unit="episodes",
    quick=20_000,
    long=200_000,
    planted=20_000,
    run=run,
)
