"""Sampling with several agents and policies.

Also of `policy.sampling.agent_rows` and `policy.sampling.agent_rows`.
"""

from __future__ import annotations

from collections import Counter

import gymnasium as gym
import numpy as np
import pytest

from policy.envs.env_runner import RestartLimits
from policy.sampling.callbacks import Callbacks
from policy.worker.rollout_worker import RolloutWorker
from storage.experience.multi_agent_batch import MultiAgentBatch
from tests.policy.toy_envs import AgentsEnv, CountEnv

SPACES = (AgentsEnv.observation_space, AgentsEnv.action_space)
BY_AGENT = {"a": "left", "b": "right"}
QUICK = RestartLimits(most=3, backoff=0.0)


def worker(**arguments):
    defaults = {
        "env_creator": AgentsEnv,
        "policy": {"left": None, "right": None},
        "policy_mapping_fn": lambda agent: BY_AGENT[agent],
        "rollout_fragment_length": 6,
    }
    return RolloutWorker(**defaults | arguments)


def test_agents_are_mapped_once_an_episode():
    """The mapping is called when an agent appears and holds for that episode. It gets the episode
    as a second argument if it takes one.

    Row: policy_mapping_fn(agent_id)
    """
    asked = []

    def mapping(agent, episode):
        asked.append((agent, episode.episode_id))
        return BY_AGENT[agent]

    with worker(policy_mapping_fn=mapping, rollout_fragment_length=12) as made:
        made.sample()
    assert Counter(agent for agent, _ in asked)["b"] == 2
    assert max(Counter(asked).values()) == 1


def test_a_mapping_that_is_none_or_leads_nowhere_is_refused():
    """Not callable, absent where it is needed, or an id without a policy.

    Row: policy_mapping_fn(agent_id)
    """
    with pytest.raises(ValueError, match="Policy mapping function not callable"):
        worker(policy_mapping_fn=3)
    with pytest.raises(ValueError, match="policy_mapping_fn: expected one"):
        worker(policy_mapping_fn=None)
    with (
        worker(policy_mapping_fn=lambda agent: "middle") as made,
        pytest.raises(ValueError, match="Could not find policy for agent 'a'"),
    ):
        made.sample()


