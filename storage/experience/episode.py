"""Steps, episodes and parts: what experience consists of, and its invariants.

An episode has T steps and a final observation that may be absent. How it ended is one word of
`ENDINGS`. A *part* is a run of closed steps of one episode, usually the whole episode. Parts are
what is sealed, stored and counted. A part consists of raw column buffers, so that it gets from the
collector to a shard without a Python object per step.

Pure: uses no clock, file or thread.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from storage.experience.endings import ENDINGS, TERMINATED, Ending
from storage.experience.step_columns import (
    NUMBER_BYTES,
    STEP_COLUMNS,
    UNKNOWN_VERSION,
    StepBuffers,
)
from storage.wording import counted

Source: TypeAlias = Literal["on_policy", "logged", "replayed"]

DEFAULT_AGENT = "agent0"
ALL_AGENTS = "__all__"
"""The key for all agents in a dict by agent."""
DEFAULT_POLICY = "default"

Array: TypeAlias = npt.NDArray[Any]


def policy_of_id(policy_id: str | None, declared: Collection[str]) -> str:
    """The policy that an id names; without an id the only declared one, or `default`."""
    alone = next(iter(declared)) if len(declared) == 1 else DEFAULT_POLICY
    return alone if policy_id is None else policy_id


class EpisodeError(ValueError):
    """A part or an episode violates an invariant; the text says which, and in which episode."""


@dataclass(frozen=True, slots=True)
class LoggedAction:
    """An action that the environment's own program chose.

    `logp` is its log-probability (or log-density), None if unknown; `version` is the policy version
    that chose it.
    """

    action: Any
    logp: float | None = None
    version: int = UNKNOWN_VERSION


class Part(StepBuffers, frozen=True, kw_only=True, gc=False):
    """A sealed run of T steps of one episode, as little-endian column buffers.

    In a multi-agent episode each agent's run is a *track* with its own parts. The tracks of one
    `episode_id` differ in `agent_id`, and `env_t` aligns their steps; it is empty in an episode of
    one agent. `agents`, the number of tracks, is set only in tracks that end with the episode, not
    for an agent that leaves earlier.
    """

    episode_id: str
    part: int
    t0: int  # t of the first step
    steps: int  # T
    schema_id: str
    infos: Mapping[int, str] = msgspec.field(default_factory=dict)  # row in the part -> JSON object
    final_obs: bytes | None = None  # canonical encoding; None for a lost client, a bandit step
    ended: Ending | None = None  # only on an episode's last part
    policy_id: str = DEFAULT_POLICY
    agent_id: str = DEFAULT_AGENT
    training_enabled: bool = True
    continues: str | None = None
    tags: str = "{}"  # JSON object of strings
    ordinal: int = -1  # assigned when the part's shard is planned
    episode_ordinal: int = -1  # the ordinal of the episode's first part
    # how many tracks with steps the whole episode had; -1 unless known at the ending
    agents: int = -1

    def __post_init__(self) -> None:
        if tuple(map(len, _numbers_of(self))) != _sizes(self.steps):
            self._check_numbers()
        if self.ended is not None and self.ended not in ENDINGS:
            raise EpisodeError(f"episode {self.episode_id}: unknown ending {self.ended!r}")
        if self.agents != -1 and (self.agents < 1 or self.ended is None):
            raise EpisodeError(
                f"episode {self.episode_id}: agents: expected 1 or more on a part that ends its "
                f"episode, else -1, got {self.agents} with the ending {self.ended!r}"
            )

    def _check_numbers(self) -> None:
        if self.steps < 1:
            raise EpisodeError(f"episode {self.episode_id}: a part holds 1 or more steps, got 0")
        for column, size in zip(STEP_COLUMNS, map(len, _numbers_of(self)), strict=True):
            expected = self.steps * column.itemsize
            if size != expected and (size or not column.sparse):
                raise EpisodeError(
                    f"episode {self.episode_id}: {column.name}: expected {expected} bytes "
                    f"for {self.steps} steps{' or none' if column.sparse else ''}, got {size}"
                )

    def __repr__(self) -> str:
        how = self.ended or "goes on"
        return (
            f"Part({self.episode_id!r}, part {self.part}, agent {self.agent_id!r}, "
            f"t {self.t0}..{self.t0 + self.steps - 1}, {how}, ordinal {self.ordinal}, "
            f"{self.nbytes} bytes)"
        )

    @property
    def nbytes(self) -> int:
        """Raw size in bytes, as the limits of parts and shards count it."""
        return raw_bytes(self, self.steps)

    def with_ordinals(self, ordinal: int, episode_ordinal: int) -> Part:
        """The part with its ordinal and that of its episode."""
        return msgspec.structs.replace(self, ordinal=ordinal, episode_ordinal=episode_ordinal)


_numbers_of = attrgetter(*(column.name for column in STEP_COLUMNS))


@lru_cache(maxsize=1024)  # a part is checked twice, and most have a few steps
def _sizes(steps: int) -> tuple[int, ...]:
    """The bytes of a part's numbers if it has no sparse ones; none for a part without steps."""
    return tuple(0 if c.sparse else c.itemsize * steps for c in STEP_COLUMNS) if steps > 0 else ()


