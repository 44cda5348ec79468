"""All settings of a rollout worker, checked once.

    settings = WorkerSettings(env_creator=make, policy=PolicySpec(...), num_envs=8)
    WorkerSettings.from_arguments({"batch_steps": 50, ...})     # with current or earlier names

Arguments that only TensorFlow supports raise NotImplementedError, which names the replacement.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_args

from policy.algorithms.settings import near_names
from policy.envs.env_runner import RestartLimits
from policy.sampling.postprocessing import check_clip_rewards
from policy.sampling.sampler import BatchMode, CutRules

DROPPED: Mapping[str, str] = {
    "tf_session_creator": "policies are torch modules: pass a policy class or a PolicySpec, and "
    "weights by set_weights or a state_dict",
    "import_policy_model_from_h5": "policies are torch modules: load a state_dict and pass its "
    "arrays to set_weights",
}
"""Arguments and methods that only TensorFlow supports -> their replacement."""

_ALIASES: Mapping[str, str] = {
    "batch_steps": "rollout_fragment_length",
    "policies": "policy",
    "policy_graph": "policy",
    "preprocessors": "preprocessor_pref",
    "async_remote_worker_envs": "remote_worker_envs",
    "input_": "input_creator",
}
_ELSEWHERE: Mapping[str, str] = {
    name: f"an argument of as_remote({name}=...), or of WorkerGroup in actor_options"
    for name in ("num_cpus", "num_gpus", "memory", "object_store_memory", "resources")
}
"""Arguments with known names that do not belong to a worker's constructor."""
_DEPRECATED = {"batch_steps"}
_NONE_IS_A_VALUE = "preprocessor_pref"
"""The argument for which None does not stand for the default."""
_PREPROCESSORS = ("deepmind", "flatten", "rllib", None)
_FILTERS = ("NoFilter", "MeanStdFilter", "ConcurrentMeanStdFilter")
_LEAST = {"rollout_fragment_length": 1, "num_envs": 1, "worker_index": 0, "incarnation": 0}
_LEVELS = ("DEBUG", "INFO", "WARN", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """The constructor's arguments of a `RolloutWorker`; docs/workers.md describes them.

    Raises ValueError or TypeError for invalid values.
    """

    env_creator: Callable[..., Any] | None = None
    policy: Any = None
    policy_mapping_fn: Callable[..., str] | None = None
    policies_to_train: Collection[str] | None = None
    rollout_fragment_length: int = 100
    batch_mode: BatchMode = "truncate_episodes"
    episode_horizon: int | None = None
    soft_horizon: bool = False
    no_done_at_end: bool = False
    preprocessor_pref: str | None = "deepmind"
    observation_filter: str = "NoFilter"
    observation_fn: Callable[..., Any] | None = None
    clip_rewards: Any = None
    clip_actions: bool = True
    compress_observations: bool | str = False
    sample_async: bool = False
    num_envs: int = 1
    remote_worker_envs: bool = False
    remote_env_batch_wait_ms: float = 0.0
    restart_failed_sub_environments: bool = False
    restart_limits: RestartLimits = field(default_factory=RestartLimits)
    env_config: Mapping[str, Any] = field(default_factory=dict)
    model_config: Mapping[str, Any] = field(default_factory=dict)
    policy_config: Mapping[str, Any] = field(default_factory=dict)
    worker_index: int = 0
    num_workers: int = 0
    incarnation: int = 0
    monitor_path: str | None = None
    log_dir: str | None = None
    log_level: str | None = None
    callbacks: Any = None
    input_creator: Callable[[Any], Any] | None = None
    output_creator: Callable[[Any], Any] | None = None
    input_evaluation: Collection[str] = ()
    seed: int | None = None
    extra_python_environs: Mapping[str, str] = field(default_factory=dict)
    fake_sampler: bool = False
    explore: bool = True

    def __post_init__(self) -> None:
        if self.batch_mode not in get_args(BatchMode):
            raise ValueError(f"Unsupported batch mode: {self.batch_mode}")
        if self.policy_mapping_fn is not None and not callable(self.policy_mapping_fn):
            raise ValueError("Policy mapping function not callable?")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")
        if self.episode_horizon is not None and not self.episode_horizon >= 1:
            raise ValueError(f"episode_horizon: expected 1 or more, got {self.episode_horizon!r}")
        if isinstance(self.policies_to_train, str):
            raise ValueError(
                f"policies_to_train: expected a list of ids, got {self.policies_to_train!r}"
            )
        for name in ("input_creator", "output_creator"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise TypeError(
                    f"{name}: expected a function of an IOContext, got {getattr(self, name)!r:.80}"
                )
        self._check_words()
        check_clip_rewards(self.clip_rewards)

    def _check_words(self) -> None:
        _one_of("preprocessor_pref", self.preprocessor_pref, _PREPROCESSORS)
        _one_of("observation_filter", self.observation_filter, _FILTERS)
        _one_of("compress_observations", self.compress_observations, (True, False, "bulk"))
        _one_of("log_level", self.log_level, (None, *_LEVELS))
        if self.remote_env_batch_wait_ms < 0:
            raise ValueError(
                f"remote_env_batch_wait_ms: expected 0 or more, got {self.remote_env_batch_wait_ms}"
            )

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> WorkerSettings:
        """Create settings from keyword arguments, also with earlier names; None means the default.

        An earlier name at its default says nothing: the current name may be given as well.
        Raises NotImplementedError for arguments that only TensorFlow supports, and TypeError for
        unknown names.
        """
        named: dict[str, Any] = {}
        known = {one.name: one for one in fields(cls)}
        for name, value in arguments.items():
            if name in DROPPED:
                if value is not None:
                    raise NotImplementedError(f"{name}: {DROPPED[name]}")
                continue
            real = _ALIASES.get(name, name)
            if real in known and value is None and real != _NONE_IS_A_VALUE:
                continue
            if real != name and value is not None and value == known[real].default:
                continue
            if name in _DEPRECATED:
                warnings.warn(f"{name} is called {real} now", DeprecationWarning, stacklevel=3)
            if real in named:
                raise TypeError(
                    f"{name}: expected either {real} or one of its older names, got two"
                )
            named[real] = value
        unknown = sorted(set(named) - set(known))
        if unknown:
            hints = "".join(_hint(name, [*known, *_ALIASES]) for name in unknown)
            raise TypeError(f"RolloutWorker: unknown arguments {unknown}{hints}")
        return cls(**named)

    @classmethod
    def refuse_for_sample(cls, arguments: Mapping[str, Any]) -> None:
        """Raise TypeError for arguments of `sample`, which takes none.

        The text names the most similar arguments of the constructor, which has these settings.
        """
        if arguments:
            known = [*(one.name for one in fields(cls)), *_ALIASES]
            hints = "".join(_hint(name, known) for name in sorted(arguments))
            raise TypeError(
                f"sample: expected no arguments, got {sorted(arguments)}; set how much is sampled "
                f"in the constructor{hints}"
            )

    @property
    def seed_place(self) -> int:
        """The number by which workers with the same seed get different random numbers.

        It is the worker's index, or for a worker that replaces a lost one a number that no other
        has had.
        """
        workers = max(self.num_workers, self.worker_index) + 1
        return self.worker_index + self.incarnation * workers

    def cut_rules(self, env_limit: float | None) -> CutRules:
        """The rules for ends. Raises ValueError for a horizon beyond the env's own limit."""
        limit = math.inf if env_limit is None else env_limit
        horizon = limit if self.episode_horizon is None else self.episode_horizon
        if horizon > limit:
            raise ValueError(
                f"episode_horizon: expected at most the env's own limit of {limit:g} steps, "
                f"got {horizon:g}"
            )
        return CutRules(
            fragment=self.rollout_fragment_length,
            mode=self.batch_mode,
            horizon=math.inf if self.episode_horizon is None else horizon,
            soft_horizon=self.soft_horizon,
            no_done_at_end=self.no_done_at_end,
        )


def _hint(name: str, known: Collection[str]) -> str:
    """Where an unknown argument belongs, or which names are similar; "" if there are none."""
    if name in _ELSEWHERE:
        return f"; {name} is {_ELSEWHERE[name]}"
    return near_names(name, known)


def _one_of(name: str, value: Any, words: Collection[Any]) -> None:
    if value not in words:
        raise ValueError(f"{name}: expected one of {list(words)}, got {value!r}")
