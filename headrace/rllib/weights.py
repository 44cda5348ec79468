"""From an RLModule to a policy that clients act with: the same network, from the same numbers.

Clients act with fully connected networks. What Ray builds by default for an observation of one axis
is one. Anything else is refused, and named: its outputs are compared on random observations.
"""

from __future__ import annotations

import re
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from policy.inference.spec import ModuleSpec, PolicySpec
from policy.networks.policy import Policy
from storage.spaces.descriptors import Box, Discrete, MultiDiscrete
from storage.spaces.gymnasium_spaces import from_gym

_LAYER = re.compile(r"(?:encoder\.(?:actor_encoder|encoder)|(pi))\.net\.mlp\.(\d+)\.(weight|bias)")
_LOG_STD = ("pi.log_std", "pi.net.log_std", "log_std")
_OTHER = ("vf.", "encoder.critic_encoder.")
_WAY_OUT = "export it to ONNX and let your service act with it (log_action, with its propensities)"


def published_policy(module: Any, observation: gym.Space[Any], action: gym.Space[Any]) -> Policy:
    """The policy of an RLModule. Raises ValueError for one that clients cannot run, with why."""
    spaces = from_gym(observation), from_gym(action)
    if not isinstance(spaces[0], Box) or len(spaces[0].shape) != 1:
        raise ValueError(
            f"observation: expected a Box of one axis, got {observation}: flatten it on the clients"
        )
    if not isinstance(spaces[1], (Discrete, MultiDiscrete, Box)):
        raise ValueError(f"action: expected Discrete, MultiDiscrete or a Box, got {action}")
    layers, log_std = _layers(module)
    config = module.model_config or {}
    names = {config.get("fcnet_activation", "tanh")}
    if config.get("head_fcnet_hiddens"):
        names.add(config.get("head_fcnet_activation", "relu"))
    if len(names) > 1:
        raise ValueError(f"module: expected one activation in all layers, got {sorted(names)}")
    hidden = tuple(weight.shape[0] for weight, _ in layers[:-1])
    described = ModuleSpec(hidden=hidden, activation=names.pop(), value_head=False)
    policy = Policy(PolicySpec(*spaces, described))
    weights = {}
    for at, (weight, bias) in enumerate(layers):
        weights[f"pi.{2 * at}.weight"], weights[f"pi.{2 * at}.bias"] = weight, bias
    if log_std is not None:
        weights["log_std"] = log_std
    try:
        policy.set_weights(weights)
    except ValueError as error:
        raise ValueError(
            f"module: {error}; for a Box set free_log_std=True in the model_config"
        ) from error
    _compare(policy, module)
    return policy


def _layers(module: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """(weight and bias of each layer, in order; the log_std, None without one)."""
    found: dict[tuple[bool, int], dict[str, Any]] = {}
    log_std = None
    for name, tensor in module.state_dict().items():
        array = tensor.detach().cpu().numpy().astype(np.float32)
        if name in _LOG_STD:
            log_std = array.reshape(-1)
        elif (match := _LAYER.fullmatch(name)) and array.ndim == (2 if match[3] == "weight" else 1):
            found.setdefault((match[1] is not None, int(match[2])), {})[match[3]] = array
        elif not name.startswith(_OTHER) and not name.endswith("log_std_clip_param_const"):
            raise ValueError(
                f"module: expected fully connected layers, got {name} of {type(module).__name__}: "
                f"{_WAY_OUT}"
            )
    if wrong := [key for key, one in found.items() if len(one) != 2]:
        raise ValueError(f"module: expected weight and bias in each layer, got one at {wrong[0]}")
    return [(found[key]["weight"], found[key]["bias"]) for key in sorted(found)], log_std


def _compare(policy: Policy, module: Any) -> None:
    """Raise ValueError unless both compute the same distributions."""
    size = policy.spec.flattener.features
    seen = np.random.default_rng(1).normal(size=(8, size)).astype(np.float32)
    with torch.no_grad():
        theirs = module.forward_inference({"obs": torch.from_numpy(seen)})["action_dist_inputs"]
    ours = policy.to_numpy().dist_inputs(seen)
    if theirs.shape != ours.shape or not np.allclose(theirs.cpu().numpy(), ours, atol=1e-4):
        raise ValueError(
            f"module: expected the outputs of fully connected layers, got others from "
            f"{type(module).__name__}: {_WAY_OUT}"
        )
