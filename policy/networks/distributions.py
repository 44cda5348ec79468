"""Action distributions in torch, with gradients for learners.

They have the same parameters and give the same numbers as policy.inference.distributions, which
explains them, for actions that are sampled at temperature 1. Other action rules are not
differentiated.

    actions = action_tensors(layout, columns)              # once per batch
    dist = ActionDistribution(layout, dist_inputs)         # (B, K), float32 with gradients
    dist.logp(actions), dist.entropy()                     # (B,) float64
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from policy.inference.action_layout import ActionLayout, Component
from policy.inference.distributions import SquashedUnits, choice_index, flat_actions
from storage.spaces.descriptors import Array, SpaceError

_LOG_2PI = math.log(2 * math.pi)


def action_tensors(
    layout: ActionLayout, columns: Mapping[str, Array], device: torch.device | None = None
) -> list[Tensor]:
    """Stored actions in the form that `ActionDistribution` takes: one tensor (B, m) per leaf.

    Choices become indices from 0 (int64), everything else float64. Raises SpaceError for actions
    that are not in the space.
    """
    tensors = []
    for component in layout.components:
        values = columns[component.leaf.path]
        if component.sizes:
            flat: Array = choice_index(component, values)
        else:
            flat = flat_actions(component, values).astype(np.float64)
        tensors.append(torch.from_numpy(np.ascontiguousarray(flat)).to(device))
    return tensors


class TorchDistribution(Protocol):
    """The distribution of one leaf; actions are (B, m)."""

    def sample(self, generator: torch.Generator | None) -> Tensor: ...

    def logp(self, actions: Tensor) -> Tensor: ...

    def entropy(self) -> Tensor: ...


class TorchCategoricals:
    """Independent choices: one for Discrete, several for MultiDiscrete."""

    def __init__(self, component: Component, inputs: Tensor) -> None:
        logits = inputs[:, component.inputs].double()
        self.log_probs = [
            functional.log_softmax(block, dim=1) for block in logits.split(component.sizes, dim=1)
        ]

    def sample(self, generator: torch.Generator | None) -> Tensor:
        drawn = [torch.multinomial(p.exp(), 1, generator=generator) for p in self.log_probs]
        return torch.cat(drawn, dim=1)

    def logp(self, actions: Tensor) -> Tensor:
        taken = [p.gather(1, actions[:, j : j + 1]) for j, p in enumerate(self.log_probs)]
        return torch.cat(taken, dim=1).sum(dim=1)

    def entropy(self) -> Tensor:
        """sum over choices of -sum_i p_i log p_i."""
        each = [-(p.exp() * p).sum(dim=1) for p in self.log_probs]
        return torch.stack(each, dim=1).sum(dim=1)


class TorchBernoulli:
    """Independent bits."""

    def __init__(self, component: Component, inputs: Tensor) -> None:
        self.logits = inputs[:, component.inputs].double()

    def sample(self, generator: torch.Generator | None) -> Tensor:
        return torch.bernoulli(torch.sigmoid(self.logits), generator=generator)

    def logp(self, actions: Tensor) -> Tensor:
        return functional.logsigmoid(torch.where(actions == 1, self.logits, -self.logits)).sum(1)

    def entropy(self) -> Tensor:
        """sum_i softplus(x_i) - x_i sigmoid(x_i)."""
        x = self.logits
        return (functional.softplus(x) - x * torch.sigmoid(x)).sum(dim=1)


class TorchDiagGaussian:
    """Independent normal elements."""

    def __init__(self, component: Component, inputs: Tensor) -> None:
        self.mean = inputs[:, component.inputs].double()
        self.log_std = inputs[:, component.log_std].double()

    def sample(self, generator: torch.Generator | None) -> Tensor:
        noise = torch.randn(
            self.mean.shape, generator=generator, dtype=torch.float64, device=self.mean.device
        )
        return self.mean + self.log_std.exp() * noise

    def logp(self, actions: Tensor) -> Tensor:
        distance = (actions - self.mean) * torch.exp(-self.log_std)
        return -0.5 * (distance.square() + 2 * self.log_std + _LOG_2PI).sum(dim=1)

    def entropy(self) -> Tensor:
        """sum_i log std_i + (1 + log 2 pi) / 2."""
        return (self.log_std + 0.5 * (1 + _LOG_2PI)).sum(dim=1)


class TorchSquashedGaussian(TorchDiagGaussian):
    """Normal elements, squashed by tanh into the bounds of their Box."""

    def __init__(self, component: Component, inputs: Tensor) -> None:
        super().__init__(component, inputs)
        self._units = SquashedUnits(component)
        self.middle, self.half = self._tensor(self._units.middle), self._tensor(self._units.half)

    def sample(self, generator: torch.Generator | None) -> Tensor:
        return self.middle + self.half * torch.tanh(super().sample(generator))

    def logp(self, actions: Tensor) -> Tensor:
        """The density before tanh, less log da/du; stored actions have no gradients."""
        normal, log_slopes = self._units.of(actions.detach().cpu().numpy())
        return super().logp(self._tensor(normal)) - self._tensor(log_slopes).sum(dim=1)

    def entropy(self) -> Tensor:
        """The normal entropy plus E[log da/du], by Gauss-Hermite quadrature for each element."""
        points, weights = map(self._tensor, _HERMITE)
        u = self.mean[..., None] + self.log_std.exp()[..., None] * points
        slopes = 2 * (math.log(2) - u - functional.softplus(-2 * u))
        expected = (slopes * weights).sum(dim=2) / math.sqrt(2 * math.pi) + self.half.log()
        return super().entropy() + expected.sum(dim=1)

    def _tensor(self, values: Array) -> Tensor:
        return torch.as_tensor(values, dtype=torch.float64, device=self.mean.device)


_HERMITE = np.polynomial.hermite_e.hermegauss(32)
_KINDS: Mapping[str, Any] = {
    "categorical": TorchCategoricals,
    "multi_categorical": TorchCategoricals,
    "bernoulli": TorchBernoulli,
    "diag_gaussian": TorchDiagGaussian,
    "squashed_gaussian": TorchSquashedGaussian,
}


class ActionDistribution:
    """B distributions over the whole action space; its leaves are independent of each other."""

    def __init__(self, layout: ActionLayout, dist_inputs: Tensor) -> None:
        if dist_inputs.ndim != 2 or dist_inputs.shape[1] != layout.size:
            raise ValueError(
                f"dist_inputs: expected shape (B, {layout.size}), got {tuple(dist_inputs.shape)}"
            )
        self.layout = layout
        self.parts: list[TorchDistribution] = [
            _KINDS[component.kind](component, dist_inputs) for component in layout.components
        ]

    def sample(self, generator: torch.Generator | None = None) -> list[Tensor]:
        """One tensor (B, m) per leaf, as from `action_tensors`, without gradients."""
        with torch.no_grad():
            return [part.sample(generator) for part in self.parts]

    def logp(self, actions: list[Tensor]) -> Tensor:
        """(B,) float64 log probability, or log density if the space contains a Box."""
        terms = [part.logp(taken) for part, taken in zip(self.parts, actions, strict=True)]
        return torch.stack(terms).sum(dim=0)

    def entropy(self) -> Tensor:
        """(B,) float64, in nats; differential entropy if the space contains a Box."""
        return torch.stack([part.entropy() for part in self.parts]).sum(dim=0)

    def log_probabilities(self) -> Tensor:
        """(B, n) float64 log probability of every action of a Discrete space. Raises SpaceError."""
        only = self.parts[0]
        if self.layout.components[0].kind != "categorical" or len(self.parts) > 1:
            raise SpaceError(
                f"action: expected a Discrete space to list probabilities, got {self.layout.space}"
            )
        if not isinstance(only, TorchCategoricals):
            raise TypeError(f"expected Categoricals for a Discrete space, got {type(only)}")
        return only.log_probs[0]