def test_agents_join_late_and_leave_early():
    """Every agent has the rows in which it acted, in its own policy's batch; env steps and agent
    steps are counted separately."""
    with worker(batch_mode="complete_episodes") as made:
        batch = made.sample()
        [metrics] = made.get_metrics()
    assert isinstance(batch, MultiAgentBatch)
    assert (batch.count, batch.agent_steps()) == (6, 8)
    left, right = batch.policy_batches["left"], batch.policy_batches["right"]
    assert left["obs"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert left["terminateds"].tolist() == [False] * 5 + [True]
    assert (right["obs"][:, 0].tolist(), right["t"].tolist()) == ([2, 3], [0, 1])
    assert right["terminateds"].tolist() == [False, True]
    assert set(right["agent_id"]) == {"b"}
    assert set(left["eps_id"]) == set(right["eps_id"])
    assert (metrics.length, metrics.reward) == (6, 8.0)
    assert metrics.agent_rewards == {("a", "left"): 6.0, ("b", "right"): 2.0}


@pytest.mark.parametrize("fragment", [1, 4, 6, 7, 13])
def test_truncated_fragments_of_several_agents_are_exact_in_env_steps(fragment):
    """A sample holds fragment * copies env steps, and the samples joined hold every row once."""
    with worker(rollout_fragment_length=fragment, num_envs=2) as made:
        samples = [made.sample() for _ in range(12)]
    assert [one.count for one in samples] == [2 * fragment] * 12
    joined = MultiAgentBatch.concat_samples(samples)
    for episode in joined.policy_batches["left"].split_by_episode():
        assert episode["t"].tolist() == list(range(episode.count))
        assert (episode["new_obs"][:, 0] == episode["obs"][:, 0] + 1).all()
        assert (episode["rewards"] == 1).all()
        assert episode["terminateds"].any() == (episode.count == 6)


def test_one_policy_for_all_agents_gives_a_plain_batch():
    """The lone default policy is unwrapped; the rows name their agents."""
    with worker(policy=None, policy_mapping_fn=None) as made:
        batch = made.sample()
    assert (batch.count, set(batch["agent_id"])) == (8, {"a", "b"})


def test_policies_that_are_not_trained_are_left_as_they_are():
    """compute_gradients, learn_on_batch and foreach_trainable_policy skip them; apply_gradients
    does not.

    Row: policies_to_train
    """
    with worker(policies_to_train=["left"]) as made:
        batch = made.sample()
        before = made.get_weights()
        gradients, info = made.compute_gradients(batch)
        assert (set(gradients), info["batch_count"]) == ({"left"}, 6)
        assert set(made.learn_on_batch(batch)) == {"left"}
        assert made.foreach_trainable_policy(lambda policy, name: name) == ["left"]
        after = made.get_weights()
        assert same(before["right"], after["right"])
        assert not same(before["left"], after["left"])
        ones = [np.ones(p.shape, np.float32) for p in made.policies["right"].module.parameters()]
        made.apply_gradients({"right": ones})
        assert not same(before["right"], made.get_weights()["right"])


def test_the_filter_of_a_policy_that_is_not_trained_stands_still():
    """A frozen policy's filter would otherwise change its inputs; those of trained policies keep
    learning.

    Row: policies_to_train
    """
    with worker(policies_to_train=["left"], observation_filter="MeanStdFilter") as made:
        made.sample()
        seen = {name: (one.stats.n, one.buffer.n) for name, one in made.filters.items()}
    assert (seen["left"], seen["right"]) == ((7, 7), (0, 0))
    with RolloutWorker(CountEnv, policies_to_train=[], observation_filter="MeanStdFilter") as made:
        made.sample()
        assert made.filters["default"].stats.n == 0


def test_each_policy_explores_as_its_own_config_says():
    """One policy takes the most likely action while the other samples.

    Row: policy: class or {id: (cls, obs_space, act_space, config)}
    """
    forms = {"left": (None, *SPACES, {"explore": False}), "right": (None, *SPACES, {})}
    with worker(policy=forms, rollout_fragment_length=120, seed=1) as made:
        batches = made.sample().policy_batches
    best = {}
    for name, batch in batches.items():
        inputs = batch["action_dist_inputs"]
        taken = np.take_along_axis(inputs, batch["actions"][:, None], axis=1)[:, 0]
        best[name] = taken == inputs.max(axis=1)  # several may share it
    assert best["left"].all()
    assert not best["right"].all()


def same(one, other):
    return all(np.array_equal(one[name], other[name]) for name in one)


def test_gradients_of_several_policies_come_by_id():
    """compute_gradients returns gradients by policy id, and the number of rows separately.

    Row: compute_gradients(samples)
    """
    with worker() as made:
        gradients, info = made.compute_gradients(made.sample())
    assert set(gradients) == {"left", "right"}
    assert set(info["info"]) == {"left", "right"}
    assert info["batch_count"] == 6
    assert info["info"]["right"]["batch_count"] == 2


def test_learning_of_several_policies_gives_infos_by_id():
    """A batch of one policy is refused if there are several policies and no default.

    Row: learn_on_batch(samples)
    """
    with worker() as made:
        batch = made.sample()
        infos = made.learn_on_batch(batch)
        assert set(infos) == {"left", "right"}
        assert "loss" in infos["left"]["learner_stats"]
        with pytest.raises(ValueError, match="expected a MultiAgentBatch"):
            made.learn_on_batch(batch.policy_batches["left"])
        stats, count = made.sample_and_learn(6, 2, 4, ["advantages"])
        assert (set(stats), count) == ({"left", "right"}, 6)


def test_an_observation_hook_sees_and_changes_what_agents_observe():
    """The hook gets the env's observations by agent and returns a dict; any other result is
    refused.

    Row: observation_fn
    """

    def shifted(*, agent_obs, worker, base_env, policies, episode):
        assert set(policies) == {"left", "right"}
        return {agent: obs + 100 for agent, obs in agent_obs.items()}

    with worker(observation_fn=shifted) as made:
        left = made.sample().policy_batches["left"]
        assert left["obs"][:, 0].tolist() == [100, 101, 102, 103, 104, 105]
        assert left["new_obs"][-1, 0] == 106
    with (
        worker(observation_fn=lambda **known: [1]) as made,
        pytest.raises(ValueError, match="observation_fn: expected a dict by agent, got list"),
    ):
        made.sample()


def test_a_live_agents_last_observation_may_not_be_forgotten():
    """An env that ends for all must give the last observation of every live agent. With
    no_done_at_end it may omit it, and the row records that there is none.

    Row: no_done_at_end
    """
    forgetful = {"env_config": {"forget_last": True}}
    with (
        worker(**forgetful) as made,
        pytest.raises(ValueError, match="last observation of agent 'a' is missing"),
    ):
        made.sample()
    with worker(**forgetful, no_done_at_end=True, batch_mode="complete_episodes") as made:
        left = made.sample().policy_batches["left"]
        assert not left["terminateds"].any()
        assert left["has_new_obs"].tolist() == [True] * 5 + [False]


def test_horizons_hold_for_all_agents():
    """A horizon truncates every live agent and resets; a soft one continues with the live
    agents.
    """
    with worker(episode_horizon=3, rollout_fragment_length=6) as made:
        batch = made.sample()
        assert batch.policy_batches["left"]["truncateds"].tolist() == [False, False, True] * 2
        assert batch.policy_batches["right"]["truncateds"].tolist() == [True, True]
    with worker(episode_horizon=3, soft_horizon=True, rollout_fragment_length=6) as made:
        batch = made.sample()
        left, right = batch.policy_batches["left"], batch.policy_batches["right"]
        assert left["obs"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
        assert left["t"].tolist() == [0, 1, 2] * 2
        assert not left["truncateds"].any()
        assert right["obs"][:, 0].tolist() == [2, 3]
        assert len(set(right["eps_id"])) == 2


class Failing(AgentsEnv):
    """Raises in its third step, as often as the shared dict says."""

    def step(self, actions):
        if self.t == 2 and self.context["fails"]["left"]:
            self.context["fails"]["left"] -= 1
            raise OSError
        return super().step(actions)


def test_a_failing_env_of_several_agents_loses_its_own_episode_alone():
    """The env is recreated and begins another episode; with restarts off its exception is
    raised.
    """
    fails = {"left": 1}
    with worker(
        env_creator=Failing,
        env_config={"fails": fails},
        num_envs=2,
        restart_failed_sub_environments=True,
        restart_limits=QUICK,
    ) as made:
        batch = made.sample()
        assert batch.count == 12
        for episode in batch.policy_batches["left"].split_by_episode():
            assert episode["t"].tolist() == list(range(6))
        assert made.restarts.discarded == 1
    with (
        worker(env_creator=Failing, env_config={"fails": {"left": 1}}) as made,
        pytest.raises(OSError, match=r"^$"),
    ):
        made.sample()


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_an_env_that_is_not_mended_stops_its_worker(mode):
    """With restarts off, every call raises the same error: no partial episode is returned as a
    whole one, and no later error hides the first."""
    made = worker(
        env_creator=Failing,
        env_config={"fails": {"left": 1}},
        num_envs=2,
        batch_mode=mode,
    )
    with made:
        for _ in range(3):
            with pytest.raises(OSError, match=r"^$"):
                made.sample()


def test_agents_with_different_spaces_have_policies_of_their_own():
    """Spaces come with the policies where agents differ; policies without spaces are refused."""

    class Mixed(AgentsEnv):
        observation_spaces = {"a": SPACES[0], "b": gym.spaces.Discrete(99)}  # noqa: RUF012
        observation_space = None
        action_spaces = {"a": SPACES[1], "b": gym.spaces.Box(-1, 1, (2,), np.float32)}  # noqa: RUF012
        action_space = None

        def reset(self, seed=None):
            obs, infos = super().reset(seed)
            return self._mixed(obs), infos

        def step(self, actions):
            obs, *rest = super().step(actions)
            return (self._mixed(obs), *rest)

        def _mixed(self, obs):
            return {a: (int(o[0]) if a == "b" else o) for a, o in obs.items()}

    own = {
        "left": (None, *SPACES, {}),
        "right": (None, Mixed.observation_spaces["b"], Mixed.action_spaces["b"], {}),
    }
    with worker(env_creator=Mixed, policy=own, batch_mode="complete_episodes") as made:
        batch = made.sample()
        assert batch.policy_batches["right"]["obs"].tolist() == [2, 3]
        assert batch.policy_batches["right"]["actions"].shape == (2, 2)
        assert set(made.learn_on_batch(batch)) == {"left", "right"}
    with pytest.raises(ValueError, match="expected its spaces"):
        worker(env_creator=Mixed)


class Turns(AgentsEnv):
    """a and b act in turns for 6 steps; each earns 1 in every step."""

    def reset(self, seed=None):
        self.t, self.agents = 0, ["a", "b"]
        return {"a": np.array([0], np.float32)}, {}

    def step(self, actions):
        self.t += 1
        over = self.t >= 6
        turn = "ab"[self.t % 2]
        agents = ("a", "b") if over else (turn,)
        seen = {agent: np.array([self.t], np.float32) for agent in agents}
        flags = {"__all__": over}
        return seen, {"a": 1.0, "b": 1.0}, flags, {"__all__": False}, {}


def test_an_agent_that_waits_gathers_what_it_earns():
    """A row lasts from the agent's action to its next observation, and has all rewards of that
    time. Rewards before an agent's first action belong to no row."""
    with worker(env_creator=Turns, batch_mode="complete_episodes") as made:
        batch = made.sample()
        left, right = batch.policy_batches["left"], batch.policy_batches["right"]
        assert left["obs"][:, 0].tolist() == [0, 2, 4]
        assert left["new_obs"][:, 0].tolist() == [2, 4, 6]
        assert left["rewards"].tolist() == [2, 2, 2]
        assert right["obs"][:, 0].tolist() == [1, 3, 5]
        assert right["rewards"].tolist() == [2, 2, 1]
        assert (batch.count, batch.agent_steps()) == (6, 6)


class Steps(Callbacks):
    """Counts env steps."""

    played = 0

    def on_episode_step(self, **_):
        self.played += 1


@pytest.mark.parametrize("fragment", [1, 2, 5])
def test_env_steps_without_a_whole_row_count_for_the_next_fragment(fragment):
    """Rows last several env steps where agents act in turns: each env step is counted once."""
    with worker(env_creator=Turns, rollout_fragment_length=fragment, callbacks=Steps) as made:
        counted = 0
        for _ in range(40):
            counted += made.sample().count
            assert counted == made.callbacks.played


class PaidLate(AgentsEnv):
    """b, which leaves at step 4, earns 100 in the last step."""

    def step(self, actions):
        obs, rewards, *rest = super().step(actions)
        return (obs, rewards | ({"b": 100.0} if self.t == 6 else {}), *rest)


@pytest.mark.parametrize(("fragment", "paid", "late"), [(6, 101, None), (2, 1, 100.0)])
def test_a_reward_after_an_agents_rows_went_out_is_told(fragment, paid, late, caplog):
    """A reward of an ended agent is added to its last row while that is still buffered. A later one
    is logged as a warning, once, and appears in the episode's metrics."""
    with worker(env_creator=PaidLate, rollout_fragment_length=fragment) as made:
        batches = [made.sample() for _ in range(6)]
        rows = [b.policy_batches["right"] for b in batches if "right" in b.policy_batches]
        assert rows[0]["rewards"].tolist() == [1, paid]
        episodes = made.get_metrics()
        assert {one.custom_metrics.get("late_reward") for one in episodes} == {late}
        assert {one.reward for one in episodes} == {108.0}
    warned = [one.getMessage() for one in caplog.records if "complete_episodes" in one.getMessage()]
    assert len(warned) == (late is not None)


def acting(batch):
    """Each policy's (env_t, agent, observation); the toy environments observe their own time."""
    return {
        name: list(zip(rows["env_t"], rows["agent_id"], rows["obs"][:, 0], strict=True))
        for name, rows in batch.policy_batches.items()
    }


@pytest.mark.parametrize("env", [AgentsEnv, Turns])
@pytest.mark.parametrize("mode", ["complete_episodes", "truncate_episodes"])
def test_rows_know_the_environments_time_and_slices_go_by_it(env, mode):
    """`env_t` is the environment's step of the action, `t` the agent's own step. The rows of one
    environment step form one step of a slice, also with late agents and turns; two workers'
    episodes stay separate."""
    with worker(env_creator=env, batch_mode=mode, rollout_fragment_length=12) as made:
        batch = made.sample()
        with worker(env_creator=env, batch_mode=mode, rollout_fragment_length=12) as other:
            both = MultiAgentBatch.concat_samples([batch, other.sample()])
    for rows in batch.policy_batches.values():
        assert rows["env_t"].dtype == np.int64
        assert rows["env_t"].tolist() == rows["obs"][:, 0].tolist()
    slices = list(batch.timeslices(1))
    assert [one.count for one in slices] == [1] * batch.count
    for number, one in enumerate(slices):
        seen = {int(obs) for rows in acting(one).values() for _, _, obs in rows}
        assert seen == {number % 6}
    assert [one.count for one in both.split_by_episode()] == [6] * 4
    for rows in both.policy_batches.values():  # equal ids, chosen by two programs
        rows["eps_id"] = np.full(rows.count, "the same", object)
    assert len(both.split_by_episode()) == 2


@pytest.mark.parametrize("fragment", [1, 4, 12])
def test_the_last_rows_tell_how_many_agents_there_were(fragment):
    """The rows of agents that end with the episode have the count, however it is cut; others do
    not.
    """
    with worker(rollout_fragment_length=fragment) as made:
        batch = MultiAgentBatch.concat_samples([made.sample() for _ in range(12 // fragment)])
    left, right = batch.policy_batches["left"], batch.policy_batches["right"]
    assert left["agents"].dtype == np.int32
    assert left["agents"].tolist() == ([-1] * 5 + [2]) * 2
    assert right["agents"].tolist() == [-1] * 4
    with worker(env_creator=Turns, episode_horizon=1, soft_horizon=True) as made:
        first = made.sample().policy_batches["left"]
    assert first["agents"][0] == 1


def test_an_environment_of_one_agent_has_no_such_columns():
    """There `t` is the environment's time."""
    with worker(env_creator=CountEnv, policy=None, policy_mapping_fn=None) as made:
        assert not {"env_t", "agents"} & set(made.sample())
