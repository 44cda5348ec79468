"""Action distributions with numpy alone, equivalent to policy.networks.distributions (torch).

B rows of `dist_inputs` (float32, K numbers each: see policy.inference.action_layout) give B
distributions. Actions are columns: leaf path -> (B, *shape), as in shards.

    actions = Product(spec.layout, spec.action_rule)
    columns = actions.sample(dist_inputs, rng)     # one uniform a choice, one normal an element
    actions.logp(dist_inputs, columns)             # (B,) float64, the propensity under the rule
    actions.clip(columns)                          # the form in which they are sent to environments

Everything is computed in float64. The logp of a continuous action is that of the action as stored,
unclipped and rounded to its space's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from policy.inference.action_layout import LOG_STD_RANGE, MASKED, ActionLayout, Component
from policy.inference.action_rule import SAMPLE, ActionRule
from storage.spaces.descriptors import Array, Box, SpaceError

FloatArray = npt.NDArray[np.float64]
Columns = Mapping[str, Array]
LEAST_LOGIT = MASKED / 10
"""Logits below it belong to options that an action mask forbids."""
_LOG_2PI = math.log(2 * math.pi)


class NotFinite(ValueError):
    """The input of a policy, or what its weights compute from it, is NaN or infinite."""

    def __init__(self, what: str) -> None:
        super().__init__(what)  # the argument itself, so that the error can be pickled

    def __str__(self) -> str:
        return f"{self.args[0]}: expected finite numbers, got NaN or infinity"


class Distribution(Protocol):
    """The distribution of one leaf; `inputs` is (B, K) float64, K of the whole action space."""

    def sample(self, inputs: FloatArray, rng: np.random.Generator) -> Array: ...

    def logp(self, inputs: FloatArray, actions: Array) -> FloatArray: ...


class Categoricals:
    """Independent choices (Discrete is one, MultiDiscrete several): p_i = exp(x_i) / sum exp(x)."""

    def __init__(self, component: Component) -> None:
        self._component = component
        self._start = np.array(component.start, np.int64)
        self._blocks = _blocks(component)

    def sample(self, inputs: FloatArray, rng: np.random.Generator) -> Array:
        """Sample by inverse cumulative probabilities, with one uniform number per choice."""
        uniform = rng.random((len(inputs), len(self._blocks)))
        choices = [
            _inverse_cdf(inputs[:, block], uniform[:, j]) for j, block in enumerate(self._blocks)
        ]
        return self._numbered(choices)

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
        self._largest = np.finfo(component.leaf.dtype).max

    def sample(self, inputs: FloatArray, rng: np.random.Generator) -> Array:
        mean = inputs[:, self._component.inputs]
        std = np.exp(inputs[:, self._component.log_std])
        return self._stored(mean + std * rng.standard_normal(mean.shape))

    def logp(self, inputs: FloatArray, actions: Array) -> FloatArray:
        """sum_i -((a_i - mean_i) / std_i)^2 / 2 - log std_i - log(2 pi) / 2."""
        return self._density(inputs, flat_actions(self._component, actions))

    def draw_one(self, row: FloatArray, rng: np.random.Generator) -> tuple[Array, Array, float]:
        """(action as stored, as sent, logp) for inputs (K,): as `sample`, faster for few elements.

        The two have the shape of the leaf.
        """
        part = self._component
        mean, log_std = row[part.inputs], row[part.log_std]
        drawn = mean + np.exp(log_std) * rng.standard_normal(len(mean))
        stored = self._stored(drawn[None])[0]
        space: Any = part.leaf.space  # a Box
        sent = np.minimum(np.maximum(stored, space.low), space.high)
        total = 0.0
        values = stored.ravel().tolist()
        for value, middle, width in zip(values, mean.tolist(), log_std.tolist(), strict=True):
            total += ((value - middle) * math.exp(-width)) ** 2 + 2 * width + _LOG_2PI
        return stored, sent, -0.5 * total

    def _density(self, inputs: FloatArray, values: Array) -> FloatArray:
        log_std = inputs[:, self._component.log_std]
        if np.isneginf(log_std).any():  # greedy: the mean itself has no density
            return np.full(len(inputs), np.nan)
        distance = values - inputs[:, self._component.inputs]
        terms = np.square(distance * np.exp(-log_std)) + 2 * log_std + _LOG_2PI
        logp: FloatArray = -0.5 * terms.sum(axis=1)
        return logp

    def _stored(self, values: FloatArray) -> Array:
        leaf = self._component.leaf
        rounded = values.clip(-self._largest, self._largest).astype(leaf.dtype)
        return rounded.reshape(-1, *leaf.shape)


class SquashedGaussian(DiagGaussian):
    """Elements a = low + (high - low) (1 + tanh u) / 2 of independent normal u.

    An element that is stored as a bound, because no number of its dtype is between the bound and
    the one that was drawn, counts as half a step of its dtype inside.
    """

    def __init__(self, component: Component) -> None:
        super().__init__(component)
        self._units = SquashedUnits(component)

    def logp(self, inputs: FloatArray, actions: Array) -> FloatArray:
        """The density of u, less sum_i log((high_i - low_i) / 2 (1 - tanh(u_i)^2)).

        Haarnoja et al. 2018, Soft actor-critic algorithms and applications, eq. 26.
        """
        stored = flat_actions(self._component, actions)
        normal, log_slopes = self._units.of(np.asarray(stored, np.float64))
        logp: FloatArray = self._density(inputs, normal) - log_slopes.sum(axis=1)
        return logp

    def draw_one(self, row: FloatArray, rng: np.random.Generator) -> tuple[Array, Array, float]:
        part = self._component
        mean, log_std = row[part.inputs], row[part.log_std]
        stored = self._stored((mean + np.exp(log_std) * rng.standard_normal(len(mean)))[None])[0]
        found = zip(stored.ravel().tolist(), mean.tolist(), log_std.tolist(), strict=True)
        total = 0.0
        for (value, at, width), (middle, half, least, most, log_half) in zip(
            found, self._units.each, strict=True
        ):
            u = math.atanh(min(max((value - middle) / half, least), most))
            total += ((u - at) * math.exp(-width)) ** 2 + 2 * width + _LOG_2PI
            total += 4 * (math.log(2) - u - math.log1p(math.exp(-2 * u))) + 2 * log_half
        return stored, stored, -0.5 * total

    def _stored(self, values: FloatArray) -> Array:
        leaf, units = self._component.leaf, self._units
        drawn = (units.middle + units.half * np.tanh(values)).astype(leaf.dtype)
        space: Any = leaf.space  # a Box, whose bounds rounding may pass
        drawn = drawn.reshape(-1, *leaf.shape)
        found: Array = np.minimum(np.maximum(drawn, space.low), space.high)
        return found


class SquashedUnits:
    """The bounds of a Box's elements (D,) in float64, and what squashing does between them."""

    def __init__(self, component: Component) -> None:
        space: Any = component.leaf.space  # a Box
        low, high = (np.asarray(bound).reshape(-1) for bound in (space.low, space.high))
        self.half = np.asarray(high, np.float64) / 2 - np.asarray(low, np.float64) / 2
        # tanh u of the elements that are next to a bound
        wide = np.finfo(low.dtype).max / 2  # beyond it, spacing may overflow
        steps = [np.spacing(np.minimum(np.abs(one), wide)) / 2 / self.half for one in (low, high)]
        steps = [np.maximum(one, 2**-53) for one in steps]
        self.least, self.most = steps[0] - 1, 1 - steps[1]
        self.middle = np.asarray(low, np.float64) + self.half
        columns = (self.middle, self.half, self.least, self.most, np.log(self.half))
        self.each = list(zip(*(one.tolist() for one in columns), strict=True))

    def of(self, actions: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(u, log da/du) of actions (B, D); the latter is infinite outside the bounds."""
        squashed = (actions - self.middle) / self.half
        normal = np.arctanh(np.clip(squashed, self.least, self.most))
        # log(1 - tanh(u)^2), which has no cancellation in this form
        slopes = 2 * (math.log(2) - normal - np.logaddexp(0.0, -2 * normal))
        outside = np.abs(squashed) > 1 + 1e-6  # as another policy's: this one has no density there
        return normal, np.where(outside, np.inf, slopes + np.log(self.half))


class Product:
    """The distribution over all leaves of an action space, independent given the observation.

    `inputs` (B, K) are the network's outputs; the rule applies to what is sampled and to its
    propensity.
    """

    def __init__(self, layout: ActionLayout, rule: ActionRule = SAMPLE) -> None:
        self.layout, self.rule = layout, rule
        self._parts: list[tuple[Component, Distribution]] = [
            (component, _KINDS[component.kind](component)) for component in layout.components
        ]

    @property
    def gaussian(self) -> DiagGaussian | None:
        """The only leaf's distribution, if it is a Gaussian that the rule leaves as it is."""
        only = self._parts[0][1] if len(self._parts) == 1 else None
        return only if isinstance(only, DiagGaussian) and self.rule == SAMPLE else None

    def sample(self, inputs: npt.ArrayLike, rng: np.random.Generator) -> dict[str, Array]:
        """Sample actions as columns, in canonical order of the leaves."""
        rows = self._rows(inputs)
        return {part.leaf.path: drawn.sample(rows, rng) for part, drawn in self._parts}

    def logp(self, inputs: npt.ArrayLike, actions: Columns) -> FloatArray:
        """(B,) float64 log probability (density, for Box) of stored actions.

        -inf for an action that the rule never chooses, NaN where a greedy Box element has no
        density. Raises SpaceError.
        """
        rows = self._rows(inputs)
        total = np.zeros(len(rows))
        for part, drawn in self._parts:
            total += drawn.logp(rows, actions[part.leaf.path])
        return total

    def probabilities(self, inputs: npt.ArrayLike) -> FloatArray:
        """(B, n) float64 probability of every action of a Discrete space. Raises SpaceError."""
        if self.layout.components[0].kind != "categorical" or len(self._parts) > 1:
            raise SpaceError(
                f"action: expected a Discrete space to list probabilities, got {self.layout.space}"
            )
        return np.exp(log_softmax(self._rows(inputs)))

    def clip(self, actions: Columns) -> dict[str, Array]:
        """The actions as sent to an environment: Box values are clipped to their bounds."""
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
        return ruled(self.layout, self.rule, rows)


_KINDS: Mapping[str, Any] = {
    "categorical": Categoricals,
    "multi_categorical": Categoricals,
    "bernoulli": Bernoulli,
    "diag_gaussian": DiagGaussian,
    "squashed_gaussian": SquashedGaussian,
}


def ruled(layout: ActionLayout, rule: ActionRule, inputs: FloatArray) -> FloatArray:
    """(B, K) float64: parameters of the distribution of actions under the rule.

    `inputs` (B, K) are the network's. With x the logits of a choice among n allowed options, k of
    them the best:

        sample          x / temperature; log std + log temperature, clipped to LOG_STD_RANGE
        epsilon_greedy  log(epsilon / n + (1 - epsilon) / k) for a best one, else log(epsilon / n)
        squarecb        log(1 / (n + gamma (max x - x))) for another than the best ones, which
                        share the rest
        greedy          log(1 / k), else -inf; a log std of -inf: the mean, without a density

    With a floor e = `explore` and the probability p by one of these, log(e / n + (1 - e) p).

    Softmax of x / temperature: Sutton & Barto 2018, eq. 2.11; epsilon-greedy: section 2.2.
    SquareCB: Foster & Rakhlin 2020, Beyond UCB, algorithm 1, with mu = n. A bit is a choice between
    the logits 0 and x.
    """
    if rule == SAMPLE:
        return inputs
    found = np.empty_like(inputs)
    for part in layout.components:
        if part.kind in ("diag_gaussian", "squashed_gaussian"):
            found[:, part.inputs] = inputs[:, part.inputs]
            found[:, part.log_std] = _ruled_log_std(rule, inputs[:, part.log_std])
        elif part.kind == "bernoulli":
            bits = inputs[:, part.inputs]
            two = choice_logits(rule, np.stack([np.zeros_like(bits), bits], axis=-1))
            found[:, part.inputs] = two[..., 1] - two[..., 0]
        else:
            for block in _blocks(part):
                found[:, block] = choice_logits(rule, inputs[:, block])
    return found


def choice_logits(rule: ActionRule, logits: FloatArray) -> FloatArray:
    """(..., n) logits of a choice under the rule; the largest is finite. See `ruled`."""
    best = logits.max(axis=-1, keepdims=True)
    gap, is_best = best - logits, logits == best
    allowed = logits >= np.minimum(best, LEAST_LOGIT)
    number = allowed.sum(axis=-1, keepdims=True)
    equal = allowed / number
    found: FloatArray
    with np.errstate(divide="ignore", over="ignore"):  # a temperature close to 0 is greedy
        if rule.temperature is not None:
            found = np.where(allowed, -gap / rule.temperature, -np.inf)
            if not rule.explore:
                return found
            parts = np.exp(found)
            probs = parts / parts.sum(axis=-1, keepdims=True)
        else:
            if rule.gamma is None:
                probs = (rule.epsilon or 0.0) * equal
            else:
                probs = np.where(is_best, 0.0, allowed / (number + rule.gamma * gap))
            left = 1 - probs.sum(axis=-1, keepdims=True)
            probs = probs + left * is_best / is_best.sum(axis=-1, keepdims=True)
        found = np.log(rule.explore * equal + (1 - rule.explore) * probs)
    return found


def _ruled_log_std(rule: ActionRule, log_std: FloatArray) -> FloatArray:
    if rule.temperature is None:
        return np.full_like(log_std, -np.inf)
    return np.clip(log_std + math.log(rule.temperature), *LOG_STD_RANGE)


def _blocks(component: Component) -> list[slice]:
    """The place of each choice's logits in `dist_inputs`."""
    ends = component.inputs.start + np.cumsum(component.sizes)
    return [
        slice(int(end) - size, int(end)) for end, size in zip(ends, component.sizes, strict=True)
    ]


def log_softmax(logits: FloatArray) -> FloatArray:
    """(B, n) log probabilities. Subtracts the largest logit first, so that exp cannot overflow."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probs: FloatArray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return log_probs


def choice_index(component: Component, actions: Array) -> npt.NDArray[np.int64]:
    """(B, m) int64: the option of each choice, from 0. Raises SpaceError outside the space."""
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
    """(B, elements) from a column (B, *shape); raises SpaceError for another shape."""
    values = np.asarray(actions)
    if values.ndim == 0 or values.shape[1:] != component.leaf.shape:
        raise SpaceError(
            f"{_place(component)}: expected shape (B, *{component.leaf.shape}), got {values.shape}"
        )
    flat: Array = values.reshape(len(values), math.prod(component.leaf.shape))
    return flat


def _inverse_cdf(logits: FloatArray, uniform: FloatArray) -> Array:
    """(B,) the first option whose cumulative probability exceeds the uniform number."""
    cumulated = np.exp(logits - logits.max(axis=1, keepdims=True)).cumsum(axis=1)
    # below the last sum even where rounding would make it equal, so that no option of probability 0
    # follows the last possible one
    threshold = np.minimum(uniform * cumulated[:, -1], np.nextafter(cumulated[:, -1], 0.0))
    index: Array = (threshold[:, None] >= cumulated).sum(axis=1)
    return index


def _clipped(space: Any, values: Array) -> Array:
    if not isinstance(space, Box):
        return values
    clipped: Array = np.clip(values, space.low, space.high)
    return clipped


def _place(component: Component) -> str:
    return f"action.{component.leaf.path}" if component.leaf.path else "action"
