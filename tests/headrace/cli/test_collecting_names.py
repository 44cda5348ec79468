"""Names of categories, from the declaration of a policy to the action that a client gets."""

from __future__ import annotations

import asyncio
import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import urllib3

from headrace import AsyncPolicyClient, PolicyClient, Refusal, ShardReader, SpaceError
from policy.algorithms.bandit import BanditConfig
from policy.inference.weight_store import WeightStore
from policy.training.settings import TrainSettings
from policy.training.train import train
from storage.declarations.policy_files import load_declarations
from storage.spaces.descriptors import Box, Dict, Discrete
from tests.collector_process import CollectorProcess, shard_rows
from tests.headrace.command import Collect, answer, headrace, refused

OBSERVATION = '{"country": "discrete:[\\"DE\\", \\"FR\\"]:other", "age": "box:1"}'
ITEMS = ["item-42", "item-7"]
SPACES = ("--observation", OBSERVATION, "--action", 'discrete:["item-42","item-7"]')
BEST = {"DE": "item-42", "FR": "item-7", "IT": "item-7"}  # the rewarded item


def seen(country: str, place: int = 0) -> dict[str, Any]:
    return {"country": country, "age": [place / 100]}


def paid(country: str, item: str) -> float:
    return float(BEST[country] == item)


