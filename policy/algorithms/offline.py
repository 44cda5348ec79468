"""Learning from a fixed log: the loop of updates that the offline algorithms share.

A batch is the whole log, or a large block of it. On each one an algorithm takes `updates` steps of
its optimizer over minibatches in random order, with a learning rate that decreases linearly to 0.
Weights of single steps differ by chance, so the policy keeps their mean over the last tenth of the
updates (Polyak & Juditsky 1992, Acceleration of Stochastic Approximation by Averaging), or over the
tenth that an algorithm scores highest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from policy.algorithms.advantages import gae
from policy.algorithms.base import (
    EPISODE,
    RowsLeftOut,
    episode_order,
    minibatches,
    require_columns,
)
from policy.algorithms.settings import AnnotatedSettings
from policy.inference.finite import NOT_FINITE, not_finite
from policy.networks.modules import PolicyModule
from policy.networks.policy import Policy
from policy.progress import OnPart, Progress, no_part
from storage.experience.sample_batch import (
    HAS_NEXT_OBS,
    NEXT_OBS,
    REWARDS,
    TERMINATEDS,
    SampleBatch,
    T,
)
from storage.experience.sequences import fragment_ends

PARTS = 10
"""The updates are divided into this many parts."""


@dataclass(frozen=True, kw_only=True)
class OfflineConfig(AnnotatedSettings):
    """The settings that offline algorithms share. Raises ValueError for values out of range."""

    columns: ClassVar[tuple[str, ...]]

    updates: Annotated[
        int, Meta(ge=1, description="steps of the optimizer on each batch, which is the whole log")
    ] = 4000
    epochs: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="passes over each batch, in place of `updates`"),
    ] = None
    minibatch: Annotated[int, Meta(ge=1, description="rows in a minibatch")] = 256
    lr: Annotated[
        float, Meta(gt=0, description="Adam's first learning rate, which decreases to 0")
    ] = 1e-3
    max_grad_norm: Annotated[
        float, Meta(gt=0, description="limit of the gradient's Euclidean norm")
    ] = 10.0

    def steps(self, rows: int) -> int:
        """The steps of the optimizer on a batch."""
        if self.epochs is None:
            return self.updates
        return self.epochs * math.ceil(rows / self.minibatch)


OwnConfig = TypeVar("OwnConfig", bound=OfflineConfig)


class OfflineAlgorithm(Generic[OwnConfig]):
    """The base of offline algorithms; policy.algorithms.learner runs them."""

    metric_names: ClassVar[tuple[str, ...]]
    on_part: OnPart = staticmethod(no_part)

    def __init__(self, policy: Policy, config: OwnConfig, *, weight_decay: float = 0.0) -> None:
        self.policy = policy
        self.config = config
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
            policy.module.parameters(), lr=config.lr, weight_decay=weight_decay
        )

    def state_dict(self) -> dict[str, Any]:
        """Nothing: each batch starts from the current weights alone."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        return None

    def left_out(self, batch: SampleBatch) -> RowsLeftOut:
        """Reason -> bool (N,) rows that cannot be learned from.

        Raises ValueError for a batch without the columns that learning needs.
        """
        require_columns(batch, self.config.columns, type(self).__name__.lower())
        return Transitions.left_out(batch)

    def descend(
        self,
        count: int,
        rng: np.random.Generator,
        loss_of: Callable[[Tensor, int], dict[str, Tensor]],
        on_progress: Progress,
        *,
        critics: nn.Module | None = None,
        score: Callable[[PolicyModule], float] = lambda _: 0.0,
    ) -> dict[str, float]:
        """Take all steps on a batch of `count` rows; return the metrics of the last one.

        `loss_of` gets the indices of a minibatch and the number of steps before it, and returns
        metrics that begin with "loss". `critics` are networks that are trained along with the
        policy, and forgotten afterwards. The policy keeps the mean weights of the part with the
        highest score; of several, the last one.
        Raises FloatingPointError if the loss is not finite.
        """
        module, config = self.policy.module, self.config
        steps = config.steps(count)
        optimizers, parameters = [self.optimizer], list(module.parameters())
        if critics is not None:
            parameters += critics.parameters()
            optimizers.append(torch.optim.Adam(critics.parameters(), lr=config.lr))
        pieces = minibatches(count, config.minibatch, steps, rng, self.policy.device)
        best, metrics = -math.inf, {}
        kept = AveragedModel(module)
        for first, last in pairwise(np.linspace(0, steps, min(PARTS, steps) + 1).astype(int)):
            mean = AveragedModel(module)
            for done in range(first, last):
                metrics = loss_of(next(pieces), done)
                self._step(metrics["loss"], optimizers, parameters, 1 - done / steps)
                mean.update_parameters(module)
                on_progress("training", done + 1, steps)
            self.on_part(int(last), {name: float(one.detach()) for name, one in metrics.items()})
            averaged: Any = mean.module  # which torch types as any Module
            if (found := score(averaged)) >= best:
                best, kept = found, mean
        module.load_state_dict(kept.module.state_dict())
        return {name: float(value.detach()) for name, value in metrics.items()}

    def _step(
        self,
        loss: Tensor,
        optimizers: list[torch.optim.Optimizer],
        parameters: list[nn.Parameter],
        left: float,
    ) -> None:
        """One step with a share `left` of the first learning rate."""
        if not torch.isfinite(loss):
            name = type(self).__name__.lower()
            raise FloatingPointError(f"{name}: the loss became {loss.item()}; try a smaller lr")
        for optimizer in optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = self.config.lr * left
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()


