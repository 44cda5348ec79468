"""Definitions for both samplers: horizons, fragments, and ends of episodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from policy.sampling.fragment_buffers import CUTS
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import SampleBatch

__all__ = ["BatchMode", "CutRules", "Ends", "Sampler", "is_excluded", "without_marker"]

BatchMode: TypeAlias = Literal["truncate_episodes", "complete_episodes"]
BoolArray = npt.NDArray[np.bool_]

FRAGMENT_CUT, _TERMINATED, _TRUNCATED = (
    CUTS.index(n) for n in ("fragment", "terminated", "truncated")
)
_HORIZON, _SOFT_HORIZON = CUTS.index("horizon"), CUTS.index("soft_horizon")


class Sampler(Protocol):
    """Steps environments and returns fragments; for one thread at a time.

    `excluded` is called with the rows of episodes that learners are to skip (their column
    `training_enabled` is False), one agent's run at a time; no batch contains them. None: they are
    dropped.
    """

    excluded: Callable[[SampleBatch], None] | None

    def next_batch(self) -> SampleBatch | MultiAgentBatch:
        """The next fragment of one copy (truncate_episodes) or one episode.

        After a fragment's number of steps that learners are to skip, a batch without rows.
        """

    def simulate(self, episodes: int) -> None:
        """Play this many episodes only for their metrics; their rows are dropped."""


TRAINING_ENABLED = "training_enabled"


def is_excluded(info: Mapping[str, Any]) -> bool:
    """Whether an info says that learners are to skip the episode."""
    enabled = info.get(TRAINING_ENABLED)
    return enabled is not None and not enabled


def without_marker(info: Mapping[str, Any]) -> dict[str, Any]:
    """The environment's info without the marker."""
    return {name: value for name, value in info.items() if name != TRAINING_ENABLED}


@dataclass(frozen=True, kw_only=True)
class Ends:
    """How M steps ended: recorded flags (M,), new episodes, resets."""

    terminateds: BoolArray
    truncateds: BoolArray
    over: BoolArray  # the episode ends here
    reset: BoolArray  # and its environment with it
    cuts: npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class CutRules:
    """When episodes and fragments end.

    `horizon` (inf: none) ends an episode as truncated. With `soft_horizon` the environment
    continues under a new episode id, and no end is recorded. `no_done_at_end` records no end at
    all.
    """

    fragment: int
    mode: BatchMode = "truncate_episodes"
    horizon: float = math.inf
    soft_horizon: bool = False
    no_done_at_end: bool = False

    @property
    def truncates(self) -> bool:
        return self.mode == "truncate_episodes"

    def ends(self, lengths: npt.NDArray[Any], terminated: BoolArray, truncated: BoolArray) -> Ends:
        """The ends of M steps in episodes whose lengths are now `lengths` (M,)."""
        env = terminated | truncated
        reached = (lengths >= self.horizon) & ~env
        hard = reached & (not self.soft_horizon)
        soft = reached & self.soft_horizon
        cuts = np.zeros(len(env), np.uint8)
        if env.any() or reached.any():
            cuts[truncated], cuts[terminated] = _TRUNCATED, _TERMINATED
            cuts[hard], cuts[soft] = _HORIZON, _SOFT_HORIZON
        quiet = self.no_done_at_end
        return Ends(
            terminateds=terminated & (not quiet),
            truncateds=(truncated | hard) & (not quiet),
            over=env | reached,
            reset=env | hard,
            cuts=cuts,
        )
