"""Learning from a worker's input: it has the columns that policies need, or the error names
them.
"""

import math

import numpy as np
import pytest

from policy.algorithms.ppo import PPOConfig
from policy.algorithms.trainable_policy import TrainablePolicy
from policy.sampling.postprocessing import finish_read
from policy.worker.rollout_worker import RolloutWorker
from storage.experience.interfaces import InputReader
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import SampleBatch
from storage.reading.multi_agent_reader import MultiAgentReader
from storage.reading.shard_reader import ShardReader
from storage.shards.output_writer import ParquetOutputWriter
from tests.policy.toy_envs import AgentsEnv, CountEnv


def worker(**arguments):
    defaults = {"env_creator": CountEnv, "rollout_fragment_length": 15, "seed": 1}
    return RolloutWorker(**defaults | {"batch_mode": "complete_episodes"} | arguments)


def to_shards(ioctx):
    return ParquetOutputWriter(ioctx.log_dir, ioctx.worker.descriptors())


@pytest.fixture
def played(tmp_path):
    """The steps that a worker played, in memory and as shards under tmp_path."""
    with worker(output_creator=to_shards, log_dir=str(tmp_path)) as made:
        return made.sample()


class Given(InputReader):
    """Returns one batch again and again."""

    def __init__(self, batch):
        self.batch = batch

    def next(self, timeout=None):
        return self.batch.copy()


def keyed(batch, name):
    return {(row["eps_id"], row["t"]): float(row[name]) for row in batch.rows()}


@pytest.mark.parametrize("mode", ["transitions", "fragments", "episodes"])
def test_a_sample_of_shards_is_as_ready_for_learning_as_a_played_one(tmp_path, played, mode):
    """Every mode of the reader gives the same advantages and the same gradient step."""

    def from_shards(ioctx):
        return ShardReader(ioctx.log_dir, policy_id="default", batch_size=15, mode=mode)

    with worker() as one, worker(input_creator=from_shards, log_dir=str(tmp_path)) as other:
        read = other.sample()
        assert read.count == played.count
        for name in ("advantages", "value_targets"):
            assert keyed(read, name) == pytest.approx(keyed(played, name))
        mine, theirs = one.learn_on_batch(played), other.learn_on_batch(read)
        assert theirs["learner_stats"] == pytest.approx(mine["learner_stats"])
        for name, array in one.get_weights()["default"].items():
            np.testing.assert_allclose(other.get_weights()["default"][name], array, atol=1e-6)


def test_episodes_of_several_agents_are_learned_from_as_well(tmp_path):
    """Each policy gets the advantages of its own agents' runs."""
    several = {
        "env_creator": AgentsEnv,
        "policy": {"left": None, "right": None},
        "policy_mapping_fn": {"a": "left", "b": "right"}.get,
        "log_dir": str(tmp_path),
    }
    with worker(output_creator=to_shards, **several) as made:
        mine = made.sample()
    with worker(input_=lambda ioctx: MultiAgentReader(ioctx.log_dir), **several) as made:
        read = made.sample()
        assert set(made.learn_on_batch(read)) == {"left", "right"}
    for name, rows in mine.policy_batches.items():
        theirs = keyed(read.policy_batches[name], "advantages")
        assert theirs == pytest.approx(keyed(rows, "advantages"))


def test_a_policys_own_postprocessing_sees_what_is_read(tmp_path, played):
    """One call for each run of one agent's rows in one episode, in the order of t."""
    seen = []

    class Shaped(TrainablePolicy):
        def postprocess_trajectory(self, batch, other_agent_batches=None, episode=None):
            seen.append(batch["t"].tolist())
            batch["rewards"] = batch["rewards"] + 100
            return self.postprocess(batch)

    def from_shards(ioctx):
        return ShardReader(ioctx.log_dir, shuffle=100, seed=3, batch_size=15)

    reading = {"input_creator": from_shards, "log_dir": str(tmp_path), "policy": Shaped}
    with worker(**reading) as made:
        read = made.sample()
        assert made.learn_on_batch(read)["batch_count"] == read.count
    assert keyed(read, "rewards") == {k: v + 100 for k, v in keyed(played, "rewards").items()}
    assert all(run == list(range(len(run))) for run in seen)
    assert sum(map(len, seen)) == played.count


def test_a_row_that_is_left_out_ends_the_fragment_before_it(played):
    """A logged step lies among a policy's own: the one before it bootstraps from the value of its
    next observation, as if the learner had dropped the row first."""
    policy = worker().get_policy()
    source = played["source"].copy()
    source[2] = "logged"
    names = [name for name in played if name not in ("advantages", "value_targets")]
    mixed = SampleBatch({**played.select(names), "source": source})
    found = finish_read(policy, mixed)
    usable = mixed.take(source == "on_policy")
    expected = policy.algorithm.advantages(usable)
    np.testing.assert_allclose(found["advantages"][source == "on_policy"], expected.advantages)


