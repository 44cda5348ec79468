"""Journal events: the accepted history of episodes, as the journal keeps it.

Wire messages are checked once and become these; the assembler changes state by nothing else, so
that replaying them is the same history. Values are canonical bytes (storage.spaces.codec). An
episode, or an agent's track of one (ingest.protocol.agent_names), is named by its `key`, a number
that one journal never gives twice.

Encoded as msgpack arrays: a new field goes to the end, with a default.
"""

from __future__ import annotations

import hashlib
import math
import struct
from typing import TypeAlias

import msgspec
from msgspec import Struct

from ingest.protocol.agent_names import Name, name_in


class Opened(Struct, array_like=True, tag=0, frozen=True):
    """A client instance was registered; `name` for an import that may resume."""

    instance: str
    number: int
    name: str | None = None
    owner: str = ""  # the id of the token whose name it is


class Receipt(Struct, array_like=True, tag=9, frozen=True):
    """An import's key stands for `rows` rows from now on, and `digest` names their content."""

    instance: str
    digest: bytes
    rows: int


class Started(Struct, array_like=True, tag=1, frozen=True, gc=False):
    """An episode began; `start` numbers the starts of `instance` ("" for callers without one)."""

    key: int
    episode_id: str
    instance: str
    start: int
    policy_id: str
    schema_id: str
    training_enabled: bool
    tags: str
    continues: str | None
    ts: int | None
    owner: str = ""  # the id of the token that it was started with
    reward_combination: str = "sum"  # the rules that it began under
    reward_default: float = 0.0
    agent_id: str | None = None  # of a track; None: the episode has one agent
    arm: str = ""  # what a canary's split assigned it to (storage.experience.hashed.ARM)

    @property
    def name(self) -> Name:
        """The episode, or the agent's track of it."""
        return name_in(self.episode_id, self.agent_id)


class Acted(Struct, array_like=True, tag=2, frozen=True, gc=False):
    """A step began: an observation and the action taken on it."""

    key: int
    seq: int
    obs: bytes
    action: bytes
    logp: float  # NaN: unknown
    source: int  # index into storage.experience.episode.SOURCES
    version: int
    pass_prob: float
    reward: float  # NaN: none came yet
    info: str  # JSON object, "" for none
    dist_inputs: bytes
    ts: int | None
    env_t: int = -1  # the environment's step, of a track


class Rewarded(Struct, array_like=True, tag=3, frozen=True, gc=False):
    """A reward for the last action."""

    key: int
    seq: int
    reward: float
    info: str


class Ended(Struct, array_like=True, tag=4, frozen=True, gc=False):
    """An episode ended: `how` is an Ending; `cause` says why it broke.

    `waits`: its last part is not sealed until a Cut says that its steps' reward windows are over.
    """

    key: int
    seq: int
    how: str
    final_obs: bytes | None
    cause: str = ""
    waits: bool = False
    agents: int = -1  # how many tracks the whole episode had, which ends with this one


class Cut(Struct, array_like=True, tag=5, frozen=True, gc=False):
    """The first `steps` steps of an episode became part number `part`.

    -1: all but the step that is open.
    """

    key: int
    part: int
    steps: int = -1


class Redecided(Struct, array_like=True, tag=6, frozen=True):
    """The open step's decision as the client acted on it, in place of the one that is known."""

    acted: Acted

    @property
    def key(self) -> int:
        return self.acted.key

    @property
    def seq(self) -> int:
        return self.acted.seq


class RewardedStep(Struct, array_like=True, tag=7, frozen=True, gc=False):
    """A reward for step `t` by its number, from whoever knows of it; `reward_id` is its own key."""

    key: int
    t: int
    reward_id: str
    reward: float
    info: str


class ImportedEpisode(Struct, array_like=True, frozen=True, gc=False):
    """An episode of an import, or a piece of a long one: its steps from `t0` on.

    `how` is its Ending, "" for a piece that others follow: without them it counts for nothing.
    """

    started: Started
    steps: int
    how: str
    t0: int = 0
    cause: str = ""  # why it broke
    final_obs: bytes | None = None
    agents: int = -1  # how many tracks the whole episode had, if this is one of them


