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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Meta
from torch import Tensor

from policy.algorithms.base import RowsLeftOut, require_columns
from policy.algorithms.offline import OfflineAlgorithm, OfflineConfig, inner_split
from policy.inference.finite import NOT_FINITE, not_finite
from policy.networks.distributions import ActionDistribution
from policy.networks.modules import PolicyModule
from policy.networks.policy import Policy
from policy.ope.value_models import (
    CandidateRewardModel,
    LinearRewardModel,
    RewardModel,
    SmoothedMeanRewardModel,
)
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

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

_TO_LEARN = ("obs", "actions", REWARDS, TERMINATEDS, TRUNCATEDS, ACTION_LOGP, T)


@dataclass(frozen=True, kw_only=True)
class BanditConfig(OfflineConfig):
    """The settings of bandit learning. Raises ValueError for values outside their range."""

    columns: ClassVar[tuple[str, ...]] = (*_TO_LEARN, "ended")
    objective: Annotated[
        Literal["ips", "snips", "dr"],
        Meta(description="the estimator whose gradient is followed; dr needs Discrete actions"),
    ] = "ips"
    lr: Annotated[
        float, Meta(gt=0, description="Adam's first learning rate, which decreases to 0")
    ] = 3e-3
    weight_decay: Annotated[float, Meta(ge=0, description="Adam's L2 penalty on weights")] = 0.0
    weight_clip: Annotated[float, Meta(gt=0, description="the largest importance weight, M")] = (
        100.0
    )
    entropy_coeff: Annotated[float, Meta(ge=0, description="weight of the entropy, beta")] = 0.01
    baseline: Annotated[
        float | Literal["mean"],
        Meta(description="a number, or mean, the mean reward of the batch; ips only"),
    ] = "mean"
    reward_model: Annotated[
        Literal["linear", "mean"],
        Meta(
            description="ridge regression per action (of candidates: one for all), or a smoothed "
            "mean per action; dr only"
        ),
    ] = "linear"
    reward_l2: Annotated[
        float, Meta(gt=0, description="penalty of the ridge regression; dr only")
    ] = 10.0
    folds: Annotated[
        int,
        Meta(ge=2, description="reward models, each without the rows that it scores; dr only"),
    ] = 5
    inner_share: Annotated[
        float,
        Meta(ge=0, le=0.9, description="share of the rows that only choose which weights to keep"),
    ] = 0.1

    def build(self, policy: Policy) -> Bandit:
        """The bandit learner of a policy."""
        return Bandit(policy, self)


def one_step_faults(batch: SampleBatch) -> dict[str, BoolArray]:
    """Reason -> bool (N,): rows that are no whole episode of one step."""
    ended = batch["ended"] if "ended" in batch else np.full(batch.count, None, object)
    whole = (batch[T] == 0) & (batch[TERMINATEDS] | batch[TRUNCATEDS])
    faults: dict[str, BoolArray] = {
        str(word): np.asarray(ended == word, np.bool_) for word in UNOBSERVED
    }
    return {**faults, "not_one_step": ~whole}


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


class Bandit(OfflineAlgorithm[BanditConfig]):
    """Updates a policy's `pi` from batches of one-step decisions (see policy.algorithms.learner).

    DR first fits its reward model on the batch, so make batches as large as memory permits.
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
        super().__init__(policy, config, weight_decay=config.weight_decay)

    def left_out(self, batch: SampleBatch) -> RowsLeftOut:
        """Reason -> bool (N,) rows that cannot be learned from; a row may have several reasons.

        Raises ValueError for a batch without the columns that learning needs.
        """
        require_columns(batch, _TO_LEARN, "bandit")
        reasons = one_step_faults(batch)
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
        split = inner_split(len(rows), self.config.inner_share, rng, self.policy.device)
        inner, own = map(rows.take, split)

        def loss_of(index: Tensor, done: int) -> dict[str, Tensor]:
            return {"loss": self.loss(own.take(index), baseline)}

        last = self.descend(
            len(own), rng, loss_of, on_progress, score=lambda module: self._score(inner, module)
        )
        return {**last, **self._metrics(rows, baseline)}

    @torch.no_grad()
    def _score(self, rows: _BatchTensors, module: PolicyModule) -> float:
        """The estimate of a module on the inner split, less one standard error."""
        if not len(rows):
            return 0.0
        dist = ActionDistribution(self.policy.spec.layout, module.dist_inputs(rows.observed))
        weight = self._weights(dist.logp(rows.actions), rows)
        if self.config.objective == "dr":
            modelled = (dist.log_probabilities().exp() * rows.q_all).sum(dim=1)
            terms = modelled + weight * (rows.rewards - rows.q)
            value = float(terms.mean())
            error = float(terms.std(correction=0)) / len(rows) ** 0.5
        else:
            value = float((weight * rows.rewards).sum() / weight.sum())
            error = float((weight * (rows.rewards - value)).square().sum().sqrt() / weight.sum())
        return float(value - error)

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
        config, candidates = self.config, self.policy.spec.candidates
        if config.reward_model == "linear" and candidates is not None:
            how: dict[str, Any] = {"l2": config.reward_l2, "start": space.start}
            return lambda: CandidateRewardModel(space.n, candidates.width, **how)
        if config.reward_model == "linear":
            return lambda: LinearRewardModel(space.n, l2=config.reward_l2, start=space.start)
        return lambda: SmoothedMeanRewardModel(space.n, start=space.start)

    def _discrete(self) -> Discrete:
        space = self.policy.spec.action
        if not isinstance(space, Discrete):
            raise TypeError(f"expected a Discrete action space, got {space}")
        return space
