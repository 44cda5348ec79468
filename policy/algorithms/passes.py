"""What algorithms share: checks of their settings, and passes over a batch in random order."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator

import numpy as np
import torch

__all__ = [
    "minibatches",
    "near_names",
    "require_at_least",
    "require_not_negative",
    "require_positive",
]


def require_at_least(config: object, least: int, *names: str) -> None:
    """Raise ValueError for settings below `least`."""
    for name in names:
        if getattr(config, name) < least:
            raise ValueError(f"{name}: expected {least} or more, got {getattr(config, name)!r}")


def require_positive(config: object, *names: str) -> None:
    """Raise ValueError for settings that are not finite numbers above 0."""
    for name in names:
        if not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"{name}: expected a number > 0, got {getattr(config, name)!r}")


def require_not_negative(config: object, *names: str) -> None:
    """Raise ValueError for settings that are not finite numbers from 0 on."""
    for name in names:
        if not 0 <= getattr(config, name) < math.inf:
            raise ValueError(f"{name}: expected a number >= 0, got {getattr(config, name)!r}")


def near_names(name: str, known: Collection[str]) -> str:
    """Which known names an unknown one is near, to end an error's text; empty when none is."""
    near = sorted(difflib.get_close_matches(name, known))
    return f"; near {name}: {', '.join(near)}" if near else ""


def minibatches(
    count: int, size: int, passes: int, rng: np.random.Generator, device: torch.device
) -> Iterator[torch.Tensor]:
    """Indices of `count` rows in a random order, `size` at a time, for each pass; the last of a
    pass may be short."""
    for _ in range(passes):
        order = torch.from_numpy(rng.permutation(count)).to(device)
        yield from order.split(size)
