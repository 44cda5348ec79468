"""Many candidates on one log: a shared budget, which newer episodes start anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policy.judging.evaluate import evaluate
from policy.judging.gate import publish
from policy.judging.settings import EvaluationSettings, Gate
from storage.weights.decisions import load_decisions
from tests.policy.judging.test_evaluate_verdicts import STREAM, probabilities, stored, uniform_log


def candidate(root: Path, number: int, lineage: object = None) -> str:
    """A candidate that is much like the others, but another one."""
    first = 0.90 + number / 1000
    rest = (1 - first) / 3
    return stored(root, probabilities(first, rest, rest, rest), lineage)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    uniform_log(tmp_path, [0.5] * 4, n=1000)
    return tmp_path


def test_from_the_second_candidate_on_they_share_a_budget(root: Path) -> None:
    gate = Gate(reward_range=(0.0, 1.0))
    found = [publish(root, "default", candidate(root, k), gate) for k in range(3)]
    errors = [(1 - one["gate"]["confidence"]) / 2 for one in found]
    assert errors == pytest.approx([0.025, 0.05 * 0.15198, 0.05 * 0.06755], rel=1e-3)
    assert not any("candidate" in note for note in found[0]["notes"])
    assert any(note.startswith("candidate 3 on overlapping episodes") for note in found[2]["notes"])
    kept = load_decisions(root, "default").known[-1]
    assert kept["others"] == 2
    assert "up to 0.073" in json.dumps(kept["diagnostics"])


def test_newer_episodes_than_the_live_versions_start_anew(root: Path) -> None:
    """Others were judged by 0 .. 999; a nightly job judges what came after the live training."""
    publish(root, "default", candidate(root, 0, {STREAM: [(0, 800)]}), None)
    gate = Gate(reward_range=(0.0, 1.0))
    publish(root, "default", candidate(root, 1), gate)
    uniform_log(root, [0.5] * 4, n=1000, seed=1, first=1000)
    publish(
        root, "default", candidate(root, 2, {STREAM: [(0, 299), (600, 999)]}), None
    )  # it is live now
    again = candidate(root, 3)
    every, new = (
        evaluate(
            root,
            "default",
            again,
            EvaluationSettings(
                split="all", reward_range=(0.0, 1.0), since="live" if after else None
            ),
            earlier=load_decisions(root, "default").known,
        )
        for after in (False, True)
    )
    assert (every.others, new.others) == (1, 0)
    assert (new.after_live, new.confidence, new.episodes) == (2, 0.95, 1000)
    assert new.rows == {STREAM: [1000, 1999]}
