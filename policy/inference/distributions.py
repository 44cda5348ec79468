"""Action distributions with numpy alone: the twins of policy.networks.distributions (torch).

B rows of `dist_inputs` (float32, K numbers each: see policy.inference.action_layout) make B
distributions. Actions are columns: leaf path -> (B, *shape), as shards keep them.

    actions = product(spec.layout)
    columns = actions.sample(dist_inputs, rng)     # one uniform a choice, one normal an element
    actions.logp(dist_inputs, columns)             # (B,) float64
    actions.clip(columns)                          # what an environment is sent

Everything is computed in float64. The logp of a continuous action is that of the action as stored,
unclipped and rounded to its space's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from policy.inference.action_layout import ActionLayout, Component
from storage.spaces.descriptors import Array, Box, SpaceError

__all__ = [
    "Bernoulli",
    "Categoricals",
    "DiagGaussian",
    "NotFinite",
    "Product",
    "choice_index",
    "product",
]

FloatArray = npt.NDArray[np.float64]
Columns = Mapping[str, Array]
_LOG_2PI = math.log(2 * math.pi)


class NotFinite(ValueError):
    """What goes into a policy, or what its weights make of it, is NaN or infinite."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: expected finite numbers, got NaN or infinity")


class Distribution(Protocol):
    """The distribution of one leaf; `inputs` is (B, K) float64, K of the whole action space."""

    def sample(self, inputs: FloatArray, rng: np.random.Generator) -> Array: ...

    def mode(self, inputs: FloatArray) -> Array: ...

    def logp(self, inputs: FloatArray, actions: Array) -> FloatArray: ...


class Categoricals:
    """Independent choices (Discrete is one, MultiDiscrete several): p_i = exp(x_i) / sum exp(x)."""

    def __init__(self, component: Component) -> None:
        self._component = component
        self._start = np.array(component.start, np.int64)
        ends = component.inputs.start + np.cumsum(component.sizes)
        self._blocks = [
            slice(int(end) - size, int(end))
            for end, size in zip(ends, component.sizes, strict=True)
        ]

    def sample(self, inputs: FloatArray, rng: np.random.Generator) -> Array:
        """By the inverse of the cumulated probabilities, one uniform a choice."""
        uniform = rng.random((len(inputs), len(self._blocks)))
        choices = [
            _inverse_cdf(inputs[:, block], uniform[:, j]) for j, block in enumerate(self._blocks)
        ]
        return self._numbered(choices)

    def mode(self, inputs: FloatArray) -> Array:
        return self._numbered([inputs[:, block].argmax(axis=1) for block in self._blocks])

    def logp(self, inputs: FloatArray, actions: Array) -> FloatArray:
        index = choice_index(self._component, actions)
        total = np.zeros(len(inputs))
        for j, block in enumerate(self._blocks):
            total += log_softmax(inputs[:, block])[np.arange(len(inputs)), index[:, j]]
        return total

    def _numbered(self, choices: list[Array]) -> Array:
        actions = np.stack(choices, axis=1).astype(np.int64) + self._start
        return actions[:, 0] if self._component.kind == "categorical" else actions


class Bernoulli:
    """Independent bits: p(1) = 1 / (1 + exp(-x))."""

    def __init__(self, component: Component) -> None:
        self._component = component

    def sample(self, inputs: FloatArray, rng: np.random.Generator) -> Array:
        logits = inputs[:, self._component.inputs]
        return self._shaped(rng.random(logits.shape) < np.exp(-np.logaddexp(0.0, -logits)))

    def mode(self, inputs: FloatArray) -> Array:
        return self._shaped(inputs[:, self._component.inputs] > 0)

    def logp(self, inputs: FloatArray, actions: Array) -> FloatArray:
        logits = inputs[:, self._component.inputs]
        bits = flat_actions(self._component, actions)
        if not ((bits == 0) | (bits == 1)).all():
            raise SpaceError(f"{_place(self._component)}: expected zeros and ones, got others")
        signed = np.where(bits == 1, logits, -logits)
        logp: FloatArray = -np.logaddexp(0.0, -signed).sum(axis=1)
        return logp

    def _shaped(self, bits: Array) -> Array:
        return bits.astype(np.int8).reshape(-1, *self._component.leaf.shape)


class DiagGaussian:
    """Independent normal elements with the means and log standard deviations of the inputs."""

    def __init__(self, component: Component) -> None:
        self._component = component

    def sample(self, inputs: FloatArray, rng: np.random.Generator) -> Array:
        mean = inputs[:, self._component.inputs]
        std = np.exp(inputs[:, self._component.log_std])
        return self._stored(mean + std * rng.standard_normal(mean.shape))

    def mode(self, inputs: FloatArray) -> Array:
        return self._stored(inputs[:, self._component.inputs])

    def logp(self, inputs: FloatArray, actions: Array) -> FloatArray:
        """sum_i -((a_i - mean_i) / std_i)^2 / 2 - log std_i - log(2 pi) / 2."""
        log_std = inputs[:, self._component.log_std]
        distance = flat_actions(self._component, actions) - inputs[:, self._component.inputs]
        terms = np.square(distance * np.exp(-log_std)) + 2 * log_std + _LOG_2PI
        logp: FloatArray = -0.5 * terms.sum(axis=1)
        return logp

    def _stored(self, values: FloatArray) -> Array:
        leaf = self._component.leaf
        largest = np.finfo(leaf.dtype).max
        rounded = np.clip(values, -largest, largest).astype(leaf.dtype)
        return rounded.reshape(-1, *leaf.shape)


