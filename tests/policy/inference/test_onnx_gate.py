"""ONNX files that are no bounded function of an observation are refused before they are stored."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from onnx import TensorProto, helper

from policy.inference import onnx_gate
from policy.inference.onnx_gate import MAX_NUMBERS, MEMORY, require_allowed, require_sound
from policy.inference.own_models import publish_onnx
from policy.inference.spec import ONNX, PolicySpec
from policy.inference.weight_store import WeightStore
from storage.errors import WeightsRefused
from storage.spaces.descriptors import Box, Discrete
from tests.policy.inference.onnx_files import (
    FEATURES,
    HOSTILE,
    OUTPUTS,
    Made,
    batch_size,
    constant,
    linear,
    model,
    node,
    slow,
    weights_of,
)

SPACES = Box((FEATURES,)), Discrete(OUTPUTS)
SPEC = PolicySpec(*SPACES, ONNX)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_before_it_is_run(name: str) -> None:
    """By what is in it: nothing of it is run, and the refusal names the place."""
    made, text = HOSTILE[name]
    with pytest.raises(ValueError, match=text):
        require_allowed(made())


def test_a_result_may_have_exactly_the_largest_size() -> None:
    """One number more for each observation is refused."""
    for more in (0, 1):
        tiled = node("Tile", ("obs", "by"), "x")
        last = node("ReduceSum", ("x",), "dist_inputs", keepdims=0)
        given = model([tiled, last], [constant("by", [1, MAX_NUMBERS // FEATURES + more])])
        if more:
            with pytest.raises(ValueError, match="numbers for one observation, got 4,194,308"):
                require_allowed(given.SerializeToString())
        else:
            require_allowed(given.SerializeToString())


def test_constants_may_be_listed_as_inputs() -> None:
    """As older exporters write them: they have no batch size."""
    given = linear()
    weight = helper.make_tensor_value_info("weight", TensorProto.FLOAT, [FEATURES, OUTPUTS])
    given.graph.input.append(weight)
    require_allowed(given.SerializeToString())


def test_a_refused_file_is_no_candidate_and_the_live_version_stays(tmp_path: Path) -> None:
    """Whatever is wrong with it; the check of what is stored already isn't repeated."""
    store = WeightStore(tmp_path, "default")
    digest = publish_onnx(tmp_path, linear().SerializeToString(), spaces=SPACES)
    live = store.live()
    across = [
        node("ReduceMean", ("obs",), "mean", axes=[0], keepdims=1),
        node("Sub", ("obs", "mean"), "rest"),
        node("MatMul", ("rest", "weight"), "dist_inputs"),
    ]
    many = [
        node("Greater", ("b1", "few"), "is_many"),
        node("Cast", ("is_many",), "x", to=TensorProto.FLOAT),
    ]
    bad = {
        "endless loop": (HOSTILE["endless loop"][0](), "expected an operator on the gate's list"),
        "nan": (linear(scale=float("inf")).SerializeToString(), "expected finite outputs"),
        "other rows": (
            model(across, linear().graph.initializer, opset=17).SerializeToString(),
            "expected outputs that depend on their own observation alone",
        ),
        "many rows": (
            batch_size(*many, constants=[constant("few", [8])]).SerializeToString(),
            "expected outputs that depend on their own observation alone",
        ),
    }
    for data, text in bad.values():
        with pytest.raises(WeightsRefused, match=text):
            publish_onnx(tmp_path, data, spaces=SPACES)
    assert (store.candidates(), store.live()) == ([digest], live)


def test_what_is_stored_is_not_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rollback, or a candidate that comes again, needs no onnx; a new one says so."""
    good, other = (linear(seed=seed).SerializeToString() for seed in (1, 2))
    digest = publish_onnx(tmp_path, good, spaces=SPACES)
    monkeypatch.setattr(onnx_gate, "find_spec", lambda name: None)
    assert publish_onnx(tmp_path, good, spaces=SPACES) == digest
    with pytest.raises(
        WeightsRefused, match=r"checked with onnx: pip install 'headrace\[export\]'"
    ):
        publish_onnx(tmp_path, other, spaces=SPACES)


@pytest.mark.long
def test_no_hostile_file_gets_more_than_bounded_time_and_memory(tmp_path: Path) -> None:
    """All of them, and one that would compute for minutes, by the process that checks."""
    files: dict[str, tuple[Made, str]] = HOSTILE | {"slow": (slow, "within 1 s of processor time")}
    for made, text in files.values():
        with pytest.raises(ValueError, match=text):
            require_sound(SPEC, weights_of(made()))
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < MEMORY
