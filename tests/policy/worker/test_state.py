"""Saving, restoring and exporting a worker.

Also of `policy.networks.export`.
"""

from __future__ import annotations

import json
import pickletools
import warnings

import numpy as np
import onnxruntime
import pytest
import safetensors.numpy
import torch

from policy.inference.spec import PolicySpec
from policy.networks.policy import Policy
from policy.worker.rollout_worker import RolloutWorker
from storage.errors import WeightsDamaged
from tests.policy.toy_envs import AgentsEnv, BoxEnv, CountEnv


def worker(**arguments):
    defaults = {
        "env_creator": CountEnv,
        "rollout_fragment_length": 8,
        "observation_filter": "MeanStdFilter",
    }
    return RolloutWorker(**defaults | arguments)


def learned():
    made = worker(seed=1)
    made.learn_on_batch(made.sample())
    made.set_global_vars({"timestep": 9})
    return made


def test_a_restored_worker_goes_on_as_the_saved_one(tmp_path):
    """Weights, optimizer, filters with their unmerged buffers, global variables and random state:
    the next update is the same. Saving clears the filters' buffers.

    Row: save() / restore(bytes)
    """
    one = learned()
    buffered = one.filters["default"].buffer.n
    data = one.save()
    assert (buffered, one.filters["default"].buffer.n) == (8, 0)
    other = worker(seed=2)
    other.restore(data)
    assert (other.filters["default"].stats.n, other.filters["default"].buffer.n) == (8, 8)
    assert other.get_global_vars() == {"timestep": 9}
    batch = worker(seed=3).sample()
    for made in (one, other):
        made.learn_on_batch(batch)
    for name, array in one.get_weights()["default"].items():
        np.testing.assert_array_equal(other.get_weights()["default"][name], array)
    assert one.worker_rng.random() == other.worker_rng.random()
    path = one.save_to(tmp_path / "deep" / "worker.bin")
    other.restore_from(path)
    assert [file.name for file in path.parent.iterdir()] == ["worker.bin"]


def test_a_state_is_no_pickle():
    """A state is a safetensors document: nothing in it can be executed.

    Row: save() / restore(bytes)
    """
    data = learned().save()
    assert all(array.dtype.kind in "fiu" for array in safetensors.numpy.load(data).values())
    with pytest.raises(ValueError):  # noqa: PT011  whatever is no pickle
        list(pickletools.genops(data))


@pytest.mark.parametrize("damage", ["flipped", "cut", "other", "empty"])
def test_a_damaged_state_changes_nothing(damage):
    """A flipped bit, a missing end or other bytes raise WeightsDamaged, and the worker is
    unchanged.

    Row: save() / restore(bytes)
    """
    made = learned()
    data = bytearray(made.save())
    before = made.get_weights()["default"]
    if damage == "flipped":
        data[-3] ^= 1
    elif damage == "cut":
        del data[-10:]
    else:
        data = bytearray(b"no state at all" if damage == "other" else b"")
    with pytest.raises(WeightsDamaged):
        made.restore(bytes(data))
    for name, array in made.get_weights()["default"].items():
        np.testing.assert_array_equal(array, before[name])


def test_the_state_of_other_policies_is_refused():
    """The error names the policies that differ.

    Row: save() / restore(bytes)
    """
    data = learned().save()
    with pytest.raises(ValueError, match=r"these differ: \['default'\]"):
        worker(model_config={"hidden": (3,)}).restore(data)
    with pytest.raises(ValueError, match=r"observation_filter: expected 'No\w+', got 'Mean\w+'$"):
        worker(observation_filter="NoFilter").restore(data)
    two = worker(
        env_creator=AgentsEnv,
        policy={"a": None, "b": None},
        policy_mapping_fn=lambda agent: agent,
    )
    with pytest.raises(ValueError, match="these differ"):
        two.restore(data)
    two.sample()
    again = two.save()
    two.restore(again)


def test_the_network_is_exported_for_torch(tmp_path):
    """torch.export.load gives the policy's results for any number of rows; the spec is saved next
    to it.

    Row: export_policy_model(dir), export_policy_checkpoint(dir, prefix="model")
    """
    made = worker(env_creator=BoxEnv)
    policy = made.get_policy()
    path = made.export_policy_model(tmp_path)
    assert path.name == "model.pt2"
    program = torch.export.load(path).module()
    for count in (2, 5):
        rows = torch.randn(count, 1)
        with torch.no_grad():
            torch.testing.assert_close(program(rows), policy.module(rows))
    assert PolicySpec.from_json(json.loads((tmp_path / "spec.json").read_text())) == policy.spec


def test_the_network_is_exported_as_onnx(tmp_path):
    """onnxruntime gives the policy's results.

    Row: export_policy_model(dir), export_policy_checkpoint(dir, prefix="model")
    """
    made = worker()
    with warnings.catch_warnings():
        # the exporter's own packages warn of each other
        warnings.simplefilter("ignore")
        path = made.export_policy_model(tmp_path, onnx=True)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(0).normal(size=(4, 1)).astype(np.float32)
    [found] = session.run(["dist_inputs"], {"flat": rows})
    with torch.no_grad():
        expected = made.get_policy().module(torch.from_numpy(rows)).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_checkpoint_is_a_state_dict_and_its_spec(tmp_path):
    """An exported checkpoint has the requested prefix, and is enough to create the policy again.

    Row: export_policy_model(dir), export_policy_checkpoint(dir, prefix="model")
    """
    made = learned()
    assert made.export_policy_checkpoint(tmp_path).name == "model.safetensors"
    path = made.export_policy_checkpoint(tmp_path, "mine")
    document = json.loads((tmp_path / "mine.json").read_text())
    again = Policy(PolicySpec.from_json(document["spec"]), filter_state=document["filter_state"])
    again.set_weights(safetensors.numpy.load_file(path))
    flat = np.ones((2, 1), np.float32)
    actions = {"": np.array([0, 1])}
    np.testing.assert_allclose(again.logp(flat, actions), made.get_policy().logp(flat, actions))
    with pytest.raises(KeyError, match="no policy 'x'"):
        made.export_policy_checkpoint(tmp_path, policy_id="x")
