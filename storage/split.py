"""A frozen split: an episode that is held out today is held out next week, on every machine."""

from __future__ import annotations

import hashlib
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from storage.episode import Episode
from storage.sample_batch import EPISODE_ORDINAL, STREAM, SampleBatch

Mask = npt.NDArray[np.bool_]


def hash_fractions(stream: str, episode_ordinals: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each (stream, episode ordinal), uniform and for ever the same.

    BLAKE2b of the stream's name seeds the finaliser of SplitMix64 (Steele, Lea and Flood 2014,
    "Fast splittable pseudorandom number generators", figure 17) over the ordinals.
    """
    seed = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little")
    z = np.asarray(episode_ordinals).astype(np.uint64)
    with np.errstate(over="ignore"):
        z = z * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


@overload
def held_out(source: SampleBatch, fraction: float) -> Mask: ...
@overload
def held_out(source: Episode, fraction: float) -> bool: ...
def held_out(source: SampleBatch | Episode, fraction: float) -> Mask | bool:
    """Whether an episode, or each row's episode (N,), belongs to the held-out `fraction`.

    A larger fraction holds out a superset. Raises ValueError for a fraction outside [0, 1].
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction: expected 0 to 1, got {fraction}")
    if isinstance(source, Episode):
        return bool(hash_fractions(source.stream, source.episode_ordinal) < fraction)
    streams, ordinals = source[STREAM], source[EPISODE_ORDINAL]
    result = np.zeros(source.count, np.bool_)
    for stream in set(streams.tolist()):
        mine: Any = streams == stream
        result[mine] = hash_fractions(stream, ordinals[mine]) < fraction
    return result
