"""What a scorer learns of candidates with features, by the size of the log.

    python -m benchmarks.recommender --worlds 3

A request shows a user of 10 numbers 12 of 200 items with 20 features each; one of them is drawn
uniformly, and clicked with the logistic of a function of both: bilinear, or (`curved`) a network.
0 is what uniform draws earn, 1 what the best item of each request does; means of several worlds,
and the processor time of training. On the same logs, for comparison: `linucb`, with the products of
user and item as features, and `vw`, the `cb_explore_adf` of Vowpal Wabbit, if it is installed.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from policy.algorithms.bandit import BanditConfig
from policy.algorithms.base import AlgorithmConfig
from policy.algorithms.dm import DMConfig
from policy.algorithms.learner import Learner
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
            "candidates": Box((SHOWN, FEATURES), ragged=True),
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


def attained(acted: npt.NDArray[Any], chances: Array) -> float:
    """The share of what is attainable beyond uniform draws."""
    earned = chances[np.arange(len(acted)), acted].mean()
    best, mean = chances.max(axis=1).mean(), chances.mean()
    return float((earned - mean) / (best - mean))


def own(name: str, log: SampleBatch, test: SampleBatch) -> npt.NDArray[Any]:
    """The actions of the algorithm `name` after the log."""
    config = ALGORITHMS[name]
    trained = new_policy(acting_spec(SPEC, config), 1)
    Learner(trained, config, seed=1).update(log)
    policy = trained.to_numpy(version=1)
    flat = policy.flatten(
        {one: test[f"obs.{one}"] for one in ("action_mask", "candidates", "user")}
    )
    return policy.act(flat, np.random.default_rng(0), explore=False).columns[""]


def crossed(batch: SampleBatch) -> Array:
    """(n, k, D) features of user and candidate: their products, and each alone."""
    users, shown = np.float64(batch["obs.user"]), np.float64(batch["obs.candidates"])
    each = np.repeat(users[:, None], shown.shape[1], axis=1)
    both = np.einsum("nu,nkf->nkuf", users, shown).reshape(*shown.shape[:2], -1)
    return np.concatenate([both, each, shown, np.ones((*shown.shape[:2], 1))], axis=2)


def linucb(log: SampleBatch, test: SampleBatch, alpha: float = 0.1) -> npt.NDArray[Any]:
    """The actions of LinUCB (Li et al. 2010, algorithm 1 with shared weights) after the log."""
    found = [crossed(part)[np.arange(len(part)), part["actions"]] for part in in_parts(log)]
    taken = np.concatenate(found)
    inverse = np.linalg.inv(taken.T @ taken + np.eye(taken.shape[1]))
    weights, acted = inverse @ (taken.T @ np.float64(log["rewards"])), []
    for part in in_parts(test):
        x = crossed(part)
        width = np.sqrt(np.einsum("nkd,nkd->nk", x @ inverse, x))
        acted.append((x @ weights + alpha * width).argmax(axis=1))
    return np.concatenate(acted)


def in_parts(batch: SampleBatch) -> list[SampleBatch]:
    return [batch.slice(at, min(at + 500, len(batch))) for at in range(0, len(batch), 500)]


def vw(log: SampleBatch, test: SampleBatch) -> npt.NDArray[Any]:
    """The actions of Vowpal Wabbit after the log, in one pass with its defaults and -q ui."""
    import vowpalwabbit  # noqa: PLC0415 - no dependency: an environment of its own has it

    def lines(batch: SampleBatch, row: int, label: str) -> str:
        user = " ".join(f"{i}:{x:.4f}" for i, x in enumerate(batch["obs.user"][row]))
        items = [
            (label if k == batch["actions"][row] else "")
            + "|i "
            + " ".join(f"{i}:{x:.4f}" for i, x in enumerate(item))
            for k, item in enumerate(batch["obs.candidates"][row])
        ]
        return "\n".join([f"shared |u {user}", *items])

    workspace = vowpalwabbit.Workspace("--cb_explore_adf -q ui --quiet")
    for row, reward in enumerate(log["rewards"]):
        workspace.learn(lines(log, row, f"0:{-reward}:{1 / SHOWN} "))
    told = [np.argmax(workspace.predict(lines(test, row, ""))) for row in range(len(test))]
    return np.array(told)


OTHERS: Mapping[str, Callable[[SampleBatch, SampleBatch], npt.NDArray[Any]]] = {
    "linucb": linucb,
    "vw": vw,
}


def main() -> None:
    """Print a line for each world, size and algorithm."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.recommender")
    options.add_argument("--worlds", type=int, default=3)
    options.add_argument("--rows", type=int, action="append", help="default: 5000 and 20000")
    options.add_argument("--only", choices=(*ALGORITHMS, *OTHERS), action="append")
    given = options.parse_args()
    names = given.only or [*ALGORITHMS, "linucb"]
    for curved, rows in itertools.product((False, True), given.rows or (5_000, 20_000)):
        worlds = [world(seed, curved=curved) for seed in range(given.worlds)]
        for name in names:
            act, found, spent = OTHERS.get(name) or partial(own, name), [], 0.0
            for seed, (items, value) in enumerate(worlds):
                log, _ = requests(rows, 10 + seed, items, value)
                test, chances = requests(TESTS, 99 + seed, items, value)
                began = time.process_time()
                found.append(attained(act(log, test), chances))
                spent += time.process_time() - began
            print(
                f"{'curved' if curved else 'bilinear':8} {rows:6,} {name:6} "
                f"{np.mean(found):.3f} (worst {min(found):.3f}), {spent / len(worlds):.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
