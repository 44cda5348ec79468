"""Proximal policy optimisation, from stored experience.

A row is an observation s, the action a that the behaviour policy took, its log probability log
mu(a|s) **as stored with the row**, and its reward. With w = pi(a|s) / mu(a|s), the advantage A of
GAE (policy.algorithms.advantages), its value target R = A + V(s) and the entropy H of pi, minimise
over minibatches of B rows, for several epochs over each batch,

    L = -1/B sum min(w A, clip(w, 1 - c, 1 + c) A) + c_v 1/B sum (V(s) - R)^2 - c_h mean H(pi)

Schulman et al. 2017, Proximal Policy Optimization Algorithms, eq. 7 and 9; A is normalised in each
minibatch. The learning rate and c decrease linearly with the rows trained on, so that they would be
0 at `schedule_steps`, down to `schedule_end` times their first values.

With `scale_rewards`, rewards are divided by a running standard deviation, that of their discounted
sums within fragments, so that V learns numbers of the same size in every environment. Rows that
bring their advantages keep them.

The behaviour policy may be some versions old. Its log probability is never recomputed: w would then
start at 1 whatever the age, and clipping would have no effect. pi is the network's distribution,
sampled at temperature 1; a policy with another action rule is refused.

Fragments are runs of one episode's consecutive rows in the batch. A fragment's last row bootstraps
from V of its next observation, whether it was truncated, abandoned or its successor has not been
read yet. A row that is neither terminated nor has a next observation is excluded, and its
predecessor bootstraps from its observation. Rows that another policy chose and rows without a log
probability are excluded as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Meta
from torch import Tensor

from policy.algorithms.advantages import Advantages, gae
from policy.algorithms.base import (
    EPISODE,
    RowsLeftOut,
    episode_order,
    minibatches,
    require_columns,
)
from policy.algorithms.losses import clipped_surrogate, k1, k3
from policy.algorithms.settings import AnnotatedSettings
from policy.inference.action_rule import SAMPLE
from policy.inference.filters import RunningStat
from policy.inference.finite import NOT_FINITE, not_finite
from policy.networks.policy import Policy
from policy.progress import Progress, no_progress
from storage.experience.sample_batch import (
    ACTION_LOGP,
    AGENT_ID,
    HAS_NEXT_OBS,
    NEXT_OBS,
    POLICY_VERSION,
    REWARDS,
    TERMINATEDS,
    TRUNCATEDS,
    SampleBatch,
    T,
)
from storage.experience.sequences import fragment_ends

ADVANTAGES, VALUE_TARGETS = "advantages", "value_targets"
"""Columns that a worker computes when it samples; batches from shards do not have them."""

FloatArray = npt.NDArray[np.float64]

_BEFORE = ("ess", "stale_kl", "explained_variance")
_AFTER = ("loss", "value_loss", "entropy", "kl_k1", "kl_k3", "clip_fraction", "clip", "lr")


@dataclass(frozen=True, kw_only=True)
class PPOConfig(AnnotatedSettings):
    """The settings of PPO. Raises ValueError for values outside their range.

    The defaults suit short episodes and batches of some hundred rows. `lr` and `clip` decrease to a
    tenth and then stay: a trainer that follows live traffic never stops learning.
    """

    columns: ClassVar[tuple[str, ...]] = (
        "obs",
        "actions",
        REWARDS,
        TERMINATEDS,
        TRUNCATEDS,
        NEXT_OBS,
        HAS_NEXT_OBS,
        AGENT_ID,
        ACTION_LOGP,
        POLICY_VERSION,
        "source",
    )
    gamma: Annotated[float, Meta(ge=0, le=1, description="discount per step")] = 0.99
    lam: Annotated[float, Meta(ge=0, le=1, description="lambda of the advantages (GAE)")] = 0.95
    epochs: Annotated[int, Meta(ge=1, description="passes over each batch")] = 20
    minibatch: Annotated[int, Meta(ge=1, description="rows in a minibatch")] = 256
    lr: Annotated[float, Meta(gt=0, description="Adam's first learning rate")] = 1e-3
    clip: Annotated[
        float,
        Meta(gt=0, description="the first c: importance weights are clipped to 1 - c and 1 + c"),
    ] = 0.2
    schedule_steps: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="trained rows after which lr and clip would be 0; none: no decrease"),
    ] = 100_000
    schedule_end: Annotated[
        float,
        Meta(ge=0, le=1, description="the least share of their first values that they keep"),
    ] = 0.1
    value_coeff: Annotated[float, Meta(ge=0, description="weight of the value loss")] = 0.5
    entropy_coeff: Annotated[float, Meta(ge=0, description="weight of the entropy; 0 for none")] = (
        0.0
    )
    max_grad_norm: Annotated[
        float, Meta(gt=0, description="limit of the gradient's Euclidean norm, of pi and of V each")
    ] = 0.5
    scale_rewards: Annotated[
        bool, Meta(description="divide rewards by the running deviation of returns")
    ] = True

    def build(self, policy: Policy) -> PPO:
        """The PPO learner of a policy."""
        return PPO(policy, self)


@dataclass(frozen=True)
class Rows:
    """A batch as tensors; N rows. All but `observed` and `actions` are (N,) float64."""

    observed: Tensor  # (N, D) float32
    actions: list[Tensor]  # (N, m) each
    behaviour_logp: Tensor
    advantages: Tensor
    value_targets: Tensor

    def take(self, index: Tensor) -> Rows:
        return Rows(
            self.observed[index],
            [leaf[index] for leaf in self.actions],
            self.behaviour_logp[index],
            self.advantages[index],
            self.value_targets[index],
        )

    def __len__(self) -> int:
        return len(self.advantages)


class PPO:
    """Updates a policy's `pi` and `vf` from fragments of episodes (see policy.algorithms.learner).

    `trained` counts the rows trained on, on which the schedules depend. `metrics_before` are the
    metrics of the policy before an update.
    """

    metrics_before: ClassVar[tuple[str, ...]] = _BEFORE
    metric_names: ClassVar[tuple[str, ...]] = (*_BEFORE, *_AFTER)

    def __init__(self, policy: Policy, config: PPOConfig) -> None:
        if not policy.spec.module.value_head:
            raise ValueError("ppo: expected a module with a value head: ModuleSpec.value_head")
        if policy.spec.action_rule != SAMPLE:
            raise ValueError(
                f"ppo: expected the action rule {SAMPLE}, whose actions it learns from, got "
                f"{policy.spec.action_rule}"
            )
        self.policy = policy
        self.config = config
        self.trained = 0
        self._returns = RunningStat(1)  # of discounted sums of rewards within fragments
        # eps as in the reference implementation of PPO: torch's default 1e-8 enlarges tiny
        # gradients
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
            policy.module.parameters(), lr=config.lr, eps=1e-5
        )

    # state for a checkpoint, in addition to weights and optimizer

    def state_dict(self) -> dict[str, Any]:
        return {"trained": self.trained, "returns": self._returns.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; a state without `returns`, of an earlier release, has seen none."""
        self.trained = int(state["trained"])
        known = state.get("returns")
        self._returns = RunningStat(1) if known is None else RunningStat.from_json(known, 1)

    # learning

    def left_out(self, batch: SampleBatch) -> RowsLeftOut:
        """Reason -> bool (N,) rows that cannot be learned from.

        Raises ValueError for a batch without the columns that learning needs.
        """
        names = _TO_LEARN if ADVANTAGES in batch else (*_TO_LEARN, *_TO_ESTIMATE)
        require_columns(batch, names, "ppo")
        targets = (ADVANTAGES, VALUE_TARGETS) if ADVANTAGES in batch else (REWARDS,)
        following = batch[HAS_NEXT_OBS] & ~batch[TERMINATEDS]
        return {
            "not_on_policy": np.asarray(batch["source"] != "on_policy", np.bool_),
            "no_logp": np.isnan(batch[ACTION_LOGP]),
            "no_next_obs": ~(batch[TERMINATEDS] | batch[HAS_NEXT_OBS]),
            NOT_FINITE: not_finite(batch, targets, "obs", "actions", ACTION_LOGP)
            | (following & not_finite(batch, (), NEXT_OBS)),
        }

    def update(
        self,
        batch: SampleBatch,
        rng: np.random.Generator,
        on_progress: Progress = no_progress,
    ) -> dict[str, float]:
        """Learn from a batch of usable rows, in any order.

        Metrics: see `metrics`. Raises FloatingPointError if the loss is not finite.
        """
        batch = batch.take(episode_order(batch))
        if self.config.scale_rewards and ADVANTAGES not in batch:
            self._see_returns(batch)
        rows, before = self.rows(batch)
        clip = self.schedule()
        total = self.config.epochs * math.ceil(len(rows) / self.config.minibatch)
        config, device = self.config, self.policy.device
        pieces = minibatches(len(rows), config.minibatch, total, rng, device)
        for done, index in enumerate(pieces, 1):
            self._step(rows.take(index), clip)
            on_progress("training", done, total)
        self.trained += len(rows)
        return {**before, **self.metrics(rows, clip)}

    def loss(self, rows: Rows, clip: float, *, normalise: bool = True) -> Tensor:
        """L of the module docstring over a minibatch; a float64 scalar.

        With `normalise=False` the advantages are not normalised: for gradients that are averaged
        over several processes, each of which would normalise by its own rows.
        """
        config = self.config
        dist = self.policy.distribution(rows.observed)
        log_ratio = dist.logp(rows.actions) - rows.behaviour_logp
        advantages = _normalised(rows.advantages) if normalise else rows.advantages
        gain = clipped_surrogate(log_ratio, advantages, clip).mean()
        values = self.policy.values(rows.observed)
        value_loss = (values - rows.value_targets).square().mean()
        entropy = dist.entropy().mean()
        return -gain + config.value_coeff * value_loss - config.entropy_coeff * entropy

    def _step(self, rows: Rows, clip: float) -> None:
        loss = self.loss(rows, clip)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"ppo: the loss became {loss.item()}; try a smaller lr")
        self.optimizer.zero_grad()
        loss.backward()
        self.policy.module.clip_gradients(self.config.max_grad_norm)
        self.optimizer.step()

    def schedule(self) -> float:
        """Set the learning rate for the rows trained on so far, and return the clip range."""
        config = self.config
        share = 1.0
        if config.schedule_steps is not None:
            share = max(1.0 - self.trained / config.schedule_steps, config.schedule_end)
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * share
        return config.clip * share

    @torch.no_grad()
    def rows(self, batch: SampleBatch) -> tuple[Rows, dict[str, float]]:
        """The batch as tensors, and the metrics before the update.

        Uses the columns `advantages` and `value_targets` if the batch has them.
        """
        policy = self.policy
        observed = policy.observe(policy.flat_observations(batch))
        actions = policy.stored_actions(batch)
        values = policy.values(observed).double().cpu().numpy()
        result = self.advantages(batch, values)
        behaviour_logp = self._tensor(batch[ACTION_LOGP])
        log_ratio = policy.distribution(observed).logp(actions) - behaviour_logp
        rows = Rows(
            observed,
            actions,
            behaviour_logp,
            self._tensor(result.advantages),
            self._tensor(result.value_targets),
        )
        return rows, {
            "ess": _effective_share(log_ratio),
            "stale_kl": float(k3(log_ratio)),
            "explained_variance": _explained_variance(values, result.value_targets),
        }

    @torch.no_grad()
    def advantages(self, batch: SampleBatch, values: FloatArray | None = None) -> Advantages:
        """The batch's columns `advantages` and `value_targets`, or both computed.

        Rows are in order; `values` (N,) are those of their observations, None to compute them.
        """
        if ADVANTAGES in batch:
            return Advantages(batch[ADVANTAGES], batch[VALUE_TARGETS])
        policy = self.policy
        if values is None:
            observed = policy.observe(policy.flat_observations(batch))
            values = policy.values(observed).double().cpu().numpy()
        following = policy.observe(policy.flat_observations(batch, NEXT_OBS))
        return gae(
            batch[REWARDS] / self._scale(),
            values,
            policy.values(following).double().cpu().numpy(),
            terminated=batch[TERMINATEDS],
            ends=fragment_ends(batch[T], *(batch[name] for name in EPISODE)),
            gamma=self.config.gamma,
            lam=self.config.lam,
        )

    def _see_returns(self, batch: SampleBatch) -> None:
        zeros = np.zeros(batch.count)
        ends = fragment_ends(batch[T], *(batch[name] for name in EPISODE))
        over, gamma = batch[TERMINATEDS], self.config.gamma
        sums = gae(batch[REWARDS], zeros, zeros, terminated=over, ends=ends, gamma=gamma, lam=1.0)
        self._returns.push(sums.advantages[:, None])

    def _scale(self) -> float:
        """The unit of rewards: 1 without returns that differ."""
        return (float(self._returns.std[0]) if self._returns.n > 1 else 0.0) or 1.0

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.array(array, np.float64)).to(self.policy.device)

    @torch.no_grad()
    def metrics(self, rows: Rows, clip: float) -> dict[str, float]:
        """Metrics over the whole batch after the update.

        The metrics before the update, of `rows`: `ess`, the effective sample size of the weights w
        as a share of the rows (1: the rows are on-policy), `stale_kl` (k3), and
        `explained_variance` of the value targets.
        """
        dist = self.policy.distribution(rows.observed)
        log_ratio = dist.logp(rows.actions) - rows.behaviour_logp
        outside = (log_ratio.exp() - 1).abs() > clip
        values = self.policy.values(rows.observed)
        return {
            "loss": float(self.loss(rows, clip)),
            "value_loss": float((values - rows.value_targets).square().mean()),
            "entropy": float(dist.entropy().mean()),
            "kl_k1": float(k1(log_ratio)),
            "kl_k3": float(k3(log_ratio)),
            "clip_fraction": float(outside.double().mean()),
            "clip": clip,
            "lr": float(self.optimizer.param_groups[0]["lr"]),
        }


_TO_LEARN = ("obs", "actions", TERMINATEDS, HAS_NEXT_OBS, ACTION_LOGP, "source")
_TO_ESTIMATE = (REWARDS, NEXT_OBS, T, *EPISODE)


def _normalised(advantages: Tensor) -> Tensor:
    """Scale to mean 0 and standard deviation 1; a single row is returned unchanged."""
    if len(advantages) < 2:
        return advantages
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def _effective_share(log_weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2), scaled so that no weight overflows: Kish 1965."""
    weights = (log_weights - log_weights.max()).exp()
    return float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))


def _explained_variance(values: FloatArray, targets: FloatArray) -> float:
    """1 - Var(R - V) / Var(R); NaN if the targets do not vary."""
    variance = float(np.var(targets))
    return 1.0 - float(np.var(targets - values)) / variance if variance else math.nan
