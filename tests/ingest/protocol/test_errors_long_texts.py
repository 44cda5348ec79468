"""A refusal shortens the input that it repeats in answers, logs and the journal."""

from __future__ import annotations

import json

import pytest

from tests.collector_process import CollectorProcess, declare
from tests.faults.slow_writer import resident

LONG = "x" * 1_000_000
ENOUGH = 4_096

EVENTS = {
    "a key": {"type": "log_action", "obs": {LONG: 1}, "action": 1},
    "a key of the action": {"type": "log_action", "obs": [0.0] * 4, "action": {LONG: 1}},
    "a dtype": {
        "type": "log_action",
        "obs": {"dtype": LONG, "shape": [4], "data": ""},
        "action": 1,
    },
    "a shape": {
        "type": "log_action",
        "obs": {"dtype": "float32", "shape": [[LONG]], "data": ""},
        "action": 1,
    },
    "a list": {"type": "log_action", "obs": [LONG], "action": 1},
    "an end": {"type": "end", "obs": {LONG: 1}},
}


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The collector's log."""
    return tmp_path_factory.mktemp("told") / "log"


@pytest.fixture(scope="module")
def collector(tmp_path_factory, log):
    root = tmp_path_factory.mktemp("root")
    declare(root)
    with CollectorProcess(root, log=log) as process:
        yield process
        assert process.stop() == 0


@pytest.mark.parametrize("name", EVENTS)
def test_an_episode_that_breaks_on_a_long_text(collector, log, name):
    """The answer, cause and log line of the broken episode are short, and the journal has no copy
    of the text for any track."""
    instance = collector.post("/v1/instances", {})[1]["instance"]
    agents = [f"agent {number}" for number in range(20)]
    starts = [
        {"type": "start", "episode_id": name, "agent_id": agent, "start": number}
        for number, agent in enumerate(agents)
    ]
    begun = collector.post("/v1/events", {"instance": instance, "events": starts})
    assert begun == (200, {"durable": True, "accepted": 20})
    before = journal_bytes(collector)
    bad = {**EVENTS[name], "episode_id": name, "agent_id": agents[0], "seq": 1}
    status, reply = collector.post("/v1/events", {"instance": instance, "events": [bad]})
    assert (status, reply["refused"][0]["error"]["code"]) == (200, "invalid")
    assert len(json.dumps(reply)) < ENOUGH
    known = collector.get(f"/v1/episodes/{name}")[1]
    assert known["agents"][agents[0]]["state"] == "broken"
    assert len(known["agents"][agents[0]]["cause"]) < ENOUGH
    assert max(map(len, log.read_text().splitlines())) < ENOUGH
    assert journal_bytes(collector) - before < len(LONG)


@pytest.mark.parametrize(
    "body",
    [
        {"events": [], LONG: 1},
        {"events": [{"type": LONG}]},
        {"events": [{"type": "start", "episode_id": LONG, "start": 0}]},
        {"events": [{"type": "start", "episode_id": "one", "start": 0, "tags": {LONG: LONG}}]},
    ],
)
def test_a_request_that_is_refused_for_a_long_text(collector, body):
    instance = collector.post("/v1/instances", {})[1]["instance"]
    status, reply = collector.post("/v1/events", {"instance": instance, **body})
    assert status == 422 or reply["refused"]
    assert len(json.dumps(reply)) < ENOUGH


def test_what_was_refused_is_not_kept(collector):
    """Fifteen such requests leave no garbage that only a full collection would free."""
    instance = collector.post("/v1/instances", {})[1]["instance"]
    body = {"instance": instance, "events": [{"type": LONG}]}
    assert collector.post("/v1/events", body)[0] == 422
    before = resident(collector.process.pid)
    for _ in range(15):
        assert collector.post("/v1/events", body)[0] == 422
    assert resident(collector.process.pid) - before < 6 * len(LONG)


def journal_bytes(collector: CollectorProcess) -> int:
    return sum(path.stat().st_size for path in (collector.root / "journal").rglob("*"))
