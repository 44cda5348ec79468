"""The shared losses give the golden numbers, and targets carry no gradient."""

import json
from pathlib import Path

import pytest
import torch

from policy.algorithms import losses

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "losses.json").read_text())
DQN = GOLDEN["dqn"]
Q = torch.tensor(DQN["q"], dtype=torch.float64)
BATCH = DQN["batch"]
STATES = torch.tensor([row["s"] for row in BATCH])
ACTIONS = torch.tensor([row["a"] for row in BATCH])
REWARDS = torch.tensor([row["r"] for row in BATCH], dtype=torch.float64)
NEXT = torch.tensor([row.get("s2", 0) for row in BATCH])  # a terminated row's value is not read
TERMINATED = torch.tensor([row["terminated"] for row in BATCH])


def close(found, expected):
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0
    )


def test_targets_of_one_network():
    """The target is r + gamma max Q, and r alone at the end."""
    targets = losses.double_q_targets(REWARDS, TERMINATED, Q[NEXT], Q[NEXT], DQN["gamma"])
    close(targets, DQN["td_targets"])


def test_double_q_targets():
    """In double Q-learning one network selects the next action and the other one gives its
    value."""
    case = GOLDEN["double_dqn"]
    other = torch.tensor(case["target_q"], dtype=torch.float64)
    targets = losses.double_q_targets(REWARDS, TERMINATED, Q[NEXT], other[NEXT], DQN["gamma"])
    close(targets, case["targets"])


def test_targets_carry_no_gradient():
    """A target that learned would chase itself."""
    q = Q.clone().requires_grad_()
    assert not losses.double_q_targets(REWARDS, TERMINATED, q, q, 0.9).requires_grad


def test_conservative_regulariser():
    """logsumexp of all actions minus the value of the logged one."""
    found = losses.cql_regulariser(Q[STATES], ACTIONS)
    close(found, GOLDEN["cql_regulariser"]["value"])


def test_expectile_loss():
    """Errors below weigh 1 - tau, errors above tau."""
    case = GOLDEN["iql_expectile"]
    found = losses.expectile_loss(torch.tensor(case["u"], dtype=torch.float64), case["tau"])
    close(found, case["loss"])


def test_clipped_surrogate_and_the_two_estimates_of_kl():
    """The terms are compared, not only their mean, which reveals a clip on the wrong side."""
    case = GOLDEN["ppo_clip"]
    old, new = (torch.tensor(case[name], dtype=torch.float64) for name in ("p_old", "p_new"))
    log_ratio = new.log() - old.log()
    advantages = torch.tensor(case["advantages"], dtype=torch.float64)
    terms = losses.clipped_surrogate(log_ratio, advantages, case["clip"])
    close(terms, case["terms"])
    close(-terms.mean(), case["loss"])
    close(losses.k1(log_ratio), case["k1"])
    close(losses.k3(log_ratio), case["k3"])


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_surrogate_has_no_gradient_beyond_the_clip(sign):
    """This applies where the ratio has already moved as far as the advantage may push it."""
    log_ratio = torch.tensor([sign * 0.5], dtype=torch.float64, requires_grad=True)
    losses.clipped_surrogate(log_ratio, torch.tensor([sign]), 0.2).sum().backward()
    assert log_ratio.grad.item() == 0.0
