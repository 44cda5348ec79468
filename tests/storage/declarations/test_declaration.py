"""Laws of declarations: what is off by default, what makes sense, what the file keeps."""

import json

import pytest

from storage.declarations.declaration import DeclarationError, PolicyDeclaration
from storage.spaces.descriptors import Box, Discrete

SPACES = {"observation": Box((4,)), "action": Discrete(2)}


def test_flow_control_is_off_unless_declared():
    """A file written before there was any still reads."""
    declared = PolicyDeclaration(**SPACES)
    assert (declared.steps_per_version, declared.max_policy_lag) == (None, None)
    document = declared.to_json()
    del document["steps_per_version"], document["max_policy_lag"]
    assert PolicyDeclaration.from_json(document) == declared


def test_flow_control_survives_the_file():
    """As JSON and back."""
    declared = PolicyDeclaration(**SPACES, steps_per_version=256, max_policy_lag=0)
    assert PolicyDeclaration.from_json(json.loads(json.dumps(declared.to_json()))) == declared


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps_per_version", 0), ("steps_per_version", 2.5), ("max_policy_lag", -1),
     ("max_policy_lag", True), ("max_policy_lag", "4")],
)  # fmt: skip
def test_flow_control_that_makes_no_sense_is_refused(name, value):
    """The error names the setting, what was expected and what came."""
    with pytest.raises(DeclarationError, match=f"{name}: expected a whole number"):
        PolicyDeclaration(**SPACES, **{name: value})


def test_a_reward_range_survives_the_file_and_is_left_out_of_it_unless_declared():
    """A collector of an earlier release refuses keys that it does not know."""
    assert "reward_range" not in PolicyDeclaration(**SPACES).to_json()
    declared = PolicyDeclaration(**SPACES, reward_range=[0, 2])
    assert declared.reward_range == (0.0, 2.0)
    assert PolicyDeclaration.from_json(json.loads(json.dumps(declared.to_json()))) == declared


@pytest.mark.parametrize(
    "value",
    [
        (1, 1),
        (2, 1),
        (0,),
        (0, 1, 2),
        (0, float("inf")),
        (float("nan"), 1),
        ("0", "1"),
        3,
        (False, 1),
    ],
)
def test_a_reward_range_that_makes_no_sense_is_refused(value):
    """The error names the setting, what was expected and what came."""
    with pytest.raises(DeclarationError, match=r"reward_range: expected \[low, high\]"):
        PolicyDeclaration(**SPACES, reward_range=value)
