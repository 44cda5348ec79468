"""Every kind of environment gives a worker the same results through poll and send_actions.

Also of `policy.envs.vector_base_env`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from pettingzoo.test.example_envs import generated_agents_parallel_v0
from pettingzoo.utils import parallel_to_aec

from policy.envs.base_env import BaseEnv, require_reset_support, to_base_env
from storage.experience.episode import DEFAULT_AGENT


class Steps(gym.Env[np.ndarray, int]):
    """Observation [copy, episode, t]; episode k ends at step k % 3 + 1, odd ones are truncated."""

    observation_space = gym.spaces.Box(-100, 100, (3,), np.float32)
    action_space = gym.spaces.Discrete(5)

    def __init__(self, copy: int = 0, fails_at: int | None = None) -> None:
        self.copy, self.episode, self.t, self.fails_at = copy, -1, 0, fails_at
        self.seeds: list[int | None] = []
        self.closed = False

    def _obs(self) -> np.ndarray:
        return np.array([self.copy, self.episode, self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode += 1
        self.t = 0
        return self._obs(), {"begins": self.episode}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.t += 1
        if self.fails_at == self.episode:
            raise ConnectionError("the simulator is gone")
        over = self.t == self.episode % 3 + 1
        odd = self.episode % 2 == 1
        return self._obs(), float(action), over and not odd, over and odd, {"t": self.t}

    def close(self) -> None:
        self.closed = True


def histories(env: BaseEnv, episodes: int, actions_n: int = 5) -> dict[int, list[list[Any]]]:
    """A worker's view of each env's first episodes: observations, rewards, ends, infos."""
    seen: defaultdict[int, list[list[Any]]] = defaultdict(list)
    running: dict[int, list[Any]] = {}

    def put(env_id: int, obs: Any, reward: Any, ends: tuple[bool, bool], info: Any) -> None:
        news = (obs.tolist(), reward, *ends, sorted(info.items()))
        running.setdefault(env_id, []).append(news)
        if any(ends):
            seen[env_id].append(running.pop(env_id))

    while not seen or min(len(seen[i]) for i in range(env.num_envs)) < episodes:
        obs, rewards, terminateds, truncateds, infos, off_policy = env.poll()
        assert off_policy == {}
        actions = {}
        for i, by_agent in obs.items():
            ends = terminateds[i]["__all__"], truncateds[i]["__all__"]
            args = by_agent[DEFAULT_AGENT], rewards[i][DEFAULT_AGENT], ends
            put(i, *args, infos[i][DEFAULT_AGENT])
            if any(ends):
                begun = env.try_reset(i)
                if begun is None:
                    continue
                put(i, begun[0][i][DEFAULT_AGENT], 0.0, (False, False), begun[1][i][DEFAULT_AGENT])
            actions[i] = {DEFAULT_AGENT: len(running[i]) % actions_n}
        env.send_actions(actions)
    env.stop()
    return {i: found[:episodes] for i, found in seen.items()}


def expected(copies: int, episodes: int) -> dict[int, list[list[Any]]]:
    env = to_base_env(Steps(0), num_envs=copies, make_env=Steps)
    return histories(env, episodes)


def test_a_single_env_tells_each_episode_from_reset_to_its_final_observation():
    """First observation, then one poll per step; the last one has the final observation."""
    first, second = expected(1, 2)[0]
    assert first == [
        ([0, 0, 0], 0.0, False, False, [("begins", 0)]),
        ([0, 0, 1], 1.0, True, False, [("t", 1)]),
    ]
    assert [row[0] for row in second] == [[0, 1, 0], [0, 1, 1], [0, 1, 2]]
    assert second[-1][2:4] == (False, True)


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_vector_tells_the_same_whatever_its_autoreset_mode(kind, mode):
    """No dummy step is reported, no step is lost: as with copies that are stepped alone."""
    vector = kind([lambda i=i: Steps(i) for i in range(3)], autoreset_mode=mode)
    assert histories(to_base_env(vector, num_envs=3), 7) == expected(3, 7)


def test_a_vector_whose_envs_all_end_at_once_goes_on():
    """In NEXT_STEP mode no env then waits for an action; poll begins the next episodes."""
    env = to_base_env(gym.make_vec("CartPole-v1", num_envs=1))
    found = histories(env, 3, actions_n=2)
    assert [len(e) >= 9 for e in found[0]] == [True] * 3
    assert all(row[1] == 1.0 for e in found[0] for row in e[1:])


def test_a_horizon_resets_what_can_be_reset():
    """With can_reset, try_reset in the middle of an episode begins the next one, of that env
    alone.
    """
    for mode in AutoresetMode:
        env = to_base_env(SyncVectorEnv([Steps, Steps], autoreset_mode=mode))
        assert env.can_reset
        env.poll()
        for env_id in (0, 1):  # through episode 0, of one step
            begun = env.try_reset(env_id)
            assert begun[0][env_id][DEFAULT_AGENT].tolist() == [0, 1, 0]
        env.send_actions({i: {DEFAULT_AGENT: 0} for i in (0, 1)})
        env.poll()
        assert env.try_reset(1)[0][1][DEFAULT_AGENT].tolist() == [0, 2, 0]
        env.send_actions({i: {DEFAULT_AGENT: 0} for i in (0, 1)})
        obs = env.poll()[0]
        assert [obs[i][DEFAULT_AGENT].tolist() for i in (0, 1)] == [[0, 1, 2], [0, 2, 1]]
        env.stop()


def test_horizon_without_reset_is_a_value_error():
    """A vector that can only reset itself cannot be cut by a horizon; the error comes at once."""
    env = to_base_env(gym.make_vec("CartPole-v1", num_envs=2))
    require_reset_support(env, None)
    require_reset_support(env, float("inf"))
    with pytest.raises(ValueError, match=r"Setting episode horizon requires reset\(\) support"):
        require_reset_support(env, 10)
    env.stop()


def test_a_failed_env_is_told_and_replaced_while_the_others_go_on():
    """The observation of a failed env is its exception; try_restart closes and recreates the env;
    the others lose no step."""
    broken = Steps(0, fails_at=0)
    env = to_base_env(broken, num_envs=2, make_env=Steps)
    env.poll()
    env.send_actions({0: {DEFAULT_AGENT: 0}, 1: {DEFAULT_AGENT: 2}})
    obs, rewards, *_ = env.poll()
    assert isinstance(obs[0], ConnectionError)
    assert rewards == {1: {DEFAULT_AGENT: 2.0}}
    with pytest.raises(ValueError, match="env 0: expected actions of the agents"):
        env.send_actions({0: {DEFAULT_AGENT: 0}})
    env.try_restart(0)
    assert broken.closed
    assert env.try_reset(0)[0][0][DEFAULT_AGENT].tolist() == [0, 0, 0]
    lone = to_base_env(Steps())
    with pytest.raises(RuntimeError, match="without make_env"):
        lone.try_restart(0)


def test_seeds_are_given_once_each_copy_its_own():
    """Copy i is first reset with seed + i; later resets continue with its own generator."""
    made = [Steps(i) for i in range(2)]
    env = to_base_env(made[0], num_envs=2, make_env=made.__getitem__, seed=5)
    env.poll()
    for i in range(2):
        env.try_reset(i)
    assert [env.seeds for env in made] == [[5, None], [6, None]]


def test_actions_of_the_wrong_agents_are_refused_before_any_env_steps():
    """The error names the env, the expected and the given agents; no env has stepped."""
    made = [Steps(i) for i in range(2)]
    env = to_base_env(made[0], num_envs=2, make_env=made.__getitem__)
    env.poll()
    with pytest.raises(ValueError, match=r"env 1: expected actions of the agents \['agent0'\]"):
        env.send_actions({0: {DEFAULT_AGENT: 0}, 1: {"other": 0}})
    assert [env.t for env in made] == [0, 0]
    vector = to_base_env(SyncVectorEnv([Steps, Steps]))
    vector.poll()
    with pytest.raises(ValueError, match="a vector steps as one"):
        vector.send_actions({0: {DEFAULT_AGENT: 0}})


class Team:
    """Agents by dicts: "b" joins late, "a" leaves early; optional keys are omitted."""

    def __init__(self) -> None:
        self.observation_spaces = dict.fromkeys("ab", Steps.observation_space)
        self.action_spaces = dict.fromkeys("ab", Steps.action_space)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        self.t = 0
        return {"a": 0}, {}

    def step(self, actions: dict[str, int]) -> tuple[dict, dict, dict, dict, dict]:
        self.t += 1
        obs = {1: {"a": 1, "b": 1}, 2: {"b": 2}, 3: {"b": 3}}[self.t]
        terminateds = {"a": self.t == 2, "__all__": self.t == 3}
        return obs, dict.fromkeys(actions, 1.0), terminateds, {}, {"b": {"t": self.t}}


def test_missing_agent_keys_are_filled():
    """Reward 0.0, terminated and truncated False, info {} for every agent that is named."""
    env = to_base_env(Team())
    assert env.observation_space == dict.fromkeys("ab", Steps.observation_space)
    env.poll()
    env.send_actions({0: {"a": 0}})
    obs, rewards, terminateds, truncateds, infos, _ = (
        news[0] for news in (*env.poll()[:5], {0: 0})
    )
    assert obs == {"a": 1, "b": 1}
    assert rewards == {"a": 1.0, "b": 0.0}
    assert terminateds == {"a": False, "b": False, "__all__": False}
    assert truncateds == {"a": False, "b": False, "__all__": False}
    assert infos == {"a": {}, "b": {"t": 1}}


def test_an_agent_that_left_is_not_waited_for():
    """Only agents that have an observation and have not ended must act."""
    env = to_base_env(Team())
    env.poll()
    env.send_actions({0: {"a": 0}})
    env.poll()
    env.send_actions({0: {"a": 0, "b": 0}})
    obs, _, terminateds, *_ = env.poll()
    assert obs[0] == {"b": 2}
    assert terminateds[0]["a"]
    with pytest.raises(ValueError, match=r"expected actions of the agents \['b'\]"):
        env.send_actions({0: {"a": 0, "b": 0}})
    env.send_actions({0: {"b": 0}})
    assert env.poll()[2][0]["__all__"]


def test_a_pettingzoo_env_runs_to_its_end():
    """A real parallel environment with changing agents and without "__all__"."""
    parallel = generated_agents_parallel_v0.parallel_env()
    env = to_base_env(parallel, seed=3)
    news = env.poll()
    seen = set(news[0][0])
    for step in range(60):
        ended = {a for i in (2, 3) for a, over in news[i][0].items() if over}
        if step == 59:
            parallel.max_cycles = 0
        env.send_actions({0: {a: env.action_space(a).sample() for a in news[0][0].keys() - ended}})
        news = env.poll()
        seen |= set(news[0][0])
    assert (news[2][0]["__all__"], news[3][0]["__all__"]) == (False, True)
    assert len(seen) > 5
    assert env.try_reset(0)[0][0].keys() == set(parallel.agents)
    env.stop()


def test_what_is_no_environment_is_refused_with_what_would_be():
    """The error names the supported kinds, and the converter for turn-based environments."""
    with pytest.raises(TypeError, match="expected a gymnasium Env or VectorEnv"):
        to_base_env(object())
    turns = parallel_to_aec(generated_agents_parallel_v0.parallel_env())
    with pytest.raises(TypeError, match="aec_to_parallel"):
        to_base_env(turns)
    with pytest.raises(ValueError, match="2 copies need make_env"):
        to_base_env(Steps(), num_envs=2)
    with pytest.raises(ValueError, match="num_envs: expected 1 or more"):
        to_base_env(Steps(), num_envs=0)
    vector = to_base_env(SyncVectorEnv([Steps, Steps]))
    with pytest.raises(ValueError, match="expected 2 of the vector, got 3"):
        to_base_env(vector.env, num_envs=3)
    with pytest.raises(RuntimeError, match="cannot be made anew"):
        vector.try_restart(0)
    assert to_base_env(vector) is vector