class Product:
    """The distribution over all leaves of an action space, independent given the observation."""

    def __init__(self, layout: ActionLayout) -> None:
        self.layout = layout
        self._parts: list[tuple[Component, Distribution]] = [
            (component, _KINDS[component.kind](component)) for component in layout.components
        ]

    def sample(self, inputs: npt.ArrayLike, rng: np.random.Generator) -> dict[str, Array]:
        """Actions as columns, drawn in canonical order of the leaves."""
        rows = self._rows(inputs)
        return {part.leaf.path: drawn.sample(rows, rng) for part, drawn in self._parts}

    def mode(self, inputs: npt.ArrayLike) -> dict[str, Array]:
        """The most likely action of each row."""
        rows = self._rows(inputs)
        return {part.leaf.path: drawn.mode(rows) for part, drawn in self._parts}

    def logp(self, inputs: npt.ArrayLike, actions: Columns) -> FloatArray:
        """(B,) float64 log probability (density, for Box) of stored actions; raises SpaceError."""
        rows = self._rows(inputs)
        total = np.zeros(len(rows))
        for part, drawn in self._parts:
            total += drawn.logp(rows, actions[part.leaf.path])
        return total

    def probabilities(self, inputs: npt.ArrayLike) -> FloatArray:
        """(B, n) float64 of every action of a Discrete space."""
        if self.layout.components[0].kind != "categorical" or len(self._parts) > 1:
            raise SpaceError(
                f"action: expected a Discrete space to list probabilities, got {self.layout.space}"
            )
        return np.exp(log_softmax(self._rows(inputs)))

    def clip(self, actions: Columns) -> dict[str, Array]:
        """What an environment is sent: Box values inside their bounds, all else as it is."""
        return {
            part.leaf.path: _clipped(part.leaf.space, actions[part.leaf.path])
            for part, _ in self._parts
        }

    def _rows(self, inputs: npt.ArrayLike) -> FloatArray:
        rows = np.asarray(inputs, np.float64)
        if rows.ndim != 2 or rows.shape[1] != self.layout.size:
            raise ValueError(
                f"dist_inputs: expected shape (B, {self.layout.size}), got {rows.shape}"
            )
        if not np.isfinite(rows).all():
            raise NotFinite("dist_inputs")
        return rows


def product(layout: ActionLayout) -> Product:
    """The distribution of an action layout."""
    return Product(layout)


_KINDS: Mapping[str, Any] = {
    "categorical": Categoricals,
    "multi_categorical": Categoricals,
    "bernoulli": Bernoulli,
    "diag_gaussian": DiagGaussian,
}


def log_softmax(logits: FloatArray) -> FloatArray:
    """(B, n) log probabilities, from logits less their maximum so that exp can't overflow."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probs: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return log_probs


def choice_index(component: Component, actions: Array) -> npt.NDArray[np.int64]:
    """(B, m) which option each choice took, from 0; raises SpaceError outside the space."""
    index = flat_actions(component, actions)
    if index.dtype.kind not in "iu":
        raise SpaceError(f"{_place(component)}: expected integers, got {index.dtype}")
    index = index.astype(np.int64) - np.array(component.start, np.int64)
    bad = (index < 0) | (index >= np.array(component.sizes))
    if bad.any():
        row = int(bad.any(axis=1).argmax())
        raise SpaceError(
            f"{_place(component)}: expected one of {component.leaf.space}, got "
            f"{np.asarray(actions)[row]} in row {row}"
        )
    return index


def flat_actions(component: Component, actions: Array) -> Array:
    """(B, elements) of a column (B, *shape); raises SpaceError for another shape."""
    values = np.asarray(actions)
    if values.ndim == 0 or values.shape[1:] != component.leaf.shape:
        raise SpaceError(
            f"{_place(component)}: expected shape (B, *{component.leaf.shape}), got {values.shape}"
        )
    flat: Array = values.reshape(len(values), math.prod(component.leaf.shape))
    return flat


def _inverse_cdf(logits: FloatArray, uniform: FloatArray) -> Array:
    """(B,) the first option whose cumulated probability exceeds the uniform number."""
    cumulated = np.exp(logits - logits.max(axis=1, keepdims=True)).cumsum(axis=1)
    threshold = uniform * cumulated[:, -1]
    # A product can round up to the last sum itself.
    below: Array = (threshold[:, None] >= cumulated).sum(axis=1)
    index: Array = np.minimum(below, logits.shape[1] - 1)
    return index


def _clipped(space: Any, values: Array) -> Array:
    if not isinstance(space, Box):
        return values
    clipped: Array = np.clip(values, space.low, space.high)
    return clipped


def _place(component: Component) -> str:
    return f"action.{component.leaf.path}" if component.leaf.path else "action"
