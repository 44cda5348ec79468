"""The places of an action distribution's parameters in `dist_inputs`, for numpy and torch.

A module's head has M outputs per observation: logits and means of the action space's leaves, in
canonical order. They are followed by S log standard deviations (those of Box leaves), which depend
on the observation only with `ModuleSpec.state_std`. Together they are `dist_inputs`, K = M + S
float32, as in shards. The logit of an option that the observation's action mask forbids is
`MASKED`, whatever the network says.

| action space | distribution | head |
| --- | --- | --- |
| Discrete(n, start) | categorical | n logits |
| MultiDiscrete(nvec) | multi_categorical | sum(nvec) logits |
| MultiBinary(shape) | bernoulli | a logit per element |
| Box of floats | diag_gaussian | a mean per element (and a log std) |
| Box with bounds | squashed_gaussian | the same, of the normal number before tanh |
| Dict, Tuple | product | those of the items, independent given the observation |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from storage.spaces.descriptors import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    SpaceError,
    Tuple,
)
from storage.spaces.leaves import Leaf, leaves

LOG_STD_RANGE = (-20.0, 2.0)
"""Log standard deviations are clipped to this range: outside, densities over- or underflow
float32."""
MASKED = -1e30
"""The logit of an option that an action mask forbids: finite, but its probability is exactly 0."""


@dataclass(frozen=True)
class Component:
    """The distribution of one leaf of an action space."""

    leaf: Leaf
    kind: str  # categorical, multi_categorical, bernoulli, diag_gaussian, squashed_gaussian
    inputs: slice  # logits or means in dist_inputs
    log_std: slice  # in dist_inputs; empty unless one of the last two
    sizes: tuple[int, ...] = ()  # options of each choice (categorical kinds)
    start: tuple[int, ...] = ()  # the first option's number


@dataclass(frozen=True)
class ActionLayout:
    """The components of an action space in canonical order."""

    space: Space
    components: tuple[Component, ...]
    head: int  # M
    log_stds: int  # S

    @property
    def size(self) -> int:
        """K, the length of dist_inputs."""
        return self.head + self.log_stds

    @property
    def is_discrete(self) -> bool:
        """Whether actions have probabilities, not densities."""
        return self.log_stds == 0


def action_layout(space: Space, *, squashed: bool = False) -> ActionLayout:
    """The layout of an action space; raises SpaceError if no policy can act in it.

    `squashed`: a Box has the distribution squashed_gaussian.
    """
    found = leaves(space)
    sizes = [_head_size(leaf) for leaf in found]
    head = sum(sizes)
    components, at, std_at = [], 0, head
    for leaf, size in zip(found, sizes, strict=True):
        stds = size if isinstance(leaf.space, Box) else 0
        places = slice(at, at + size), slice(std_at, std_at + stds)
        components.append(_component(leaf, *places, squashed=squashed))
        at, std_at = at + size, std_at + stds
    return ActionLayout(space, tuple(components), head, std_at - head)


def distribution_names(space: Space) -> list[str]:
    """The names of the distributions for an action space; the first is the default."""
    if isinstance(space, (Dict, Tuple)):
        return ["product"]
    found = [action_layout(space).components[0].kind]
    bounded = (
        isinstance(space, Box)
        and np.isfinite([space.low, space.high]).all()
        and (space.low < space.high).all()
    )
    return [*found, "squashed_gaussian"] if bounded else found


def _component(leaf: Leaf, inputs: slice, log_std: slice, *, squashed: bool) -> Component:
    space = leaf.space
    if isinstance(space, Discrete):
        return Component(leaf, "categorical", inputs, log_std, (space.n,), (space.start,))
    if isinstance(space, MultiDiscrete):
        return Component(leaf, "multi_categorical", inputs, log_std, space.nvec, space.start)
    if isinstance(space, MultiBinary):
        return Component(leaf, "bernoulli", inputs, log_std)
    kind = "squashed_gaussian" if squashed else "diag_gaussian"
    return Component(leaf, kind, inputs, log_std)


def _head_size(leaf: Leaf) -> int:
    space = leaf.space
    where = f"action.{leaf.path}" if leaf.path else "action"
    if isinstance(space, Discrete):
        return space.n
    if isinstance(space, MultiDiscrete):
        return sum(space.nvec)
    if isinstance(space, MultiBinary):
        return math.prod(space.shape)
    if not isinstance(space, Box):
        raise SpaceError(f"{where}: a policy can't act in a Text space")
    if space.dtype.kind != "f":
        raise SpaceError(
            f"{where}: a policy can't act in a Box of {space.dtype}: expected a Box of floats, "
            "or MultiDiscrete or MultiBinary for choices"
        )
    return math.prod(space.shape)
