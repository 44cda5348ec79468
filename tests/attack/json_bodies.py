"""Hostile JSON in every field of every message, and around it."""

from __future__ import annotations

import json
from urllib.parse import quote

from tests.attack.attacked_collector import Arena, Case, arena
from tests.attack.hostile_values import (
    OPEN,
    event_bodies,
    json_bodies,
    message_routes,
    path_of,
    whole_of_lists,
)
from tests.faults.scenario import Scenario, Trial, Verdict

AT_ONCE = 4
MAX_PEAK_MB = 128.0  # bodies of 8 MB, what is decoded of one, and half a million lists in it
IDS = (
    "../../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "\x00",
    "a\nb\r\nSet-Cookie: x",
    "%",
    "%zz",
    "\u202e\u2028",
    "😀" * 200,
    "CON",
    ".",
    "..",
    "'; DROP TABLE rows; --",
    "${jndi:ldap://x}",
    "{{7*7}}",
    "x" * 257,
    "x" * 20_000,
)
WHOLE = {
    "nothing": b"",
    "blanks": b" \n\t ",
    "a mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"events":[]}'.encode("utf-16"),
    "two documents": b"{}{}",
    "trailing comma": b'{"events":[],}',
    "a comment": b'{"events":[]/* x */}',
    "the same key twice": b'{"events":[],"events":[{"type":"end","episode_id":"x"}]}',
    "an unknown key": b'{"events":[],"__proto__":{}}',
    "an unknown kind": b'{"events":[{"type":"exec"}]}',
    "a kind that is no text": b'{"events":[{"type":{}}]}',
    "10,001 events": b'{"events":[' + b'{"type":"end"},' * 10_000 + b'{"type":"end"}]}',
    "10,000 unknown episodes": b'{"events":['
    + b",".join(b'{"type":"end","episode_id":"n%d"}' % n for n in range(10_000))
    + b"]}",
    "7 MB of numbers": b'{"events":[' + b"0.1," * 1_750_000 + b"0]}",
    "2,000,000 empty lists": b'{"events":[' + b"[]," * 2_000_000 + b"[]]}",
    "9 MB": b" " * 9_000_000,
}
TYPES = (
    "",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/json; charset=utf-16",
    "application/msgpack",
    "application/x-python-pickle",
    "application/octet-stream",
    "a" * 5_000,
)


def cases() -> list[Case]:
    """Every case, named."""
    found = [
        Case(f"{route.path}: {label}", "POST", path_of(route), body, allowed=(503,))
        for route in message_routes()
        for label, body in json_bodies(route.body)
    ]
    found += [Case(label, "POST", "/v1/events", body) for label, body in event_bodies(packed=False)]
    found += [Case(f"whole: {label}", "POST", "/v1/events", body) for label, body in WHOLE.items()]
    for name in IDS:
        text = json.dumps({"episode_id": name}).encode()
        found.append(Case(f"id {name!r:.40}", "POST", "/v1/episodes", text))
        for path in (f"/v1/episodes/{quote(name, safe='')}", f"/v1/policies/{quote(name)}/weights"):
            found.append(Case(f"path {path:.40}", "GET", path))
    for kind in TYPES:
        headers = {"content-type": kind}
        found.append(Case(f"type {kind:.30}", "POST", "/v1/events", b"{}", headers))
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW"):
        for path in ("/v1/events", f"/v1/episodes/{OPEN}", "/metrics", "/nowhere", "/v1/../v1"):
            found.append(Case(f"{method} {path}", method, path))
    return found


def open_episode(place: Arena) -> None:
    """An episode that the cases may try to break."""
    place.collector.post("/v1/episodes", {"episode_id": OPEN})
    step = {"obs": [0.1, 0.2, 0.3, 0.4], "action": 0}
    place.collector.post(f"/v1/episodes/{OPEN}/log_action", step)


def in_random_order(trial: Trial, every: list[Case], largest: Case) -> Verdict:
    """As many cases as the trial has time for, against an episode that they may break.

    Then the largest bodies, several at once. The momentary peak of memory is checked as well.
    """
    with arena(trial) as place:
        open_episode(place)
        place.random.shuffle(every)
        place.rounds(every[: trial.size], trial)
        place.at_once([largest] * AT_ONCE)
        if place.alive:
            peak = place.peak()
            place.verdict.counts["peak_mb"] = peak
            place.verdict.require(peak <= MAX_PEAK_MB, "peak", f"{peak:.0f} MB for a moment")
    return place.verdict


def run(trial: Trial) -> Verdict:
    body = whole_of_lists(packed=False)
    return in_random_order(trial, cases(), Case("whole of lists", "POST", "/v1/events", body))


SCENARIO = Scenario(
    name="json_bodies",
    law="hostile JSON is refused by name; nobody else notices",
    unit="cases",
    quick=600,
    long=100_000,
    planted=600,
    run=run,
)
