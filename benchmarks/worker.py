"""`RolloutWorker.sample()` for a vectorised CartPole, compared with its parts and with a peer.

Eight copies of CartPole-v1, 128 steps of each per round, a policy and a value network of 2 x 64,
one thread. The three alternate by round, so that noise on the machine affects all of them:

- the bare gymnasium vector env with random actions, an upper bound for any sampler;
- Stable-Baselines3's PPO collecting its rollouts (forward pass, buffer, advantages);
- the worker's `sample()` (forward pass, columns, identity of the rows, advantages).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.report import Figure, render
from policy.worker.rollout_worker import RolloutWorker

ENVS, STEPS, ROUNDS = 8, 128, 15
ENV = "CartPole-v1"


def bare() -> Callable[[], int]:
    """Steps of the vector env alone, without the dummy steps of its autoreset."""
    env = gymnasium.make_vec(ENV, num_envs=ENVS, vectorization_mode="sync")
    env.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 2, (STEPS, ENVS))

    def play() -> int:
        dummies = 0
        for row in actions:
            _, _, terminated, truncated, _ = env.step(row)
            dummies += int((terminated | truncated).sum())
        return STEPS * ENVS - dummies

    return play


def peer() -> Callable[[], int]:
    """Stable-Baselines3's collection of rollouts."""
    model = PPO("MlpPolicy", DummyVecEnv([partial(gymnasium.make, ENV)] * ENVS), n_steps=STEPS)
    model.policy.set_training_mode(False)
    model._setup_learn(10**9)  # as `learn` does before it collects
    callback = CallbackList([])
    callback.init_callback(model)

    def play() -> int:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, STEPS)
        return STEPS * ENVS

    return play


def worker(**more: Any) -> Callable[[], int]:
    """The worker's `sample`."""
    made = RolloutWorker(
        lambda context: gymnasium.make(ENV),
        num_envs=ENVS,
        rollout_fragment_length=STEPS,
        seed=1,
        **more,
    )
    return lambda: made.sample().count


def rates(plays: dict[str, Callable[[], int]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Steps per second of each, one figure per round; they alternate after a warm-up round."""
    found: dict[str, list[float]] = {name: [] for name in plays}
    for number in range(rounds + 1):
        for name, play in plays.items():
            begin = time.perf_counter()
            steps = play()
            if number:
                found[name].append(steps / (time.perf_counter() - begin))
    return found


def run() -> list[Figure]:
    """Medians over the rounds."""
    torch.set_num_threads(1)
    plays = {"bare": bare(), "peer": peer(), "worker": worker()}
    found = {name: statistics.median(values) for name, values in rates(plays).items()}
    return [
        Figure(
            name="worker.sample(), 8 CartPoles, 2x64",
            value=found["worker"],
            unit="steps/s",
            baseline_name="Stable-Baselines3's collection",
            baseline_value=found["peer"],
            aim=">= 1",
        ),
        Figure(
            name="worker.sample(), 8 CartPoles, 2x64",
            value=found["worker"],
            unit="steps/s",
            baseline_name="the bare gymnasium vector env",
            baseline_value=found["bare"],
        ),
    ]


if __name__ == "__main__":
    print(render(run()))
