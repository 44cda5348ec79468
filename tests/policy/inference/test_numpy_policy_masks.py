"""Masked policies: what a mask forbids has probability 0 under every rule, in numpy and torch."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.inference.action_layout import MASKED
from policy.inference.action_rule import GREEDY, SAMPLE, ActionRule
from policy.inference.distributions import NotFinite
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import ModuleSpec, PolicySpec, SpecError
from policy.networks.policy import Policy
from storage.spaces.descriptors import Box, Dict, Discrete, MultiBinary, MultiDiscrete, SpaceError

RULES = [
    SAMPLE,
    ActionRule("sample", temperature=0.01),
    ActionRule("epsilon_greedy", epsilon=0.3),
    GREEDY,
    ActionRule("sample", explore=0.2),
    ActionRule("greedy", explore=0.2),
    ActionRule("squarecb", gamma=5.0),
]
ACTIONS = [Discrete(5, -2), Discrete(30), MultiDiscrete((2, 3), (1, 0))]
specs = st.builds(
    lambda action, rule, kind: PolicySpec(
        Dict({"action_mask": MultiBinary((options(action),)), "x": Box((3,))}),
        action,
        ModuleSpec(hidden=(8,)),
        observation_filter=kind,
        action_rule=rule,
    ),
    st.sampled_from(ACTIONS),
    st.sampled_from(RULES),
    st.sampled_from(["NoFilter", "MeanStdFilter"]),
)


def options(action) -> int:
    return action.n if isinstance(action, Discrete) else sum(action.nvec)


def observed(spec, rows, seed):
    """Columns with random masks, each of which allows an option of every choice."""
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 2, (rows, options(spec.action))).astype(np.int8)
    at = 0
    for size in spec.action_mask.sizes:
        mask[np.arange(rows), at + rng.integers(0, size, rows)] = 1
        at += size
    return {"action_mask": mask, "x": rng.normal(size=(rows, 3)).astype(np.float32)}


def made(spec, seed) -> Policy:
    policy, rng = Policy(spec, seed=seed), np.random.default_rng(seed)
    policy.set_weights(
        {
            name: (array + rng.normal(scale=0.5, size=array.shape)).astype(np.float32)
            for name, array in policy.get_weights().items()
        }
    )
    seen = policy.flatten(observed(spec, 8, seed))
    policy.filter.push(spec.flattener.features_of(3 * seen + 1))
    return policy


@settings(max_examples=60, deadline=None)
@given(specs, st.integers(0, 2**31))
def test_torch_and_numpy_agree_and_never_take_what_is_forbidden(spec, seed):
    """By batches and one by one, with exploration and without; logged are true propensities."""
    policy, columns = made(spec, seed), observed(spec, 12, seed)
    twin, flat = policy.to_numpy(), policy.flatten(columns)
    with torch.no_grad():
        theirs = policy.module.dist_inputs(policy.observe(flat)).numpy()
        assert torch.isfinite(policy.distribution(policy.observe(flat)).entropy()).all()
    np.testing.assert_allclose(twin.dist_inputs(flat), theirs, atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(theirs == np.float32(MASKED), columns["action_mask"] == 0)
    for explore in (True, False):
        acted = twin.act(flat, np.random.default_rng(seed), explore=explore)
        assert not spec.action_mask.forbidden(columns, acted.columns[""]).any()
        assert np.isfinite(acted.logp).all()
        one = {name: column[0] for name, column in columns.items()}
        single = twin.act_one(one, np.random.default_rng(seed), explore=explore)
        many = twin.act(flat[:1], np.random.default_rng(seed), explore=explore)
        np.testing.assert_array_equal(single.action, many.actions[0])
        np.testing.assert_allclose(single.logp, many.logp[0], atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_million_actions_have_the_stated_frequencies(rule):
    """None of them is forbidden; what is explored is spread over what is allowed."""
    space = Dict({"action_mask": MultiBinary((5,)), "x": Box((1,))})
    spec = PolicySpec(space, Discrete(5), ModuleSpec(hidden=()), action_rule=rule)
    bias = np.array([9.0, 1.0, 1.5, 0.5, 9.0], np.float32)  # the best ones are forbidden
    weights = {name: np.zeros(shape, np.float32) for name, shape in spec.weight_shapes().items()}
    twin, rows = NumpyPolicy(spec, weights | {"pi.0.bias": bias}), 1_000_000
    mask = np.broadcast_to(np.array([0, 1, 1, 1, 0], np.int8), (rows, 5))
    flat = twin.flatten({"action_mask": mask, "x": np.zeros((rows, 1), np.float32)})
    acted = twin.act(flat, np.random.default_rng(7))
    counts = np.bincount(acted.columns[""], minlength=5)
    assert counts[0] == counts[4] == 0
    probs = twin.probabilities(flat[:1])[0]
    assert probs.sum() == pytest.approx(1)
    spread = np.sqrt(rows * probs * (1 - probs))
    assert (np.abs(counts - rows * probs) <= 5 * spread).all()
    least = max(rule.explore, rule.epsilon or 0.0) / 3
    assert (probs[1:4] >= least - 1e-12).all()
    if rule.kind in ("epsilon_greedy", "greedy"):
        assert probs[1] == pytest.approx(least)


@pytest.mark.parametrize("action", ACTIONS, ids=str)
def test_a_mask_that_allows_nothing_is_refused_by_name(action):
    spec = PolicySpec(
        Dict({"action_mask": MultiBinary((options(action),)), "x": Box((3,))}), action
    )
    policy, columns = made(spec, 1), observed(spec, 2, 1)
    columns["action_mask"][1] = 0
    twin, rng = policy.to_numpy(), np.random.default_rng(0)
    with pytest.raises(SpaceError, match="action_mask: expected at least one allowed"):
        twin.act(twin.flatten(columns), rng)
    with pytest.raises(SpaceError, match="action_mask: expected at least one allowed"):
        twin.act_one({name: column[1] for name, column in columns.items()}, rng)
    with pytest.raises(SpaceError, match="action_mask: expected at least one allowed"):
        twin.act_where_finite(twin.flatten(columns), rng)
    with pytest.raises(SpaceError, match="action_mask: expected at least one allowed"):
        policy.compute_actions(policy.flatten(columns), rng)


def test_a_choice_at_the_end_of_rounding_is_allowed(monkeypatch):
    """Where the uniform number is the largest below 1, the last allowed option is taken."""
    spec = PolicySpec(Dict({"action_mask": MultiBinary((4,)), "x": Box((3,))}), Discrete(4))
    twin, columns = made(spec, 3).to_numpy(), observed(spec, 1, 3)
    columns["action_mask"][:] = [1, 1, 0, 0]

    class Last:
        def random(self, shape=None):
            largest = math.nextafter(1.0, 0.0)
            return largest if shape is None else np.full(shape, largest)

    for bias in np.random.default_rng(5).normal(size=(200, 4)).astype(np.float32):
        twin._last = [(twin._last[0][0], bias)]
        twin._pi[-1:] = twin._last
        one = {name: column[0] for name, column in columns.items()}
        assert twin.act_one(one, Last()).action == 1
        assert twin.act(twin.flatten(columns), Last()).actions == [1]


def test_a_spec_says_its_mask_and_older_ones_have_none(caplog):
    """A spec of release 0.1.0 with such a leaf reads it as features, as it always did."""
    spec = PolicySpec(Dict({"action_mask": MultiBinary((2,)), "x": Box((3,))}), Discrete(2))
    document = spec.to_json()
    assert document["mask"] is True
    assert PolicySpec.from_json(document) == spec
    assert spec.weight_shapes()["pi.0.weight"] == (64, 3)
    del document["mask"]
    older = PolicySpec.from_json(document)
    assert older.mask is False
    assert older.to_json() == document
    assert older.weight_shapes()["pi.0.weight"] == (64, 5)
    weights = Policy(older).get_weights()
    NumpyPolicy(older, weights)
    assert not caplog.records
    NumpyPolicy(older, weights, version=3)
    assert "version 3 was trained without action masks" in caplog.text
    assert "mask" not in PolicySpec(Box((3,)), Discrete(2)).to_json()
    with pytest.raises(SpecError, match="mask: expected true, or no mask, got False"):
        PolicySpec.from_json({**document, "mask": False})
    with pytest.raises(SpecError, match="mask: expected the key 'action_mask' in the observation"):
        PolicySpec(Box((3,)), Discrete(2), mask=True)
    with pytest.raises(SpaceError, match=r"action_mask: expected MultiBinary\(3\)"):
        PolicySpec(spec.observation, Discrete(3))
    assert replace(older, action=Discrete(3)).mask is False


@pytest.mark.parametrize("size", [5, 30])
@pytest.mark.parametrize(
    "rule",
    [
        ActionRule("sample", temperature=1e300),
        ActionRule("sample", temperature=1e30, explore=0.5),
        ActionRule("squarecb", gamma=1e300),
        ActionRule("squarecb", gamma=0.0),
    ],
    ids=str,
)
def test_extreme_parameters_of_a_rule_allow_nothing_more(rule, size):
    """A large temperature divides the logits of what is forbidden, too."""
    space = Dict({"action_mask": MultiBinary((size,)), "x": Box((3,))})
    twin, rows = made(PolicySpec(space, Discrete(size), action_rule=rule), 2).to_numpy(), 60
    columns = observed(twin.spec, rows, 4)
    flat, rng = twin.flatten(columns), np.random.default_rng(0)
    assert not twin.spec.action_mask.forbidden(columns, twin.act(flat, rng).columns[""]).any()
    np.testing.assert_allclose(twin.probabilities(flat).sum(axis=1), 1.0)
    for row in range(rows):
        one = {name: column[row] for name, column in columns.items()}
        assert columns["action_mask"][row, twin.act_one(one, rng).action]


@pytest.mark.parametrize("size", [5, 30])
def test_numbers_below_those_of_what_is_forbidden_are_not_finite(size):
    """The network's outputs for a very large observation may be less than a forbidden logit."""
    space = Dict({"action_mask": MultiBinary((size,)), "x": Box((1,))})
    spec = PolicySpec(space, Discrete(size), ModuleSpec(hidden=()))
    weights = {name: np.zeros(shape, np.float32) for name, shape in spec.weight_shapes().items()}
    twin = NumpyPolicy(spec, weights | {"pi.0.weight": np.full((size, 1), -1.0, np.float32)})
    columns = {"action_mask": np.eye(2, size, dtype=np.int8), "x": np.array([[1.0], [1e33]])}
    flat, rng = twin.flatten(columns), np.random.default_rng(0)
    assert twin.act_one({name: column[0] for name, column in columns.items()}, rng).action == 0
    with pytest.raises(NotFinite):
        twin.act_one({name: column[1] for name, column in columns.items()}, rng)
    with pytest.raises(NotFinite):
        twin.act(flat, rng)
    finite, acted = twin.act_where_finite(flat, rng)
    assert (finite.tolist(), acted.actions) == ([True, False], [0])


@pytest.mark.parametrize("size", [5, 300])
def test_the_number_of_a_forbidden_option_does_not_matter(size):
    """One action and a batch of it act alike where only forbidden options have such numbers."""
    space = Dict({"action_mask": MultiBinary((size,)), "x": Box((1,))})
    spec = PolicySpec(space, Discrete(size), ModuleSpec(hidden=()))
    weights = {name: np.zeros(shape, np.float32) for name, shape in spec.weight_shapes().items()}
    slope = np.where(np.arange(size) < 2, 0.0, -1.0)[:, None].astype(np.float32)
    twin = NumpyPolicy(spec, weights | {"pi.0.weight": slope})
    mask = (np.arange(size) < 2).astype(np.int8)
    one = {"action_mask": mask, "x": np.array([1e33], np.float32)}
    many = twin.flatten({name: column[None] for name, column in one.items()})
    for seed in range(5):
        acted = twin.act(many, np.random.default_rng(seed))
        assert twin.act_one(one, np.random.default_rng(seed)).action == acted.actions[0] < 2
