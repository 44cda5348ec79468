"""gymnasium spaces <-> the descriptors of storage.spaces.descriptors.

Spaces that a descriptor cannot express are refused, not approximated. There is one exception:
gymnasium has no Text that allows every character, so a Text without a charset becomes one of
printable ASCII.
"""

from __future__ import annotations

import string
from typing import Any

import gymnasium as gym
import numpy as np

from storage.spaces.descriptors import (
    REFUSED,
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    SpaceError,
    Text,
    Tuple,
)


class NamedDiscrete(gym.spaces.Discrete):
    """A Discrete that stores the names of its codes; for gymnasium its values are integers."""

    def __init__(self, space: Discrete) -> None:
        super().__init__(space.n)
        self.names, self.other = space.names, space.other


class RaggedBox(gym.spaces.Box):
    """A Box of candidates: the rows at its end are often zeros, which are not stored."""


def from_gym(space: gym.Space[Any], where: str = "$") -> Space:
    """The descriptor of a gymnasium space.

    Raises SpaceError for Graph, Sequence, OneOf, for a MultiDiscrete with more than one dimension,
    for Dict keys that are not strings or contain '.', and for spaces that gymnasium itself does not
    define.
    """
    spaces = gym.spaces
    if isinstance(space, spaces.Dict):
        _check_names(space, where)
        return Dict(tuple((k, from_gym(s, f"{where}.{k}")) for k, s in space.spaces.items()))
    if isinstance(space, spaces.Tuple):
        return Tuple(tuple(from_gym(s, f"{where}[{i}]") for i, s in enumerate(space.spaces)))
    if isinstance(space, spaces.Box):
        ragged = isinstance(space, RaggedBox)
        return Box(space.shape, space.dtype, space.low, space.high, ragged)
    if isinstance(space, NamedDiscrete):
        return Discrete(int(space.n), 0, space.names, space.other)
    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n), int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        if space.nvec.ndim != 1:
            raise SpaceError(
                f"{where}: expected a MultiDiscrete of one dimension, got shape {space.nvec.shape}"
            )
        return MultiDiscrete(tuple(space.nvec.tolist()), tuple(space.start.tolist()))
    if isinstance(space, spaces.MultiBinary):
        return MultiBinary(space.shape)
    if isinstance(space, spaces.Text):
        return Text(space.max_length, space.min_length, space.characters)
    return _refuse(space, where)


def _refuse(space: object, where: str) -> Space:
    name = type(space).__name__
    if name in REFUSED:
        raise SpaceError(f"{where}: {name} spaces are not supported")
    raise SpaceError(
        f"{where}: expected Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict or Tuple of "
        f"gymnasium, got {name}"
    )


def _check_names(space: gym.spaces.Dict, where: str) -> None:
    for name in space.spaces:
        if not isinstance(name, str):
            raise SpaceError(f"{where}: expected strings as the keys of a Dict, got {name!r:.80}")


def to_gym(space: Space) -> gym.Space[Any]:
    """The gymnasium space of a descriptor; `from_gym` converts it back."""
    spaces = gym.spaces
    if isinstance(space, Dict):
        return spaces.Dict({name: to_gym(inner) for name, inner in space.spaces})
    if isinstance(space, Tuple):
        return spaces.Tuple([to_gym(inner) for inner in space.spaces])
    if isinstance(space, Box):
        kind = RaggedBox if space.ragged else spaces.Box
        return kind(space.low, space.high, space.shape, space.dtype.type)
    if isinstance(space, Discrete) and space.names:
        return NamedDiscrete(space)
    if isinstance(space, Discrete):
        return spaces.Discrete(space.n, start=space.start)
    if isinstance(space, MultiDiscrete):
        start = np.array(space.start, np.int64)
        return spaces.MultiDiscrete(np.array(space.nvec, np.int64), start=start)
    if isinstance(space, MultiBinary):
        one = len(space.shape) == 1
        return spaces.MultiBinary(space.shape[0] if one else space.shape)
    return spaces.Text(
        space.max_length, min_length=space.min_length, charset=space.charset or string.printable
    )
