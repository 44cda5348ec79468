"""The interface between a learner and an algorithm: a config that builds it, and its updates.

A config is a frozen dataclass with `build(policy)`; an implementation does not have to import this
module. It also contains what our own algorithms share: checks of settings, and passes over a batch
in random order.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
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
    "minibatches",
    "near_names",
    "no_metrics",
    "require_at_least",
    "require_columns",
    "require_not_negative",
    "require_positive",
]

RowsLeftOut: TypeAlias = Mapping[str, npt.NDArray[np.bool_]]
"""Reason -> bool (N,), True for rows to exclude. A row with several reasons counts for the
first."""


class Algorithm(Protocol):
    """One update rule on one policy."""

    policy: Policy
    optimizer: torch.optim.Optimizer
    metric_names: ClassVar[tuple[str, ...]]  # the metrics of `update`, for every batch

    def left_out(self, batch: SampleBatch) -> RowsLeftOut:
        """The rows that cannot be learned from. Raises ValueError that names missing columns."""

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint stores as JSON, next to weights and optimizer: states of schedules."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def update(
        self, batch: SampleBatch, rng: np.random.Generator, on_progress: Progress = ...
    ) -> dict[str, float]: ...


class AlgorithmConfig(Protocol):
    """The settings of an algorithm: a frozen dataclass of plain values.

    A config whose network outputs action values also has a class variable for `default_rule`:
    `action_rule: ClassVar = ActionRule("epsilon_greedy")`.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    # to be read from shards, in addition to `t` and the rows' identity
    columns: ClassVar[tuple[str, ...]]

    def build(self, policy: Policy) -> Algorithm:
        """The algorithm that computes the losses of a policy."""
        ...


def default_rule(config: AlgorithmConfig) -> ActionRule:
    """The action rule for an algorithm's policies if none is chosen: its own, or `sample`."""
    rule: ActionRule = getattr(config, "action_rule", SAMPLE)
    return rule


def no_metrics(names: Iterable[str]) -> dict[str, float]:
    """The metrics of an update without usable rows: the same names, each NaN."""
    return dict.fromkeys(names, math.nan)


def require_columns(batch: SampleBatch, names: Iterable[str], who: str) -> None:
    """Raise ValueError unless the batch has these columns; `obs` includes `obs.<path>`."""
    there = {name.partition(".")[0] for name in batch}
    missing = [name for name in names if name not in there]
    if missing:
        raise ValueError(
            f"{who}: expected a batch with the columns {missing}, got only {sorted(there)}; name "
            "them in the reader's columns= (the algorithm's config lists what it needs)"
        )


def require_at_least(config: object, least: int, *names: str) -> None:
    """Raise ValueError for settings below `least`."""
    for name in names:
        if getattr(config, name) < least:
            raise ValueError(f"{name}: expected {least} or more, got {getattr(config, name)!r}")


def require_positive(config: object, *names: str) -> None:
    """Raise ValueError for settings that are not finite numbers above 0."""
    for name in names:
        if not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"{name}: expected a number > 0, got {getattr(config, name)!r}")


def require_not_negative(config: object, *names: str) -> None:
    """Raise ValueError for settings that are not finite numbers >= 0."""
    for name in names:
        if not 0 <= getattr(config, name) < math.inf:
            raise ValueError(f"{name}: expected a number >= 0, got {getattr(config, name)!r}")


def near_names(name: str, known: Collection[str]) -> str:
    """The end of an error's text: known names similar to an unknown one; "" without any."""
    near = sorted(difflib.get_close_matches(name, known))
    return f"; near {name}: {', '.join(near)}" if near else ""


def minibatches(
    count: int, size: int, passes: int, rng: np.random.Generator, device: torch.device
) -> Iterator[torch.Tensor]:
    """Yield the indices of `count` rows in a random order, `size` at a time, for each pass.

    The last tensor of a pass may be shorter.
    """
    for _ in range(passes):
        order = torch.from_numpy(rng.permutation(count)).to(device)
        yield from order.split(size)