def raw_bytes(buffers: StepBuffers, steps: int) -> int:
    """The size in bytes of the values and numbers of that many steps."""
    values = len(buffers.obs) + len(buffers.actions) + len(buffers.dist_inputs)
    return values + len(buffers.env_t) + NUMBER_BYTES * steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of an episode for display, with decoded values."""

    t: int
    obs: Any
    action: Any
    reward: float
    action_logp: float | None = None
    infos: Mapping[str, Any] = field(default_factory=dict)
    source: Source = "logged"
    policy_version: int = UNKNOWN_VERSION
    pass_prob: float = 1.0
    ts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A whole episode, or the part of it that was read: decoded columns of T steps.

    `columns` maps a column name (`obs`, `obs.<path>`, `actions`, `rewards`, `action_logp`, ...) to
    an array whose first axis is T. `final_obs` maps an observation's leaf path to its array, or is
    None. `complete`: whether all parts, from t = 0 to the ending, are included.
    """

    episode_id: str
    columns: Mapping[str, Array]
    final_obs: Mapping[str, Array] | None = None
    ended: Ending | None = None
    policy_id: str = DEFAULT_POLICY
    agent_id: str = DEFAULT_AGENT
    training_enabled: bool = True
    continues: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    stream: str = ""
    episode_ordinal: int = -1
    complete: bool = True

    def __post_init__(self) -> None:
        sizes = {name: len(column) for name, column in self.columns.items()}
        if len(set(sizes.values())) != 1:
            raise EpisodeError(
                f"episode {self.episode_id}: expected columns of one length, got {sizes}"
            )

    def __len__(self) -> int:
        return len(self.columns["rewards"])

    def __repr__(self) -> str:
        how = self.ended or "open"
        columns = ", ".join(f"{k}: {v.dtype}{list(v.shape)}" for k, v in self.columns.items())
        return (
            f"Episode({self.episode_id!r}, {counted(len(self), 'step')}, reward "
            f"{self.total_reward:g}, {how}{'' if self.complete else ', incomplete'}; {columns})"
        )

    @property
    def terminated(self) -> bool:
        """Whether the episode reached its end."""
        return self.ended in TERMINATED

    @property
    def truncated(self) -> bool:
        """Whether it ended by a limit, abandoned or broken."""
        return self.ended is not None and self.ended not in TERMINATED

    @property
    def total_reward(self) -> float:
        """The sum of all rewards, not discounted."""
        return float(np.sum(self.columns["rewards"]))


def encode_tags(tags: Mapping[str, str] | None, episode_id: str) -> str:
    """Tags as a JSON object with sorted keys.

    Raises EpisodeError for anything but at most 32 strings of at most 256 characters.
    """
    if not tags:
        return "{}"
    if len(tags) > 32:
        raise EpisodeError(f"episode {episode_id}: expected at most 32 tags, got {len(tags)}")
    for key, value in tags.items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise EpisodeError(f"episode {episode_id}: tags: expected strings, got {key!r:.80}")
        if len(key) > 256 or len(value) > 256:
            raise EpisodeError(
                f"episode {episode_id}: tags.{key:.40}: expected at most 256 characters"
            )
    return json.dumps(dict(tags), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
