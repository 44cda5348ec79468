"""Episodes excluded from training: in no sample, but stored and marked, for every kind of env."""

import gymnasium as gym
import numpy as np
import pytest

from ingest.embedded.external_env import ExternalEnv
from policy.worker.rollout_worker import RolloutWorker
from storage.experience.interfaces import OutputWriter
from storage.experience.sample_batch import concat_samples
from storage.reading.shard_reader import ShardReader
from storage.shards.output_writer import ParquetOutputWriter
from tests.policy.toy_envs import CountEnv


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