@dataclass(frozen=True)
class Transitions:
    """A batch as tensors; N rows."""

    observed: Tensor  # (N, D) float32
    following: Tensor  # (N, D) float32; not read where `over`
    actions: list[Tensor]  # (N, m) each
    rewards: Tensor  # (N,) float32
    over: Tensor  # (N,) bool: nothing is earned afterwards

    columns: ClassVar[tuple[str, ...]] = (
        "obs",
        "actions",
        REWARDS,
        TERMINATEDS,
        NEXT_OBS,
        HAS_NEXT_OBS,
    )

    @classmethod
    def of(cls, policy: Policy, batch: SampleBatch) -> Transitions:
        """The rows of a batch, which `left_out` has reduced."""
        over = np.asarray(batch[TERMINATEDS], np.bool_)
        return cls(
            policy.observe(policy.flat_observations(batch)),
            policy.observe(policy.flat_observations(batch, NEXT_OBS)),
            policy.stored_actions(batch),
            torch.from_numpy(np.asarray(batch[REWARDS], np.float32)).to(policy.device),
            torch.from_numpy(over.copy()).to(policy.device),
        )

    def take(self, index: Tensor) -> Transitions:
        return Transitions(
            self.observed[index],
            self.following[index],
            [leaf[index] for leaf in self.actions],
            self.rewards[index],
            self.over[index],
        )

    def with_rewards(self, rewards: Tensor) -> Transitions:
        return replace(self, rewards=rewards)

    @staticmethod
    def left_out(batch: SampleBatch) -> dict[str, npt.NDArray[np.bool_]]:
        """Reason -> bool (N,): rows that lead nowhere known, or with numbers beyond float32."""
        following = batch[HAS_NEXT_OBS] & ~batch[TERMINATEDS]
        return {
            "no_next_obs": ~(batch[TERMINATEDS] | batch[HAS_NEXT_OBS]),
            NOT_FINITE: not_finite(batch, (REWARDS,), "obs", "actions")
            | (following & not_finite(batch, (), NEXT_OBS)),
        }


def inner_split(
    count: int, share: float, rng: np.random.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The indices of a random `share` of `count` rows, and of the others."""
    order = torch.from_numpy(rng.permutation(count)).to(device)
    inner = int(count * share)
    return order[:inner], order[inner:]


def scaled_transitions(
    policy: Policy, batch: SampleBatch, gamma: float
) -> tuple[Transitions, npt.NDArray[np.bool_]]:
    """(the rows in the order of their episodes, bool (N,) whether a row ends a fragment).

    Rewards are in units of `return_scale`, which suits networks and learning rates of any log.
    """
    batch = batch.take(episode_order(batch))
    ends = fragment_ends(batch[T], *(batch[name] for name in EPISODE))
    rows = Transitions.of(policy, batch)
    return rows.with_rewards(rows.rewards / return_scale(rows, ends, gamma)), ends


def return_scale(rows: Transitions, ends: npt.NDArray[np.bool_], gamma: float) -> float:
    """The standard deviation of the rows' discounted returns, as far as they were logged.

    1 if returns do not vary.
    """
    zeros = np.zeros(len(ends))
    rewards, over = rows.rewards.cpu().numpy(), rows.over.cpu().numpy()
    found = gae(rewards, zeros, zeros, terminated=over, ends=ends, gamma=gamma, lam=1.0)
    return float(found.advantages.std()) or 1.0
