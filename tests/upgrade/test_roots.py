"""A root that an earlier release wrote goes on: nothing is lost, doubled, unpinned or admitted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingest.access.key_files import redaction_key
from ingest.backup import adopt_root
from ingest.client.policy_client import PolicyClient
from ingest.erasure import command
from ingest.verification import journal_account
from policy.inference.weight_store import WeightStore
from storage.declarations.tombstones import episode_mark
from storage.errors import PolicyPinned
from storage.maintenance.removal import plan_erasure
from storage.maintenance.search import search
from storage.reading.shard_reader import ShardReader, read_position
from tests.collector_process import CollectorProcess, shard_rows
from tests.headrace.command import headrace, refused
from tests.upgrade.fixture import BUILDS, Facts, steps_in_shards, unpacked, verified

pytestmark = pytest.mark.parametrize("build", BUILDS)
STEP: dict[str, Any] = {"type": "log_action", "obs": [0.5] * 4, "action": 1}


def ending(name: str, first: int, steps: int, **more: Any) -> list[dict[str, Any]]:
    """The events of an open episode from step `first` on, up to its end."""
    logged = [{**STEP, "episode_id": name, "seq": first + 1 + i, **more} for i in range(steps)]
    return [*logged, {"type": "end", "episode_id": name, "seq": first + 1 + steps, **more}]


def accept(collector: CollectorProcess, events: list[dict[str, Any]], **headers: str) -> None:
    status, reply = collector.post("/v1/events", {"events": events}, **headers)
    assert status == 200
    assert reply["accepted"] == len(events), reply


def test_a_root_goes_on(tmp_path: Path, build: str) -> None:
    """Open episodes end, late rewards arrive, and a repeated request adds nothing."""
    facts, root = unpacked(tmp_path, "root", build), tmp_path / "root"
    assert verified(root) == facts["acknowledged"]
    known = {"authorization": f"Bearer {facts['tokens']['writer']}"}
    with CollectorProcess(root) as collector:
        collector.settle(facts["in_shards"], **known)
        reply = collector.post("/v1/events", facts["retry"], **known)[1]
        assert (reply["accepted"], reply["duplicates"]) == (0, 4)
        for name in ("open", "long", "tracks", "again"):
            state = collector.request("GET", f"/v1/episodes/{name}", headers=known)[1]
            assert state["state"] == "open", state
        accept(collector, ending("open", 3, 2), **known)
        accept(collector, ending("long", 10, 1), **known)
        own = {"instance": facts["retry"]["instance"], "events": ending("again", 3, 0)}
        assert collector.post("/v1/events", own, **known)[1]["accepted"] == 1
        for agent in ("ann", "bob"):
            accept(collector, ending("tracks", 2, 0, agent_id=agent, agents=2), **known)
        late = {"type": "log_returns", "step": 1, "reward": 10.0}
        again = {**late, "episode_id": "late-0", "reward_id": "first-0"}
        reply = collector.post("/v1/events", {"events": [again]}, **known)[1]
        assert (reply["accepted"], reply["duplicates"]) == (0, 1)
        accept(collector, [{**late, "episode_id": "late-2", "reward_id": "new"}], **known)
        collector.turn_clock()
        collector.settle(facts["acknowledged"] + 2, **known)  # `spooled-open` has a step
        assert collector.stop() == 0
    assert verified(root) == facts["acknowledged"] + 3
    found = steps_in_shards(root)
    assert set(found.values()) == {1}
    assert found.total() == facts["acknowledged"] + 2
    waited = Counter(name for name, _, _ in found)
    for name, steps in facts["waiting"].items():
        assert waited[name] == steps + {"open": 2, "long": 9}.get(name, 0)
    rewards = {(r["eps_id"], r["t"]): r["rewards"] for r in shard_rows(root)}
    assert [rewards[f"late-{number}", 1] for number in range(3)] == [11.0, 11.0, 11.0]
    assert [rewards[f"late-{number}", 0] for number in range(3)] == [0.0, 0.0, 0.0]


def test_episodes_are_erased_wherever_they_are(tmp_path: Path, build: str) -> None:
    """One half in shards, one of two agents, one that waits for rewards, one that is open: all of
    it is gone from shards and journal; the others go on."""
    facts, root = unpacked(tmp_path, "root", build), tmp_path / "root"
    names = ("long", "tracks", "late-1", "open")
    key = redaction_key(root)
    marks = [episode_mark(key, name) for name in names]
    plan = plan_erasure(root, journal_account(root), marks, key).plan
    done = command.erase(root, plan, key, by="me", why="")
    assert (done["removed"], done["ended"]) == (10 + 4 + 2 + 3, 5)
    assert verified(root) == facts["acknowledged"]
    assert search(root, ["tracks", "late-1"]).is_clear
    known = {"authorization": f"Bearer {facts['tokens']['writer']}"}
    with CollectorProcess(root) as collector:
        refused = collector.post("/v1/events", {"events": ending("open", 3, 1)}, **known)[1]
        assert "was erased" in refused["refused"][0]["error"]["message"]
        late = {"type": "log_returns", "step": 1, "reward": 10.0, "reward_id": "new"}
        accept(collector, [{**late, "episode_id": "late-2"}], **known)
        collector.turn_clock()
        collector.settle(facts["acknowledged"] - 4, **known)  # `again` and `spooled-open`
        assert collector.stop() == 0
    rows = shard_rows(root)
    assert not {row["eps_id"] for row in rows} & {*names}
    assert {row["rewards"] for row in rows if (row["eps_id"], row["t"]) == ("late-2", 1)} == {11.0}


def test_its_tokens_are_those_that_are_admitted(tmp_path: Path, build: str) -> None:
    """The writer may log, the reader may read weights, and the revoked one and nobody may not."""
    facts = unpacked(tmp_path, "root", build)
    with CollectorProcess(tmp_path / "root") as collector:
        paths = {"writer": 200, "reader": 403, "gone": 401}
        for name, expected in paths.items():
            header = {"authorization": f"Bearer {facts['tokens'][name]}"}
            assert collector.post("/v1/events", {"events": []}, **header)[0] == expected, name
        assert collector.post("/v1/events", {"events": []})[0] == 401


def test_its_pins_and_its_canary_hold(tmp_path: Path, build: str) -> None:
    """Both versions act, each in its episodes; nothing is published before `resume`."""
    facts, root = unpacked(tmp_path, "root", build), tmp_path / "root"
    with (
        CollectorProcess(root) as collector,
        PolicyClient(
            collector.address, policy_id="default", token=facts["tokens"]["writer"]
        ) as client,
    ):
        for number in range(20):
            name = client.start_episode(f"canary-{number}")
            client.get_action(name, np.zeros(4))
            client.end_episode(name)
        client.flush(60)
        assert collector.stop() == 0
    acted = {r["policy_version"] for r in shard_rows(root) if r["eps_id"].startswith("canary-")}
    assert acted == {1, 2}
    for name, fact in facts["pins"].items():
        store = WeightStore(root, name)
        live = store.live()
        assert live is not None
        assert (live.version, live.generation) == (fact["version"], fact["generation"])
        assert live.canary_version == fact["canary"]
        assert (live.pinned.why if live.pinned else None) == fact["why"]
    store = WeightStore(root, "pinned")
    candidate = store.manifest(2).candidate
    with pytest.raises(PolicyPinned, match="earns less"):
        store.publish(candidate)
    store.resume()
    assert store.publish(candidate).version == 4


def read_on(root: Path, name: str, facts: Facts) -> Counter[tuple[str, int]]:
    """What a reader delivered before its position was saved, and from there on."""
    mode = "transitions" if name == "shuffled" else name
    shuffle = 0 if name == "fragments" else 16
    found = Counter((str(episode), int(t)) for episode, t in facts["positions"][name])
    with ShardReader(
        root,
        policy_id="default",
        mode=mode,
        batch_size=8,
        shuffle=shuffle,
        incomplete=True,
        state=read_position(root, name),
    ) as reader:
        for batch in reader:
            found.update(zip(batch["eps_id"].tolist(), batch["t"].tolist(), strict=True))
    return found


@pytest.mark.parametrize("name", ["shuffled", "episodes", "fragments"])
def test_a_reader_goes_on_from_its_position(tmp_path: Path, build: str, name: str) -> None:
    """Each step is delivered once: before, now, or from a shard that was written since."""
    facts, root = unpacked(tmp_path, "root", build), tmp_path / "root"
    known = {"authorization": f"Bearer {facts['tokens']['writer']}"}
    with CollectorProcess(root) as collector:
        accept(collector, ending("open", 3, 2), **known)
        collector.settle(facts["in_shards"] + 5, **known)
        assert collector.stop() == 0
    rows = [row for row in shard_rows(root) if row["policy_id"] == "default"]
    found = read_on(root, name, facts)
    assert found == Counter((row["eps_id"], row["t"]) for row in rows)
    assert set(found.values()) == {1}


def test_a_restored_journal_seals_nothing_twice(tmp_path: Path, build: str) -> None:
    """Parts that a `Stored` row names are in shards; `adopt` ends and stores the open episodes."""
    facts, root = unpacked(tmp_path, "restored", build), tmp_path / "root"
    before = steps_in_shards(root)
    assert before.total() == facts["in_shards"]
    with pytest.raises(RuntimeError, match="did not start"):
        CollectorProcess(root)
    assert refused(headrace("verify", "--root", root), "run `headrace adopt`")
    done = adopt_root(root)
    assert done is not None
    assert (done.written, done.closed) == (sum(facts["open"].values()), len(facts["open"]))
    assert adopt_root(root) is None
    opened = {(name, "agent0", t): 1 for name, steps in facts["open"].items() for t in range(steps)}
    assert steps_in_shards(root) == before + Counter(opened)
    assert verified(root) == facts["acknowledged"]
    with CollectorProcess(root) as collector:
        accept(collector, [{"type": "start", "episode_id": "more"}, *ending("more", 0, 1)])
        collector.settle(facts["acknowledged"] + 1)
        assert collector.stop() == 0
    assert verified(root) == facts["acknowledged"] + 1
