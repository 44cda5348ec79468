"""A bad network between clients and the collector: see proxy.py for what it does.

`PolicyClient`s log episodes through it and retry until they get an answer. At the end each step is
in the shards exactly once, and

    attempts / acknowledged <= 1.2

attempts      requests that the clients sent to /v1/events, including those cut off or lost, but not
              the proxy's repetitions
acknowledged  batches of events that were answered
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path

import numpy as np

from ingest.client.policy_client import PolicyClient
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.faults.proxy import BadNetwork
from tests.faults.scenario import Scenario, Trial, Verdict

CLIENTS = 4
RATIO = 1.2
FLUSH_SECONDS = 60.0


class Logger(threading.Thread):
    """One client in a thread; every step has a reward that no other step has."""

    def __init__(self, address: str, number: int, episodes: int, trial: Trial) -> None:
        super().__init__()
        self._address, self._number, self._episodes = address, number, episodes
        self._trial = trial
        self._chance = random.Random(trial.seed + number)
        self.logged: list[float] = []
        self.error: str | None = None
        self.attempts = self.batches = 0

    def run(self) -> None:
        try:
            with PolicyClient(self._address, batch=16, timeout=FLUSH_SECONDS) as client:
                for _ in range(self._episodes):
                    if not self._trial.in_time:
                        break
                    self._episode(client)
                client.flush(FLUSH_SECONDS)
                self.batches = client.stats.batches
                self.attempts = client.stats.batches + client.stats.retries
        except Exception as error:  # the scenario reports any error
            self.error = repr(error)

    def _episode(self, client: PolicyClient) -> None:
        episode = client.start_episode()
        for _ in range(self._chance.randrange(1, 12)):
            reward = self._number * 1e6 + len(self.logged)
            obs = np.array([0.0, 1.0, 2.0, reward], "f4")
            client.log_action(episode, obs, self._chance.randrange(2))
            client.log_returns(episode, reward)
            self.logged.append(reward)
        client.end_episode(episode, obs)
        if self._chance.random() < 0.5:
            client.flush(FLUSH_SECONDS)


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    root = trial.folder / "root"
    declare(root, seal_seconds=0.3)
    with CollectorProcess(root, program=trial.program) as collector:
        with BadNetwork(collector.address, trial.seed) as network:
            loggers = [
                Logger(network.address, number, trial.size // CLIENTS, trial)
                for number in range(1, CLIENTS + 1)
            ]
            for logger in loggers:
                logger.start()
            for logger in loggers:
                logger.join()
        status = collector.stop()
    verdict.require(status == 0, "drain", f"expected exit status 0, got {status}")
    verdict.counts |= dict(network.counts)
    _judge(root, loggers, verdict)
    return verdict


def _judge(root: Path, loggers: list[Logger], verdict: Verdict) -> None:
    for logger in loggers:
        verdict.require(logger.error is None, "refused", logger.error)
    logged = Counter(reward for logger in loggers for reward in logger.logged)
    stored = Counter(row["rewards"] for row in shard_rows(root))
    lost, doubled = logged - stored, stored - logged
    verdict.require(not lost, "lost", f"{lost.total()}, such as {list(lost)[:3]}")
    verdict.require(not doubled, "doubled", f"{doubled.total()}, such as {list(doubled)[:3]}")
    attempts = sum(logger.attempts for logger in loggers)
    acknowledged = sum(logger.batches for logger in loggers)
    ratio = attempts / max(acknowledged, 1)
    verdict.require(ratio <= RATIO, "attempts", f"{attempts} for {acknowledged} batches")
    verdict.counts |= {
        "steps": logged.total(),
        "lost": lost.total(),
        "doubled": doubled.total(),
        "attempts": attempts,
        "acknowledged": acknowledged,
        "ratio": ratio,
    }


SCENARIO = Scenario(
    name="network",
    law="a bad network loses nothing, doubles nothing, and costs few attempts",
    unit="episodes",
    quick=2_000,
    long=40_000,
    planted=400,
    run=run,
    seconds=30.0,
)
