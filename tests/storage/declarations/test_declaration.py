"""Laws of declared flow control: off by default, whole numbers, kept by the file."""

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
