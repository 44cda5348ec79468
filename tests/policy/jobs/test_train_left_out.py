"""Jobs name the shards that they left out, and raise for those that they cannot read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policy.algorithms.bandit import BanditConfig
from policy.jobs.evaluate import evaluate
from policy.jobs.train import train
from storage.reading.shard_reader import ReaderError
from tests.storage.reading.bad_shards import BAD, rewrite

CONFIG = BanditConfig(objective="dr", epochs=1)


def shards(root: Path) -> list[Path]:
    return sorted(root.glob("shards/*/*.parquet"))


def test_a_shard_that_is_left_out_stands_in_the_results(bandit_log: Any, tmp_path: Path) -> None:
    """By its name, and its rows by the reason, of training and of judging."""
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
    """The error names it: a read of what is no memory of the process fails with EIO."""
    bandit_log(300).write(tmp_path, shard_rows=100)
    candidate = train(tmp_path, "default", CONFIG).candidate
    unreadable = shards(tmp_path)[1]
    unreadable.unlink()
    unreadable.symlink_to("/proc/self/mem")
    with pytest.raises(ReaderError, match=r"gave up after 0\.2 s.*Input/output error") as trained:
        train(tmp_path, "default", CONFIG, retry_for=0.2)
    with pytest.raises(ReaderError, match=r"gave up after 0\.2 s.*Input/output error") as judged:
        evaluate(tmp_path, "default", candidate, retry_for=0.2)
    assert all(str(unreadable) in str(one.value) for one in (trained, judged))
