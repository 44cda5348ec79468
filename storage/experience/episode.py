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
from typing import Any, Literal, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from storage.wording import counted

Ending: TypeAlias = Literal["terminated", "truncated", "abandoned", "broken"]
Source: TypeAlias = Literal["on_policy", "logged", "replayed"]

ENDINGS: tuple[Ending, ...] = get_args(Ending)
SOURCES: tuple[Source, ...] = get_args(Source)
"""How an action was chosen; a part stores the index into this tuple."""

LOGP_TOLERANCE = 1e-6
"""The amount by which a log-probability may exceed 0, from rounding of a softmax in float32."""

DEFAULT_AGENT = "agent0"
ALL_AGENTS = "__all__"
"""The key for all agents in a dict by agent."""
DEFAULT_POLICY = "default"
UNKNOWN_VERSION = -1

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


class Part(Struct, frozen=True, kw_only=True, gc=False):
    """A sealed run of T steps of one episode, as little-endian column buffers.

    In a multi-agent episode each agent's run is a *track* with its own parts. The tracks of one
    `episode_id` differ in `agent_id`, and `env_t` aligns their steps (-1 = unknown). `agents`, the
    number of tracks, is set only in tracks that end with the episode, not for an agent that leaves
    earlier.

    `obs` and `actions` hold T canonical encodings (storage.spaces.codec), concatenated. If the
    space has Text, `obs_lengths` / `actions_lengths` hold the size of each in bytes (uint32 (T,));
    otherwise they are empty. Unknown `action_logp` is NaN here and null in shards.
    """

    episode_id: str
    part: int
    t0: int  # t of the first step
    steps: int  # T
    schema_id: str
    obs: bytes
    actions: bytes
    rewards: bytes  # float64 (T,)
    action_logp: bytes  # float64 (T,), NaN = unknown
    policy_version: bytes  # int64 (T,), -1 = unknown
    source: bytes  # uint8 (T,), index into SOURCES
    pass_prob: bytes  # float64 (T,)
    ts: bytes  # int64 (T,), microseconds since the epoch, the client's
    received_ts: bytes  # int64 (T,), microseconds, the collector's
    env_t: bytes = b""  # int64 (T,), the environment's step; empty = a single-agent episode
    obs_lengths: bytes = b""
    actions_lengths: bytes = b""
    dist_inputs: bytes = b""  # float32, rows concatenated
    dist_lengths: bytes = b""  # uint32 (T,) bytes per row, 0 = null; empty: null everywhere
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
        steps, eight = self.steps, 8 * self.steps
        plain = self.env_t == b"" and self.agents == -1
        if not (  # every part is checked twice: most are decided by this one condition
            plain
            and steps >= 1
            and len(self.source) == steps
            and len(self.rewards) == len(self.action_logp) == len(self.policy_version) == eight
            and len(self.pass_prob) == len(self.ts) == len(self.received_ts) == eight
            and (self.ended is None or self.ended in ENDINGS)
        ):
            self._check_columns()
            self._check_track()

    def _check_columns(self) -> None:
        if self.steps < 1:
            raise EpisodeError(f"episode {self.episode_id}: a part holds 1 or more steps, got 0")
        for name, itemsize in _STEP_COLUMNS:
            size = len(getattr(self, name))
            if size != self.steps * itemsize:
                raise EpisodeError(
                    f"episode {self.episode_id}: {name}: expected {self.steps * itemsize} bytes "
                    f"for {self.steps} steps, got {size}"
                )
        if self.ended is not None and self.ended not in ENDINGS:
            raise EpisodeError(f"episode {self.episode_id}: unknown ending {self.ended!r}")

    def _check_track(self) -> None:
        """Check the fields that only tracks of multi-agent episodes have."""
        if self.env_t and len(self.env_t) != self.steps * 8:
            raise EpisodeError(
                f"episode {self.episode_id}: env_t: expected {self.steps * 8} bytes for "
                f"{self.steps} steps or none, got {len(self.env_t)}"
            )
        if self.agents != -1 and (self.agents < 1 or self.ended is None):
            raise EpisodeError(
                f"episode {self.episode_id}: agents: expected 1 or more on a part that ends its "
                f"episode, else -1, got {self.agents} with the ending {self.ended!r}"
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
        values = len(self.obs) + len(self.actions) + len(self.dist_inputs)
        return values + len(self.env_t) + 49 * self.steps

    def with_ordinals(self, ordinal: int, episode_ordinal: int) -> Part:
        """The part with its ordinal and that of its episode."""
        return msgspec.structs.replace(self, ordinal=ordinal, episode_ordinal=episode_ordinal)


_STEP_COLUMNS = (
    ("rewards", 8),
    ("action_logp", 8),
    ("policy_version", 8),
    ("source", 1),
    ("pass_prob", 8),
    ("ts", 8),
    ("received_ts", 8),
)


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
        return self.ended == "terminated"

    @property
    def truncated(self) -> bool:
        """Whether it ended by a limit, abandoned or broken."""
        return self.ended in ("truncated", "abandoned", "broken")

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
