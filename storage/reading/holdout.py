"""A frozen split: an episode that is held out today is held out next week, on every machine.

The episode's id decides, so that a log that is imported again into another collector is split in
the same way, and all parts of an episode fall on one side. A salt makes choices independent: what
is sampled for logging, or acted on by a canary, falls into the split as everything else does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import overload

import numpy as np
import numpy.typing as npt

from storage.experience.episode import Episode
from storage.experience.sample_batch import EPS_ID, SampleBatch

Mask = npt.NDArray[np.bool_]

SPLIT, SAMPLING, CANARY = "", "sampling", "canary"
"""The salts in use: of the held-out split, which is frozen, of sampled logging, of canaries."""


def hash_fraction(salt: str, episode_id: str) -> float:
    """A number in [0, 1) for each id, uniform and for ever the same: 53 bits of its BLAKE2b, keyed
    by the salt. Numbers of two salts are independent. Raises ValueError for a salt above 64 bytes.
    """
    key = salt.encode()
    if len(key) > hashlib.blake2b.MAX_KEY_SIZE:
        raise ValueError(f"salt: expected at most 64 bytes, got {len(key)}")
    digest = hashlib.blake2b(episode_id.encode(), digest_size=8, key=key).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def hash_fractions(salt: str, episode_ids: Iterable[str]) -> npt.NDArray[np.float64]:
    """`hash_fraction` of each id; runs of one id are hashed once."""
    found: list[float] = []
    last = None
    for episode_id in episode_ids:
        if episode_id != last:
            last, value = episode_id, hash_fraction(salt, episode_id)
        found.append(value)
    return np.array(found, np.float64)


@overload
def held_out(source: SampleBatch, fraction: float, *, salt: str = SPLIT) -> Mask: ...
@overload
def held_out(source: Episode, fraction: float, *, salt: str = SPLIT) -> bool: ...
def held_out(source: SampleBatch | Episode, fraction: float, *, salt: str = SPLIT) -> Mask | bool:
    """Whether an episode, or each row's episode (N,), belongs to the held-out `fraction`.

    A larger fraction holds out a superset, for one salt. Raises ValueError for a fraction outside
    [0, 1].
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction: expected 0 to 1, got {fraction}")
    if isinstance(source, Episode):
        return hash_fraction(salt, source.episode_id) < fraction
    mask: Mask = hash_fractions(salt, source[EPS_ID].tolist()) < fraction
    return mask
