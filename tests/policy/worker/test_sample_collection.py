"""Sampling in its own thread, ahead of the calls of sample(), and samples without rows."""

from __future__ import annotations

import threading

import pytest

from policy.algorithms.trainable_policy import TrainablePolicy
from policy.worker.rollout_worker import RolloutWorker
from storage.experience.interfaces import EndOfInput, InputReader
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import SampleBatch
from tests.policy.toy_envs import CountEnv


def worker(**arguments):
    return RolloutWorker(**{"env_creator": CountEnv, "rollout_fragment_length": 4} | arguments)


def test_a_thread_samples_ahead_and_stamps_the_version_of_each_step():
    """sample() returns the steps played meanwhile; after set_weights, every later fragment uses the
    new version.

    Row: sample_async
    """
    with worker(sample_async=True, observation_filter="ConcurrentMeanStdFilter") as made:
        assert made.sample()["policy_version"].tolist() == [-1] * 4
        made.set_weights(made.get_weights(), version=3)
        versions = [set(made.sample()["policy_version"].tolist()) for _ in range(9)]
        assert versions[-1] == {3}
        assert all(len(one) == 1 for one in versions)
        threads = [one for one in threading.enumerate() if one.name == "sampler"]
        assert threads
    assert not any(one.is_alive() for one in threads)


def test_what_the_thread_raises_reaches_the_caller():
    """An error of the sampling thread is raised by the call after the last good batch, and by every
    later one.

    Row: sample_async
    """
    with worker(sample_async=True, env_config={"fails": {2: 10**9}, "length": 9}) as made:
        for _ in range(2):
            with pytest.raises(OSError, match=r"^$"):
                made.sample()


class Idle(InputReader):
    """Returns these batches, then nothing; `next` raises after 1,000 batches."""

    def __init__(self, *batches):
        self.batches, self.asked = list(batches), 0

    def next(self, timeout=None):
        self.asked += 1
        if self.asked > 1000:
            raise EndOfInput("expected a sample to end before")
        return self.batches.pop(0) if self.batches else SampleBatch()


SPACES = CountEnv.observation_space, CountEnv.action_space
MODES = ["truncate_episodes", "complete_episodes"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policies", [["default"], ["a", "b"]])
def test_a_sample_of_an_idle_input_has_the_columns_of_its_policies(mode, policies):
    """The input has nothing yet: the sample has no rows, and the columns that a policy's own
    samples have.

    Row: input_creator(ioctx) / output_creator(ioctx)
    """
    with worker() as usual:
        whole = usual.sample()
    with RolloutWorker(
        policy={name: (None, *SPACES, {}) for name in policies},
        input_creator=lambda ioctx: Idle(),
        batch_mode=mode,
    ) as made:
        empty = made.sample()
        assert (empty.count, isinstance(empty, MultiAgentBatch)) == (0, len(policies) > 1)
        rows = MultiAgentBatch.of(empty).policy_batches
        assert list(rows) == policies
        for batch in rows.values():
            assert set(whole) <= set(batch)
            assert batch["obs"].shape == (0, 1)
            assert batch["advantages"].shape == (0,)
        assert made.sample_and_learn(100, 1, 0)[1] == 0


def test_a_sample_without_rows_keeps_the_columns_of_the_last_one():
    """Also a reader's own ones; what was changed in one sample is in no other."""
    own = SampleBatch(obs=[[1.0]], extra=[2])
    with RolloutWorker(
        policy={"default": (None, *SPACES, {})}, input_creator=lambda ioctx: Idle(own)
    ) as made:
        assert made.sample().count == 1
        first, second = made.sample(), made.sample()
        del first["extra"]
        assert sorted(second) == ["extra", "obs"]
        assert second["obs"].shape == (0, 1)


class NoRows(TrainablePolicy):
    """Removes all rows."""

    def postprocess_trajectory(self, batch, other_agent_batches=None, episode=None):
        return self.postprocess(batch).slice(0, 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_sample_ends_if_postprocessing_removes_all_rows(mode, caplog):
    """As if every episode was excluded."""
    with worker(policy=NoRows, batch_mode=mode) as made:
        empty = made.sample()
    assert (empty.count, empty["advantages"].shape) == (0, (0,))
    assert "a sample without rows" in caplog.text
