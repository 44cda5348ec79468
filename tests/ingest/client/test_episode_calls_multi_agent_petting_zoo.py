"""PettingZoo through HTTP: clients, collector, shards, joint batches, training, clients again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from pettingzoo.test.example_envs import generated_agents_parallel_v0

from headrace import PolicyClient, PolicyServerInput, RolloutWorker
from policy.algorithms.ppo import PPOConfig
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from policy.training.settings import FollowSettings
from policy.training.train_live import follow
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.reading.multi_agent_reader import MultiAgentReader
from storage.reading.shard_reader import ShardReader
from storage.spaces.gymnasium_spaces import from_gym
from tests.collector_process import CollectorProcess
from tests.ingest.petting_zoo import Nim, play_parallel, play_turns

SEED, STEPS = 17, 25  # three kinds of agents; five are there at the start, twelve join, eight leave


def spec_of(env: Any, agent: str) -> PolicySpec:
    spaces = from_gym(env.observation_space(agent)), from_gym(env.action_space(agent))
    return PolicySpec(*spaces, ModuleSpec(hidden=(8,)))


def declared(policy_id: str, spec: PolicySpec, **rules: Any) -> PolicyDeclaration:
    return PolicyDeclaration(
        policy_id=policy_id,
        observation=spec.observation,
        action=spec.action,
        spec=spec.to_json(),
        **rules,
    )


def kind_of(agent: str) -> str:
    return agent.partition("_")[0]


def publish(root: Path, name: str, spec: PolicySpec, weights: Any) -> int:
    store = WeightStore(root, name)
    digest = store.add_candidate(weights, spec=spec.to_json(), metrics={}, lineage={})
    return store.publish(digest).version


def test_agents_that_come_and_go_are_trained_by_kind_and_act_with_the_new_version(
    tmp_path: Path,
) -> None:
    """Three kinds of agents each have their own spaces and policy. One kind is trained: clients act
    with its new versions, while the others' weights and versions stay bit-identical."""
    env = generated_agents_parallel_v0.parallel_env()
    env.reset(seed=SEED)
    specs = {kind: spec_of(env, f"{kind}_0") for kind in ("type0", "type1", "type2")}
    initial = {}
    for name, spec in specs.items():
        save_declaration(tmp_path, declared(name, spec, seal_seconds=0.2))
        initial[name] = Policy(spec, seed=1).get_weights()
        publish(tmp_path, name, spec, initial[name])
    with (
        CollectorProcess(tmp_path) as collector,
        PolicyClient(collector.address, update_interval=0, policy_mapping_fn=kind_of) as client,
        RolloutWorker(
            policy=specs,
            policies_to_train=["type0"],
            input_creator=lambda context: MultiAgentReader(
                context.log_dir, follow=True, batch_size=STEPS, columns=PPOConfig.columns
            ),
            log_dir=str(tmp_path),
            rollout_fragment_length=1,
        ) as worker,
    ):
        worker.set_weights(initial)
        for version in (1, 2):
            acted = play_parallel(env, client, seed=SEED, steps=STEPS)
            client.flush()
            batch = worker.sample()
            assert (batch.env_steps(), batch.agent_steps()) == (STEPS, acted)
            versions = {
                name: set(rows["policy_version"]) for name, rows in batch.policy_batches.items()
            }
            assert versions == {"type0": {version}, "type1": {1}, "type2": {1}}
            assert len(np.unique(batch["type0"]["agent_id"])) > 2
            assert list(worker.learn_on_batch(batch)) == ["type0"]
            assert (
                publish(tmp_path, "type0", specs["type0"], worker.get_weights()["type0"])
                == version + 1
            )
    for name, known in initial.items():
        live = WeightStore(tmp_path, name).live()
        weights = WeightStore(tmp_path, name).load(live.version)[1]
        same = all(weights[key].tobytes() == known[key].tobytes() for key in known)
        assert (live.version, same) == ((3, False) if name == "type0" else (1, True))


