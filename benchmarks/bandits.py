"""What bandit learners make of logs whose truth is known, by their default settings.

    python -m benchmarks.bandits digits    # greedy test accuracy, beside a logistic regression
    python -m benchmarks.bandits clicks    # the clicks of the learned policies

Digits: 1,300 of scikit-learn's images are contexts, an action names a digit, right ones earn 1. The
log is of uniform draws, or of a weak policy: of 20 known images it takes the nearest one's digit,
and in 20 % a random one. The regression has one model per action, of its rewards. Clicks: 100,000
uniform draws of five actions, whose chances are logistic in 8 features; means of fresh contexts.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from headrace.demo.digits import weak_policy
from policy.algorithms.bandit import BanditConfig
from policy.algorithms.learner import Learner
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import PolicySpec
from policy.networks.policy import Policy
from storage.experience.sample_batch import SampleBatch
from storage.spaces.descriptors import Box, Discrete

Array = npt.NDArray[np.float64]
SEEDS, TRAINING, EXPLORED, ACTIONS = (1, 2, 3, 4, 5), 1300, 0.2, 5


def batch_of(obs: Array, actions: Array, rewards: Array, chances: Array) -> SampleBatch:
    """One-step episodes."""
    n = len(obs)
    return SampleBatch(
        obs=obs.astype(np.float32),
        actions=actions,
        rewards=rewards,
        action_logp=np.log(chances),
        t=np.zeros(n, np.int64),
        terminateds=np.ones(n, np.bool_),
        truncateds=np.zeros(n, np.bool_),
    )


def learned(name: str, batch: SampleBatch, actions: int, seed: int) -> NumpyPolicy:
    """By `headrace train --algorithm NAME`, with all rows."""
    space = Box((batch["obs"].shape[1],)), Discrete(actions)
    try:
        from policy.algorithms.by_name import algorithm  # noqa: PLC0415  0.1.0 has none
        from policy.training.train import acting_spec, new_policy  # noqa: PLC0415  as above
    except ImportError:
        policy, config = Policy(PolicySpec(*space), seed=seed), BanditConfig(objective=name)
    else:
        config = algorithm(name)
        spec = PolicySpec(*space, observation_filter="MeanStdFilter")
        policy = new_policy(acting_spec(spec, config), seed)
    Learner(policy, config, seed=seed).update(batch)
    return policy.to_numpy()


def digits() -> Iterator[tuple[str, list[float]]]:
    """(log and learner, accuracies by seed)."""
    from sklearn.datasets import load_digits  # noqa: PLC0415  clicks do without
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415  as above

    images, labels = load_digits(return_X_y=True)
    images = images / 16

    def regression(batch: SampleBatch, test: Array) -> Array:
        """The action with the highest chance of a reward, by a model of each."""
        scores = []
        for action in range(10):
            mine = batch["actions"] == action
            model = LogisticRegression(max_iter=1000).fit(
                batch["obs"][mine], batch["rewards"][mine]
            )
            scores.append(model.predict_proba(test)[:, 1])
        return np.argmax(scores, axis=0)

    def accuracy(name: str, rows: int, seed: int, *, weak: bool) -> float:
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(images))
        train, test = order[:TRAINING], order[TRAINING:]
        chances = np.full((TRAINING, 10), 0.1)
        if weak:
            known = weak_policy(images[train], labels[train], rng).argmax(axis=1)
            chances = np.full((TRAINING, 10), EXPLORED / 10)
            chances[np.arange(TRAINING), known] += 1 - EXPLORED
        drawn = rng.integers(TRAINING, size=rows)
        taken = np.array([rng.choice(10, p=chances[one]) for one in drawn])
        right = (taken == labels[train][drawn]).astype(np.float64)
        batch = batch_of(images[train][drawn], taken, right, chances[drawn, taken])
        if name == "regression":
            chosen = regression(batch, images[test])
        else:
            policy = learned(name, batch, 10, seed)
            chosen = policy.act(images[test].astype(np.float32), rng, explore=False).columns[""]
        return float((chosen == labels[test]).mean())

    for rows, weak in ((2000, False), (12_000, False), (2000, True)):
        for name in ("regression", "dm", "dr"):
            log = f"{rows:,} {'weak' if weak else 'uniform'}"
            yield f"{log}, {name}", [accuracy(name, rows, seed, weak=weak) for seed in SEEDS]


def clicks() -> Iterator[tuple[str, list[float]]]:
    """(rate and learner, learned clicks over those of uniform draws, by seed)."""

    def gain(name: str, rate: float, seed: int) -> float:
        rng = np.random.default_rng(seed)
        taste = rng.normal(size=(8, ACTIONS)) / np.sqrt(8)
        offset = np.log(rate / (1 - rate))

        def chances(n: int) -> tuple[Array, Array]:
            obs = rng.normal(size=(n, 8))
            return obs, 1 / (1 + np.exp(-(obs @ taste + offset)))

        obs, chance = chances(100_000)
        taken = rng.integers(ACTIONS, size=len(obs))
        clicked = (rng.random(len(obs)) < chance[np.arange(len(obs)), taken]).astype(np.float64)
        batch = batch_of(obs, taken, clicked, np.full(len(obs), 1 / ACTIONS))
        policy = learned(name, batch, ACTIONS, seed)
        obs, chance = chances(20_000)
        acts = policy.probabilities(obs.astype(np.float32))
        return float((acts * chance).sum(axis=1).mean() / chance.mean())

    for rate in (0.004, 0.02, 0.05):
        for name in ("dr", "ips"):
            yield f"{rate:.1%}, {name}", [gain(name, rate, seed) for seed in SEEDS]


KINDS: dict[str, Callable[[], Iterator[tuple[str, list[float]]]]] = {
    "digits": digits,
    "clicks": clicks,
}


def main(kind: str) -> None:
    """Print each mean, and the lowest."""
    torch.set_num_threads(1)
    for name, found in KINDS[kind]():
        every = " ".join(f"{one:.3f}" for one in found)
        mean = statistics.fmean(found)
        print(f"{kind} {name}: mean {mean:.3f}, worst {min(found):.3f} ({every})", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
