"""One program, run against a worker in its process and against a collector: the same steps."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingest.client.policy_client import PolicyClient
from ingest.embedded.external_env import ExternalEnv
from ingest.embedded.external_multi_agent_env import ExternalMultiAgentEnv
from ingest.protocol.errors import ServingStopped
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.spaces.descriptors import parse_space
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.ingest.external_worker import Seen, Worker

OBSERVATION, ACTION = parse_space("box:4"), parse_space("discrete:2")
SPEC = PolicySpec(OBSERVATION, ACTION, ModuleSpec(hidden=()))


def decide(observation: Any) -> int:
    """The action of the published policy, which is all but deterministic."""
    return int(observation[0] > 0)


def publish(root: Path, policy_id: str = "default", spec: PolicySpec = SPEC) -> None:
    """A policy that decides as `decide` does."""
    weights = {name: np.zeros_like(w) for name, w in Policy(spec).get_weights().items()}
    (name,) = (name for name, w in weights.items() if w.ndim == len(w) == 2)
    weights[name][:, 0] = [-1000.0, 1000.0]
    store = WeightStore(root, policy_id)
    store.publish(store.add_candidate(weights, spec=spec.to_json(), metrics={}, lineage={}))


class Shop(ExternalEnv):
    """Makes episodes in every possible way, the same each time."""

    def run(self) -> None:
        rng = np.random.default_rng(4)
        found = rng.uniform(-1, 1, (100, 4)).astype(np.float32)
        found[:, 0] = np.sign(found[:, 0])  # makes the policy certain
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
    """The rows of shards in the format of the worker's record."""
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
            seen.final_obs = final.tolist() if isinstance(final, np.ndarray) else None
    return dict(episodes)


