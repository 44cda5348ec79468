"""Ray's PPO learns from clients of a collector (`headrace.rllib.runner`)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import ray
from ray.rllib.algorithms.ppo import PPOConfig

from headrace.rllib.runner import HeadraceEnvRunner
from headrace.up import declare_live
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.reading.ledger import Ledger
from storage.reading.shard_reader import ShardReader, read_position
from storage.spaces.gymnasium_spaces import from_gym
from storage.weights.store import WeightFolder
from tests.collector_process import CollectorProcess

SPACES = gym.make("CartPole-v1")
GOAL = float(os.environ.get("HEADRACE_RLLIB_GOAL", "450"))
"""The mean return of Ray's last hundred episodes."""
BATCH, MOST_STEPS = (2_000 if GOAL > 100 else 400), 200_000
KILLS = {"runner", "collector"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
    yield
    ray.shutdown()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def config(batch: int, runners: int = 0, **where: Any) -> Any:
    return (
        PPOConfig()
        .environment(observation_space=SPACES.observation_space, action_space=SPACES.action_space)
        .env_runners(
            env_runner_cls=HeadraceEnvRunner.at(**where),
            num_env_runners=runners,
            num_cpus_per_env_runner=0,
        )
        .fault_tolerance(restart_failed_env_runners=True, env_runner_health_probe_timeout_s=30.0)
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "vf_share_layers": False})
        .training(
            train_batch_size_per_learner=batch,
            minibatch_size=128,
            num_epochs=10,
            lr=0.0003,
            gamma=0.99,
            lambda_=0.95,
            entropy_coeff=0.0,
            vf_clip_param=10_000.0,
        )
    )


@contextlib.contextmanager
def clients(address: str, poles: int = 8) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        sys.executable,
        "-m",
        "tests.rllib.cartpole_clients",
        f"http://{address}",
        str(poles),
    ]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def learnable(root: Path) -> tuple[list[tuple[str, int, int]], int]:
    """(stream, ordinal and t of the steps that can be learned from, those that are learned)."""
    columns = ["t", "has_new_obs", "action_logp"]
    saved = [read_position(root, one.stem)["ledger"] for one in (root / "readers").glob("rllib-*")]
    found, learned = [], 0
    with ShardReader(root, columns=columns) as reader:
        for batch in reader:
            known = batch["has_new_obs"] & np.isfinite(batch["action_logp"])
            rows = batch.take(known)
            names = ("stream", "ordinal", "t")
            found += list(zip(*(rows[name].tolist() for name in names), strict=True))
            for ledger in map(Ledger, saved):
                for stream in {*rows["stream"].tolist()}:
                    mine = rows["ordinal"][rows["stream"] == stream]
                    learned += int(ledger.contains(stream, mine).sum())
    return found, learned


def test_what_clients_did_is_what_ppo_samples(cluster: None, tmp_path: Path) -> None:
    """Each step of a version that clients waited for is sampled once; then they get the next."""
    root, address = tmp_path / "root", f"127.0.0.1:{free_port()}"
    algorithm = config(256, root=root, address=address).build_algo()
    assert "env_runners" not in algorithm.train()  # it returns although no client is there
    began = time.monotonic()
    with clients(address):
        results = [algorithm.train() for _ in range(3)]
    print(f"{3 * 256 / (time.monotonic() - began):.0f} steps/s")
    sampled = int(results[-1]["env_runners"]["num_env_steps_sampled_lifetime"])
    live = WeightFolder(root, "default").live()
    algorithm.stop()
    rows, learned = learnable(root)
    assert len({*rows}) == len(rows)
    assert sampled == learned >= 3 * 256
    assert live is not None
    assert live.version >= 4


def test_ppo_learns_while_a_runner_and_the_collector_are_killed(
    cluster: None, tmp_path: Path
) -> None:
    """Two runners share a collector. Both come back; no step is lost, or sampled by two."""
    root = tmp_path / "root"
    observation, action = from_gym(SPACES.observation_space), from_gym(SPACES.action_space)
    save_declaration(root, PolicyDeclaration(observation=observation, action=action))
    declare_live(root, "default", BATCH)
    with CollectorProcess(root) as collector:
        algorithm = config(BATCH, runners=2, root=root).build_algo()
        group = algorithm.env_runner_group
        address = collector.address.removeprefix("http://")
        steps, best, killed, began = 0, 0.0, set[str](), time.monotonic()
        with clients(address, poles=16):
            while (best < GOAL or killed != KILLS) and steps < MOST_STEPS:
                found = algorithm.train().get("env_runners", {})
                steps = int(found.get("num_env_steps_sampled_lifetime", steps))
                best = max(best, float(found.get("episode_return_mean", 0.0)))
                seconds = time.monotonic() - began
                print(f"{steps} steps, return {best:.0f}, {seconds:.0f} s", flush=True)
                if steps > 2 * BATCH and not killed:
                    killed.add("runner")
                    pids = group.foreach_env_runner(lambda _: os.getpid(), local_env_runner=False)
                    os.kill(pids[0], signal.SIGKILL)
                elif steps > 5 * BATCH and killed != KILLS:
                    killed.add("collector")
                    collector.kill()
                    collector.restart()
        assert killed == KILLS
        before = -1
        while before != steps:  # what the clients left
            before, found = steps, algorithm.train().get("env_runners", {})
            steps = int(found.get("num_env_steps_sampled_lifetime", steps))
        rows, learned = learnable(root)
        healthy = group.num_healthy_remote_workers()
        algorithm.stop()
        assert collector.stop() == 0
    assert len({*rows}) == len(rows)
    assert learned == len(rows)
    assert healthy == 2
    assert best >= GOAL
