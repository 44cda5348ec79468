"""A canary in episodes of several agents: served, recorded and compared by episode."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingest.client.policy_client import PolicyClient
from policy.inference.weight_store import WeightStore
from policy.judging.canary import judge_canary
from policy.judging.settings import CanarySettings
from storage.experience.hashed import ARM, is_canary
from tests.collector_process import CollectorProcess
from tests.ingest.client.test_episode_calls_multi_agent import declare_two, publish_two, see, tracks
from tests.ingest.client.test_local_inference_canary import wait_served

AGENTS = {"walker1": "walker", "walker2": "walker", "walker3": "walker", "flyer1": "flyer"}
SHARES = {"walker": 0.4, "flyer": 0.5}
SOON = {"part_seconds": 0.05, "seal_seconds": 0.05}


def start_canaries(root: Path, process: CollectorProcess) -> dict[str, int]:
    """Start a canary of each policy, all but one with the weights of the live version; return their
    generations.
    """
    found = {}
    for name, share in SHARES.items():
        store = WeightStore(root, name)
        (digest,) = store.candidates()
        known, weights = store.load_candidate(digest)
        weights = {key: value * 0.9 for key, value in weights.items()}
        other = store.add_candidate(weights, spec=known.spec, metrics={}, lineage={})
        found[name] = store.start_canary(other, share).generation
        wait_served(process, store, name)
    return found


def play(client: PolicyClient, episode: str, *turns: tuple[str, ...]) -> None:
    """Play an episode: at each turn the given agents act and earn 1."""
    for turn in turns:
        client.get_action(episode, see(**dict.fromkeys(turn, 1.0)))
        client.log_returns(episode, dict.fromkeys(turn, 1.0))


@pytest.mark.parametrize("mode", ["local", "remote"])
def test_all_agents_of_an_episode_are_of_its_arm(tmp_path: Path, mode: str) -> None:
    """This includes agents that join later, and episodes that began before the canary. The canaries
    of two policies are drawn independently. An episode counts once, whatever its number of agents.
    """
    declare_two(tmp_path, **SOON)
    publish_two(tmp_path)
    everyone = ("walker1", "walker2", "flyer1")
    with CollectorProcess(tmp_path) as process:
        options = {"policy_mapping_fn": AGENTS.__getitem__, "update_interval": 0.0}
        with PolicyClient(process.address, inference_mode=mode, **options) as client:
            early = client.start_episode()
            play(client, early, everyone)
            client.flush()  # the collector assigns the arm when the start arrives
            generations = start_canaries(tmp_path, process)
            play(client, early, (*everyone, "walker3"))
            client.end_episode(early)
            names = [client.start_episode() for _ in range(30)]
            for name in names:
                play(client, name, everyone, (*everyone, "walker3"))
                client.end_episode(name)
            client.flush()
        assert process.stop() == 0
    rows = tracks(tmp_path)
    assert len(rows) == 4 * 31
    chosen = set()
    for (name, agent), steps in rows.items():
        policy = AGENTS[agent]
        canary = name != early and is_canary(policy, name, SHARES[policy])
        version = 2 if canary else 1
        assert {step["policy_version"] for step in steps} == {version}, (name, agent)
        arm = None if name == early else f"{generations[policy]}:{version}"
        assert {json.loads(step["tags"]).get(ARM) for step in steps} == {arm}, (name, agent)
        chosen.add((policy, canary))
    assert len(chosen) == 4
    found = judge_canary(tmp_path, "walker", settings=CanarySettings(age=0.001))
    assert found["episodes"] + found["young"] == len(names), "episodes, not tracks"
    assert (found["crossed"], found["incomplete"]) == (0, 0)
