"""Revenue: without a cap nothing can be told, with one it can."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from policy.judging.evaluate import evaluate
from policy.judging.gate import publish
from policy.judging.settings import EvaluationSettings, Gate
from tests.policy.judging.test_evaluate_verdicts import (
    log_episodes,
    probabilities,
    stored,
    uniform_log,
)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """30,000 visits, of which 5 % buy for a lognormal amount; the first offer sells half more."""
    root = tmp_path_factory.mktemp("shop")
    rng, n = np.random.default_rng(3), 30_000
    actions = rng.integers(4, size=(n, 1))
    bought = rng.random((n, 1)) < np.where(actions == 0, 0.075, 0.05)
    amounts = 20 * np.exp(1.8 * rng.normal(size=(n, 1)))
    obs = np.zeros((n, 1, 2))
    log_episodes(root, obs, actions, bought * amounts, np.full((n, 1), 0.25))
    return root, stored(root, probabilities(0.97, 0.01, 0.01, 0.01))


def test_revenue_passes_with_a_cap_that_the_log_proposes(shop: tuple[Path, str]) -> None:
    root, digest = shop
    plain = evaluate(root, "default", digest, settings=EvaluationSettings(split="all")).judgement
    (tails,) = (one for one in plain.diagnostics if one.name == "heavy_tails")
    assert (plain.verdict, tails.passed) == ("cannot tell", False)
    assert "--reward-cap auto takes" in tails.sentence
    own = evaluate(
        root, "default", digest, settings=EvaluationSettings(split="all", reward_cap="auto")
    )
    assert own.judgement.verdict == "better"
    assert own.excluded == {"first_tenth": 3000}, "the cap's own tenth is not judged"
    assert f"takes {own.reward_cap:g} from" in tails.sentence
    assert {stream: ends[0] for stream, ends in own.rows.items()} == dict.fromkeys(own.rows, 3000)
    (note,) = (one for one in own.judgement.diagnostics if one.name == "reward_cap")
    assert note.sentence.startswith(f"judged is min(reward, {own.reward_cap:g}): ")


def test_a_cap_makes_half_a_range_a_whole_one(shop: tuple[Path, str]) -> None:
    root, digest = shop
    found = evaluate(
        root,
        "default",
        digest,
        settings=EvaluationSettings(split="all", reward_range=(0.0, math.inf), reward_cap=50.0),
    )
    assert found.reward_range == (0.0, 50.0)
    assert not found.judgement.approximate
    assert found.behaviour is not None
    assert found.behaviour.value < 2.5, "the estimates are of capped rewards, too"


def test_the_decision_has_cap_and_margin(shop: tuple[Path, str]) -> None:
    root, digest = shop
    found = publish(root, "default", digest, Gate(reward_cap=60.0, margin="10%"))
    assert found["gate"]["verdict"] == "better"
    assert (found["gate"]["reward_cap"], found["gate"]["margin"]) == (60.0, "10%")
    assert any(note.startswith("judged is min(reward, 60)") for note in found["notes"])
    (one,) = found["gate"]["comparisons"]
    assert one["margin"] == pytest.approx(0.1 * found["gate"]["behaviour"]["value"], rel=1e-3)


def test_auto_changes_nothing_where_no_reward_dominates(tmp_path: Path) -> None:
    """No cap is found, and each episode counts once, although the log was read twice."""
    uniform_log(tmp_path, [0.5] * 4, n=400)
    digest = stored(tmp_path, probabilities(0.7, 0.1, 0.1, 0.1))
    found = evaluate(
        tmp_path, "default", digest, settings=EvaluationSettings(split="all", reward_cap="auto")
    )
    assert (found.reward_cap, found.episodes, found.excluded) == (None, 400, {})
