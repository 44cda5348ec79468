"""Ray's BC and MARWIL learn CartPole from a log (`headrace.rllib`).

BC reads the root in place (`RootData`), MARWIL whole episodes from an export. Each has to act
better than the log, whose actions are wrong one time in four.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import ray
import torch
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.marwil import MARWILConfig

from headrace.rllib.offline import RootData
from policy.exporting.opening import export
from storage.experience.sample_batch import SampleBatch
from storage.shards.output_writer import ParquetOutputWriter
from storage.spaces.gymnasium_spaces import from_gym
from tests.policy.exporting.written_log import selection

ROWS = 3_000


def write_cartpole(root: Path, rows: int, wrong: float) -> float:
    """Write episodes of a rule that balances, with wrong actions; returns their mean return."""
    env, rng = gym.make("CartPole-v1"), np.random.default_rng(3)
    spaces = from_gym(env.observation_space), from_gym(env.action_space)
    writer = ParquetOutputWriter(root, {"default": spaces})
    returns: list[float] = []
    while sum(returns) < rows:
        obs, _ = env.reset(seed=len(returns))
        seen, actions, over = [obs], [], False
        while not over:
            good = int(obs[2] + 0.5 * obs[3] + 0.02 * obs[1] + 0.01 * obs[0] > 0)
            actions.append(good if rng.random() > wrong else 1 - good)
            obs, _, terminated, truncated, _ = env.step(actions[-1])
            seen.append(obs)
            over = terminated or truncated
        last = np.arange(len(actions)) == len(actions) - 1
        columns = {
            "obs": np.array(seen[:-1]),
            "new_obs": np.array(seen[1:]),
            "actions": np.array(actions),
            "rewards": np.ones(len(actions)),
            "terminateds": last & terminated,
            "truncateds": last & (not terminated),
            "has_new_obs": np.ones(len(actions), bool),
            "t": np.arange(len(actions)),
            "eps_id": np.full(len(actions), f"e{len(returns)}", object),
        }
        writer.write(SampleBatch(columns))
        returns.append(float(len(actions)))
    return float(np.mean(returns))


def greedy_return(module: Any, episodes: int = 10) -> float:
    env, total = gym.make("CartPole-v1"), 0.0
    for seed in range(episodes):
        obs, _ = env.reset(seed=1000 + seed)
        over = False
        while not over:
            with torch.no_grad():
                out = module.forward_inference({"obs": torch.from_numpy(obs)[None]})
            obs, reward, terminated, truncated, _ = env.step(
                int(out["action_dist_inputs"].argmax())
            )
            total, over = total + float(reward), terminated or truncated
    return total / episodes


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize("name", ["bc", "marwil"])
def test_an_algorithm_acts_better_than_its_log(name: str, cluster: None, tmp_path: Path) -> None:
    """Its greedy policy has twice the log's return."""
    logged = write_cartpole(tmp_path / "root", ROWS, 0.25)
    env = gym.make("CartPole-v1")
    config: Any = BCConfig() if name == "bc" else MARWILConfig()
    config.environment(observation_space=env.observation_space, action_space=env.action_space)
    config.training(lr=0.003, train_batch_size_per_learner=500)
    given: dict[str, Any] = {"offline_data_class": RootData, "input_": [str(tmp_path / "root")]}
    if name == "marwil":
        export(selection(tmp_path / "root", "default"), "rllib-episodes", tmp_path / "out")
        given = {"input_": [str(tmp_path / "out")], "input_read_episodes": True}
        given |= {"input_read_batch_size": 8}
    config.offline_data(**given, dataset_num_iters_per_learner=20)
    algorithm = config.build_algo()
    began, best, iterations = time.monotonic(), 0.0, 0
    while best < 2 * logged and iterations < 20:
        algorithm.train()
        iterations += 1
        module = algorithm.learner_group._learner.module["default_policy"]
        best = max(best, greedy_return(module))
    seconds = round(time.monotonic() - began)
    print(f"{name}: log {logged:.0f}, greedy {best:.0f}, {iterations} iterations, {seconds} s")
    algorithm.stop()
    assert best >= 2 * logged
