"""Logging a share of the episodes, chosen by their ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ingest.client.policy_client import PolicyClient
from ingest.protocol.agent_names import UNSAMPLED
from ingest.protocol.errors import Refusal
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.experience.hashed import SAMPLING, hash_fraction
from storage.spaces.descriptors import parse_space
from tests.collector_process import CollectorProcess, declare, shard_rows

OBS = [0.0, 0.5, 1.0, -0.5]
AGENTS = {"left": "default", "right": "default"}
NAMES = [f"e{n}" for n in range(60)]
KEPT = [name for name in NAMES if hash_fraction(SAMPLING, name) < 0.5]
LEFT_OUT = next(name for name in NAMES if name not in KEPT)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    root: Path = tmp_path_factory.mktemp("sampling")
    declare(root, reward_window=600)
    spec = PolicySpec(parse_space("box:4"), parse_space("discrete:2"))
    store = WeightStore(root, "default")
    weights = Policy(spec, seed=1).get_weights()
    store.publish(store.add_candidate(weights, spec=spec.to_json(), metrics={}, lineage={}))
    with CollectorProcess(root) as collector:
        yield collector


def test_whole_episodes_are_kept_by_the_hash_of_their_ids(tmp_path: Path) -> None:
    """Chosen episodes are stored with their share. The ids of the others show that they were left
    out; their rewards, from any client or from a plain HTTP caller, are counted and have no effect.
    """
    declare(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        with (
            PolicyClient(collector.address, sample_rate=0.5) as client,
            PolicyClient(collector.address) as other,
        ):
            found = {}
            for name in NAMES:
                found[name] = client.start_episode(name, pass_prob=0.5)
                client.log_action(name, OBS, 1)  # by the caller's id
                client.log_returns(found[name], 1.0)
                client.log_returns(found[name], 1.0, step=0, reward_id="click")
                client.end_episode(name)
            for name in found.values():
                if name.startswith(UNSAMPLED):
                    other.log_returns(name, 1.0, step=0, reward_id="late")
                    other.log_returns(name, 1.0)
            client.flush()
            left_out = len(NAMES) - len(KEPT)
            assert [name for name in NAMES if found[name] == name] == KEPT
            assert client.stats.unsampled_episodes == client.stats.unsampled_rewards == left_out
            assert other.stats.unsampled_rewards == 2 * left_out
            assert client.stats.refused == other.stats.refused == {}
        reward = {"reward": 1.0, "step": 0, "reward_id": "curl"}
        path = f"/v1/episodes/{UNSAMPLED}{LEFT_OUT}/log_returns"
        assert collector.post(path, reward)[0] == 200
        metrics = collector._pool.request("GET", collector.address + "/metrics").data.decode()
        assert "headrace_unsampled_rewards_total 1.0" in metrics
        collector.settle(len(KEPT))
        collector.stop()
    rows = shard_rows(tmp_path)
    assert sorted(row["eps_id"] for row in rows) == sorted(KEPT)
    assert {row["pass_prob"] for row in rows} == {0.25}
    assert {row["rewards"] for row in rows} == {2.0}


def test_a_made_up_id_says_whether_it_is_logged(running: CollectorProcess) -> None:
    """About the requested share is logged, also with a whole decision in one call."""
    with PolicyClient(running.address, sample_rate=0.25) as client:
        names = [client.log_step(OBS, 1, 1.0) for _ in range(400)]
        kept = [name for name in names if not name.startswith(UNSAMPLED)]
        assert 50 < len(kept) < 150
        client.flush()
        assert client.stats.acknowledged == 3 * len(kept)
        with pytest.raises(Refusal, match="already completed"):
            client.end_episode(names[0])
    for bad in (0.0, 1.5, "a"):
        with pytest.raises(ValueError, match="sample_rate: expected a number"):
            PolicyClient(running.address, sample_rate=bad)  # type: ignore[arg-type]  # that is the point


def test_ids_and_rewards_of_what_is_left_out_are_checked(running: CollectorProcess) -> None:
    """A long id is refused by its length, whatever its hash; a bad reward, as for any episode."""
    with PolicyClient(running.address, sample_rate=0.5) as client:
        for n in range(8):
            with pytest.raises(ValueError, match="at most 246 characters with a sample_rate"):
                client.start_episode("y" * 246 + str(n))
            client.end_episode(client.start_episode("y" * 245 + str(n)))
        name = next(f"left-{n}" for n in range(99) if hash_fraction("sampling", f"left-{n}") >= 0.5)
        name = client.start_episode(name)
        for reward, step in (("x", 0), (1.0, "x"), (float("nan"), 0)):
            with pytest.raises(ValueError, match="expected"):
                client.log_returns(name, reward, step=step)  # type: ignore[arg-type]
        assert client.stats.unsampled_rewards == 0
        client.log_returns(name, 1.0, step=0)
        assert client.stats.unsampled_rewards == 1
    status, answer = running.post("/v1/episodes", {"episode_id": name})
    assert (status, answer["error"]["path"]) == (422, "$.episode_id")


@pytest.mark.parametrize("mode", ["local", "remote"])
def test_an_episode_that_is_left_out_is_acted_in_all_the_same(
    running: CollectorProcess, mode: str
) -> None:
    """The client's own copy of the policy acts, and nothing of the episode reaches the collector.
    Decisions in logged episodes are stored with their share."""
    with PolicyClient(running.address, mode, sample_rate=0.5) as client:
        ids = [f"{mode}-{n}" for n in range(8)]
        names = [client.start_episode(name) for name in ids]
        assert 0 < len([name for name in names if name.startswith(UNSAMPLED)]) < 8
        for name in names:
            assert client.get_action(name, OBS) in (0, 1)
        assert set(client.get_action(names, dict.fromkeys(names, OBS))) == set(names)
        for name in ids:
            client.end_episode(name)
        client.flush()
        known = [running.get(f"/v1/episodes/{name}")[0] == 200 for name in ids]
        assert known == [not name.startswith(UNSAMPLED) for name in names]
        assert client._outbox.dropped._unsampled == client._outbox.dropped.names == set()


def test_episodes_of_several_agents_are_left_out_whole(running: CollectorProcess) -> None:
    """The calls on an episode of several agents that is left out work as on any other, in both
    modes."""
    both, ones = dict.fromkeys(AGENTS, OBS), dict.fromkeys(AGENTS, 1)
    for mode in ("local", "remote"):
        with PolicyClient(running.address, mode, sample_rate=0.5) as client:
            ids = [f"whole-{mode}-{n}" for n in range(8)]
            for own in ids:
                name = client.start_episode(own, policy_id=AGENTS)
                client.log_action(own, both, ones)
                client.log_returns(name, dict.fromkeys(AGENTS, 1.0))
                assert client.get_action(name, both).keys() == AGENTS.keys()
                client.log_returns(name, {"left": 1.0}, step=0, reward_id="click")
                client.end_episode(name, both)
                kept = hash_fraction(SAMPLING, own) < 0.5
                assert name == (own if kept else UNSAMPLED + own)
            client.flush()
            assert client.stats.refused == {}
            known = [running.get(f"/v1/episodes/{own}")[0] == 200 for own in ids]
            assert known == [hash_fraction(SAMPLING, own) < 0.5 for own in ids]
            assert client._book.open == client._book.wholes == {}
