"""A log of masked decisions: what a policy learns from it is judged by what was allowed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from policy.algorithms.dm import DMConfig
from policy.judging.evaluate import evaluate
from policy.judging.settings import EvaluationSettings
from policy.training.settings import TrainSettings
from policy.training.train import train
from storage.experience.sample_batch import SampleBatch
from storage.shards.output_writer import ParquetOutputWriter
from storage.spaces.descriptors import Box, Dict, Discrete, MultiBinary

OFFERS, ROWS = 5, 4_000
OBSERVATION = Dict({"action_mask": MultiBinary((OFFERS,)), "x": Box((1,))})


def masked_log(seed: int) -> tuple[SampleBatch, float]:
    """Uniform draws among what is allowed, and the value of the best policy.

    An offer's reward is 1 with a probability of .1 to .9, in the order of the numbers for x > 0,
    and in the opposite order for x < 0.
    """
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 2, (ROWS, OFFERS)).astype(np.int8)
    mask[np.arange(ROWS), rng.integers(0, OFFERS, ROWS)] = 1
    probs = mask / mask.sum(axis=1, keepdims=True)
    actions = (rng.random((ROWS, 1)) >= probs.cumsum(axis=1)).sum(axis=1)
    x = rng.normal(size=(ROWS, 1)).astype(np.float32)
    rising = np.linspace(0.1, 0.9, OFFERS)
    chances = np.where(x > 0, rising, rising[::-1])
    batch = SampleBatch(
        {
            "obs.action_mask": mask,
            "obs.x": x,
            "actions": actions,
            "rewards": (rng.random(ROWS) < chances[np.arange(ROWS), actions]).astype(np.float64),
            "terminateds": np.ones(ROWS, np.bool_),
            "action_logp": np.log(probs[np.arange(ROWS), actions]),
            "t": np.zeros(ROWS, np.int64),
            "truncateds": np.zeros(ROWS, np.bool_),
            "eps_id": np.array([f"visit-{number}" for number in range(ROWS)], object),
        }
    )
    return batch, float(np.where(mask == 1, chances, 0).max(axis=1).mean())


def test_a_policy_of_masked_decisions_is_learned_and_judged(tmp_path: Path) -> None:
    """It is better than the log; its interval covers the value of what it may choose."""
    log, best = masked_log(3)
    writer = ParquetOutputWriter(tmp_path, {"default": (OBSERVATION, Discrete(OFFERS))})
    writer.write(log)
    trained = train(tmp_path, "default", DMConfig(updates=500), TrainSettings(seed=1))
    found = evaluate(
        tmp_path, "default", trained.candidate, EvaluationSettings(reward_range=(0.0, 1.0))
    )
    assert found.judgement.verdict == "better", found.judgement.reasons
    assert [one.name for one in found.judgement.diagnostics if not one.passed] == []
    low, high = found.judgement.to_dict()["comparisons"][0]["interval"]
    logged = float(log["rewards"].mean())
    assert low < 0.97 * best - logged < high
