"""A policy in torch, for training.

    policy = Policy(spec, seed=7)
    actions = policy.compute_actions(policy.flatten(columns), rng)
    flat = policy.observe(policy.flatten(columns))           # filtered, as a tensor
    policy.distribution(flat).logp(...)                      # with gradients
    weights = policy.get_weights()                           # float32 copies, never views
    client_side = policy.to_numpy(version=3)

A learner changes `policy.module`; clients act with the copy from `to_numpy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from policy.inference.filters import make_filter
from policy.inference.numpy_policy import Actions, NumpyPolicy, check_weights, choose, products
from policy.inference.preprocessors import columns_of
from policy.inference.spec import PolicySpec
from policy.networks.distributions import ActionDistribution, action_tensors
from policy.networks.modules import build_module
from storage.spaces.descriptors import Array

FlatArray = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]


class Policy:
    """A spec, its torch module and its observation filter.

    Attributes: `spec`; `module`, whose parameters a learner changes; `filter`, which is applied to
    flat observations first; `version` of the weights, -1 if they were never published.
    """

    def __init__(
        self,
        spec: PolicySpec,
        *,
        seed: int = 0,
        filter_state: Mapping[str, Any] | None = None,
        version: int = -1,
    ) -> None:
        self.spec = spec
        self.version = version
        self.module = build_module(spec, seed)
        self.filter = make_filter(spec.observation_filter, spec.flattener.features, filter_state)
        self._products = products(spec)

    def __repr__(self) -> str:
        numbers = sum(parameter.numel() for parameter in self.module.parameters())
        return (
            f"{type(self).__name__}({self.spec.observation} -> {self.spec.action}, "
            f"version {self.version}, {numbers} parameters)"
        )

    # from columns to tensors

    def flatten(self, columns: Mapping[str, Array] | Array) -> FlatArray:
        """(B, D) float32 from B raw observations.

        `columns`: leaf path -> (B, *shape), or the array of a single leaf.
        """
        return self.spec.flattener.columns(columns)

    def flat_observations(self, batch: Mapping[str, Any], prefix: str = "obs") -> FlatArray:
        """(B, D) float32 from a batch's columns `obs` or `obs.<path>` (or of another prefix)."""
        return self.flatten(columns_of(self.spec.observation, prefix, batch))

    def stored_actions(self, batch: Mapping[str, Any]) -> list[Tensor]:
        """A batch's columns `actions` or `actions.<path>`, in the form for `ActionDistribution`."""
        columns = columns_of(self.spec.action, "actions", batch)
        return action_tensors(self.spec.layout, columns, self.device)

    def observe(self, flat: FlatArray) -> Tensor:
        """Filtered flat observations (B, D) as a tensor on the module's device."""
        return torch.as_tensor(self.filter(flat), device=self.device)

    @property
    def device(self) -> torch.device:
        """The torch device of the weights."""
        return next(self.module.parameters()).device

    # for learners; `observed` comes from `observe`

    def distribution(self, observed: Tensor) -> ActionDistribution:
        """The network's distribution for observations (B, D).

        Actions follow it only under the rule `sample` with temperature 1.
        """
        return ActionDistribution(self.spec.layout, self.module.dist_inputs(observed))

    def values(self, observed: Tensor) -> Tensor:
        """(B,) float32 values; raises ValueError without a value head."""
        return self.module.values(observed)

    # acting

    def compute_actions(
        self, flat: FlatArray, rng: np.random.Generator, *, explore: bool = True
    ) -> Actions:
        """Choose an action for each flat observation (B, D), by the spec's rule.

        With `explore=False` the best action is chosen. The same generator draws the same actions as
        with `to_numpy()`.
        """
        self.spec.require_options(flat)
        return choose(self._products[explore], self._dist_inputs(flat), rng)

    def logp(self, flat: FlatArray, actions: Mapping[str, Array]) -> FloatArray:
        """(B,) float64 log propensity of stored actions (leaf path -> column) under the rule."""
        return self._products[True].logp(self._dist_inputs(flat), actions)

    @torch.no_grad()
    def _dist_inputs(self, flat: FlatArray) -> FlatArray:
        inputs: FlatArray = self.module.dist_inputs(self.observe(flat)).cpu().numpy()
        return inputs

    # weights

    def get_weights(self) -> dict[str, FlatArray]:
        """Name -> float32 array: copies, so later updates do not change them."""
        state = self.module.state_dict()
        return {name: tensor.detach().cpu().numpy().copy() for name, tensor in state.items()}

    def set_weights(self, weights: Mapping[str, npt.NDArray[Any]], *, version: int = -1) -> None:
        """Copy weights in. Raises ValueError, and changes nothing, if they do not fit the spec."""
        checked = check_weights(self.spec, weights)
        state = {name: torch.from_numpy(array.copy()) for name, array in checked.items()}
        self.module.load_state_dict(state)
        self.version = version

    def to_numpy(self, *, version: int | None = None) -> NumpyPolicy:
        """A copy of this policy, in its current state, that needs only numpy."""
        return NumpyPolicy(
            self.spec,
            self.get_weights(),
            filter_state=self.filter.to_json(),
            version=self.version if version is None else version,
        )
