"""A log of decisions with other candidates each time: learned by a scorer, and judged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from policy.algorithms.bandit import BanditConfig
from policy.algorithms.base import AlgorithmConfig
from policy.algorithms.dm import DMConfig
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.judging.evaluate import evaluate
from policy.judging.settings import EvaluationSettings
from policy.training.settings import TrainSettings
from policy.training.train import train
from storage.experience.sample_batch import SampleBatch
from storage.shards.output_writer import ParquetOutputWriter
from storage.spaces.candidates import Candidates
from storage.spaces.descriptors import Box, Dict, Discrete, MultiBinary

MOST, WIDTH, ROWS = 6, 3, 3_000
OBSERVATION = Dict(
    {
        "action_mask": MultiBinary((MOST,)),
        "candidates": Box((MOST, WIDTH), ragged=True),
        "user": Box((2,)),
    }
)
ITEMS = np.random.default_rng(1).normal(size=(40, WIDTH)).astype(np.float32)
TASTE = np.array([[1.5, -1.0, 0.5], [-0.5, 1.0, 1.5]])


def offers(rows: int, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(columns of observations, the reward's probability of each candidate; 0 where masked)."""
    rng = np.random.default_rng(seed)
    candidates = Candidates(OBSERVATION, Discrete(MOST))
    found = []
    for _ in range(rows):
        shown = ITEMS[rng.choice(len(ITEMS), rng.integers(2, MOST + 1), replace=False)]
        found.append(candidates.observed({"user": rng.normal(size=2).astype(np.float32)}, shown))
    columns = {name: np.stack([one[name] for one in found]) for name in found[0]}
    liking = np.einsum("nu,uf,nkf->nk", columns["user"], TASTE, columns["candidates"])
    return columns, np.where(columns["action_mask"] == 1, 1 / (1 + np.exp(-liking)), 0.0)


def attained(policy: NumpyPolicy) -> float:
    """The share of what is attainable beyond uniform draws: 0 for these, 1 for the best."""
    columns, chances = offers(1_000, 9)
    flat = policy.flatten(columns)
    acted = policy.act(flat, np.random.default_rng(0), explore=False).columns[""]
    mean = chances.sum(axis=1) / columns["action_mask"].sum(axis=1)
    got = chances[np.arange(len(acted)), acted].mean()
    return float((got - mean.mean()) / (chances.max(axis=1).mean() - mean.mean()))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Uniform draws among the candidates."""
    folder, rng = tmp_path_factory.mktemp("root"), np.random.default_rng(3)
    columns, chances = offers(ROWS, 2)
    counts = columns["action_mask"].sum(axis=1)
    actions = rng.integers(0, counts)
    writer = ParquetOutputWriter(folder, {"default": (OBSERVATION, Discrete(MOST))})
    rewards = rng.random(ROWS) < chances[np.arange(ROWS), actions]
    writer.write(
        SampleBatch(
            {
                **{f"obs.{name}": column for name, column in columns.items()},
                "actions": actions,
                "rewards": rewards.astype(np.float64),
                "terminateds": np.ones(ROWS, np.bool_),
                "truncateds": np.zeros(ROWS, np.bool_),
                "action_logp": -np.log(counts),
                "t": np.zeros(ROWS, np.int64),
                "eps_id": np.array([f"visit-{number}" for number in range(ROWS)], object),
            }
        )
    )
    return folder


@pytest.mark.parametrize(
    ("config", "least"),
    [
        pytest.param(DMConfig(updates=300), 0.9, id="dm"),
        pytest.param(
            BanditConfig(objective="dr", updates=300), 0.8, id="dr", marks=pytest.mark.long
        ),
    ],
)
def test_a_scorer_is_learned_and_judged(root: Path, config: AlgorithmConfig, least: float) -> None:
    """Where the observation has candidates, the default policy scores them."""
    trained = train(root, "default", config, TrainSettings(seed=1, explore=0.1))
    store = WeightStore(root, "default")
    candidate, weights = store.load_candidate(trained.candidate)
    spec = PolicySpec.from_json(candidate.spec)
    assert spec.module.kind == "scorer"
    assert spec.action_rule.explore == 0.1  # beside the algorithm's own rule
    assert spec.action_rule.kind == (
        "epsilon_greedy" if config == DMConfig(updates=300) else "sample"
    )
    policy = NumpyPolicy(spec, weights, filter_state=candidate.filter_state)
    assert attained(policy) > least
    found = evaluate(
        root, "default", trained.candidate, EvaluationSettings(reward_range=(0.0, 1.0))
    )
    assert found.judgement.verdict == "better", found.judgement.reasons
    assert [one.name for one in found.judgement.diagnostics if not one.passed] == []
