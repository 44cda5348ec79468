"""A canary acts in its share of the episodes, in local and remote mode, and the rows record it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingest.client.policy_client import PolicyClient
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.experience.hashed import ARM, is_canary
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.ingest.client.test_local_inference import OBS, SPEC, publish

SHARE = 0.4


def candidate(store: WeightStore, seed: int) -> str:
    weights = Policy(SPEC, seed=seed).get_weights()
    return store.add_candidate(weights, spec=SPEC.to_json(), metrics={"seed": seed}, lineage={})


def play(client: PolicyClient, steps: int = 2) -> str:
    episode = client.start_episode()
    for _ in range(steps):
        client.get_action(episode, OBS)
        client.log_returns(episode, 1.0)
    client.end_episode(episode)
    return episode


def wait_served(process: CollectorProcess, store: WeightStore, policy_id: str = "default") -> None:
    """Wait for an answer about weights, which comes after a look at the files."""
    live = store.live()
    assert live is not None
    while True:
        spec = process.request("GET", "/v1/spec")[1]["policies"][policy_id]["weights"]
        if spec["served"]["generation"] == live.generation:
            return


@pytest.mark.parametrize("mode", ["local", "remote"])
def test_a_share_of_the_episodes_is_acted_by_the_canary(tmp_path: Path, mode: str) -> None:
    """The hash of the id decides at an episode's start; after a promotion the canary's weights act
    everywhere.
    """
    declare(tmp_path)
    publish(tmp_path, 1)
    store = WeightStore(tmp_path, "default")
    with CollectorProcess(tmp_path) as process:
        with PolicyClient(process.address, inference_mode=mode, update_interval=0.0) as client:
            early = client.start_episode()
            client.get_action(early, OBS)
            live = store.start_canary(candidate(store, 2), SHARE)
            wait_served(process, store)
            names = [play(client) for _ in range(40)]
            client.get_action(early, OBS)  # began before the canary: keeps the live version
            client.end_episode(early)
            cut = client.start_episode("canary-4")  # the canary's share
            client.get_action(cut, OBS)
            store.rollback()
            wait_served(process, store)
            client.get_action(cut, OBS)  # a canary that was rolled back no longer acts
            client.end_episode(cut)
            store.resume()
            after = play(client)
        assert process.stop() == 0
    rows = shard_rows(tmp_path)
    acted: dict[str, list[int]] = {}
    for row in rows:
        acted.setdefault(row["eps_id"], []).append(row["policy_version"])
    arms = {row["eps_id"]: json.loads(row["tags"]).get(ARM) for row in rows}
    for name in names:
        version = 2 if is_canary("default", name, SHARE) else 1
        assert acted[name] == [version, version]
        assert arms[name] == f"{live.generation}:{version}"
    assert {1, 2} == {acted[name][0] for name in names}
    assert (acted[early], arms[early]) == ([1, 1], None)
    assert (acted[cut], arms[cut]) == ([2, 1], f"{live.generation}:2")
    assert arms[after] is None


def test_the_version_that_acts_in_an_episode_may_be_the_canary(tmp_path: Path) -> None:
    """`acting_version` gives the stored version of an episode's next step; without an episode it
    gives the live version."""
    declare(tmp_path)
    publish(tmp_path, 1)
    store = WeightStore(tmp_path, "default")
    versions = {}
    with CollectorProcess(tmp_path) as process:
        with PolicyClient(process.address, update_interval=0.0) as client:
            early = client.start_episode()
            assert client.acting_version(episode_id=early) == -1, "no weights yet"
            client.get_action(early, OBS)
            store.start_canary(candidate(store, 2), SHARE)
            wait_served(process, store)
            client.update_policy_weights()
            for number in range(10):
                name = client.start_episode(f"canary-{number}")
                versions[name] = client.acting_version(episode_id=name)
                client.get_action(name, OBS)
                assert client.acting_version(episode_id=name) == versions[name]
            assert set(versions.values()) == {1, 2}
            assert client.acting_version() == 1
            assert client.acting_version(episode_id=early) == 1
            client.end_episode(early)
            with pytest.raises(ValueError, match="has already completed"):
                client.acting_version(episode_id=early)
            with pytest.raises(ValueError, match="policy_id: expected none"):
                client.acting_version("default", episode_id=name)
            both = client.start_episode(policy_id={"left": "default", "right": "default"})
            with pytest.raises(ValueError, match="expected an episode of one agent, got several"):
                client.acting_version(episode_id=both)
            store.rollback()
            wait_served(process, store)
            client.update_policy_weights()
            assert {client.acting_version(episode_id=one) for one in versions} == {1}
            for one in versions:
                client.end_episode(one)
        with PolicyClient(process.address, "remote") as client:
            assert client.acting_version(episode_id=client.start_episode()) == -1
        assert process.stop() == 0
    stored = {row["eps_id"]: row["policy_version"] for row in shard_rows(tmp_path)}
    assert {name: stored[name] for name in versions} == versions


def test_a_canary_that_cannot_act_stops_nobody(tmp_path: Path) -> None:
    """A canary is damaged before a collector starts: the live version is served, and the canary's
    state gives the reason.
    """
    declare(tmp_path)
    publish(tmp_path, 1)
    store = WeightStore(tmp_path, "default")
    store.start_canary(candidate(store, 2), SHARE)
    (store.directory / "versions" / "2" / "weights.safetensors").write_bytes(b"damaged")
    with CollectorProcess(tmp_path) as process:
        with PolicyClient(process.address) as client:
            names = [play(client) for _ in range(5)]
            assert any(is_canary("default", name, SHARE) for name in [*names, "canary-4"])
        (record,) = store.served.read()
        assert (record.generation, record.wanted_generation) == (1, 2)
        assert "digest" in (record.why or "")
        assert process.stop() == 0
    rows = shard_rows(tmp_path)
    assert {row["policy_version"] for row in rows} == {1}
    assert {row["tags"] for row in rows} == {"{}"}
