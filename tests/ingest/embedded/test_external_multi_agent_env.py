"""ExternalMultiAgentEnv: agents come and go, and data of one never reaches another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ingest.embedded.external_multi_agent_env import ExternalMultiAgentEnv
from ingest.protocol.errors import Refusal, ServingStopped
from policy.envs.base_env import BaseEnv
from policy.envs.conformance import BaseEnvConformance
from storage.experience.episode import LoggedAction
from storage.spaces.descriptors import Box, Discrete, SpaceError

OBSERVATION, ACTION = Box((1,)), Discrete(100)


class Game(ExternalMultiAgentEnv):
    """Runs a function of the environment."""

    def __init__(
        self,
        body: Callable[[ExternalMultiAgentEnv], Any],
        spaces: tuple[Any, Any] = (ACTION, OBSERVATION),
        **options: Any,
    ) -> None:
        super().__init__(*spaces, **options)
        self.body = body

    def run(self) -> None:
        self.body(self)


def polls(body: Callable[[ExternalMultiAgentEnv], Any], **options: Any) -> list[tuple[Any, ...]]:
    """All polls of a program of one episode "e"; every agent's action is its observation."""
    base = Game(body, **options).to_base_env()
    assert isinstance(base, BaseEnv)
    found = []
    while True:
        try:
            poll = base.poll()
        except ServingStopped as stopped:
            if stopped.__cause__ is not None:
                raise
            return found
        assert all(set(news) <= {"e"} for news in poll)
        found.append(tuple(news.get("e") for news in poll))
        found[-1] = ({a: float(o[0]) for a, o in found[-1][0].items()}, *found[-1][1:])
        obs, _, terminateds, truncateds, _, logged = poll
        if terminateds["e"]["__all__"] or truncateds["e"]["__all__"] or logged:
            continue
        over = {a for flags in (terminateds, truncateds) for a, end in flags["e"].items() if end}
        acting = {a: int(o[0]) for a, o in obs["e"].items() if a not in over}
        base.send_actions({"e": acting})


class TestProtocol(BaseEnvConformance):
    """One agent from the start; another joins, and leaves before the end."""

    def env(self) -> BaseEnv:
        def play(env: ExternalMultiAgentEnv) -> None:
            while not env.stopped:
                episode = env.start_episode()
                env.get_action(episode, of(a=0))
                env.get_action(episode, of(a=1, b=1))
                env.log_returns(episode, {"a": 1.0, "b": 1.0}, multiagent_done_dict={"b": True})
                env.get_action(episode, of(a=2, b=2))
                env.end_episode(episode, of(a=3))

        return Game(play).to_base_env()


@pytest.fixture
def idle() -> Iterator[Callable[..., Game]]:
    made: list[Game] = []

    def make(**options: Any) -> Game:
        made.append(Game(lambda env: env._stop.wait(), **options))
        return made[-1]

    yield make
    for game in made:
        game.stop()


def of(**agents: float) -> dict[str, list[float]]:
    return {agent: [value] for agent, value in agents.items()}


def test_agents_join_late_and_leave_early():
    """An agent is there from its first observation until its done flag and last observation.

    Row: log_returns(episode_id, reward, info=None, multiagent_done_dict=None)
    """

    def body(env: ExternalMultiAgentEnv) -> None:
        env.start_episode("e")
        assert env.get_action("e", of(a=1)) == {"a": 1}
        env.log_returns("e", {"a": 1.0})
        assert env.get_action("e", of(a=2, b=3)) == {"a": 2, "b": 3}
        env.log_returns("e", {"a": 2.0, "b": 3.0}, {"b": {"k": 1}}, {"a": True, "b": False})
        assert env.get_action("e", of(a=4, b=5)) == {"b": 5}
        with pytest.raises(
            ValueError, match=r"no observations of ended agents, got some of \['a'\]"
        ):
            env.get_action("e", of(a=6, b=6))
        env.log_returns("e", {"b": 4.0})
        env.end_episode("e", of(b=6))

    no = {"__all__": False}
    assert polls(body) == [
        ({"a": 1}, {"a": 0.0}, {"a": False} | no, {"a": False} | no, {"a": {}}, None),
        (
            {"a": 2, "b": 3},
            {"a": 1.0, "b": 0.0},
            {"a": False, "b": False} | no,
            {"a": False, "b": False} | no,
            {"a": {}, "b": {}},
            None,
        ),
        (
            {"a": 4, "b": 5},
            {"a": 2.0, "b": 3.0},
            {"a": True, "b": False} | no,
            {"a": False, "b": False} | no,
            {"a": {}, "b": {"k": 1}},
            None,
        ),
        ({"b": 6}, {"b": 4.0}, {"b": True, "__all__": True}, {"b": False} | no, {"b": {}}, None),
    ]


