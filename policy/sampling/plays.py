"""What a sampler of dicts keeps of each env: the episode in play, finished rows, who waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from policy.inference.preprocessors import leaf_values
from policy.sampling.agent_rows import AgentRows
from policy.sampling.episode import RolloutEpisode
from storage.experience.sample_batch import SampleBatch
from storage.spaces.leaves import leaves

__all__ = ["Pack", "Play", "Waiting", "observation_columns", "same_action"]


@dataclass
class Play:
    """One env's episode as it goes on."""

    episode: RolloutEpisode
    number: int
    agents: dict[Any, AgentRows] = field(default_factory=dict)
    states: dict[Any, list[Any]] = field(default_factory=dict)
    env_steps: int = 0  # since the last fragment
    kept: bool = True  # False: training is disabled, its rows are in no batch


@dataclass
class Pack:
    """Finished rows by policy id that wait until a fragment is full, of one episode or several."""

    by_policy: dict[str, list[SampleBatch]] = field(default_factory=dict)
    env_steps: int = 0


@dataclass
class Waiting:
    """Agents that want an action now, by policy id."""

    env_ids: list[Any] = field(default_factory=list)
    agents: list[Any] = field(default_factory=list)
    observations: list[Any] = field(default_factory=list)


def observation_columns(space: Any, values: list[Any]) -> dict[str, Any]:
    """Leaf path -> (M, *shape) of M observations."""
    split = [list(leaf_values(space, value, "observation")) for value in values]
    return {
        leaf.path: np.array([one[i] for one in split], leaf.dtype)
        for i, leaf in enumerate(leaves(space))
    }


def same_action(stored: Any, sent: Any) -> bool:
    """Whether an action reaches the environment as it is stored."""
    if isinstance(stored, Mapping):
        return all(same_action(stored[name], sent[name]) for name in stored)
    if isinstance(stored, tuple):
        return all(map(same_action, stored, sent))
    return bool(np.array_equal(stored, sent))
