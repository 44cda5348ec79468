"""IQL: torchrl's losses on the same networks, and a policy better than the one that logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policy.algorithms.iql import IQL, IQLConfig, _Critics, _encoded
from policy.algorithms.learner import Learner
from policy.algorithms.offline import Transitions
from policy.inference.action_layout import action_layout
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.networks.policy import Policy
from storage.spaces.descriptors import Box, Dict, Discrete
from tests.policy.algorithms.steps import corridor, log_of

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "torchrl_losses.json").read_text())[
    "iql"
]
SMALL = ModuleSpec(hidden=(8,), value_head=False)
LINEAR = ModuleSpec(hidden=(), value_head=False)


def fill(layer: torch.nn.Module, numbers: dict[str, Any]) -> None:
    layer.load_state_dict({name: torch.tensor(numbers[name]) for name in ("weight", "bias")})


@pytest.mark.parametrize("spec", [Discrete(2), Box((1,))], ids=str)
def test_it_prefers_the_better_of_random_actions(spec: Any) -> None:
    """From moves to both sides at random it learns to move to the right."""
    log = corridor(1600, continuous=isinstance(spec, Box))
    policy = Policy(PolicySpec(Box((2,)), spec, SMALL))
    learner = Learner(policy, IQLConfig(updates=600, lr=3e-3, target_rate=0.05))
    learner.update(log)
    acted = learner.policy.to_numpy().act(log["obs"], np.random.default_rng(0), explore=False)
    assert (np.ravel(acted.columns[""]) > 0).mean() > 0.95


def test_the_losses_are_those_of_torchrl() -> None:
    """Each of the three, on the same batch and weights; beta in units of the advantages."""
    policy = Policy(PolicySpec(Box((3,)), Box((2,)), LINEAR))
    fill(policy.module.pi[0], GOLDEN["pi"])
    policy.module.load_state_dict(
        {**policy.module.state_dict(), "log_std": torch.tensor(GOLDEN["pi"]["log_std"])}
    )
    log = log_of(*(GOLDEN[name] for name in ("obs", "actions", "rewards", "terminated", "new_obs")))
    log["actions"] = np.asarray(GOLDEN["actions"], np.float32)
    rows = Transitions.of(policy, log)
    encoded = torch.tensor(GOLDEN["actions"])
    both = torch.cat([rows.observed, encoded], dim=1)
    critics = _Critics(policy, 2, torch.Generator())
    target = _Critics(policy, 2, torch.Generator()).q
    fill(critics.values.layers[0], GOLDEN["v"])
    for i in (0, 1):
        fill(critics.q[i][0], GOLDEN["q"][i])
        fill(target[i][0], GOLDEN["target_q"][i])
    with torch.no_grad():
        held = torch.minimum(*(q(both)[:, 0] for q in target))
        scale = float((held - critics.values(rows.observed)).square().mean().sqrt())
    config = IQLConfig(gamma=GOLDEN["gamma"], tau=GOLDEN["tau"], beta=GOLDEN["beta"] * scale)
    found = IQL(policy, config)._loss(rows, encoded, critics, target)
    own = {name: float(value.detach()) for name, value in found.items()}
    assert own["value_loss"] == pytest.approx(GOLDEN["losses"]["v"], rel=1e-5)
    assert own["q_loss"] == pytest.approx(GOLDEN["losses"]["q"], rel=1e-5)
    policy_loss = own["loss"] - own["value_loss"] - own["q_loss"]
    assert policy_loss == pytest.approx(GOLDEN["losses"]["pi"], rel=1e-4)


def test_each_network_follows_its_own_loss() -> None:
    """The policy's loss moves no critic, and theirs not the policy."""
    policy = Policy(PolicySpec(Box((2,)), Discrete(2), SMALL))
    algorithm = IQL(policy, IQLConfig())
    rows = Transitions.of(policy, corridor(32))
    encoded = _encoded(policy.spec.layout, rows.actions)
    critics = _Critics(policy, 2, torch.Generator().manual_seed(0))
    target = _Critics(policy, 2, torch.Generator().manual_seed(1)).q
    found = algorithm._loss(rows, encoded, critics, target)
    (found["value_loss"] + found["q_loss"]).backward(retain_graph=True)
    assert all(parameter.grad is None for parameter in policy.module.parameters())
    before = [parameter.grad.clone() for parameter in critics.parameters()]
    (found["loss"] - found["value_loss"] - found["q_loss"]).backward()
    for one, parameter in zip(before, critics.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad)


def test_actions_are_encoded_by_leaf() -> None:
    """Choices one-hot, from 0; numbers in units of their deviation, which may be 0."""
    layout = action_layout(Dict({"a": Discrete(3), "b": Box((2,))}))
    taken = [torch.tensor([[0], [2]]), torch.tensor([[1.0, 5.0], [3.0, 5.0]])]
    expected = [[1.0, 0.0, 0.0, 1.0, 5.0], [0.0, 0.0, 1.0, 3.0, 5.0]]
    assert _encoded(layout, taken).tolist() == expected
