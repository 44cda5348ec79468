"""Learning from logged steps without asking for other actions: implicit Q-learning.

For rows s, a, r with next observation s', minimise over minibatches of B rows

    L_V = 1/B sum |tau - 1(u < 0)| u^2,   u = min(Q1'(s, a), Q2'(s, a)) - V(s)
    L_Q = 1/B sum (r + gamma V(s') - Qi(s, a))^2      for i = 1, 2   (r alone where it terminated)
    L_pi = -1/B sum min(exp(beta u / c), M) log pi(a|s),   c^2 = mean u^2 of the minibatch

Kostrikov, Nair & Levine 2022, Offline Reinforcement Learning with Implicit Q-Learning, eq. 5 to 7.
V is the tau-expectile of Q over logged actions: the value of the better ones, so that no action
outside the log is evaluated. Q' are the running means of the weights of Q. c makes beta independent
of the rewards' scale. The networks V and Q are not published. Works in any action space, and needs
no propensities. A row that is neither terminated nor has a next observation is excluded, as is one
with numbers beyond float32.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.nn import functional

from policy.algorithms.base import EPISODE, require_no_scorer
from policy.algorithms.losses import advantage_weights, expectile_loss
from policy.algorithms.offline import (
    OfflineAlgorithm,
    OfflineConfig,
    Transitions,
    scaled_transitions,
)
from policy.inference.action_layout import ActionLayout
from policy.networks.modules import ValueNetwork, mlp
from policy.networks.policy import Policy
from policy.progress import Progress, no_progress
from storage.experience.sample_batch import SampleBatch, T


@dataclass(frozen=True, kw_only=True)
class IQLConfig(OfflineConfig):
    """The settings of IQL. Raises ValueError for values outside their range."""

    columns: ClassVar[tuple[str, ...]] = (*Transitions.columns, *EPISODE, T)
    gamma: Annotated[float, Meta(ge=0, le=1, description="discount per step")] = 0.99
    tau: Annotated[
        float, Meta(ge=0, le=1, description="expectile; .5: the mean of logged actions")
    ] = 0.8
    beta: Annotated[
        float, Meta(ge=0, description="how much better actions count more; 0: imitate all")
    ] = 3.0
    weight_clip: Annotated[float, Meta(gt=0, description="the largest weight, M")] = 100.0
    target_rate: Annotated[
        float, Meta(ge=0, le=1, description="share by which Q' approaches Q in an update")
    ] = 0.02

    def build(self, policy: Policy) -> IQL:
        """The learner of a policy."""
        return IQL(policy, self)


class _Critics(nn.Module):
    """V(s), and two networks Q(s, a) of the observation with the encoded action."""

    def __init__(self, policy: Policy, encoded: int, generator: torch.Generator) -> None:
        super().__init__()
        self._features, module = policy.spec.flattener.features, policy.spec.module
        size = self._features + encoded
        self.values = ValueNetwork(policy.spec, generator)
        self.q = nn.ModuleList(mlp(size, module, 1, 1.0, generator) for _ in range(2))

    def inputs(self, observed: Tensor, encoded: Tensor) -> Tensor:
        """What the networks Q read: features of the observation, and the action."""
        return torch.cat([observed[:, : self._features], encoded], dim=1)

    def action_values(self, both: Tensor) -> list[Tensor]:
        return [q(both)[:, 0] for q in self.q]


class IQL(OfflineAlgorithm[IQLConfig]):
    """Updates a policy's `pi` (policy.algorithms.learner runs it).

    Make batches as large as memory permits.
    """

    metric_names: ClassVar[tuple[str, ...]] = (
        "loss",
        "value_loss",
        "q_loss",
        "mean_weight",
        "mean_value",
        "entropy",
    )

    def __init__(self, policy: Policy, config: IQLConfig) -> None:
        require_no_scorer("iql", policy.spec)
        super().__init__(policy, config)

    def update(
        self, batch: SampleBatch, rng: np.random.Generator, on_progress: Progress = no_progress
    ) -> dict[str, float]:
        """Learn from a batch of usable rows, in any order; metrics are those of the last step.

        Raises FloatingPointError if the loss is not finite.
        """
        config, policy = self.config, self.policy
        rows, _ = scaled_transitions(policy, batch, config.gamma)
        encoded = _encoded(policy.spec.layout, rows.actions)
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        critics = _Critics(policy, encoded.shape[1], generator).to(policy.device)
        target = copy.deepcopy(critics.q)

        def loss_of(index: Tensor, done: int) -> dict[str, Tensor]:
            with torch.no_grad():
                for held, own in zip(target.parameters(), critics.q.parameters(), strict=True):
                    held.lerp_(own, config.target_rate)
            return self._loss(rows.take(index), encoded[index], critics, target)

        return self.descend(batch.count, rng, loss_of, on_progress, critics=critics)

    def _loss(
        self, rows: Transitions, encoded: Tensor, critics: _Critics, target: nn.ModuleList
    ) -> dict[str, Tensor]:
        """L_V + L_Q + L_pi; no parameter has a gradient of more than one of them."""
        config, both = self.config, critics.inputs(rows.observed, encoded)
        values = critics.values(rows.observed)
        with torch.no_grad():
            held = torch.minimum(*(q(both)[:, 0] for q in target))
            after = critics.values(rows.following).masked_fill(rows.over, 0.0)
            wanted = rows.rewards + config.gamma * after
        advantages = held - values
        value_loss = expectile_loss(advantages, config.tau)
        q_loss = sum((q - wanted).square().mean() for q in critics.action_values(both))
        scale = advantages.square().mean().sqrt().clamp(min=1e-8)
        weights = advantage_weights(advantages / scale, config.beta, config.weight_clip)
        dist = self.policy.distribution(rows.observed)
        policy_loss = -(weights * dist.logp(rows.actions)).mean()
        return {
            "loss": value_loss + q_loss + policy_loss,
            "value_loss": value_loss,
            "q_loss": torch.as_tensor(q_loss),
            "mean_weight": weights.mean(),
            "mean_value": values.mean(),
            "entropy": dist.entropy().mean(),
        }


def _encoded(layout: ActionLayout, actions: list[Tensor]) -> Tensor:
    """(N, E) float32: choices one-hot, other numbers in units of their standard deviation."""
    parts: list[Tensor] = []
    for component, taken in zip(layout.components, actions, strict=True):
        if component.sizes:
            pairs = zip(taken.T, component.sizes, strict=True)
            parts += [functional.one_hot(column, size).float() for column, size in pairs]
        else:
            scale = taken.std(dim=0, correction=0)
            parts.append((taken / torch.where(scale > 0, scale, 1.0)).float())
    return torch.cat(parts, dim=1)
