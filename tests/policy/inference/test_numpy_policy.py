"""Numpy inference: equal to torch, single or batched, and bad input is refused."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.inference.action_layout import action_layout
from policy.inference.action_rule import GREEDY, SAMPLE, ActionRule
from policy.inference.distributions import NotFinite
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import ACTIVATIONS, ModuleSpec, PolicySpec
from policy.networks.policy import Policy
from storage.spaces.descriptors import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    SpaceError,
    Tuple,
)

OBSERVATIONS = [
    Box((4,)),
    Box((2, 3), "float64"),
    Discrete(5, 2),
    Dict({"a": Box((), "uint8"), "b": Tuple((MultiBinary((3,)), MultiDiscrete((2, 3))))}),
]
ACTIONS = [
    Discrete(2),
    Discrete(3, -1),
    Discrete(40),
    MultiDiscrete((2, 3), (1, 0)),
    MultiBinary((2, 2)),
    Box((2,), "float32", -1.0, 1.0),
    Dict({"x": Discrete(3), "y": Box((2,), "float64", -0.5, 0.5), "z": MultiBinary((1,))}),
]
RULES = [SAMPLE, ActionRule("sample", temperature=0.4), GREEDY]
SQUASHED = Box((2, 1), "float32", [[-3.0], [0.5]], [[1.0], [0.75]])
specs = st.builds(
    lambda observation, action, *rest, **named: PolicySpec(
        observation,
        action,
        *rest,
        distribution="squashed_gaussian" if action == SQUASHED else None,
        **named,
    ),
    st.sampled_from(OBSERVATIONS),
    st.sampled_from([*ACTIONS, SQUASHED]),
    st.builds(
        ModuleSpec,
        hidden=st.lists(st.integers(1, 70), max_size=3).map(tuple),
        activation=st.sampled_from(ACTIVATIONS),
        state_std=st.booleans(),
    ),
    observation_filter=st.sampled_from(["NoFilter", "MeanStdFilter"]),
    action_rule=st.sampled_from(RULES),
)


def random_policy(spec, seed):
    """A torch policy with a head that is far from uniform, and flat observations for it."""
    policy, rng = Policy(spec, seed=seed), np.random.default_rng(seed)
    policy.set_weights(
        {
            name: (array + rng.normal(scale=0.3, size=array.shape)).astype(np.float32)
            for name, array in policy.get_weights().items()
        }
    )
    flat = rng.normal(size=(8, spec.flattener.size)).astype(np.float32)
    policy.filter.push(3 * flat + 1)
    return policy, flat


@settings(max_examples=80, deadline=None)
@given(specs, st.integers(0, 2**31))
def test_numpy_equals_torch(spec, seed):
    """dist_inputs, values and logp within 1e-5 for random specs, weights and filters.

    Deviations that the network gives may be tiny: a density then magnifies the difference of means.
    """
    policy, flat = random_policy(spec, seed)
    twin = policy.to_numpy(version=4)
    with torch.no_grad():
        observed = policy.observe(flat)
        expected = policy.module.dist_inputs(observed).numpy()
        values = policy.values(observed).numpy()
    np.testing.assert_allclose(twin.dist_inputs(flat), expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(twin.values(flat), values, atol=1e-5, rtol=1e-5)
    actions = twin.act(flat, np.random.default_rng(seed))
    stds = np.exp(expected[:, spec.layout.head :]) if spec.module.state_std else np.full(1, 10.0)
    within = 1e-5 * max(1.0, 10 / stds.min(initial=10.0))
    np.testing.assert_allclose(
        policy.logp(flat, actions.columns), actions.logp, atol=within, rtol=1e-5
    )
    assert twin.version == 4


@settings(max_examples=40, deadline=None)
@given(specs, st.integers(0, 2**31))
def test_the_same_generator_draws_the_same_actions_in_torch(spec, seed):
    """compute_actions and NumpyPolicy.act agree action for action, with exploration or without."""
    policy, flat = random_policy(spec, seed)
    for explore in (True, False):
        ours = policy.to_numpy().act(flat, np.random.default_rng(seed), explore=explore)
        theirs = policy.compute_actions(flat, np.random.default_rng(seed), explore=explore)
        for path, column in ours.columns.items():
            np.testing.assert_allclose(column, theirs.columns[path], atol=1e-4, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ACTIONS),
    st.integers(0, 2**31),
    st.booleans(),
    st.sampled_from([*RULES, ActionRule("epsilon_greedy", epsilon=0.3)]),
)
def test_one_observation_acts_as_a_batch_of_one(action, seed, explore, rule):
    """act_one gives the result of act on its row, with the same generator, by every rule."""
    if rule.kind == "epsilon_greedy" and not action_layout(action).is_discrete:
        rule = SAMPLE
    policy, flat = random_policy(PolicySpec(Box((4,)), action, action_rule=rule), seed)
    twin = policy.to_numpy()
    many = twin.act(flat[:1], np.random.default_rng(seed), explore=explore)
    one = twin.act_one(flat[0], np.random.default_rng(seed), explore=explore)
    np.testing.assert_equal(type(one.action), type(many.actions[0]))
    np.testing.assert_equal(one.action, many.actions[0])
    np.testing.assert_equal(one.action_env, many.actions_env[0])
    np.testing.assert_allclose(one.logp, many.logp[0], atol=1e-6)
    np.testing.assert_allclose(one.dist_inputs, many.dist_inputs[0], atol=1e-6)


def test_logp_is_that_of_the_unclipped_action():
    """A Box action far outside is sent clipped, but stored as drawn, with the logp of that."""
    policy = Policy(PolicySpec(Box((1,)), Box((1,), "float32", -0.01, 0.01)))
    twin, flat = policy.to_numpy(), np.zeros((50, 1), np.float32)
    actions = twin.act(flat, np.random.default_rng(0))
    assert np.abs(actions.columns[""]).max() > 0.01
    assert np.abs(actions.env_columns[""]).max() <= np.float32(0.01)
    np.testing.assert_array_equal(twin.logp(flat, actions.columns), actions.logp)


def test_a_choice_of_few_options_makes_no_batch(monkeypatch):
    """act_one does not fall through to `act`, and checks few numbers without numpy's calls."""
    policy, flat = random_policy(PolicySpec(Box((4,)), Discrete(16, 3)), 5)
    twin = policy.to_numpy()
    expected = twin.act(flat[:1], np.random.default_rng(1)).actions[0]
    monkeypatch.setattr(NumpyPolicy, "act", None)
    monkeypatch.setattr(np, "isfinite", None)
    assert twin.act_one(flat[0], np.random.default_rng(1)).action == expected


