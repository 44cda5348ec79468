"""What both samplers share: horizons, fragments, ends of episodes, and the loop over rounds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from policy.envs.env_runner import Restarts
from policy.sampling.callbacks import is_overridden
from policy.sampling.episode import RolloutEpisode
from policy.sampling.fragment_buffers import CUTS
from policy.sampling.metrics import MetricsRecorder
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import SampleBatch

if TYPE_CHECKING:
    from policy.sampling.postprocessing import RowFinisher  # needs torch

BatchMode: TypeAlias = Literal["truncate_episodes", "complete_episodes"]
BoolArray = npt.NDArray[np.bool_]

FRAGMENT_CUT, _TERMINATED, _TRUNCATED = (
    CUTS.index(n) for n in ("fragment", "terminated", "truncated")
)
_HORIZON, _SOFT_HORIZON = CUTS.index("horizon"), CUTS.index("soft_horizon")


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


class Sampler(ABC):
    """Steps environments and returns fragments; for one thread at a time.

    `finisher` has the policies and callbacks, `restarts` counts failures. `excluded` is called with
    the rows of episodes that learners are to skip (their column `training_enabled` is False), one
    agent's run at a time; no batch contains them. None: they are dropped.

    An error within a round leaves environments and rows in an inconsistent state, so nothing more
    is sampled: every later call raises the same error.
    """

    def __init__(
        self,
        rules: CutRules,
        *,
        finisher: RowFinisher,
        recorder: MetricsRecorder,
        restarts: Restarts,
        rng: np.random.Generator,
        clip_actions: bool = True,
        explore: bool = True,
    ) -> None:
        self._rules, self._finisher, self._recorder = rules, finisher, recorder
        self._restarts, self._rng = restarts, rng
        self._clip, self._explore = clip_actions, explore
        self._callbacks = finisher.callbacks
        self._watched = is_overridden(self._callbacks, "on_episode_step")
        self._ready: deque[SampleBatch | MultiAgentBatch] = deque()
        self.excluded: Callable[[SampleBatch], None] | None = None
        self._excluded_steps = 0  # since the last batch
        self._played = 0  # episodes
        self._stopped_by: Exception | None = None
        self._has_ended = False  # the environment, by itself

    def next_batch(self) -> SampleBatch | MultiAgentBatch:
        """The next fragment of one copy (truncate_episodes) or one episode.

        After a fragment's number of steps that learners are to skip, a batch without rows. Raises
        the error of an environment that is not restarted.
        """
        if not self._ready:
            self._renew_actors()
        while not self._ready:
            self._play_on()
            if self._excluded_steps >= self._rules.fragment and not self._ready:
                self._put_no_rows()
        self._excluded_steps = 0
        return self._ready.popleft()

    def simulate(self, episodes: int) -> None:
        """Play this many episodes only for their metrics; their rows are dropped."""
        target = self._played + episodes
        while self._played < target and not self._has_ended:
            self._renew_actors()
            self._play_on()
            self._ready.clear()

    def _play_on(self) -> None:
        if self._stopped_by is not None:
            raise self._stopped_by
        try:
            self._round()
        except Exception as error:
            self._stopped_by = error
            raise

    @abstractmethod
    def _renew_actors(self) -> None:
        """Act with the policies' latest weights."""

    @abstractmethod
    def _round(self) -> None:
        """Act in all environments that wait, and take their results."""

    @abstractmethod
    def _put_no_rows(self) -> None:
        """Make a batch without rows the next one."""

    def _hook(self, episode: RolloutEpisode, env: Any) -> dict[str, Any]:
        """The arguments of an episode's callbacks; `env`: what is stepped."""
        return {
            "worker": self._finisher.worker,
            "base_env": env,
            "policies": self._finisher.policies,
            "episode": episode,
            "env_index": episode.env_id,
        }
