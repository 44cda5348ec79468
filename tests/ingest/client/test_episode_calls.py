"""The calls of an episode in every form, and where the forms differ.

One agent's values are plain, several agents' are by agent. A program makes the calls on a client of
a collector, on an asyncio client, or on an environment of a worker in its process. Also of
`ingest.client.arguments`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingest.client.async_client import AsyncPolicyClient
from ingest.client.policy_client import PolicyClient
from ingest.embedded.external_env import ExternalEnv
from ingest.embedded.external_multi_agent_env import ExternalMultiAgentEnv
from ingest.protocol.errors import Refusal
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.experience.episode import DEFAULT_AGENT
from storage.spaces.descriptors import SpaceError, parse_space
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.ingest.external_worker import Worker

OBSERVATION, ACTION = parse_space("box:4"), parse_space("discrete:2")
SPEC = PolicySpec(OBSERVATION, ACTION, ModuleSpec(hidden=()))
AGENTS = {DEFAULT_AGENT: "default"}
FORMS = ("remote", "local", "async", "several", "async-several", "worker", "worker-several")
Step = tuple[list[float], int, float, str]


def obs(first: int) -> Any:
    return np.array([first, 0, 0, 0], np.float32)


def decide(observation: Any) -> int:
    """The action of the published policy, which is all but deterministic."""
    return int(observation[0] > 0)


def publish(root: Path) -> None:
    """A policy that decides as `decide` does."""
    weights = {name: np.zeros_like(w) for name, w in Policy(SPEC).get_weights().items()}
    (name,) = (name for name, w in weights.items() if w.ndim == len(w) == 2)
    weights[name][:, 0] = [-1000.0, 1000.0]
    store = WeightStore(root, "default")
    store.publish(store.add_candidate(weights, spec=SPEC.to_json(), metrics={}, lineage={}))


class Served(ExternalEnv):
    """Its calls are made by the test, until the worker is stopped."""

    def __init__(self, *spaces: Any) -> None:
        super().__init__(*spaces)
        self.over = threading.Event()

    def run(self) -> None:
        self.over.wait()


class ServedSeveral(Served, ExternalMultiAgentEnv):
    """The same for several agents."""


class Form:
    """The calls of one form, for one agent with plain values.

    `calls` has them; `has_one` is whether its values are plain, too.
    """

    def __init__(self, name: str, root: Path) -> None:
        self.has_one = not name.endswith("several")
        self.at_worker, self.is_async = name.startswith("worker"), name.startswith("async")
        self.root, self._loop, self.is_closed = root, asyncio.Runner(), False
        self.collector: CollectorProcess | None = None
        if self.at_worker:
            env = (Served if self.has_one else ServedSeveral)(ACTION, OBSERVATION)
            self.calls: Any = env
            self.worker = Worker(env.to_base_env(), decide)
            self._thread = threading.Thread(target=self.worker.run)
            self._thread.start()
            return
        declare(root)
        publish(root)
        self.collector = CollectorProcess(root)
        mode = "local" if name == "local" else "remote"
        kind = AsyncPolicyClient if self.is_async else PolicyClient
        self.calls = kind(self.collector.address, mode, max_wait=60.0, timeout=60.0)

    def close(self) -> None:
        """Have all calls delivered. A second time it does nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.collector is None:
            self.calls.over.set()
            self._thread.join()
            return
        if self.is_async:
            self._loop.run(self.calls.aclose())
        else:
            self.calls.close()
        assert self.collector.stop() == 0
        self.collector.close()
        self._loop.close()

    def given(self, value: Any) -> Any:
        """A value as this form has it."""
        return value if self.has_one or value is None else {DEFAULT_AGENT: value}

    def start(self, name: str | None = None) -> str:
        """Start an episode."""
        if self.at_worker or self.has_one:
            return str(self.calls.start_episode(name))
        return str(self.calls.start_episode(name, policy_id=AGENTS))

    def act(self, name: str | Sequence[str], seen: Any) -> Any:
        """Get an action, or those of several episodes."""
        if isinstance(name, str):
            seen, own = self.given(seen), (lambda found: found)
        else:
            seen = {one: self.given(value) for one, value in seen.items()}
            own = dict.copy
        found = self.calls.get_action(name, seen)
        found = self._loop.run(found) if self.is_async else found
        if isinstance(name, str):
            return found if self.has_one else found[DEFAULT_AGENT]
        return own(found if self.has_one else {n: by[DEFAULT_AGENT] for n, by in found.items()})

    def log(self, name: str, seen: Any, action: Any, prob: float | None = None) -> None:
        """Log an action."""
        seen, action, prob = map(self.given, (seen, action, prob))
        self.calls.log_action(name, seen, action, action_prob=prob)

    def pay(self, name: str, reward: Any, info: Any = None) -> None:
        """Log a reward."""
        self.calls.log_returns(name, self.given(reward), self.given(info))

    def end(self, name: str, seen: Any = None, *, truncated: bool = False) -> None:
        """End an episode."""
        self.calls.end_episode(name, self.given(seen), truncated=truncated)

    def stored(self) -> dict[str, tuple[list[Step], str]]:
        """Close the form; return its episodes' steps and endings."""
        self.close()
        if self.at_worker:
            return {
                name: ([(o, a, r, src) for o, a, r, _, src in seen.steps], str(seen.ended))
                for name, seen in self.worker.episodes.items()
            }
        found: dict[str, tuple[list[Step], str]] = {}
        for row in sorted(shard_rows(self.root), key=lambda row: (row["eps_id"], row["t"])):
            steps, _ = found.setdefault(row["eps_id"], ([], ""))
            steps.append((row["obs"].tolist(), row["actions"], row["rewards"], row["source"]))
            found[row["eps_id"]] = steps, row["ended"]
        return found


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Form]:
    made = Form(request.param, tmp_path)
    yield made
    made.close()


