"""The steps that PPO takes to solve CartPole-v1 in one process, without a collector.

`python -m benchmarks.ppo_cartpole` prints the curve of mean returns for seeds 1, 2 and 3. Eight
environments are stepped 32 times each with the numpy policy of the newest version, then one update
follows. Solved: the mean of the last 20 returns is 475 or more.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import gymnasium
import numpy as np
import torch

from benchmarks.report import Figure, render
from policy.algorithms.learner import Learner
from policy.algorithms.ppo import PPOConfig
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import PolicySpec
from policy.networks.policy import Policy
from storage.experience.sample_batch import SampleBatch
from storage.spaces.descriptors import Box, Discrete

ENVS, STEPS = 8, 32
SOLVED, LAST = 475.0, 20
MOST_STEPS = 100_000
# Stable-Baselines3's PPO needs 31,000 to 36,000 with its zoo's settings.
REFERENCE_STEPS = 36_000
SPEC = PolicySpec(Box((4,)), Discrete(2))


class CartPoles:
    """Several CartPole-v1 environments; `returns` are those of the last 20 ended episodes."""

    def __init__(self, count: int, seed: int) -> None:
        self.envs = [gymnasium.make("CartPole-v1") for _ in range(count)]
        self.obs = [env.reset(seed=seed * 1000 + i)[0] for i, env in enumerate(self.envs)]
        self.rng = np.random.default_rng(seed)
        self.t, self.totals = [0] * count, [0.0] * count
        self.episode = list(range(count))
        self.episodes = count
        self.returns: deque[float] = deque(maxlen=LAST)

    def play(self, policy: NumpyPolicy, steps: int) -> SampleBatch:
        """Make `steps` steps with `policy` in each environment."""
        rows = [row for _ in range(steps) for row in self._step_all(policy)]
        columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
        count = len(rows)
        return SampleBatch(
            columns,
            policy_version=np.full(count, policy.version),
            source=np.full(count, "on_policy", object),
            agent_id=np.full(count, "agent0", object),
            stream=np.full(count, "in-process", object),
            has_new_obs=np.ones(count, np.bool_),
        )

    def _step_all(self, policy: NumpyPolicy) -> Iterator[dict[str, object]]:
        chosen = policy.act(np.stack(self.obs), self.rng)
        for i, (env, action) in enumerate(zip(self.envs, chosen.actions, strict=True)):
            after, reward, terminated, truncated, _ = env.step(action)
            yield {
                "obs": self.obs[i],
                "actions": action,
                "rewards": float(reward),
                "terminateds": terminated,
                "truncateds": truncated,
                "new_obs": after,
                "action_logp": chosen.logp[i],
                "t": self.t[i],
                "ordinal": self.episode[i],
                "episode_ordinal": self.episode[i],
            }
            self.obs[i], self.t[i] = after, self.t[i] + 1
            self.totals[i] += float(reward)
            if terminated or truncated:
                self._begin_episode(i)

    def _begin_episode(self, i: int) -> None:
        self.returns.append(self.totals[i])
        self.obs[i], _ = self.envs[i].reset()
        self.t[i], self.totals[i] = 0, 0.0
        self.episode[i], self.episodes = self.episodes, self.episodes + 1


@dataclass(frozen=True)
class Point:
    """The state of a run after an update."""

    steps: int
    mean_return: float  # of the last 20 episodes; 0 while there are fewer
    metrics: dict[str, float]


def learn(
    seed: int, most_steps: int = MOST_STEPS, config: PPOConfig | None = None
) -> Iterator[Point]:
    """Play and learn; yield a point per update. The same seed gives the same points."""
    learner = Learner(Policy(SPEC, seed=seed), config or PPOConfig(), seed=seed)
    poles = CartPoles(ENVS, seed)
    steps = version = 0
    while steps < most_steps:
        batch = poles.play(learner.policy.to_numpy(version=version), STEPS)
        metrics = learner.update(batch)
        steps, version = steps + batch.count, version + 1
        full = len(poles.returns) == LAST
        yield Point(steps, statistics.fmean(poles.returns) if full else 0.0, metrics)


def steps_to_solve(seed: int, *, show: bool = False) -> float:
    """Steps until the mean of the last 20 returns is 475; infinity if it never is."""
    begin = time.perf_counter()
    for number, point in enumerate(learn(seed), 1):
        solved = point.mean_return >= SOLVED
        if show and (solved or number % 12 == 0):
            print(
                f"seed {seed}  steps {point.steps:>6}  return {point.mean_return:6.1f}  "
                f"entropy {point.metrics['entropy']:.3f}  kl {point.metrics['kl_k3']:.4f}  "
                f"ev {point.metrics['explained_variance']:5.2f}  "
                f"{time.perf_counter() - begin:5.1f} s",
                file=sys.stderr,
            )
        if solved:
            return point.steps
    return float("inf")


def run(*, show: bool = False) -> list[Figure]:
    """The steps until it is solved, for three seeds."""
    torch.set_num_threads(1)
    return [
        Figure(
            name=f"PPO, CartPole-v1 solved, seed {seed}",
            value=steps_to_solve(seed, show=show),
            unit="steps",
            baseline_name="Stable-Baselines3's known steps",
            baseline_value=REFERENCE_STEPS,
            aim="<= 2",
        )
        for seed in (1, 2, 3)
    ]


if __name__ == "__main__":
    print(render(run(show=True)))
