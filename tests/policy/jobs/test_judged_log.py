"""Laws of reading what is judged: block by block as at once, in the order of the ordinals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy.inference.weight_store import WeightStore
from policy.jobs import judged_log
from policy.jobs.evaluate import evaluate
from tests.policy.jobs.test_evaluate_verdicts import log_episodes, probabilities, stored


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Each number of a document by its place."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {k: v for key, one in items for k, v in flat(one, f"{name}/{key}").items()}
    return {name: value}


@pytest.mark.parametrize(("steps", "cluster"), [(1, ""), (1, "tag:user"), (4, ""), (4, "tag:user")])
def test_blocks_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, cluster: str
) -> None:
    """Verdict, bounds, checks and estimates of one block are those of many, and of the scratch
    files of their numbers; with a live version, sampled logging and users."""
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
    settings: dict[str, Any] = {"split": "all", "cluster": cluster, "reward_range": (0.0, 1.0)}
    whole = evaluate(tmp_path, "default", digest, **settings)
    monkeypatch.setattr(judged_log, "BLOCK_ROWS", 70)
    monkeypatch.setattr("policy.jobs.scratch.BLOCK", 64)
    blocks = evaluate(tmp_path, "default", digest, **settings)
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