class TestEveryForm:
    """What holds in each form; the functions below say where they differ."""

    def test_the_same_calls_make_the_same_steps(self, form: Form) -> None:
        """Logged and chosen actions, added rewards, and both ways to end.

        Row: get_action(episode_id, obs)
        """
        one, two = form.start("one"), form.start("two")
        assert form.act(one, obs(1)) == 1
        form.pay(one, 0.5, {"n": 1})
        form.pay(one, 1.0)
        form.log(one, obs(-2), 1, 0.25)
        form.pay(one, 2.0)
        assert form.act([one, two], {one: obs(-3), two: obs(4)}) == {one: 0, two: 1}
        form.end(one, obs(5))
        form.end(two, truncated=True)
        stored = form.stored()
        chosen = "on_policy"
        assert stored == {
            "one": (
                [
                    (obs(1).tolist(), 1, 1.5, chosen),
                    (obs(-2).tolist(), 1, 2.0, "logged"),
                    (obs(-3).tolist(), 0, 0.0, chosen),
                ],
                "terminated",
            ),
            "two": ([(obs(4).tolist(), 1, 0.0, chosen)], "truncated"),
        }

    def test_a_taken_id_cannot_be_started(self, form: Form) -> None:
        """The texts tell an open episode from an ended one."""
        form.start("mine")
        with pytest.raises(ValueError, match=r"^Episode mine is already started$"):
            form.start("mine")
        form.log("mine", obs(0), 1)
        form.end("mine")
        with pytest.raises(ValueError, match=r"^Episode mine has already completed\.$"):
            form.start("mine")
        with pytest.raises(ValueError, match="expected a string of 1 to 256 characters"):
            form.start("")
        assert len(form.start()) == (32 if form.at_worker else 24)

    def test_an_unknown_and_an_ended_id_are_refused_by_every_call(self, form: Form) -> None:
        """Row: unknown id"""
        form.end(form.start("done"))
        for call in (
            lambda name: form.act(name, obs(0)),
            lambda name: form.log(name, obs(0), 1),
            lambda name: form.pay(name, 1.0),
            lambda name: form.end(name, obs(0)),
        ):
            with pytest.raises(ValueError, match=r"^Episode nobody not found\."):
                call("nobody")
            with pytest.raises(ValueError, match=r"^Episode done has already completed\.$"):
                call("done")

    def test_a_reward_needs_an_action(self, form: Form) -> None:
        """It is an error, not lost; the episode goes on."""
        form.start("e")
        with pytest.raises(Refusal, match=r"Episode e: a reward came before any action"):
            form.pay("e", 1.0)
        form.log("e", obs(0), 1)
        with pytest.raises(ValueError, match=r"^Episode e.*: reward: expected a finite number"):
            form.pay("e", float("nan"))
        with pytest.raises(ValueError, match=r"^Episode e.*: info: expected JSON values"):
            form.pay("e", 1.0, {"n": float("nan")})
        form.pay("e", 2.0)
        form.end("e")
        assert form.stored()["e"][0][0][2] == 2.0

    def test_a_value_that_does_not_fit_changes_nothing(self, form: Form) -> None:
        """It raises in the call, with the place; a propensity is checked as well."""
        form.start("e")
        form.act("e", obs(1))
        for wrong in (lambda: form.act("e", [1.0]), lambda: form.log("e", [1.0], 1)):
            with pytest.raises(SpaceError, match=r"^Episode e.*: obs: expected"):
                wrong()
        for action, prob, text in ((2, None, "action: expected"), (1, 1.5, "action_prob: exp")):
            with pytest.raises(ValueError, match=rf"^Episode e.*: {text}"):
                form.log("e", obs(0), action, prob)
        with pytest.raises(ValueError, match="expected a mapping from the given ids"):
            form.act(["e", "f"], {"e": obs(1)})
        with pytest.raises(ValueError, match="truncated: expected True or False"):
            form.end("e", truncated="no")  # type: ignore[arg-type]  # what is tested
        form.log("e", obs(3), 0)
        form.end("e")
        assert [step[:2] for step in form.stored()["e"][0]] == [
            (obs(1).tolist(), 1),
            (obs(3).tolist(), 0),
        ]

    def test_a_reward_of_a_step_that_is_not_logged_is_not_the_earlier_ones(
        self, form: Form
    ) -> None:
        """log_returns raises the error of the step's log_action until log_action succeeds."""
        form.start("e")
        with pytest.raises(ValueError, match="action: expected"):
            form.log("e", obs(0), -1)
        with pytest.raises(Refusal, match=r"the action of this step is not logged \(Episode e"):
            form.pay("e", 9.0)
        form.log("e", obs(0), 0)
        form.pay("e", 1.0)
        with pytest.raises(ValueError, match="obs: expected"):
            form.log("e", [1.0], 0)
        with pytest.raises(Refusal, match="the action of this step is not logged"):
            form.pay("e", 9.0)
        form.log("e", obs(1), 1)
        form.pay("e", 2.0)
        form.end("e")
        assert [step[2] for step in form.stored()["e"][0]] == [1.0, 2.0]

    def test_one_agents_values_are_plain_and_several_agents_are_mappings(self, form: Form) -> None:
        """A difference: each kind refuses the other's values and says what it expects."""
        form.start("e")
        form.log("e", obs(0), 1)
        over: dict[str, Any] = {"multiagent_done_dict": {DEFAULT_AGENT: True}}
        if form.has_one:
            for reward, more in (({DEFAULT_AGENT: 1.0}, {}), (1.0, over)):
                with pytest.raises(ValueError, match="expected one reward, because the episode"):
                    form.calls.log_returns("e", reward, **more)
        else:
            with pytest.raises(ValueError, match="reward: expected a mapping by agent, got 1"):
                form.calls.log_returns("e", 1.0)
            seen, one = {DEFAULT_AGENT: obs(0)}, {DEFAULT_AGENT: 1}
            form.calls.log_returns("e", {DEFAULT_AGENT: 1.0}, **over)
            with pytest.raises(ValueError, match="observation of an agent that has not ended"):
                form.calls.log_action("e", seen, one)
            form.start("f")
            with pytest.raises(ValueError, match=r"propensities of acting agents only.*'other'"):
                form.calls.log_action("f", seen, one, action_prob={"other": 0.5})
            form.end("f")
        form.end("e")
        assert form.stored()["e"][0][0][2] == (0.0 if form.has_one else 1.0)

    def test_only_a_collector_takes_rewards_for_named_steps(self, form: Form) -> None:
        """A difference: a worker has learned from a step before a late reward could come."""
        form.start("e")
        form.log("e", obs(0), 1)
        if form.at_worker:
            with pytest.raises(TypeError, match="step"):
                form.calls.log_returns("e", form.given(1.0), step=0)
        else:
            form.calls.log_returns("e", form.given(3.0), step=0)
        form.end("e")
        assert form.stored()["e"][0][0][2] == (0.0 if form.at_worker else 3.0)

    def test_one_call_may_ask_for_episodes_of_one_agent_and_of_several(self, form: Form) -> None:
        """A difference: an environment has one kind of episodes, a client both."""
        if form.at_worker:
            return
        names = ["one", form.calls.start_episode("many", policy_id=AGENTS)]
        form.calls.start_episode("one")
        wanted = {"one": obs(1), "many": {DEFAULT_AGENT: obs(-1)}}
        found = form.calls.get_action(names, wanted)
        found = form._loop.run(found) if form.is_async else found
        assert found == {"one": 1, "many": {DEFAULT_AGENT: 0}}
        for name in names:
            form.end(name)