NO_TIME = -(2**63)
"""In a column of times: none was given."""


class Imported(Struct, array_like=True, tag=8, frozen=True):
    """Episodes of one policy, none of which is ever open: their steps as columns.

    A column holds all steps of the first episode, then all of the next; an empty one the default.
    `skipped` are start numbers of `instance` whose episodes did not fit: they are used up.
    `waits`: steps take rewards until a Cut says that their windows are over.
    """

    episodes: list[ImportedEpisode]
    source: int
    obs: bytes
    actions: bytes
    rewards: bytes  # float64
    logp: bytes  # float64; empty: unknown
    versions: bytes  # int64; empty: unknown
    pass_prob: bytes  # float64; empty: 1
    ts: bytes  # int64, `NO_TIME` and empty: when they were received
    obs_lengths: bytes = b""  # uint32, of spaces with Text
    actions_lengths: bytes = b""
    infos: dict[int, str] = {}  # step of all these -> JSON object
    part_steps: int = 0  # a part has at most so many steps, 0: all of its episode
    waits: bool = False
    instance: str = ""
    skipped: list[int] = []
    env_t: bytes = b""  # int64, of tracks


class Keyed(Struct, array_like=True, tag=14, frozen=True):
    """The event before it in its row came with an Idempotency-Key.

    `number` counts the keys of a journal. `digest` names the content of the call, `seq` is the
    event that a decision became.
    """

    number: int
    episode_id: str
    name: str
    digest: bytes
    seq: int


class Stored(Struct, array_like=True, tag=15, frozen=True):
    """Part `part` (-1: an end without steps) is in a shard that a backup did not know of.

    Written once, when a restored journal is noticed; only a replay ever sees it.
    """

    key: int
    part: int


Event: TypeAlias = (
    Opened
    | Receipt
    | Started
    | Acted
    | Rewarded
    | Ended
    | Cut
    | Redecided
    | RewardedStep
    | Imported
)

encode_event = msgspec.msgpack.Encoder().encode


class Row(Struct, array_like=True, frozen=True):
    """One journal row: the accepted events of one request, or of a slice of a long one.

    `received` is the collector's time in microseconds; `steps` counts every step that this journal
    ever accepted, this row's included. `running` is how long the collector has been running in all,
    in seconds over the journal's life.
    """

    received: int
    steps: int
    events: list[Event | Keyed | Stored]
    running: float = 0.0


_decode_row = msgspec.msgpack.Decoder(Row).decode


def encode_row(received: int, steps: int, encoded: list[bytes], running: float = 0.0) -> bytes:
    """A `Row` around events that are encoded already."""
    head = b"\x94" + encode_event(received) + encode_event(steps)
    count = b"\xdd" + len(encoded).to_bytes(4, "big")
    return b"".join([head, count, *encoded, encode_event(running)])


def decode_row(blob: bytes) -> Row:
    """Raises msgspec.DecodeError for a blob that is no row."""
    return _decode_row(blob)


LONG_OBS = 1_024
"""Bytes from which on an observation is compared as it is buffered: hashing it takes longer."""


def digest(event: Event, encoded: bytes) -> bytes:
    """8 bytes that tell whether a repeated event has the content that was acknowledged, but for a
    long observation, which `OpenEpisode.repeats` compares."""
    if isinstance(event, Acted) and len(event.obs) >= LONG_OBS:
        encoded = encode_event(msgspec.structs.replace(event, obs=b""))
    return hashlib.blake2b(encoded, digest_size=8).digest()


def decision_hash(
    obs: bytes, action: bytes, logp: float, version: int, dist_inputs: bytes
) -> bytes:
    """8 bytes that name a decision: what was seen, what was chosen, by which version and how.

    Neither the episode's key nor a time is in it: the same decision has the same name in a
    collector that had to be told of it.
    """
    state = hashlib.blake2b(struct.pack("<dqqq", logp, version, len(obs), len(action)))
    for piece in (obs, action, dist_inputs):
        state.update(piece)
    return state.digest()[:8]


UNKNOWN_LOGP = math.nan
