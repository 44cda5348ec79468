"""`headrace up`: training continues in spite of unreadable data, and never stops logging."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from policy.algorithms.ppo import PPOConfig
from policy.inference.weight_store import WeightStore
from storage.weights.files import PolicyFiles
from storage.weights.lease import Lease, current_lease
from tests.collector_process import CollectorProcess, declare
from tests.headrace.command import answer, headrace
from tests.headrace.live_loop import LiveLoop


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveLoop, Lease]]:
    """`up` while another trainer has the lease, in the folder of a service with a `queue.py`.

    One for several tests, as each start of a trainer takes seconds.
    """
    home = tmp_path_factory.mktemp("home")
    (home / "queue.py").write_text("raise RuntimeError('of the service')\n")
    folder = home / "run" / "weights" / "default"
    folder.mkdir(parents=True)
    lease = Lease.take(PolicyFiles(folder.parents[1], folder.name))
    words = ("--steps-per-version", "64", "--set", "epochs=3")
    with LiveLoop(home / "run", *words, players=0, cwd=home) as loop:
        yield loop, lease


@pytest.fixture(scope="module")
def learning(waiting: tuple[LiveLoop, Lease]) -> LiveLoop:
    """The same once the lease is free: `up` says that clients can act, and one plays."""
    loop, lease = waiting
    lease.release()
    loop.wait(lambda: loop.began == 1)
    loop.play()
    return loop


def test_a_trainer_that_cannot_start_takes_no_collector_with_it(
    waiting: tuple[LiveLoop, Lease],
) -> None:
    """Another trainer has the lease: a start ends with 3, and steps are taken all the while."""
    loop, _ = waiting
    collector = loop.child("collect")
    loop.wait(lambda: loop.stderr().count("ended with 3; the next starts in") >= 1)
    assert f"process {os.getpid()} on " in loop.stderr()
    assert loop.child("collect") == collector
    assert loop.metric("headrace_ready") == 1


def test_a_damaged_shard_stops_no_learning_and_is_named(learning: LiveLoop) -> None:
    """One byte flipped in what the trainer has not read: the next version comes, log and metrics
    say what is left out, and the fault is in no later count."""
    loop = learning
    loop.wait(lambda: loop.version >= 4)
    held, shards = loop.damage_an_unread_shard()
    loop.wait(lambda: loop.version >= held + 3)
    left_out = {"policy": "default", "reason": "damaged"}
    loop.wait(lambda: loop.metric("headrace_training_excluded_rows", **left_out) > 0)
    assert loop.metric("headrace_training_excluded_shards", policy="default") == shards
    assert loop.metric("headrace_trainer_up", policy="default") == 1
    assert loop.metric("headrace_training_stalled_seconds", policy="default") >= 0
    assert f"version {held} are held, and everything that can be read was read" in loop.stderr()
    assert loop.stop() == 0
    found = headrace("verify", "--root", loop.root, "--json")
    assert "damaged" in {one["kind"] for one in answer(found)["findings"]}


def test_the_trainer_gets_its_settings(learning: LiveLoop) -> None:
    """`--set` of `up` is what the trainer uses, and stands in the manifest of each version."""
    store = WeightStore(learning.root, "default")
    live = store.live()
    assert live is not None
    metrics = store.manifest(live.version).metrics
    assert metrics["config"] == asdict(PPOConfig(epochs=3))


def test_the_folder_that_it_is_started_in_lends_no_modules(learning: LiveLoop) -> None:
    """A service may have a `queue.py`; `up` and the processes that it starts do not import it."""
    learning.wait(lambda: learning.version >= 1)
    assert "of the service" not in learning.stderr()


def test_what_keeps_the_collector_from_its_start_is_the_answer(tmp_path: Path) -> None:
    """A root in use ends `up` as it ends `collect`: at once, with status 3 and the owner's process
    id."""
    declare(tmp_path)
    with CollectorProcess(tmp_path) as process:
        serving = process.serving_pid()
        second = headrace("up", "--root", tmp_path, "--port", "0")
    assert second.returncode == 3
    assert f"process {serving}" in second.stderr
    assert "its message is above" in second.stderr


@pytest.mark.long
def test_killed_trainers_are_followed_and_a_second_one_is_named(tmp_path: Path) -> None:
    """SIGKILL, twice: versions continue in one chain without a conflict.

    A second trainer ends with 3 and names the holder of the lease.
    """
    root = tmp_path / "run"
    with LiveLoop(root, "--steps-per-version", "64") as loop:
        for kill in range(2):
            wanted = loop.version + 2
            loop.wait(lambda wanted=wanted: loop.version >= wanted)  # type: ignore[misc]
            if kill == 1:
                second = headrace("train", "--follow", "--root", root)
                assert second.returncode == 3
                assert f"process {loop.child('train')} on " in second.stderr
            os.kill(loop.child("train"), signal.SIGKILL)
        wanted = loop.version + 2
        loop.wait(lambda: loop.version >= wanted)
        lease = current_lease(PolicyFiles(root, "default"))
        assert lease
        assert lease.fence == 3
        assert loop.stop() == 0
    rows = [one["rows_trained"] for one in loop.updates]
    assert rows == sorted(rows)
    assert "made live by another process" not in loop.stderr()
