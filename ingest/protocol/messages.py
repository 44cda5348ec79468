"""Wire protocol v1: the messages between clients and the collector.

Each message is one msgspec struct, which is its schema, validation and encoding, both for JSON and
for msgpack. Unknown fields are refused, so that a misspelt field does not lose data silently. A
field may be added to v1 only with a default.

Values (`obs`, `action`) are nested lists, numbers, strings and mappings, or
`{"dtype", "shape", "data"}`; in msgpack also the raw bytes of a value's canonical encoding
(storage.spaces.codec). If a space declares names, a string is a name and an integer its code;
replies to get_action use names.

In a single call (`POST /v1/episodes/{id}/log_action`, ...) the path names the episode; in a batch
each event does.

Fields of several messages:

- `seq` numbers the events of an episode or track from 0, without gaps.
- `ts` is the client's time in microseconds since the epoch.
- `agent_id` names an agent of an episode with several agents. Each agent's events are a track, with
  its own start and sequence numbers (ingest.protocol.agent_names). Without it the episode has one
  agent.
- `env_t` is the step of the environment that an agent's action belongs to. Agents that act together
  have the same number; it grows from one action of an agent to the next.
- `decided` is the `decision` of the reply to the latest get_action, repeated by the events after
  it: the decision that the open step was acted with.
- `schema_id` names the declaration by which a client has encoded the values. A start gives it for
  its whole episode; another event gives it if its start could not. Without it the values are read
  by the current declaration.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from ingest.protocol.errors import Refusal

PROTOCOL_VERSION = 1
JSON = "application/json"
MSGPACK = "application/msgpack"
ARROW = "application/vnd.apache.arrow.stream"

EVERY_STEP, PATIENCE = 1.0, 10.0
"""Defaults of `pass_prob` and of `wait`. msgspec leaves out a float only if it is this very object,
so messages replace one that was computed and is equal: collectors from before the field refuse it.
"""

MAX_EVENTS = 10_000
MAX_DEPTH = 32
"""The maximum nesting of lists and objects in an info, so that any JSON parser can read it."""

Id: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
OptionalId: TypeAlias = Annotated[str, Meta(max_length=256)]
Micros: TypeAlias = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Agents: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Version: TypeAlias = Annotated[int, Meta(ge=-1, le=2**53)]
Cause: TypeAlias = Literal["client_dropped", "client_invalid"]


class Start(Struct, tag="start", forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Start an episode. `start` numbers the starts of one client instance, from 0.

    A number is never reused. Gaps are allowed, up to 1,000 ranges of numbers per instance.
    """

    episode_id: OptionalId = ""
    start: Count | None = None
    policy_id: Id | None = None
    training_enabled: bool = True
    tags: dict[str, str] | None = None
    continues: Id | None = None
    ts: Micros | None = None
    agent_id: Id | None = None
    schema_id: Id | None = None


