"""Masked decisions over a real collector: only allowed actions are taken, and logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingest.client.policy_client import PolicyClient
from ingest.protocol.errors import Refusal
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.declarations.declaration import DeclarationError, PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.reading.shard_reader import ShardReader
from storage.spaces.descriptors import Box, Dict, Discrete, MultiBinary, SpaceError
from tests.collector_process import CollectorProcess

OFFERS, DECISIONS = 6, 300
SPEC = PolicySpec(
    Dict({"action_mask": MultiBinary((OFFERS,)), "x": Box((2,))}),
    Discrete.of([f"offer {number}" for number in range(OFFERS)]),
    ModuleSpec(hidden=()),
)


def observation(mask: Any) -> dict[str, Any]:
    return {"action_mask": np.asarray(mask, np.int8), "x": np.zeros(2, np.float32)}


def declare(root: Path, *redacted: str) -> None:
    declared = PolicyDeclaration(
        observation=SPEC.observation,
        action=SPEC.action,
        seal_seconds=0.2,
        redact=dict.fromkeys(redacted, "drop"),
    )
    save_declaration(root, declared)


def publish(root: Path) -> None:
    """A policy that would take offer 0 nearly always."""
    weights = {name: np.zeros_like(w) for name, w in Policy(SPEC).get_weights().items()}
    weights["pi.0.bias"][0] = 8.0
    store = WeightStore(root, "default")
    store.publish(store.add_candidate(weights, spec=SPEC.to_json(), metrics={}, lineage={}))


def test_no_forbidden_offer_is_made_or_logged(tmp_path: Path) -> None:
    """By a remote and a local client; what was logged has the propensities of what was allowed."""
    declare(tmp_path)
    publish(tmp_path)
    rng = np.random.default_rng(3)
    with CollectorProcess(tmp_path) as collector:
        for mode in ("remote", "local"):
            with PolicyClient(collector.address, inference_mode=mode) as client:
                for number in range(DECISIONS):
                    mask = rng.integers(0, 2, OFFERS)
                    mask[rng.integers(1, OFFERS)] = 1
                    name = client.start_episode(f"{mode}-{number}")
                    offer = client.get_action(name, observation(mask))
                    assert mask[int(offer.split()[1])]
                    client.log_returns(name, 1.0)
                    client.end_episode(name, observation(np.zeros(OFFERS)))  # nothing is left to do
                refused = client.start_episode(f"{mode}-refused")
                with pytest.raises((Refusal, SpaceError), match="at least one allowed option"):
                    client.get_action(refused, observation(np.zeros(OFFERS)))
                with pytest.raises(SpaceError, match=r"allows \('offer 2'\), got 'offer 4'"):
                    client.log_action(refused, observation([0, 0, 1, 0, 0, 0]), "offer 4")
                client.log_action(refused, observation([0, 0, 1, 0, 0, 0]), "offer 2")
                client.end_episode(refused, observation(np.ones(OFFERS)))
        collector.settle(2 * DECISIONS + 2)
    with ShardReader(tmp_path, batch_size=2 * DECISIONS + 2) as reader:
        rows = reader.next()
    masks, actions, logp = rows["obs.action_mask"], rows["actions"], rows["action_logp"]
    assert masks[np.arange(len(actions)), actions].all()
    acted = rows["policy_version"] == 1
    assert acted.sum() == 2 * DECISIONS
    weight = np.exp(np.where(np.arange(OFFERS) == 0, 8.0, 0.0)) * masks
    probs = weight[np.arange(len(actions)), actions] / weight.sum(axis=1)
    np.testing.assert_allclose(logp[acted], np.log(probs[acted]), atol=1e-6)


def test_a_collector_refuses_what_a_client_without_the_check_sends(tmp_path: Path) -> None:
    """In a batch, the events beside it are stored. Redaction of another leaf changes nothing."""
    declare(tmp_path, "obs.x")
    publish(tmp_path)
    with CollectorProcess(tmp_path) as collector:
        instance = collector.post("/v1/instances")[1]["instance"]
        events: list[dict[str, Any]] = []
        for name, action in (("first", 2), ("second", 4), ("third", 2)):
            one = {"episode_id": f"{instance}-{name}"}
            obs = {"action_mask": [0, 0, 1, 0, 0, 0], "x": [0.0, 0.0]}
            acted = {"seq": 1, "obs": obs, "action": action}
            events += [
                {"type": "start", "start": len(events) // 3, **one},
                {"type": "log_action", **one, **acted},
                {"type": "end", "seq": 2, **one},
            ]
        status, answer = collector.post("/v1/events", {"instance": instance, "events": events})
        assert status == 200
        first, _ = answer["refused"]
        assert first["error"]["path"] == "$.events[4].action"
        expected = "expected one that obs.action_mask allows ('offer 2'), got 'offer 4'"
        assert expected in first["error"]["message"]
        nothing = {"action_mask": [0] * OFFERS, "x": [0.0, 0.0]}
        names = [f"{instance}-{number}" for number in range(2)]
        starts = [{"type": "start", "start": 3 + i, "episode_id": n} for i, n in enumerate(names)]
        collector.post("/v1/events", {"instance": instance, "events": starts})
        asked = [{"episode_id": name, "seq": 1, "obs": nothing} for name in names]
        for some in (asked, asked[:1]):
            status, answer = collector.post("/v1/actions", {"instance": instance, "actions": some})
            assert status == 200
            for one in answer["actions"]:
                assert "expected at least one allowed option, got none" in one["error"]["message"]
        states = [
            collector.get(f"/v1/episodes/{instance}-{name}")[1]["state"]
            for name in ("first", "second", "third")
        ]
        assert states == ["terminated", "broken", "terminated"]


def test_a_mask_of_another_size_or_a_redacted_one_is_refused_where_it_is_declared(
    tmp_path: Path,
) -> None:
    declared = PolicyDeclaration(observation=SPEC.observation, action=Discrete(OFFERS + 1))
    with pytest.raises(DeclarationError, match=r"expected MultiBinary\(7\), .* got"):
        save_declaration(tmp_path, declared)
    for path in ("obs.action_mask", "obs"):
        with pytest.raises(
            DeclarationError, match=r"redact: expected no rule for obs\.action_mask"
        ):
            declare(tmp_path, path)
    assert not list(tmp_path.iterdir())
