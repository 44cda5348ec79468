"""Imitating a log: behavioural cloning, in any action space.

For logged observations s and actions a, minimise over minibatches of B rows

    L = -1/B sum log pi(a|s)

Pomerleau 1991, Efficient Training of Artificial Neural Networks for Autonomous Navigation, with the
log-likelihood for its squared error. The policy becomes about as good as the one that logged, and
no better: rewards are not read. A row with numbers beyond float32 is excluded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from policy.algorithms.base import RowsLeftOut, require_columns
from policy.algorithms.offline import OfflineAlgorithm, OfflineConfig
from policy.inference.finite import NOT_FINITE, not_finite
from policy.networks.policy import Policy
from policy.progress import Progress, no_progress
from storage.experience.sample_batch import SampleBatch


@dataclass(frozen=True, kw_only=True)
class BCConfig(OfflineConfig):
    """The settings of behavioural cloning. Raises ValueError for values outside their range."""

    columns: ClassVar[tuple[str, ...]] = ("obs", "actions")

    def build(self, policy: Policy) -> BC:
        """The imitator of a log."""
        return BC(policy, self)


class BC(OfflineAlgorithm[BCConfig]):
    """Updates a policy's `pi` (policy.algorithms.learner runs it)."""

    metric_names: ClassVar[tuple[str, ...]] = ("loss", "entropy")

    def left_out(self, batch: SampleBatch) -> RowsLeftOut:
        """Reason -> bool (N,) rows that cannot be learned from.

        Raises ValueError for a batch without the columns that learning needs.
        """
        require_columns(batch, self.config.columns, "bc")
        return {NOT_FINITE: not_finite(batch, (), "obs", "actions")}

    def update(
        self, batch: SampleBatch, rng: np.random.Generator, on_progress: Progress = no_progress
    ) -> dict[str, float]:
        """Learn from a batch of usable rows, in any order; metrics are those of the last step.

        Raises FloatingPointError if the loss is not finite.
        """
        policy = self.policy
        observed = policy.observe(policy.flat_observations(batch))
        actions = policy.stored_actions(batch)

        def loss_of(index: Tensor, done: int) -> dict[str, Tensor]:
            dist = policy.distribution(observed[index])
            logp = dist.logp([leaf[index] for leaf in actions])
            return {"loss": -logp.mean(), "entropy": dist.entropy().mean()}

        return self.descend(batch.count, rng, loss_of, on_progress)
