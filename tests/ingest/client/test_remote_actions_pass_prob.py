"""`pass_prob` of every kind of step; newer fields are only sent to collectors that list them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace import PolicyClient, PolicyDeclaration, parse_space
from ingest.protocol import messages as wire
from storage.declarations.policy_files import save_declaration
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.faults.decisions import ACTIONS, publish
from tests.ingest.scripted_collector import ScriptedCollector

OBS = [0.0] * 4


def posted(scripted: ScriptedCollector) -> list[dict[str, Any]]:
    """All messages of the requests so far, as they were sent."""
    found = []
    for path, _, body in scripted.requests:
        if path in ("/v1/events", "/v1/actions"):
            document = msgspec.msgpack.decode(body)
            found += document.get("events", []) + document.get("actions", [])
    return found


def test_every_kind_of_step_keeps_its_pass_prob(tmp_path: Path) -> None:
    """Logged and decided locally or remotely: the value given at the start, or 1 without one."""
    declare(tmp_path, action=f"discrete:{ACTIONS}")
    publish(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        for mode in ("local", "remote"):
            with PolicyClient(collector.address, mode) as client:
                for pass_prob in (0.25, 1.0):
                    name = client.start_episode(f"{mode}-{pass_prob}", pass_prob=pass_prob)
                    client.get_action(name, OBS)
                    client.log_action(name, OBS, 1)
                    client.get_action(name, OBS)
                    client.end_episode(name)
                client.log_step(OBS, 1, 1.0, episode_id=f"{mode}-step", pass_prob=0.5)
        assert collector.stop() == 0
    found: dict[str, list[float]] = {}
    for row in shard_rows(tmp_path):
        found.setdefault(row["eps_id"], []).append(row["pass_prob"])
    for mode in ("local", "remote"):
        assert found[f"{mode}-0.25"] == [0.25] * 3
        assert found[f"{mode}-1.0"] == [1.0] * 3
        assert found[f"{mode}-step"] == [0.5]


def test_each_agent_of_an_episode_has_its_pass_prob(tmp_path: Path) -> None:
    """Tracks carry the value given at the start of their episode."""
    declare(tmp_path, action=f"discrete:{ACTIONS}")
    publish(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        with PolicyClient(collector.address, "remote") as client:
            name = client.start_episode(policy_id={"a": "default", "b": "default"}, pass_prob=0.5)
            client.get_action(name, {"a": OBS, "b": OBS})
            client.log_action(name, {"a": OBS}, {"a": 1})
            client.end_episode(name)
        assert collector.stop() == 0
    assert [row["pass_prob"] for row in shard_rows(tmp_path)] == [0.5] * 3


def test_a_decision_that_a_killed_collector_lost_keeps_its_pass_prob(tmp_path: Path) -> None:
    """The client repeats the whole decision."""
    declare(tmp_path, action=f"discrete:{ACTIONS}")
    publish(tmp_path)
    with (
        CollectorProcess(tmp_path) as collector,
        PolicyClient(collector.address, "remote") as client,
    ):
        name = client.start_episode(pass_prob=0.5)
        client.get_action(name, OBS)
        collector.kill()
        collector.restart()
        client.log_returns(name, 1.0)
        client.end_episode(name)
        client.flush(60)
        collector.settle(1)
        assert collector.stop() == 0
    assert [row["pass_prob"] for row in shard_rows(tmp_path)] == [0.5]


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5, float("nan"), True, "0.5"])
def test_a_pass_prob_that_is_no_probability_is_refused(tmp_path: Path, value: Any) -> None:
    """The client refuses it in the call, the collector by the field's name."""
    with ScriptedCollector() as scripted, PolicyClient(scripted.address) as client:
        with pytest.raises(ValueError, match=r"pass_prob: expected a number in \(0, 1\]"):
            client.start_episode(pass_prob=value)
        with pytest.raises(ValueError, match=r"pass_prob: expected a number in \(0, 1\]"):
            client.log_step([0.0, 0.0], 1, 1.0, pass_prob=value)


def test_the_collector_refuses_a_decision_with_a_wrong_pass_prob(tmp_path: Path) -> None:
    """The error names the field, as for a logged action."""
    declare(tmp_path)
    decision = {"type": "decision", "obs": OBS, "action": 1, "action_logp": -1.0}
    with CollectorProcess(tmp_path) as collector:
        for value, accepted in ((0.0, 0), (1.5, 0), (0.5, 1)):
            name = f"e-{value}"
            collector.post("/v1/episodes", {"episode_id": name})
            event = {**decision, "episode_id": name, "policy_version": 1, "pass_prob": value}
            answer = collector.post("/v1/events", {"events": [event]})[1]
            assert answer["accepted"] == accepted
            for item in answer.get("refused", []):
                assert item["error"]["path"] == "$.events[0].pass_prob"


def test_a_request_for_an_action_has_its_pass_prob() -> None:
    with ScriptedCollector() as scripted, PolicyClient(scripted.address, "remote") as client:
        name = client.start_episode(pass_prob=0.5)
        client.get_action(name, [0.0, 0.0])
        client.flush()
        sent = posted(scripted)
    assert [e["pass_prob"] for e in sent if e["type"] == "get_action"] == [0.5]


def test_the_spec_lists_the_fields_that_clients_ask_for(tmp_path: Path) -> None:
    """Clients of release 0.1.0 send them only to a collector that does. Each is a field of a
    message, and its default means what held before it existed; `reward_range` belongs to the
    policy."""
    save_declaration(
        tmp_path,
        PolicyDeclaration(
            observation=parse_space("box:4"),
            action=parse_space("discrete:2"),
            reward_range=(-1, 2.5),
        ),
    )
    with CollectorProcess(tmp_path) as collector:
        spec = collector.get("/v1/spec")[1]
    assert spec["fields"] == [*wire.EARLIER_FIELDS, *wire.FIELDS]
    assert spec["policies"]["default"]["reward_range"] == [-1.0, 2.5]
    structs = {
        wire.Start: "start",
        wire.LogAction: "log_action",
        wire.Decision: "decision",
        wire.GetAction: "get_action",
        wire.End: "end",
        wire.Batch: "batch",
        wire.ActionBatch: "actions",
    }
    for field in set(spec["fields"]) - {"weights.canary"}:  # not sent by any client
        message, _, name = field.partition(".")
        (found,) = [
            one
            for struct, tag in structs.items()
            if tag == message
            for one in msgspec.structs.fields(struct)
            if one.name == name
        ]
        assert not found.required
    assert json.loads((tmp_path / "policies/default.json").read_text())["reward_range"] == [-1, 2.5]
    assert np.isfinite(spec["policies"]["default"]["reward_range"]).all()
