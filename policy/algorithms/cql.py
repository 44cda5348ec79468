"""Learning action values from logged steps, offline: conservative Q-learning for discrete actions.

The outputs of `pi` for an observation s are values Q(s, a), one per action. For rows s, a, r with
next observation s', minimise over minibatches of B rows

    L = 1/B sum 1/2 (Q(s, a) - y)^2 + alpha 1/B sum [log sum_a' exp Q(s, a') - Q(s, a)]
    y = r + gamma Q'(s', argmax_a' Q(s', a'))       (y = r where the episode terminated)

Kumar et al. 2020, Conservative Q-Learning for Offline Reinforcement Learning, eq. 4: the second
term keeps the values of rarely logged actions low. Q' has the weights from up to `target_every`
steps before (Mnih et al. 2015), and Q itself chooses the action in y (van Hasselt, Guez & Silver
2016). No propensities are needed or corrected for.

Values are not logits: a policy that samples from their softmax acts almost at random if they are
similar. So the default action rule here is epsilon-greedy. A row that is neither terminated nor has
a next observation is excluded, as is one with numbers beyond float32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from policy.algorithms.base import (
    RowsLeftOut,
    minibatches,
    require_at_least,
    require_columns,
    require_not_negative,
    require_positive,
)
from policy.algorithms.losses import cql_regulariser, double_q_targets
from policy.inference.action_rule import ActionRule
from policy.inference.finite import NOT_FINITE, not_finite
from policy.networks.policy import Policy
from policy.progress import Progress, no_progress
from storage.experience.sample_batch import (
    HAS_NEXT_OBS,
    NEXT_OBS,
    REWARDS,
    TERMINATEDS,
    TRUNCATEDS,
    SampleBatch,
)
from storage.spaces.descriptors import Discrete

__all__ = ["CQL", "CQLConfig"]

_TO_LEARN = ("obs", "actions", REWARDS, TERMINATEDS, NEXT_OBS, HAS_NEXT_OBS)


@dataclass(frozen=True, kw_only=True)
class CQLConfig:
    """The settings of CQL. Raises ValueError for values outside their range.

    Args:
        gamma: discount per step, 0 to 1.
        alpha: weight of the loss's second term, in units of the reward.
        epochs: passes over each batch.
        minibatch: rows in a minibatch.
        lr: Adam's learning rate.
        target_every: steps of the optimizer after which the target values are renewed.
        max_grad_norm: limit of the gradient's Euclidean norm.
    """

    columns: ClassVar[tuple[str, ...]] = (*_TO_LEARN, TRUNCATEDS)
    action_rule: ClassVar[ActionRule] = ActionRule("epsilon_greedy")
    gamma: float = 0.99
    alpha: float = 1.0
    epochs: int = 10
    minibatch: int = 256
    lr: float = 1e-3
    target_every: int = 200
    max_grad_norm: float = 10.0

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma: expected 0 to 1, got {self.gamma!r}")
        require_at_least(self, 1, "epochs", "minibatch", "target_every")
        require_positive(self, "lr", "max_grad_norm")
        require_not_negative(self, "alpha")

    def build(self, policy: Policy) -> CQL:
        """The Q-learner of a policy."""
        return CQL(policy, self)


@dataclass(frozen=True)
class _Transitions:
    """A batch as tensors; N rows."""

    observed: Tensor  # (N, D)
    following: Tensor  # (N, D), zeros without a next observation
    actions: Tensor  # (N,) counted from 0
    rewards: Tensor  # (N,)
    over: Tensor  # (N,) bool: the target is the reward alone

    def take(self, index: Tensor) -> _Transitions:
        return _Transitions(
            self.observed[index],
            self.following[index],
            self.actions[index],
            self.rewards[index],
            self.over[index],
        )


class CQL:
    """Updates a policy's `pi`, whose outputs are action values (policy.algorithms.learner runs it).

    Each batch is used for `epochs` passes in random order; make batches as large as memory permits.
    """

    metric_names: ClassVar[tuple[str, ...]] = ("loss", "td_error", "gap", "mean_value")

    def __init__(self, policy: Policy, config: CQLConfig) -> None:
        if not isinstance(policy.spec.action, Discrete):
            raise ValueError(f"cql: expected a Discrete action space, got {policy.spec.action}")
        self.policy = policy
        self.config = config
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
            policy.module.parameters(), lr=config.lr
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing: each batch starts with targets from the current weights."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None

    def left_out(self, batch: SampleBatch) -> RowsLeftOut:
        """Reason -> bool (N,) rows that cannot be learned from.

        Raises ValueError for a batch without the columns that learning needs.
        """
        require_columns(batch, _TO_LEARN, "cql")
        following = batch[HAS_NEXT_OBS] & ~batch[TERMINATEDS]
        return {
            "no_next_obs": ~(batch[TERMINATEDS] | batch[HAS_NEXT_OBS]),
            NOT_FINITE: not_finite(batch, (REWARDS,), "obs")
            | (following & not_finite(batch, (), NEXT_OBS)),
        }

    def update(
        self,
        batch: SampleBatch,
        rng: np.random.Generator,
        on_progress: Progress = no_progress,
    ) -> dict[str, float]:
        """Learn from a batch of usable rows, in any order.

        Metrics are those of the last step: `gap` is the second term of the loss without alpha.
        Raises FloatingPointError if the loss is not finite.
        """
        rows, config = self._rows(batch), self.config
        total = config.epochs * math.ceil(batch.count / config.minibatch)
        target, metrics = copy.deepcopy(self.policy.module), {}
        passes = minibatches(batch.count, config.minibatch, config.epochs, rng, self.policy.device)
        for done, index in enumerate(passes, 1):
            metrics = self._step(rows.take(index), target)
            if done % config.target_every == 0:
                target.load_state_dict(self.policy.module.state_dict())
            on_progress("training", done, total)
        return metrics

    def _step(self, rows: _Transitions, target: torch.nn.Module) -> dict[str, float]:
        module = self.policy.module
        values = module.dist_inputs(rows.observed)
        taken = values.gather(1, rows.actions[:, None])[:, 0]
        with torch.no_grad():
            after = module.dist_inputs(rows.following)
            # target is a copy of the module, which torch types as any Module
            held = target.dist_inputs(rows.following)  # type: ignore[operator]
        wanted = double_q_targets(rows.rewards, rows.over, after, held, self.config.gamma)
        gap = cql_regulariser(values, rows.actions)
        loss = 0.5 * functional.mse_loss(taken, wanted) + self.config.alpha * gap
        if not torch.isfinite(loss):
            raise FloatingPointError(f"cql: the loss became {loss.item()}; try a smaller lr")
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), self.config.max_grad_norm)
        self.optimizer.step()
        return {
            "loss": float(loss.item()),
            "td_error": float((taken.detach() - wanted).abs().mean()),
            "gap": float(gap.item()),
            "mean_value": float(taken.detach().mean()),
        }

    def _rows(self, batch: SampleBatch) -> _Transitions:
        policy, space = self.policy, self.policy.spec.action
        if not isinstance(space, Discrete):
            raise TypeError(f"expected a Discrete action space, got {space}")
        device = policy.device
        over = np.asarray(batch[TERMINATEDS] | ~batch[HAS_NEXT_OBS], np.bool_)
        taken = np.asarray(batch["actions"], np.int64) - space.start
        return _Transitions(
            policy.observe(policy.flat_observations(batch)),
            policy.observe(policy.flat_observations(batch, NEXT_OBS)),
            torch.from_numpy(taken).to(device),
            torch.from_numpy(np.asarray(batch[REWARDS], np.float32)).to(device),
            torch.from_numpy(over).to(device),
        )
