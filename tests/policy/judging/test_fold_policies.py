"""All rows judge: fold policies stand in for the published ones on rows that these have seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy.algorithms.bandit import BanditConfig
from policy.inference.weight_store import WeightStore
from policy.judging.evaluate import evaluate
from policy.judging.gate import publish
from policy.judging.settings import EvaluationSettings, Gate
from policy.training.settings import TrainSettings
from policy.training.train import train
from storage.declarations.policy_files import load_declarations, save_declaration
from storage.experience.range_set import RangeSet
from storage.weights.folds import fold_files
from tests.policy.judging.test_evaluate_verdicts import (
    SPEC,
    STREAM,
    log_episodes,
    probabilities,
    stored,
)

QUICK = BanditConfig(objective="snips", epochs=30)


def night(root: Path, first: int, n: int, best: int = 0, tag: str = "", declared: Any = (0.0, 1.0)):
    """n decisions by a uniform policy; the `best` action earns .8, the others .4."""
    rng = np.random.default_rng(first)
    actions = rng.integers(4, size=(n, 1))
    rewards = rng.random((n, 1)) < np.where(actions == best, 0.8, 0.4)
    tags = [json.dumps({tag: str(i % 300)}) for i in range(n)] if tag else ()
    obs = rng.normal(size=(n, 1, 2))
    log_episodes(root, obs, actions, rewards, np.full((n, 1), 0.25), first=first, tags=tags)
    known = load_declarations(root)["default"]
    save_declaration(root, replace(known, reward_range=declared))


def judged_by(result: Any) -> dict[str, str]:
    return {
        one.name: one.sentence for one in result.judgement.diagnostics if one.name == "cross_fit"
    }


@pytest.mark.long
def test_three_nights(tmp_path: Path) -> None:
    """Each night trains on all rows and judges by all but the first block, with the bound."""
    store = WeightStore(tmp_path, "default")
    night(tmp_path, 0, 2000)
    first = train(
        tmp_path, settings=TrainSettings(cross_fit=5), algorithm=QUICK, spec=SPEC
    ).candidate
    gate = publish(tmp_path, "default", first, Gate())["gate"]
    assert (gate["verdict"], gate["approximate"], gate["episodes"]) == ("better", False, 1600)
    assert gate["rows"] == {STREAM: [400, 1999]}

    night(tmp_path, 2000, 1000, best=1)
    live = store.folds(first)
    assert live is not None
    assert [one.seen[STREAM].ranges() for one in live.folds] == [
        [(0, last)] for last in (399, 799, 1199, 1599)
    ]
    part: Any = {"manifest": {STREAM: [(0, 799)]}, "settings": TrainSettings(evaluation_share=0.0)}
    alone = store.load_candidate(train(tmp_path, algorithm=QUICK, spec=SPEC, **part).candidate)[1]
    for name, array in live.folds[1].weights.items():
        assert (array == alone[name]).all(), "it has seen the first two blocks, and no more"
    second = train(
        tmp_path, settings=TrainSettings(cross_fit=5), algorithm=QUICK, spec=SPEC
    ).candidate
    found = evaluate(tmp_path, "default", second)
    assert (found.episodes, found.judgement.approximate) == (2400, False)
    assert found.excluded == {"in_lineage": 600}
    assert store.publish(second).version == 2

    night(tmp_path, 3000, 1000, best=1)
    third = train(
        tmp_path, settings=TrainSettings(cross_fit=5), algorithm=QUICK, spec=SPEC
    ).candidate
    found = evaluate(tmp_path, "default", third)
    assert (found.episodes, found.judgement.approximate, found.live) == (3200, False, 2)
    sentences = [one.sentence for one in found.judgement.diagnostics if one.name == "cross_fit"]
    assert ["live version's" in one for one in sentences] == [False, True]
    newest = evaluate(tmp_path, "default", third, EvaluationSettings(since="live"))
    assert newest.rows == {STREAM: [3000, 3999]}


def test_a_candidate_of_this_root_is_not_judged_by_what_it_has_seen(tmp_path: Path) -> None:
    """With the same weights in all folds the estimate is that of the published policy; a fold that
    acts otherwise changes it."""
    night(tmp_path, 0, 1000)
    digest = train(
        tmp_path, settings=TrainSettings(cross_fit=2), algorithm=QUICK, spec=SPEC
    ).candidate
    store = WeightStore(tmp_path, "default")
    candidate, weights = store.load_candidate(digest)
    folds = store.folds(digest)
    assert folds is not None

    def value(bias: float) -> float:
        changed = {name: array * 0 for name, array in weights.items()}
        changed["pi.0.bias"] = changed["pi.0.bias"] + np.array([bias, 0, 0, 0], np.float32)
        again = replace(folds, folds=[replace(one, weights=changed) for one in folds.folds])
        added = store.add_candidate(
            weights, spec=candidate.spec, metrics={"bias": bias}, lineage={STREAM: [(0, 999)]},
            filter_state=candidate.filter_state, folds=fold_files(again),
        )  # fmt: skip
        (one,) = evaluate(tmp_path, "default", added).judgement.comparisons
        return one.difference

    assert value(3.0) > 0.2
    assert value(-9.0) < -0.05


def test_without_a_range_the_blocks_are_approximate(tmp_path: Path) -> None:
    night(tmp_path, 0, 2000, declared=None)
    digest = train(
        tmp_path, settings=TrainSettings(cross_fit=4), algorithm=QUICK, spec=SPEC
    ).candidate
    for limits, approximate in ((None, True), ((0.0, 1.0), False)):
        found = evaluate(
            tmp_path, "default", digest, settings=EvaluationSettings(reward_range=limits)
        ).judgement
        assert (found.verdict, found.approximate) == ("better", approximate)


def test_with_a_cluster_a_unit_is_in_one_block(tmp_path: Path) -> None:
    night(tmp_path, 0, 1200, tag="user")
    digest = train(
        tmp_path,
        settings=TrainSettings(cross_fit=3, cluster="tag:user"),
        algorithm=QUICK,
        spec=SPEC,
    ).candidate
    folds = WeightStore(tmp_path, "default").folds(digest)
    assert folds is not None
    assert (len(folds.folds), folds.in_order) == (2, False)
    counts = []
    for one in folds.folds:
        seen = np.zeros(1200, bool)
        for a, b in one.seen[STREAM].ranges():
            seen[a : b + 1] = True
        assert (seen.reshape(4, 300) == seen[:300]).all()
        counts.append(int(seen.sum()))
    found = evaluate(tmp_path, "default", digest)
    assert found.judgement.approximate
    assert found.episodes == 1200 - counts[0], "all but the first block"


def test_rows_out_of_order_leave_no_bound(tmp_path: Path) -> None:
    """The first half is judged by the policy of the second one, which is not in order."""
    night(tmp_path, 0, 1000)
    digest = train(
        tmp_path, settings=TrainSettings(cross_fit=3), algorithm=QUICK, spec=SPEC
    ).candidate
    store = WeightStore(tmp_path, "default")
    candidate, weights = store.load_candidate(digest)
    folds = store.folds(digest)
    assert folds is not None
    halves = [{STREAM: RangeSet([ends])} for ends in ((0, 499), (500, 999))]
    crossed = [replace(one, seen=half) for one, half in zip(folds.folds, halves, strict=True)]
    added = store.add_candidate(
        weights,
        spec=candidate.spec,
        metrics={},
        lineage={STREAM: [(0, 999)]},
        filter_state=candidate.filter_state,
        folds=fold_files(replace(folds, folds=crossed)),
    )
    found = evaluate(tmp_path, "default", added)
    assert (found.episodes, found.judgement.approximate) == (1000, True)
    assert "They do not judge in the order of their training" in judged_by(found)["cross_fit"]


def test_a_candidate_without_a_lineage_here_is_judged_by_every_row(tmp_path: Path) -> None:
    night(tmp_path, 0, 1000)
    own = stored(tmp_path, probabilities(0.9, 0.04, 0.03, 0.03))
    assert evaluate(tmp_path, "default", own).episodes == 1000
    trained = stored(tmp_path, probabilities(0.9, 0.04, 0.03, 0.03), {STREAM: [(0, 9)]})
    assert evaluate(tmp_path, "default", trained).episodes < 500


def test_blocks_and_a_share_exclude_each_other(tmp_path: Path) -> None:
    night(tmp_path, 0, 100)
    with pytest.raises(ValueError, match="cross_fit: expected no evaluation_share"):
        train(tmp_path, settings=TrainSettings(cross_fit=3, evaluation_share=0.2))
    for blocks in (1, 51):
        with pytest.raises(ValueError, match="cross_fit: expected 2 to 50 blocks"):
            train(tmp_path, settings=TrainSettings(cross_fit=blocks))