def test_missing_agent_keys_are_filled_for_every_agent_that_is_named():
    """An agent with a reward and no observation has all keys; so do all active ones at the end.

    Row: missing agent keys
    """

    def body(env: ExternalMultiAgentEnv) -> None:
        env.start_episode("e")
        env.get_action("e", of(a=1, b=2))
        env.log_returns("e", {"b": 5.0})
        env.get_action("e", of(a=3))
        env.end_episode("e", truncated=True)

    _, second, last = polls(body)
    assert second[0] == {"a": 3}
    assert second[1] == {"a": 0.0, "b": 5.0}
    assert second[4] == {"a": {}, "b": {}}
    assert last[0] == {}
    assert last[1] == {"a": 0.0, "b": 0.0}
    assert last[2] == {"a": False, "b": False, "__all__": False}
    assert last[3] == {"a": True, "b": True, "__all__": True}


def test_training_enabled_false_holds_in_multi_agent_episodes():
    """Every agent's info has it, in every poll of the episode, also for agents that join late."""

    def body(env: ExternalMultiAgentEnv) -> None:
        env.start_episode("e", training_enabled=False)
        env.get_action("e", of(a=1))
        env.log_action("e", of(a=1, b=2), {"a": 1, "b": 2})
        env.log_returns("e", {"a": 1.0}, {"a": {"k": 1}})
        env.end_episode("e", of(a=3, b=4))

    infos = [poll[4] for poll in polls(body)]
    off = {"training_enabled": False}
    assert infos == [{"a": off}, {"a": off, "b": off}, {"a": {"k": 1} | off, "b": off}]


def test_log_action_by_agent_with_propensities_by_agent():
    """Each agent has its own action and propensity; one without a propensity has none."""

    def body(env: ExternalMultiAgentEnv) -> None:
        env.start_episode("e")
        env.log_action("e", of(a=1, b=2), {"a": 7, "b": 8}, action_logp={"b": -1.0})
        env.log_action("e", of(a=1), {"a": 9}, action_prob={"a": 1.0}, policy_version=3)
        env.end_episode("e")

    logged = [poll[5] for poll in polls(body)]
    assert logged[0] == {"a": LoggedAction(7), "b": LoggedAction(8, -1.0)}
    assert logged[1] == {"a": LoggedAction(9, 0.0, 3)}
    assert logged[2] is None


