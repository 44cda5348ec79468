"""Scorers: the same score for the same candidate wherever it stands, in numpy and torch."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from policy.inference.spec import ModuleSpec, PolicySpec, SpecError
from policy.networks.policy import Policy
from storage.spaces.descriptors import Box, Dict, Discrete, MultiBinary, SpaceError

MOST, WIDTH = 20, 3


def scorer(**changes) -> PolicySpec:
    space = Dict(
        {
            "action_mask": MultiBinary((MOST,)),
            "candidates": Box((MOST, WIDTH), ragged=True),
            "user": Box((2,)),
            "where": Discrete(3),
        }
    )
    return PolicySpec(
        space,
        Discrete(MOST, 1),
        ModuleSpec(**{"kind": "scorer", "hidden": (8, 4), **changes}),
        observation_filter="MeanStdFilter",
    )


def made(spec: PolicySpec, seed: int) -> Policy:
    policy, rng = Policy(spec, seed=seed), np.random.default_rng(seed)
    weights = policy.get_weights()
    noise = {name: rng.normal(scale=0.5, size=w.shape) for name, w in weights.items()}
    policy.set_weights({k: (w + noise[k]).astype(np.float32) for k, w in weights.items()})
    policy.filter.push(rng.normal(2.0, 3.0, size=(50, spec.flattener.features)))
    return policy


def columns(rows: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    mask = np.zeros((rows, MOST), np.int8)
    items = np.zeros((rows, MOST, WIDTH), np.float32)
    for row in range(rows):
        count = rng.integers(1, MOST + 1)
        mask[row, :count] = 1
        items[row, :count] = rng.normal(size=(count, WIDTH))
    return {
        "action_mask": mask,
        "candidates": items,
        "user": rng.normal(size=(rows, 2)).astype(np.float32),
        "where": rng.integers(0, 3, rows),
    }


@pytest.mark.parametrize("hidden", [(), (8,), (8, 4)])
def test_numpy_equals_torch(hidden) -> None:
    """Scores, values and propensities, in batches and one by one."""
    policy, observed = made(scorer(hidden=hidden), 3), columns(9, 4)
    twin, flat = policy.to_numpy(), policy.flatten(observed)
    with torch.no_grad():
        seen = policy.observe(flat)
        expected, values = policy.module.dist_inputs(seen).numpy(), policy.values(seen).numpy()
    np.testing.assert_allclose(twin.dist_inputs(flat), expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(twin.values(flat), values, atol=1e-5, rtol=1e-5)
    for row in range(9):
        one = {name: column[row] for name, column in observed.items()}
        single = twin.act_one(one, np.random.default_rng(row))
        many = twin.act(flat[row : row + 1], np.random.default_rng(row))
        assert single.action == many.actions[0]
        assert observed["action_mask"][row, single.action - 1]
        np.testing.assert_allclose(single.logp, many.logp[0], atol=1e-6)


def test_a_score_is_that_of_the_candidate_not_of_its_place() -> None:
    """Reversed candidates have reversed scores; padding changes none."""
    twin, observed = made(scorer(), 5).to_numpy(), columns(6, 6)
    observed["action_mask"][:] = 1
    turned = {
        **observed,
        "candidates": observed["candidates"][:, ::-1].copy(),
    }
    scores = twin.dist_inputs(twin.flatten(observed))
    np.testing.assert_allclose(
        twin.dist_inputs(twin.flatten(turned)), scores[:, ::-1], atol=1e-5, rtol=1e-5
    )
    assert np.ptp(scores, axis=1).min() > 0


def test_a_score_follows_its_formula() -> None:
    """[s; 1]^T W [c; 1] + f(s, c), computed by hand without a filter."""
    spec = PolicySpec(
        Dict(
            {
                "action_mask": MultiBinary((2,)),
                "candidates": Box((2, 2), ragged=True),
                "user": Box((1,)),
            }
        ),
        Discrete(2),
        ModuleSpec(kind="scorer", hidden=(), value_head=False),
    )
    policy = Policy(spec)
    cross = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
    weight, bias = np.array([[7.0, 8.0, 9.0]], np.float32), np.array([10.0], np.float32)
    policy.set_weights({"pi.cross": cross, "pi.layers.0.weight": weight, "pi.layers.0.bias": bias})
    one = {
        "action_mask": np.ones((1, 2), np.int8),
        "candidates": np.array([[[0.5, -1.0], [2.0, 1.0]]], np.float32),
        "user": np.array([[3.0]], np.float32),
    }
    twin = policy.to_numpy()
    expected = []
    for item in one["candidates"][0]:
        product = np.append(3.0, 1.0) @ cross @ np.append(item, 1.0)
        expected.append(product + weight[0] @ np.append(3.0, item) + 10.0)
    np.testing.assert_allclose(twin.dist_inputs(twin.flatten(one))[0], expected)


def test_a_spec_of_a_scorer_comes_back_and_needs_candidates() -> None:
    spec = scorer()
    assert PolicySpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    with pytest.raises(SpecError, match="expected the keys 'candidates' and 'action_mask'"):
        PolicySpec(Box((2,)), Discrete(3), ModuleSpec(kind="scorer"))
    with pytest.raises(
        SpaceError, match=r"observation\.candidates: expected candidates:NxFEATURES"
    ):
        PolicySpec(
            Dict({"action_mask": MultiBinary((3,)), "candidates": Box((4, 2), ragged=True)}),
            Discrete(3),
            ModuleSpec(kind="scorer"),
        )
