"""The torch policy: seeded, and weights are copies.

Also of `policy.networks.modules`.
"""

import numpy as np
import pytest
import torch

from policy.inference.spec import ModuleSpec, PolicySpec
from policy.networks.policy import Policy
from storage.spaces.descriptors import Box, Dict, Discrete

SPEC = PolicySpec(Box((4,)), Dict({"a": Discrete(3), "b": Box((2,))}))


def test_a_seed_fixes_the_first_weights_and_leaves_torch_alone():
    """Same seed, same weights, whatever the state of the global generator."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = Policy(SPEC, seed=3).get_weights()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    two, other = Policy(SPEC, seed=3).get_weights(), Policy(SPEC, seed=4).get_weights()
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name])
    assert any((one[name] != other[name]).any() for name in one)


def test_weights_are_those_of_the_spec_and_copies():
    """get_weights has the spec's names and shapes; changing a copy does not change the policy."""
    policy = Policy(SPEC)
    weights = policy.get_weights()
    assert {name: array.shape for name, array in weights.items()} == SPEC.weight_shapes()
    weights["pi.0.bias"] += 1
    assert (policy.get_weights()["pi.0.bias"] == 0).all()
    policy.set_weights(weights, version=2)
    weights["pi.0.bias"] += 1
    assert (policy.get_weights()["pi.0.bias"] == 1).all()
    assert policy.version == 2


def test_refused_weights_change_nothing():
    """A partial set of weights is never loaded."""
    policy = Policy(SPEC)
    weights = policy.get_weights()
    weights["pi.0.bias"] += 1
    weights["pi.2.bias"] = np.zeros(3, np.float32)
    with pytest.raises(ValueError, match=r"pi\.2\.bias"):
        policy.set_weights(weights)
    assert (policy.get_weights()["pi.0.bias"] == 0).all()


def test_the_first_policy_is_nearly_uniform():
    """Exploration starts almost uniformly."""
    policy = Policy(PolicySpec(Box((4,)), Discrete(5)))
    flat = np.random.default_rng(0).normal(size=(100, 4)).astype(np.float32)
    assert np.abs(policy.to_numpy().probabilities(flat) - 0.2).max() < 0.02


def test_a_batch_with_nested_columns_is_read():
    """`obs` and `actions.<path>` become tensors, whose logp equals the numpy policy's."""
    policy, rng = Policy(SPEC), np.random.default_rng(0)
    batch = {
        "obs": rng.normal(size=(6, 4)).astype(np.float32),
        "actions.a": rng.integers(0, 3, 6),
        "actions.b": rng.normal(size=(6, 2)).astype(np.float32),
    }
    flat = policy.flat_observations(batch)
    logp = policy.distribution(policy.observe(flat)).logp(policy.stored_actions(batch))
    columns = {"a": batch["actions.a"], "b": batch["actions.b"]}
    np.testing.assert_allclose(
        logp.detach().numpy(), policy.to_numpy().logp(flat, columns), atol=1e-5
    )


def test_a_policy_without_value_head_says_so():
    """values raises and names the setting."""
    policy = Policy(PolicySpec(Box((4,)), Discrete(2), ModuleSpec(value_head=False)))
    with pytest.raises(ValueError, match=r"no value head: see ModuleSpec\.value_head"):
        policy.values(torch.zeros(1, 4))


def test_a_filter_state_travels_to_the_numpy_policy():
    """The client's filter has the statistics of the torch policy's."""
    spec = PolicySpec(Box((1,)), Discrete(2), observation_filter="MeanStdFilter")
    policy = Policy(spec)
    policy.filter.push([[100.0], [102.0]])
    flat = np.array([[101.0]], np.float32)
    assert policy.observe(flat).item() == 0.0
    again = Policy(spec, filter_state=policy.filter.to_json())
    assert again.observe(flat).item() == 0.0


def test_a_large_error_of_values_leaves_the_policys_gradient():
    """Under one limit for both, the policy would learn least where the values were wrong."""
    module = Policy(PolicySpec(Box((3,)), Box((1,))), seed=0).module
    for name, parameter in module.named_parameters():
        parameter.grad = torch.full_like(parameter, 1e3 if name.startswith("vf.") else 1e-4)
    module.clip_gradients(0.5)
    norm = torch.nn.utils.get_total_norm
    assert norm(p.grad for p in module.vf.parameters()) == pytest.approx(0.5, rel=1e-4)
    own = norm(p.grad for p in (module.log_std, *module.pi.parameters()))
    assert own == pytest.approx(1e-4 * 4_482**0.5, rel=1e-3)
