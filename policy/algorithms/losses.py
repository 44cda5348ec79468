"""Losses that several algorithms share, as torch functions of tensors; means over the batch.

They keep the dtype of their arguments. Targets never carry a gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# policy ratios


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """(B,) min(w A, clip(w, 1 - clip, 1 + clip) A) with w = exp(log_ratio): maximised by PPO.

    Schulman et al. 2017, Proximal Policy Optimization Algorithms, eq. 7.
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return torch.minimum(ratio * advantages, clipped * advantages)


def k1(log_ratio: Tensor) -> Tensor:
    """Mean of -log w, an unbiased estimate of KL(old, new) from actions of the old policy."""
    return -log_ratio.mean()


def k3(log_ratio: Tensor) -> Tensor:
    """Mean of w - 1 - log w: a KL estimate like k1, but never negative and with less variance.

    Schulman 2020, Approximating KL Divergence.
    """
    return (log_ratio.expm1() - log_ratio).mean()


# values of actions


@torch.no_grad()
def double_q_targets(
    rewards: Tensor, terminated: Tensor, next_q: Tensor, next_target_q: Tensor, gamma: float
) -> Tensor:
    """(B,) r + gamma Q'(s', argmax_a Q(s', a)), or r if terminated.

    `next_q` (Q) and `next_target_q` (Q') are (B, A). van Hasselt, Guez & Silver 2016, Deep
    Reinforcement Learning with Double Q-learning, eq. 4. With the same values for both it is
    r + gamma max_a Q(s', a), of Mnih et al. 2015, Human-level control through deep reinforcement
    learning, algorithm 1.
    """
    chosen = next_q.argmax(dim=1, keepdim=True)
    following = next_target_q.gather(1, chosen)[:, 0].masked_fill(terminated, 0.0)
    return rewards + gamma * following


def cql_regulariser(q: Tensor, actions: Tensor) -> Tensor:
    """Mean of logsumexp_a Q(s, a) - Q(s, a taken); q (B, A), actions (B,) counted from 0.

    Kumar et al. 2020, Conservative Q-Learning, eq. 4 (without its factor alpha).
    """
    taken = q.gather(1, actions[:, None])[:, 0]
    return (torch.logsumexp(q, dim=1) - taken).mean()


def expectile_loss(difference: Tensor, tau: float) -> Tensor:
    """Mean of |tau - 1(u < 0)| u^2 with u = Q - V.

    Kostrikov, Nair & Levine 2022, Offline Reinforcement Learning with Implicit Q-Learning, eq. 5.
    """
    weight = (tau - (difference < 0).to(difference.dtype)).abs()
    return (weight * difference.square()).mean()


# imitation of the better actions


def advantage_weights(advantages: Tensor, beta: float, most: float) -> Tensor:
    """(B,) min(exp(beta A), most), clipped as logs so that no weight overflows; no gradient.

    Peng et al. 2019, Advantage-Weighted Regression, eq. 7 (clipped as in section 3.4 there).
    """
    return (beta * advantages.detach()).clamp(max=math.log(most)).exp()
