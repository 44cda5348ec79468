"""Recovery of a collector's state from its journal, and how the state is stored there.

The journal's key-value state has what must outlive the rows that it came from: ended episodes, the
cuts of open ones, the start numbers of client instances, the count of accepted steps. `recover`
combines it with the rows that still exist, and returns the assembler as of the last commit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import msgspec

from ingest.episodes.assembler import EpisodeAssembler
from ingest.episodes.client_instances import Instance
from ingest.episodes.idempotency import STATE, KeyBook
from ingest.episodes.journal_events import Keyed, Receipt, Stored, decode_row, encode_event
from ingest.episodes.open_episode import Carry
from ingest.episodes.sealed_parts import Finished, Limits, Sealed
from storage.declarations.declaration import PolicyDeclaration
from storage.errors import JournalBehind
from storage.experience.range_set import RangeSet
from storage.journal.records import DamageReport, Journal, Plan

CARRY, COUNTERS, DONE, ERASED, FINISHED, INSTANCE, POLICY, TOTALS = (
    "carry:",
    "counters",
    "done",
    "erased:",
    "finished:",
    "inst:",
    "pol:",
    "totals",
)

_LOST = {
    TOTALS: "the counts of accepted events are missing ({} entry)",
    DONE: "the list of ended episodes is missing ({} entry)",
    COUNTERS: "the counters of episodes and client instances are missing ({} entry)",
    FINISHED: "{} entries with the ids of ended episodes are missing",
    STATE: "{} entries with Idempotency-Keys are missing",
    INSTANCE: "{} client instances are missing",
    CARRY: "{} cuts of open episodes are missing: their steps may be sealed again, or lost",
}
"""The counted entries of the state by the prefix of their keys, and the texts if some are lost."""

_MARKED = (
    "the journal marks parts that are in shards already, as release 0.1.0 did after a restore: run "
    "`headrace adopt` with this root"
)

encode_state = msgspec.msgpack.Encoder().encode
decode_finished = msgspec.msgpack.Decoder(list[Finished]).decode
decode_marks = msgspec.msgpack.Decoder(list[str]).decode
decode_carry = msgspec.msgpack.Decoder(Carry).decode
_decode_parts = msgspec.msgpack.Decoder(list[tuple[int, int]]).decode


class Totals(msgspec.Struct):
    """Totals of all collectors on this journal, as of the latest recorded shard."""

    steps: int = 0  # accepted
    rows: int = 0  # written to shards
    parts: int = 0
    shards: int = 0
    restored: int = 0  # steps of a backup that were found in shards
    episodes: int = 0  # ended and recorded
    empty: int = 0  # of these, without steps
    kept: dict[str, int] = msgspec.field(default_factory=dict)  # entries of the state, by prefix


_decode_totals = msgspec.json.Decoder(Totals).decode


class Recovered(msgspec.Struct):
    """The result of `recover`: the assembler as of the last commit, and parts without a shard."""

    assembler: EpisodeAssembler
    planned: list[tuple[Plan, list[Sealed]]] = msgspec.field(default_factory=list)
    waiting: list[Sealed] = msgspec.field(default_factory=list)
    idle_rows: list[int] = msgspec.field(default_factory=list)  # needed by nothing
    finished: list[tuple[str, int]] = msgspec.field(default_factory=list)  # (state key, episodes)
    carried: list[str] = msgspec.field(default_factory=list)  # state keys of the cuts
    episode_ordinals: dict[int, dict[str, int]] = msgspec.field(default_factory=dict)  # see Sealing
    totals: Totals = msgspec.field(default_factory=Totals)
    lost: dict[str, int] = msgspec.field(default_factory=dict)  # missing entries by prefix
    next_plan: int = 0
    collector_id: str = ""
    last_row: int = 0
    last_received: int = 0  # when the latest row was received; 0 without rows
    ordinals: dict[str, int] = msgspec.field(default_factory=dict)
    damage: DamageReport = msgspec.field(default_factory=DamageReport)
    keys: KeyBook = msgspec.field(default_factory=KeyBook)
    tombstones: list[str] = msgspec.field(default_factory=list)  # marks of what was erased


def entries_of(blob: bytes) -> list[int]:
    """The numbers of the entries of a plan's blob."""
    return [number for _, number in _decode_parts(blob)]


def plan_blob(parts: Sequence[Sealed]) -> bytes:
    """A plan's blob: its parts, in the order of their ordinals."""
    return encode_state([(sealed.key, sealed.number) for sealed in parts])


def recover(
    journal: Journal,
    policies: Mapping[str, PolicyDeclaration],
    limits: Limits | None = None,
    now: float | None = None,
    *,
    marked: set[tuple[int, int]] | None = None,
) -> Recovered:
    """Replay the journal. `policies` are the current declarations.

    `now` is the running time in seconds, by default the one stored in the journal. Timeouts start
    again at `now`; reward windows continue. Release 0.1.0 marked parts that are in shards already
    (`Stored`): their keys and numbers are added to `marked`. Without it they raise JournalBehind.
    """
    state = journal.state()
    past = [_declaration(blob) for key, blob in state.items() if key.startswith(POLICY)]
    assembler = EpisodeAssembler(policies, past=past, limits=limits)
    keys = KeyBook((limits or Limits()).keys)
    found = Recovered(assembler, next_plan=journal.next_plan_id(), keys=keys)
    found.totals = _decode_totals(state.get(TOTALS, b"{}"))
    found.lost = _lost(state, found.totals)
    _restore(found, state)
    steps, numbers = found.totals.steps, list[int]()
    for number, blob in journal.replay():
        row = decode_row(blob)
        numbers.append(number)
        steps = max(steps, row.steps)
        for event in row.events:
            if isinstance(event, Stored):
                if marked is None:
                    raise JournalBehind(_MARKED)
                marked.add((event.key, event.part))
                continue
            if isinstance(event, Keyed):
                found.keys.add(event)
                continue
            assembler.apply(
                event,
                encode_event(event),
                row=number,
                received=row.received,
                now=row.running,
            )
        assembler.running = max(assembler.running, row.running)
        found.last_received = max(found.last_received, row.received)
    for key in list(assembler.staged):  # their imports were killed; a repetition starts over
        assembler.drop_staged(key)
    found.idle_rows = [number for number in numbers if number not in assembler.needed]
    assembler.steps = steps
    assembler.resume(assembler.running if now is None else now)
    _match_plans(journal, assembler, found)
    found.collector_id = journal.collector_id
    found.last_row = journal.last_row
    found.ordinals = journal.streams()
    found.damage = journal.damage
    if found.lost:
        texts = tuple(_LOST[name].format(count) for name, count in found.lost.items())
        found.damage = msgspec.structs.replace(found.damage, lost_state=texts)
    return found


