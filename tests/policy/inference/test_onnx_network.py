"""A policy whose network is an ONNX file acts as its twin of the same weights in numpy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto

from policy.inference.action_rule import SAMPLE, ActionRule
from policy.inference.distributions import NotFinite
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.onnx_network import OnnxNetwork
from policy.inference.spec import ONNX, ModuleSpec, PolicySpec, SpecError
from storage.spaces.descriptors import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space
from tests.policy.inference.onnx_files import constant, linear, model, node, tensor, weights_of

OBS = Box((4,))
BOX = Box((2,), low=-1.0, high=1.0)
HEADS: list[tuple[Space, str | None, ActionRule]] = [
    (Discrete(3, 5), None, SAMPLE),
    (Discrete(3), None, ActionRule("epsilon_greedy", epsilon=0.5)),
    (MultiDiscrete((2, 3)), None, SAMPLE),
    (BOX, "diag_gaussian", SAMPLE),
    (BOX, "squashed_gaussian", SAMPLE),
]


@pytest.mark.parametrize(("action", "head", "rule"), HEADS)
def test_a_file_acts_as_the_same_weights_do_in_numpy(
    action: Space, head: str | None, rule: ActionRule
) -> None:
    """One observation or many, more than one run takes: same draws, propensities within 1e-5."""
    twin_spec = PolicySpec(
        OBS, action, ModuleSpec("mlp", (), value_head=False, state_std=True), head, action_rule=rule
    )
    made = linear(twin_spec.outputs, seed=3)
    (stored,) = made.graph.initializer
    weight = onnx.numpy_helper.to_array(stored)
    bias = np.zeros(len(weight.T), np.float32)
    twin = NumpyPolicy(twin_spec, {"pi.0.weight": weight.T.copy(), "pi.0.bias": bias})
    policy = NumpyPolicy(PolicySpec(OBS, action, ONNX, head, action_rule=rule), weights_of(made))
    flat = np.random.default_rng(0).normal(size=(150, 4)).astype(np.float32)
    for explore in (True, False):
        found, expected = (
            one.act(flat, np.random.default_rng(1), explore=explore) for one in (policy, twin)
        )
        np.testing.assert_allclose(found.columns[""], expected.columns[""], atol=1e-5)
        np.testing.assert_allclose(found.logp, expected.logp, atol=1e-5)
        one = policy.act_one(flat[0], np.random.default_rng(1), explore=explore)
        many = policy.act(flat[:1], np.random.default_rng(1), explore=explore)
        np.testing.assert_array_equal(one.action, many.actions[0])
        assert one.logp == pytest.approx(float(many.logp[0]), abs=1e-6, nan_ok=True)
    logp = policy.logp(flat, found.columns[""])
    np.testing.assert_allclose(logp, twin.logp(flat, found.columns[""]), atol=1e-5)


def _ranked() -> dict[str, Any]:
    """Scores of candidates: their features times those of the user, which a table has."""
    nodes = [
        node("Gather", ("table", "user"), "row"),
        node("Unsqueeze", ("row", "last"), "column"),
        node("MatMul", ("candidates", "column"), "products"),
        node("Squeeze", ("products", "last"), "scores"),
        node("Add", ("scores", "action_mask"), "dist_inputs"),
    ]
    table = np.arange(20, dtype=np.float32).reshape(10, 2)
    constants = [constant("table", table), constant("last", [2])]
    inputs = [
        tensor("user", kind=TensorProto.INT64),
        tensor("candidates", 3, 2),
        tensor("action_mask", 3),
    ]
    return weights_of(model(nodes, constants, inputs=inputs))


def test_leaves_are_inputs_by_their_names() -> None:
    """A category as its number, candidates as a table, and the mask, which also forbids."""
    space = Dict(
        {
            "user": Discrete(10, 100),
            "candidates": Box((3, 2), ragged=True),
            "action_mask": MultiBinary((3,)),
        }
    )
    policy = NumpyPolicy(PolicySpec(space, Discrete(3), ONNX), _ranked())
    obs = {
        "user": 104,  # the fifth: features 8 and 9
        "candidates": np.array([[1, 0], [0, 1], [1, 1]], np.float32),
        "action_mask": np.array([1, 1, 0], np.int8),
    }
    found = policy.act_one(obs, np.random.default_rng(0))
    np.testing.assert_allclose(found.dist_inputs, [9, 10, -1e30])
    columns = {name: np.array([value, value]) for name, value in obs.items()}
    np.testing.assert_allclose(policy.dist_inputs(policy.flatten(columns))[1], found.dist_inputs)


def test_an_observation_that_the_file_cannot_take_leaves_the_others_alone() -> None:
    """A row of a table that does not exist: that one is refused like one that overflows."""
    cast = node("Cast", ("obs",), "whole", to=TensorProto.INT64)
    nodes = [
        cast,
        node("Gather", ("table", "whole"), "rows"),
        node("Squeeze", ("rows", "one"), "x"),
    ]
    nodes.append(node("Identity", ("x",), "dist_inputs"))
    table = constant("table", np.eye(3, dtype=np.float32))
    given = model(nodes, [table, constant("one", [1])], inputs=[tensor("obs", 1)])
    policy = NumpyPolicy(PolicySpec(Box((1,)), Discrete(3), ONNX), weights_of(given))
    flat = np.array([[0], [7], [2]], np.float32)
    finite, actions = policy.act_where_finite(flat, np.random.default_rng(0))
    assert finite.tolist() == [True, False, True]
    assert len(actions) == 2
    with pytest.raises(NotFinite):
        policy.act_one(flat[1], np.random.default_rng(0))


def _other_input() -> onnx.ModelProto:
    cast = node("Cast", ("obs",), "x", to=TensorProto.FLOAT)
    last = node("MatMul", ("x", "weight"), "dist_inputs")
    weight = linear().graph.initializer
    return model([cast, last], weight, inputs=[tensor("obs", 4, kind=TensorProto.DOUBLE)])


def _fixed_batch() -> onnx.ModelProto:
    found = linear()
    found.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    return found


def _named(name: str) -> onnx.ModelProto:
    nodes = [node("MatMul", (name, "weight"), "dist_inputs")]
    return model(nodes, linear().graph.initializer, inputs=[tensor(name, 4)])


NAMED = Dict({"a": Box((4,)), "b": Box((4,))})
MISFITS: dict[str, tuple[PolicySpec, onnx.ModelProto, str]] = {
    "too few outputs": (
        PolicySpec(OBS, Discrete(4), ONNX),
        linear(),
        r"output 'dist_inputs': expected float32 \(batch, 4\), got tensor\(float\) \['batch', 3\]",
    ),
    "no density": (
        PolicySpec(OBS, BOX, ONNX),
        linear(2),
        "2 means and 2 log standard deviations, got .*: without a deviation .* no density",
    ),
    "another observation": (
        PolicySpec(Box((5,)), Discrete(3), ONNX),
        linear(),
        r"input 'obs': expected float32 of shape \['batch', 5\], got tensor\(float\) of .*4",
    ),
    "an input of another type": (
        PolicySpec(OBS, Discrete(3), ONNX),
        _other_input(),
        r"input 'obs': expected float32 .*, got tensor\(double\)",
    ),
    "one row alone": (
        PolicySpec(OBS, Discrete(3), ONNX),
        _fixed_batch(),
        "a batch size that is free",
    ),
    "an unknown leaf": (
        PolicySpec(NAMED, Discrete(3), ONNX),
        _named("c"),
        r"input 'c': expected 'flat' or a leaf of the observation, one of \['a', 'b'\]",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_inputs_and_outputs_that_do_not_fit_the_spaces_are_named(name: str) -> None:
    """With what was expected."""
    spec, given, text = MISFITS[name]
    with pytest.raises(SpecError, match=text):
        OnnxNetwork(spec, given.SerializeToString())


def test_a_file_that_the_installed_onnxruntime_does_not_know_is_refused_in_words() -> None:
    """As a client does that is older than the opset, or got something else."""
    later = linear()
    later.opset_import[0].version = 900
    for data in (later.SerializeToString(), b"no model"):
        with pytest.raises(SpecError, match=r"onnxruntime [0-9.]+ cannot load it: "):
            OnnxNetwork(PolicySpec(OBS, Discrete(3), ONNX), data)
    with pytest.raises(ValueError, match=r"expected model\.onnx, got"):
        NumpyPolicy(PolicySpec(OBS, Discrete(3), ONNX), {"pi.0.weight": np.zeros(1)})


def test_onnxruntimes_own_format_is_refused(tmp_path: Path) -> None:
    """One file can be both, and the gate reads it as ONNX alone."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "model.ort")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    onnxruntime.InferenceSession(linear().SerializeToString(), options)
    with pytest.raises(SpecError, match="cannot load it"):
        OnnxNetwork(PolicySpec(OBS, Discrete(3), ONNX), (tmp_path / "model.ort").read_bytes())


def test_without_onnxruntime_one_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is imported for the first file, and by no other policy."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(SpecError, match=r"not installed: pip install 'headrace\[onnx\]'$"):
        NumpyPolicy(PolicySpec(OBS, Discrete(3), ONNX), weights_of(linear()))
