"""From an env creator to environments that a sampler can step."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym

from policy.envs.base_env import BaseEnv, require_reset_support, to_base_env
from policy.envs.env_context import EnvContext
from policy.worker.settings import WorkerSettings

_log = logging.getLogger("headrace.worker")

# far enough apart that copies of two workers never start with the same seed
_SEEDS_A_WORKER = 10_007


@dataclass(frozen=True)
class EnvMaker:
    """Creates copies of the environment; picklable, so that a copy's own process can call it."""

    env_creator: Callable[[EnvContext], Any]
    context: EnvContext
    wraps_atari: bool
    monitor_path: str | None

    @classmethod
    def of(cls, settings: WorkerSettings) -> EnvMaker:
        if settings.env_creator is None:
            raise ValueError("env_creator: expected one, to make an environment with")
        context = EnvContext(
            settings.env_config,
            settings.worker_index,
            remote=settings.remote_worker_envs,
            num_workers=settings.num_workers,
        )
        deepmind = settings.preprocessor_pref == "deepmind"
        return cls(settings.env_creator, context, deepmind, settings.monitor_path)

    def __call__(self, vector_index: int = 0) -> Any:
        """The copy with this index, with the wrappers that the settings ask for."""
        env = self.env_creator(self.context.copy_with_overrides(vector_index=vector_index))
        if env is None:
            raise ValueError("env_creator: expected an environment, got None")
        if not isinstance(env, gym.Env):
            return env
        if self.wraps_atari and is_atari(env):
            env = _deepmind(env)
        if self.monitor_path is not None:
            env = _monitored(env, self._folder(vector_index))
        return env

    def _folder(self, vector_index: int) -> str:
        name = f"worker-{self.context.worker_index}-env-{vector_index}"
        return os.path.join(self.monitor_path or "", name)


@dataclass(frozen=True)
class CopyMaker:
    """`EnvMaker` for a single index, as a function without arguments."""

    maker: EnvMaker
    vector_index: int

    def __call__(self) -> Any:
        return self.maker(self.vector_index)


def is_atari(env: Any) -> bool:
    """Whether the environment is a game of the Arcade Learning Environment."""
    return hasattr(getattr(env, "unwrapped", None), "ale")


def _deepmind(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """84 x 84 grey, 4 frames, as in Mnih et al. 2015. The env must be created with frameskip=1."""
    return gym.wrappers.FrameStackObservation(gym.wrappers.AtariPreprocessing(env), 4)


def _monitored(env: gym.Env[Any, Any], folder: str) -> gym.Env[Any, Any]:
    """Add statistics to the last info of every episode, and videos if the env renders images."""
    if env.render_mode == "rgb_array":
        try:
            env = gym.wrappers.RecordVideo(env, folder)
        except gym.error.DependencyNotInstalled as error:
            _log.warning("monitor_path: statistics without videos: %s", error)
    return gym.wrappers.RecordEpisodeStatistics(env)


def single_agent(env: Any) -> bool:
    """Whether it is a plain gymnasium environment, which is stepped without `BaseEnv`."""
    many = hasattr(env, "agents") or hasattr(env, "possible_agents")
    return isinstance(env, gym.Env) and not many and not hasattr(env, "to_base_env")


def time_limit(env: Any) -> float | None:
    """The env's own limit on the steps of an episode; None if it has none."""
    spec = getattr(env, "spec", None)
    limit = getattr(spec, "max_episode_steps", None)
    return None if limit is None else float(limit)


def seed_of(settings: WorkerSettings, copy: int) -> int | None:
    """The seed of a copy's first reset; None without a seed."""
    if settings.seed is None:
        return None
    return settings.seed + settings.seed_place * _SEEDS_A_WORKER + copy


def base_env_of(settings: WorkerSettings, first: Any) -> BaseEnv:
    """Any environment but a plain gymnasium one, behind the protocol of policy.envs.base_env.

    Raises ValueError for a horizon if the environment cannot be reset.
    """
    vector = isinstance(first, gym.vector.VectorEnv)
    env = to_base_env(
        first,
        num_envs=1 if vector else settings.num_envs,
        make_env=EnvMaker.of(settings),
        seed=seed_of(settings, 0),
    )
    require_reset_support(env, settings.episode_horizon)
    return env


def is_multi_agent(env: Any) -> bool:
    """Whether several agents may act in the environment.

    That is any but a gymnasium environment or a vector of them. An environment with its own
    `BaseEnv` may also map agents to policies, unless its `one_agent` is True.
    """
    if getattr(env, "one_agent", False):
        return False
    return not single_agent(env) and not isinstance(env, gym.vector.VectorEnv)


def env_spaces(env: Any) -> tuple[Any, Any]:
    """(observation, action) of one agent, or by agent if they are declared so."""
    if isinstance(env, gym.vector.VectorEnv):
        return env.single_observation_space, env.single_action_space
    found = []
    for kind in ("observation", "action"):
        declared = getattr(env, f"{kind}_space", None)
        if callable(declared) and not isinstance(declared, gym.Space):
            declared = {agent: declared(agent) for agent in env.possible_agents}
        found.append(getattr(env, f"{kind}_spaces", None) if declared is None else declared)
    return found[0], found[1]