@pytest.mark.parametrize("own", [False, True])
def test_a_damaged_shard_inside_an_episode_parts_it(tmp_path, own):
    """The rows before and after the damaged one are learned from as two fragments, and a policy's
    own `postprocess_trajectory` gets each of them alone."""
    seen = []

    class Seeing(TrainablePolicy):
        def postprocess_trajectory(self, batch, other_agent_batches=None, episode=None):
            seen.append(batch["t"].tolist())
            return self.postprocess(batch)

    with worker(env_config={"length": 15}) as made:
        played = made.sample()
        output = ParquetOutputWriter(tmp_path, made.descriptors())
        for start in (0, 5, 10):
            output.write(played.slice(start, start + 5))
        output.close()
    shards = sorted(tmp_path.rglob("*.parquet"))
    assert len(shards) == 3
    with shards[1].open("r+b") as damaged:
        damaged.seek(60)
        damaged.write(b"damage")

    def from_shards(ioctx):
        return ShardReader(ioctx.log_dir, policy_id="default", batch_size=10)

    policy = Seeing if own else TrainablePolicy
    reading = {"input_creator": from_shards, "log_dir": str(tmp_path), "policy": policy}
    with worker(**reading, rollout_fragment_length=10) as made:
        read = made.sample()
        apart = [made.get_policy().postprocess(played.slice(start, start + 5)) for start in (0, 10)]
    assert sorted(read["t"].tolist()) == [*range(5), *range(10, 15)]
    for name in ("advantages", "value_targets"):
        expected = keyed(apart[0], name) | keyed(apart[1], name)
        assert keyed(read, name) == pytest.approx(expected)
    if own:
        assert sorted(seen) == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]


def test_rows_that_are_read_in_any_order_get_their_own_advantages(played):
    """A reader that shuffles mixes episodes; an advantage stays with its row."""
    policy = worker().get_policy()
    rows = played.select([name for name in played if name not in ("advantages", "value_targets")])
    order = np.random.default_rng(0).permutation(rows.count)
    expected, found = finish_read(policy, rows), finish_read(policy, rows.take(order))
    for name in ("advantages", "value_targets"):
        np.testing.assert_array_equal(found[name], expected[name][order])


def test_the_filter_of_a_trained_policy_learns_from_what_is_read(tmp_path, played):
    """The filter learns as from samples; that of an untrained policy stays unchanged."""

    def from_shards(ioctx):
        return ShardReader(ioctx.log_dir, batch_size=15)

    reading = {"input_creator": from_shards, "log_dir": str(tmp_path)}
    for train, seen in ((None, played.count), ([], 0)):
        with worker(**reading, observation_filter="MeanStdFilter", policies_to_train=train) as made:
            made.sample()
            assert made.filters["default"].stats.n == seen


def test_columns_that_are_missing_are_named(tmp_path, played):
    """The reader was asked for too few columns: the worker names the ones that learning needs."""

    def from_shards(ioctx):
        return ShardReader(ioctx.log_dir, columns=("obs", "actions", "rewards"), batch_size=15)

    with worker(input_creator=from_shards, log_dir=str(tmp_path)) as made:
        read = made.sample()
        with pytest.raises(ValueError, match=r"with the columns \['terminateds', .*'source'"):
            made.learn_on_batch(read)


@pytest.mark.parametrize("kind", ["empty", "logged"])
def test_an_idle_or_off_policy_input_changes_nothing_and_keeps_the_shape(played, kind):
    """`learn_on_batch` without a row to learn from: the same keys, the same weights."""
    given = SampleBatch()
    if kind == "logged":
        source = np.full(played.count, "logged", object)
        given = SampleBatch({**played, "source": source})
    reading = {"input_creator": lambda ioctx: Given(given), "batch_mode": "truncate_episodes"}
    with worker(**reading) as made:
        before = made.get_weights()["default"]
        found = made.learn_on_batch(made.sample())
        usual = made.learn_on_batch(played.copy())
    assert found["batch_count"] == 0
    assert found["left_out"] == ({"not_on_policy": played.count} if kind == "logged" else {})
    assert set(found) == set(usual)
    assert set(found["learner_stats"]) == set(usual["learner_stats"])
    assert all(map(math.isnan, found["learner_stats"].values()))
    with worker(**reading) as made:
        made.learn_on_batch(made.sample())
        for name, array in before.items():
            np.testing.assert_array_equal(made.get_weights()["default"][name], array)


def test_policies_without_rows_are_in_the_info_all_the_same():
    """A joint batch in which no agent of one policy acted, or none at all."""
    several = {
        "env_creator": AgentsEnv,
        "policy": {"left": None, "right": None},
        "policy_mapping_fn": {"a": "left", "b": "right"}.get,
    }
    with worker(**several) as made:
        whole = made.sample()
        usual = made.learn_on_batch(whole)
        for batch in (
            MultiAgentBatch({"left": whole.policy_batches["left"]}, whole.count),
            MultiAgentBatch({}, 0),
        ):
            found = made.learn_on_batch(batch)
            assert set(found) == {"left", "right"}
            assert found["right"]["batch_count"] == 0
            assert set(found["right"]["learner_stats"]) == set(usual["right"]["learner_stats"])


def test_a_reader_brings_what_is_wanted_unless_it_was_told_itself(tmp_path, played):
    """A reader without `columns` reads those that the worker asks for, and no others; given
    `columns` stay."""
    wanted = PPOConfig.columns
    with ShardReader(tmp_path, batch_size=100) as reader:
        reader.want(wanted)
        assert set(reader.next()) >= set(wanted)
    for given in ({}, {"columns": ("obs", "rewards")}):
        with ShardReader(tmp_path, batch_size=100, **given) as reader:
            if given:
                reader.want(wanted)
            assert "source" not in reader.next()
    with MultiAgentReader(tmp_path, batch_size=100, columns=("obs",)) as reader:
        reader.want(wanted)
        assert "source" not in reader.next().policy_batches["default"]
