"""The training job: exact counts, a stable split, the same candidate from the same log.

Also of `policy.progress`.
"""

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from policy.algorithms.bandit import BanditConfig
from policy.algorithms.by_name import FROM_LOGS, algorithm
from policy.data.freeze import freeze
from policy.inference.action_rule import ActionRule
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from policy.training.settings import TrainSettings
from policy.training.train import NothingToTrainOn, train
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.errors import NothingYet
from storage.experience.range_set import RangeSet
from storage.reading.holdout import held_out
from storage.reading.shard_reader import ShardReader
from storage.spaces.descriptors import Box, Discrete

CONFIG = BanditConfig(objective="dr", epochs=2)


def test_shards_become_a_candidate_and_every_row_is_accounted_for(bandit_log, tmp_path):
    """rows = held out + trained + excluded; lineage names exactly those trained on."""
    log = bandit_log(1200)
    log.logp[:50] = np.nan
    log.ended[60:65] = ["abandoned"] * 5
    log.write(tmp_path)
    result = train(tmp_path, "default", CONFIG, settings=TrainSettings(seed=3))
    assert result.rows_read + result.rows_held_out == 1200
    assert result.rows_trained + sum(result.excluded.values()) == result.rows_read
    assert 0.25 < result.rows_held_out / 1200 < 0.35
    assert set(result.excluded) == {"no_propensity", "abandoned"}
    (ranges,) = result.lineage.values()
    trained_on = set(RangeSet.from_json(ranges))
    assert len(trained_on) == result.rows_trained
    with ShardReader(tmp_path, policy_id="default") as reader:
        for batch in reader:
            kept_out = batch["ordinal"][held_out(batch, 0.3)]
            assert not trained_on & set(kept_out.tolist())
    candidate, weights = WeightStore(tmp_path, "default").load_candidate(result.candidate)
    spec = PolicySpec.from_json(candidate.spec)
    assert {name: a.shape for name, a in weights.items()} == spec.weight_shapes()
    assert candidate.metrics["evaluation_share"] == 0.3


def test_the_same_log_gives_the_same_candidate_however_it_is_cut(bandit_log, tmp_path):
    """Another cut into shards gives the same digest, another seed a different one."""
    log = bandit_log(300)
    log.write(tmp_path / "one", shard_rows=300)
    log.write(tmp_path / "two", shard_rows=41)
    one, two, other = (
        train(tmp_path / root, "default", CONFIG, settings=TrainSettings(seed=seed)).candidate
        for root, seed in (("one", 0), ("two", 0), ("two", 1))
    )
    assert one == two != other


def test_a_manifest_is_all_that_is_read(bandit_log, tmp_path):
    """Ordinals outside the manifest are not trained on."""
    bandit_log(300).write(tmp_path)
    with ShardReader(tmp_path, policy_id="default") as reader:
        stream = next(iter(reader))["stream"][0]
    result = train(
        tmp_path,
        "default",
        CONFIG,
        settings=TrainSettings(evaluation_share=0.0),
        manifest={stream: [[10, 19], [200, 249]]},
    )
    assert result.lineage == {stream: [[10, 19], [200, 249]]}
    assert result.rows_trained == 60


def test_blocks_bound_memory_and_lose_no_row(bandit_log, tmp_path, monkeypatch):
    """A log larger than a block is trained on block by block."""
    monkeypatch.setattr("policy.training.train.BLOCK_ROWS", 4096)
    bandit_log(5000).write(tmp_path)
    calls = []
    result = train(
        tmp_path,
        "default",
        BanditConfig(),
        settings=TrainSettings(evaluation_share=0.0, epochs=1),
        on_progress=lambda *args: calls.append(args),
    )
    assert result.rows_trained == 5000
    assert [calls[i][:2] for i in (0, -1)] == [("reading", 4096), ("training", 4)]


def test_the_declared_spec_is_trained_and_a_given_one_comes_first(bandit_log, tmp_path):
    """policies/{id}.json may name a module; `spec=` overrides it."""
    bandit_log(100).write(tmp_path)
    declared = PolicySpec(Box((2,)), Discrete(3, 1), ModuleSpec(hidden=(5,)))
    declaration = PolicyDeclaration(
        observation=declared.observation, action=declared.action, spec=declared.to_json()
    )
    save_declaration(tmp_path, declaration)
    store = WeightStore(tmp_path, "default")
    digest = train(tmp_path, "default", CONFIG).candidate
    assert store.candidate(digest).spec == declared.to_json()
    given = PolicySpec(Box((2,)), Discrete(3, 1), ModuleSpec(hidden=(6,)))
    digest = train(tmp_path, "default", CONFIG, spec=given).candidate
    assert store.candidate(digest).spec == given.to_json()


class ActionValues(BanditConfig):
    """A config that declares an action rule, as an algorithm of action values does."""

    action_rule: ClassVar = ActionRule("epsilon_greedy")


