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
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor
from torch.nn import functional

from policy.algorithms.losses import cql_regulariser, double_q_targets
from policy.algorithms.offline import OfflineAlgorithm, OfflineConfig, Transitions
from policy.inference.action_rule import ActionRule
from policy.networks.policy import Policy
from policy.progress import Progress, no_progress
from storage.experience.sample_batch import SampleBatch
from storage.spaces.descriptors import Discrete


@dataclass(frozen=True, kw_only=True)
class CQLConfig(OfflineConfig):
    """The settings of CQL. Raises ValueError for values outside their range."""

    columns: ClassVar[tuple[str, ...]] = Transitions.columns
    action_rule: ClassVar[ActionRule] = ActionRule("epsilon_greedy")
    gamma: Annotated[float, Meta(ge=0, le=1, description="discount per step")] = 0.99
    alpha: Annotated[
        float,
        Meta(ge=0, description="weight of the loss's second term, in units of the reward"),
    ] = 1.0
    target_every: Annotated[
        int, Meta(ge=1, description="updates after which the target values are renewed")
    ] = 200

    def build(self, policy: Policy) -> CQL:
        """The Q-learner of a policy."""
        return CQL(policy, self)


class CQL(OfflineAlgorithm[CQLConfig]):
    """Updates a policy's `pi`, whose outputs are action values (policy.algorithms.learner runs it).

    Make batches as large as memory permits.
    """

    metric_names: ClassVar[tuple[str, ...]] = ("loss", "td_error", "gap", "mean_value")

    def __init__(self, policy: Policy, config: CQLConfig) -> None:
        if not isinstance(policy.spec.action, Discrete):
            raise ValueError(f"cql: expected a Discrete action space, got {policy.spec.action}")
        super().__init__(policy, config)

    def update(
        self, batch: SampleBatch, rng: np.random.Generator, on_progress: Progress = no_progress
    ) -> dict[str, float]:
        """Learn from a batch of usable rows, in any order.

        Metrics are those of the last step: `gap` is the second term of the loss without alpha.
        Raises FloatingPointError if the loss is not finite.
        """
        rows, module = Transitions.of(self.policy, batch), self.policy.module
        target = copy.deepcopy(module)

        def loss_of(index: Tensor, done: int) -> dict[str, Tensor]:
            if done % self.config.target_every == 0:
                target.load_state_dict(module.state_dict())
            return self._loss(rows.take(index), target)

        return self.descend(batch.count, rng, loss_of, on_progress)

    def _loss(self, rows: Transitions, target: torch.nn.Module) -> dict[str, Tensor]:
        module, actions = self.policy.module, rows.actions[0][:, 0]
        values = module.dist_inputs(rows.observed)
        taken = values.gather(1, actions[:, None])[:, 0]
        with torch.no_grad():
            after = module.dist_inputs(rows.following)
            # target is a copy of the module, which torch types as any Module
            held = target.dist_inputs(rows.following)  # type: ignore[operator]
        wanted = double_q_targets(rows.rewards, rows.over, after, held, self.config.gamma)
        gap = cql_regulariser(values, actions)
        return {
            "loss": 0.5 * functional.mse_loss(taken, wanted) + self.config.alpha * gap,
            "td_error": (taken.detach() - wanted).abs().mean(),
            "gap": gap,
            "mean_value": taken.detach().mean(),
        }
