"""A policy evaluated with numpy alone, or by onnxruntime, for thin clients and collectors.

    policy = NumpyPolicy(spec, weights, version=3)
    choice = policy.act_one(obs, rng)                    # one observation, microseconds
    choice.action, choice.action_env, choice.logp
    actions = policy.act(policy.flatten(columns), rng)   # B at once

It agrees with policy.networks.policy.Policy (torch) on logits, means, logps and values within 1e-5,
and with the same generator it draws the same actions. An instance never changes: any number of
threads may act with it, each with its own generator.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from policy.inference.action_layout import LOG_STD_RANGE, MASKED
from policy.inference.action_rule import GREEDY, SAMPLE, ActionRule
from policy.inference.distributions import LEAST_LOGIT, NotFinite, Product, choice_logits
from policy.inference.filters import make_filter
from policy.inference.onnx_network import OnnxNetwork, onnx_bytes
from policy.inference.preprocessors import assemble, plausible_columns
from policy.inference.spec import ONNX_FILE, PolicySpec
from storage.spaces.action_mask import ACTION_MASK
from storage.spaces.candidates import Candidates
from storage.spaces.descriptors import Array, Discrete, Space
from storage.weights.manifest import WEIGHTS_FILE, Manifest, decode_weights

_log = logging.getLogger("headrace.policy")
FlatArray = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]
# up to this size a loop over Python floats is faster than numpy's calls
_FEW_OPTIONS = 256
# up to this size adding Python floats finds a NaN faster than numpy does
_FEW_NUMBERS = 64


class Action(NamedTuple):
    """One action. `action` is to be stored, `action_env` (clipped to a Box's bounds) to be sent."""

    action: Any
    logp: float  # of `action` under the rule; NaN if it has no density (see `Actions`)
    dist_inputs: FlatArray  # (K,)
    action_env: Any


@dataclass(frozen=True)
class Actions:
    """B actions as columns: leaf path -> (B, *shape).

    Without exploration they are chosen greedily, whatever the spec's rule. Then logp is 0 for a
    single best action, -log k for one of k ties, and NaN (unknown) if the space contains a Box,
    whose mean has no density. `dist_inputs` are the network's, before any rule.
    """

    space: Space
    columns: Mapping[str, Array]  # as stored
    env_columns: Mapping[str, Array]  # as sent: Box values clipped to their bounds
    logp: FloatArray  # (B,)
    dist_inputs: FlatArray  # (B, K)

    def __len__(self) -> int:
        return len(self.logp)

    @cached_property
    def actions(self) -> list[Any]:
        """One value per action, as `storage.spaces.codec` decodes it."""
        return [assemble(self.space, self.columns, row) for row in range(len(self))]

    @cached_property
    def actions_env(self) -> list[Any]:
        return [assemble(self.space, self.env_columns, row) for row in range(len(self))]


class NumpyPolicy:
    """A spec and its weights, ready to act.

    `weights` are float32 arrays with the names and shapes of `spec.weight_shapes()`, or the bytes
    of an ONNX file by the name `ONNX_FILE`; `filter_state` is the observation filter's; `version`
    is that of the weights, -1 for unknown. Raises ValueError if weights or state do not fit the
    spec.
    """

    def __init__(
        self,
        spec: PolicySpec,
        weights: Mapping[str, npt.NDArray[Any]],
        *,
        filter_state: Mapping[str, Any] | None = None,
        version: int = -1,
    ) -> None:
        checked = check_weights(spec, weights)
        if version >= 0 and spec.ignores_mask:
            _log.warning(
                "version %d was trained without action masks, reads %s as a feature, and may "
                "choose forbidden actions: train and publish a new one",
                version,
                ACTION_MASK,
            )
        self.spec = spec
        self.version = version
        self._filter = make_filter(spec.observation_filter, spec.flattener.features, filter_state)
        self._filters = spec.observation_filter != "NoFilter"
        self._activate = _ACTIVATIONS[spec.module.activation]
        self._candidates = spec.candidates
        self._network: OnnxNetwork | None = None
        where = "pi" if self._candidates is None else "pi.layers"
        self._pi: list[tuple[FlatArray, FlatArray]] = []
        if spec.module.kind == "onnx":
            self._network = OnnxNetwork(spec, checked[ONNX_FILE].tobytes())
        else:
            self._pi = _tower(checked, where, len(spec.module.hidden))
        self._cross = checked.get("pi.cross", np.empty((0, 0), np.float32)).copy()
        self._vf = _tower(checked, "vf", len(spec.module.hidden)) if spec.module.value_head else []
        self._log_std = np.clip(checked.get("log_std", np.empty(0, np.float32)), *LOG_STD_RANGE)
        self._products = products(spec)
        self._flatten_one = spec.flattener.value
        self._hidden, self._last = self._pi[:-1], self._pi[-1:]
        self._features = spec.flattener.features
        self._mask, self._head = spec.action_mask, spec.layout.head
        self._masked = spec.flattener.size - (spec.layout.head if self._mask else 0)
        self._start = spec.action.start if isinstance(spec.action, Discrete) else 0
        few = spec.layout.size <= _FEW_NUMBERS
        self._gaussian = self._products[True].gaussian if few else None
        self._few_options = isinstance(spec.action, Discrete) and spec.action.n <= _FEW_OPTIONS

    @classmethod
    def published(cls, manifest: Manifest, weights: bytes) -> NumpyPolicy:
        """The policy of a published version: `weights` are the bytes of its safetensors file.

        Raises WeightsDamaged for bytes whose digest is not the manifest's, and ValueError for
        weights that do not fit the spec.
        """
        arrays = decode_weights(weights, manifest.digests[WEIGHTS_FILE])
        return cls(
            PolicySpec.from_json(manifest.spec),
            arrays,
            filter_state=manifest.filter_state,
            version=manifest.version,
        )

    # many observations

    def flatten(self, columns: Mapping[str, Array] | Array) -> FlatArray:
        """(B, D) float32 from B raw observations.

        `columns`: leaf path -> (B, *shape), or the array of a single leaf.
        """
        return self.spec.flattener.columns(columns)

    def act(self, flat: FlatArray, rng: np.random.Generator, *, explore: bool = True) -> Actions:
        """Choose an action for each flat observation (B, D), by the spec's rule.

        With `explore=False` the best action is chosen. Raises NotFinite if an observation, or what
        the network computes from it, is not finite, and SpaceError if its mask allows no action.
        """
        self.spec.require_options(flat)
        return choose(self._products[explore], self.dist_inputs(flat), rng)

    def act_where_finite(
        self, flat: FlatArray, rng: np.random.Generator, *, explore: bool = True
    ) -> tuple[npt.NDArray[np.bool_], Actions]:
        """Return which observations give finite numbers, bool (B,), and the actions for those.

        So an observation that overflows float32 in the network does not affect the others. Raises
        SpaceError if one has a mask that allows no action.
        """
        self.spec.require_options(flat)
        finite, inputs = self._finite_inputs(flat)
        return finite, choose(self._products[explore], inputs, rng)

    def where_finite(self, flat: FlatArray) -> npt.NDArray[np.bool_]:
        """(B,) whether an observation (B, D), and what the network computes from it, is finite."""
        return self._finite_inputs(flat)[0]

    def require_finite(self) -> None:
        """Raise ValueError unless actions for plausible observations are finite.

        Finite weights are not sufficient for that.
        """
        finite, _ = self.act_where_finite(self.plausible(), np.random.default_rng(0))
        if not finite.all():
            raise ValueError(
                "weights: expected finite outputs of the network for an observation near zero, "
                "got NaN or infinity"
            )

    def plausible(self) -> FlatArray:
        """A few flat observations (B, D) that are likely to occur, without forbidden options."""
        flat = self.flatten(plausible_columns(self.spec.observation))
        flat[:, self._masked :] = 1.0
        return flat

    def dist_inputs(self, flat: FlatArray) -> FlatArray:
        """(B, K) float32 parameters of the action distributions for flat observations (B, D)."""
        found, state = self._candidates, self._observed(flat)
        if self._network is not None:
            head = self._network.outputs(np.asarray(flat, np.float32))
        elif found is None:
            head = self._run(self._pi, state)
        else:
            head = self._scores(found, state, flat[:, self._features : self._masked])
        if self._mask is not None:
            head[head < LEAST_LOGIT] = -np.inf  # it would be less than what is forbidden
            head[flat[:, self._masked :] == 0] = MASKED
        if self.spec.module.state_std:
            return self._limited(head)
        if not self._log_std.size:
            return head
        stds = np.broadcast_to(self._log_std, (len(head), self._log_std.size))
        return np.concatenate([head, stds], axis=1)

    def _limited(self, outputs: FlatArray) -> FlatArray:
        """The network's outputs (B, K) with log standard deviations in their range."""
        stds = outputs[:, self._head :]
        np.minimum(np.maximum(stds, LOG_STD_RANGE[0]), LOG_STD_RANGE[1], out=stds)
        return outputs

    def _scores(self, found: Candidates, state: FlatArray, rest: FlatArray) -> FlatArray:
        """(B, n) scores of the candidates `rest` (B, n F) in states (B, S): see `ModuleSpec`."""
        items = np.asarray(rest, np.float32).reshape(len(state), found.most, found.width)
        by_item = state @ self._cross[:-1] + self._cross[-1]
        crossed = np.matmul(items, by_item[:, :-1, None])[:, :, 0] + by_item[:, -1:]
        (weight, bias), *later = self._pi
        # the first layer reads the state once for all candidates
        split = state.shape[1]
        rows = np.matmul(items, weight[:, split:].T)
        rows += (state @ weight[:, :split].T + bias)[:, None]
        for weight, bias in later:
            self._activate(rows, rows)
            rows = np.matmul(rows, weight.T)
            rows += bias
        return np.asarray(crossed + rows[:, :, 0], np.float32)

    def values(self, flat: FlatArray) -> FlatArray:
        """(B,) float32 estimates of the value head; raises ValueError for a module without one."""
        if not self._vf:
            raise ValueError("this policy has no value head: see ModuleSpec.value_head")
        return self._run(self._vf, self._observed(flat))[:, 0]

    def logp(self, flat: FlatArray, actions: Mapping[str, Array] | Array) -> FloatArray:
        """(B,) float64 log propensity of stored actions under the spec's rule.

        `actions`: leaf path -> column, or the column of a single leaf. See `Product.logp`.
        """
        if not isinstance(actions, Mapping):
            actions = {self.spec.layout.components[0].leaf.path: actions}
        return self._products[True].logp(self.dist_inputs(flat), actions)

    def probabilities(self, flat: FlatArray) -> FloatArray:
        """(B, n) float64 probability of each action of a Discrete space under the spec's rule."""
        return self._products[True].probabilities(self.dist_inputs(flat))

    # one observation

    def act_one(self, obs: Any, rng: np.random.Generator, *, explore: bool = True) -> Action:
        """Choose an action for one raw observation; the same as `act` on a batch of it.

        Raises SpaceError for an observation of another shape or whose mask allows no action, and
        NotFinite if it, or what the network computes from it, is not finite.
        """
        flat = self._flatten_one(obs)
        if not (
            math.isfinite(sum(flat.tolist()))
            if flat.size <= _FEW_NUMBERS
            else np.isfinite(flat).all()
        ):
            raise NotFinite("observation")
        if self._few_options:
            return self._act_discrete(flat, rng, explore)
        if self._gaussian is not None and explore:
            rows = flat[None]
            if self._network is not None:  # `dist_inputs` without its checks
                inputs = self._limited(self._network.outputs(rows))[0]
            else:
                inputs = self.dist_inputs(rows)[0]
            row = inputs.astype(np.float64)
            if not math.isfinite(sum(row.tolist())):
                raise NotFinite("dist_inputs")
            stored, sent, logp = self._gaussian.draw_one(row, rng)
            return Action(stored, logp, inputs, sent)
        one = self.act(flat[None], rng, explore=explore)
        return Action(one.actions[0], float(one.logp[0]), one.dist_inputs[0], one.actions_env[0])

    def _act_discrete(self, flat: FlatArray, rng: np.random.Generator, explore: bool) -> Action:
        h: FlatArray = flat[: self._features] if self._mask is not None else flat
        h = self._filter(h) if self._filters else h
        if self._network is not None:
            logits = self._network.outputs(flat[None])[0]
        elif self._candidates is None:
            for weight, bias in self._hidden:
                h = weight.dot(h)
                h += bias
                self._activate(h, h)
            ((weight, bias),) = self._last
            logits = weight.dot(h)
            logits += bias
        else:
            rest = flat[None, self._features : self._masked]
            logits = self._scores(self._candidates, h[None], rest)[0]
        if self._mask is not None:
            mask = flat[self._masked :]
            if not any(mask.tolist()):
                self.spec.require_options(flat[None])
            logits[logits < LEAST_LOGIT] = -np.inf  # as in `dist_inputs`
            logits[mask == 0] = MASKED
        index, logp = _choose(logits.tolist(), self._products[explore].rule, rng.random())
        action = index + self._start
        return Action(action, logp, logits, action)

    def _finite_inputs(self, flat: FlatArray) -> tuple[npt.NDArray[np.bool_], FlatArray]:
        """(bool (B,) where an observation and its dist_inputs are finite, those dist_inputs)."""
        finite = np.asarray(np.isfinite(flat).all(axis=1))
        with np.errstate(over="ignore", invalid="ignore"):
            inputs = self.dist_inputs(flat[finite])
        fits = np.isfinite(inputs).all(axis=1)
        finite[finite] = fits
        return finite, inputs[fits]

    def _observed(self, flat: FlatArray) -> FlatArray:
        rows = np.asarray(flat, np.float32)
        if rows.ndim != 2 or rows.shape[1] != self.spec.flattener.size:
            raise ValueError(
                f"observations: expected flat ones (B, {self.spec.flattener.size}), "
                f"got {rows.shape}"
            )
        if not np.isfinite(rows).all():
            raise NotFinite("observation")
        return self._filter(rows[:, : self._features])

    def _run(self, tower: list[tuple[FlatArray, FlatArray]], rows: FlatArray) -> FlatArray:
        for i, (weight, bias) in enumerate(tower):
            if i:
                self._activate(rows, rows)
            rows = rows @ weight.T
            rows += bias
        return rows


def products(spec: PolicySpec) -> dict[bool, Product]:
    """Whether to explore -> the distribution of the actions."""
    return {True: Product(spec.layout, spec.action_rule), False: Product(spec.layout, GREEDY)}


def choose(product: Product, inputs: FlatArray, rng: np.random.Generator) -> Actions:
    """B actions for the network's dist_inputs (B, K), by the product's rule."""
    columns = product.sample(inputs, rng)
    logp = product.logp(inputs, columns)
    return Actions(product.layout.space, columns, product.clip(columns), logp, inputs)


def check_weights(
    spec: PolicySpec, weights: Mapping[str, npt.NDArray[Any]]
) -> dict[str, npt.NDArray[Any]]:
    """Return the weights. Raises ValueError that names the first one not fitting the spec."""
    if spec.module.kind == "onnx":
        return {ONNX_FILE: onnx_bytes(weights)}
    expected = spec.weight_shapes()
    if set(weights) != set(expected):
        missing, extra = set(expected) - set(weights), set(weights) - set(expected)
        raise ValueError(f"weights: missing {sorted(missing)}, not expected {sorted(extra)}")
    for name, shape in expected.items():
        array = weights[name]
        if array.dtype != np.float32 or array.shape != shape:
            raise ValueError(
                f"weights: {name}: expected float32 {shape}, got {array.dtype} {array.shape}"
            )
        if not np.isfinite(array).all():
            raise ValueError(f"weights: {name}: expected finite numbers, got NaN or infinity")
    return {name: weights[name] for name in expected}


def _tower(
    weights: Mapping[str, FlatArray], name: str, hidden: int
) -> list[tuple[FlatArray, FlatArray]]:
    """(weight (out, in), bias (out,)) of each layer; copies, so that callers cannot change them."""
    return [
        (weights[f"{name}.{2 * i}.weight"].copy(), weights[f"{name}.{2 * i}.bias"].copy())
        for i in range(hidden + 1)
    ]


def _choose(logits: list[float], rule: ActionRule, uniform: float) -> tuple[int, float]:
    """(index, logp) by the inverse of the cumulative probabilities."""
    if not math.isfinite(sum(logits)):  # the sum of finite float32 numbers is finite
        raise NotFinite("dist_inputs")
    if rule != SAMPLE:
        logits = _ruled(logits, rule)
    largest = max(logits)
    parts = [math.exp(x - largest) for x in logits]
    total = sum(parts)
    threshold, cumulated = uniform * total, 0.0
    index = -1
    for part in parts:
        index += 1
        cumulated += part
        if threshold < cumulated:
            break
    else:  # rounding made the threshold equal to the last sum
        index = max(i for i, part in enumerate(parts) if part)
    return index, logits[index] - largest - math.log(total)


def _ruled(logits: list[float], rule: ActionRule) -> list[float]:
    """`distributions.ruled` for one choice; faster than numpy for few options."""
    if rule.explore or rule.gamma is not None:
        found: list[float] = choice_logits(rule, np.array(logits)).tolist()
        return found
    best = max(logits)
    least = min(best, LEAST_LOGIT)
    if rule.temperature is not None:
        return [(x - best) / rule.temperature if x >= least else -math.inf for x in logits]
    epsilon = rule.epsilon or 0.0
    among = epsilon / sum(x >= least for x in logits)
    likely = math.log(among + (1 - epsilon) / logits.count(best))
    unlikely = math.log(among) if among else -math.inf
    return [likely if x == best else unlikely if x >= least else -math.inf for x in logits]


def _relu(h: FlatArray, out: FlatArray) -> None:
    np.maximum(h, 0.0, out=out)


def _silu(h: FlatArray, out: FlatArray) -> None:
    # for very negative numbers exp may be infinite, and the quotient is 0
    with np.errstate(over="ignore"):
        np.divide(h, 1.0 + np.exp(-h), out=out)


def _elu(h: FlatArray, out: FlatArray) -> None:
    np.copyto(out, np.where(h > 0, h, np.expm1(np.minimum(h, 0.0))))


def _gelu(h: FlatArray, out: FlatArray) -> None:
    np.multiply(h, 0.5 + 0.5 * _erf(h / math.sqrt(2)).astype(np.float32), out=out)


def _leaky_relu(h: FlatArray, out: FlatArray) -> None:
    np.maximum(h, 0.01 * h, out=out)


_erf = np.frompyfunc(math.erf, 1, 1)
_ACTIVATIONS: Mapping[str, Callable[[FlatArray, FlatArray], Any]] = {
    "tanh": np.tanh,
    "relu": _relu,
    "silu": _silu,
    "elu": _elu,
    "gelu": _gelu,
    "leaky_relu": _leaky_relu,
}