def test_a_turn_based_game_reaches_the_trainer_live() -> None:
    """A turn is a step of the environment in which one agent acts. Whole games leave the collector
    in the trainer's process as joint batches, and clients act with the versions published next."""
    env = Nim()
    specs = {kind_of(agent): spec_of(env, agent) for agent in env.possible_agents}
    with (
        PolicyServerInput(
            None,
            "127.0.0.1",
            0,
            policies=[declared(name, spec) for name, spec in specs.items()],
            multi_agent=True,
            eager=False,
            batch_size=30,
            idle_timeout=60.0,
            columns=PPOConfig.columns,
        ) as inputs,
        RolloutWorker(policy=specs, policies_to_train=["left"]) as worker,
        PolicyClient(inputs.address, update_interval=0, policy_mapping_fn=kind_of) as client,
    ):
        frozen = worker.get_weights()["right"]
        for name in specs:
            inputs.publish(worker.policies[name], policy_id=name)
        for version in (1, 2):
            turns = 0
            while turns < 30:
                turns += play_turns(env, client)
            client.flush()
            batch = inputs.next()
            assert (batch.env_steps(), batch.agent_steps()) == (turns, turns)
            assert set(batch["left"]["policy_version"]) == {version}
            assert set(batch["right"]["policy_version"]) == {1}
            for game in batch.split_by_episode():
                moves = sorted(
                    (int(t), name)
                    for name, rows in game.policy_batches.items()
                    for t in rows["env_t"]
                )
                assert moves == [(t, ("left", "right")[t % 2]) for t in range(len(moves))]
                paid = [float(rows["rewards"].sum()) for rows in game.policy_batches.values()]
                assert sorted(paid) == [-1.0, 1.0]
            assert list(worker.learn_on_batch(batch)) == ["left"]
            assert inputs.publish(worker.policies["left"], policy_id="left") == version + 1
        after = worker.get_weights()["right"]
        assert all(frozen[key].tobytes() == after[key].tobytes() for key in frozen)
        assert inputs.next(0.0).env_steps() == 0


def test_one_policy_is_followed_under_flow_control_beside_a_frozen_one(tmp_path: Path) -> None:
    """`follow` trains a policy on its agents' steps while they play against a frozen one. Clients
    wait for each version, and the frozen policy's version acts throughout."""
    env, updates = Nim(), 3
    specs = {kind_of(agent): spec_of(env, agent) for agent in env.possible_agents}
    quick = {"part_seconds": 0.2, "seal_seconds": 0.2}
    for name, rules in (("left", {"steps_per_version": 60}), ("right", {})):
        save_declaration(tmp_path, declared(name, specs[name], **quick, **rules))
        publish(tmp_path, name, specs[name], Policy(specs[name], seed=1).get_weights())
    reports: list[Any] = []
    over = Event()
    with (
        CollectorProcess(tmp_path) as collector,
        PolicyClient(collector.address, policy_mapping_fn=kind_of) as client,
        ThreadPoolExecutor() as pool,
    ):
        training = pool.submit(
            follow,
            tmp_path,
            "left",
            PPOConfig(epochs=1),
            FollowSettings(steps_per_update=60),
            stop=lambda: len(reports) >= updates or over.is_set(),
            on_update=reports.append,
        )
        try:
            while not training.done():
                play_turns(env, client)
        finally:
            over.set()
        client.flush()
        result = training.result()
    assert (result.updates, result.rows_trained) == (updates, 60 * updates)
    assert result.version == 1 + updates
    assert max(metrics["policy_lag_max"] for metrics in reports) <= 1
    versions = {}
    for name in specs:
        with ShardReader(tmp_path, policy_id=name) as reader:
            versions[name] = {int(v) for batch in reader for v in batch["policy_version"]}
    assert versions["right"] == {1}
    assert versions["left"] >= {1, 2, 3}
    assert WeightStore(tmp_path, "right").versions() == [1]