def _lost(state: Mapping[str, bytes], totals: Totals) -> dict[str, int]:
    """Missing entries of the state, by prefix: fewer than were counted when it was written.

    Checksums detect changed entries, but not missing ones.
    """
    found = {name: sum(key.startswith(name) for key in state) for name in _LOST}
    expected = totals.kept
    if TOTALS not in state and (found[DONE] or found[COUNTERS]):
        expected = {TOTALS: 1}
    lost = {name: expected.get(name, 0) - found[name] for name in _LOST if name in expected}
    return {name: count for name, count in lost.items() if count > 0}


def _restore(found: Recovered, state: Mapping[str, bytes]) -> None:
    """Restore the assembler from the key-value state, before rows are replayed."""
    assembler = found.assembler
    instances = [
        (key.removeprefix(INSTANCE), json.loads(blob))
        for key, blob in state.items()
        if key.startswith(INSTANCE)
    ]
    for name, known in sorted(instances, key=lambda pair: pair[1]["used"]):
        starts = RangeSet.from_json(known["starts"])
        instance = Instance(known["number"], known["name"], starts, owner=known["owner"])
        if known["receipt"]:
            content, rows = known["receipt"]
            instance.receipt = Receipt(name, bytes.fromhex(content), rows)
        assembler.instances.restore(name, instance)
    found.keys.restore((key, blob) for key, blob in state.items() if key.startswith(STATE))
    ended: list[Finished] = []
    for key in sorted(key for key in state if key.startswith(FINISHED)):
        episodes = decode_finished(state[key])
        found.finished.append((key, len(episodes)))
        ended += episodes
    for key, blob in state.items():
        found.tombstones += decode_marks(blob) if key.startswith(ERASED) else ()
    found.carried = [key for key in state if key.startswith(CARRY)]
    carries = [decode_carry(state[key]) for key in found.carried]
    for carry in carries:
        first = {carry.collector_id: carry.episode_ordinal} if carry.episode_ordinal >= 0 else {}
        found.episode_ordinals[carry.started.key] = first
    done = RangeSet.from_json(json.loads(state.get(DONE, b"[]")))
    assembler.restore(done, ended, carries)
    counters = json.loads(state.get(COUNTERS, b"{}"))
    assembler.instances.next_number = counters.get("instances", 0)
    assembler.anonymous_starts = counters.get("anonymous", 0)
    assembler.next_key = max(assembler.next_key, counters.get("keys", 0))
    assembler.running = counters.get("running", 0.0)


def _match_plans(journal: Journal, assembler: EpisodeAssembler, found: Recovered) -> None:
    """Assign the sealed parts to the open plans that name them; others wait for a plan.

    A part whose rows are damaged leaves a gap in its plan's ordinals.
    """
    sealed: dict[tuple[int, int], Sealed] = {
        (item.key, item.number): item for item in assembler.sealed
    }
    assembler.sealed = []
    for plan in journal.plans():
        names = _decode_parts(plan.blob)
        parts = [sealed.pop(name, Sealed(name[0], None, ())) for name in names]
        found.planned.append((plan, parts))
    found.waiting = list(sealed.values())


def _declaration(blob: bytes) -> PolicyDeclaration:
    return PolicyDeclaration.from_json(json.loads(blob), "journal")


def policies_state(policies: Mapping[str, PolicyDeclaration]) -> dict[str, bytes]:
    """The declarations as state entries, so that episodes can continue after a file changes."""
    return {
        f"{POLICY}{policy.policy_id}:{policy.schema_id}": json.dumps(policy.to_json()).encode()
        for policy in policies.values()
    }


def assembler_state(assembler: EpisodeAssembler, totals: Totals) -> dict[str, bytes]:
    """The state entries that change with a recorded shard: keys, totals, changed instances."""
    instances = assembler.instances
    counters = {
        "instances": instances.next_number,
        "anonymous": assembler.anonymous_starts,
        "keys": assembler.next_key,
        "running": assembler.running,
    }
    put = {
        DONE: json.dumps(assembler.done.to_json()).encode(),
        TOTALS: msgspec.json.encode(totals),
        COUNTERS: json.dumps(counters).encode(),
    }
    for name in instances.touched:
        known = instances.get(name)
        if known is not None:
            document = {
                "number": known.number,
                "name": known.name,
                "starts": known.starts.ranges(),
                "used": assembler.next_key,
                "owner": known.owner,
                "receipt": known.receipt and [known.receipt.digest.hex(), known.receipt.rows],
            }
            put[INSTANCE + name] = msgspec.json.encode(document)  # `json` is slow for many ranges
    instances.touched.clear()
    return put
