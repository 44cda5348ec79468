"""Declarations: what is off by default, what is refused, what the file keeps."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.declarations.declaration import DeclarationError, PolicyDeclaration
from storage.declarations.policy_files import read_declaration
from storage.spaces.descriptors import Box, Discrete

SPACES = {"observation": Box((4,)), "action": Discrete(2)}


def test_flow_control_is_off_unless_declared():
    """A file without these settings can still be read."""
    declared = PolicyDeclaration(**SPACES)
    assert (declared.steps_per_version, declared.max_policy_lag) == (None, None)
    document = declared.to_json()
    del document["steps_per_version"], document["max_policy_lag"]
    assert PolicyDeclaration.from_json(document) == declared


def test_flow_control_survives_the_file():
    """The settings of flow control are the same after a declaration was written as JSON and read
    back."""
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
    """The file omits a setting that was not declared."""
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


# --- what a policy file may not hold ---------------------------------------------------------

NUMBERS = st.floats() | st.integers(-(10**400), 10**400)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=4,
)
FIELDS = sorted(PolicyDeclaration(**SPACES, reward_range=(0, 1)).to_json())


@given(name=st.sampled_from(FIELDS), value=JSON)
def test_any_value_of_any_field_is_taken_or_named(tmp_path_factory, name, value):
    """An invalid value gives an error that begins with file and field; a valid one can be saved."""
    path = tmp_path_factory.getbasetemp() / "default.json"
    document = PolicyDeclaration(**SPACES).to_json() | {name: value}
    path.write_text(json.dumps(document))
    try:
        declared = read_declaration(path)
    except DeclarationError as error:
        message = str(error).replace("policy id", "policy_id")
    else:
        message = ""
    if message:
        assert message.startswith(f"{path}: {name}")
        return
    assert PolicyDeclaration.from_json(json.loads(json.dumps(declared.to_json()))) == declared


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("reward_window", "1h", "reward_window: expected a finite number >= 0, got '1h'"),
        ("version", 0, "version: expected 1, got 0"),
        ("version", True, "version: expected 1, got True"),
        ("episode_timeout", None, "episode_timeout: expected a number > 0, got None"),
        ("part_steps", 1.5, "part_steps: expected a whole number >= 1, got 1.5"),
        ("seal_bytes", [1], "seal_bytes: expected a whole number >= 1, got [1]"),
        ("policy_id", 7, "policy id: expected 1 to 64 letters, digits, '_' or '-', got 7"),
        ("spec", "cnn", "spec: expected an object or null, got 'cnn'"),
        ("action", {"n": 2}, 'action: space: expected {"version", "space"}, got {\'n\': 2}'),
    ],
)
def test_a_wrong_type_says_what_was_expected_and_what_came(tmp_path: Path, name, value, text):
    """The error has the file's name, the field, the expected type and the given value."""
    path = tmp_path / "default.json"
    path.write_text(json.dumps(PolicyDeclaration(**SPACES).to_json() | {name: value}))
    with pytest.raises(DeclarationError) as caught:
        read_declaration(path)
    assert str(caught.value) == f"{path}: {text}"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda document: document | {"rewardwindow": 1}, "rewardwindow: expected a field of ['ac"),
        (lambda document: {"version": 1, "action": document["action"]}, "observation: expected a "),
        (lambda document: {**document, "version": None}, "version: expected 1, got None"),
        (lambda document: {"observation": 1}, "version: expected 1, got none"),
        (lambda document: [document], "expected a JSON object, got ["),
    ],
)
def test_a_field_too_many_or_too_few_is_named(tmp_path: Path, change, text):
    path = tmp_path / "default.json"
    path.write_text(json.dumps(change(PolicyDeclaration(**SPACES).to_json())))
    with pytest.raises(DeclarationError) as caught:
        read_declaration(path)
    assert str(caught.value).startswith(f"{path}: {text}")


def test_a_file_that_is_no_json_is_named(tmp_path: Path):
    path = tmp_path / "default.json"
    path.write_text("{'observation'")
    with pytest.raises(DeclarationError, match=f"{path}: expected JSON: "):
        read_declaration(path)
