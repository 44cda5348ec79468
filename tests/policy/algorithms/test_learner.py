"""The learner: counted rows, exact lineage, and a checkpoint that resumes bit for bit."""

import json

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch

from policy.algorithms.bandit import Bandit, BanditConfig
from policy.algorithms.learner import Learner
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.networks.policy import Policy
from storage.errors import WeightsDamaged
from storage.experience.sample_batch import SampleBatch
from storage.spaces.descriptors import Box, Discrete

SPEC = PolicySpec(
    Box((2,)), Discrete(3, 1), ModuleSpec(hidden=(8,)), observation_filter="MeanStdFilter"
)
CONFIG = BanditConfig(objective="dr", epochs=2, minibatch=32)


def new_learner(seed=0, config=CONFIG, spec=SPEC):
    return Learner(Policy(spec, seed=seed), config, seed=seed)


def assert_same_weights(one, two):
    for name, array in one.policy.get_weights().items():
        np.testing.assert_array_equal(array, two.policy.get_weights()[name])


def test_a_resumed_learner_goes_on_as_if_nothing_had_happened(bandit_log, tmp_path):
    """Two updates with a checkpoint between them equal two without, to the last bit."""
    first, second = bandit_log(200, 1).batch(), bandit_log(200, 2).batch()
    straight = new_learner()
    for _ in straight.run([first, second]):
        pass
    stopped = new_learner()
    stopped.update(first)
    stopped.save(tmp_path / "learner.safetensors", reader_state={"ledger": {"s": [[0, 9]]}})
    resumed = new_learner(seed=99)
    state = resumed.load(tmp_path / "learner.safetensors")
    assert state == {"ledger": {"s": [[0, 9]]}}
    assert resumed.counts == stopped.counts
    resumed.update(second)
    assert_same_weights(straight, resumed)
    assert resumed.counts == straight.counts
    assert resumed.lineage == straight.lineage
    assert resumed.policy.filter.to_json() == straight.policy.filter.to_json()


def test_lineage_holds_exactly_the_ordinals_trained_on(bandit_log):
    """Rows that were left out leave gaps."""
    log = bandit_log(10)
    log.logp[[0, 4, 5]] = np.nan
    learner = new_learner()
    learner.update(log.batch())
    (ranges,) = learner.lineage.values()
    assert ranges == [[1, 3], [6, 9]]


def test_a_batch_without_usable_rows_changes_no_weights(bandit_log):
    """The batch is read and counted, with no other effect."""
    log = bandit_log(5)
    log.logp[:] = np.nan
    learner = new_learner()
    found = learner.update(log.batch())
    assert (found["rows"], found["left_out"]) == (0, 5)
    found = learner.update(SampleBatch())
    assert (found["rows"], found["left_out"]) == (0, 0)
    assert_same_weights(learner, new_learner())
    assert (learner.counts.rows_read, learner.counts.rows_trained) == (5, 0)


@pytest.mark.parametrize("objective", ["ips", "dr"])
def test_numbers_beyond_float32_are_left_out_by_name(bandit_log, caplog, objective):
    """One reward of 1e200 would make every loss infinite: its row is left out, the rest is used."""
    batch, clean = bandit_log(20).batch(), bandit_log(20).batch()
    batch["rewards"][3] = 1e200
    config = BanditConfig(objective=objective, epochs=1)
    learner, without = new_learner(config=config), new_learner(config=config)
    metrics = learner.update(batch)
    without.update(clean.take(np.arange(20) != 3))
    assert (metrics["rows"], metrics["left_out"]) == (19, 1)
    assert learner.counts.excluded == {"not_finite": 1}
    assert_same_weights(learner, without)
    (ranges,) = learner.lineage.values()
    assert ranges == [[0, 2], [4, 19]]
    assert f"1 row is left out as not_finite, of episodes {batch['stream'][3]}/3" in caplog.text


@pytest.mark.parametrize("how", ["loss", "weights", "actions"])
def test_an_update_that_goes_wrong_is_taken_back(bandit_log, caplog, monkeypatch, how):
    """Weights, optimizer, filter and lineage are restored, and the next update succeeds."""
    first, second, third = (bandit_log(50, seed).batch() for seed in (1, 2, 3))
    learner, without = new_learner(), new_learner()
    learner.update(first)
    without.update(first)
    sound = Bandit.update

    def wrong(self, batch, rng, on_progress):
        metrics = sound(self, batch, np.random.default_rng(0), on_progress)
        if how == "loss":
            raise FloatingPointError("the loss became nan")
        with torch.no_grad():
            for parameter in self.policy.module.parameters():
                parameter.fill_(np.nan if how == "weights" else 3e38)
        return metrics

    monkeypatch.setattr(Bandit, "update", wrong)
    metrics = learner.update(second)
    monkeypatch.undo()
    assert (metrics["rows"], metrics["left_out"]) == (0, 50)
    assert learner.counts.excluded == {"not_finite": 50}
    assert metrics.keys() == learner.update(third).keys()
    without.update(third)
    assert_same_weights(learner, without)
    assert learner.lineage == without.lineage
    assert learner.policy.filter.to_json() == without.policy.filter.to_json()
    assert "an update is undone; 50 rows left out as not_finite" in caplog.text


def test_progress_is_told_up_to_the_end(bandit_log):
    """done runs from 1 to total."""
    calls = []
    new_learner().update(bandit_log(64).batch(), lambda *args: calls.append(args))
    assert calls == [("training", i, 4) for i in (1, 2, 3, 4)]


def test_a_damaged_checkpoint_is_refused(bandit_log, tmp_path):
    """Any flipped byte raises WeightsDamaged, and never gives other numbers."""
    path = tmp_path / "learner.safetensors"
    learner = new_learner()
    learner.update(bandit_log(50).batch())
    learner.save(path)
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    flips = [0, 9, len(data) - 1, *rng.integers(0, len(data), 60)]
    for at in flips:
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(damaged)
        with pytest.raises(WeightsDamaged):
            new_learner().load(path)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(WeightsDamaged):
        new_learner().load(path)


def test_a_checkpoint_of_another_spec_or_algorithm_is_refused(tmp_path):
    """The error names the difference. The path may be a str."""
    path = str(tmp_path / "learner.safetensors")
    new_learner().save(path)
    other = PolicySpec(Box((2,)), Discrete(3, 1), ModuleSpec(hidden=(9,)))
    with pytest.raises(ValueError, match="another spec"):
        new_learner(spec=other).load(path)


def test_a_checkpoint_holds_json_and_numbers_alone(bandit_log, tmp_path):
    """Any safetensors reader opens a checkpoint; all but the tensors is one JSON document."""
    path = tmp_path / "new" / "learner.safetensors"
    learner = new_learner()
    learner.update(bandit_log(50).batch())
    learner.save(path)
    with safetensors.safe_open(path, "numpy") as file:
        body = json.loads(file.metadata()["checkpoint"])["body"]
        assert set(body["tensors"]) == set(file.keys())
    assert body["spec"] == SPEC.to_json()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_file_without_our_document_is_refused(tmp_path):
    """A plain safetensors file is not a checkpoint."""
    path = tmp_path / "weights.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(2, np.float32)}, path)
    with pytest.raises(WeightsDamaged):
        new_learner().load(path)
