"""Sampling: fragments and episodes, horizons, clipping, failing copies.

Also of `policy.envs.vector_env` and `policy.sampling.vector_sampler`.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.algorithms.trainable_policy import TrainablePolicy
from policy.envs.env_runner import EnvFailed, RestartLimits
from policy.inference.numpy_policy import NumpyPolicy
from policy.sampling.fragment_buffers import CUTS
from policy.worker.rollout_worker import RolloutWorker
from tests.policy.toy_envs import BoxEnv, CountEnv, LimitedEnv

QUICK = RestartLimits(most=3, backoff=0.0)


def worker(**arguments):
    return RolloutWorker(**{"env_creator": CountEnv, "rollout_fragment_length": 4} | arguments)


def cuts(batch):
    return [CUTS[code] for code in batch["cut"]]


# --- batch modes -----------------------------------------------------------------------------


def test_the_fragment_length_is_that_of_every_copy():
    """100 by default; batch_steps is the deprecated name and warns.

    Row: batch_steps / rollout_fragment_length = 100
    """
    with RolloutWorker(CountEnv, num_envs=2) as made:
        assert made.sample().count == 200
    with pytest.warns(DeprecationWarning, match="rollout_fragment_length"):
        made = RolloutWorker(CountEnv, batch_steps=7)
    assert made.sample().count == 7


@given(st.integers(1, 4), st.integers(1, 13), st.integers(1, 9), st.booleans())
def test_truncated_fragments_are_exact_and_continue_each_other(copies, fragment, length, truncated):
    """Every sample holds fragment * copies steps. The joined samples of a copy are its episodes
    from the first step to the last, and every row leads to the next.

    Row: batch_mode="truncate_episodes"
    """
    context = {"length": length, "truncated": truncated}
    with worker(num_envs=copies, rollout_fragment_length=fragment, env_config=context) as made:
        samples = [made.sample() for _ in range(3)]
    assert [one.count for one in samples] == [fragment * copies] * 3
    for copy in range(copies):
        rows = [one.slice(copy * fragment, (copy + 1) * fragment) for one in samples]
        t = np.concatenate([one["t"] for one in rows])
        assert t.tolist() == [i % length for i in range(3 * fragment)]
        assert (np.concatenate([one["rewards"] for one in rows]) == t + 1).all()
        obs = np.concatenate([one["obs"][:, 0] for one in rows])
        after = np.concatenate([one["new_obs"][:, 0] for one in rows])
        assert (obs == t).all()
        assert (after == t + 1).all()
        ids = np.concatenate([one["eps_id"] for one in rows])
        assert len(set(ids)) == -(-3 * fragment // length)
        flags = np.concatenate([one["truncateds" if truncated else "terminateds"] for one in rows])
        assert (flags == (t == length - 1)).all()


def test_a_row_says_why_nothing_is_carried_over_it():
    """The last row of a cut fragment bootstraps, a terminated row does not.

    Row: batch_mode="truncate_episodes"
    """
    with worker(env_config={"length": 3}) as made:
        assert cuts(made.sample()) == ["", "", "terminated", "fragment"]
    with worker(env_config={"length": 3, "truncated": True}) as made:
        batch = made.sample()
        assert cuts(batch) == ["", "", "truncated", "fragment"]
        assert batch["truncateds"].tolist() == [False, False, True, False]
    with pytest.raises(ValueError, match="Unsupported batch mode: half_episodes"):
        worker(batch_mode="half_episodes")


class Halves(TrainablePolicy):
    """Keeps every second row of a trajectory."""

    def postprocess_trajectory(self, batch, other_agent_batches=None, episode=None):
        return batch.slice(0, None, 2)


def test_postprocessing_may_change_the_size():
    """A policy's own postprocessing gets one trajectory at a time and may drop rows: a sample never
    takes more than num_envs batches of the input.

    Row: batch_mode="truncate_episodes"
    """
    with worker(policy=Halves, num_envs=2, env_config={"length": 3}) as made:
        batch = made.sample()
        assert batch["t"].tolist() == [0, 2, 0, 0, 2, 0]


def test_complete_episodes_are_whole_and_reach_the_target():
    """Whole episodes, at least fragment * copies steps, one episode per batch of the input.

    Row: batch_mode="complete_episodes"
    """
    with worker(batch_mode="complete_episodes", num_envs=2, env_config={"length": 3}) as made:
        batch = made.sample()
        episodes = batch.split_by_episode()
        assert [one["t"].tolist() for one in episodes] == [[0, 1, 2]] * 3
        assert batch.count == 9


def test_an_episode_longer_than_its_buffers_is_kept_whole():
    """Buffers grow.

    Row: batch_mode="complete_episodes"
    """
    with worker(batch_mode="complete_episodes", env_config={"length": 700}) as made:
        batch = made.sample()
        assert batch["t"].tolist() == list(range(700))
        assert (batch["obs"][:, 0] == np.arange(700)).all()


# --- horizons --------------------------------------------------------------------------------


def test_a_horizon_truncates_and_resets():
    """The episode ends as truncated, not terminated; None means the environment's own limit.

    Row: episode_horizon
    """
    with worker(episode_horizon=2, rollout_fragment_length=5) as made:
        batch = made.sample()
        assert batch["t"].tolist() == [0, 1, 0, 1, 0]
        assert batch["truncateds"].tolist() == [False, True, False, True, False]
        assert not batch["terminateds"].any()
        assert cuts(batch) == ["", "horizon", "", "horizon", "fragment"]
        assert [one.length for one in made.get_metrics()] == [2, 2]
    with pytest.raises(ValueError, match="at most the env's own limit of 50 steps, got 51"):
        worker(env_creator=LimitedEnv, episode_horizon=51)
    with worker(env_creator=LimitedEnv, episode_horizon=50) as made:
        made.sample()


def test_a_soft_horizon_goes_on_under_a_new_id():
    """No step is marked as done, the environment is not reset, rewards count from 0 again, and the
    ids are random.

    Row: soft_horizon
    """
    with worker(episode_horizon=2, soft_horizon=True, env_config={"length": 100}) as made:
        batch = made.sample()
        assert batch["obs"][:, 0].tolist() == [0, 1, 2, 3]
        assert batch["t"].tolist() == [0, 1, 0, 1]
        assert not (batch["terminateds"] | batch["truncateds"]).any()
        assert cuts(batch) == ["", "soft_horizon", "", "soft_horizon"]
        ids = batch["eps_id"].tolist()
        assert len(set(ids)) == 2
        assert all(len(one) == 32 for one in ids)
        assert [one.reward for one in made.get_metrics()] == [3.0, 7.0]


def test_without_done_at_the_end_nothing_is_recorded_as_done():
    """Whether terminated, truncated or at a horizon: both flags stay False, and the environment is
    reset.

    Row: no_done_at_end
    """
    for context in ({"length": 3}, {"length": 3, "truncated": True}):
        with worker(no_done_at_end=True, env_config=context) as made:
            batch = made.sample()
            assert batch["t"].tolist() == [0, 1, 2, 0]
            assert not (batch["terminateds"] | batch["truncateds"]).any()
    with worker(no_done_at_end=True, episode_horizon=2) as made:
        assert not made.sample()["truncateds"].any()


class Remembering:
    """A recurrent actor whose state counts its actions."""

    def __init__(self, policy):
        weights = policy.get_weights()
        self._inner, self.version = NumpyPolicy(policy.spec, weights), policy.version

    def act(self, flat, rng, *, explore=True, state=None):
        return self._inner.act(flat, rng, explore=explore), [state[0] + 1]


class Recurrent(TrainablePolicy):
    def initial_state(self):
        return [np.zeros(1, np.float32)]

    def actor(self):
        return Remembering(self)


def test_recurrent_state_begins_with_an_episode_and_outlives_a_soft_horizon():
    """Each row has the state in which its action was chosen; a reset restarts the state, a soft
    horizon keeps it.

    Row: soft_horizon
    """
    with worker(policy=Recurrent, env_config={"length": 3}) as made:
        assert made.sample()["state_in_0"][:, 0].tolist() == [0, 1, 2, 0]
    with worker(policy=Recurrent, episode_horizon=2, soft_horizon=True) as made:
        assert made.sample()["state_in_0"][:, 0].tolist() == [0, 1, 2, 3]


# --- clipping --------------------------------------------------------------------------------


def test_rewards_are_clipped_for_learning_and_raw_ones_stay():
    """True and "sign" give signs, a number a range, None and False nothing. The raw rewards are
    kept in their own column; metrics use those, and advantages the clipped ones.

    Row: clip_rewards
    """
    for mode, expected in ((True, [1, 1, 1, 1]), ("sign", [1, 1, 1, 1]), (2.5, [1, 2, 2.5, 2.5])):
        with worker(clip_rewards=mode, batch_mode="complete_episodes", episode_horizon=4) as made:
            batch = made.sample()
            assert batch["rewards"].tolist() == expected
            assert batch["raw_rewards"].tolist() == [1, 2, 3, 4]
            assert made.get_metrics()[0].reward == 10
    for mode in (None, False):
        with worker(clip_rewards=mode) as made:
            batch = made.sample()
            assert "raw_rewards" not in batch
            assert batch["rewards"].tolist() == [1, 2, 3, 4]


def test_clipped_actions_are_sent_and_unclipped_ones_stored():
    """The stored action is the one whose logp is stored; the action sent has its own column where
    it differs.

    Row: clip_actions=True
    """
    made_envs = []
    config = {"made": made_envs}
    with worker(env_creator=lambda c: BoxEnv(c), env_config=config, seed=1) as made:
        batch = made.sample()
        assert (abs(batch["actions"]) > 0.1).any()
        np.testing.assert_array_equal(batch["actions_env"], batch["actions"].clip(-0.1, 0.1))
        np.testing.assert_array_equal(batch["actions_env"], np.stack(made_envs[0].actions))
        policy = made.get_policy()
        flat = policy.flatten(batch["obs"])
        logp = policy.logp(flat, {"": batch["actions"]})
        np.testing.assert_allclose(batch["action_logp"], logp, atol=1e-5)
    with worker(env_creator=lambda c: BoxEnv(c), env_config=config, clip_actions=False) as made:
        batch = made.sample()
        assert "actions_env" not in batch
        np.testing.assert_array_equal(batch["actions"], np.stack(made_envs[1].actions))
    with worker() as made:
        assert "actions_env" not in made.sample()


def test_observations_are_compressed_last_and_come_back():
    """Observations are compressed by row or in bulk, in place, as the last stage. Decompression
    returns the raw arrays and uses no pickle.

    Row: compress_observations
    """
    plain = worker(seed=3).sample()
    for how in (True, "bulk"):
        with worker(seed=3, compress_observations=how) as made:
            batch = made.sample()
            assert batch["obs"].dtype != np.float32
            assert batch["rewards"].dtype == np.float64
            back = batch.decompress_if_needed()
            for name in ("obs", "new_obs"):
                np.testing.assert_array_equal(back[name], plain[name])


@pytest.mark.parametrize("how", [True, "bulk"])
def test_a_worker_learns_from_its_own_compressed_samples(how):
    """Every method that learns gives the result of plain samples; the sample itself stays
    compressed.

    Row: compress_observations
    """
    with worker(seed=3) as plain, worker(seed=3, compress_observations=how) as packed:
        expected, batch = plain.sample(), packed.sample()
        for mine, theirs in zip(
            packed.compute_gradients(batch)[0], plain.compute_gradients(expected)[0], strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
        assert packed.learn_on_batch(batch) == plain.learn_on_batch(expected)
        assert batch["obs"].dtype == object
        steps, fields = batch.count, ["obs", "advantages"]
        learned = packed.sample_and_learn(steps, 2, 4, fields)
        assert learned == plain.sample_and_learn(steps, 2, 4, fields)


# --- several copies --------------------------------------------------------------------------


def test_only_the_failed_copys_partial_episode_is_lost():
    """A copy that raises is recreated; its episode's rows are discarded and counted. All other rows
    are there, and the sample has its full size.

    Row: num_envs, VectorEnv
    """
    fails = {2: 1}
    with worker(
        num_envs=2,
        rollout_fragment_length=6,
        env_config={"fails": fails, "length": 4},
        restart_failed_sub_environments=True,
        restart_limits=QUICK,
    ) as made:
        batch = made.sample()
        assert batch.count == 12
        assert [one["t"].tolist() for one in batch.split_by_episode()] == [[0, 1, 2, 3], [0, 1]] * 2
        assert (made.restarts.total, made.restarts.discarded) == (1, 1)
        assert {one.length for one in made.get_metrics()} == {4}
    with worker(env_config={"fails": {1: 1}}) as made, pytest.raises(OSError, match=r"^$"):
        made.sample()


class FailsOnce(CountEnv):
    """An environment whose copy 1 raises once, in the step at t = 3."""

    def __init__(self, context=None):
        super().__init__(context)
        self.context = context

    def step(self, action):
        if self.context.vector_index == 1 and self.t == 3 and self.context["fails_once"]:
            raise self.context["fails_once"].pop()
        return super().step(action)


def test_after_an_error_that_is_not_mended_nothing_torn_is_handed_out():
    """With restarts off, a copy's error stops the worker: complete rows come first, then the same
    error at every call, never rows with a played step missing."""
    fails = [OSError("broke")]
    with worker(
        env_creator=FailsOnce,
        num_envs=2,
        rollout_fragment_length=2,
        env_config={"fails_once": fails, "length": 50},
    ) as made:
        assert made.sample()["t"].tolist() == [0, 1, 0, 1]
        for _ in range(3):
            with pytest.raises(OSError, match="broke"):
                made.sample()
    assert fails == []


def test_a_copy_that_only_fails_is_given_up():
    """Restarts of a copy are bounded over all of its failures without progress.

    Row: num_envs, VectorEnv
    """
    with (
        worker(
            env_config={"fails": {1: 10**9}},
            restart_failed_sub_environments=True,
            restart_limits=QUICK,
        ) as made,
        pytest.raises(EnvFailed, match="failed 4 times"),
    ):
        made.sample()


def vector_of(mode):
    def create(context):
        envs = [lambda: CountEnv({"length": 3}), lambda: CountEnv({"length": 5})]
        return gym.vector.SyncVectorEnv(envs, autoreset_mode=mode)

    return create


@pytest.mark.parametrize("mode", gym.vector.AutoresetMode)
def test_a_gymnasium_vector_logs_no_dummy_step(mode):
    """In every autoreset mode, rows are the environments' own steps, each with its next
    observation.

    Row: num_envs, VectorEnv
    """
    with worker(env_creator=vector_of(mode), num_envs=2, rollout_fragment_length=12) as made:
        batch = made.sample()
    assert batch.count == 24
    assert (batch["obs"][:, 0] == batch["t"]).all()
    assert (batch["new_obs"][:, 0] == batch["t"] + 1).all()
    assert (batch["rewards"] == batch["t"] + 1).all()
    lengths = [one.count for one in batch.split_by_episode() if one["terminateds"][-1]]
    assert Counter(lengths) == {3: 4, 5: 2}


def test_copies_in_processes_give_the_same_rows():
    """Each copy runs in its own process: no dummy step, equal numbers, in any order of the copies'
    answers; with a wait the batches are equal.

    Row: remote_worker_envs, remote_env_batch_wait_ms, async_remote_worker_envs
    """
    for arguments in (
        {"remote_worker_envs": True, "remote_env_batch_wait_ms": 1000.0},
        {"async_remote_worker_envs": True},
    ):
        with worker(num_envs=2, env_config={"length": 3}, seed=1, **arguments) as made:
            batches = [made.sample() for _ in range(3)]
        for batch in batches:
            assert batch.count == 8
            assert (batch["obs"][:, 0] == batch["t"]).all()
            assert (batch["new_obs"][:, 0] == batch["t"] + 1).all()
            assert (batch["terminateds"] == (batch["t"] == 2)).all()
            assert all(
                info["t"] == t + 1 for info, t in zip(batch["infos"], batch["t"], strict=True)
            )


class Dies(CountEnv):
    """An environment whose process ends in the middle of a step, once."""

    def step(self, action):
        flag = Path(self.context["flag"])
        if self.t == 1 and not flag.exists():
            flag.touch()
            os._exit(9)
        return super().step(action)


def test_a_copys_process_may_die(tmp_path):
    """When a copy's process dies, its partial episode is discarded and a new process takes over.

    Row: remote_worker_envs, remote_env_batch_wait_ms, async_remote_worker_envs
    """
    with worker(
        env_creator=Dies,
        remote_worker_envs=True,
        env_config={"length": 3, "flag": str(tmp_path / "died")},
        restart_failed_sub_environments=True,
        restart_limits=QUICK,
    ) as made:
        assert made.sample()["t"].tolist() == [0, 1, 2, 0]
        assert made.restarts.discarded == 1


# --- exploring -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["worker", "policy"])
def test_a_policy_that_does_not_explore_takes_the_most_likely_action(where):
    """Set for the worker or in the policy's own config.

    Row: model_config, policy_config
    """
    settings = {"explore": False} if where == "worker" else {"policy_config": {"explore": False}}
    with worker(seed=1, rollout_fragment_length=40, **settings) as made:
        batch = made.sample()
    inputs = batch["action_dist_inputs"]
    taken = np.take_along_axis(inputs, batch["actions"][:, None], axis=1)[:, 0]
    np.testing.assert_array_equal(taken, inputs.max(axis=1))  # several may share it
