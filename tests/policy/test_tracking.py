"""Runs in trackers: what training and judging say, and nothing that fails with them."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from policy.algorithms.bandit import BanditConfig
from policy.data.freeze import freeze
from policy.inference.weight_store import WeightStore
from policy.judging.gate import evaluate_logs, publish
from policy.judging.settings import EvaluationSettings, Gate
from policy.tracking import TensorBoard, begin, continue_run
from policy.training.settings import TrainSettings
from policy.training.train import train, train_once
from tests.policy.conftest import BanditLog


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tracked")
    BanditLog.make(3000).write(found)
    return found


def tracked(root: str, tracker: str) -> tuple[str, Any]:
    """(the run of a training, the gate's decision on its candidate)."""
    run = begin(tracker, Path(root) / "tracking" / tracker, "default")
    found = train(root, algorithm=BanditConfig(updates=40), run=run)
    run.close()
    return run.uri, publish(root, "default", found.candidate, Gate(reward_range=(0, 1)))


def tracked_elsewhere(root: Path, tracker: str) -> tuple[str, Any]:
    """The same in a process of its own, where this one's filter of warnings does not hold."""
    code = (
        "import json, sys; from tests.policy.test_tracking import tracked\n"
        "print(json.dumps(tracked(*sys.argv[1:])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(root), tracker],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "GIT_PYTHON_REFRESH": "quiet"},
    )
    assert done.returncode == 0, done.stderr
    assert "not in the run" not in done.stderr
    uri, judged = json.loads(done.stdout.splitlines()[-1])
    return uri, judged


def losses_of(events: EventAccumulator) -> list[tuple[int, float]]:
    return [(one.step, one.value) for one in events.Scalars("train/loss")]


def test_tensorboard_has_losses_estimates_verdict_and_version(root: Path) -> None:
    """Of training and of the gate, in one run, whose address the version has."""
    uri, judged = tracked(str(root), "tensorboard")
    folder = Path(uri.partition(":")[2].partition("#")[0])
    assert folder.parent == root / "tracking" / "tensorboard"
    events = EventAccumulator(str(folder)).Reload()
    assert [step for step, _ in losses_of(events)] == list(range(4, 41, 4))
    version = WeightStore(root, "default").manifest(judged["version"])
    (estimate,) = (one for one in judged["gate"]["target"] if one["name"] == "dr")
    for suffix, value in zip(
        ("", "/low", "/high"), (estimate["value"], *estimate["interval"]), strict=True
    ):
        (event,) = events.Scalars(f"estimate/dr{suffix}")
        assert (event.step, event.value) == (version.metrics["rows_trained"], pytest.approx(value))
    texts = set(events.Tags()["tensors"])
    wanted = {"verdict", "version", "candidate", "seed", "algorithm"}
    assert {f"{name}/text_summary" for name in wanted} <= texts
    assert version.metrics["run"] == uri


def test_the_blocks_of_a_large_log_follow_each_other(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them begins at the first update again."""
    for name in ("READ_ROWS", "BLOCK_ROWS"):
        monkeypatch.setattr(f"policy.training.train.{name}", 1000)
    run = begin("tensorboard", tmp_path, "default")
    train(root, algorithm=BanditConfig(updates=10), run=run)
    run.close()
    events = EventAccumulator(run.uri.partition(":")[2].partition("#")[0]).Reload()
    steps = [step for step, _ in losses_of(events)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 20


@pytest.mark.long
def test_mlflow_has_the_same(root: Path) -> None:
    """In a file of SQLite below the root."""
    uri, judged = tracked_elsewhere(root, "mlflow")
    place, _, run = uri.removeprefix("mlflow:").partition("#")
    with sqlite3.connect(place.removeprefix("sqlite:///")) as file:
        tags = dict(file.execute("select key, value from tags where run_uuid = ?", [run]))
        steps = file.execute("select step from metrics where key = 'train/loss' order by step")
        assert [step for (step,) in steps] == list(range(4, 41, 4))
        (low,) = file.execute("select value from metrics where key = 'estimate/dr/low'").fetchone()
    (estimate,) = (one for one in judged["gate"]["target"] if one["name"] == "dr")
    assert low == pytest.approx(estimate["interval"][0])
    assert (tags["verdict"], tags["candidate"]) == (judged["gate"]["verdict"], judged["candidate"])


@pytest.mark.long
def test_wandb_keeps_a_run_offline(root: Path) -> None:
    """Training and judgement are two folders of one run, to be synchronised later."""
    uri, _ = tracked_elsewhere(root, "wandb")
    place, _, run = uri.removeprefix("wandb:").partition("#")
    assert len(list(Path(place).glob(f"wandb/offline-run-*-{run}"))) == 2


def test_a_frozen_training_names_its_manifest(root: Path, tmp_path: Path) -> None:
    """The digest of the data that it read."""
    frozen = freeze(root)
    run = begin("tensorboard", tmp_path, "default")
    train_once(root, "default", BanditConfig(updates=5), frozen, run=run)
    run.close()
    events = EventAccumulator(run.uri.partition(":")[2].partition("#")[0]).Reload()
    (noted,) = events.Tensors("manifest/text_summary")
    assert noted.tensor_proto.string_val == [frozen.hash.encode()]


def test_a_lost_tracker_fails_no_judgement(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning says what is missing; the candidate is judged."""
    (tmp_path / "file").touch()
    run = begin("tensorboard", tmp_path / "runs", "default")
    found = train(root, algorithm=BanditConfig(updates=6), run=run)
    run.close()
    folder = Path(run.uri.partition(":")[2].partition("#")[0])
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    folder.touch()
    document = evaluate_logs(root, "default", found.candidate, EvaluationSettings())
    assert document["logs"][0]["verdict"]
    assert f"are not in the run {run.uri}" in caplog.text


def test_a_tracker_that_fails_meanwhile_fails_no_training(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once, and not tried again. Policies of folds are no part of the run."""
    asked: list[int] = []

    def failing(self: TensorBoard, values: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(TensorBoard, "measure", lambda self, values, step: asked.append(step))
    monkeypatch.setattr(TensorBoard, "note", failing)
    run = begin("tensorboard", tmp_path, "default")
    settings = TrainSettings(cross_fit=2)
    found = train(root, algorithm=BanditConfig(updates=40), settings=settings, run=run)
    assert found.candidate
    run.measure({}, 41)
    assert asked == list(range(4, 41, 4))
    assert caplog.text.count(f"nothing more is recorded in the run {run.uri}: no space left") == 1


def test_a_run_of_another_machine_is_not_begun_here(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="which is not there"):
        continue_run(f"tensorboard:{tmp_path}/moved/run#run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("uri", ["", "tensorboard:", "aim:/a#b", "mlflow:x"])
def test_what_names_no_run_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="run: expected tracker:place#run, got"):
        continue_run(uri)


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="track: expected one of tensorboard, mlflow, wandb, got"):
        begin("aim", tmp_path, "default")
