"""Episodes excluded from training: in no sample, but stored and marked, for every kind of env."""

import gymnasium as gym
import numpy as np
import pytest

from ingest.embedded.external_env import ExternalEnv
from policy.worker.rollout_worker import RolloutWorker
from storage.experience.interfaces import OutputWriter
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import concat_samples
from storage.reading.shard_reader import ShardReader
from storage.shards.output_writer import ParquetOutputWriter
from tests.policy.toy_envs import AgentsEnv, CountEnv


class EveryOther(CountEnv):
    """Every second episode is not for training; observations hold the episode's number.

    `context`: said: "reset" or the number of the step whose info marks it.
    """

    def __init__(self, context=None):
        super().__init__(context)
        self.episode = 0
        self.marked_step = self.context.get("said", "reset")

    def _seen(self, info, where):
        if self.episode % 2 == 0 and where == self.marked_step:
            info = {**info, "training_enabled": False}
        return np.array([self.episode], np.float32), info

    def reset(self, *, seed=None, options=None):
        _, info = super().reset(seed=seed)
        self.episode += 1
        return self._seen(info, "reset")

    def step(self, action):
        _, reward, terminated, truncated, info = super().step(action)
        obs, info = self._seen(info, self.t)
        return obs, reward, terminated, truncated, info


class Program(ExternalEnv):
    """The same as an external program."""

    def run(self):
        for episode in range(1, 200):
            name = self.start_episode(training_enabled=bool(episode % 2))
            seen = np.array([episode], np.float32)
            for t in range(5):
                self.get_action(name, seen)
                self.log_returns(name, float(t + 1))
            self.end_episode(name, seen)


def vector(context):
    return gym.vector.SyncVectorEnv([EveryOther])


def program(context):
    return Program(CountEnv.action_space, CountEnv.observation_space)


def to_shards(ioctx):
    return ParquetOutputWriter(ioctx.log_dir, ioctx.worker.descriptors())


def worker(**arguments):
    defaults = {"env_creator": EveryOther, "rollout_fragment_length": 15, "seed": 1}
    return RolloutWorker(**defaults | arguments)


KINDS = [
    {},
    {"batch_mode": "complete_episodes"},
    {"rollout_fragment_length": 4},
    {"num_envs": 3},
    {"env_config": {"said": 2}},
    {"env_config": {"said": 5}},
    {"remote_worker_envs": True, "num_envs": 2},
    {"sample_async": True},
    {"env_creator": vector, "batch_mode": "complete_episodes"},
    {"env_creator": program, "batch_mode": "complete_episodes"},
]


@pytest.mark.parametrize("arguments", KINDS, ids=lambda one: ",".join(one) or "plain")
def test_the_rows_of_a_skipped_episode_are_stored_and_in_no_sample(tmp_path, arguments):
    """Samples have odd episodes alone, whole and with the requested number of steps. Readers skip
    the even ones by default.

    Row: start_episode(episode_id=None, training_enabled=True)
    """
    with worker(output_creator=to_shards, log_dir=str(tmp_path), **arguments) as made:
        batch = concat_samples([made.sample() for _ in range(4)])
        made.sample()  # writes the episodes skipped since
    excluded = made.excluded["training_enabled"]
    assert (batch["obs"][:, 0] % 2 == 1).all()
    assert all("training_enabled" not in info for info in batch["infos"])
    if arguments.get("batch_mode") != "complete_episodes":
        steps = arguments.get("rollout_fragment_length", 15) * arguments.get("num_envs", 1)
        assert batch.count == 4 * steps
    with ShardReader(tmp_path, batch_size=10_000) as reader:
        kept = reader.next()
    with ShardReader(tmp_path, batch_size=10_000, training_disabled=True) as reader:
        every = reader.next()
    assert (kept["obs"][:, 0] % 2 == 1).all()
    skipped = every.take(every["obs"][:, 0] % 2 == 0)
    assert 0 < skipped.count <= excluded
    assert every.count == kept.count + skipped.count
    assert skipped["rewards"][:5].tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("env_creator", [EveryOther, program])
def test_the_filter_does_not_learn_from_them(env_creator):
    """Episodes that learners skip do not change a running mean either."""
    with worker(
        env_creator=env_creator,
        observation_filter="MeanStdFilter",
        batch_mode="complete_episodes",
    ) as made:
        while made.excluded["training_enabled"] < 10:
            made.sample()
        stats = made.filters["default"].stats
        assert stats.mean[0] == pytest.approx(stats.n / 5)  # of the first odd numbers
        seen = made.get_metrics()
    assert len(seen) > stats.n / 5  # skipped episodes are in the metrics all the same


MOST = 20_000


class Never(CountEnv):
    """No episode is for training, except the number `but` (default: none), counted from 1.

    Raises after `MOST` steps, which only a sample that does not end takes.
    """

    episode = 0
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps > MOST:
            raise OSError("expected a sample to end before")
        return super().step(action)

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.episode += 1
        kept = self.episode == self.context.get("but")
        return obs, {**info, "training_enabled": kept}


