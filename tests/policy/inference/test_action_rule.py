"""The action rule of a spec: declared and validated, and refused where nothing acts by it yet."""

import json

import pytest

from policy.inference.action_rule import ActionRule
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import PolicySpec, SpecError
from policy.networks.policy import Policy
from storage.spaces.descriptors import Box, Discrete

SPEC = PolicySpec(Box((2,)), Discrete(3))
RULES = [
    ActionRule(),
    ActionRule("sample", temperature=0.5),
    ActionRule("epsilon_greedy", epsilon=0.1),
    ActionRule("greedy"),
]


def with_rule(rule):
    return PolicySpec(SPEC.observation, SPEC.action, action_rule=rule)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_rule_comes_back_from_its_spec(rule):
    """Through JSON, as it is in a policy's file and a version's manifest."""
    spec = with_rule(rule)
    assert PolicySpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_the_default_is_what_specs_without_a_rule_mean():
    """An older document reads as sampling, and a spec that samples is written as it always was."""
    assert "action_rule" not in SPEC.to_json()
    document = {**SPEC.to_json(), "action_rule": {"kind": "sample", "temperature": 1.0}}
    assert PolicySpec.from_json(document) == SPEC == PolicySpec.from_json(SPEC.to_json())


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ("sample", "expected an object with a kind"),
        ({"temperature": 1.0}, "expected an object with a kind"),
        ({"kind": "boltzmann"}, "expected a kind of"),
        ({"kind": "sample", "temperature": 0}, "expected temperature > 0"),
        ({"kind": "sample", "temperature": float("nan")}, "expected temperature > 0"),
        ({"kind": "sample", "epsilon": 0.1}, "sample takes no epsilon"),
        ({"kind": "epsilon_greedy"}, "expected epsilon as a number, got None"),
        ({"kind": "epsilon_greedy", "epsilon": True}, "expected epsilon as a number"),
        ({"kind": "epsilon_greedy", "epsilon": 1.5}, "expected epsilon from 0 to 1"),
        ({"kind": "greedy", "temperature": 1.0}, "greedy takes no temperature"),
        ({"kind": "greedy", "other": 1}, "expected kind and its parameter"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(document, text):
    """With what was expected and what came."""
    with pytest.raises(SpecError, match=text):
        PolicySpec.from_json({**SPEC.to_json(), "action_rule": document})


@pytest.mark.parametrize("rule", RULES[1:], ids=str)
def test_a_rule_that_nothing_acts_by_is_refused_at_load(rule):
    """By torch and numpy alike, hence by trainers, clients and collectors: what is stored is the
    propensity of the rule, never that of another one."""
    weights = Policy(SPEC, seed=0).get_weights()
    for make in (lambda: Policy(with_rule(rule)), lambda: NumpyPolicy(with_rule(rule), weights)):
        with pytest.raises(ValueError, match=r"action_rule: .* is not supported yet"):
            make()
