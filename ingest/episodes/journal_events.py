"""Journal events: the accepted history of episodes, as the journal stores it.

Checked wire messages become these events. They are the only way to change the assembler's state, so
that replaying them restores it. Values are canonical bytes (storage.spaces.codec). An episode, or
an agent's track (ingest.protocol.agent_names), is identified by its `key`, a number that is unique
in its journal.

Events are encoded as msgpack arrays: add a new field at the end, with a default.
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
    """A client instance was registered; `name` is set for an import, which can resume."""

    instance: str
    number: int
    name: str | None = None
    owner: str = ""  # the id of the token that it belongs to


class Receipt(Struct, array_like=True, tag=9, frozen=True):
    """An import's key now stands for `rows` rows; `digest` identifies their content."""

    instance: str
    digest: bytes
    rows: int


class Started(Struct, array_like=True, tag=1, frozen=True, gc=False):
    """An episode started; `start` numbers the starts of `instance` ("" for callers without one)."""

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
    owner: str = ""  # the id of the token that started it
    reward_combination: str = "sum"  # the rules when it started
    reward_default: float = 0.0
    agent_id: str | None = None  # set for a track; None: the episode has one agent
    arm: str = ""  # the canary arm it was assigned to (storage.experience.hashed.ARM)

    @property
    def name(self) -> Name:
        """The episode, or the agent's track of it."""
        return name_in(self.episode_id, self.agent_id)


class Acted(Struct, array_like=True, tag=2, frozen=True, gc=False):
    """A step started: an observation and the action taken on it."""

    key: int
    seq: int
    obs: bytes
    action: bytes
    action_logp: float  # NaN: unknown
    source: int  # index into storage.experience.step_columns.SOURCES
    policy_version: int
    pass_prob: float
    reward: float  # NaN: none so far
    info: str  # JSON object, "" for none
    dist_inputs: bytes
    ts: int | None
    env_t: int = -1  # the environment's step, for tracks


class Rewarded(Struct, array_like=True, tag=3, frozen=True, gc=False):
    """A reward for the last action."""

    key: int
    seq: int
    reward: float
    info: str


class Ended(Struct, array_like=True, tag=4, frozen=True, gc=False):
    """An episode ended: `how` is an Ending; `cause` says why it broke.

    `waits`: its last part is sealed only by a later Cut, after its steps' reward windows.
    `activates`: it is trained on, although its start had training disabled.
    """

    key: int
    seq: int
    how: str
    final_obs: bytes | None
    cause: str = ""
    waits: bool = False
    agents: int = -1  # the number of tracks of the whole episode, if its end ended this track
    activates: bool = False


class Cut(Struct, array_like=True, tag=5, frozen=True, gc=False):
    """The first `steps` steps of an episode became part number `part`.

    -1: all steps but the open one.
    """

    key: int
    part: int
    steps: int = -1


class Redecided(Struct, array_like=True, tag=6, frozen=True):
    """The open step's decision as the client acted on it; it replaces the stored one."""

    acted: Acted

    @property
    def key(self) -> int:
        return self.acted.key

    @property
    def seq(self) -> int:
        return self.acted.seq


class RewardedStep(Struct, array_like=True, tag=7, frozen=True, gc=False):
    """A reward for step `t` by its number, from any client; `reward_id` identifies retries."""

    key: int
    t: int
    reward_id: str
    reward: float
    info: str


class ImportedEpisode(Struct, array_like=True, frozen=True, gc=False):
    """An imported episode, or a piece of a long one: its steps from `t0` on.

    `how` is its Ending, "" for a piece that is followed by others and is dropped without them.
    """

    started: Started
    steps: int
    how: str
    t0: int = 0
    cause: str = ""  # why it broke
    final_obs: bytes | None = None
    agents: int = -1  # the number of tracks of the whole episode, if this is one of them


NO_TIME = -(2**63)
"""Marks a missing time in a column of times."""


class Imported(Struct, array_like=True, tag=8, frozen=True):
    """Imported episodes of one policy, with their steps as columns.

    A column holds all steps of the first episode, then all of the next; an empty column stands for
    the default. `skipped` are start numbers of `instance` that invalid episodes used up. `waits`:
    steps accept rewards until a Cut after their reward windows.
    """

    episodes: list[ImportedEpisode]
    source: int
    obs: bytes
    actions: bytes
    rewards: bytes  # float64
    action_logp: bytes  # float64; empty: unknown
    policy_version: bytes  # int64; empty: unknown
    pass_prob: bytes  # float64; empty: 1
    ts: bytes  # int64; `NO_TIME`, or an empty column: the time of receipt
    obs_lengths: bytes = b""  # uint32, of spaces with Text
    actions_lengths: bytes = b""
    infos: dict[int, str] = {}  # index of the step in the columns -> JSON object
    part_steps: int = 0  # the most steps of a part, 0: one part per episode
    waits: bool = False
    instance: str = ""
    skipped: list[int] = []
    env_t: bytes = b""  # int64, of tracks