class LogAction(
    Struct, tag="log_action", forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """An action that the caller chose, with the observation it was chosen for.

    `action_logp` is the logarithm of the propensity, `action_prob` the propensity itself; null:
    unknown. `pass_prob` is the share of steps that the client logs. `reward` (a sum) and `info` are
    from the `log_returns` calls that came before the event was sent. `replayed`: the event comes
    from an import, not from the program that acted.
    """

    episode_id: OptionalId = ""
    seq: Count | None = None
    obs: Any
    action: Any
    action_logp: float | None = None
    action_prob: float | None = None
    policy_version: Version = -1
    pass_prob: float = EVERY_STEP
    reward: float | None = None
    info: dict[str, Any] | None = None
    ts: Micros | None = None
    replayed: bool = False
    decided: bytes | None = None
    agent_id: Id | None = None
    env_t: Count | None = None
    schema_id: Id | None = None

    def __post_init__(self) -> None:
        if self.pass_prob is not EVERY_STEP and self.pass_prob == EVERY_STEP:
            self.pass_prob = EVERY_STEP


class Decision(
    Struct, tag="decision", forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """An action that a published policy chose: a local get_action, or a reply that was lost.

    `action_logp` is null if the action has no density (the mode of a continuous distribution).
    `action_dist_inputs` are the distribution's parameters, in canonical bytes. `answered`: the
    collector chose the action in a reply to get_action and the client acted on it; the event
    restores the decision if the collector has lost it.
    """

    episode_id: OptionalId = ""
    seq: Count | None = None
    obs: Any
    action: Any
    action_logp: float | None
    policy_version: Version
    action_dist_inputs: bytes | None = None
    reward: float | None = None
    info: dict[str, Any] | None = None
    ts: Micros | None = None
    answered: bool = False
    decided: bytes | None = None
    agent_id: Id | None = None
    env_t: Count | None = None
    pass_prob: float = EVERY_STEP
    schema_id: Id | None = None

    def __post_init__(self) -> None:
        if self.pass_prob is not EVERY_STEP and self.pass_prob == EVERY_STEP:
            self.pass_prob = EVERY_STEP


class LogReturns(
    Struct, tag="log_returns", forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """A reward for the last action, or for step `step`.

    `reward_id` identifies a reward for a named step, so that a repetition counts once.
    """

    episode_id: OptionalId = ""
    seq: Count | None = None
    reward: float
    info: dict[str, Any] | None = None
    step: Count | None = None
    reward_id: Id | None = None
    ts: Micros | None = None
    decided: bytes | None = None
    agent_id: Id | None = None

    @property
    def grows(self) -> bool:
        """Whether the episode must store more for this event than a sum of rewards."""
        return self.info is not None or self.step is not None


class End(Struct, tag="end", forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The end of an episode or of a track; the final observation may be absent.

    `truncated`: it was cut off, not ended by the environment. `agents`: the whole episode ends, and
    this number of its agents acted; all ends that give it must agree. `broken`: the episode with
    all its tracks ends as broken at its last step, because the client had to drop the next step
    (`client_dropped`) or the next step was invalid (`client_invalid`).
    """

    episode_id: OptionalId = ""
    seq: Count | None = None
    obs: Any = None
    truncated: bool = False
    ts: Micros | None = None
    decided: bytes | None = None
    agent_id: Id | None = None
    agents: Agents | None = None
    broken: Cause | None = None
    schema_id: Id | None = None


class GetAction(
    Struct, tag="get_action", forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """Ask the live version for an action on `obs`.

    `explore=False` asks for the most probable action. `policy_id` names the policy in a request
    that records nothing; otherwise the episode's policy acts.
    """

    episode_id: OptionalId = ""
    seq: Count | None = None
    obs: Any
    explore: bool = True
    ts: Micros | None = None
    decided: bytes | None = None
    agent_id: Id | None = None
    env_t: Count | None = None
    pass_prob: float = EVERY_STEP
    policy_id: Id | None = None
    schema_id: Id | None = None

    def __post_init__(self) -> None:
        if self.pass_prob is not EVERY_STEP and self.pass_prob == EVERY_STEP:
            self.pass_prob = EVERY_STEP


FIELDS: tuple[str, ...] = ()
"""Fields that were added to this protocol after release 0.1.0, as `message.field`. `/v1/spec` lists
them, and a client sends one only to a collector that lists it."""

EARLIER_FIELDS = (
    "decision.pass_prob",
    "get_action.pass_prob",
    "end.broken",
    "batch.dropped",
    "weights.canary",
    "actions.record",
    "start.schema_id",
    "log_action.schema_id",
    "decision.schema_id",
    "end.schema_id",
    "get_action.schema_id",
)
"""Fields that every release has. `/v1/spec` lists them for clients of 0.1.0, which ask for them."""

Event: TypeAlias = Start | LogAction | Decision | LogReturns | End


class Dropped(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Episodes and steps that a client instance has dropped so far, because its queue was full."""

    episodes: Count = 0
    steps: Count = 0


class Batch(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """`POST /v1/events`: events of one client instance, in order.

    `dropped` are totals of the instance, so that a repeated batch does not count them twice.
    """

    instance: Id | None = None
    dropped: Dropped | None = None
    events: Annotated[list[Event], Meta(max_length=MAX_EVENTS)]


class Named(Struct, kw_only=True):
    """The place, in an episode or an agent's track, of an event that does not decode as one."""

    type: str
    episode_id: Id
    seq: Count | None = None
    agent_id: Id | None = None


class LoneEvent(Struct, kw_only=True):
    """A Batch with an event alone, of which only the place counts."""

    instance: Id | None = None
    events: Annotated[list[Named], Meta(min_length=1, max_length=1)]


class ActionBatch(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """`POST /v1/actions`: pending events of the episodes, then the observations to act on.

    With `durable` the reply is sent when everything is on disk. Without it the reply is sent at
    once: the caller numbers its events, keeps them and the decisions until `durable_seq` reaches
    them, and sends them again if the collector was killed and lost them. `wait`: how many seconds
    the request may wait for a newer version while its policy is held by flow control.

    Without `record` nothing is recorded, there are no events, and the episodes may be unknown. Each
    reply then has everything that a `decision` event needs, which the caller sends when it acts.
    """

    instance: Id | None = None
    events: Annotated[list[Event], Meta(max_length=MAX_EVENTS)] = []
    actions: Annotated[list[GetAction], Meta(max_length=MAX_EVENTS)]
    durable: bool = True
    wait: Annotated[float, Meta(ge=0.0)] = PATIENCE
    record: bool = True

    def __post_init__(self) -> None:
        if self.wait is not PATIENCE and self.wait == PATIENCE:
            self.wait = PATIENCE


class RankedAction(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A candidate: `features` are numbers in the declared order, or values by feature name."""

    id: Id
    features: Any = []


class RankedSlot(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A place of a slate: `context` is added to the event's, `excluded` to its exclusions."""

    context: dict[str, Any] = {}
    excluded: list[Id] = []


class Rank(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """`POST /v1/rank`: choose one of the actions, or one for each slot, as an episode of its own.

    The first action that is not excluded is the baseline. `context` has the other leaves of the
    observation. `event_id` names the episode: the same request again gets the same reply. Without
    `active` the event counts only after `activate`. `apprentice`: the caller takes the baseline
    itself, with the propensity `action_prob` (null: unknown).
    """

    context: dict[str, Any] = {}
    actions: Annotated[list[RankedAction], Meta(max_length=MAX_EVENTS)]
    excluded: list[Id] = []
    slots: Annotated[list[RankedSlot], Meta(max_length=MAX_EVENTS)] = []
    event_id: Id | None = None
    policy_id: Id | None = None
    active: bool = True
    apprentice: bool = False
    action_prob: float | None = None
    tags: dict[str, str] | None = None
    ts: Micros | None = None


class Probability(Struct, kw_only=True):
    """An action of a ranking, with the policy's probability of choosing it."""

    id: str
    probability: float


class Ranking(Struct, kw_only=True):
    """The chosen action, and all actions: the chosen one, then by falling probability."""

    reward_action_id: str
    ranking: list[Probability]


class RankReply(Struct, omit_defaults=True, kw_only=True):
    """The reply to `Rank`. Of several slots, `slots` has the rankings, and the fields the first's.

    `policy_version` is -1 for the baseline, before the first version.
    """

    event_id: str
    reward_action_id: str
    ranking: list[Probability]
    slots: list[Ranking] = []
    policy_version: int = -1
    durable: bool = True  # left out when true


class RankedReward(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """`POST /v1/reward/{id}`: a reward for a ranked event, or one of its slots (from 0).

    `reward_id` identifies a reward, so that a repetition counts once.
    """

    reward: float
    slot: Count | None = None
    reward_id: Id | None = None
    info: dict[str, Any] | None = None
    ts: Micros | None = None


class Activate(Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/activate/{id}`: a ranked event that was not `active` counts from now on."""


class Register(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """`POST /v1/instances`: a new client instance, or with `name` an import that may resume."""

    name: Id | None = None


class Registered(Struct, omit_defaults=True, kw_only=True):
    """The instance to name in batches, and the ranges of starts that it has already used."""

    instance: str
    starts: list[tuple[int, int]] = []
    durable: bool = True  # left out when true


class StartReply(Struct, omit_defaults=True, kw_only=True):
    """The reply to the single call that starts an episode."""

    episode_id: str
    agent_id: str | None = None
    durable: bool = True  # left out when true


class ItemError(Struct, omit_defaults=True, kw_only=True):
    """Why item `index` of a batch was refused."""

    index: int
    error: dict[str, Any]

    @classmethod
    def of(cls, index: int, refusal: Refusal) -> ItemError:
        """A refusal of an event, with the event's place in the batch."""
        document = refusal.to_json()
        place = document.get("path")
        document["path"] = f"$.events[{index}]" + (f".{place}" if place else "")
        return cls(index=index, error=document)


class EventsReply(Struct, omit_defaults=True, kw_only=True):
    """The reply to a batch. With `durable`, every event that was not refused is on disk.

    `refused` lists every refused event of a batch. For an import it lists up to a hundred refused
    episodes by their first refused row; `refused_count` is their number if there are more.
    `refused_by` counts an import's invalid rows by column and reason. `hold` maps policies to live
    versions that have acted enough steps: clients wait for a newer version. `redeclared`: an
    episode of the batch started with an earlier declaration; get the current one before the next.
    """

    durable: bool
    accepted: int
    duplicates: int = 0
    refused: list[ItemError] = []
    refused_count: int = 0
    hold: dict[str, int] = {}
    refused_by: dict[str, int] = {}
    redeclared: bool = False


class ActionReply(Struct, omit_defaults=True, kw_only=True):
    """One action of the live version, or the error of that item.

    In a reply that is sent at once (`durable` false), the events of the episode up to `durable_seq`
    are on disk; `decision` names the decision. `stored` is the action and `action_dist_inputs` its
    distribution, both in canonical bytes, for a `decision` event. `hold`: the version that acted
    has enough steps, and no newer one came in time.
    """

    episode_id: str
    action: Any = None
    action_logp: float | None = None
    policy_version: int = -1
    durable_seq: int = -1
    durable: bool = True  # left out when true
    hold: bool = False
    decision: bytes | None = None
    stored: bytes | None = None
    action_dist_inputs: bytes | None = None
    error: dict[str, Any] | None = None
    agent_id: str | None = None


class ActionsReply(Struct, omit_defaults=True, kw_only=True):
    """The reply to an ActionBatch, item by item."""

    durable: bool
    actions: list[ActionReply]
    refused: list[ItemError] = []
    redeclared: bool = False  # as in EventsReply


class TrackState(Struct, omit_defaults=True, kw_only=True):
    """The state of one agent's track; the fields are those of EpisodeState."""

    state: str
    next_seq: int
    steps: int | None = None
    policy_id: str | None = None
    cause: str | None = None


class EpisodeState(Struct, omit_defaults=True, kw_only=True):
    """The state of an episode: `open` with its steps and policy, or how it ended (`cause`: why).

    In an episode of several agents, `agents` has the tracks that are still remembered, and `state`
    is `open` while one of them is open or others can join.
    """

    episode_id: str
    state: str
    next_seq: int = 0
    steps: int | None = None
    policy_id: str | None = None
    cause: str | None = None
    agents: dict[str, TrackState] | None = None


class ErrorBody(Struct, omit_defaults=True, kw_only=True):
    """Why a request was refused: a code, the expected and the actual value, and the place."""

    code: str
    message: str
    path: str | None = None
    episode_id: str | None = None
    expected_seq: int | None = None
    retry_after: float | None = None
    agent_id: str | None = None


class ErrorReply(Struct, kw_only=True):
    """The body of every error reply."""

    error: ErrorBody


class Publish(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """`POST /v1/policies/{id}/versions`: publish trained weights as version `version`.

    `version` must be the next number. `weights` is a safetensors file, `sha256` the hex digest of
    its bytes, `spec` the policy's spec. `lineage` maps streams to ranges of ordinals trained on.
    """

    version: Annotated[int, Meta(ge=1, le=2**53)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    weights: bytes
    spec: dict[str, Any]
    filter_state: dict[str, Any] | None = None
    metrics: dict[str, Any] = {}
    checkpoint: str | None = None
    lineage: dict[str, list[tuple[Count, Count]]] = {}


class Rollback(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """`POST /v1/policies/{id}/rollback`: make version `to`, or the previous one, live again.

    `generation` is the live generation that the caller saw, so that a repeated request rolls back
    once. `why` is stored as the reason of the pin.
    """

    generation: Annotated[int, Meta(ge=1, le=2**53)]
    to: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    why: Annotated[str, Meta(max_length=500)] = ""


class Login(Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /login`: a token of the collector, from a browser."""

    token: str

    def __repr__(self) -> str:
        return "Login()"


class Resume(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """`POST /v1/policies/{id}/resume`: end the pin of a rollback. A repetition changes nothing."""


class Erase(Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/erase`: keyed hashes (storage.declarations.tombstones) of episodes and tags."""

    tombstones: list[Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]]


class Erased(Struct, kw_only=True):
    """What was erased of a journal: tombstones added, open episodes ended, rows rewritten."""

    tombstones: int
    ended: int
    rows: int


class NowLive(Struct, omit_defaults=True, kw_only=True):
    """The live version. `served`: the collector that replies serves it; `why` says why not."""

    version: int
    generation: int
    served: bool = True
    why: str | None = None


class Serving(Struct, kw_only=True):
    """`GET /v1/policies/{id}/served`: the live version, and the version of each collector.

    `pinned` is `{by, when, why}` while a rollback holds. `restored` is a text if the weights were
    restored from a copy older than the last publication. `collectors` are the documents under
    `served/`.
    """

    live: NowLive | None
    pinned: dict[str, Any] | None
    restored: str | None
    collectors: list[dict[str, Any]]


class Versions(Struct, kw_only=True):
    """The published versions of a policy: their stored manifests, by number.

    `next` is the number of the next version.
    """

    live: NowLive | None
    next: int
    versions: list[dict[str, Any]]

    def __repr__(self) -> str:
        numbers = [one.get("version") for one in self.versions]
        return f"Versions(live={self.live}, next={self.next}, versions={numbers})"


class LedgerPlan(Struct, kw_only=True):
    """Ordinals `first` to `last` of a plan without a recorded shard; `steps` is their number."""

    plan_id: int
    stream: str
    first: int
    last: int
    steps: int


class LedgerRecord(Struct, kw_only=True):
    """A shard as the journal recorded it."""

    plan_id: int
    stream: str
    first: int
    last: int
    name: str
    digest: str
    rows: int
    nbytes: int


class JournalLedger(Struct, kw_only=True):
    """`GET /v1/ledger`: where every acknowledged step is, at one point in time.

    `accepted`, `waiting_steps`, `open_steps` and `open_episodes` count steps.
    """

    collector_id: str
    accepted: int
    waiting_steps: int
    open_steps: int
    open_episodes: dict[str, int]
    damage: list[str]
    plans: list[LedgerPlan] = []
    next_ordinals: dict[str, int] = {}  # of each stream, after its plans
    waiting_ordinals: dict[str, int] = {}  # after the parts that wait for a plan, too


class LedgerPage(Struct, kw_only=True):
    """`GET /v1/ledger/records`: a page of recorded shards; `last` is null on the last one.

    `damaged` counts the records read so far that do not match their checksums; pages lack them.
    """

    records: list[LedgerRecord]
    last: int | None
    damaged: int = 0


M = TypeVar("M")

_encode_json = msgspec.json.Encoder().encode
_encode_msgpack = msgspec.msgpack.Encoder().encode
_KINDS = [dict[str, Any], *(kind for kind in vars().values() if type(kind) is type(Start))]
# Built here, not at their first use: msgspec shows a type to all threads before it has read its
# fields, and a thread that decodes with such a half-built type ends the process (SIGSEGV).
_DECODERS: dict[str, dict[Any, Any]] = {
    MSGPACK: {kind: msgspec.msgpack.Decoder(kind) for kind in _KINDS},
    JSON: {kind: msgspec.json.Decoder(kind) for kind in _KINDS},
}


def decode(body: bytes, content_type: str, kind: type[M]) -> M:
    """Decode a request's body as a message of type `kind`.

    Raises Refusal: 415 for another content type, 400 for a body that is not JSON or msgpack, 422
    for one that does not match the message; the text says where.
    """
    decoders = _DECODERS.get(content_type)
    if decoders is None:
        raise Refusal(
            "unsupported_media", f"expected {JSON} or {MSGPACK}, got {content_type or 'nothing'!r}"
        )
    try:
        message: M = decoders[kind].decode(body)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `")
        if text.startswith(("Object contains unknown field", "Invalid value")):
            text += "; GET /openapi.json describes every message"
        raise Refusal("invalid", text, path.rstrip("`") or "$") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        name = "JSON" if content_type == JSON else "msgpack"
        half = ", or it contains half of a surrogate pair" if b"\\ud" in body.lower() else ""
        raise Refusal("malformed", f"expected {name}: {error}{half}", "$") from error
    return message


def require_shallow(info: Any) -> None:
    """Raise ValueError if lists and objects of an info are nested more than MAX_DEPTH deep."""
    level = [info]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"expected lists and objects nested at most {MAX_DEPTH} deep")


# The bytes that open a list or an object: in msgpack fixmap, fixarray, array 16 / 32, map 16 / 32.
_MSGPACK_CONTAINERS = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
_MSGPACK_LISTS = frozenset([*range(0x90, 0xA0), 0xDC, 0xDD])
_MSGPACK_RAW = frozenset([*range(0xA0, 0xC0), 0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB])
_LENGTH_BYTES = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_LEVELS = 6  # batch, events, event, value, part of it, {"dtype", "shape", "data"}
_PART_BYTES = {True: 256, False: 32}  # lists and objects of shorter parts are bounded as bytes

_list_parts = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_map_parts = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode


def count_containers(body: bytes, content_type: str, enough: int) -> int:
    """An upper bound of the number of lists and objects in a body; counting may stop at `enough`.

    Each takes some 70 bytes of memory once decoded, and only one byte of a msgpack body. The bound
    includes brackets in the strings of JSON, and bytes of short msgpack values that look like the
    beginning of a list or object; it excludes the content of long msgpack strings and raw values.
    """
    if content_type == JSON:
        return body.count(b"[") + body.count(b"{")
    return _containers(body, enough, _LEVELS)


def _containers(value: bytes | msgspec.Raw, enough: int, levels: int) -> int:
    """The bound for a msgpack value; one with long parts is examined, up to `levels` deep."""
    view = memoryview(value)
    if not view or view[0] in _MSGPACK_RAW:
        return 0
    parts = _parts(value, view) if levels else None
    if parts is None:
        return _openings(bytes(view))
    total = 1
    for part in parts:
        total += _containers(part, enough, levels - 1)
        if total > enough:
            break
    return total


def _parts(value: bytes | msgspec.Raw, view: memoryview) -> Iterable[msgspec.Raw] | None:
    """The values of a list or an object; None for another value, or for many short parts."""
    kind = view[0]
    if kind not in _MSGPACK_CONTAINERS:
        return None
    is_list = kind in _MSGPACK_LISTS
    after = _LENGTH_BYTES.get(kind, 0)
    number = int.from_bytes(view[1 : 1 + after]) if after else kind & 0x0F
    if number * _PART_BYTES[is_list] > len(view):
        return None
    try:
        return _list_parts(value) if is_list else _map_parts(value).values()
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def _openings(body: bytes) -> int:
    return len(body) - len(body.translate(None, _MSGPACK_CONTAINERS))


def encode(message: Any, content_type: str) -> bytes:
    """Encode a message as JSON (bytes become base64) or msgpack."""
    return _encode_msgpack(message) if content_type == MSGPACK else _encode_json(message)
