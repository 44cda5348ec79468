"""Jobs name the shards that they excluded, and raise for unreadable ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy.algorithms.bandit import BanditConfig
from policy.algorithms.ppo import PPO
from policy.inference.weight_store import WeightStore
from policy.judging.evaluate import evaluate
from policy.judging.settings import EvaluationSettings
from policy.training.settings import TrainSettings
from policy.training.train import NothingToTrainOn, train
from storage.experience.interfaces import ReaderError
from storage.experience.sample_batch import SampleBatch
from tests.policy.training import live_log
from tests.storage.reading.bad_shards import BAD, rewrite

CONFIG = BanditConfig(objective="dr", epochs=1)


def shards(root: Path) -> list[Path]:
    return sorted(root.glob("shards/*/*.parquet"))


def test_a_shard_that_is_left_out_stands_in_the_results(bandit_log: Any, tmp_path: Path) -> None:
    """The results of training and judging name it, and count its rows by the reason."""
    bandit_log(300).write(tmp_path, shard_rows=100)
    bad = rewrite(shards(tmp_path)[1], BAD["a footer of more parts"][0])
    trained = train(tmp_path, "default", CONFIG)
    judged = evaluate(tmp_path, "default", trained.candidate)
    assert trained.rows_read + trained.rows_held_out == 200
    for left_out, named in (
        (trained.not_read, trained.skipped),
        (judged.not_read, judged.skipped),
    ):
        assert left_out["content"] == 100
        assert list(named) == [str(bad)]


def test_a_shard_that_cannot_be_read_is_no_smaller_log(bandit_log: Any, tmp_path: Path) -> None:
    """A shard whose reads fail with EIO raises an error that names it."""
    bandit_log(300).write(tmp_path, shard_rows=100)
    candidate = train(tmp_path, "default", CONFIG).candidate
    unreadable = shards(tmp_path)[1]
    unreadable.unlink()
    unreadable.symlink_to("/proc/self/mem")
    with pytest.raises(ReaderError, match=r"gave up after 0\.2 s.*Input/output error") as trained:
        train(tmp_path, "default", CONFIG, settings=TrainSettings(retry_for=0.2))
    with pytest.raises(ReaderError, match=r"gave up after 0\.2 s.*Input/output error") as judged:
        evaluate(tmp_path, "default", candidate, settings=EvaluationSettings(retry_for=0.2))
    assert all(str(unreadable) in str(one.value) for one in (trained, judged))


def test_a_reward_beyond_float32_stops_no_follower(tmp_path: Path) -> None:
    """The row of a reward of 1e200 is excluded as `not_finite`, and training goes on."""
    root = live_log.declare(tmp_path)
    rewards = np.ones(10)
    rewards[4] = 1e200
    spoiled = live_log.part(3, rewards=rewards.tobytes())
    live_log.write(root, *(live_log.part(i) for i in range(3)), spoiled)
    live_log.write(root, *(live_log.part(4 + i) for i in range(16)))
    result, reports = live_log.run(root, 2)
    assert [one["rows"] for one in reports] == [99, 100]
    assert result.excluded == {"not_finite": 1}
    rows = live_log.rows_of(root, range(20))
    assert live_log.claimed(root, result.version) == rows - {(3, 4)}


def test_an_update_that_is_taken_back_claims_none_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An update whose loss is not finite is reverted, and its 100 rows are excluded.

    It ends inside a part. Training continues after its rows, also after a restart.
    """
    root = live_log.declare(tmp_path)
    live_log.write(root, *(live_log.part(i, steps=37, final_obs=None) for i in range(13)))
    sound, made = PPO.update, list[int]()

    def wrong(self: PPO, batch: SampleBatch, *given: Any) -> dict[str, float]:
        made.append(batch.count)
        metrics = sound(self, batch, *given)
        if len(made) == 2:
            raise FloatingPointError("ppo: the loss became inf; try a smaller lr")
        return metrics

    monkeypatch.setattr(PPO, "update", wrong)
    _, reports = live_log.run(root, 2)
    result, more = live_log.run(root, 2)
    assert [one["rows"] for one in reports + more] == [100, 0, 100, 100]
    assert result.excluded == {"not_finite": 100}
    assert result.rows_trained == 300 == len(live_log.claimed(root, result.version))
    assert "left out as not_finite: ppo: the loss became inf" in caplog.text
    assert "of episodes e" in caplog.text
    weights = [WeightStore(root, "default").load(version)[1] for version in (2, 3)]
    for name, before in weights[0].items():
        np.testing.assert_array_equal(before, weights[1][name])


def test_a_one_shot_job_leaves_out_what_is_beyond_float32(bandit_log: Any, tmp_path: Path) -> None:
    """The rows are excluded as `not_finite`; if there are no others, the error says so."""
    log = bandit_log(40)
    log.rewards[7] = -1e200
    log.write(tmp_path / "one")
    result = train(
        tmp_path / "one", "default", CONFIG, settings=TrainSettings(evaluation_share=0.0)
    )
    assert (result.rows_trained, result.excluded) == (39, {"not_finite": 1})
    log.rewards[:] = 1e200
    log.write(tmp_path / "all")
    with pytest.raises(NothingToTrainOn, match="not finite: 40"):
        train(tmp_path / "all", "default", CONFIG, settings=TrainSettings(evaluation_share=0.0))


def test_longer_episodes_are_pointed_at_what_learns_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The error of a bandit algorithm names `cql`, and no warning repeats it."""
    root = live_log.declare(tmp_path)
    live_log.write(root, live_log.part(0), live_log.part(1))
    with pytest.raises(NothingToTrainOn, match=r"not one step: .*use --algorithm cql"):
        train(root, "default", settings=TrainSettings(evaluation_share=0.0))
    assert not caplog.records