def logged(place: int) -> tuple[dict[str, Any], str, float]:
    country, item = list(BEST)[place % 3], ITEMS[place // 3 % 2]
    return seen(country, place), item, paid(country, item)


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    root = tmp_path_factory.mktemp("names") / "run"
    with Collect(root, *SPACES) as declaring:
        assert declaring.first_line.startswith("Collecting on ")
    with CollectorProcess(root) as running:
        yield running


def log_by_json(collector: CollectorProcess, place: int, headers: dict[str, str]) -> None:
    """An episode of one step, as curl or msgpack in another language would log it."""
    observation, item, reward = logged(place)
    name = f"wire-{place}"
    encode = msgspec.json.encode if not headers else msgspec.msgpack.encode
    for path, body in (
        ("", {"episode_id": name}),
        (f"/{name}/log_action", {"obs": observation, "action": item, "action_prob": 0.5}),
        (f"/{name}/log_returns", {"reward": reward}),
        (f"/{name}/end", {"obs": observation}),
    ):
        address = f"{collector.address}/v1/episodes{path}"
        sent = {"content-type": "application/json", **headers}
        reply = urllib3.request("POST", address, body=encode(body), headers=sent)
        assert reply.status < 300, reply.data


def test_names_go_in_and_come_out(collector: CollectorProcess) -> None:
    """Names are logged in three forms, stored as codes, trained on, and returned as actions.

    The collector is killed and stopped in between: the declaration stores the names.
    """
    with PolicyClient(collector.address) as client:
        for place in range(240):
            observation, item, reward = logged(place)
            client.log_step(observation, item, reward, action_prob=0.5)
        client.flush(60)
        with pytest.raises(
            SpaceError, match="one of the 2 names 'item-42', 'item-7', got 'item-9'"
        ):
            client.log_step(seen("DE"), "item-9", 0.0)
    for place in range(6):
        log_by_json(collector, place, {})
        log_by_json(collector, place + 6, {"content-type": "application/msgpack"})
    assert spec_spaces(collector)["names"] == ITEMS
    collector.kill()
    collector.restart()
    assert collector.stop() == 0

    rows = shard_rows(collector.root)
    assert len(rows) == 252
    assert {type(row["actions"]) for row in rows} == {int}
    assert Counter(row["obs__country"] for row in rows) == {0: 84, 1: 84, 2: 84}
    with ShardReader(collector.root, names=True) as reader, ShardReader(collector.root) as plain:
        named, codes = reader.next(), plain.next()
    assert set(named["obs.country"]) == {"DE", "FR", "other"}
    assert set(named["new_obs.country"]) <= {"DE", "FR", "other"}
    assert [ITEMS[code] for code in codes["actions"]] == list(named["actions"])
    assert (named["obs.age"] == codes["obs.age"]).all()
    assert headrace("verify", "--root", collector.root, "--second-reader").returncode == 0

    result = train(
        collector.root,
        settings=TrainSettings(evaluation_share=0.0),
        algorithm=BanditConfig(epochs=60),
    )
    WeightStore(collector.root, "default").publish(result.candidate)
    collector.restart()
    assert collector.get("/readyz")[0] == 200
    for mode in ("remote", "local"):
        with PolicyClient(collector.address, mode) as client:
            for country, item in BEST.items():
                episode = client.start_episode()
                found = Counter(client.get_action(episode, seen(country)) for _ in range(20))
                assert set(found) <= set(ITEMS)
                assert found.most_common(1)[0][0] == item
                client.end_episode(episode, seen(country))
        assert asyncio.run(by_asyncio(collector.address, mode)) in ITEMS


async def by_asyncio(address: str, mode: Any) -> Any:
    """An action that the asyncio client gets."""
    async with AsyncPolicyClient(address, mode) as client:
        episode = client.start_episode()
        client.log_action(episode, seen("FR"), "item-7")
        return await client.get_action(episode, seen("FR"))


def spec_spaces(collector: CollectorProcess) -> dict[str, Any]:
    """The action space in `/v1/spec`."""
    space: dict[str, Any] = collector.get("/v1/spec")[1]["policies"]["default"]["action"]["space"]
    return space


def test_plain_requests_say_and_hear_names(collector: CollectorProcess) -> None:
    """`/action` by JSON and msgpack; a retry gets the same name; an unknown name is refused."""
    name = collector.post("/v1/episodes")[1]["episode_id"]
    status, reply = collector.post(f"/v1/episodes/{name}/action", {"obs": seen("FR"), "seq": 1})
    assert (status, reply["action"] in ITEMS) == (200, True)
    assert collector.post(f"/v1/episodes/{name}/action", {"obs": seen("FR"), "seq": 1})[1] == reply
    body = msgspec.msgpack.encode({"obs": seen("FR"), "seq": 2})
    address = f"{collector.address}/v1/episodes/{name}/action"
    head = {"content-type": "application/msgpack"}
    again = msgspec.msgpack.decode(urllib3.request("POST", address, body=body, headers=head).data)
    assert again["action"] in ITEMS
    event = {"obs": seen("FR"), "action": "item-9"}
    status, reply = collector.post(f"/v1/episodes/{name}/log_action", event)
    assert status == 422
    assert reply["error"]["path"] == "$.action"
    assert "expected one of the 2 names 'item-42', 'item-7', got" in reply["error"]["message"]
    with PolicyClient(collector.address) as client, pytest.raises((Refusal, SpaceError)):
        client.get_action(client.start_episode(), {"country": 3, "age": [0.0]})


def test_a_log_declares_its_names(tmp_path: Path) -> None:
    """`import --declare` writes a log's names to the policy's file. New names in a later file are
    left out, or stored as `other`."""
    rows = [("DE", 42, 1), ("FR", 7, 0), ("DE", 7, 0), ("AT", 42, 1)]
    files = [tmp_path / "first.csv", tmp_path / "second.csv"]
    for path, content in zip(files, (rows, [*rows, ("IT", 42, 1), ("DE", 8, 1)]), strict=True):
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("country", "item", "paid"), *content])
    words = ["--observation", "country:categories:other", "--action", "item:categories"]
    words += ["--reward", "paid"]
    root = tmp_path / "run"
    assert headrace("import", files[0], *words, "--declare", root).returncode == 0
    again = headrace("import", files[1], *words, "--declare", root)
    assert refused(again, "'42']", "'8', '42']", "--redeclare")
    declared = load_declarations(root)["default"]
    assert declared.observation == Discrete.of(["AT", "DE", "FR"], other="other")
    assert declared.action == Discrete.of(["7", "42"])
    with CollectorProcess(root) as collector:
        words += ["--address", collector.address, "--json"]
        assert answer(headrace("import", files[0], *words))["steps"] == 4
        second = answer(headrace("import", files[1], *words))
        assert second["steps"] == 5
        assert second["bad_counts"] == {"column item: expected one of the 2 names '7', '42'": 1}
        assert second["read_as_other"] == {"country": 1}
        shown = headrace("import", files[1], *words[:-1]).stdout
        assert "0 episodes in" in shown, "the second time"
        assert "Column country: 1 of 6 rows have none of the policy's names there" in shown
        assert collector.stop() == 0
    with ShardReader(root, names=True) as reader:
        batch = reader.next()
    counts = Counter(zip(batch["obs"], batch["actions"], batch["rewards"], strict=True))
    assert counts == {
        ("DE", "42", 1): 2,
        ("FR", "7", 0): 2,
        ("DE", "7", 0): 2,
        ("AT", "42", 1): 2,
        ("other", "42", 1): 1,
    }
    assert not list(tmp_path.glob("*.categories.json"))


def test_several_columns_with_names_are_a_dict(tmp_path: Path) -> None:
    """So that `{"country": "DE"}` is an observation; a column without any name is refused."""
    path = tmp_path / "log.csv"
    path.write_text("country,os,n,gone,a,r\nDE,ios,3,,0,1\nFR,android,4,,1,0\n")
    words = ["--action", "a", "--reward", "r", "--declare", tmp_path / "run"]
    every = [word for name in ("country", "os") for word in ("--observation", f"{name}:categories")]
    assert headrace("import", path, *every, "--observation", "n", *words).returncode == 0
    assert load_declarations(tmp_path / "run")["default"].observation == Dict(
        (
            ("country", Discrete.of(["DE", "FR"])),
            ("n", Box((1,))),
            ("os", Discrete.of(["android", "ios"])),
        )
    )
    numbers = headrace("import", path, "--observation", "country", *words)
    assert refused(numbers, "column country: expected numbers", "names need country:categories")
    gone = headrace("import", path, "--observation", "gone:categories", *words)
    assert refused(gone, "column gone: expected categories, got none in any row")
