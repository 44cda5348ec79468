"""A stable split: an episode held out today is held out on every machine and in every later run.

Membership depends only on the episode's id (see `storage.experience.hashed`). So a log that is
imported into another collector is split in the same way, and all parts of an episode are on the
same side.

If episodes of one user are alike, the value of a tag can decide instead (`Reserve`); then all
episodes of a user are on the same side.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import overload

import numpy as np
import numpy.typing as npt

from storage.experience.episode import Episode
from storage.experience.hashed import SPLIT, hash_fraction
from storage.experience.sample_batch import EPS_ID, SampleBatch

Mask = npt.NDArray[np.bool_]

TAG = "tag:"
TAGS = "tags"


def hash_fractions(salt: str, episode_ids: Iterable[str]) -> npt.NDArray[np.float64]:
    """`hash_fraction` of each id, float64 (N,); consecutive equal ids are hashed once."""
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

    With the same salt, a larger fraction holds out a superset. Raises ValueError for a fraction
    outside [0, 1].
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction: expected 0 to 1, got {fraction}")
    if isinstance(source, Episode):
        return hash_fraction(salt, source.episode_id) < fraction
    mask: Mask = hash_fractions(salt, source[EPS_ID].tolist()) < fraction
    return mask


@dataclass(frozen=True)
class Reserve:
    """The share of episodes that training leaves for judging, and the unit that is held out.

    `cluster` is "" if the unit is an episode. "tag:NAME" groups episodes by the value of that tag;
    an episode without the tag is a unit of its own. Raises ValueError for a share outside [0, 1]
    and for any other cluster.
    """

    share: float = 0.0
    cluster: str = ""

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"evaluation_share: expected 0 to 1, got {self.share!r:.80}")
        if self.cluster and (not self.cluster.startswith(TAG) or self.cluster == TAG):
            raise ValueError(f"cluster: expected tag:NAME, got {self.cluster!r:.80}")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `units` needs."""
        return (EPS_ID, TAGS) if self.cluster else (EPS_ID,)

    def units(self, batch: SampleBatch) -> list[str]:
        """(N,) the unit of each row."""
        episodes: list[str] = batch[EPS_ID].tolist()
        if not self.cluster:
            return episodes
        tags = batch[TAGS].tolist()
        return [_tag(text, self.tag) or own for text, own in zip(tags, episodes, strict=True)]

    def tagged(self, batch: SampleBatch) -> Mask:
        """(N,) whether each row's episode has the cluster's tag; True without a cluster."""
        if not self.cluster:
            return np.ones(batch.count, np.bool_)
        return np.array([bool(_tag(text, self.tag)) for text in batch[TAGS].tolist()], np.bool_)

    @property
    def tag(self) -> str:
        """The tag whose values are the units; "" if the unit is an episode."""
        return self.cluster.removeprefix(TAG)

    def require_tag(self, known: set[str]) -> None:
        """Raise ValueError if the cluster's tag is not among those that the episodes have."""
        if self.tag and self.tag not in known:
            there = str(sorted(known)) if known else "of which none has any so far"
            raise ValueError(f"cluster: expected a tag of the episodes, {there}, got {self.tag!r}")

    def rows(self, batch: SampleBatch) -> Mask:
        """(N,) whether each row is reserved."""
        if self.share in (0.0, 1.0):
            return np.full(batch.count, self.share == 1.0)
        mask: Mask = hash_fractions(SPLIT, self.units(batch)) < self.share
        return mask


def tag_names(batch: SampleBatch) -> set[str]:
    """The names of all tags that rows of a batch have."""
    return {name for text in set(batch[TAGS].tolist()) for name in json.loads(text)}


def tag_values(batch: SampleBatch) -> dict[str, list[str | None]]:
    """Tag -> its value in each row (N,), None without one."""
    texts: list[str] = batch[TAGS].tolist()
    parsed = {text: json.loads(text) for text in set(texts)}
    names = {name for one in parsed.values() for name in one}
    return {name: [parsed[text].get(name) for text in texts] for name in sorted(names)}


@lru_cache(maxsize=4096)
def _tag(text: str, name: str) -> str | None:
    """The value of a tag in a row's `tags` (a JSON object of strings), None if it is not there."""
    value: str | None = json.loads(text).get(name)
    return value
