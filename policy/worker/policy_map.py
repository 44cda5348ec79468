"""A worker's policies, and the choice of the policy that acts for an agent.

`policy` may be None or a class, the single policy of all agents; a `PolicySpec`; or a mapping. A
mapping has ids as keys, and as values a class, a spec, or (class, observation space, action space,
config). There None stands for `TrainablePolicy` and for the environment's own spaces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any

import gymnasium as gym

from policy.algorithms.trainable_policy import SHORT_NAMES, PolicySettings, TrainablePolicy
from policy.inference.spec import PolicySpec
from policy.sampling.episode import RolloutEpisode
from policy.worker.settings import WorkerSettings
from storage.declarations.mapping_functions import takes_episode
from storage.experience.episode import DEFAULT_POLICY
from storage.spaces.descriptors import Dict, Tuple
from storage.spaces.gymnasium_spaces import to_gym

Spaces = tuple[Any, Any]
PolicyOf = Callable[[Any, RolloutEpisode], str]


def build_policies(
    settings: WorkerSettings, spaces: Spaces | None, *, multi_agent: bool
) -> dict[str, TrainablePolicy]:
    """The policies by id, created in the order of their ids.

    `spaces` are the environment's (observation, action), None without an environment. Raises
    ValueError for several policies of an environment with one agent, for missing spaces, and for
    raw Dict or Tuple observations if preprocessing is off.
    """
    given = settings.policy
    forms = dict(given) if isinstance(given, Mapping) else {DEFAULT_POLICY: given}
    if not forms:
        raise ValueError("policy: expected one or more, got an empty mapping")
    if len(forms) > 1 and not multi_agent and spaces is not None:
        raise ValueError(
            f"policy: got {len(forms)} policies, but the environment is not a multi-agent one"
        )
    _check_common(settings, forms)
    built = {}
    for place, policy_id in enumerate(sorted(forms)):
        built[policy_id] = _build(policy_id, forms[policy_id], settings, spaces, place)
    return built


def _check_common(settings: WorkerSettings, forms: Mapping[str, Any]) -> None:
    """Raise TypeError for keys of policy_config that no policy reads."""
    classes = [_parts(policy_id, form)[0] for policy_id, form in forms.items()]
    known = {key for one in classes for key in _known(one)}
    TrainablePolicy.check_config(settings.policy_config, known)


def _known(cls: type[Any]) -> frozenset[str]:
    return cls.known_config() if issubclass(cls, TrainablePolicy) else frozenset()


def _build(
    policy_id: str, form: Any, settings: WorkerSettings, spaces: Spaces | None, place: int
) -> TrainablePolicy:
    cls, observation, action, own = _parts(policy_id, form)
    env_observation, env_action = spaces or (None, None)
    observation = _one(env_observation, policy_id) if observation is None else observation
    action = _one(env_action, policy_id) if action is None else action
    if observation is None or action is None:
        raise ValueError(
            f"policy {policy_id!r}: expected its spaces: without an environment, or where agents "
            "differ, pass (class, observation space, action space, config)"
        )
    if settings.preprocessor_pref is None and _is_composite(observation):
        raise ValueError(
            f"policy {policy_id!r}: found a raw Dict or Tuple observation space; let it be "
            "flattened with preprocessor_pref='flatten'"
        )
    made = cls(observation, action, _config(settings, own, place, _known(cls)))
    if not isinstance(made, TrainablePolicy):
        raise ValueError(
            f"policy {policy_id!r}: expected a subclass of TrainablePolicy, got {cls.__name__}"
        )
    return made


def _parts(policy_id: str, form: Any) -> tuple[type[Any], Any, Any, Mapping[str, Any]]:
    if isinstance(form, PolicySpec):
        return (
            TrainablePolicy,
            to_gym(form.observation),
            to_gym(form.action),
            {"spec": form},
        )
    if form is None or isinstance(form, type):
        return form or TrainablePolicy, None, None, {}
    if isinstance(form, (tuple, list)) and len(form) == 4:
        cls, observation, action, config = form
        if isinstance(config, PolicySettings):
            config = _fields(config)
        return cls or TrainablePolicy, observation, action, config or {}
    raise ValueError(
        f"policy {policy_id!r}: expected a class, a PolicySpec or (class, observation space, "
        f"action space, config), got {form!r:.200}"
    )


def _fields(settings: PolicySettings) -> dict[str, Any]:
    """The settings as a dict, without a default `algorithm`: policy_config may set it."""
    found = {one.name: getattr(settings, one.name) for one in fields(settings)}
    if settings.algorithm == PolicySettings().algorithm:
        del found["algorithm"]
    return found


def _one(space: Any, policy_id: str) -> Any:
    """The space of all agents if it is the same for all, else None."""
    if isinstance(space, Mapping) and not isinstance(space, gym.Space):
        different = list(space.values())
        return different[0] if all(one == different[0] for one in different) else None
    return space


def _is_composite(space: Any) -> bool:
    return isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple, Dict, Tuple))


def _config(
    settings: WorkerSettings, own: Mapping[str, Any], place: int, known: Collection[str]
) -> dict[str, Any]:
    """The config of one policy.

    It has the keys of policy_config that the policy's class knows, overridden by the policy's own
    config, and the worker's index and number. `in_evaluation` (default: False) is only passed on.
    """
    common = {name: value for name, value in settings.policy_config.items() if name in known}
    if "algorithm" in own:
        common = {name: value for name, value in common.items() if name not in SHORT_NAMES}
    merged = {**common, **own}
    config: dict[str, Any] = {
        "worker_index": settings.worker_index,
        "num_workers": settings.num_workers,
        "in_evaluation": False,
        "explore": settings.explore,
        "observation_filter": settings.observation_filter,
        **merged,
    }
    if settings.model_config and "model" not in config:
        config["model"] = dict(settings.model_config)
    if settings.seed is not None and "seed" not in config:
        # the same weights in every worker with this seed, but different ones for each policy
        config["seed"] = settings.seed + place
    return config


def make_mapping(settings: WorkerSettings, policies: Mapping[str, Any]) -> PolicyOf:
    """(agent id, episode) -> policy id, by the user's function of the agent or of both.

    The mapping raises ValueError for an id without a policy. A worker that only reads an input
    needs no function: its batches contain the policy ids.
    """
    function = settings.policy_mapping_fn
    only = next(iter(policies))
    if function is None and len(policies) > 1 and settings.env_creator is not None:
        raise ValueError(
            f"policy_mapping_fn: expected one, to choose between the policies {sorted(policies)}"
        )
    with_episode = function is not None and takes_episode(function)

    def policy_of(agent_id: Any, episode: RolloutEpisode) -> str:
        if function is None:
            return only
        chosen = function(agent_id, episode) if with_episode else function(agent_id)
        if chosen not in policies:
            raise ValueError(
                f"Could not find policy for agent {agent_id!r}: policy_mapping_fn gave "
                f"{chosen!r}, the policies are {sorted(policies)}"
            )
        return chosen

    return policy_of
