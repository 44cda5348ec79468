"""Candidates: the leaf `candidates` of an observation has the features of what can be chosen now.

A `Dict` of observations has candidates if it has the keys `candidates`, a ragged `Box` of shape
(most, F), and `action_mask`, next to an action space `Discrete(most)`: row i has the F features of
what action i stands for this time. Rows beyond the candidates of a decision are zeros, and masked;
they are neither sent nor stored.

    candidates = Candidates(observation, action)
    candidates.observed({"age": 31.0}, rows)    # pads rows (k, F), and adds the mask
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from storage.spaces.action_mask import ACTION_MASK, ActionMask, inner_spaces
from storage.spaces.descriptors import Array, Box, Discrete, Space, SpaceError
from storage.spaces.leaves import leaves

CANDIDATES = "candidates"
"""The key of the leaf in a `Dict` of observations."""


class Candidates:
    """The candidates of one pair of spaces: at most `most` of them, with `width` features each.

    Raises SpaceError for spaces that have no candidates (`of` returns None), or where they do not
    fit the action space or have no `action_mask` beside them.
    """

    def __init__(self, observation: Space, action: Space) -> None:
        space = inner_spaces(observation).get(CANDIDATES)
        shape = space.shape if isinstance(space, Box) and space.ragged else (0, 0)
        if space is None or not isinstance(action, Discrete) or shape[0] != action.n:
            raise SpaceError(
                f"observation.{CANDIDATES}: expected candidates:NxFEATURES, as in Box((n, "
                f"features), ragged=True), next to an action space Discrete(n), got {space} and "
                f"{action}; give the leaf another name if its rows are not what actions stand for"
            )
        mask = ActionMask.of(observation, action)
        if mask is None:
            raise SpaceError(
                f"observation.{CANDIDATES}: expected the key {ACTION_MASK!r} beside it, which says "
                "how many there are, got none"
            )
        (self.leaf,) = leaves(space, CANDIDATES)
        self.mask = mask
        self.most, self.width = shape

    def __repr__(self) -> str:
        return f"{type(self).__name__}(at most {self.most}, with {self.width} features)"

    @classmethod
    def of(cls, observation: Space, action: Space) -> Candidates | None:
        """The candidates of these spaces, None if the observation has no key `candidates`."""
        return cls(observation, action) if CANDIDATES in inner_spaces(observation) else None

    def padded(self, observation: Any) -> Any:
        """An observation whose `candidates` may have fewer rows, and which may lack a mask.

        Anything but a mapping with candidates comes back as it is. Raises SpaceError as `observed`.
        """
        if not isinstance(observation, Mapping) or CANDIDATES not in observation:
            return observation
        rows = observation[CANDIDATES]
        if ACTION_MASK in observation and np.shape(rows) == (self.most, self.width):
            return observation
        context = {name: value for name, value in observation.items() if name != CANDIDATES}
        return self.observed(context, rows)

    def observed(self, context: Mapping[str, Any], rows: Any) -> dict[str, Any]:
        """An observation: `context` has its other leaves, `rows` (k, F) the candidates' features.

        A context may have a mask (k,) of those that may be chosen; by default all of them. Raises
        SpaceError for too many candidates, none, rows of another width, or another mask.
        """
        try:
            features = np.asarray(rows, np.float64)
        except (TypeError, ValueError) as error:
            text = f"{CANDIDATES}: expected rows of {self.width} numbers, got others: {error}"
            raise SpaceError(text) from error
        if features.ndim != 2 or features.shape[1] != self.width:
            raise SpaceError(
                f"{CANDIDATES}: expected rows of {self.width} features, got shape {features.shape}"
            )
        count = len(features)
        if not 0 < count <= self.most:
            raise SpaceError(f"{CANDIDATES}: expected 1 to {self.most} candidates, got {count}")
        allowed = np.asarray(context.get(ACTION_MASK, np.ones(count)))
        if allowed.shape != (count,) or not np.isin(allowed, (0, 1)).all():
            raise SpaceError(
                f"{ACTION_MASK}: expected 0 or 1 for each of {count} candidates, got "
                f"{context[ACTION_MASK]!r:.80}"
            )
        padded: Array = np.zeros((self.most, self.width), self.leaf.dtype)
        padded[:count] = features
        mask = np.zeros(self.most, self.mask.leaf.dtype)
        mask[:count] = allowed
        return {**context, CANDIDATES: padded, ACTION_MASK: mask}
