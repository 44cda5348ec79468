"""One agent's rows in an episode in progress, step by step: for samplers with dicts by agent.

A row begins with an observation and an action, adds up rewards until the agent acts again, and is
completed by the agent's next observation or its end. `Play` is one env's episode with its agents,
`Pack` has finished rows, `Waiting` the agents that wait for an action.
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
from policy.sampling.fragment_buffers import CUT, INFOS, row_layout
from policy.sampling.postprocessing import SOURCE
from storage.experience.sample_batch import (
    ACTION_DIST_INPUTS,
    ACTION_LOGP,
    AGENTS,
    ENV_T,
    NEXT_OBS,
    OBS,
    POLICY_VERSION,
    REWARDS,
    TERMINATEDS,
    TRUNCATEDS,
    SampleBatch,
    T,
)
from storage.spaces.leaves import leaves

__all__ = [
    "ActedRow",
    "AgentRows",
    "Pack",
    "Play",
    "Waiting",
    "observation_columns",
    "same_action",
]

Array = npt.NDArray[Any]


@dataclass
class ActedRow:
    """A row whose result is not known yet."""

    obs: Any
    action: Any
    logp: float
    dist_inputs: Array
    version: int
    env_t: int  # the episode's length when the action was chosen
    action_env: Any = None  # the action as sent, if it differs from the stored one
    logged: bool = False  # whether the environment's own program chose the action
    state: list[Array] = field(default_factory=list)
    reward: float = 0.0
    info: Mapping[str, Any] = field(default_factory=dict)
    next_obs: Any = None
    terminated: bool = False
    truncated: bool = False
    cut: int = 0
    agents: int = -1  # the number of agents in an episode that ended with this row


class AgentRows:
    """An agent's complete rows in one episode that were not taken yet, and its open row.

    `t` counts the agent's own steps. `joint`: other agents may act in the same episode, and rows
    have their position in it.
    """

    def __init__(self, spec: PolicySpec, *, joint: bool = False) -> None:
        self._spec, self._joint = spec, joint
        self._rows: list[ActedRow] = []
        self._t0 = 0
        self.open: ActedRow | None = None

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def last(self) -> ActedRow | None:
        """The latest complete row that was not taken."""
        return self._rows[-1] if self._rows else None

    def begin(self, row: ActedRow) -> None:
        self.open = row

    def complete(self, next_obs: Any, *, terminated: bool, truncated: bool) -> None:
        """Set the open row's result; `next_obs` None: there is no next observation."""
        row = self.open
        if row is None:
            return
        row.next_obs, row.terminated, row.truncated = next_obs, terminated, truncated
        self._rows.append(row)
        self.open = None

    def take(self) -> tuple[dict[str, Array], Array]:
        """Remove the complete rows; return (their columns, bool (N,) whether new_obs is known)."""
        rows, self._rows = self._rows, []
        t0 = self._t0
        self._t0 += len(rows)
        has_next = np.array([row.next_obs is not None for row in rows], np.bool_)
        columns = self._columns(rows)
        columns[T] = np.arange(t0, t0 + len(rows), dtype=np.int64)
        if self._joint:
            columns[ENV_T] = np.array([row.env_t for row in rows], np.int64)
            columns[AGENTS] = np.array([row.agents for row in rows], np.int32)
        return columns, has_next

    def _columns(self, rows: list[ActedRow]) -> dict[str, Array]:
        spec = self._spec
        layout = row_layout(spec.observation, spec.action, spec.layout.size)
        columns = {
            name: np.zeros((len(rows), *shape), dtype) for name, (shape, dtype) in layout.items()
        }
        actions = [row.action for row in rows]
        self._fill(columns, OBS, spec.observation, [row.obs for row in rows])
        self._fill(columns, NEXT_OBS, spec.observation, [row.next_obs for row in rows])
        self._fill(columns, "actions", spec.action, actions)
        if any(row.action_env is not None for row in rows):
            sent = [row.action if row.action_env is None else row.action_env for row in rows]
            for leaf in leaves(spec.action):
                stored = columns[leaf.column("actions")]
                columns[leaf.column("actions_env")] = np.zeros_like(stored)
            self._fill(columns, "actions_env", spec.action, sent)
        columns[REWARDS][:] = [row.reward for row in rows]
        columns[TERMINATEDS][:] = [row.terminated for row in rows]
        columns[TRUNCATEDS][:] = [row.truncated for row in rows]
        columns[ACTION_LOGP][:] = [row.logp for row in rows]
        columns[POLICY_VERSION][:] = [row.version for row in rows]
        columns[CUT][:] = [row.cut for row in rows]
        sources = ["logged" if row.logged else "on_policy" for row in rows]
        columns[SOURCE] = np.array(sources, object)
        for i, row in enumerate(rows):
            columns[INFOS][i] = dict(row.info)
            columns[ACTION_DIST_INPUTS][i] = row.dist_inputs
        for i in range(len(rows[0].state) if rows else 0):
            columns[f"state_in_{i}"] = np.stack([row.state[i] for row in rows])
        return columns

    @staticmethod
    def _fill(columns: dict[str, Array], prefix: str, space: Any, values: list[Any]) -> None:
        names = [leaf.column(prefix) for leaf in leaves(space)]
        for i, value in enumerate(values):
            if value is None:
                continue
            for name, item in zip(names, leaf_values(space, value, prefix), strict=True):
                columns[name][i] = item


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


@dataclass
class Waiting:
    """Agents of one policy that wait for an action."""

    env_ids: list[Any] = field(default_factory=list)
    agents: list[Any] = field(default_factory=list)
    observations: list[Any] = field(default_factory=list)


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
