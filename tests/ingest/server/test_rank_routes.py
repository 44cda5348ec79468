"""Rank, reward and activate over a real collector: what they answer, and what shards then have."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from ingest.client.async_client import AsyncPolicyClient
from ingest.client.policy_client import PolicyClient
from ingest.protocol.errors import Refusal
from policy.inference.action_rule import ActionRule
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.reading.shard_reader import ShardReader
from storage.spaces.descriptors import Box, Dict, Discrete, MultiBinary
from tests.collector_process import CollectorProcess, shard_rows

MOST, NAMES = 6, ("price", "color=red", "color=*")
SPEC = PolicySpec(
    Dict(
        {
            "action_mask": MultiBinary((MOST,)),
            "candidates": Box((MOST, 3), ragged=True),
            "age": Box(()),
        }
    ),
    Discrete(MOST, 1),
    ModuleSpec(kind="scorer", hidden=()),
    action_rule=ActionRule("greedy", explore=0.3),
)
OFFERS = {"hat": {"price": 0.3, "color": "red"}, "tie": [0.9, 0, 1], "sock": {"color": "blue"}}
ACTIONS = [{"id": name, "features": given} for name, given in OFFERS.items()]
BODY = {"context": {"age": 31}, "actions": ACTIONS}


def declare(root: Path, policy_id: str = "default", **rules: Any) -> None:
    """A policy whose rewards may come within half an hour; a turned clock passes an hour."""
    declared = PolicyDeclaration(
        observation=SPEC.observation,
        action=SPEC.action,
        policy_id=policy_id,
        **{"reward_window": 1800.0, "seal_seconds": 0.2, "candidate_features": NAMES, **rules},
    )
    save_declaration(root, declared)


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    """With a version of the policy `served`, which likes a high price, and none of `default`."""
    root = tmp_path_factory.mktemp("root")
    declare(root)
    declare(root, "served", candidate_features=())
    declare(root, "windowless", reward_window=0.0)
    plain = {"observation": Box((1,)), "action": Discrete(2), "policy_id": "plain"}
    save_declaration(root, PolicyDeclaration(**plain, reward_window=1.0))  # type: ignore[arg-type]
    weights = {name: np.zeros_like(w) for name, w in Policy(SPEC).get_weights().items()}
    weights["pi.cross"][-1, 0] = 1.0
    store = WeightStore(root, "served")
    store.publish(store.add_candidate(weights, spec=SPEC.to_json(), metrics={}, lineage={}))
    with CollectorProcess(root) as process:
        yield process


def reward(process: CollectorProcess, name: str, amount: float, **more: Any) -> tuple[int, Any]:
    return process.post(f"/v1/reward/{name}", {"reward": amount, **more})


def code(answer: tuple[int, Any]) -> tuple[int, str]:
    return answer[0], answer[1]["error"]["code"]


def test_events_before_the_first_version(tmp_path: Path) -> None:
    """The first action that is not excluded is the baseline, the others are explored, and the
    stored propensities are the true ones. After a kill the same request has the same reply, rewards
    are added to what came before, events without any get the default reward, and an event that
    nobody activates is not read.
    """
    declare(tmp_path, reward_default=-0.5, spec=SPEC.to_json())
    names = [*(f"e{n}" for n in range(60)), "late", "never"]
    bodies = {
        name: {**BODY, "excluded": ["hat"], "event_id": name, "active": name[0] == "e"}
        for name in names
    }
    clicked, twice = {*names[::3]}, {*names[::2]}
    with CollectorProcess(tmp_path) as process:
        replies = {name: process.post("/v1/rank", body) for name, body in bodies.items()}
        for name in clicked:
            assert reward(process, name, 1.0, reward_id="click")[0] == 200
        process.kill()
        process.restart()
        for name, body in bodies.items():
            assert process.post("/v1/rank", body) == replies[name] == (201, replies[name][1])
        for name in twice:
            assert reward(process, name, 1.0, reward_id="click")[0] == 200
            assert reward(process, name, 0.25)[0] == 200
        for _ in range(2):
            assert process.post("/v1/activate/late")[0] == 200
        process.turn_clock()
        process.await_abandoned("never")
        process.settle(len(names))
        assert code(reward(process, "e0", 1.0)) == (409, "window_closed")
        assert code(process.post("/v1/activate/never")) == (409, "conflict")
        assert code(process.post("/v1/rank", bodies["e0"])) == (409, "completed")
    rows = {row["eps_id"]: row for row in shard_rows(tmp_path)}
    assert len(rows) == len(shard_rows(tmp_path)) == len(names)
    for name, (_, reply) in replies.items():
        row, info = rows[name], json.loads(rows[name]["infos"])["rank"]
        assert (info["item"], info["items"]) == (reply["reward_action_id"], [*OFFERS])
        assert row["actions"] == 1 + [*OFFERS].index(reply["reward_action_id"])
        shares = {one["id"]: one["probability"] for one in reply["ranking"]}
        assert shares == pytest.approx({"hat": 0.0, "tie": 0.85, "sock": 0.15})
        assert math.exp(row["action_logp"]) == pytest.approx(shares[reply["reward_action_id"]])
        earned = (name in clicked | twice) * 1.0 + (name in twice) * 0.25
        assert row["rewards"] == (earned or -0.5)
        assert row["ended"] == ("abandoned" if name == "never" else "terminated")
    explored = sum(reply["reward_action_id"] == "sock" for _, reply in replies.values())
    assert 0 < explored < 30
    names = ("eps_id",)
    with ShardReader(tmp_path, batch_size=len(rows) - 1, columns=names) as reader:
        assert {*reader.next()["eps_id"]} == rows.keys() - {"never"}


def test_the_live_version_ranks_as_its_rule_says(collector: CollectorProcess) -> None:
    """Greedily by price, with the floor spread over what is not excluded; the client's answer is
    the same again, and numbers of numpy are numbers."""
    rows = {"a": np.float32([0.1, 0, 0]), "b": [0.9, 0, 0], "c": [0.5, 0, 0]}
    with PolicyClient(collector.address, policy_id="served") as client:
        replies = [client.rank({"age": np.float32(3)}, rows, excluded=["b"]) for _ in range(60)]
        again = client.rank({"age": 3}, rows, excluded=["b"], event_id=replies[0].event_id)
    assert again == replies[0]
    for reply in replies:
        shares = {one.id: one.probability for one in reply.ranking}
        assert shares == pytest.approx({"a": 0.15, "b": 0.0, "c": 0.85})
        assert reply.reward_action_id == reply.ranking[0].id != reply.ranking[-1].id == "b"
        assert reply.policy_version == 1
    assert {reply.reward_action_id for reply in replies} == {"a", "c"}


def test_an_apprentice_and_slots(collector: CollectorProcess) -> None:
    """The caller's own choice is logged as its, beside the policy's probabilities; the slots of a
    slate have different items, each with its own reward."""
    rows = {"a": [0.1, 0, 0], "b": [0.9, 0, 0], "c": [0.5, 0, 0]}
    with PolicyClient(collector.address, policy_id="served") as client:
        told = client.rank({"age": 1}, rows, apprentice=True, action_prob=0.25, event_id="told")
        client.rank({"age": 1}, rows, apprentice=True, event_id="untold")
        slate = client.rank({}, rows, slots=[{"context": {"age": 2}}, {"context": {"age": 1}}])
        client.reward(slate.event_id, 2.0, slot=1)
        client.flush()
    assert told.reward_action_id == told.ranking[0].id == "a"
    assert [one.probability for one in told.ranking] == pytest.approx([0.1, 0.8, 0.1])
    chosen = [one.reward_action_id for one in slate.slots]
    assert len({*chosen}) == 2
    assert slate.reward_action_id == chosen[0]
    gone = next(one for one in slate.slots[1].ranking if one.id == chosen[0])
    assert gone.probability == 0.0
    assert code(reward(collector, slate.event_id, 1.0)) == (422, "invalid")
    assert code(reward(collector, slate.event_id, 1.0, slot=2)) == (422, "invalid")
    collector.turn_clock()
    assert collector.empty(60.0)
    stored: dict[str, list[dict[str, Any]]] = {}
    for row in shard_rows(collector.root):
        stored.setdefault(row["eps_id"], []).append(row)
    (own,), (unknown,) = stored["told"], stored["untold"]
    assert math.exp(own["action_logp"]) == pytest.approx(0.25)
    assert math.isnan(unknown["action_logp"])
    assert own["source"] == "logged"
    assert [row["rewards"] for row in stored[slate.event_id]] == [0.0, 2.0]


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "none": ({"actions": []}, "$.actions", "expected 1 to 6 actions, got 0"),
    "too many": (
        {"actions": [{"id": f"{n}", "features": [0, 0, 0]} for n in range(7)]},
        "$.actions",
        "expected 1 to 6 actions, got 7",
    ),
    "twice": ({"actions": ACTIONS * 2}, "$.actions[3].id", "expected different ids, got 'hat'"),
    "a narrow row": (
        {"actions": [{"id": "a", "features": [1, 2]}]},
        "$.actions[0].features",
        "expected 3 finite numbers, or an object of features by name, got",
    ),
    "a text in a row": (
        {"actions": [*ACTIONS, {"id": "a", "features": [1, 2, "3"]}]},
        "$.actions[3].features",
        "expected 3 finite numbers, or an object",
    ),
    "an unknown feature": (
        {"actions": [{"id": "a", "features": {"priec": 1}}]},
        "$.actions[0].features",
        r"expected the declared features \(price, .*got 'priec'",
    ),
    "names where none are declared": (
        {"policy_id": "served"},
        "$.actions[0].features",
        "expected a list of 3 numbers, got an object",
    ),
    "all excluded": ({"excluded": [*OFFERS]}, "$.excluded", "at least one of 3 actions"),
    "too many slots": ({"slots": [{}] * 4}, "$.slots[3].excluded", "at least one of 3 actions"),
    "an unknown id": ({"excluded": ["cap"]}, "$.excluded", "ids of the actions, got 'cap'"),
    "no context": ({"context": {}}, "$.context", r"expected the keys \['age'\], got \[\]"),
    "a mask": (
        {"context": {"age": 1, "action_mask": [1]}},
        "$.context",
        r"expected the keys \['age'\], got",
    ),
    "another value": ({"context": {"age": "x"}}, "$.context.age", "expected finite float32"),
    "other spaces": ({"policy_id": "plain"}, "$.policy_id", "an observation with candidates"),
    "no window": ({"policy_id": "windowless"}, "$.policy_id", "expected a reward_window above 0"),
    "another policy": ({"policy_id": "cap"}, "policy_id", "expected a policy of"),
    "a propensity": ({"action_prob": 0.5}, "$.action_prob", "expected none without apprentice"),
    "no propensity": (
        {"action_prob": 1.5, "apprentice": True},
        "$.action_prob",
        r"a number in \(0, 1\], got 1.5",
    ),
    "a misspelt field": ({"exclude": []}, "$", "unknown field `exclude`"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_request_is_named_and_leaves_nothing(
    collector: CollectorProcess, name: str
) -> None:
    """With the place, and what was expected; the same id may be used afterwards."""
    change, path, text = WRONG[name]
    status, reply = collector.post("/v1/rank", {**BODY, "event_id": name, **change})
    assert (status, reply["error"]["path"]) == (422, path)
    assert re.search(text, reply["error"]["message"])
    assert collector.get(f"/v1/episodes/{quote(name)}")[0] == 404


def test_an_event_id_stands_for_one_request(collector: CollectorProcess) -> None:
    """Of other content, or for an episode that was not ranked: 409; and so is what comes first."""
    assert collector.post("/v1/rank", {**BODY, "event_id": "one"})[0] == 201
    renamed = [{**action, "id": f"{action['id']}2"} for action in ACTIONS]
    for other in ({"context": {"age": 32}}, {"actions": renamed}, {"slots": [{}, {}]}):
        again = collector.post("/v1/rank", {**BODY, "event_id": "one", **other})
        assert code(again) == (409, "conflict")
    collector.post("/v1/episodes", {"episode_id": "own", "policy_id": "default"})
    assert code(collector.post("/v1/rank", {**BODY, "event_id": "own"})) == (409, "conflict")
    assert code(collector.post("/v1/activate/own")) == (409, "conflict")
    for path, body in (("/v1/reward/unknown", {"reward": 1.0}), ("/v1/activate/unknown", {})):
        assert code(collector.post(path, body)) == (409, "conflict")
    with (
        PolicyClient(collector.address) as client,
        pytest.raises(Refusal, match="that is not known"),
    ):
        client.activate("unknown/1")


def test_an_asyncio_client_awaits_what_asks_the_collector(collector: CollectorProcess) -> None:
    async def shop() -> tuple[int, str]:
        async with AsyncPolicyClient(collector.address, policy_id="default") as client:
            reply = await client.rank({"age": 3}, OFFERS, active=False)
            client.reward(reply.event_id, 1.0)
            await client.flush()
            await client.activate(reply.event_id)
            return len(reply.ranking), reply.event_id

    count, name = asyncio.run(shop())
    assert count == 3
    assert collector.get(f"/v1/episodes/{name}")[1]["state"] == "terminated"


def test_no_request_is_answered_with_500(collector: CollectorProcess) -> None:
    """Values of every kind at every place of a good request: it is accepted or refused."""
    rng = random.Random(7)
    values = [
        None,
        True,
        -1,
        2**70,
        10**400,
        1e308,
        "",
        "\ud800",
        "x" * 5000,
        [],
        [[]],
        {},
        {"": [None]},
    ]
    slots = [{"context": {"age": 2}, "excluded": ["hat"]}]
    good = {**BODY, "excluded": ["tie"], "slots": slots, "tags": {"a": "b"}, "ts": 5}
    statuses = set()
    for _ in range(300):
        body = json.loads(json.dumps(good))
        for _ in range(rng.randint(1, 2)):
            place: Any = body
            while True:
                key = rng.choice([*place] if isinstance(place, dict) else range(len(place)))
                if not isinstance(place[key], (dict, list)) or not place[key] or rng.random() < 0.3:
                    break
                place = place[key]
            place[key] = rng.choice(values)
        statuses.add(collector.post("/v1/rank", body)[0])
        path = rng.choice(["reward", "activate"])
        statuses.add(collector.post(f"/v1/{path}/one", {"reward": rng.choice(values)})[0])
    assert {201, 422} <= statuses <= {200, 201, 400, 409, 422}
