"""Torch modules: flat observations in, distribution parameters and values out.

Their weights have the names of `PolicySpec.weight_shapes`, so that policy.inference.numpy_policy
evaluates the same network from the same arrays.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from policy.inference.action_layout import LOG_STD_RANGE, MASKED
from policy.inference.spec import ModuleSpec, PolicySpec, SpecError

_ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
}
# With small initial outputs the first policy is nearly uniform and explores (Andrychowicz et al.
# 2021, What matters in on-policy RL, section 3.2).
_HEAD_GAIN = 0.01


class PolicyModule(nn.Module):
    """The networks of a policy.

    `pi` is a multilayer perceptron; `vf` is another one, if the spec has a value head. `log_std`
    has one number per element of the action's Box leaves, the same for every observation, unless
    `pi` gives them. Raises SpecError for an ONNX file.
    """

    def __init__(self, spec: PolicySpec, generator: torch.Generator) -> None:
        super().__init__()
        size, module = spec.flattener.features, spec.module
        if module.kind == "onnx":
            raise SpecError(
                "module: expected a network that is trained here, mlp or scorer, got an ONNX file: "
                "train it where it was made"
            )
        self.features, self.is_masked = size, spec.mask
        self.pi: nn.Module
        if spec.candidates is not None:
            self.pi = Scorer(spec, spec.candidates.most, spec.candidates.width, generator)
        else:
            self.pi = mlp(size, module, spec.outputs, _HEAD_GAIN, generator)
        self.masked = spec.flattener.size - (spec.layout.head if spec.mask else 0)
        self.vf = mlp(size, module, 1, 1.0, generator) if module.value_head else None
        stds = spec.layout.log_stds
        self.log_std: nn.Parameter | None = None
        if stds and not module.state_std:
            self.log_std = nn.Parameter(torch.zeros(stds))
        self._means = spec.layout.head if module.state_std and stds else None

    def dist_inputs(self, flat: Tensor) -> Tensor:
        """(B, K) float32 distribution parameters for filtered flat observations (B, D)."""
        head: Tensor = self.pi(flat[:, : self.masked])
        if self.is_masked:
            head = head.masked_fill(flat[:, self.masked :] == 0, MASKED)
        if self._means is not None:
            stds = head[:, self._means :].clamp(*LOG_STD_RANGE)
            return torch.cat([head[:, : self._means], stds], dim=1)
        if self.log_std is None:
            return head
        # shape[0], not len(), which would fix the batch size of an exported network
        log_std = self.log_std.clamp(*LOG_STD_RANGE).expand(head.shape[0], -1)
        return torch.cat([head, log_std], dim=1)

    def values(self, flat: Tensor) -> Tensor:
        """(B,) values of filtered flat observations; raises ValueError without a value head."""
        if self.vf is None:
            raise ValueError("this policy has no value head: see ModuleSpec.value_head")
        values: Tensor = self.vf(flat[:, : self.features])[:, 0]
        return values

    def clip_gradients(self, most: float) -> None:
        """Limit the Euclidean norm of the gradients of `vf`, and of all others.

        Each has its own limit: a large error of values must not make the step of `pi` small.
        """
        own = [one for name, one in self.named_parameters() if not name.startswith("vf.")]
        values = [] if self.vf is None else list(self.vf.parameters())
        for parameters in (own, values):
            nn.utils.clip_grad_norm_(parameters, most)

    def forward(self, flat: Tensor) -> Tensor:
        return self.dist_inputs(flat)


class Scorer(nn.Module):
    """A score for each candidate, by the same weights: see `ModuleSpec`."""

    def __init__(self, spec: PolicySpec, most: int, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self._state, self._most, self._width = spec.flattener.features, most, width
        self.cross = nn.Parameter(torch.zeros(self._state + 1, width + 1))
        self.layers = mlp(self._state + width, spec.module, 1, _HEAD_GAIN, generator)

    def forward(self, flat: Tensor) -> Tensor:
        """(B, n) scores for flat observations without their mask (B, S + n F)."""
        state, rest = flat[:, : self._state], flat[:, self._state :]
        items = rest.reshape(-1, self._most, self._width)
        by_item = state @ self.cross[:-1] + self.cross[-1]
        crossed = (items * by_item[:, None, :-1]).sum(dim=2) + by_item[:, -1:]
        each = state[:, None, :].expand(-1, self._most, -1)
        scores: Tensor = crossed + self.layers(torch.cat([each, items], dim=2))[:, :, 0]
        return scores


class ValueNetwork(nn.Module):
    """V(s) of the state alone: a critic beside a policy, of its sizes."""

    def __init__(self, spec: PolicySpec, generator: torch.Generator) -> None:
        super().__init__()
        self._features = spec.flattener.features
        self.layers = mlp(self._features, spec.module, 1, 1.0, generator)

    def forward(self, observed: Tensor) -> Tensor:
        """(B,) values of filtered flat observations (B, D)."""
        values: Tensor = self.layers(observed[:, : self._features])[:, 0]
        return values


def build_module(spec: PolicySpec, seed: int) -> PolicyModule:
    """A new module, determined by spec and seed; does not use or change torch's global seed."""
    return PolicyModule(spec, torch.Generator().manual_seed(seed))


def mlp(
    inputs: int, spec: ModuleSpec, outputs: int, gain: float, generator: torch.Generator
) -> nn.Sequential:
    """Linear layers with activations between them; weights are orthogonal, biases zero.

    `gain` multiplies the weights of the last layer.
    """
    layers: list[nn.Module] = []
    for width in spec.hidden:
        layers += [
            _linear(inputs, width, math.sqrt(2), generator),
            _ACTIVATIONS[spec.activation](),
        ]
        inputs = width
    return nn.Sequential(*layers, _linear(inputs, outputs, gain, generator))


def _linear(inputs: int, outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    with warnings.catch_warnings():  # of torch, for a state without features
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)
    if layer.weight.numel():
        nn.init.orthogonal_(layer.weight, gain, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer
