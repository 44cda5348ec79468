"""One agent's rows in an episode in progress, step by step: for samplers with dicts by agent.

A row begins with an observation and an action, adds up rewards until the agent acts again, and is
completed by the agent's next observation or its end. `Play` is one env's episode with its agents,
`Pack` has finished rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from policy.inference.preprocessors import leaf_values
from policy.inference.spec import PolicySpec
from policy.sampling.episode import RolloutEpisode
from policy.sampling.fragment_buffers import RowLayout
from policy.sampling.postprocessing import SOURCE
from storage.experience.sample_batch import (
    AGENTS,
    HAS_NEXT_OBS,
    NEXT_OBS,
    OBS,
    REWARDS,
    SampleBatch,
    T,
)
from storage.spaces.leaves import leaves

Array = npt.NDArray[Any]


@dataclass
class ActedRow:
    """A row that waits for its result; `columns` has a value for each column known so far."""

    action: Any
    columns: dict[str, Any]


class RowColumns:
    """The columns of a policy's rows, for all its agents; `layout`: see `RowFinisher.layout`."""

    def __init__(self, spec: PolicySpec, layout: RowLayout) -> None:
        self.layout = layout | {SOURCE: ((), object), HAS_NEXT_OBS: ((), np.bool_)}
        observation, action = spec.observation, spec.action
        spaces = {OBS: observation, NEXT_OBS: observation, "actions": action, "actions_env": action}
        self._split = {
            prefix: (space, [leaf.column(prefix) for leaf in leaves(space)])
            for prefix, space in spaces.items()
        }
        of_leaves = leaves(action)
        self.stored_as = {one.column("actions_env"): one.column("actions") for one in of_leaves}

    def split(self, prefix: str, value: Any) -> dict[str, Any]:
        """Column -> the value of each leaf of an observation or action."""
        space, names = self._split[prefix]
        return dict(zip(names, leaf_values(space, value, prefix), strict=True))


class AgentRows:
    """An agent's complete rows in one episode that were not taken yet, and its open row.

    The column `t` counts the agent's own steps.
    """

    def __init__(self, columns: RowColumns) -> None:
        self._columns = columns
        self._rows: list[ActedRow] = []
        self._t = 0
        self.open: ActedRow | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def last(self) -> ActedRow | None:
        """The latest complete row that was not taken."""
        return self._rows[-1] if self._rows else None

    def begin(self, obs: Any, action: Any, sent: Any, columns: Mapping[str, Any]) -> None:
        """Begin a row. `sent`: the action as the environment gets it."""
        split, row = self._columns.split, {SOURCE: "on_policy", REWARDS: 0.0, AGENTS: -1}
        row |= {T: self._t, **split(OBS, obs), **split("actions", action)}
        if sent is not action and not same_action(action, sent):
            row |= split("actions_env", sent)
        self._t += 1
        self.open = ActedRow(action, {**row, **columns})

    def complete(self, next_obs: Any, columns: Mapping[str, Any]) -> None:
        """Set the open row's result; `next_obs` None: there is no next observation."""
        if self.open is None:
            return
        if next_obs is not None:
            self.open.columns |= self._columns.split(NEXT_OBS, next_obs)
        self.open.columns |= {HAS_NEXT_OBS: next_obs is not None, **columns}
        self._rows.append(self.open)
        self.open = None

    def take(self) -> dict[str, Array]:
        """Remove the complete rows and return their columns.

        Those of `actions_env` are among them if an action was sent in another form than stored.
        """
        rows, self._rows = self._rows, []
        layout = dict(self._columns.layout)
        for sent, stored in self._columns.stored_as.items():
            if any(sent in row.columns for row in rows):
                layout[sent] = layout[stored]
                for row in rows:
                    row.columns.setdefault(sent, row.columns[stored])
        taken = {}
        for name, (shape, dtype) in layout.items():
            column = taken[name] = np.zeros((len(rows), *shape), dtype)
            values = [row.columns.get(name) for row in rows]
            if not shape and None not in values:
                column[:] = values
                continue
            for i, value in enumerate(values):
                if value is not None:
                    column[i] = value
        return taken


@dataclass
class Play:
    """One env's episode in progress."""

    episode: RolloutEpisode
    number: int
    agents: dict[Any, AgentRows] = field(default_factory=dict)
    states: dict[Any, list[Any]] = field(default_factory=dict)
    env_steps: int = 0  # since the last fragment
    kept: bool = True  # False: training is disabled, and no batch contains its rows


@dataclass
class Pack:
    """Finished rows of one or more episodes, by policy id, that wait for a full fragment."""

    by_policy: dict[str, list[SampleBatch]] = field(default_factory=dict)
    env_steps: int = 0


def observation_columns(space: Any, values: list[Any]) -> dict[str, Any]:
    """Leaf path -> (M, *shape) from M observations."""
    split = [list(leaf_values(space, value, "observation")) for value in values]
    return {
        leaf.path: np.array([one[i] for one in split], leaf.dtype)
        for i, leaf in enumerate(leaves(space))
    }


def same_action(stored: Any, sent: Any) -> bool:
    """Whether an action is sent in the same form as stored."""
    if isinstance(stored, Mapping):
        return all(same_action(stored[name], sent[name]) for name in stored)
    if isinstance(stored, tuple):
        return all(map(same_action, stored, sent))
    return bool(np.array_equal(stored, sent))
