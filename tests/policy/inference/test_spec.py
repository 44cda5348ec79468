"""The policy spec: strict JSON, and no policy for spaces in which none can act."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.inference.spec import ACTIVATIONS, ONNX, ModuleSpec, PolicySpec, SpecError
from storage.spaces.descriptors import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    SpaceError,
    Text,
    Tuple,
)

OBSERVATIONS = [
    Box((4,)),
    Discrete(3, 1),
    MultiDiscrete((2, 3)),
    Dict({"a": Box(()), "b": Tuple((MultiBinary((2,)), Discrete(2)))}),
]
ACTIONS = [
    (Discrete(2), "categorical"),
    (MultiDiscrete((2, 5)), "multi_categorical"),
    (MultiBinary((2, 2)), "bernoulli"),
    (Box((3,), low=-1.0, high=1.0), "diag_gaussian"),
    (Dict({"x": Discrete(2), "y": Box((1,))}), "product"),
]
modules = st.builds(
    ModuleSpec,
    hidden=st.lists(st.integers(1, 128), max_size=3).map(tuple),
    activation=st.sampled_from(ACTIVATIONS),
    value_head=st.booleans(),
    state_std=st.booleans(),
)


@given(
    st.sampled_from(OBSERVATIONS),
    st.sampled_from(ACTIONS),
    modules,
    st.sampled_from(["NoFilter", "MeanStdFilter"]),
)
def test_a_spec_survives_json(observation, action, module, filter_name):
    """A spec is equal after a round trip, and knows its distribution."""
    space, distribution = action
    spec = PolicySpec(observation, space, module, observation_filter=filter_name)
    assert spec.distribution == distribution
    assert PolicySpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_weights_are_named_and_shaped_as_torch_does():
    """A linear layer at every second index; log_std next to the towers for Box actions."""
    spec = PolicySpec(Box((4,)), Box((2,)), ModuleSpec(hidden=(8,)))
    assert spec.weight_shapes() == {
        "pi.0.weight": (8, 4),
        "pi.0.bias": (8,),
        "pi.2.weight": (2, 8),
        "pi.2.bias": (2,),
        "log_std": (2,),
        "vf.0.weight": (8, 4),
        "vf.0.bias": (8,),
        "vf.2.weight": (1, 8),
        "vf.2.bias": (1,),
    }


@pytest.mark.parametrize(
    ("observation", "action", "text"),
    [
        (Box((4,)), Text(8), "action: a policy can't act in a Text space"),
        (Box((4,)), Dict({"say": Text(8)}), "action.say: a policy can't act in a Text space"),
        (Box((4,)), Box((2,), "int32"), "action: a policy can't act in a Box of int32"),
        (Tuple((Text(8),)), Discrete(2), "observation.0: a policy can't read a Text space"),
    ],
)
def test_spaces_that_no_policy_can_serve_are_refused(observation, action, text):
    """The error names the leaf."""
    with pytest.raises(SpaceError, match=text):
        PolicySpec(observation, action)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 2}, "expected format version 1, got 2"),
        ({"surprise": 1}, "expected the keys"),
        ({"distribution": "bernoulli"}, "expected 'categorical'"),
        ({"distribution": None}, "distribution: expected a string"),
        ({"observation_filter": "Sieve"}, "expected one of"),
        ({"module": {"kind": "mlp"}}, "module: expected the keys"),
        ({"module": []}, "module: expected an object"),
    ],
)
def test_a_strange_document_is_refused(change, text):
    """Unknown versions, keys and names are errors, never ignored."""
    document = {**PolicySpec(Box((4,)), Discrete(2)).to_json(), **change}
    with pytest.raises(SpecError, match=text):
        PolicySpec.from_json(document)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "transformer"},
        {"hidden": [0]},
        {"hidden": [True]},
        {"hidden": [10**9]},
        {"hidden": "64"},
        {"hidden": [1] * 99},
        {"activation": "exec"},
        {"value_head": 1},
    ],
)
def test_a_strange_module_is_refused(change):
    """A client can't be made to build a network of unbounded size."""
    with pytest.raises(SpecError, match="module: expected"):
        ModuleSpec.from_json({**ModuleSpec().to_json(), **change})


def test_a_document_without_version_is_refused():
    """A document without a version is never taken for the current one."""
    document = PolicySpec(Box((4,)), Discrete(2)).to_json()
    del document["version"]
    with pytest.raises(SpecError, match="expected the keys"):
        PolicySpec.from_json(document)


@pytest.mark.parametrize(
    ("module", "action", "more", "text"),
    [
        (
            ModuleSpec(),
            Box((1,)),
            {"distribution": "squashed_gaussian"},
            "expected 'diag_gaussian'",
        ),
        (
            ModuleSpec(),
            Box((2,), low=[0.0, 1.0], high=[1.0, 1.0]),
            {"distribution": "squashed_gaussian"},
            "expected 'diag_gaussian' for this action space",
        ),
        (
            ModuleSpec(),
            Box((1,), low=0.0, high=1.0),
            {"distribution": "categorical"},
            "expected 'diag_gaussian' or 'squashed_gaussian'",
        ),
        (ONNX, Discrete(2), {"observation_filter": "MeanStdFilter"}, "expected NoFilter"),
    ],
)
def test_heads_and_files_that_fit_no_space_are_refused(module, action, more, text):
    """Squashing needs bounds that differ; an ONNX file has no filter before it."""
    with pytest.raises(SpecError, match=text):
        PolicySpec(Box((4,)), action, module, **more)


def test_a_file_is_described_so_that_earlier_releases_refuse_it_in_words():
    """Its module has the keys of release 0.1.0, which names the kind; others omit the default."""
    assert ONNX.to_json() == {
        "kind": "onnx",
        "hidden": [],
        "activation": "tanh",
        "value_head": False,
    }
    assert ModuleSpec.from_json(ONNX.to_json()) == ONNX
    assert "state_std" not in ModuleSpec().to_json()
    with pytest.raises(SpecError, match=r"expected hidden \(\) and no value head for onnx"):
        ModuleSpec("onnx", (8,), value_head=False)
