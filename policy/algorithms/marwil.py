"""Imitating the better actions of a log: monotonic advantage re-weighted imitation learning.

For logged observations s and actions a with the advantage A of GAE (policy.algorithms.advantages)
and its value target R = A + V(s), minimise over minibatches of B rows

    L = -1/B sum min(exp(beta A / c), M) log pi(a|s)  +  1/B sum (V(s) - R)^2,    c^2 = mean A^2

Wang et al. 2018, Exponentially Weighted Imitation Learning for Batched Historical Data, eq. 7 and
algorithm 1. c makes beta independent of the rewards' scale. With beta = 0 it is behavioural
cloning. V is a network of its own, that is not published; A is computed again from it every
`advantages_every` updates. Works in any action space, and needs no propensities.

Fragments are runs of one episode's consecutive rows in the batch. A fragment's last row bootstraps
from V of its next observation, unless it terminated. A row that is neither terminated nor has a
next observation is excluded, as is one with numbers beyond float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Meta
from torch import Tensor, nn

from policy.algorithms.advantages import gae
from policy.algorithms.base import EPISODE
from policy.algorithms.losses import advantage_weights
from policy.algorithms.offline import (
    OfflineAlgorithm,
    OfflineConfig,
    Transitions,
    scaled_transitions,
)
from policy.networks.modules import ValueNetwork
from policy.networks.policy import Policy
from policy.progress import Progress, no_progress
from storage.experience.sample_batch import SampleBatch, T

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MARWILConfig(OfflineConfig):
    """The settings of MARWIL. Raises ValueError for values outside their range."""

    columns: ClassVar[tuple[str, ...]] = (*Transitions.columns, *EPISODE, T)
    gamma: Annotated[float, Meta(ge=0, le=1, description="discount per step")] = 0.99
    lam: Annotated[
        float, Meta(ge=0, le=1, description="lambda of the advantages; 1: whole returns")
    ] = 0.95
    beta: Annotated[
        float, Meta(ge=0, description="how much better actions count more; 0: imitate all")
    ] = 1.0
    weight_clip: Annotated[float, Meta(gt=0, description="the largest weight, M")] = 20.0
    advantages_every: Annotated[
        int, Meta(ge=1, description="updates after which the advantages are computed again")
    ] = 200

    def build(self, policy: Policy) -> MARWIL:
        """The learner of a policy."""
        return MARWIL(policy, self)


class MARWIL(OfflineAlgorithm[MARWILConfig]):
    """Updates a policy's `pi` (policy.algorithms.learner runs it).

    Make batches as large as memory permits.
    """

    metric_names: ClassVar[tuple[str, ...]] = ("loss", "value_loss", "mean_weight", "entropy")

    def update(
        self, batch: SampleBatch, rng: np.random.Generator, on_progress: Progress = no_progress
    ) -> dict[str, float]:
        """Learn from a batch of usable rows, in any order; metrics are those of the last step.

        Raises FloatingPointError if the loss is not finite.
        """
        config, policy = self.config, self.policy
        rows, ends = scaled_transitions(policy, batch, config.gamma)
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        values = ValueNetwork(policy.spec, generator).to(policy.device)
        advantages = targets = rows.rewards

        def loss_of(index: Tensor, done: int) -> dict[str, Tensor]:
            nonlocal advantages, targets
            if done % config.advantages_every == 0:
                advantages, targets = self._advantages(rows, ends, values)
            return self._loss(rows.take(index), advantages[index], targets[index], values)

        return self.descend(batch.count, rng, loss_of, on_progress, critics=values)

    def _loss(
        self, rows: Transitions, advantages: Tensor, targets: Tensor, values: nn.Module
    ) -> dict[str, Tensor]:
        """L, with `advantages` in units of c."""
        dist = self.policy.distribution(rows.observed)
        weights = advantage_weights(advantages, self.config.beta, self.config.weight_clip)
        value_loss = (values(rows.observed) - targets).square().mean()
        return {
            "loss": value_loss - (weights * dist.logp(rows.actions)).mean(),
            "value_loss": value_loss,
            "mean_weight": weights.mean(),
            "entropy": dist.entropy().mean(),
        }

    @torch.no_grad()
    def _advantages(
        self, rows: Transitions, ends: npt.NDArray[np.bool_], values: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """(N,) float32 each: A / c and R for all rows."""
        of = values(torch.cat([rows.observed, rows.following])).double().cpu().numpy()
        count = len(rows.rewards)
        found = gae(
            rows.rewards.cpu().numpy(),
            of[:count],
            of[count:],
            terminated=rows.over.cpu().numpy(),
            ends=ends,
            gamma=self.config.gamma,
            lam=self.config.lam,
        )
        scale = float(np.sqrt(np.square(found.advantages).mean())) or 1.0
        return (
            torch.from_numpy((found.advantages / scale).astype(np.float32)).to(self.policy.device),
            torch.from_numpy(found.value_targets.astype(np.float32)).to(self.policy.device),
        )
