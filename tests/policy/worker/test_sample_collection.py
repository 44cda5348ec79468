"""Sampling in its own thread, ahead of the calls of sample()."""

from __future__ import annotations

import threading

import pytest

from policy.worker.rollout_worker import RolloutWorker
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
