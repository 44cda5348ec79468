"""Late rewards through a real collector: from another service, and over a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingest.client.policy_client import PolicyClient
from ingest.protocol.errors import Refusal
from storage.reading.shard_reader import ShardReader
from tests.collector_process import CollectorProcess, declare, shard_rows

OBS = [0.0, 1.0, 2.0, 3.0]


def test_a_click_counts_once_whoever_reports_it_and_whatever_is_killed(tmp_path: Path) -> None:
    """Two services report one step: its window continues after a kill, then it is in a shard."""
    declare(tmp_path, reward_window=1800.0, seal_seconds=0.1)
    with CollectorProcess(tmp_path) as collector:
        with (
            PolicyClient(collector.address) as serving,
            PolicyClient(collector.address, sync=True) as clicks,
        ):
            name = serving.log_step(OBS, 1, 0.25, action_prob=0.5)
            serving.flush()
            clicks.log_returns(name, 1.0, {"click": 77}, step=0, reward_id="click-77")
            collector.kill()
            collector.restart()
            clicks.log_returns(name, 1.0, {"click": 77}, step=0, reward_id="click-77")
            with pytest.raises(Refusal, match="with another amount"):
                clicks.log_returns(name, 2.0, step=0, reward_id="click-77")
            assert shard_rows(tmp_path) == []
            collector.turn_clock()
            with ShardReader(tmp_path, follow=True, batch_size=1) as reader:
                batch = reader.next(timeout=60.0)
            assert batch["rewards"].tolist() == [1.25]
            with pytest.raises(Refusal, match=r"reward_window is 1800 seconds|terminated"):
                clicks.log_returns(name, 1.0, step=0, reward_id="click-78")
        assert collector.stop() == 0
    (row,) = shard_rows(tmp_path)
    assert (row["rewards"], row["infos"], row["ended"]) == (1.25, '{"click": 77}', "terminated")


def test_several_rewards_become_one_as_the_policy_declares(tmp_path: Path) -> None:
    """The client does not add up rewards from which the policy is to select."""
    declare(tmp_path, reward_combination="last", reward_default=-1.0)
    with CollectorProcess(tmp_path) as collector:
        with PolicyClient(collector.address) as client:
            name = client.start_episode()
            for rewards in ((3.0, 0.0), (), (2.0,)):
                client.log_action(name, OBS, 0)
                for reward in rewards:
                    client.log_returns(name, reward)
            client.end_episode(name)
        assert collector.stop() == 0
    assert [row["rewards"] for row in shard_rows(tmp_path)] == [0.0, -1.0, 2.0]
