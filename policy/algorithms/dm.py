"""Learning which action earns most by regression: the direct method, for logged one-step decisions.

The outputs of `pi` for an observation x are modelled rewards q(x, a), one per action. For rows x, a
with reward r, minimise over minibatches of B rows

    L = 1/B sum (q(x, a) - r)^2

Dudik, Langford & Li 2011, Doubly Robust Policy Evaluation and Learning, section 2.1. No
propensities are needed or corrected for, so q is best where the log has many rows. Modelled rewards
are not logits: the default action rule here is epsilon-greedy.

The part of the updates with the smallest error on an inner split of the rows is kept. These rows
are excluded and counted: rows of episodes longer than one step, rows of abandoned or broken
episodes (whose reward may be missing), and rows with numbers beyond float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from policy.algorithms.bandit import one_step_faults
from policy.algorithms.base import RowsLeftOut, require_columns
from policy.algorithms.offline import OfflineAlgorithm, OfflineConfig, inner_split
from policy.inference.action_rule import ActionRule
from policy.inference.finite import NOT_FINITE, not_finite
from policy.networks.modules import PolicyModule
from policy.networks.policy import Policy
from policy.progress import Progress, no_progress
from storage.experience.sample_batch import REWARDS, TERMINATEDS, TRUNCATEDS, SampleBatch, T
from storage.spaces.descriptors import Discrete

_TO_LEARN = ("obs", "actions", REWARDS, TERMINATEDS, TRUNCATEDS, T)


@dataclass(frozen=True, kw_only=True)
class DMConfig(OfflineConfig):
    """The settings of the direct method. Raises ValueError for values outside their range."""

    columns: ClassVar[tuple[str, ...]] = (*_TO_LEARN[:-1], "ended")
    action_rule: ClassVar[ActionRule] = ActionRule("epsilon_greedy")
    weight_decay: Annotated[float, Meta(ge=0, description="Adam's L2 penalty on weights")] = 0.0
    inner_share: Annotated[
        float,
        Meta(ge=0, le=0.9, description="share of the rows that only choose which weights to keep"),
    ] = 0.1

    def build(self, policy: Policy) -> DM:
        """The regression of a policy."""
        return DM(policy, self)


class DM(OfflineAlgorithm[DMConfig]):
    """Updates a policy's `pi`, whose outputs are rewards (policy.algorithms.learner runs it)."""

    metric_names: ClassVar[tuple[str, ...]] = ("loss", "inner_loss", "train_mean_reward")

    def __init__(self, policy: Policy, config: DMConfig) -> None:
        if not isinstance(policy.spec.action, Discrete):
            raise ValueError(f"dm: expected a Discrete action space, got {policy.spec.action}")
        super().__init__(policy, config, weight_decay=config.weight_decay)

    def left_out(self, batch: SampleBatch) -> RowsLeftOut:
        """Reason -> bool (N,) rows that cannot be learned from.

        Raises ValueError for a batch without the columns that learning needs.
        """
        require_columns(batch, _TO_LEARN, "dm")
        not_fit = not_finite(batch, (REWARDS,), "obs", "actions")
        return {**one_step_faults(batch), NOT_FINITE: not_fit}

    def update(
        self, batch: SampleBatch, rng: np.random.Generator, on_progress: Progress = no_progress
    ) -> dict[str, float]:
        """Learn from a batch of usable rows; `loss` is that of the last minibatch.

        Raises FloatingPointError if the loss is not finite.
        """
        policy = self.policy
        observed = policy.observe(policy.flat_observations(batch))
        (actions,) = policy.stored_actions(batch)
        rewards = torch.from_numpy(np.array(batch[REWARDS], np.float32)).to(policy.device)
        inner, own = inner_split(batch.count, self.config.inner_share, rng, policy.device)

        def error(module: PolicyModule, index: Tensor) -> Tensor:
            modelled = module.dist_inputs(observed[index]).gather(1, actions[index])[:, 0]
            return (modelled - rewards[index]).square().mean()

        @torch.no_grad()
        def score(module: PolicyModule) -> float:
            return -error(module, inner).item() if len(inner) else 0.0

        def loss_of(index: Tensor, done: int) -> dict[str, Tensor]:
            return {"loss": error(policy.module, own[index])}

        last = self.descend(len(own), rng, loss_of, on_progress, score=score)
        mean = float(rewards.double().mean())
        return {**last, "inner_loss": -score(policy.module), "train_mean_reward": mean}
