"""A worker with the collector as input: its spaces are served, clients get what it learns.

Also of `ingest.embedded.local_publisher`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from headrace import PolicyClient, PolicyServerInput, RolloutWorker
from policy.inference.weight_store import WeightStore as CheckedStore
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import load_declarations, save_declaration
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.spaces.descriptors import Box, Discrete
from storage.weights.store import WeightFolder

ROOT = Path(__file__).parents[3]
ENV = gymnasium.make("CartPole-v1")
CARTPOLE = {"default": (None, ENV.observation_space, ENV.action_space, {})}
OBS = np.zeros(4, np.float32)


def served(**given: Any) -> tuple[RolloutWorker, PolicyServerInput]:
    """A worker created as in the previous API, and its input."""
    root, declared = given.pop("root", None), given.pop("policies", ())
    found: list[PolicyServerInput] = []

    def input_(ioctx: Any) -> PolicyServerInput:
        rest = {} if root is None else {"root": root, "policies": declared}
        found.append(PolicyServerInput(ioctx, "127.0.0.1", 0, idle_timeout=0.2, **rest))
        return found[0]

    settings = {"policy": CARTPOLE, "rollout_fragment_length": 64, "seed": 1, **given}
    return RolloutWorker(input_=input_, **settings), found[0]


@contextmanager
def player(address: str) -> Iterator[subprocess.Popen[str]]:
    """A real client in a process of its own, in local mode."""
    with subprocess.Popen(
        [sys.executable, "-m", "headrace.demo.play", address, "CartPole-v1"],
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def rows_of(worker: RolloutWorker) -> Any:
    """The next sample that is not empty: an idle input returns empty ones."""
    while not (batch := worker.sample()).count:
        pass
    return batch


@pytest.mark.long
def test_what_the_worker_learns_is_what_its_clients_act_with() -> None:
    """As in the previous API, a client in another process gets each version that a cycle of
    sampling and learning makes, and its steps name it. A killed client leaves the worker idle."""
    worker, inputs = served()
    seen = set()
    with worker, player(inputs.address) as process:
        while len(seen) < 4:
            batch = rows_of(worker)
            assert batch.count == 64
            assert set(batch["source"]) == {"on_policy"}
            seen.update(batch["policy_version"].tolist())
            found = worker.learn_on_batch(batch)
            assert found["batch_count"] > 0
        process.kill()
        while batch.count:
            batch = worker.sample()
        assert worker.learn_on_batch(batch)["batch_count"] == 0
        version = worker.policies["default"].version
        assert worker.sample().count == 0
        assert worker.policies["default"].version == version  # nothing learned: nothing published
    assert max(seen) >= 3


def test_a_client_that_only_logs_changes_no_weights() -> None:
    """`sample` returns the rows of a client that only logs; they cannot be trained on, and make no
    version."""
    worker, inputs = served(rollout_fragment_length=8)
    with worker, PolicyClient(inputs.address, inference_mode="remote") as client:
        episode = client.start_episode()
        for _ in range(8):
            client.log_action(episode, OBS, 1)
        client.end_episode(episode, OBS)
        client.flush()
        batch = rows_of(worker)
        assert set(batch["source"]) == {"logged"}
        info = worker.learn_on_batch(batch)
        assert (info["batch_count"], info["left_out"]["not_on_policy"]) == (0, 8)
        worker.sample()
        assert worker.policies["default"].version == 1


def test_a_worker_that_begins_anew_goes_on_from_what_is_live(tmp_path: Path) -> None:
    """Random weights never replace trained ones: the worker takes the version's weights and filter.
    Settings declared under the root stay."""
    spaces = {"observation": Box((4,)), "action": Discrete(2)}
    rules = PolicyDeclaration(**spaces, steps_per_version=77)
    save_declaration(tmp_path, rules)
    given = {"root": tmp_path, "observation_filter": "MeanStdFilter"}
    first, _ = served(**given)
    with first:
        policy = first.policies["default"]
        policy.filter.push(np.ones((3, 4), np.float32))
        first.set_weights({"default": {k: v + 1 for k, v in policy.get_weights().items()}})
        first.sample()
        trained = policy.get_weights()
        assert policy.version == 2
    second, _ = served(**given, seed=99)
    with second:
        assert second.policies["default"].version == 2
        assert second.filters["default"].stats.n == 3
        for name, array in second.policies["default"].get_weights().items():
            np.testing.assert_array_equal(array, trained[name])
        second.sample()
    assert WeightFolder(tmp_path, "default").live().version == 2
    declared = load_declarations(tmp_path)["default"]
    assert declared.steps_per_version == 77
    with pytest.raises(ValueError, match="live version 2 to have the worker's spec"):
        served(root=tmp_path, model_config={"hidden": (3,)})


def learn(worker: RolloutWorker, client: PolicyClient, episodes: int, steps: int = 8) -> None:
    """Play episodes, and let the worker learn from all of them."""
    for _ in range(episodes):
        episode = client.start_episode()
        for _ in range(steps):
            client.get_action(episode, OBS)
            client.log_returns(episode, 1.0)
        client.end_episode(episode, OBS)
    client.flush()
    rows = 0
    while rows < episodes * steps // 8 * 8:
        batch = rows_of(worker)
        assert worker.learn_on_batch(batch)["batch_count"] == batch.count
        rows += batch.count


def test_a_version_says_which_rows_the_worker_learned_from(tmp_path: Path) -> None:
    """A version's lineage names parts, and rows where a batch ended inside a part. A restarted
    worker continues with the first row that no version was trained on."""
    given = {"root": tmp_path, "rollout_fragment_length": 8}
    worker, inputs = served(**given)
    with worker, PolicyClient(inputs.address) as client:
        learn(worker, client, episodes=3, steps=10)  # 24 of 30 rows
        worker.sample()
    store = WeightFolder(tmp_path, "default")
    live = store.live().version
    ((stream, ordinals),) = store.lineage(live).items()
    assert ordinals.to_json() == [[0, 2]]
    assert store.untrained(live) == {stream: [[2, 4, 6]]}
    assert store.manifest(live).metrics["rows_trained"] == 24
    again, inputs = served(**given)
    with again, PolicyClient(inputs.address) as client:
        learn(again, client, episodes=1, steps=10)
        again.sample()
    live = store.live().version
    assert store.manifest(live).metrics["rows_trained"] == 32
    assert store.lineage(live)[stream].to_json()[-1][0] == 0
    assert sum(run[2] for runs in store.untrained(live).values() for run in runs) == 8


def test_a_rollback_ends_neither_the_worker_nor_its_collector(tmp_path: Path) -> None:
    """The worker continues from the restored version, keeps candidates, and publishes nothing until
    `resume`; then its next version is based on that content."""
    worker, inputs = served(root=tmp_path, rollout_fragment_length=8)
    store = CheckedStore(tmp_path, "default")
    with worker, PolicyClient(inputs.address) as client:
        for _ in range(3):
            learn(worker, client, episodes=1)
        worker.sample()
        back = store.rollback(why="worse")
        candidates = set(store.candidates())
        for _ in range(3):
            learn(worker, client, episodes=1)
        assert store.live() == back
        assert worker.policies["default"].version == back.version
        assert set(store.candidates()) > candidates
        store.resume()
        worker.sample()
        after = store.live().version
        assert after == back.version + 1
        assert store.manifest(after).parent == back.version
        ((_, trained),) = store.lineage(after).items()
        assert trained.to_json() != [[0, trained.last]]  # excludes what was rolled back


def test_what_somebody_else_published_is_gone_on_from(tmp_path: Path) -> None:
    """After another publication the worker takes up those weights, and does not overwrite them
    unseen."""
    worker, inputs = served(root=tmp_path, rollout_fragment_length=8)
    store = CheckedStore(tmp_path, "default")
    with worker, PolicyClient(inputs.address) as client:
        learn(worker, client, episodes=1)
        manifest, weights = store.load(1)
        other = {name: array + 1 for name, array in weights.items()}
        theirs = store.add_candidate(other, spec=manifest.spec, metrics={}, lineage={})
        live = store.publish(theirs)
        worker.sample()
        assert store.live() == live
        for name, array in worker.policies["default"].get_weights().items():
            np.testing.assert_array_equal(array, other[name])


def test_a_disk_that_cannot_be_written_ends_no_worker(tmp_path: Path) -> None:
    """While the disk cannot be written, the worker goes on learning; it publishes once the disk can
    be written again."""
    worker, inputs = served(root=tmp_path, rollout_fragment_length=8)
    store = WeightFolder(tmp_path, "default")
    folder = store.directory / "candidates"
    with worker, PolicyClient(inputs.address) as client:
        folder.rename(tmp_path / "aside")
        folder.write_text("")  # NotADirectoryError, from every attempt
        for _ in range(2):
            learn(worker, client, episodes=1)
        worker.sample()
        assert store.live().version == 1
        folder.unlink()
        (tmp_path / "aside").rename(folder)
        worker.sample()
        assert store.live().version == 2


def test_a_pinned_policy_ends_no_program_that_publishes(tmp_path: Path) -> None:
    """`publish` returns the version that clients get, and old versions do not pile up."""
    worker, inputs = served(root=tmp_path)
    store = CheckedStore(tmp_path, "default")
    with worker:
        policy = worker.policies["default"]
        for number in range(2, 60):
            policy.set_weights({k: v * 0.99 for k, v in policy.get_weights().items()})
            assert inputs.publish(policy) == number
        assert len(store.versions()) < 59
        back = store.rollback()
        policy.set_weights({k: v * 0.99 for k, v in policy.get_weights().items()})
        assert inputs.publish(policy) == back.version


def test_a_worker_of_several_policies_reads_their_joint_episodes() -> None:
    """Spaces come from each policy; a sample has the agents' rows by policy."""
    policies = {
        "walker": (None, Box((2,)), Discrete(2), {}),
        "flyer": (None, Box((3,)), Discrete(4), {}),
    }
    worker, inputs = served(policy=policies, rollout_fragment_length=2)
    who = {"a": "walker", "b": "flyer"}
    with worker, PolicyClient(inputs.address, inference_mode="remote") as client:
        episode = client.start_episode(policy_id=who)
        seen = {"a": np.zeros(2, np.float32), "b": np.zeros(3, np.float32)}
        for _ in range(2):
            client.get_action(episode, seen)
            client.log_returns(episode, {"a": 1.0, "b": 2.0})
        client.end_episode(episode, seen)
        client.flush()
        batch = rows_of(worker)
        assert isinstance(batch, MultiAgentBatch)
        found = worker.learn_on_batch(batch)
        assert {name: info["batch_count"] for name, info in found.items()} == {
            "walker": 2,
            "flyer": 2,
        }
        worker.sample()
        assert {p.version for p in worker.policies.values()} == {2}


def test_without_a_worker_policies_are_asked_for() -> None:
    """The error says both ways to name them."""
    with pytest.raises(ValueError, match="declarations, or the context of a worker, got none"):
        PolicyServerInput(None, "127.0.0.1", 0)


def test_metrics_that_are_not_numbers_are_published_as_unknown() -> None:
    """An update without a row to learn from gives NaN, which JSON does not have."""
    worker, inputs = served()
    with worker:
        policy = worker.policies["default"]
        policy.set_weights({k: v + 1 for k, v in policy.get_weights().items()})
        assert inputs.publish(policy, metrics={"entropy": float("nan"), "rows": 0}) == 2
