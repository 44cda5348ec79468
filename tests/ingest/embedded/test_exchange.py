"""The state machine of an exchange, against a model with a list for each episode."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ingest.embedded.exchange import Exchange
from ingest.protocol.errors import ClientError, Refusal, ServingStopped
from storage.experience.episode import LoggedAction

NAMES = st.sampled_from(["x", "y", "z"])
AGENTS = st.sets(st.sampled_from(["a", "b"]), min_size=1)


class Exchanging(RuleBasedStateMachine):
    """Programs start, log, ask and end at random; a worker polls at random.

    Model: `waiting[name]` is the news that polls have yet to deliver, in order, each `(agents
    observed, rewards, over, agents logged)`; `pending` is what the next news will include.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exchange = Exchange(timeout=0.002)
        self.waiting: defaultdict[str, list[Any]] = defaultdict(list)
        self.pending: dict[str, dict[str, float]] = {}
        self.acted: dict[str, set[str]] = {}
        self.over: set[str] = set()
        self.count = 0

    def note(self, name: str, obs: set[str], over: bool, logged: set[str]) -> None:
        self.waiting[name].append((obs, self.pending[name], over, logged))
        self.pending[name] = {}

    @rule(name=NAMES)
    def start(self, name: str) -> None:
        if name in self.pending or name in self.over:
            with pytest.raises(Refusal, match=f"Episode {name}"):
                self.exchange.start(name, True)
            return
        self.exchange.start(name, True)
        self.pending[name], self.acted[name] = {}, set()

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), agents=AGENTS)
    def tell(self, data: Any, agents: set[str]) -> None:
        name = data.draw(st.sampled_from(sorted(self.pending)))
        logged = {agent: LoggedAction(self.count) for agent in agents}
        self.exchange.tell(name, dict.fromkeys(agents, 0), logged)
        self.acted[name] |= agents
        self.note(name, agents, False, agents)

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), agents=AGENTS)
    def reward(self, data: Any, agents: set[str]) -> None:
        name = data.draw(st.sampled_from(sorted(self.pending)))
        self.count += 1
        amounts = dict.fromkeys(agents, 2.0**self.count)
        if agents <= self.acted[name]:
            self.exchange.reward(name, amounts, {}, {})
            for agent, amount in amounts.items():
                self.pending[name][agent] = self.pending[name].get(agent, 0.0) + amount
        else:
            with pytest.raises(Refusal, match="before any action"):
                self.exchange.reward(name, amounts, {}, {})

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), agents=AGENTS)
    def ask_and_be_answered(self, data: Any, agents: set[str]) -> None:
        name = data.draw(st.sampled_from(sorted(self.pending)))
        self.drain()
        got: list[Any] = []
        self.exchange._timeout = 30.0
        thread = threading.Thread(
            target=lambda: got.append(self.exchange.ask(name, dict.fromkeys(agents, 0), b"k"))
        )
        thread.start()
        self.note(name, agents, False, set())
        self.poll()
        answer = dict.fromkeys(agents, self.count)
        self.exchange.send({name: answer}, lambda _name, _agent, action: action)
        thread.join()
        self.exchange._timeout = 0.002
        assert got == [answer]
        self.acted[name] |= agents

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), agents=AGENTS)
    def ask_in_vain(self, data: Any, agents: set[str]) -> None:
        """Ask for an action while nobody polls: the episode and its pending data are unchanged."""
        name = data.draw(st.sampled_from(sorted(self.pending)))
        with pytest.raises(TimeoutError, match=f"Episode {name}"):
            self.exchange.ask(name, dict.fromkeys(agents, 0), b"k")

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), agents=st.sets(st.sampled_from(["a", "b"])))
    def end(self, data: Any, agents: set[str]) -> None:
        name = data.draw(st.sampled_from(sorted(self.pending)))
        self.exchange.end(name, dict.fromkeys(agents, 0), truncated=False)
        self.note(name, agents, True, set())
        del self.pending[name]
        self.over.add(name)

    @precondition(lambda self: any(self.waiting.values()))
    @rule()
    def poll(self) -> None:
        result = self.exchange.poll()
        assert result[0].keys() == {name for name, news in self.waiting.items() if news}
        for name in result[0]:
            obs, rewards, over, logged = self.waiting[name].pop(0)
            assert result[0][name].keys() == obs
            assert {a: r for a, r in result[1][name].items() if r} == rewards
            assert result[2][name]["__all__"] == over
            assert result[5].get(name, {}).keys() == logged

    def drain(self) -> None:
        while any(self.waiting.values()):
            self.poll()

    @invariant()
    def the_count_of_what_waits_is_right(self) -> None:
        """A wrong count would block programs, or a poll, for ever."""
        assert self.exchange._pending == sum(len(news) for news in self.waiting.values())
        assert self.exchange._ready.keys() == {name for name, news in self.waiting.items() if news}

    def teardown(self) -> None:
        """All news is delivered, and then the end."""
        self.exchange.finish(None)
        self.drain()
        with pytest.raises(ServingStopped, match=r"^Serving thread has stopped\.$"):
            self.exchange.poll()


TestExchange = Exchanging.TestCase
TestExchange.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_question_behind_logged_news_is_the_one_that_is_taken_back():
    """A time-out withdraws only the question; news logged before it is still delivered."""
    exchange = Exchange(timeout=0.005)
    exchange.start("e", True)
    exchange.tell("e", {"a": 1}, {"a": LoggedAction(1)})
    exchange.reward("e", {"a": 2.0}, {}, {})
    with pytest.raises(TimeoutError, match="Episode e"):
        exchange.ask("e", {"a": 2}, b"k")
    assert exchange.poll()[0] == {"e": {"a": 1}}
    exchange.end("e", {}, truncated=False)
    assert exchange.poll()[1] == {"e": {"a": 2.0}}


def test_a_question_behind_logged_news_is_polled_before_it_can_be_answered():
    """An action sent while older news is still to be polled answers nothing."""
    exchange = Exchange(timeout=30.0)
    exchange.start("e", True)
    exchange.tell("e", {"a": 1}, {"a": LoggedAction(1)})
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(exchange.ask("e", {"a": 2}, b"k")))
    thread.start()
    polled = 0
    while polled < 2:
        polled += len(exchange.poll()[0])
        exchange.send({"e": {"a": polled}}, lambda _name, _agent, action: action)
    thread.join()
    assert got == [{"a": 2}]


def test_only_the_same_observation_may_be_asked_again():
    """After a time-out of a question that was polled."""
    exchange = Exchange(timeout=0.02)
    exchange.start("e", True)
    with pytest.raises(ValueError, match="expected the observation of an agent"):
        exchange.ask("e", {}, b"k")
    polling = threading.Thread(target=exchange.poll)
    polling.start()
    while polling.is_alive():  # on a busy machine a question is taken back before it is polled
        with pytest.raises(TimeoutError):
            exchange.ask("e", {"a": 1}, b"k")
    with pytest.raises(ClientError, match="the same observation"):
        exchange.ask("e", {"a": 1}, b"other")
    exchange.send({"e": {"a": 7}}, lambda _name, _agent, action: action)
    assert exchange.ask("e", {"a": 1}, b"k") == {"a": 7}
