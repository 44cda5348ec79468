"""One program, run against a worker in its process and against a collector: the same steps."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingest.client import PolicyClient
from ingest.external_env import ExternalEnv
from policy.policy import Policy
from policy.spec import ModuleSpec, PolicySpec
from storage.spaces import parse_space
from storage.weights import WeightStore
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.ingest.external_worker import Seen, Worker

OBSERVATION, ACTION = parse_space("box:4"), parse_space("discrete:2")
SPEC = PolicySpec(OBSERVATION, ACTION, ModuleSpec(hidden=()))


def decide(observation: Any) -> int:
    """What the published policy does, for it is all but certain of it."""
    return int(observation[0] > 0)


def publish(root: Path) -> None:
    """A policy that decides as `decide` does."""
    weights = {name: np.zeros_like(w) for name, w in Policy(SPEC).get_weights().items()}
    (name,) = (name for name, w in weights.items() if w.shape == (2, 4))
    weights[name][:, 0] = [-1000.0, 1000.0]
    store = WeightStore(root, "default")
    store.publish(store.add_candidate(weights, spec=SPEC.to_json(), metrics={}, lineage={}))


class Shop(ExternalEnv):
    """Every way to make an episode, the same each time."""

    def run(self) -> None:
        rng = np.random.default_rng(4)
        found = rng.uniform(-1, 1, (100, 4)).astype(np.float32)
        found[:, 0] = np.sign(found[:, 0])  # so that the policy is certain
        observations = iter(found)
        for i in range(8):
            name = self.start_episode(f"e{i}", training_enabled=i != 3)
            for t in range(i):
                if (i + t) % 3:
                    observation = next(observations)
                    assert self.get_action(name, observation) == decide(observation)
                elif t % 2:
                    self.log_action(name, next(observations), t % 2, action_prob=0.25)
                else:
                    self.log_action(name, next(observations), t % 2)
                if t != 2:
                    self.log_returns(name, 0.5 * t, {"t": t} if t % 2 else None)
                    self.log_returns(name, float(i))
            self.end_episode(name, None if i == 4 else next(observations), truncated=i % 2 == 1)


class Broken(ExternalEnv):
    def run(self) -> None:
        self.log_action(self.start_episode("kept"), np.zeros(4), 1)
        raise LookupError("no such shop")


def by_worker() -> dict[str, Seen]:
    return Worker(Shop(ACTION, OBSERVATION).to_base_env(), decide).run()


def by_collector(rows: list[dict[str, Any]]) -> dict[str, Seen]:
    """The rows of shards in the form of what a worker saw."""
    episodes: defaultdict[str, Seen] = defaultdict(Seen)
    for row in sorted(rows, key=lambda row: (row["eps_id"], row["t"])):
        seen = episodes[row["eps_id"]]
        seen.training_enabled = row["training_enabled"]
        info = json.loads(row["infos"]) if isinstance(row["infos"], str) else {}
        obs, action = row["obs"].tolist(), row["actions"]
        seen.steps.append([obs, action, row["rewards"], info, row["source"]])
        if row["source"] == "logged":
            seen.logged.append(None if np.isnan(row["action_logp"]) else row["action_logp"])
        if isinstance(row["ended"], str):  # pandas shows a null as NaN
            seen.ended = row["ended"]
            final = row["final_obs"]
            known = isinstance(final, bytes)
            seen.final_obs = np.frombuffer(final, np.float32).tolist() if known else None
    return dict(episodes)


@pytest.mark.parametrize("mode", ["local", "remote"])
def test_one_program_both_ways_makes_the_same_steps(tmp_path: Path, mode: str) -> None:
    """Observations, actions, rewards, infos, sources, propensities, endings are equal.

    Row: end_episode(episode_id, obs)
    """
    declare(tmp_path)
    publish(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        if mode == "local":  # an address: the environment makes its client, and delivers all of it
            env = Shop(ACTION, OBSERVATION, collector=collector.address)
            env.start()
            env.join()
        else:
            with PolicyClient(collector.address, inference_mode="remote") as client:
                env = Shop(ACTION, OBSERVATION, collector=client)
                env.start()
                env.join()
        with pytest.raises(ValueError, match="go to a collector; train from its shards"):
            env.to_base_env()
        assert collector.stop() == 0
    stored = by_collector(shard_rows(tmp_path))
    seen = by_worker()
    empty = seen.pop("e0")  # an episode without steps leaves no rows
    assert (empty.steps, empty.ended) == ([], "terminated")
    for episode in seen.values():
        episode.logged = [logged.logp for logged in episode.logged]
    assert sum(len(episode.steps) for episode in seen.values()) == 28
    assert stored == seen


def test_an_error_of_run_surfaces_in_join_and_what_was_logged_is_delivered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a collector nobody polls: join raises the program's own exception."""
    declare(tmp_path, episode_timeout=0.1)
    with CollectorProcess(tmp_path) as collector, caplog.at_level(logging.ERROR):
        env = Broken(ACTION, OBSERVATION, collector=collector.address)
        env.start()
        with pytest.raises(LookupError, match="no such shop"):
            env.join()
        status, episode = collector.get("/v1/episodes/kept")
        assert (status, episode["steps"]) == (200, 1)
        assert collector.stop() == 0
    assert "Broken: run() raised LookupError('no such shop')" in caplog.text
