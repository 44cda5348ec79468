"""The interface between a learner and an algorithm: a config that builds it, and its updates.

A config is a frozen dataclass with `build(policy)`; an implementation does not have to import this
module. It also contains what our own algorithms share: checks of settings, and passes over a batch
in random order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from policy.inference.action_rule import SAMPLE, ActionRule
from policy.inference.spec import PolicySpec
from policy.networks.policy import Policy
from policy.progress import Progress
from storage.experience.sample_batch import (
    AGENT_ID,
    EPISODE_ORDINAL,
    NEXT_OBS,
    STREAM,
    TERMINATEDS,
    SampleBatch,
    T,
)

RowsLeftOut: TypeAlias = Mapping[str, npt.NDArray[np.bool_]]
"""Reason -> bool (N,), True for rows to exclude. A row with several reasons counts for the
first."""


class Algorithm(Protocol):
    """One update rule on one policy.

    One with networks that outlive an update, such as critics, has them as `networks`, an nn.Module.
    """

    policy: Policy
    optimizer: torch.optim.Optimizer

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics of `update`, for every batch."""

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


def require_no_scorer(who: str, spec: PolicySpec) -> None:
    """Raise ValueError for a scorer: critics that know actions by their place cannot value it."""
    if spec.candidates is not None:
        raise ValueError(
            f"{who}: expected a policy without candidates, as its critics know an action by its "
            "place only; got a scorer: choose dm, dr, cql or torchrl:dqn"
        )


def rows_left_out(algorithm: Algorithm, batch: SampleBatch) -> RowsLeftOut:
    """What an algorithm leaves out of a batch, and what action masks make useless."""
    return {**algorithm.left_out(batch), **useless_by_mask(algorithm.policy.spec, batch)}


def useless_by_mask(spec: PolicySpec, batch: SampleBatch) -> RowsLeftOut:
    """Reason -> bool (N,): rows that action masks make useless.

    These are actions that their own mask forbids, as logs of policies without masks have, and steps
    after which nothing is allowed although the episode has not terminated.
    """
    mask = spec.action_mask
    if mask is None:
        return {}
    path, following = mask.leaf.path, mask.leaf.column(NEXT_OBS)
    taken = batch[mask.choices.column("actions")]
    found = {"forbidden_action": mask.forbidden({path: batch[mask.leaf.column("obs")]}, taken)}
    if following in batch and TERMINATEDS in batch:
        none = mask.allows_none({path: batch[following]})
        found["no_next_action"] = none & ~batch[TERMINATEDS]
    return found


def minibatches(
    count: int, size: int, steps: int, rng: np.random.Generator, device: torch.device
) -> Iterator[torch.Tensor]:
    """Yield `steps` times the indices of up to `size` of `count` rows.

    Rows come in a random order; a pass over all of them ends with the rows that are left, before
    the next one begins.
    """
    done = 0
    while done < steps:
        order = torch.from_numpy(rng.permutation(count)).to(device)
        for index in order.split(size)[: steps - done]:
            yield index
            done += 1


EPISODE = (STREAM, EPISODE_ORDINAL, AGENT_ID)
"""The columns that identify one agent's part of an episode."""


def episode_order(batch: SampleBatch) -> npt.NDArray[np.intp]:
    """(N,) the indices of the rows, sorted by episode, agent and t."""
    codes = [np.unique(batch[name], return_inverse=True)[1] for name in EPISODE]
    return np.lexsort((batch[T], *reversed(codes)))
