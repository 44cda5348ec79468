"""Wire protocol v1: what travels between clients and the collector.

Each message is one msgspec struct: the declaration is the schema, the validation and the encoding,
for JSON and for msgpack alike. Unknown fields are refused: a misspelt field must not lose data
silently. A field may be added to v1 only with a default.

Values (`obs`, `action`) are nested lists, numbers, strings and mappings, or
`{"dtype", "shape", "data"}`; in msgpack also the raw bytes of a value's canonical encoding
(storage.spaces.codec). Where a space declares names, a string is a name and an integer its code;
replies to get_action say names.

In a single call (`POST /v1/episodes/{id}/log_action`, ...) the path names the episode; in a batch
each event does.

`agent_id` names an agent of an episode that has several: each agent's events are a track of their
own, with its own start and sequence numbers (ingest.protocol.agent_names). `env_t` is then the step
of the environment that an action belongs to, the same number for agents that act together; it grows
from one action of an agent to its next. Without an `agent_id` the episode has one agent.

`decided` names the decision that the open step was acted with: an event that follows a get_action
repeats what its reply called `decision`.

`schema_id` says which declaration a client has encoded by. A start names it for its whole episode,
which is judged by that declaration; another event names it where its start could not. Without it
values are those of today's declaration.

Pure: bytes in, structs out.
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

MAX_EVENTS = 10_000
MAX_DEPTH = 32
"""Lists and objects within each other, in an info: what any reader of its JSON can take."""

Id: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
OptionalId: TypeAlias = Annotated[str, Meta(max_length=256)]
Micros: TypeAlias = Annotated[int, Meta(ge=-(2**62), le=2**62)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Agents: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Version: TypeAlias = Annotated[int, Meta(ge=-1, le=2**53)]
Cause: TypeAlias = Literal["client_dropped", "client_invalid"]


class Start(Struct, tag="start", forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Start an episode. `start` numbers the starts of one client instance, densely from 0.

    A number is one episode's for good. Gaps are allowed, up to 1,000 ranges of numbers in all.
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
    """An action that the caller chose, with the observation it was chosen on.

    `reward` and `info` are what `log_returns` said of this step before the event was sent; null:
    nothing.
    `replayed`: it comes from an import, not from the program that acted.
    """

    episode_id: OptionalId = ""
    seq: Count | None = None
    obs: Any
    action: Any
    action_logp: float | None = None
    action_prob: float | None = None
    policy_version: Version = -1
    pass_prob: float = 1.0
    reward: float | None = None
    info: dict[str, Any] | None = None
    ts: Micros | None = None
    replayed: bool = False
    decided: bytes | None = None
    agent_id: Id | None = None
    env_t: Count | None = None
    schema_id: Id | None = None


class Decision(
    Struct, tag="decision", forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """An action that a published policy chose: `get_action` in local mode, or a lost reply.

    `action_logp` is null where the action has no density: the mode of a continuous distribution.
    `answered`: the collector itself chose it in an answer to get_action, and the client acted on
    it; it takes the place of what a collector that has lost that answer would tell.
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
    pass_prob: float = 1.0
    schema_id: Id | None = None


