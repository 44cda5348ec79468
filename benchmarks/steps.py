"""The cost of asynchrony: steps to solve CartPole-v1 through shards, and in one synchronous loop.

The live loop (`headrace up`, two client processes, the collector killed once) is compared with
Stable-Baselines3's PPO with the same network and hyper-parameters. Solved: the mean of the last 20
returns is 475. Medians of three seeds each; this takes some minutes.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections import deque
from pathlib import Path

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.report import Figure
from headrace.demo.live import GOAL, MAX_STEPS, WINDOW, run_live
from policy.algorithms.ppo import PPOConfig

SEEDS = (1, 2, 3)
ENVS, STEPS = 8, 32


class _UntilSolved(BaseCallback):
    def __init__(self) -> None:
        super().__init__()
        self.returns: deque[float] = deque(maxlen=WINDOW)

    def _on_step(self) -> bool:
        for info in self.locals["infos"]:
            if "episode" in info:
                self.returns.append(float(info["episode"]["r"]))
        return len(self.returns) < WINDOW or statistics.fmean(self.returns) < GOAL


def synchronous_steps(seed: int) -> int:
    """Steps of Stable-Baselines3's PPO until CartPole-v1 is solved."""
    ours = PPOConfig()
    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", ENVS, seed=seed),
        n_steps=STEPS,
        batch_size=ours.minibatch,
        n_epochs=ours.epochs,
        gamma=ours.gamma,
        gae_lambda=ours.lam,
        learning_rate=lambda left: ours.lr * left,
        clip_range=lambda left: ours.clip * left,
        ent_coef=ours.entropy_coeff,
        vf_coef=ours.value_coeff,
        max_grad_norm=ours.max_grad_norm,
        seed=seed,
        device="cpu",
    )
    model.learn(MAX_STEPS, callback=_UntilSolved())
    return int(model.num_timesteps)


def live_steps(seed: int) -> int:
    """Steps that clients acted until the live loop has solved it."""
    with tempfile.TemporaryDirectory() as folder:
        found = run_live(Path(folder), seed=seed, say=lambda text: None)
    return int(found["steps"]) if found["reached"] else MAX_STEPS


def run() -> list[Figure]:
    torch.set_num_threads(1)
    pairs = []
    for seed in SEEDS:
        pairs.append((live_steps(seed), synchronous_steps(seed)))
        print(f"  seed {seed}: {pairs[-1][0]} steps live, {pairs[-1][1]} synchronous",
              file=sys.stderr, flush=True)  # fmt: skip
    live, synchronous = (statistics.median(side) for side in zip(*pairs, strict=True))
    return [
        Figure(
            name="CartPole-v1 solved through shards",
            value=live,
            unit="steps",
            baseline_name="Stable-Baselines3's PPO, synchronous",
            baseline_value=synchronous,
            aim="<= 2",
        )
    ]
