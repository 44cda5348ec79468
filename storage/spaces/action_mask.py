"""Action masks: the leaf `action_mask` of an observation says which options are allowed this time.

A `Dict` of observations has an action mask if it has the key `action_mask`, as in RLlib and
PettingZoo: a `MultiBinary(n)`, or a `Box` of shape (n,) from 0 to 1, next to an action space
`Discrete(n)`. For a `MultiDiscrete(nvec)` it has sum(nvec) elements, one for each option of each
choice in order. 1 allows an option. The mask is part of the observation, but no feature of the
state.

    mask = ActionMask.of(observation, action)      # None if there is no such leaf
    mask.valid(columns)                            # (B, n) bool
    mask.require_allowed(columns, actions)         # raises SpaceError for a forbidden action
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from storage.spaces.codec import Codec
from storage.spaces.descriptors import (
    Array,
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    SpaceError,
)
from storage.spaces.leaves import Leaf, leaves

ACTION_MASK = "action_mask"
"""The key of the leaf in a `Dict` of observations."""

BoolArray = npt.NDArray[np.bool_]
_SHOWN = 20  # options in a message


@dataclass(frozen=True, eq=False)
class ActionMask:
    """The mask of one pair of spaces.

    `leaf` is the observation's; `sizes` are the options of each choice, `start` the number of the
    first option of each; `choices` is the leaf of the action.
    """

    leaf: Leaf
    choices: Leaf
    sizes: tuple[int, ...]
    start: tuple[int, ...]

    @classmethod
    def of(cls, observation: Space, action: Space) -> ActionMask | None:
        """The mask of these spaces, None if the observation has no key `action_mask`.

        Raises SpaceError if it has one that does not fit the action space.
        """
        inner = inner_spaces(observation)
        if ACTION_MASK not in inner:
            return None
        if not isinstance(action, (Discrete, MultiDiscrete)):
            raise SpaceError(
                f"observation.{ACTION_MASK}: expected a Discrete or MultiDiscrete action space "
                f"next to an action mask, got {action}; give the leaf another name if it is no mask"
            )
        space, (choices,) = inner[ACTION_MASK], leaves(action)
        sizes = (action.n,) if isinstance(action, Discrete) else action.nvec
        start = (action.start,) if isinstance(action, Discrete) else action.start
        is_mask = isinstance(space, MultiBinary) or (
            isinstance(space, Box) and bool((space.low == 0).all() and (space.high == 1).all())
        )
        if not is_mask or getattr(space, "shape", None) != (sum(sizes),):
            raise SpaceError(
                f"observation.{ACTION_MASK}: expected MultiBinary({sum(sizes)}), an element for "
                f"each option of {action}, got {space}; give the leaf another name if it is no mask"
            )
        (leaf,) = leaves(space, ACTION_MASK)
        return cls(leaf, choices, tuple(sizes), tuple(start))

    def valid(self, columns: Mapping[str, Array]) -> BoolArray:
        """(B, n) bool: the options that B observations allow; leaf path -> (B, *shape).

        Raises SpaceError for a row that allows no option of some choice.
        """
        allowed = self._allowed(columns)
        for place, block in self._blocks:
            none = np.asarray(~allowed[:, block].any(axis=1), np.bool_)
            if none.any():
                raise SpaceError(
                    f"obs.{ACTION_MASK}: expected at least one allowed option{place}, got none"
                    f"{_row(none)}"
                )
        return allowed

    def forbidden(self, columns: Mapping[str, Array], actions: Array) -> BoolArray:
        """(B,) bool: whether the observation's mask forbids the action, or allows none at all."""
        allowed = self._allowed(columns)
        chosen = np.asarray(actions, np.int64).reshape(len(allowed), -1) - np.array(self.start)
        offsets = np.cumsum((0, *self.sizes[:-1]))
        fits = (chosen >= 0) & (chosen < np.array(self.sizes))
        taken = np.take_along_axis(allowed, np.where(fits, chosen + offsets, 0), axis=1)
        found: BoolArray = ~(taken & fits).all(axis=1)
        return found

    def allows_none(self, columns: Mapping[str, Array]) -> BoolArray:
        """(B,) bool: whether an observation allows no option of some choice."""
        allowed = self._allowed(columns)
        some = [allowed[:, block].any(axis=1) for _, block in self._blocks]
        return np.asarray(~np.logical_and.reduce(some), np.bool_)

    def require_allowed(self, columns: Mapping[str, Array], actions: Array) -> None:
        """Raise SpaceError for the first action that its observation's mask forbids."""
        found = self.forbidden(columns, actions)
        if not found.any():
            return
        self.valid(columns)
        row = int(found.argmax())
        allowed = np.flatnonzero(self._allowed(columns)[row])
        taken: Any = np.asarray(actions)[row]
        which, space = "", self.choices.space
        if isinstance(space, Discrete):
            shown = allowed[:_SHOWN] + space.start
            if space.names:
                shown, taken = space.named(shown), space.named(taken)
            more = ", ..." if len(allowed) > _SHOWN else ""
            which = f" ({', '.join(map(repr, shown.tolist()))}{more})"
        raise SpaceError(
            f"action: expected one that obs.{ACTION_MASK} allows{which}, got "
            f"{np.asarray(taken).tolist()!r}{_row(found)}"
        )

    def require_in(
        self, codecs: tuple[Codec, Codec], obs: bytes, action: bytes | None = None
    ) -> None:
        """Check one observation, and the action that was taken, as canonical bytes of the codecs.

        Raises SpaceError for an action that the mask forbids; without an action, if it allows none.
        """
        columns = codecs[0].columns(obs, 1, [len(obs)])
        if action is None:
            self.valid(columns)
        else:
            taken = codecs[1].columns(action, 1)
            self.require_allowed(columns, taken[self.choices.path])

    def _allowed(self, columns: Mapping[str, Array]) -> BoolArray:
        return np.asarray(np.asarray(columns[self.leaf.path]) != 0, np.bool_)

    @cached_property
    def _blocks(self) -> list[tuple[str, slice]]:
        """(the place for messages, the elements) of each choice."""
        if len(self.sizes) == 1:
            return [("", slice(0, self.sizes[0]))]
        ends = np.cumsum(self.sizes)
        pairs = enumerate(zip(ends, self.sizes, strict=True))
        return [(f" of choice {i}", slice(int(end) - size, int(end))) for i, (end, size) in pairs]


def inner_spaces(observation: Space) -> dict[str, Space]:
    """The spaces of a `Dict` by key; none of any other space."""
    return dict(observation.spaces) if isinstance(observation, Dict) else {}


def _row(marked: BoolArray) -> str:
    """The place of the first marked row; nothing if there is only one row."""
    return f" in row {int(marked.argmax())}" if len(marked) > 1 else ""
