"""Texts of megabytes wherever a message may have one, sent by the episode's owner.

The error of an event is returned, logged, journaled and stored for every agent of its episode: none
of these may repeat a long input.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ingest.protocol import messages as wire
from ingest.protocol.messages import JSON, MSGPACK
from tests.attack.attacked_collector import Arena, Case, arena
from tests.attack.hostile_values import good
from tests.faults.scenario import Scenario, Trial, Verdict

AGENTS = 60
ENOUGH = 4_096
"""Bytes of an answer for each event that it refuses, of a track's state, of a line of the log."""
MAX_JOURNAL_MB = 16.0
"""By how much the journal's files may grow beside bodies that were taken, each of which may lie in
its log and in its database."""
TOO_MUCH_MB = 500.0  # after growth by this much, the attack has succeeded


class Long(NamedTuple):
    """One event with a long text, in one of the encodings, in an episode of so many agents."""

    name: str
    event: dict[str, Any]
    kind: str
    agents: int


def long_events(long: str) -> dict[str, dict[str, Any]]:
    """name -> event: keys, values, names of fields, kinds, ids."""
    step = {"type": "log_action", **good(wire.LogAction)}
    start, end, array = {"type": "start"}, {"type": "end"}, {"dtype": "float32", "shape": [4]}
    reward = {"type": "log_returns", "reward": 1.0}
    deep: Any = 1
    for _ in range(2 * wire.MAX_DEPTH):
        deep = [deep]
    return {
        "a key of an obs": step | {"obs": {long: 1}},
        "an obs": step | {"obs": long},
        "an item of an obs": step | {"obs": [long]},
        "a dtype": step | {"obs": array | {"dtype": long, "data": ""}},
        "a shape": step | {"obs": array | {"shape": [[long]], "data": ""}},
        "data": step | {"obs": array | {"data": long}},
        "a key beside data": step | {"obs": array | {"data": "", long: 1}},
        "a key of an action": step | {"action": {long: 1}},
        "an action": step | {"action": long},
        "a key of an info": step | {"info": {long: 1}},
        "a key of an info that is too deep": step | {"info": {long: deep}},
        "a key of a reward's info": reward | {"info": {long: deep}},
        "a key of the last obs": end | {"obs": {long: 1}},
        "a key of tags": start | {"tags": {long: ""}},
        "a tag": start | {"tags": {"a": long}},
        "a field": step | {long: 1},
        "a field of a start": start | {long: 1},
        "a kind": step | {"type": long},
        "an agent": step | {"agent_id": long},
        "a new agent": start | {"agent_id": long},
        "an episode": step | {"episode_id": long},
        "a policy": start | {"policy_id": long},
        "an episode that goes on": start | {"continues": long},
        "a reward's key": reward | {"step": 0, "reward_id": long},
    }


def cases(characters: int) -> list[Long]:
    return [
        Long(f"{name}, {kind.rpartition('/')[2]}, {agents} agents", event, kind, agents)
        for (name, event), kind, agents in itertools.product(
            long_events("x" * characters).items(), (JSON, MSGPACK), (1, AGENTS)
        )
    ]


def send(place: Arena, label: str, kind: str, body: Any) -> tuple[int, Any]:
    """Send one message; return its answer, which has to be short per refused event."""
    module = msgspec.json if kind == JSON else msgspec.msgpack
    data = module.encode(body)
    status, heard = place.ask(Case(label, "POST", "/v1/events", data, {"content-type": kind}))
    if not status:
        return status, {}
    place.verdict.count(f"answers_{status}")
    refusals = (msgspec.json if status >= 400 else module).decode(heard).get("refused", [])
    place.verdict.require(
        len(heard) <= ENOUGH * max(1, len(refusals)), "long", f"{label}: {len(heard)} bytes"
    )
    if status < 300 and not refusals:
        place.verdict.count("taken_mb", len(data) / 1e6)
    return status, refusals


def attack(place: Arena, number: int, case: Long) -> None:
    """A new episode, the event in it, the episode's state, and one more event."""
    own = f"long-{number}"
    instance = place.collector.post("/v1/instances", {})[1]["instance"]
    named = [{"agent_id": f"agent {at}"} if case.agents > 1 else {} for at in range(case.agents)]
    starts: list[dict[str, Any]] = [
        {"type": "start", "episode_id": own, "start": at, **name} for at, name in enumerate(named)
    ]
    event = {"episode_id": own, **named[0], "seq": 1, **case.event}
    if case.agents > 1 and case.event["type"] == "log_action":
        event["env_t"] = 0  # otherwise it would be refused for that reason
    if case.event["type"] == "start":  # replaces our last event
        event = {**starts.pop(), **case.event}
    if case.agents > 1:
        send(place, "the agents' starts", case.kind, {"instance": instance, "events": starts})
        starts = []
    events = [*starts, event]
    send(place, case.name, case.kind, {"instance": instance, "events": events})
    _, heard = place.ask(Case(f"state after {case.name}", "GET", f"/v1/episodes/{own}"))
    fine = len(heard) <= ENOUGH * case.agents
    place.verdict.require(fine, "long", f"state after {case.name}: {len(heard)} bytes")
    last = {"type": "end", "episode_id": own, **named[0]}
    send(place, f"an end after {case.name}", case.kind, {"instance": instance, "events": [last]})
    grown = journal_mb(place.collector.root)
    place.verdict.counts["journal_mb"] = max(place.verdict.counts.get("journal_mb", 0.0), grown)


def journal_mb(root: Path) -> float:
    return sum(path.stat().st_size for path in (root / "journal").rglob("*")) / 1e6


def run(trial: Trial) -> Verdict:
    every = cases(trial.size)
    with arena(trial) as place:
        verdict = place.verdict
        place.random.shuffle(every)
        numbers = itertools.count()
        attack(place, next(numbers), every[0])  # warm-up
        place.begin()
        before = journal_mb(place.collector.root)

        def one(case: Long) -> None:
            if place.alive and place.growth() < TOO_MUCH_MB and not trial.is_caught(verdict):
                attack(place, next(numbers), case)
                verdict.count("cases")

        place.windows(every, trial, one)
        grown = verdict.counts["journal_mb"] = verdict.counts["journal_mb"] - before
        most = 2 * verdict.counts.get("taken_mb", 0.0) + MAX_JOURNAL_MB
        verdict.require(grown <= most, "journal", f"{grown:.0f} MB where {most:.0f} were expected")
        with (trial.folder / "log").open("rb") as log:
            longest = max(map(len, log), default=0)
        verdict.require(longest <= ENOUGH, "long", f"a line of {longest} bytes in the log")
    return verdict


SCENARIO = Scenario(
    name="long_texts",
    law="nothing repeats at length what came: no answer, no log, no journal, no memory",
    unit="characters",
    quick=1_000_000,
    long=7_000_000,
    planted=1_000_000,
    run=run,
)
