"""Publishing after a restore reaches every client and collector that ran through it."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from ingest.access.key_files import create_token
from ingest.client.policy_client import PolicyClient
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.declarations.policy_files import load_declarations, save_declaration
from storage.spaces.descriptors import parse_space
from storage.weights.manifest import Live
from tests.collector_process import CollectorProcess, declare

SPEC = PolicySpec(parse_space("box:4"), parse_space("discrete:2"))
OBS = [0.0] * 4
WEIGHTS = "/v1/policies/default/weights"


def candidate(store: WeightStore, seed: int) -> str:
    weights = Policy(SPEC, seed=seed).get_weights()
    return store.add_candidate(weights, spec=SPEC.to_json(), metrics={}, lineage={})


def publish(root: Path, seed: int, policy_id: str = "default") -> Live:
    store = WeightStore(root, policy_id)
    return store.publish(candidate(store, seed))


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


def ask(collector: CollectorProcess, token: str, etag: str) -> str:
    """Ask for the weights with an etag, twice: the second answer follows what the first started."""
    given = {"authorization": f"Bearer {token}", "if-none-match": etag}
    for _ in range(2):
        answer = requests.get(f"{collector.address}{WEIGHTS}", headers=given, timeout=60)
        assert answer.status_code in (200, 304), answer.text
    return answer.headers["etag"]


def test_a_client_cannot_make_numbers_up(tmp_path: Path) -> None:
    """An etag that the collector never sent changes no number and says of no restore, whatever it
    has in common with a genuine one, also one of another policy."""
    root, log = tmp_path / "root", tmp_path / "log"
    declare(root)
    save_declaration(root, replace(load_declarations(root)["default"], policy_id="other"))
    for seed in (1, 2, 3):
        publish(root, seed, "other")
    # with the same store id, only the policy tells the etags of both apart
    ours, theirs = (root / "weights" / policy / "store.json" for policy in ("default", "other"))
    ours.parent.mkdir()
    shutil.copy(theirs, ours)
    publish(root, 1)
    store = WeightStore(root, "default")
    token = create_token(root, "actor", ["weights:read"])[1]
    with CollectorProcess(root, log=log) as collector:
        genuine = ask(collector, token, "")
        mine, generation, version, signature = genuine.strip('"').split("-")
        assert (generation, version) == ("1", "1")
        other = requests.get(
            collector.address + WEIGHTS.replace("default", "other"),
            headers={"authorization": f"Bearer {token}"},
            timeout=60,
        ).headers["etag"]
        *numbers, signed_other = other.strip('"').split("-")
        assert numbers == [mine, "3", "3"]
        for claim in (
            "9000001-999999999999999",
            "9000001",
            f"2-2-{signature}",
            f"1-999999999999999-{signature}",
            f"3-3-{signed_other}",
            "2-2-" + "0" * 32,
        ):
            assert ask(collector, token, f'"{mine}-{claim}"') == genuine
        assert store.restored is None
        assert store.next_version == 2
    assert "restored from a backup" not in log.read_text()
    assert '"audit":"numbers"' not in log.read_text()
    assert publish(root, 2) == Live(generation=2, version=2)


def test_a_genuine_etag_continues_the_numbers_after_a_canary_too(tmp_path: Path) -> None:
    """After the whole root was restored, an etag of before makes numbers continue: after that of a
    canary that clients acted with, even though it had ended. One audit line names the caller."""
    root, log = tmp_path / "root", tmp_path / "log"
    declare(root)
    publish(root, 1)
    made, token = create_token(root, "actor", ["weights:read"])
    with CollectorProcess(root, log=log) as collector:
        ask(collector, token, "")
        assert collector.stop() == 0
        shutil.copytree(root, tmp_path / "backup")
        collector.restart()
        store = WeightStore(root, "default")
        store.start_canary(candidate(store, 2), 0.5)
        store.rollback(by="ada")
        last = ask(collector, token, "")
        collector.kill()
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "backup", root)
        collector.restart()
        assert WeightStore(root, "default").next_version == 2
        for _ in range(2):
            ask(collector, token, last)
        assert WeightStore(root, "default").next_version == 3
        assert publish(root, 3) == Live(generation=4, version=3)
    lines = re.findall(r'\{"audit":"numbers".*\}', log.read_text())
    assert [json.loads(line) for line in lines] == [
        {"audit": "numbers", "policy": "default", "version": 2, "generation": 3, "by": made.id}
    ]
