"""A judged log that is read in blocks gives the same results, in bounded memory."""

from __future__ import annotations

import gc
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy.inference.weight_store import WeightStore
from policy.judging import judged_log
from policy.judging.evaluate import evaluate
from policy.judging.scratch import Scratch
from policy.judging.settings import EvaluationSettings
from policy.ope.columns import MemoryColumn
from tests.policy.judging.test_evaluate_verdicts import log_episodes, probabilities, stored


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Each value of a document by its path."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, one in items for k, v in flat(one, f"{name}/{key}").items()}
    return {name: value}


@pytest.mark.parametrize(("steps", "cluster"), [(1, ""), (1, "tag:user"), (4, ""), (4, "tag:user")])
def test_blocks_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, cluster: str
) -> None:
    """Verdict, bounds, checks and estimates are the same from one block as from many.

    The log has a live version, and users or sampled logging.
    """
    rng, n = np.random.default_rng(4), 1200
    actions = rng.integers(4, size=(n, steps))
    rewards = (rng.random((n, steps)) < np.array([0.8, 0.4, 0.4, 0.4])[actions]).astype(float)
    given = (rng.normal(size=(n, steps, 2)), actions, rewards, np.full((n, steps), 0.25))
    tags = [json.dumps({"user": f"u{i % 150}"}) for i in range(n)]
    chances = 1.0 if cluster else rng.choice([0.5, 1.0], size=n)
    log_episodes(tmp_path, *given, tags=tags, pass_prob=chances)
    live = stored(tmp_path, probabilities(0.3, 0.3, 0.2, 0.2))
    WeightStore(tmp_path, "default").publish(live)
    digest = stored(tmp_path, probabilities(0.7, 0.1, 0.1, 0.1))
    settings = EvaluationSettings(split="all", cluster=cluster, reward_range=(0.0, 1.0))
    whole = evaluate(tmp_path, "default", digest, settings)
    monkeypatch.setattr(judged_log, "BLOCK_ROWS", 70)
    monkeypatch.setattr("policy.judging.scratch.BLOCK", 64)
    blocks = evaluate(tmp_path, "default", digest, settings)
    assert whole.episodes == 1200
    assert len(whole.judgement.comparisons) == 2
    assert {one.n for one in whole.judgement.comparisons} == {150 if cluster else 1200}
    one, other = flat(whole.to_dict()), flat(blocks.to_dict())
    assert one.keys() == other.keys()
    numbers = {name for name, value in one.items() if isinstance(value, float)}
    assert {name: other[name] for name in numbers} == pytest.approx(
        {name: one[name] for name in numbers}, rel=1e-6, abs=1e-9
    )
    assert {k: v for k, v in one.items() if k not in numbers} == {
        k: v for k, v in other.items() if k not in numbers
    }


def peak_of(root: Path, digest: str) -> int:
    """The most bytes that Python and numpy held while the log was judged."""
    gc.collect()
    tracemalloc.start()
    try:
        evaluate(
            root,
            "default",
            digest,
            settings=EvaluationSettings(split="all", reward_range=(0.0, 1.0), estimators=["is"]),
        )
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


class Kept(Scratch):
    """The planted build: numbers stay in memory."""

    def column(self) -> MemoryColumn:  # type: ignore[override]
        return MemoryColumn()


def test_memory_does_not_grow_with_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the rows need less than 1.5 times the memory, unless a build keeps all rows."""
    monkeypatch.setattr(judged_log, "BLOCK_ROWS", 1000)
    monkeypatch.setattr("policy.judging.scratch.BLOCK", 1000)
    monkeypatch.setattr("policy.judging.judged_sample.SAMPLE_CELLS", 20_000)
    monkeypatch.setattr("policy.ope.diagnostics.SAMPLE_CELLS", 20_000)
    monkeypatch.setattr("policy.ope.diagnostics.MOST_COMMON_OF", 1000)
    rng, found = np.random.default_rng(3), []
    for shards in (8, 32):
        root = tmp_path / str(shards)
        for number in range(shards):
            actions = rng.integers(4, size=(250, 8))
            rewards = (rng.random((250, 8)) < 0.5).astype(float)
            obs = rng.normal(size=(250, 8, 2))
            log_episodes(root, obs, actions, rewards, np.full((250, 8), 0.25), first=250 * number)
        digest = stored(root, probabilities(0.4, 0.2, 0.2, 0.2))
        if not found:
            peak_of(root, digest)  # what is loaded once
        found.append((root, digest, peak_of(root, digest)))
    (small, large), (root, digest, _) = [one[2] for one in found], found[1]
    assert large < 1.5 * small
    monkeypatch.setattr("policy.judging.evaluate.Scratch", Kept)
    assert peak_of(root, digest) > 1.5 * small
