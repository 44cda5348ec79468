"""What an algorithm is to a learner: a config that builds it, and the updates it makes.

A config is a frozen dataclass with `build(policy)`; an implementer need not import this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from policy.networks.policy import Policy
from policy.progress import Progress
from storage.experience.sample_batch import SampleBatch

__all__ = ["Algorithm", "AlgorithmConfig", "RowsLeftOut"]

RowsLeftOut: TypeAlias = Mapping[str, npt.NDArray[np.bool_]]
"""Reason -> (N,) rows that it leaves out; of several reasons for a row the first one counts."""


class Algorithm(Protocol):
    """One update rule on one policy."""

    policy: Policy
    optimizer: torch.optim.Optimizer

    def left_out(self, batch: SampleBatch) -> RowsLeftOut: ...

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint keeps beside weights and optimizer, as JSON: where schedules stand."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def update(
        self, batch: SampleBatch, rng: np.random.Generator, on_progress: Progress = ...
    ) -> dict[str, float]: ...


class AlgorithmConfig(Protocol):
    """The settings of an algorithm: a frozen dataclass of plain values."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    columns: ClassVar[tuple[str, ...]]  # what to read from shards, beside `t` and rows' identity

    def build(self, policy: Policy) -> Algorithm: ...