def test_probabilities_of_a_discrete_space_sum_to_one():
    """(B, n) float64 that agree with logp."""
    policy, flat = random_policy(PolicySpec(Box((4,)), Discrete(3, 7)), 5)
    probabilities = policy.to_numpy().probabilities(flat)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-12)
    logp = policy.to_numpy().logp(flat, np.full(len(flat), 8))
    np.testing.assert_allclose(np.exp(logp), probabilities[:, 1], rtol=1e-12)


@pytest.mark.parametrize("action", [Discrete(2), Discrete(40), Box((2,))])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_observation_that_is_not_finite_is_refused(action, bad):
    """A NaN never becomes an action."""
    twin = Policy(PolicySpec(Box((2,)), action, ModuleSpec(activation="relu"))).to_numpy()
    obs = np.array([bad, 0.0], np.float32)
    with pytest.raises(ValueError, match="expected finite numbers"):
        twin.act_one(obs, np.random.default_rng(0))


def overflowing():
    """Weights of normal size whose result exceeds float32 for an observation of 3e38."""
    spec = PolicySpec(Box((2,)), Discrete(2), ModuleSpec(hidden=(), value_head=False))
    weights = {
        "pi.0.weight": np.array([[2, 2], [-2, -2]], np.float32),
        "pi.0.bias": np.zeros(2, np.float32),
    }
    return NumpyPolicy(spec, weights)