def test_what_is_said_wrongly_is_refused_in_the_call_and_names_the_agent(idle):
    """Dicts where needed, agents that act, rewards after actions; the episode is unchanged."""
    env = idle()
    env.start_episode("e")
    for call, text in (
        (lambda: env.get_action("e", [1.0]), "Episode e: obs: expected a mapping by agent"),
        (lambda: env.log_returns("e", 1.0), "Episode e: reward: expected a mapping by agent"),
        (lambda: env.get_action("e", {}), "Episode e: expected the observation of an agent"),
        (lambda: env.get_action("e", {"a": [1, 2]}), "Episode e, agent a: obs: expected"),
        (lambda: env.log_action("e", of(a=1), {"a": -1}), "Episode e, agent a: action: expected"),
        (
            lambda: env.log_action("e", of(a=1, b=1), {"a": 1}),
            r"Episode e: expected actions of the agents \['a', 'b'\], got \['a'\]",
        ),
        (
            lambda: env.log_returns("e", {}, None, {"__all__": True}),
            "Episode e: end_episode ends the episode of all agents",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    env.log_action("e", of(a=1), {"a": 1})
    with pytest.raises(Refusal, match="a reward came before any action of c"):
        env.log_returns("e", {"a": 1.0, "c": 1.0})
    with pytest.raises(Refusal, match="Episode e, agent b: the action of this step is not logged"):
        env.log_returns("e", {"a": 1.0, "b": 1.0})
    base = env.to_base_env()
    assert base.poll()[5]["e"] == {"a": LoggedAction(1)}
    env.end_episode("e")
    assert base.poll()[1] == {"e": {"a": 0.0}}


def test_agents_may_have_spaces_of_their_own():
    """Mappings agent -> space; an agent without one is refused by name."""
    spaces = {"a": Discrete(3), "b": Discrete(100)}, {"a": Box((1,)), "b": Box((1,), high=5.0)}

    def body(env: ExternalMultiAgentEnv) -> None:
        env.start_episode("e")
        assert env.get_action("e", of(a=2, b=4)) == {"a": 2, "b": 4}
        with pytest.raises(SpaceError, match="agent b: obs"):
            env.get_action("e", of(b=6))
        with pytest.raises(ValueError, match=r"expected an agent of \['a', 'b'\], got 'c'"):
            env.get_action("e", of(c=1))
        env.end_episode("e")

    assert len(polls(body, spaces=spaces)) == 2


def test_a_dict_space_of_gymnasium_is_one_space_not_spaces_by_agent():
    """A gymnasium Dict is a mapping, but here it is the space of each agent, and not one space per
    agent."""
    space = gym.spaces.Dict({"x": gym.spaces.Discrete(3)})
    env = Game(lambda env: None, spaces=(gym.spaces.Discrete(2), space))
    env.start_episode("e")
    env.log_action("e", {"a": {"x": 1}}, {"a": 1})
    base = env.to_base_env()
    assert base.poll()[0] == {"e": {"a": {"x": np.int64(1)}}}


def test_a_time_out_keeps_what_was_said_of_each_agent(idle):
    """Rewards, infos and ends sent with an unseen question are delivered with the next one."""
    env = idle(action_timeout=0.02)
    base = env.to_base_env()
    env.start_episode("e")
    env.log_action("e", of(a=1, b=1), {"a": 1, "b": 1})
    base.poll()
    env.log_returns("e", {"a": 1.0}, {"a": {"k": 1}}, {"a": True})
    with pytest.raises(TimeoutError, match="Episode e: no action"):
        env.get_action("e", of(a=2, b=2))
    env.log_action("e", of(a=2, b=3), {"b": 3})
    obs, rewards, terminateds, _, infos, _ = (news.get("e") for news in base.poll())
    assert {a: o.tolist() for a, o in obs.items()} == {"a": [2.0], "b": [3.0]}
    assert rewards == {"a": 1.0, "b": 0.0}
    assert terminateds == {"a": True, "b": False, "__all__": False}
    assert infos == {"a": {"k": 1}, "b": {}}


def test_an_agent_that_a_limit_ended_is_truncated_as_with_the_client():
    """`multiagent_truncated_dict` marks it, whatever the episode's end says of the others. An agent
    in both dicts is done, and the first report of an agent's end counts."""

    def body(env: ExternalMultiAgentEnv) -> None:
        env.start_episode("e")
        env.get_action("e", of(a=1, b=1, c=1, d=1))
        env.log_returns("e", {}, None, {"b": True}, multiagent_truncated_dict={"a": True})
        env.log_returns("e", {}, None, {"a": True}, multiagent_truncated_dict={"b": True})
        assert env.get_action("e", of(a=2, b=2, c=2, d=2)) == {"c": 2, "d": 2}
        env.log_returns("e", {}, None, {"c": True}, multiagent_truncated_dict={"c": True})
        env.log_returns("e", {}, multiagent_truncated_dict={"d": True, "c": False})
        with pytest.raises(ValueError, match="end_episode ends the episode of all agents"):
            env.log_returns("e", {}, multiagent_truncated_dict={"__all__": True})
        with pytest.raises(ValueError, match="multiagent_truncated_dict: expected a mapping"):
            env.log_returns("e", {}, multiagent_truncated_dict=["d"])
        env.end_episode("e", of(c=3, d=3))

    _, second, last = polls(body)
    no = {"c": False, "d": False, "__all__": False}
    assert second[2] == {"a": False, "b": True} | no
    assert second[3] == {"a": True, "b": False} | no
    assert last[2] == {"c": True, "d": False, "__all__": True}
    assert last[3] == {"c": False, "d": True, "__all__": False}
