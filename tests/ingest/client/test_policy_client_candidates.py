"""Candidates over a real collector: clients pass what there is, and actions are rows of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ingest.client.policy_client import PolicyClient
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.declarations.declaration import DeclarationError, PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.reading.shard_reader import ShardReader
from storage.spaces.descriptors import Box, Dict, Discrete, MultiBinary, SpaceError
from tests.collector_process import CollectorProcess

MOST, DECISIONS = 8, 40
SPEC = PolicySpec(
    Dict(
        {
            "action_mask": MultiBinary((MOST,)),
            "candidates": Box((MOST, 2), ragged=True),
            "user": Box((1,)),
        }
    ),
    Discrete(MOST),
    ModuleSpec(kind="scorer", hidden=()),
)


def test_the_best_of_what_there_is_is_chosen_and_stored_with_it(tmp_path: Path) -> None:
    """By a scorer of the first feature, remotely and locally; `log_action` takes rows, too."""
    save_declaration(
        tmp_path,
        PolicyDeclaration(observation=SPEC.observation, action=SPEC.action, seal_seconds=0.2),
    )
    weights = {name: np.zeros_like(w) for name, w in Policy(SPEC).get_weights().items()}
    weights["pi.cross"][-1, 0] = 100.0
    store = WeightStore(tmp_path, "default")
    store.publish(store.add_candidate(weights, spec=SPEC.to_json(), metrics={}, lineage={}))
    rng, expected = np.random.default_rng(2), []
    with CollectorProcess(tmp_path) as collector:
        for mode in ("remote", "local"):
            with PolicyClient(collector.address, inference_mode=mode) as client:
                for _ in range(DECISIONS):
                    rows = rng.normal(size=(rng.integers(1, MOST + 1), 2)).round(2)
                    seen = {"user": [0.5], "candidates": rows}
                    episode = client.start_episode()
                    action = client.get_action(episode, seen)
                    assert rows[action, 0] >= rows[:, 0].max() - 0.2
                    client.end_episode(episode, {"user": [0.5], "candidates": rows[:1]})
                    expected.append(len(rows))
                episode = client.start_episode()
                with pytest.raises(SpaceError, match="expected 1 to 8 candidates, got 9"):
                    client.log_action(episode, {"user": [0.5], "candidates": np.ones((9, 2))}, 0)
                with pytest.raises(SpaceError, match=r"allows \(0, 1\), got 2"):
                    client.log_action(episode, {"user": [0.5], "candidates": np.ones((2, 2))}, 2)
                client.log_action(episode, {"user": [0.5], "candidates": np.ones((2, 2))}, 1)
                client.end_episode(episode, {"user": [0.5], "candidates": np.ones((1, 2))})
                expected.append(2)
        collector.settle(len(expected))
    with ShardReader(tmp_path, batch_size=len(expected)) as reader:
        stored = reader.next()
    counts = stored["obs.action_mask"].sum(axis=1)
    assert sorted(counts.tolist()) == sorted(expected)
    assert (stored["actions"] < counts).all()
    files = [pq.read_table(path) for path in tmp_path.glob("shards/*/*.parquet")]
    sizes = [len(row) for one in files for row in one["obs__candidates"].to_pylist()]
    assert sorted(sizes) == [2 * count for count in sorted(expected)]  # and no rows of zeros


def test_candidates_without_a_mask_are_refused_where_they_are_declared(tmp_path: Path) -> None:
    spaces = Dict({"candidates": Box((MOST, 2), ragged=True)}), Discrete(MOST)
    declared = PolicyDeclaration(observation=spaces[0], action=spaces[1])
    with pytest.raises(DeclarationError, match="expected the key 'action_mask' beside it"):
        save_declaration(tmp_path, declared)