class ImportedBlock(Struct, array_like=True, tag=10, frozen=True):
    """Whole imported episodes of one policy, or agents' tracks, with all they have as columns.

    Their keys count from `key`. `starts` are the start numbers (int64), `lengths` the numbers of
    steps (int64), `ended` indices into ENDINGS (uint8). An empty list stands for the default. The
    other columns are those of `Imported`.
    """

    key: int
    instance: str
    owner: str
    policy_id: str
    schema_id: str
    episode_ids: list[str]
    starts: bytes
    lengths: bytes
    ended: bytes
    tags: list[str]
    continues: list[str | None]
    training_enabled: list[bool]
    final_obs: list[bytes | None]
    source: int
    obs: bytes
    actions: bytes
    rewards: bytes
    action_logp: bytes
    policy_version: bytes
    pass_prob: bytes
    ts: bytes
    obs_lengths: bytes = b""
    actions_lengths: bytes = b""
    infos: dict[int, str] = {}
    part_steps: int = 0
    env_t: bytes = b""
    agent_ids: list[str] = []  # of tracks
    agents: list[int] = []  # the numbers of tracks of their episodes


class Keyed(Struct, array_like=True, tag=14, frozen=True):
    """The event before it in its row came with an Idempotency-Key.

    `number` counts the keys of a journal. `digest` identifies the content of the call, `seq` the
    event that a decision became.
    """

    number: int
    episode_id: str
    name: str
    digest: bytes
    seq: int


class Stored(Struct, array_like=True, tag=15, frozen=True):
    """Part `part` (-1: an end without steps) is in a shard that a restored journal did not know.

    Release 0.1.0 wrote it at the start after a restore; `adopt` reads it.
    """

    key: int
    part: int


JournalEvent: TypeAlias = (
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
    | ImportedBlock
)

encode_event = msgspec.msgpack.Encoder().encode


class Row(Struct, array_like=True, frozen=True):
    """One journal row: the accepted events of one request, or of a slice of a long one.

    `received` is the collector's time in microseconds; `steps` counts all steps that this journal
    has accepted, including this row's. `running` is the time that collectors have run on this
    journal, in seconds over its whole life.
    """

    received: int
    steps: int
    events: list[JournalEvent | Keyed | Stored]
    running: float = 0.0


_decode_row = msgspec.msgpack.Decoder(Row).decode


def encode_row(received: int, steps: int, encoded: list[bytes], running: float = 0.0) -> bytes:
    """Encode a `Row` of events that are encoded already."""
    head = b"\x94" + encode_event(received) + encode_event(steps)
    count = b"\xdd" + len(encoded).to_bytes(4, "big")
    return b"".join([head, count, *encoded, encode_event(running)])


def decode_row(blob: bytes) -> Row:
    """Decode a row. Raises msgspec.DecodeError for other bytes."""
    return _decode_row(blob)


LONG_OBS = 1_024
"""Observations of at least this many bytes are compared with the buffer: hashing is slower."""


def digest(event: JournalEvent, encoded: bytes) -> bytes:
    """8 bytes that identify an event's content, to compare it with a repetition.

    They exclude a long observation, which `OpenEpisode.repeats` compares.
    """
    if isinstance(event, Acted) and len(event.obs) >= LONG_OBS:
        encoded = encode_event(msgspec.structs.replace(event, obs=b""))
    return hashlib.blake2b(encoded, digest_size=8).digest()


def decision_hash(
    obs: bytes, action: bytes, logp: float, version: int, dist_inputs: bytes
) -> bytes:
    """8 bytes that identify a decision: observation, action, version and action distribution.

    They include neither the episode's key nor a time, so that the same decision has the same hash
    in a collector that got it from the client.
    """
    state = hashlib.blake2b(struct.pack("<dqqq", logp, version, len(obs), len(action)))
    for piece in (obs, action, dist_inputs):
        state.update(piece)
    return state.digest()[:8]


UNKNOWN_LOGP = math.nan