@pytest.mark.parametrize(
    ("config", "asked", "rule"),
    [
        (CONFIG, None, ActionRule()),
        (CONFIG, ActionRule("greedy"), ActionRule("greedy")),
        (ActionValues(epochs=1), None, ActionRule("epsilon_greedy", epsilon=0.05)),
        (ActionValues(epochs=1), ActionRule(), ActionRule()),
    ],
)
def test_a_candidate_has_the_rule_that_it_was_asked_for(bandit_log, tmp_path, config, asked, rule):
    """Without a request it has its algorithm's rule, which for action values is not `sample`."""
    bandit_log(60).write(tmp_path)
    result = train(tmp_path, "default", config, settings=TrainSettings(action_rule=asked))
    candidate, _ = WeightStore(tmp_path, "default").load_candidate(result.candidate)
    assert PolicySpec.from_json(candidate.spec).action_rule == rule
    assert result.action_rule == rule.to_json()


def test_observations_are_standardised_unless_a_spec_says_otherwise(bandit_log, tmp_path):
    """By default, by the rows trained on, and clipped; the state stands in the manifest."""
    log = bandit_log(400)
    log.obs[:] = log.obs * [300.0, 0.02] + [1000.0, 0.0]
    log.write(tmp_path)
    store = WeightStore(tmp_path, "default")
    manifest = store.candidate(train(tmp_path, "default", CONFIG).candidate)
    assert PolicySpec.from_json(manifest.spec).observation_filter == "MeanStdFilter"
    assert manifest.filter_state["clip"] == 10.0
    assert manifest.filter_state["stats"]["mean"][0] == pytest.approx(1000.0, abs=60.0)
    given = PolicySpec(Box((2,)), Discrete(3, 1), ModuleSpec(hidden=(6,)))
    raw = store.candidate(train(tmp_path, "default", CONFIG, spec=given).candidate)
    assert raw.filter_state is None


def test_without_a_declaration_the_shards_name_the_spaces(bandit_log, tmp_path):
    """A root that was copied without its policies can be trained on."""
    bandit_log(100).write(tmp_path)
    (tmp_path / "policies" / "default.json").unlink()
    digest = train(tmp_path, "default", CONFIG).candidate
    spec = PolicySpec.from_json(WeightStore(tmp_path, "default").candidate(digest).spec)
    assert (spec.observation, spec.action) == (Box((2,)), Discrete(3, 1))


@pytest.mark.parametrize("as_given", [str, Path])
def test_a_checkpoint_is_kept_with_the_readers_position(bandit_log, tmp_path, as_given):
    """The path may be a str or a Path, and the candidate names the file."""
    bandit_log(100).write(tmp_path)
    path = tmp_path / "learner.safetensors"
    result = train(tmp_path, "default", CONFIG, settings=TrainSettings(checkpoint=as_given(path)))
    assert path.exists()
    store = WeightStore(tmp_path, "default")
    assert store.candidate(result.candidate).checkpoint == "learner.safetensors"


def test_nothing_to_train_on_says_why(bandit_log, tmp_path):
    """The message has the counts by reason, and no candidate is made.

    `NothingYet` is raised only if later episodes may help: not if all are unusable, held out on
    request, or frozen.
    """
    log = bandit_log(40)
    log.logp[:] = np.nan
    log.write(tmp_path)
    with pytest.raises(NothingToTrainOn, match=r"no propensity: \d+.*--uniform if that is true"):
        train(tmp_path, "default", CONFIG)
    frozen = freeze(tmp_path)
    with pytest.raises(NothingYet, match="held out: 40"):
        train(tmp_path, "default", CONFIG, settings=TrainSettings(evaluation_share=0.999))
    for share, manifest in ((0.999, frozen.streams), (1.0, None)):
        with pytest.raises(NothingToTrainOn, match="held out: 40"):
            train(
                tmp_path,
                "default",
                CONFIG,
                settings=TrainSettings(evaluation_share=share),
                manifest=manifest,
            )
    with pytest.raises(NothingYet, match="other policy: 40"):
        train(tmp_path, "other", CONFIG, spec=PolicySpec(Box((2,)), Discrete(3, 1)))
    assert WeightStore(tmp_path, "default").candidates() == []
    (tmp_path / "new/shards").mkdir(parents=True)
    with pytest.raises(NothingYet, match="found no shard yet"):
        train(tmp_path / "new", "default", CONFIG, spec=PolicySpec(Box((2,)), Discrete(3, 1)))


def test_every_named_algorithm_trains(bandit_log, tmp_path):
    """The choices of the command line work, and the result is JSON."""
    bandit_log(60).write(tmp_path)
    for name in set(FROM_LOGS) - {"torchrl:td3", "torchrl:td3bc", "torchrl:redq"}:  # of a Box
        document = train(tmp_path, "default", algorithm(name, updates=2)).to_dict()
        assert document["rows_trained"] > 0
