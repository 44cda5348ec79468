"""A root that an earlier commit wrote still works unchanged.

`fixtures/60e40fb/root.tgz` was written at 60e40fb: a collector received 60 episodes of one step
and 10 of 7 steps from a uniform policy, and exited; `train --algorithm snips` and `publish
--no-gate` made version 1, which acted in 20 episodes; when the collector was killed, two episodes
were open, with 3 steps and 1, and 5 episodes of 2 steps had ended.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np

from ingest.client.policy_client import PolicyClient
from storage.weights.store import WeightFolder
from tests.collector_process import CollectorProcess, shard_rows
from tests.headrace.command import answer, headrace
from tests.upgrade.fixture import FIXTURES, verified

WRITTEN = FIXTURES / "60e40fb" / "root.tgz"
SEALED, ACTED, LATE, OPEN = 60 + 70, 20, 10, 4
VECTOR = np.zeros(4)


def test_a_root_of_an_earlier_commit_goes_on(tmp_path: Path) -> None:
    """Nothing is lost; its open episodes, weights and numbers continue."""
    root = tmp_path / "root"
    with tarfile.open(WRITTEN) as archive:
        archive.extractall(root, filter="data")
    assert verified(root) == SEALED + ACTED + LATE + OPEN
    with CollectorProcess(root) as collector:
        collector.settle(SEALED + ACTED + LATE)
        assert collector.get("/v1/episodes/open-0")[1]["state"] == "open"
        with PolicyClient(collector.address, "local", update_interval=None) as client:
            episode = client.start_episode()
            assert client.get_action(episode, VECTOR) in range(3)
            client.end_episode(episode)
        assert collector.stop() == 0
    rows = shard_rows(root)
    assert {row["policy_version"] for row in rows if row["source"] == "on_policy"} == {1}
    assert verified(root) == SEALED + ACTED + LATE + OPEN + 1
    trained = answer(headrace("train", "--root", root, "--algorithm", "snips", "--json"))
    assert trained["rows_trained"] > 0
    answer(headrace("publish", trained["candidate"], "--root", root, "--no-gate", "--json"))
    live = WeightFolder(root, "default").live()
    assert live is not None
    assert live.version == 2
    assert len(rows) == SEALED + ACTED + LATE + 1
