"""Training one of several policies from a multi-agent log: the others stay as they were."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
import pytest

from headrace import RolloutWorker
from policy.algorithms.bandit import BanditConfig
from policy.algorithms.ppo import PPOConfig
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from policy.training.settings import FollowSettings, TrainSettings
from policy.training.train import declared_spec, train
from policy.training.train_live import follow
from storage.declarations.policy_files import load_declarations
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.step_columns import SOURCES
from storage.reading.multi_agent_reader import MultiAgentReader
from storage.reading.shard_reader import ShardReader
from tests.storage.multi_agent_log import JointLog, Run


def trades(count: int) -> list[Run]:
    """A seller and a scout of equal spaces, and a buyer of others, that joins late."""
    return [
        run
        for i in range(count)
        for run in (
            Run(f"e{i}", "s", "seller", (0, 1, 2, 3), agents=3),
            Run(f"e{i}", "c", "scout", (0, 2)),
            Run(f"e{i}", "b", "buyer", (2, 3), agents=3),
        )
    ]


@pytest.fixture
def log(tmp_path):
    made = JointLog(tmp_path)
    made.write(*trades(30))
    return made


def worker_on(root, **arguments):
    declared = load_declarations(root)
    return RolloutWorker(
        policy={name: (None, one.observation, one.action, {}) for name, one in declared.items()},
        input_creator=lambda context: MultiAgentReader(
            context.log_dir, batch_size=20, columns=PPOConfig.columns
        ),
        log_dir=str(root),
        rollout_fragment_length=20,
        seed=3,
        **arguments,
    )


def same(before, after) -> bool:
    return all(before[name].tobytes() == after[name].tobytes() for name in before)


def stripped(batch: MultiAgentBatch, policies: Iterable[str]) -> MultiAgentBatch:
    """The batch with the rows of these policies alone."""
    return MultiAgentBatch({name: batch[name] for name in policies}, batch.env_steps())


def test_a_frozen_policy_is_bit_identical_and_adds_nothing(log):
    """A frozen policy keeps its weights and acting version.

    The trained policy's update is the one that its own rows alone give.
    """
    with (
        worker_on(log.root, policies_to_train=["seller"]) as worker,
        worker_on(log.root, policies_to_train=["seller"]) as alone,
    ):
        worker.set_weights(worker.get_weights(), version={"buyer": 4, "scout": 5, "seller": 6})
        before = worker.get_weights()
        for _ in range(3):
            batch = worker.sample()
            assert (batch.env_steps(), batch.agent_steps()) == (20, 40)
            assert list(worker.learn_on_batch(batch)) == ["seller"]
            alone.learn_on_batch(stripped(batch, ["seller"]))
        after = worker.get_weights()
        assert same(before["buyer"], after["buyer"])
        assert same(before["scout"], after["scout"])
        assert not same(before["seller"], after["seller"])
        assert same(alone.get_weights()["seller"], after["seller"])
        versions = {name: policy.version for name, policy in worker.policies.items()}
        assert {name: versions[name] for name in ("buyer", "scout")} == {"buyer": 4, "scout": 5}


def test_all_policies_are_trained_unless_some_are_named(log):
    """Each policy learns from its own rows in its own spaces."""
    with worker_on(log.root) as worker:
        before = worker.get_weights()
        info = worker.learn_on_batch(worker.sample())
        assert {name: one["batch_count"] for name, one in info.items()} == {
            "buyer": 10,
            "scout": 10,
            "seller": 20,
        }
        after = worker.get_weights()
        assert not any(same(before[name], after[name]) for name in before)


@pytest.mark.parametrize("policy_id", ["seller", "scout", "buyer"])
def test_the_training_job_reads_one_policys_tracks(tmp_path, policy_id):
    """`train` uses one policy's rows alone, also where another policy's are in the same stream.

    It leaves other policies' weights alone.
    """
    log = JointLog(tmp_path)
    agents = ("seller", "scout", "buyer")
    log.write(
        *(
            Run(f"e{i}", name, name, (t,), agents=3 if t == 2 else -1)
            for i in range(30)
            for t, name in enumerate(agents)
        )
    )
    found = train(
        log.root,
        policy_id,
        BanditConfig(objective="ips"),
        settings=TrainSettings(evaluation_share=0.0, epochs=1),
    )
    assert (found.rows_trained, found.policy_id) == (30, policy_id)
    assert sum(found.not_read.values()) == 60
    assert [path.name for path in (log.root / "weights").iterdir()] == [policy_id]
    with ShardReader(log.root, policy_id=policy_id, columns=("rewards",)) as reader:
        mine = [(row["stream"], row["ordinal"]) for batch in reader for row in batch.rows()]
    trained = {
        (stream, ordinal)
        for stream, ranges in found.lineage.items()
        for first, last in ranges
        for ordinal in range(first, last + 1)
    }
    assert trained == set(mine)


def test_a_followed_policy_publishes_alone(log):
    """Following one policy publishes its versions; the frozen one stays at its own."""
    frozen = Policy(declared_spec(log.root, "buyer"), seed=1)
    store = WeightStore(log.root, "buyer")
    digest = store.add_candidate(
        frozen.get_weights(), spec=frozen.spec.to_json(), metrics={}, lineage={}
    )
    version = store.publish(digest).version
    reports = []
    result = follow(
        log.root,
        "seller",
        PPOConfig(epochs=1),
        settings=FollowSettings(steps_per_update=40),
        stop=lambda: len(reports) >= 2,
        on_update=reports.append,
    )
    assert (result.updates, result.rows_read) == (2, 80)
    assert WeightStore(log.root, "seller").live().version == result.version
    assert result.version > version
    assert store.live().version == version
    assert same(store.load(version)[1], frozen.get_weights())


def test_a_position_of_a_joint_reader_lives_in_json(log):
    """The reader's position is JSON, and a reader resumed from it repeats no step."""
    with MultiAgentReader(log.root, batch_size=40, columns=PPOConfig.columns) as reader:
        first = reader.next()
        state = json.loads(json.dumps(reader.state_dict()))
    with MultiAgentReader(
        log.root, batch_size=40, columns=PPOConfig.columns, state=state
    ) as reader:
        rest = list(reader)
    assert sum(batch.env_steps() for batch in (first, *rest)) == 120
    seen = [eps for batch in (first, *rest) for eps in np.unique(batch["buyer"]["eps_id"])]
    assert len(seen) == len(set(seen)) == 30
    assert SOURCES[0] == first["buyer"]["source"][0]
