"""Learning a policy from logged one-step decisions: off-policy contextual bandits.

A row is an observation x, the action a that the logging policy took with propensity mu(a|x), and
its reward r. With the importance weight w = pi(a|x) / mu(a|x), clipped at M, and the entropy H of
pi, minimise over minibatches of B rows

    IPS    L = -1/B sum min(w, M) (r - b)                                          - beta mean H(pi)
    SNIPS  L = -sum min(w, M) r / sum min(w, M)                                    - beta mean H(pi)
    DR     L = -1/B sum [ sum_a' pi(a'|x) q(x, a') + min(w, M) (r - q(x, a)) ]     - beta mean H(pi)

IPS: Swaminathan & Joachims 2015, Counterfactual Risk Minimization, eq. 5 (clipped weights), and
Joachims, Swaminathan & de Rijke 2018, Deep Learning with Logged Bandit Feedback, eq. 8 (baseline b:
without it, rewards that are all positive reinforce every logged action). SNIPS: Swaminathan &
Joachims 2015, The Self-Normalized Estimator, eq. 9, on minibatches. DR: Dudik, Langford & Li 2011,
Doubly Robust Policy Evaluation and Learning, eq. 2. The reward model q is fitted once per batch,
for each fold on the other folds, so that no row is scored by a model fitted to it.

A row whose weight is clipped has no gradient through w. These rows are excluded and counted: rows
without a propensity, rows of episodes longer than one step, rows of abandoned or broken episodes
(whose reward may be missing), and rows with numbers beyond float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from policy.algorithms.base import (
    RowsLeftOut,
    minibatches,
    require_at_least,
    require_columns,
    require_not_negative,
    require_positive,
)
from policy.inference.finite import NOT_FINITE, not_finite
from policy.networks.policy import Policy
from policy.ope.value_models import LinearRewardModel, RewardModel, SmoothedMeanRewardModel
from policy.progress import Progress, no_progress
from storage.experience.endings import UNOBSERVED
from storage.experience.sample_batch import (
    ACTION_LOGP,
    REWARDS,
    TERMINATEDS,
    TRUNCATEDS,
    SampleBatch,
    T,
)
from storage.spaces.descriptors import Discrete

__all__ = ["Bandit", "BanditConfig"]

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
_TO_LEARN = ("obs", "actions", REWARDS, TERMINATEDS, TRUNCATEDS, ACTION_LOGP, T)


@dataclass(frozen=True, kw_only=True)
class BanditConfig:
    """The settings of bandit learning. Raises ValueError for values outside their range.

    The defaults are cautious: with few rewards (clicks), more epochs and a larger `lr` soon overfit
    single rows, which shows as a small `ess`. With many rewards, raise both.

    Args:
        objective: the estimator whose gradient is followed; "dr" needs Discrete actions.
        epochs: passes over each batch.
        minibatch: rows in a minibatch.
        lr: Adam's learning rate.
        weight_decay: Adam's L2 penalty on weights.
        weight_clip: the largest importance weight, M.
        entropy_coeff: weight of the entropy, beta.
        baseline: a number, or "mean", the mean reward of the batch; IPS only.
        reward_model: "linear" (ridge regression per action) or "mean" (smoothed mean per action,
            independent of the observation); DR only.
        reward_l2: penalty of the ridge regression.
        folds: how many reward models are fitted, each without the rows that it scores; DR only.
    """

    columns: ClassVar[tuple[str, ...]] = (
        "obs",
        "actions",
        REWARDS,
        TERMINATEDS,
        TRUNCATEDS,
        ACTION_LOGP,
        "ended",
    )
    objective: Literal["ips", "snips", "dr"] = "ips"
    epochs: int = 10
    minibatch: int = 256
    lr: float = 1e-3
    weight_decay: float = 0.0
    weight_clip: float = 100.0
    entropy_coeff: float = 0.01
    baseline: float | Literal["mean"] = "mean"
    reward_model: Literal["linear", "mean"] = "linear"
    reward_l2: float = 10.0
    folds: int = 5

    def __post_init__(self) -> None:
        if self.objective not in ("ips", "snips", "dr"):
            raise ValueError(f"objective: expected ips, snips or dr, got {self.objective!r}")
        if self.reward_model not in ("linear", "mean"):
            raise ValueError(f"reward_model: expected linear or mean, got {self.reward_model!r}")
        require_at_least(self, 1, "epochs", "minibatch")
        require_at_least(self, 2, "folds")
        require_positive(self, "lr", "weight_clip", "reward_l2")
        require_not_negative(self, "weight_decay", "entropy_coeff")
        if self.baseline != "mean" and not math.isfinite(self.baseline):
            raise ValueError(f"baseline: expected a number or 'mean', got {self.baseline!r}")

    def build(self, policy: Policy) -> Bandit:
        """The bandit learner of a policy."""
        return Bandit(policy, self)


@dataclass(frozen=True)
class _BatchTensors:
    """A batch as tensors; N rows."""

    observed: Tensor  # (N, D) float32
    actions: list[Tensor]  # (N, m) each
    rewards: Tensor  # (N,) float64
    behaviour_logp: Tensor  # (N,) float64
    q: Tensor  # (N,) modelled reward of the action taken; only for DR
    q_all: Tensor  # (N, A) of every action; only for DR

    def take(self, index: Tensor) -> _BatchTensors:
        return _BatchTensors(
            self.observed[index],
            [leaf[index] for leaf in self.actions],
            self.rewards[index],
            self.behaviour_logp[index],
            self.q[index] if len(self.q) else self.q,
            self.q_all[index] if len(self.q_all) else self.q_all,
        )

    def __len__(self) -> int:
        return len(self.rewards)


class Bandit:
    """Updates a policy's `pi` from batches of one-step decisions (see policy.algorithms.learner).

    Each batch is used for `epochs` passes in random order. DR first fits its reward model on the
    batch, so make batches as large as memory permits.
    """

    metric_names: ClassVar[tuple[str, ...]] = (
        "loss",
        "train_loss",
        "train_snips",
        "train_mean_reward",
        "entropy",
        "mean_weight",
        "clipped_share",
        "ess",
    )

    def __init__(self, policy: Policy, config: BanditConfig) -> None:
        if config.objective == "dr" and not isinstance(policy.spec.action, Discrete):
            raise ValueError(
                f"objective dr: expected a Discrete action space, whose actions can be listed, "
                f"got {policy.spec.action}; use ips or snips"
            )
        self.policy = policy
        self.config = config
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
            policy.module.parameters(), lr=config.lr, weight_decay=config.weight_decay
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing: each batch starts from the beginning."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None

    def left_out(self, batch: SampleBatch) -> RowsLeftOut:
        """Reason -> bool (N,) rows that cannot be learned from; a row may have several reasons.

        Raises ValueError for a batch without the columns that learning needs.
        """
        require_columns(batch, _TO_LEARN, "bandit")
        ended = batch["ended"] if "ended" in batch else np.full(batch.count, None, object)
        reasons: dict[str, BoolArray] = {
            word: np.asarray(ended == word, np.bool_) for word in UNOBSERVED
        }
        whole = (batch[T] == 0) & (batch[TERMINATEDS] | batch[TRUNCATEDS])
        reasons["not_one_step"] = ~whole
        reasons["no_propensity"] = np.isnan(batch[ACTION_LOGP])
        reasons[NOT_FINITE] = not_finite(batch, (REWARDS,), "obs", "actions", ACTION_LOGP)
        # the reward model of a single row would have no other rows to fit
        if self.config.objective == "dr":
            left = ~np.logical_or.reduce(list(reasons.values()))
            reasons["alone"] = left & (left.sum() < 2)
        return reasons

    def update(
        self,
        batch: SampleBatch,
        rng: np.random.Generator,
        on_progress: Progress = no_progress,
    ) -> dict[str, float]:
        """Learn from a batch of usable rows; returns the metrics of the policy afterwards.

        Raises ValueError for a batch that is too small, and FloatingPointError if the loss is not
        finite.
        """
        rows = self._rows(batch, rng)
        baseline = self._baseline(rows)
        total = self.config.epochs * math.ceil(len(rows) / self.config.minibatch)
        loss = math.nan
        config, device = self.config, self.policy.device
        passes = minibatches(len(rows), config.minibatch, config.epochs, rng, device)
        for done, index in enumerate(passes, 1):
            loss = self._step(rows.take(index), baseline)
            on_progress("training", done, total)
        return {"loss": loss, **self._metrics(rows, baseline)}

    def loss(self, rows: _BatchTensors, baseline: float) -> Tensor:
        """The loss of the module docstring over a minibatch; a float64 scalar."""
        dist = self.policy.distribution(rows.observed)
        weight = self._weights(dist.logp(rows.actions), rows)
        if self.config.objective == "ips":
            objective = (weight * (rows.rewards - baseline)).mean()
        elif self.config.objective == "snips":
            objective = (weight * rows.rewards).sum() / weight.sum()
        else:
            modelled = (dist.log_probabilities().exp() * rows.q_all).sum(dim=1)
            objective = (modelled + weight * (rows.rewards - rows.q)).mean()
        return -objective - self.config.entropy_coeff * dist.entropy().mean()

    def _step(self, rows: _BatchTensors, baseline: float) -> float:
        loss = self.loss(rows, baseline)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"bandit: the loss became {loss.item()}; try a smaller lr or weight_clip"
            )
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    def _weights(self, logp: Tensor, rows: _BatchTensors) -> Tensor:
        """(N,) min(w, M), clipped as logs so that no weight overflows."""
        return (logp - rows.behaviour_logp).clamp(max=math.log(self.config.weight_clip)).exp()

    def _baseline(self, rows: _BatchTensors) -> float:
        given = self.config.baseline
        return float(rows.rewards.mean()) if given == "mean" else float(given)

    @torch.no_grad()
    def _metrics(self, rows: _BatchTensors, baseline: float) -> dict[str, float]:
        """Metrics over the whole batch that the policy was trained on, so not an evaluation."""
        dist = self.policy.distribution(rows.observed)
        weight = self._weights(dist.logp(rows.actions), rows)
        clipped = weight >= self.config.weight_clip * (1 - 1e-9)
        square = float(weight.square().sum())
        return {
            "train_loss": float(self.loss(rows, baseline)),
            "train_snips": float((weight * rows.rewards).sum() / weight.sum()),
            "train_mean_reward": float(rows.rewards.mean()),
            "entropy": float(dist.entropy().mean()),
            "mean_weight": float(weight.mean()),
            "clipped_share": float(clipped.double().mean()),
            "ess": float(weight.sum()) ** 2 / square if square else 0.0,
        }

    # the batch as tensors

    def _rows(self, batch: SampleBatch, rng: np.random.Generator) -> _BatchTensors:
        policy = self.policy
        observed = policy.observe(policy.flat_observations(batch))
        rewards = np.asarray(batch[REWARDS], np.float64)
        q, q_all = np.empty(0), np.empty((0, 0))
        if self.config.objective == "dr":
            features = observed.cpu().numpy()
            q, q_all = self._reward_model(features, batch["actions"], rewards, rng)
        behaviour_logp = np.asarray(batch[ACTION_LOGP], np.float64)

        def tensor(array: FloatArray) -> Tensor:
            return torch.from_numpy(array.copy()).to(policy.device)

        return _BatchTensors(
            observed,
            policy.stored_actions(batch),
            tensor(rewards),
            tensor(behaviour_logp),
            tensor(q),
            tensor(q_all),
        )

    def _reward_model(
        self,
        features: npt.NDArray[np.float32],
        actions: npt.NDArray[Any],
        rewards: FloatArray,
        rng: np.random.Generator,
    ) -> tuple[FloatArray, FloatArray]:
        """q of the actions taken (N,) and of all (N, A), from models of the other folds."""
        count, space = len(rewards), self._discrete()
        folds = min(self.config.folds, count)
        if folds < 2:
            raise ValueError(f"objective dr: expected 2 or more rows to cross-fit, got {count}")
        make = self._model_maker(space)
        fold = rng.permutation(np.arange(count) % folds)
        q_all = np.empty((count, space.n))
        for number in range(folds):
            inside = fold == number
            model = make().fit(features[~inside], actions[~inside], rewards[~inside])
            q_all[inside] = model.q_all(features[inside])
        return q_all[np.arange(count), actions - space.start], q_all

    def _model_maker(self, space: Discrete) -> Callable[[], RewardModel]:
        config = self.config
        if config.reward_model == "linear":
            return lambda: LinearRewardModel(space.n, l2=config.reward_l2, start=space.start)
        return lambda: SmoothedMeanRewardModel(space.n, start=space.start)

    def _discrete(self) -> Discrete:
        space = self.policy.spec.action
        if not isinstance(space, Discrete):
            raise TypeError(f"expected a Discrete action space, got {space}")
        return space
