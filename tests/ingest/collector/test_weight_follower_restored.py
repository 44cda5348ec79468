"""Publishing after a restore reaches every client and collector that ran through it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ingest.client.policy_client import PolicyClient
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.spaces.descriptors import parse_space
from storage.weights.manifest import Live
from tests.collector_process import CollectorProcess, declare

SPEC = PolicySpec(parse_space("box:4"), parse_space("discrete:2"))
OBS = [0.0] * 4


def publish(root: Path, seed: int) -> Live:
    store = WeightStore(root, "default")
    weights = Policy(SPEC, seed=seed).get_weights()
    return store.publish(store.add_candidate(weights, spec=SPEC.to_json(), metrics={}, lineage={}))


def until(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(6_000):
        if holds():
            return
        pause.wait(0.02)
    raise AssertionError("it never held")


def restore(backup: Path, weights: Path) -> None:
    """Put a backup in the place of a folder at once, as half of one would be taken for damage."""
    staged = shutil.copytree(backup, weights.with_name("staged"))
    weights.rename(weights.with_name("old"))
    while True:
        try:
            return os.rename(staged, weights)
        except OSError:  # the collector has registered there again
            shutil.rmtree(weights)


def test_weights_from_a_backup_under_a_running_collector(tmp_path: Path) -> None:
    """The collector keeps serving the later weights and logs that; the next publication has a new
    number."""
    root, log = tmp_path / "root", tmp_path / "log"
    declare(root)
    publish(root, 1)
    shutil.copytree(root / "weights", tmp_path / "backup")
    for seed in (2, 3):
        publish(root, seed)
    with CollectorProcess(root, log=log) as collector, PolicyClient(collector.address) as client:
        episode = client.start_episode()
        client.get_action(episode, OBS)
        assert client.acting_version() == 3
        restore(tmp_path / "backup", root / "weights")
        until(lambda: "not served (older)" in log.read_text())
        assert collector.get("/v1/spec")[1]["policies"]["default"]["live_version"] == 3
        assert publish(root, 4) == Live(generation=4, version=4)
        until(lambda: client.acting_version() == 4)
        client.end_episode(episode)


def test_a_root_from_a_backup_under_running_clients(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the client knows the later numbers: it refuses the older weights and logs it. Its poll
    makes the numbers continue after those, so that the next publication reaches it.
    """
    root = tmp_path / "root"
    declare(root)
    publish(root, 1)
    with CollectorProcess(root) as collector:
        with PolicyClient(collector.address, timeout=30.0) as client:
            client.get_action(client.start_episode("before"), OBS)
            client.end_episode("before")
            client.flush()
            assert collector.stop() == 0
            shutil.copytree(root, tmp_path / "backup")
            collector.restart()
            for seed in (2, 3):
                publish(root, seed)
            until(lambda: client.acting_version() == 3)
            collector.kill()
            shutil.rmtree(root)
            shutil.copytree(tmp_path / "backup", root)
            collector.restart()
            store = WeightStore(root, "default")
            until(lambda: store.next_version == 4)
            until(lambda: client.stats.weights_refused == 1)
            assert client.acting_version() == 3
            assert "refused version 1 of generation 1" in caplog.text
            assert publish(root, 4) == Live(generation=4, version=4)
            until(lambda: client.acting_version() == 4)
        assert collector.stop() == 0
