"""Hostile msgpack in every field of every message: false lengths, bombs, extensions."""

from __future__ import annotations

from ingest.protocol.messages import MSGPACK
from tests.attack.attacked_collector import Case
from tests.attack.hostile_values import (
    event_bodies,
    message_routes,
    msgpack_bodies,
    path_of,
    whole_of_lists,
)
from tests.attack.json_bodies import in_random_order
from tests.faults.scenario import Scenario, Trial, Verdict

HEADERS = {"content-type": MSGPACK}


def cases() -> list[Case]:
    """Every case, named."""
    found = [
        Case(f"{route.path}: {label}", "POST", path_of(route), body, HEADERS, allowed=(503,))
        for route in message_routes()
        for label, body in msgpack_bodies(route.body)
    ]
    found += [
        Case(label, "POST", "/v1/events", body, HEADERS)
        for label, body in event_bodies(packed=True)
    ]
    return found


def run(trial: Trial) -> Verdict:
    body = whole_of_lists(packed=True)
    largest = Case("whole of lists", "POST", "/v1/events", body, HEADERS)
    return in_random_order(trial, cases(), largest)


SCENARIO = Scenario(
    name="msgpack_bodies",
    law="hostile msgpack is refused by name; nobody else notices",
    unit="cases",
    quick=600,
    long=100_000,
    planted=600,
    run=run,
)
