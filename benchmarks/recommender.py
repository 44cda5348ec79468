"""What a scorer learns of candidates with features, by the size of the log.

    python -m benchmarks.recommender --worlds 3

A request shows a user of 10 numbers 12 of 200 items with 20 features each; one of them is drawn
uniformly, and clicked with the logistic of a function of both: bilinear, or (`curved`) a network.
0 is what uniform draws earn, 1 what the best item of each request does; means of several worlds,
and the processor time of training.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from policy.algorithms.bandit import BanditConfig
from policy.algorithms.base import AlgorithmConfig
from policy.algorithms.dm import DMConfig
from policy.algorithms.learner import Learner
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.training.train import acting_spec, new_policy
from storage.experience.sample_batch import SampleBatch
from storage.spaces.descriptors import Box, Dict, Discrete, MultiBinary

Array = npt.NDArray[np.float64]
Value = Callable[[Array, Array], Array]
ITEMS, FEATURES, USER, SHOWN, TESTS = 200, 20, 10, 12, 4_000
SPEC = PolicySpec(
    Dict(
        {
            "action_mask": MultiBinary((SHOWN,)),
            "candidates": Box((SHOWN, FEATURES)),
            "user": Box((USER,)),
        }
    ),
    Discrete(SHOWN),
    ModuleSpec(kind="scorer"),
    observation_filter="MeanStdFilter",
)
ALGORITHMS: Mapping[str, AlgorithmConfig] = {
    "dm": DMConfig(),
    "ips": BanditConfig(objective="ips"),
    "dr": BanditConfig(objective="dr"),
}


def world(seed: int, *, curved: bool) -> tuple[Array, Value]:
    """(features of all items, the chance of a click by users (n, U) and items (n, k, F))."""
    rng = np.random.default_rng(seed)
    items = rng.normal(size=(ITEMS, FEATURES))
    taste = rng.normal(size=(USER, FEATURES)) * 1.5 / np.sqrt(USER * FEATURES)
    liked = rng.normal(size=FEATURES) * 0.5 / np.sqrt(FEATURES)
    inner = rng.normal(size=(USER + FEATURES, 8)) / np.sqrt(USER + FEATURES)
    outer = rng.normal(size=8)

    def value(users: Array, shown: Array) -> Array:
        if curved:
            each = np.repeat(users[:, None], shown.shape[1], axis=1)
            score = np.tanh(2 * np.concatenate([each, shown], axis=2) @ inner) @ outer
        else:
            score = np.einsum("nu,uf,nkf->nk", users, taste, shown) + shown @ liked
        chances: Array = 1 / (1 + np.exp(1 - 1.5 * score))
        return chances

    return items, value


def requests(rows: int, seed: int, items: Array, value: Value) -> tuple[SampleBatch, Array]:
    """(uniform draws, the chances (n, k) of a click)."""
    rng = np.random.default_rng(seed)
    users = rng.normal(size=(rows, USER))
    shown = items[np.argsort(rng.random((rows, ITEMS)), axis=1)[:, :SHOWN]]
    chances, actions = value(users, shown), rng.integers(0, SHOWN, rows)
    batch = SampleBatch(
        {
            "obs.action_mask": np.ones((rows, SHOWN), np.int8),
            "obs.candidates": shown.astype(np.float32),
            "obs.user": users.astype(np.float32),
            "actions": actions,
            "rewards": (rng.random(rows) < chances[np.arange(rows), actions]).astype(np.float64),
            "terminateds": np.ones(rows, np.bool_),
            "truncateds": np.zeros(rows, np.bool_),
            "action_logp": np.full(rows, -np.log(SHOWN)),
            "ended": np.full(rows, "terminated", object),
            "t": np.zeros(rows, np.int64),
            "stream": np.full(rows, "s", object),
            "ordinal": np.arange(rows),
            "episode_ordinal": np.arange(rows),
            "agent_id": np.full(rows, "", object),
        }
    )
    return batch, chances


def attained(policy: NumpyPolicy, test: SampleBatch, chances: Array) -> float:
    """The share of what is attainable beyond uniform draws."""
    names = ("action_mask", "candidates", "user")
    flat = policy.flatten({name: test[f"obs.{name}"] for name in names})
    acted = policy.act(flat, np.random.default_rng(0), explore=False).columns[""]
    earned = chances[np.arange(len(acted)), acted].mean()
    best, mean = chances.max(axis=1).mean(), chances.mean()
    return float((earned - mean) / (best - mean))


def main() -> None:
    """Print a line for each world, size and algorithm."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.recommender")
    options.add_argument("--worlds", type=int, default=3)
    options.add_argument("--rows", type=int, action="append", help="default: 5000 and 20000")
    options.add_argument("--only", choices=tuple(ALGORITHMS), action="append")
    given = options.parse_args()
    for curved in (False, True):
        for rows in given.rows or (5_000, 20_000):
            for name in given.only or ALGORITHMS:
                config, found = ALGORITHMS[name], []
                began = time.process_time()
                for seed in range(given.worlds):
                    items, value = world(seed, curved=curved)
                    policy = new_policy(acting_spec(SPEC, config), 1)
                    Learner(policy, config, seed=1).update(
                        requests(rows, 10 + seed, items, value)[0]
                    )
                    test = requests(TESTS, 99 + seed, items, value)
                    found.append(attained(policy.to_numpy(version=1), *test))
                spent = (time.process_time() - began) / given.worlds
                print(
                    f"{'curved' if curved else 'bilinear':8} {rows:6,} {name:3} "
                    f"{np.mean(found):.3f} (worst {min(found):.3f}), {spent:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