@pytest.mark.parametrize("mode", ["local", "remote"])
def test_one_program_both_ways_makes_the_same_steps(tmp_path: Path, mode: str) -> None:
    """Observations, actions, rewards, infos, sources, propensities, endings are equal.

    Row: end_episode(episode_id, obs)
    """
    declare(tmp_path)
    publish(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        if mode == "local":  # an address: the environment creates its client
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
    """With a collector there is no poll: join raises the program's own exception."""
    declare(tmp_path)
    with CollectorProcess(tmp_path) as collector, caplog.at_level(logging.ERROR):
        env = Broken(ACTION, OBSERVATION, collector=collector.address)
        env.start()
        with pytest.raises(LookupError, match="no such shop"):
            env.join()
        status, episode = collector.get("/v1/episodes/kept")
        assert (status, episode["steps"]) == (200, 1)
        assert collector.stop() == 0
    assert "Broken: run() raised LookupError('no such shop')" in caplog.text


# --- several agents ---------------------------------------------------------------------------

BIRD = PolicySpec(parse_space("box:2"), parse_space("discrete:2"), ModuleSpec(hidden=()))


class Match(ExternalMultiAgentEnv):
    """Agents of two policies that act together, in turns, join late and leave early."""

    def run(self) -> None:
        rng = np.random.default_rng(5)

        def see(*agents: str) -> dict[str, Any]:
            found = {a: rng.uniform(-1, 1, 2 if a == "bird" else 4) for a in agents}
            return {a: np.sign(x).astype(np.float32) for a, x in found.items()}

        for i in range(3):
            name = self.start_episode(f"m{i}", training_enabled=i != 1)
            observations = see("bird", "agent0")
            acted = self.get_action(name, observations)
            assert acted == {a: decide(x) for a, x in observations.items()}
            self.log_returns(name, {"bird": 1.0}, {"agent0": {"i": i}})
            self.log_returns(name, {"bird": 0.5, "agent0": 2.0})
            self.log_action(name, see("bird"), {"bird": 1}, action_prob={"bird": 0.25})
            self.get_action(name, see("bird", "late"))
            self.log_returns(name, {"bird": -1.0}, multiagent_done_dict={"bird": True})
            self.get_action(name, see("bird", "late") if i else see("late"))
            self.log_returns(name, {"agent0": 3.0, "late": 4.0})
            self.log_returns(name, {}, None, {"late": i == 2})
            self.end_episode(name, see("agent0", "late"), truncated=i > 0)


def agents_by_worker() -> dict[tuple[str, str], Seen]:
    """The record of a worker in the process for each agent, as `Worker` keeps it for one."""
    spaces = {"bird": BIRD.observation, "agent0": OBSERVATION, "late": OBSERVATION}
    base = Match(ACTION, spaces).to_base_env()
    found: defaultdict[tuple[str, str], Seen] = defaultdict(Seen)
    while True:
        try:
            poll = base.poll()
        except ServingStopped as stopped:
            if stopped.__cause__ is not None:
                raise
            return dict(found)
        actions: dict[str, dict[str, int]] = {}
        for name, obs in poll[0].items():
            rewards, terminateds, truncateds, infos = (news[name] for news in poll[1:5])
            for agent in rewards:
                seen, info = found[name, agent], dict(infos[agent])
                seen.training_enabled = info.pop("training_enabled", True)
                if seen.steps and seen.ended is None:
                    step = seen.steps[-1]
                    step[2:4] = [step[2] + rewards[agent], step[3] | info]
            for agent in rewards:
                over = terminateds[agent] or truncateds[agent]
                if over and found[name, agent].ended is None:
                    how = "terminated" if terminateds[agent] else "truncated"
                    found[name, agent].ended = how
                    final = obs.get(agent)
                    found[name, agent].final_obs = None if final is None else final.tolist()
            logged = poll[5].get(name, {})
            for agent, value in obs.items():
                if found[name, agent].ended is not None:
                    continue
                own = logged.get(agent)
                action = decide(value) if own is None else own.action
                if own is None:
                    actions.setdefault(name, {})[agent] = action
                else:
                    found[name, agent].logged.append(own.logp)
                source = "on_policy" if own is None else "logged"
                found[name, agent].steps.append([value.tolist(), action, 0.0, {}, source])
        base.send_actions(actions)


def agents_by_collector(rows: list[dict[str, Any]]) -> dict[tuple[str, str], Seen]:
    """Each agent's rows, as `by_collector` reads those of an episode."""
    found = {}
    for name, agent in {(row["eps_id"], row["agent_id"]) for row in rows}:
        own = [row for row in rows if (row["eps_id"], row["agent_id"]) == (name, agent)]
        (found[name, agent],) = by_collector(own).values()
    return found


@pytest.mark.parametrize("mode", ["local", "remote"])
def test_one_program_of_several_agents_both_ways_makes_the_same_steps(
    tmp_path: Path, mode: str
) -> None:
    """A program of several agents makes equal steps, endings and final observations with a worker
    and with a collector."""
    for name, observation, spec in (("walker", "box:4", SPEC), ("bird", "box:2", BIRD)):
        declare(tmp_path, observation, policy_id=name)
        publish(tmp_path, name, spec)

    def policy_of(agent: str) -> str:
        return "bird" if agent == "bird" else "walker"

    spaces = (ACTION, OBSERVATION)
    with CollectorProcess(tmp_path) as collector:
        if mode == "local":
            address = collector.address
            env = Match(*spaces, collector=address, policy_mapping_fn=policy_of)
            env.start()
            env.join()
        else:
            with PolicyClient(
                collector.address, inference_mode="remote", policy_mapping_fn=policy_of
            ) as client:
                env = Match(*spaces, collector=client)
                env.start()
                env.join()
                with pytest.raises(ValueError, match="Shop got a PolicyClient with a policy_map"):
                    Shop(*spaces, collector=client)
        assert collector.stop() == 0
    stored, seen = agents_by_collector(shard_rows(tmp_path)), agents_by_worker()
    assert len(seen) == 9
    assert stored == seen


def test_an_environment_of_several_agents_needs_a_client_with_a_mapping() -> None:
    """The mapping goes with an address only: a worker and a client have their own."""
    client = PolicyClient("localhost:1")
    with pytest.raises(ValueError, match="Match got a PolicyClient with no policy_mapping_fn"):
        Match(ACTION, OBSERVATION, collector=client)
    with pytest.raises(ValueError, match="expected one only with a collector's address"):
        Match(ACTION, OBSERVATION, policy_mapping_fn=str)
