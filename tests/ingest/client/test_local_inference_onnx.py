"""A version that is an ONNX file acts at the collector and in clients, as the judge computes it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from ingest.access.key_files import create_token
from ingest.client.policy_client import PolicyClient
from ingest.client.publisher import Publisher
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.own_models import publish_onnx
from policy.inference.spec import ONNX, PolicySpec
from policy.inference.weight_store import WeightStore
from storage.spaces.descriptors import parse_space
from storage.weights.manifest import encode_weights, sha256
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.policy.inference.onnx_files import HOSTILE, linear, weights_of

OBS = np.array([0.1, -0.2, 0.3, 0.4], np.float32)
ACTIONS = "box:2::-1:1"
SPEC = PolicySpec(parse_space("box:4"), parse_space(ACTIONS), ONNX, "squashed_gaussian")


def test_a_file_acts_everywhere_with_the_same_propensities(tmp_path: Path) -> None:
    """Remote and local steps store the numbers that the file gives; both follow a new version."""
    declare(tmp_path, action=ACTIONS)
    head = "squashed_gaussian"
    publish_onnx(tmp_path, linear(4, seed=1).SerializeToString(), head=head)
    with CollectorProcess(tmp_path) as collector:
        for mode in ("local", "remote"):
            with PolicyClient(collector.address, mode) as client:  # type: ignore[arg-type]
                name = client.start_episode()
                for t in range(5):
                    client.get_action(name, OBS * t)
                client.end_episode(name)
                publish_onnx(tmp_path, linear(4, seed=2).SerializeToString(), head=head)
        collector.settle(10)
        assert collector.stop() == 0
    rows = shard_rows(tmp_path)
    store = WeightStore(tmp_path, "default")
    for version in (1, 2):
        policy = NumpyPolicy.published(*store.read(version))
        mine = [row for row in rows if row["policy_version"] == version]
        flat = np.stack([OBS * t for t in range(5)])
        taken = np.array([row["actions"] for row in mine], np.float32)
        found = [row["action_logp"] for row in mine]
        np.testing.assert_allclose(found, policy.logp(flat, taken), atol=1e-5)
        inputs = [np.frombuffer(row["action_dist_inputs"], np.float32) for row in mine]
        np.testing.assert_allclose(inputs, policy.dist_inputs(flat), atol=1e-6)


def test_without_onnxruntime_a_client_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the error of its call; it goes on by log_action."""
    declare(tmp_path, action=ACTIONS)
    publish_onnx(tmp_path, linear(4).SerializeToString())
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with CollectorProcess(tmp_path) as collector, PolicyClient(collector.address) as client:
        name = client.start_episode()
        with pytest.raises(Refusal, match=r"cannot act here: .*'headrace\[onnx\]'") as caught:
            client.get_action(name, OBS)
        assert caught.value.code == "no_version"
        client.log_action(name, OBS, np.zeros(2, np.float32))
        client.end_episode(name)


def test_a_collector_lets_no_file_in_that_the_gate_refuses(tmp_path: Path) -> None:
    """A publication from elsewhere is checked like one under the root."""
    root, mine = tmp_path / "served", tmp_path / "trained"
    declare(root, action=ACTIONS)
    token = create_token(root, "trainer", ["weights:publish"])[1]
    good = linear(4).SerializeToString()
    digest = publish_onnx(mine, good, spaces=(SPEC.observation, SPEC.action), live=False)
    bad = encode_weights(weights_of(HOSTILE["random"][0]()))
    with (
        CollectorProcess(root) as collector,
        Publisher(collector.address, token=token) as publisher,
    ):
        publisher.publish_candidate(WeightStore(mine, "default"), digest)
        message = wire.Publish(version=1, sha256=sha256(bad), weights=bad, spec=SPEC.to_json())
        with pytest.raises(Refusal, match="expected an operator on the gate's list"):
            publisher._publish("default", message)
        assert publisher.versions().next == 2
    assert WeightStore(root, "default").read(1)[1] == encode_weights(weights_of(good))
