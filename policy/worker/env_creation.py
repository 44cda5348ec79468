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

__all__ = [
    "CopyMaker",
    "EnvMaker",
    "base_env_of",
    "env_spaces",
    "is_atari",
    "is_multi_agent",
    "seed_of",
    "single_agent",
    "time_limit",
]

# Far enough apart that the copies of two workers never begin with one seed.
_SEEDS_A_WORKER = 10_007


@dataclass(frozen=True)
class EnvMaker:
    """Makes copy after copy; a value, so that a copy's own process can make it."""

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
        """The copy of that index, wrapped as the settings say."""
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
    """`EnvMaker` for one index, without an argument."""

    maker: EnvMaker
    vector_index: int

    def __call__(self) -> Any:
        return self.maker(self.vector_index)


def is_atari(env: Any) -> bool:
    """Whether it is a game of the Arcade Learning Environment."""
    return hasattr(getattr(env, "unwrapped", None), "ale")


def _deepmind(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """84 x 84 grey, 4 frames, as in Mnih et al. 2015. The env has to be made with frameskip=1."""
    return gym.wrappers.FrameStackObservation(gym.wrappers.AtariPreprocessing(env), 4)


def _monitored(env: gym.Env[Any, Any], folder: str) -> gym.Env[Any, Any]:
    """Statistics in the last info of every episode; videos too where the env renders pictures."""
    if env.render_mode == "rgb_array":
        try:
            env = gym.wrappers.RecordVideo(env, folder)
        except gym.error.DependencyNotInstalled as error:
            _log.warning("monitor_path: statistics without videos: %s", error)
    return gym.wrappers.RecordEpisodeStatistics(env)


def single_agent(env: Any) -> bool:
    """Whether it is a plain gymnasium environment, which needs no protocol between."""
    many = hasattr(env, "agents") or hasattr(env, "possible_agents")
    return isinstance(env, gym.Env) and not many and not hasattr(env, "to_base_env")


def time_limit(env: Any) -> float | None:
    """The env's own limit on the steps of an episode; None when it has none."""
    spec = getattr(env, "spec", None)
    limit = getattr(spec, "max_episode_steps", None)
    return None if limit is None else float(limit)


def seed_of(settings: WorkerSettings, copy: int) -> int | None:
    """The seed of a copy's first reset."""
    if settings.seed is None:
        return None
    return settings.seed + settings.seed_place * _SEEDS_A_WORKER + copy


def base_env_of(settings: WorkerSettings, first: Any) -> BaseEnv:
    """Everything but plain gymnasium environments, behind the protocol of policy.envs.base_env.

    Raises ValueError for a horizon where nothing can be reset.
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
    """Whether several agents may act in it: anything that is neither a gymnasium environment nor a
    vector of them. What is behind a protocol of its own may map its agents to policies, unless it
    says itself that it has one."""
    if getattr(env, "one_agent", False):
        return False
    return not single_agent(env) and not isinstance(env, gym.vector.VectorEnv)


def env_spaces(env: Any) -> tuple[Any, Any]:
    """(observation, action) of one agent, or by agent where they are declared so."""
    if isinstance(env, gym.vector.VectorEnv):
        return env.single_observation_space, env.single_action_space
    found = []
    for kind in ("observation", "action"):
        declared = getattr(env, f"{kind}_space", None)
        if callable(declared) and not isinstance(declared, gym.Space):
            declared = {agent: declared(agent) for agent in env.possible_agents}
        found.append(getattr(env, f"{kind}_spaces", None) if declared is None else declared)
    return found[0], found[1]