class NeverAgents(AgentsEnv):
    """The same with agents."""

    resets = 0

    def reset(self, seed=None):
        self.resets += 1
        if self.resets > MOST:
            raise OSError("expected a sample to end before")
        obs, _ = super().reset(seed)
        return obs, {"a": {"training_enabled": False}}


class NeverProgram(ExternalEnv):
    """The same as an external program."""

    def run(self):
        for _ in range(MOST):
            name = self.start_episode(training_enabled=False)
            self.get_action(name, np.zeros(1, np.float32))
            self.end_episode(name, np.zeros(1, np.float32))


ENDLESS = 10**9
SKIPPED = [
    {},
    {"batch_mode": "complete_episodes"},
    pytest.param({"num_envs": 3}, marks=pytest.mark.long),
    {"env_config": {"length": ENDLESS}},
    pytest.param({"remote_worker_envs": True, "num_envs": 2}, marks=pytest.mark.long),
    {"sample_async": True},
    {"fake_sampler": True},
    {"env_creator": lambda context: gym.vector.SyncVectorEnv([Never])},
    pytest.param(
        {"env_creator": lambda context: NeverProgram(Never.action_space, Never.observation_space)},
        marks=pytest.mark.long,
    ),
]


@pytest.mark.parametrize("arguments", SKIPPED, ids=lambda one: ",".join(one) or "plain")
def test_a_sample_ends_if_every_episode_is_skipped(tmp_path, caplog, arguments):
    """It has no rows, the columns of any other sample, and a warning. The episodes are counted,
    in the metrics and stored.

    Row: start_episode(episode_id=None, training_enabled=True)
    """
    arguments = {"env_creator": Never, "output_creator": to_shards} | arguments
    with worker(log_dir=str(tmp_path), **arguments) as made:
        samples = [made.sample() for _ in range(3)]
        excluded = made.excluded["training_enabled"]
        assert made.learn_on_batch(samples[0])["batch_count"] == 0
        assert made.sample_and_learn(15, 2, 4, ["advantages"])[1] == 0
        if arguments.get("env_config", {}).get("length") != ENDLESS:
            assert made.get_metrics()
    with worker(env_creator=CountEnv) as usual:
        whole = usual.sample()
    for empty in samples:
        assert empty.count == 0
        assert set(whole) <= set(empty)
        for name, column in whole.items():
            assert (empty[name].dtype, empty[name].shape) == (column.dtype, (0, *column.shape[1:]))
    assert caplog.text.count("a sample without rows: every episode is excluded") == 1
    assert excluded >= 3 * 15
    with ShardReader(tmp_path, training_disabled=True) as reader:
        assert sum(batch.count for batch in reader) > 0


def test_a_sample_of_several_policies_without_rows_has_the_columns_of_each():
    """The same by policy, with the columns of episodes with several agents."""
    spaces = AgentsEnv.observation_space, AgentsEnv.action_space
    policies = {name: (None, *spaces, {}) for name in ("a", "b")}
    arguments = {"policy": policies, "policy_mapping_fn": lambda agent: agent}
    with worker(env_creator=NeverAgents, **arguments) as made:
        empty = made.sample()
    with worker(env_creator=AgentsEnv, **arguments) as usual:
        whole = usual.sample()
    assert isinstance(empty, MultiAgentBatch)
    assert (empty.count, empty.total) == (0, 0)
    for name in policies:
        assert set(empty[name]) == set(whole[name])
        assert empty[name]["agents"].dtype == whole[name]["agents"].dtype


def test_rows_before_the_skipped_episodes_are_handed_out():
    """A sample that was begun ends with fewer rows, and the next one has none."""
    with worker(env_creator=Never, env_config={"but": 2}, batch_mode="complete_episodes") as made:
        assert made.sample()["rewards"].tolist() == [1, 2, 3, 4, 5]
        assert made.sample().count == 0


def test_few_episodes_for_training_still_make_whole_samples():
    """Nine of ten episodes are skipped: every sample has its number of steps."""

    class Tenth(Never):
        def reset(self, *, seed=None, options=None):
            obs, info = super().reset(seed=seed)
            return obs, {**info, "training_enabled": self.episode % 10 == 0}

    with worker(env_creator=Tenth) as made:
        assert [made.sample().count for _ in range(5)] == [15] * 5


class FullOnce(OutputWriter):
    """Refuses the first write."""

    def __init__(self):
        self.refused, self.rows = False, []

    def write(self, batch):
        if not self.refused:
            self.refused = True
            raise OSError("no space left")
        self.rows.append(("training_enabled" in batch, batch.count))


def test_rows_that_could_not_be_stored_are_stored_with_the_next_sample():
    """Rows that a full disk refused are stored with the next sample."""
    output = FullOnce()
    with worker(output_creator=lambda ioctx: output) as made:
        made.sample()
        assert output.refused
        assert output.rows[0] == (True, 5)
        assert sum(count for skipped, count in output.rows if skipped) == made.excluded.total()
