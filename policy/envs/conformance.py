"""What every `BaseEnv` has to pass: an environment of one's own inherits the suite.

class TestMyEnv(BaseEnvConformance):
    def env(self) -> BaseEnv: ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from policy.envs.base_env import BaseEnv, Poll
from storage.conformance import expect, expect_error
from storage.experience.episode import ALL_AGENTS
from storage.spaces.gymnasium_spaces import to_gym


class BaseEnvConformance:
    """Checks of the promises of `BaseEnv`; each raises ConformanceError.

    Each call of `env` gives a new environment, whose first poll asks for an action. With any
    actions, some episode ends within `polls` polls.
    """

    polls: ClassVar[int] = 40

    def env(self) -> BaseEnv:
        """A new environment."""
        raise NotImplementedError

    def action(self, env: BaseEnv, agent: Any) -> Any:
        """An action of an agent; by default any of its `action_space`."""
        space = env.action_space
        if isinstance(space, Mapping) and not isinstance(space, gym.Space):
            space = space[agent]
        elif callable(space):
            space = space(agent)
        return (space if isinstance(space, gym.Space) else to_gym(space)).sample()

    def test_a_poll_is_whole(self) -> None:
        """Six dicts of the same envs, with an entry for every agent that any of them names."""
        env = self.env()
        expect("the methods of BaseEnv are there", isinstance(env, BaseEnv))
        ended: dict[Any, set[Any]] = {}
        episodes = 0
        for news in self._played(env):
            expect("a poll is six dicts", [isinstance(one, dict) for one in news], [True] * 6)
            for one in news[1:5]:
                expect("the dicts have the same envs", set(one), set(news[0]))
            expect("logged actions are of these envs", set(news[5]) <= set(news[0]))
            for env_id in news[0]:
                _check_entries(env_id, news)
                gone = ended.setdefault(env_id, set())
                back = gone & set(news[0][env_id])
                expect(f"env {env_id!r}: an agent that has ended is not observed", back, set())
                gone |= _ended(news, env_id)
                if ALL_AGENTS in gone:
                    ended.pop(env_id)
                    episodes += 1
        expect(f"an episode ends within {self.polls} polls", episodes > 0)
        env.stop()

    def test_observations_stay_as_they_were(self) -> None:
        """The env does not write later ones into the same memory."""
        env = self.env()
        seen = [(news[0], _plain(news[0])) for news in self._played(env)]
        for obs, before in seen:
            expect("an observation stays as it was", _plain(obs), before)
        env.stop()

    def test_a_reset_begins_an_episode(self) -> None:
        """Also in the middle of one, if `can_reset`: its agents are the ones that wait."""
        env = self.env()
        first = env.poll()
        if env.can_reset:
            actions = {}
            for env_id in first[0]:
                obs, infos = env.try_reset(env_id) or ({}, {})
                expect("a reset is of this env", (set(obs), set(infos)), ({env_id}, {env_id}))
                expect("infos are of observed agents", set(infos[env_id]) <= set(obs[env_id]))
                actions[env_id] = {agent: self.action(env, agent) for agent in obs[env_id]}
            env.send_actions(actions)
            expect("each env has news of its step", set(env.poll()[0]), set(first[0]))
        env.stop()

    def test_actions_that_nobody_waits_for_are_refused(self) -> None:
        """ValueError for an unknown env, and for other agents; the right ones are taken then."""
        env = self.env()
        actions = self._actions(env, env.poll())
        env_id = next(iter(actions))
        by_agent = actions[env_id]
        some = next(iter(by_agent.values()))
        for what, wrong in (
            ("an unknown env", {**actions, "no such env": by_agent}),
            ("an unknown agent", {**actions, env_id: {**by_agent, "nobody": some}}),
            ("no agent", {**actions, env_id: {}}),
        ):
            refused = partial(env.send_actions, wrong)
            expect_error(f"actions of {what} are refused", ValueError, refused)
        env.send_actions(actions)
        expect("the step is in the next poll", env_id in env.poll()[0])
        env.stop()

    def test_an_env_is_made_anew_or_refuses(self) -> None:
        """`try_restart`, then `try_reset`; RuntimeError if that is impossible."""
        env = self.env()
        env_id = next(iter(env.poll()[0]))
        try:
            env.try_restart(env_id)
        except RuntimeError:
            env.stop()
            return
        begun = env.try_reset(env_id)
        expect("the new one begins an episode", begun is not None and bool(begun[0][env_id]))
        env.stop()

    def test_stopping_twice_is_fine(self) -> None:
        """In the middle of an episode."""
        env = self.env()
        env.poll()
        env.stop()
        env.stop()

    def _played(self, env: BaseEnv) -> Iterator[Poll]:
        for _ in range(self.polls):
            news = env.poll()
            yield news
            actions = self._actions(env, news)
            if actions:
                env.send_actions(actions)

    def _actions(self, env: BaseEnv, news: Poll) -> dict[Any, dict[Any, Any]]:
        """An action for every agent that waits, after a reset of the envs whose episode is over."""
        actions = {}
        for env_id, obs in news[0].items():
            expect(f"env {env_id!r} does not fail", isinstance(obs, dict))
            waiting = set(obs) - _ended(news, env_id) - set(news[5].get(env_id, ()))
            if ALL_AGENTS in _ended(news, env_id):
                begun = env.try_reset(env_id)
                waiting = set() if begun is None else set(begun[0][env_id])
            if waiting:
                actions[env_id] = {agent: self.action(env, agent) for agent in waiting}
        return actions


def _ended(news: Poll, env_id: Any) -> set[Any]:
    """The agents whose end a poll tells; ALL_AGENTS for the episode."""
    flags = [*news[2][env_id].items(), *news[3][env_id].items()]
    return {agent for agent, over in flags if over}


def _check_entries(env_id: Any, news: Poll) -> None:
    """Check the entries of one env."""
    agents = {agent for one in news[:5] for agent in one[env_id]} - {ALL_AGENTS}
    for what, index, kind, more in (
        ("rewards", 1, float, set()),
        ("terminateds", 2, bool, {ALL_AGENTS}),
        ("truncateds", 3, bool, {ALL_AGENTS}),
        ("infos", 4, dict, set()),
    ):
        entries = news[index][env_id]
        expect(f"env {env_id!r}: {what} have every agent", set(entries), agents | more)
        for agent, value in entries.items():
            text = f"env {env_id!r}: {what} of {agent!r} are {kind.__name__}"
            expect(f"{text}, not {type(value).__name__}", isinstance(value, kind))


def _plain(value: Any) -> Any:
    """A copy, in plain types."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return np.array(value).tolist()
