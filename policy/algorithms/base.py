"""What an algorithm is to a learner: a config that builds it, and the updates it makes.

A config is a frozen dataclass with `build(policy)`; an implementer need not import this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from policy.inference.action_rule import SAMPLE, ActionRule
from policy.networks.policy import Policy
from policy.progress import Progress
from storage.experience.sample_batch import SampleBatch

__all__ = [
    "Algorithm",
    "AlgorithmConfig",
    "RowsLeftOut",
    "default_rule",
    "no_metrics",
    "require_columns",
]

RowsLeftOut: TypeAlias = Mapping[str, npt.NDArray[np.bool_]]
"""Reason -> (N,) rows that it leaves out; of several reasons for a row the first one counts."""


class Algorithm(Protocol):
    """One update rule on one policy."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    metric_names: ClassVar[tuple[str, ...]]  # what `update` gives, whatever the batch

    def left_out(self, batch: SampleBatch) -> RowsLeftOut:
        """Raises ValueError that names the columns which the batch lacks for learning."""

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint keeps beside weights and optimizer, as JSON: where schedules stand."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def update(
        self, batch: SampleBatch, rng: np.random.Generator, on_progress: Progress = ...
    ) -> dict[str, float]: ...


class AlgorithmConfig(Protocol):
    """The settings of an algorithm: a frozen dataclass of plain values.

    One whose network is of action values has `action_rule: ClassVar = ActionRule("epsilon_greedy")`
    beside: see `default_rule`.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    columns: ClassVar[tuple[str, ...]]  # what to read from shards, beside `t` and rows' identity

    def build(self, policy: Policy) -> Algorithm: ...


def default_rule(config: AlgorithmConfig) -> ActionRule:
    """By which an algorithm's policies act unless they are told otherwise: sampled."""
    rule: ActionRule = getattr(config, "action_rule", SAMPLE)
    return rule


def no_metrics(names: Iterable[str]) -> dict[str, float]:
    """The metrics of an update that had no row to learn from: the same names, NaN each."""
    return dict.fromkeys(names, math.nan)


def require_columns(batch: SampleBatch, names: Iterable[str], who: str) -> None:
    """Raise ValueError unless the batch has these columns; `obs` stands for `obs.<path>` too."""
    there = {name.partition(".")[0] for name in batch}
    missing = [name for name in names if name not in there]
    if missing:
        raise ValueError(
            f"{who}: expected a batch with the columns {missing} beside {sorted(there)}; a reader "
            "brings what its columns= names, and the algorithm's config lists what it needs"
        )