class LogReturns(
    Struct, tag="log_returns", forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """A reward for the last action, or for step `step` with its own key `reward_id`."""

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
        """Whether its episode has to keep more for it than a sum."""
        return self.info is not None or self.step is not None


class End(Struct, tag="end", forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The end of an episode or of a track; the final observation may be absent.

    `agents`: the whole episode ends with this track, and had so many agents in all that acted.
    All ends that tell it tell the same number.
    `broken`: the episode, with all its tracks, is over as broken at its last step, because the
    client had no room for the next one, or because that did not fit.
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
    """Ask the live policy for an action on `obs`.

    `policy_id` is for a request that records nothing: whose policy acts.
    """

    episode_id: OptionalId = ""
    seq: Count | None = None
    obs: Any
    explore: bool = True
    ts: Micros | None = None
    decided: bytes | None = None
    agent_id: Id | None = None
    env_t: Count | None = None
    pass_prob: float = 1.0
    policy_id: Id | None = None
    schema_id: Id | None = None


FIELDS = (
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
"""Fields that came after the first release of this protocol, by message: `/v1/spec` lists them, and
a client sends one only to a collector that does. `weights.canary` is the collector's own."""

Event: TypeAlias = Start | LogAction | Decision | LogReturns | End


class Dropped(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What a client instance has not logged so far, for want of room."""

    episodes: Count = 0
    steps: Count = 0


class Batch(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """`POST /v1/events`: events of one client instance, in order.

    `dropped` are totals of the instance, so that a repetition counts once.
    """

    instance: Id | None = None
    dropped: Dropped | None = None
    events: Annotated[list[Event], Meta(max_length=MAX_EVENTS)]


class Named(Struct, kw_only=True):
    """The episode, or agent of one, that an event names which does not decode as one."""

    type: str
    episode_id: Id
    agent_id: Id | None = None


class LoneEvent(Struct, kw_only=True):
    """A Batch with an event alone, of which only the name counts."""

    instance: Id | None = None
    events: Annotated[list[Named], Meta(min_length=1, max_length=1)]


class ActionBatch(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """`POST /v1/actions`: pending events of the episodes, then the observations to act on.

    With `durable` the reply leaves when all of it is on disk. Without, it leaves at once: the
    caller numbers its events, keeps them and the decisions until `durable_seq` reaches them, and
    sends what a killed collector has lost again. `wait`: seconds that the caller waits at most for
    a newer version while its policy is held.

    Without `record` nothing is recorded, no event comes along, and the episodes need not be known:
    each answer has all that the caller needs to send the decision itself, once it acts on it.
    """

    instance: Id | None = None
    events: Annotated[list[Event], Meta(max_length=MAX_EVENTS)] = []
    actions: Annotated[list[GetAction], Meta(max_length=MAX_EVENTS)]
    durable: bool = True
    wait: Annotated[float, Meta(ge=0.0)] = 10.0
    record: bool = True


class Register(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """`POST /v1/instances`: a new client instance, or with `name` an import that may resume."""

    name: Id | None = None


class Registered(Struct, omit_defaults=True, kw_only=True):
    """The instance to name in batches, and the starts that are already known under it."""

    instance: str
    starts: list[tuple[int, int]] = []
    durable: bool = True  # left out when true


class StartReply(Struct, omit_defaults=True, kw_only=True):
    """The answer to the single call that starts an episode."""

    episode_id: str
    agent_id: str | None = None
    durable: bool = True  # left out when true


class ItemError(Struct, omit_defaults=True, kw_only=True):
    """Why item `index` of a batch was refused."""

    index: int
    error: dict[str, Any]

    @classmethod
    def of(cls, index: int, refusal: Refusal) -> ItemError:
        """The refusal of an event, with its place in the batch."""
        document = refusal.to_json()
        place = document.get("path")
        document["path"] = f"$.events[{index}]" + (f".{place}" if place else "")
        return cls(index=index, error=document)


class EventsReply(Struct, omit_defaults=True, kw_only=True):
    """The answer to a batch: everything not refused is on disk when `durable` is true.

    Of a batch `refused` names every refused event. Of an import it names refused episodes by their
    first refused row, a hundred at most; where there are more, `refused_count` says how many in
    all. `refused_by` counts all of an import's rows that do not
    fit, by column and reason. `hold` names policies whose live version has acted enough steps, and
    that version: clients wait for a newer one before they act on. `redeclared`: an episode began
    here by an earlier declaration of its policy; ask for today's before the next.
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
    """One action of the live policy, or the error of that item.

    In a reply that leaves at once: events of the episode up to `durable_seq` are on disk;
    `decision` names the decision, `stored` is the action and `action_dist_inputs` its distribution
    in canonical bytes, for the `decision` event that a lost answer needs. `hold`: the version acted
    with has its steps, and no newer one came in time.
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
    """The answer to an ActionBatch, item by item."""

    durable: bool
    actions: list[ActionReply]
    refused: list[ItemError] = []
    redeclared: bool = False  # as in EventsReply


class TrackState(Struct, omit_defaults=True, kw_only=True):
    """How far one agent of an episode is, in the words of EpisodeState."""

    state: str
    next_seq: int
    steps: int | None = None
    policy_id: str | None = None
    cause: str | None = None


class EpisodeState(Struct, omit_defaults=True, kw_only=True):
    """How far an episode is: `open` with its steps and policy, or how it ended and why.

    Of an episode of several agents, `agents` tells each one's track as far as it is remembered, and
    `state` is `open` as long as one of them is, or as others may join.
    """

    episode_id: str
    state: str
    next_seq: int = 0
    steps: int | None = None
    policy_id: str | None = None
    cause: str | None = None
    agents: dict[str, TrackState] | None = None


class ErrorBody(Struct, omit_defaults=True, kw_only=True):
    """Why a request was refused: a code, what was expected and what came, and where."""

    code: str
    message: str
    path: str | None = None
    episode_id: str | None = None
    expected_seq: int | None = None
    retry_after: float | None = None
    agent_id: str | None = None


class ErrorReply(Struct, kw_only=True):
    """The one shape of every error."""

    error: ErrorBody


class Publish(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """`POST /v1/policies/{id}/versions`: trained weights, to be live as version `version`.

    `weights` is a safetensors file, `sha256` the hex digest of its bytes, `spec` the policy's;
    `lineage` the ordinals trained on, by stream. The number must be the next one.
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
    """`POST /v1/policies/{id}/rollback`: back to version `to`, or to what was live before.

    `generation` is what the caller saw to be live: a request that is repeated rolls back once.
    `why` is for whoever asks what pins the policy.
    """

    generation: Annotated[int, Meta(ge=1, le=2**53)]
    to: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    why: Annotated[str, Meta(max_length=500)] = ""


class Resume(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """`POST /v1/policies/{id}/resume`: end what a rollback pinned. Repeated, it changes nothing."""


class NowLive(Struct, omit_defaults=True, kw_only=True):
    """What is live from here on. `served`: the collector that answers serves it; `why` not."""

    version: int
    generation: int
    served: bool = True
    why: str | None = None


class Serving(Struct, kw_only=True):
    """`GET /v1/policies/{id}/served`: what is live, and what each registered collector serves.

    `pinned` is `{by, when, why}` while a rollback holds, `restored` says that the weights are an
    older copy than what was published. `collectors` are the records under `served/`, as at rest.
    """

    live: NowLive | None
    pinned: dict[str, Any] | None
    restored: str | None
    collectors: list[dict[str, Any]]


class Versions(Struct, kw_only=True):
    """What is published of a policy: manifests as they are at rest, by number.

    `next` is the number that the next version gets.
    """

    live: NowLive | None
    next: int
    versions: list[dict[str, Any]]

    def __repr__(self) -> str:
        numbers = [one.get("version") for one in self.versions]
        return f"Versions(live={self.live}, next={self.next}, versions={numbers})"


class LedgerPlan(Struct, kw_only=True):
    """Ordinals that were given and have no recorded shard yet, and the steps behind them."""

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
    """`GET /v1/ledger`: where every acknowledged step is, at one moment. Counts are steps."""

    collector_id: str
    accepted: int
    waiting_steps: int
    open_steps: int
    open_episodes: dict[str, int]
    damage: list[str]
    plans: list[LedgerPlan] = []
    next_ordinals: dict[str, int] = {}  # of each stream, behind its plans
    waiting_ordinals: dict[str, int] = {}  # behind the parts that wait for a plan, too


class LedgerPage(Struct, kw_only=True):
    """`GET /v1/ledger/records`: a page of recorded shards; `last` is null on the last one."""

    records: list[LedgerRecord]
    last: int | None


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
    """The message of a body.

    Raises Refusal: 415 for another content type, 400 for a body that is not JSON or msgpack, 422
    for one that is but does not fit the message; the text says where.
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
        raise Refusal("invalid", text, path.rstrip("`") or "$") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        name = "JSON" if content_type == JSON else "msgpack"
        half = ", or holds half of a surrogate pair" if b"\\ud" in body.lower() else ""
        raise Refusal("malformed", f"expected {name}: {error}{half}", "$") from error
    return message


def require_shallow(info: Any) -> None:
    """Raise ValueError for an info with more than MAX_DEPTH lists and objects within each other."""
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
    raise ValueError(f"at most {MAX_DEPTH} lists and objects within each other")


# The bytes that open a list or an object: in msgpack fixmap, fixarray, array 16 / 32, map 16 / 32.
_MSGPACK_CONTAINERS = bytes([*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF])
_MSGPACK_LISTS = frozenset([*range(0x90, 0xA0), 0xDC, 0xDD])
_MSGPACK_RAW = frozenset([*range(0xA0, 0xC0), 0xC4, 0xC5, 0xC6, 0xD9, 0xDA, 0xDB])
_LENGTH_BYTES = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_LEVELS = 6  # batch, events, event, value, part of it, {"dtype", "shape", "data"}
_PART_BYTES = {True: 256, False: 32}  # lists and objects of shorter parts are not taken apart

_list_parts = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_map_parts = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode


def count_containers(body: bytes, content_type: str, enough: int) -> int:
    """At least how many lists and objects a body opens, exactly only up to `enough`.

    Each takes some 70 bytes of memory, and a msgpack body opens one with a single byte. Brackets in
    the strings of JSON count too, and so do bytes that look like an opening where msgpack has many
    short values; those within long raw values and strings of msgpack do not.
    """
    if content_type == JSON:
        return body.count(b"[") + body.count(b"{")
    return _containers(body, enough, _LEVELS)


def _containers(value: bytes | msgspec.Raw, enough: int, levels: int) -> int:
    """Containers of a msgpack value. One with long parts is taken apart, so many levels deep."""
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
    """A message as JSON (bytes become base64) or msgpack."""
    return _encode_msgpack(message) if content_type == MSGPACK else _encode_json(message)