def test_an_observation_that_overflows_keeps_no_other_from_its_action():
    """Each row of a batch is separate, in order; the same for a float64 beyond float32."""
    flat = np.array([[0, 0], [3e38, 3e38], [0, 1], [np.inf, 0], [1, 0]], np.float32)
    rng = np.random.default_rng(0)
    finite, actions = overflowing().act_where_finite(flat, rng, explore=False)
    assert finite.tolist() == [True, False, True, False, True]
    assert actions.dist_inputs.tolist() == [[0, 0], [2, -2], [2, -2]]
    none, nothing = overflowing().act_where_finite(flat[1:2], rng)
    assert (none.tolist(), len(nothing)) == ([False], 0)


@pytest.mark.parametrize("explore", [True, False])
def test_one_observation_that_overflows_is_refused(explore):
    with np.errstate(over="ignore", invalid="ignore"), pytest.raises(NotFinite):
        overflowing().act_one([3e38, 3e38], np.random.default_rng(0), explore=explore)
    half = PolicySpec(Box((1,)), Discrete(2), ModuleSpec(hidden=(), value_head=False))
    weights = {
        "pi.0.weight": np.array([[1], [-2]], np.float32),
        "pi.0.bias": np.zeros(2, np.float32),
    }
    with np.errstate(over="ignore"), pytest.raises(NotFinite):  # the other logit is minus infinite
        NumpyPolicy(half, weights).act_one([3e38], np.random.default_rng(0), explore=explore)


def test_weights_that_act_nowhere_are_named():
    """Finite weights with infinite sums are refused; weights of normal size act near zero."""
    overflowing().require_finite()
    spec = PolicySpec(Box((4,)), Discrete(2))
    huge = {name: np.full(shape, 3e38, np.float32) for name, shape in spec.weight_shapes().items()}
    with pytest.raises(ValueError, match=r"^weights: expected finite outputs"):
        NumpyPolicy(spec, huge).require_finite()


def test_wrong_shapes_are_refused():
    """The error says what was expected and what came."""
    twin, rng = Policy(PolicySpec(Box((2,)), Discrete(2))).to_numpy(), np.random.default_rng(0)
    with pytest.raises(SpaceError, match=r"expected shape \(2,\), got \(3,\)"):
        twin.act_one(np.zeros(3, np.float32), rng)
    with pytest.raises(ValueError, match=r"expected flat ones \(B, 2\), got \(4, 3\)"):
        twin.act(np.zeros((4, 3), np.float32), rng)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("pi.0.bias", None, r"missing \['pi.0.bias'\]"),
        ("extra", np.zeros(1, np.float32), r"not expected \['extra'\]"),
        ("pi.0.bias", np.zeros(1, np.float32), r"pi.0.bias: expected float32 \(64,\)"),
        ("pi.0.bias", np.zeros(64), "pi.0.bias: expected float32"),
        ("pi.0.bias", np.full(64, np.nan, np.float32), "expected finite numbers"),
    ],
)
def test_weights_that_do_not_fit_are_refused(name, change, text):
    """Missing, extra, misshapen and diverged weights are named."""
    spec = PolicySpec(Box((2,)), Discrete(2))
    weights = Policy(spec).get_weights()
    if change is None:
        del weights[name]
    else:
        weights[name] = change
    with pytest.raises(ValueError, match=text):
        NumpyPolicy(spec, weights)


def test_later_changes_of_the_given_arrays_change_nothing():
    """A policy copies its weights: an instance never changes."""
    spec = PolicySpec(Box((2,)), Discrete(2))
    weights, flat = Policy(spec).get_weights(), np.ones((1, 2), np.float32)
    twin = NumpyPolicy(spec, weights)
    before = twin.dist_inputs(flat)
    for array in weights.values():
        array += 1
    np.testing.assert_array_equal(twin.dist_inputs(flat), before)


def test_numpy_inference_imports_neither_torch_nor_arrow():
    """A thin client that acts loads numpy alone."""
    heavy = ("torch", "pyarrow", "pandas", "scipy", "gymnasium")
    module = "policy.inference.numpy_policy"
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
