"""ExternalEnv keeps every behaviour that users of the API know, and loses no transition."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from ingest.embedded.external_env import ExternalEnv
from ingest.protocol.errors import BufferFull, ClientError, Refusal, ServingStopped
from policy.envs.base_env import BaseEnv, require_reset_support, to_base_env
from policy.envs.conformance import BaseEnvConformance
from storage.experience.episode import DEFAULT_AGENT, LoggedAction
from storage.spaces.descriptors import Box, Dict, Discrete
from tests.ingest.external_worker import Seen, Worker

OBSERVATION, ACTION = Box((2,)), Discrete(100)


class Program(ExternalEnv):
    """Runs a function of the environment."""

    def __init__(self, body: Callable[[ExternalEnv], Any], **options: Any) -> None:
        super().__init__(ACTION, OBSERVATION, **options)
        self.body = body

    def run(self) -> None:
        self.body(self)


def number_of(observation: Any) -> int:
    return int(observation[0])


def served(body: Callable[[ExternalEnv], Any], **options: Any) -> dict[str, Seen]:
    """The worker's record of a program that ran to its end without an error."""
    worker = Worker(Program(body, **options).to_base_env(), number_of)
    episodes = worker.run()
    assert str(worker.stopped_by) == "Serving thread has stopped."
    assert worker.stopped_by.__cause__ is None
    return episodes


def test_a_program_says_and_is_told_names_where_a_worker_has_codes() -> None:
    """Observations, the program's own actions and the worker's actions are names for the program
    and codes for the worker."""
    actions: list[Any] = []

    class Named(ExternalEnv):
        def run(self) -> None:
            episode = self.start_episode()
            actions.append(self.get_action(episode, {"country": "FR"}))
            self.log_action(episode, {"country": "DE"}, "item-42")
            self.end_episode(episode, {"country": "FR"})

    observation = Dict((("country", Discrete.of(["DE", "FR"])),))
    worker = Worker(
        Named(Discrete.of(["item-42", "item-7"]), observation).to_base_env(), lambda seen: 1
    )
    (episode,) = worker.run().values()
    assert actions == ["item-7"]
    assert [step[:2] for step in episode.steps] == [[{"country": 1}, 1], [{"country": 0}, 0]]
    assert episode.final_obs == {"country": 1}


def obs(i: float, j: float = 0.0) -> list[float]:
    return [float(i), float(j)]


@pytest.fixture
def idle() -> Iterator[Callable[..., Program]]:
    """Programs whose run() waits for stop: the test's own threads make the calls."""
    made: list[Program] = []

    def make(**options: Any) -> Program:
        made.append(Program(lambda env: env._stop.wait(), **options))
        return made[-1]

    yield make
    for program in made:
        program.stop()


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs a call in a thread; keeps its result or its exception."""
    result: list[Any] = []

    def body() -> None:
        try:
            result.append(call())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, result


# --- start_episode, log_returns, end_episode: what an episode is ------------------------------


def test_an_episode_is_told_step_by_step_and_each_reward_to_the_previous_action():
    """With get_action, log_returns and end_episode: rewards add up, are 0.0 without a call, and
    reset.
    """

    def body(env: ExternalEnv) -> None:
        env.start_episode("one")
        assert env.get_action("one", obs(5)) == 5
        env.log_returns("one", 1.5)
        env.log_returns("one", 1)
        assert env.get_action("one", obs(6)) == 6
        assert env.get_action("one", obs(7)) == 7
        env.log_returns("one", -1.0)
        env.end_episode("one", obs(8))

    (seen,) = served(body).values()
    assert [step[:3] for step in seen.steps] == [
        [obs(5), 5, 2.5],
        [obs(6), 6, 0.0],
        [obs(7), 7, -1.0],
    ]
    assert (seen.final_obs, seen.ended, seen.training_enabled) == (obs(8), "terminated", True)


def test_end_episode_may_be_truncated_and_without_an_observation():
    """truncated=True is not a termination; the final observation may be absent; T = 0 is reported.

    Row: end_episode(episode_id, obs)
    """

    def body(env: ExternalEnv) -> None:
        for name, observation, truncated in (("a", obs(1), True), ("b", None, False)):
            env.start_episode(name)
            env.get_action(name, obs(0))
            env.log_returns(name, 3.0)
            env.end_episode(name, observation, truncated=truncated)
        env.end_episode(env.start_episode("empty"))

    seen = served(body)
    assert [(s.ended, s.final_obs) for s in seen.values()] == [
        ("truncated", obs(1)),
        ("terminated", None),
        ("terminated", None),
    ]
    assert [len(s.steps) for s in seen.values()] == [1, 1, 0]
    assert seen["b"].steps[0][2] == 3.0


def test_start_episode_makes_an_id_and_refuses_a_taken_one(idle):
    """None gives a UUID; finished and active ids raise the texts of the API, atomically.

    Row: start_episode(episode_id=None, training_enabled=True)
    """
    env = idle()
    made = env.start_episode()
    assert len(made) == 32
    env.start_episode("mine")
    with pytest.raises(ValueError, match=r"^Episode mine is already started$"):
        env.start_episode("mine")
    env.end_episode("mine")
    with pytest.raises(ValueError, match=r"^Episode mine has already completed\.$"):
        env.start_episode("mine")
    with pytest.raises(ValueError, match="expected a string of 1 to 256 characters"):
        env.start_episode("")
    outcomes = [in_thread(lambda: env.start_episode("raced")) for _ in range(16)]
    for thread, _ in outcomes:
        thread.join()
    assert sum(result == ["raced"] for _, result in outcomes) == 1


def test_the_finished_episodes_that_are_remembered_are_bounded(idle, monkeypatch):
    """The set of finished ids does not grow for ever; a forgotten id is "not found".

    Row: _finished set
    """
    monkeypatch.setattr("ingest.embedded.exchange.REMEMBERED", 3)
    env = idle()
    for i in range(5):
        env.end_episode(env.start_episode(f"e{i}"))
    assert list(env._exchange._ended) == ["e2", "e3", "e4"]
    with pytest.raises(ValueError, match="not found"):
        env.log_returns("e0", 1.0)


def test_infos_belong_to_one_step_and_the_callers_dict_is_not_changed():
    """Several infos of a step are merged; the next step has none; a falsy one is ignored.

    Row: log_returns(episode_id, reward, info=None, multiagent_done_dict=None)
    """
    given = {"a": np.int64(1)}

    def body(env: ExternalEnv) -> None:
        env.start_episode("e", training_enabled=False)
        for _ in range(2):
            env.log_action("e", obs(0), 1)
            if not given.get("b"):
                env.log_returns("e", 1.0, given)
                env.log_returns("e", 1.0, {"c": [1]})
                given["b"] = 2
            env.log_returns("e", 0.0, {})
        env.end_episode("e")

    (seen,) = served(body).values()
    assert [step[3] for step in seen.steps] == [{"a": 1, "c": [1]}, {}]
    assert given == {"a": 1, "b": 2}


def test_training_enabled_false_is_said_in_every_poll_of_the_episode():
    """infos have training_enabled False up to the last poll; those of other episodes do not."""

    def body(env: ExternalEnv) -> None:
        for name, enabled in (("yes", True), ("no", False)):
            env.start_episode(name, training_enabled=enabled)
            env.log_action(name, obs(0), 1)
            env.end_episode(name)

    base = Program(body).to_base_env()
    flags: dict[str, list[Any]] = {"yes": [], "no": []}
    while len(flags["no"]) < 2:
        for name, infos in base.poll()[4].items():
            flags[name].append(infos.get(DEFAULT_AGENT, {}).get("training_enabled"))
    assert flags == {"yes": [None, None], "no": [False, False]}
    base.stop()


# --- get_action and log_action ----------------------------------------------------------------


def test_log_action_does_not_wait_for_a_consumer(idle):
    """A thousand steps are logged before the first poll; then all are delivered, in order.

    Row: action wait 300 s, log_action ack wait 60 s
    """
    env = idle()
    env.start_episode("e")
    for i in range(1000):
        env.log_action("e", obs(i % 100), i % 100)
        env.log_returns("e", float(i))
    env.end_episode("e")
    worker = Worker(env.to_base_env(), number_of)
    while not worker.episodes or worker.episodes["e"].ended is None:
        worker.step()
    assert [step[2] for step in worker.episodes["e"].steps] == [float(i) for i in range(1000)]


def test_log_action_tells_the_action_and_its_propensity():
    """off_policy_actions have the action, log-probability and version; unknown is None, -1.

    Row: log_action(episode_id, obs, action)
    """

    def body(env: ExternalEnv) -> None:
        env.start_episode("e")
        env.log_action("e", obs(0), 1, action_prob=0.5, policy_version=7)
        env.log_action("e", obs(0), 2, action_logp=-0.25)
        env.log_action("e", obs(0), 3)
        with pytest.raises(
            ValueError, match=r"Episode e: action_prob: expected .* \(0, 1\], got 0.0"
        ):
            env.log_action("e", obs(0), 4, action_prob=0.0)
        env.end_episode("e")

    (seen,) = served(body).values()
    assert seen.logged == [
        LoggedAction(1, pytest.approx(np.log(0.5)), 7),
        LoggedAction(2, -0.25, -1),
        LoggedAction(3, None, -1),
    ]


def test_actions_for_those_that_logged_theirs_are_ignored():
    """get_action takes no action or reward that was meant for an earlier log_action.

    Row: poll / send_actions
    """

    def body(env: ExternalEnv) -> None:
        env.start_episode("e")
        for i in range(50):
            env.log_action("e", obs(90), 90 + i % 10)
            env.log_returns("e", 100.0 + i)
            assert env.get_action("e", obs(i)) == i
            env.log_returns("e", float(i))
        env.end_episode("e", obs(0))

    (seen,) = served(body).values()
    assert [(s[1], s[2], s[4]) for s in seen.steps[::2]] == [
        (90 + i % 10, 100.0 + i, "logged") for i in range(50)
    ]
    assert [(s[1], s[2], s[4]) for s in seen.steps[1::2]] == [
        (i, float(i), "on_policy") for i in range(50)
    ]


def test_different_episodes_are_concurrent():
    """One poll answers two episodes that ask at once; neither waits for the other.

    Row: episodes serial, env thread-safe
    """
    env = Program(lambda env: env._stop.wait())
    base = env.to_base_env()
    asked = []
    for name in ("a", "b"):
        env.start_episode(name)
        asked.append(in_thread(lambda name=name: env.get_action(name, obs(1))))
    seen: dict[str, Any] = {}
    while len(seen) < 2:
        seen |= base.poll()[0]
    base.send_actions({"b": {DEFAULT_AGENT: 2}})
    asked[1][0].join()
    assert asked[1][1] == [2]
    base.send_actions({"a": {DEFAULT_AGENT: 1}})
    asked[0][0].join()
    assert asked[0][1] == [1]
    base.stop()


def test_a_collector_is_an_address_or_a_client():
    """Any other value is refused, and not taken for a worker in this process."""
    with pytest.raises(
        TypeError, match="collector: expected an address or a PolicyClient, got 8642"
    ):
        ExternalEnv(ACTION, OBSERVATION, collector=8642)


def test_one_episode_is_strictly_serial(idle):
    """A second thread in an episode that waits for its action is refused, with no side effect.

    Row: episodes serial, env thread-safe
    """
    env = idle()
    base = env.to_base_env()
    env.start_episode("e")
    thread, answer = in_thread(lambda: env.get_action("e", obs(1)))
    base.poll()
    for call in (
        lambda: env.get_action("e", obs(1)),
        lambda: env.log_action("e", obs(1), 1),
        lambda: env.log_returns("e", 1.0),
        lambda: env.end_episode("e"),
    ):
        with pytest.raises(ClientError, match="Episode e: another call for it is waiting"):
            call()
    base.send_actions({"e": {DEFAULT_AGENT: 3}})
    thread.join()
    assert answer == [3]


def test_an_action_that_does_not_fit_is_refused_to_the_worker(idle):
    """send_actions names the episode, the expected and the given value; no call is answered."""
    env = idle()
    base = env.to_base_env()
    for name in ("a", "b"):
        env.start_episode(name)
    threads = [in_thread(lambda n=n: env.get_action(n, obs(1))) for n in ("a", "b")]
    seen: dict[str, Any] = {}
    while len(seen) < 2:
        seen |= base.poll()[0]
    for wrong, text in (
        ({"other": 1}, r"episode b: expected actions of the agents \['agent0'\], got \['other'\]"),
        ({DEFAULT_AGENT: 100}, r"Episode b: action: expected an integer of 0\.\.99"),
    ):
        with pytest.raises(ValueError, match=text):
            base.send_actions({"a": {DEFAULT_AGENT: 1}, "b": wrong})
    with pytest.raises(ValueError, match="Episode c not found"):
        base.send_actions({"c": {DEFAULT_AGENT: 1}})
    assert all(not result for _, result in threads)
    base.send_actions({"a": {DEFAULT_AGENT: 1}, "b": {DEFAULT_AGENT: np.int64(2)}})
    for thread, _ in threads:
        thread.join()
    assert [result for _, result in threads] == [[1], [2]]


# --- time-outs and limits ---------------------------------------------------------------------


def test_a_step_that_times_out_unseen_leaves_the_episode_as_it_was(idle):
    """TimeoutError names the episode; the previous step's reward is delivered once, with the next.

    Row: action wait 300 s, log_action ack wait 60 s
    """
    env = idle(action_timeout=0.02)
    env.start_episode("e")
    env.log_action("e", obs(1), 1)
    base = env.to_base_env()
    base.poll()
    env.log_returns("e", 2.0, {"k": 1})
    with pytest.raises(TimeoutError, match=r"Episode e: no action in 0\.02 s"):
        env.get_action("e", obs(5))
    env.log_returns("e", 3.0)
    env.log_action("e", obs(6), 6)
    seen, rewards, _, _, infos, logged = base.poll()
    assert seen["e"][DEFAULT_AGENT].tolist() == obs(6)
    assert rewards["e"] == {DEFAULT_AGENT: 5.0}
    assert infos["e"] == {DEFAULT_AGENT: {"k": 1}}
    assert logged["e"][DEFAULT_AGENT].action == 6


def test_a_first_step_that_times_out_unseen_took_no_action(idle):
    """A reward still comes before any action, and the episode can end empty."""
    env = idle(action_timeout=0.02)
    env.start_episode("e")
    with pytest.raises(TimeoutError, match="Episode e"):
        env.get_action("e", obs(5))
    with pytest.raises(Refusal, match="before any action"):
        env.log_returns("e", 1.0)
    env.end_episode("e")
    assert env.to_base_env().poll()[2]["e"]["__all__"]


def test_a_step_that_times_out_after_it_was_seen_can_be_asked_for_again(idle):
    """The worker's late action answers the same observation; other calls are refused."""
    env = idle(action_timeout=0.02)
    base = env.to_base_env()
    env.start_episode("e")
    polling, polled = in_thread(base.poll)
    while polling.is_alive():  # on a busy machine a question is taken back before it is polled
        with pytest.raises(TimeoutError):
            env.get_action("e", obs(5))
    assert polled[0][0].keys() == {"e"}
    for call in (
        lambda: env.log_action("e", obs(5), 5),
        lambda: env.log_returns("e", 1.0),
        lambda: env.end_episode("e"),
    ):
        with pytest.raises(ClientError, match=r"Episode e: the answer .* call get_action again"):
            call()
    with pytest.raises(ClientError, match="expected the same observation again"):
        env.get_action("e", obs(6))
    base.send_actions({"e": {DEFAULT_AGENT: 5}})
    assert env.get_action("e", obs(5)) == 5
    env.log_returns("e", 1.0)
    env.end_episode("e")
    assert base.poll()[1] == {"e": {DEFAULT_AGENT: 1.0}}


def test_backpressure_is_a_bound_on_what_waits(idle):
    """At `max_pending` a logging call waits for a poll, but not for ever; there is no
    `max_concurrent`.

    Row: max_concurrent
    """
    with pytest.raises(ValueError, match="max_concurrent was removed: max_pending limits"):
        ExternalEnv(ACTION, OBSERVATION, 100)
    env = idle(max_pending=2, action_timeout=0.02)
    base = env.to_base_env()
    env.start_episode("e")
    env.log_action("e", obs(0), 0)
    env.log_action("e", obs(1), 1)
    with pytest.raises(BufferFull, match="Episode e: 2 steps wait for the worker"):
        env.log_action("e", obs(2), 2)
    with pytest.raises(BufferFull, match="Episode e"):
        env.end_episode("e")
    base.poll()
    env.log_action("e", obs(2), 2)
    actions = [base.poll()[5]["e"][DEFAULT_AGENT].action for _ in range(2)]
    assert actions == [1, 2]
    with pytest.raises(ValueError, match="timeout > 0 and max_pending >= 1"):
        idle(max_pending=0)


def test_a_reward_of_a_step_that_is_not_logged_is_not_the_earlier_ones(idle):
    """As with a PolicyClient, log_returns raises the error of the step's log_action, until
    log_action succeeds."""
    env = idle(max_pending=2, action_timeout=0.02)
    base = env.to_base_env()
    env.start_episode("e")
    with pytest.raises(ValueError, match="action: expected"):
        env.log_action("e", obs(0), -1)
    with pytest.raises(Refusal, match=r"e: the action of this step is not logged \(Episode e"):
        env.log_returns("e", 9.0)
    env.log_action("e", obs(0), 0)
    env.log_action("e", obs(1), 1)
    env.log_returns("e", 1.0)
    with pytest.raises(BufferFull):
        env.log_action("e", obs(2), 2)
    with pytest.raises(BufferFull, match=r"action of this step is not logged .* repeat"):
        env.log_returns("e", 9.0)
    base.poll()
    env.log_action("e", obs(2), 2)
    env.log_returns("e", 2.0)
    base.poll()
    env.end_episode("e")
    rewards = [base.poll()[1]["e"][DEFAULT_AGENT] for _ in range(2)]
    assert rewards == [1.0, 2.0]


# --- the thread and the worker's protocol -----------------------------------------------------


def test_run_must_be_written():
    """The default run() raises NotImplementedError, which surfaces in poll.

    Row: run()
    """
    base = ExternalEnv(ACTION, OBSERVATION).to_base_env()
    with pytest.raises(ServingStopped, match=r"run\(\) raised NotImplementedError") as caught:
        base.poll()
    assert isinstance(caught.value.__cause__, NotImplementedError)


def test_an_error_of_run_surfaces_in_poll_after_all_that_was_told():
    """Earlier events are polled first; the cause is the exception, which join raises."""

    def body(env: ExternalEnv) -> None:
        env.log_action(env.start_episode("e"), obs(0), 1)
        raise LookupError("no such shop")

    env = Program(body)
    worker = Worker(env.to_base_env(), number_of)
    assert worker.run().keys() == {"e"}
    assert str(worker.stopped_by).startswith("Serving thread has stopped. run() raised LookupError")
    assert isinstance(worker.stopped_by.__cause__, LookupError)
    with pytest.raises(LookupError, match="no such shop"):
        env.join()
    with pytest.raises(ServingStopped, match="Serving thread has stopped"):
        env.start_episode("late")


def test_a_dead_thread_wakes_a_poll_that_waits():
    """poll blocks until there is news; when run() returns, it raises at once.

    Row: poll / send_actions
    """
    go = threading.Event()
    base = Program(lambda env: go.wait()).to_base_env()
    thread, result = in_thread(base.poll)
    assert not result
    go.set()
    thread.join(60)
    assert str(result[0]) == "Serving thread has stopped."


def test_stop_wakes_every_call_that_waits_and_ends_run():
    """Waiting and later calls raise ServingStopped; a run() that ends by it is no error."""
    errors: list[BaseException] = []

    def body(env: ExternalEnv) -> None:
        try:
            env.get_action(env.start_episode("e"), obs(1))
        except ServingStopped as error:
            errors.append(error)
            raise

    env = Program(body)
    base = env.to_base_env()
    base.poll()
    thread, polled = in_thread(base.poll)
    base.stop()
    thread.join(60)
    base.stop()
    assert not env.is_alive()
    assert env.stopped
    env.join()
    assert len(errors) == 1
    assert isinstance(polled[0], ServingStopped)
    with pytest.raises(ServingStopped, match="takes no more episodes"):
        env.start_episode()


def test_join_says_when_run_goes_on(idle):
    """A time-out is an error, not a silent return."""
    env = idle()
    env.to_base_env()
    with pytest.raises(TimeoutError, match=r"run\(\) has not returned in 0.01 s"):
        env.join(0.01)


def test_to_base_env_is_one_env_of_the_workers_protocol(idle):
    """num_envs != 1 is a ValueError; the adapter is a BaseEnv, and policy.to_base_env finds it.

    Row: to_base_env(num_envs)
    """
    env = idle()
    with pytest.raises(ValueError, match=r"num_envs: expected 1, .* got 2"):
        env.to_base_env(num_envs=2)
    base = to_base_env(env)
    assert isinstance(base, BaseEnv)
    assert base.num_envs == 1
    assert (base.observation_space, base.action_space) == (OBSERVATION, ACTION)
    assert base.try_reset("e") is None
    with pytest.raises(RuntimeError, match="cannot be restarted"):
        base.try_restart("e")
    with pytest.raises(RuntimeError, match="already has a worker"):
        env.to_base_env()


class TestProtocol(BaseEnvConformance):
    """A program that asks for actions in episodes of three steps, one after the other."""

    def env(self) -> BaseEnv:
        class Asking(ExternalEnv):
            def run(self) -> None:
                while not self.stopped:
                    episode = self.start_episode()
                    for step in range(3):
                        self.get_action(episode, obs(step))
                        self.log_returns(episode, 1.0)
                    self.end_episode(episode, obs(3))

        return Asking(ACTION, OBSERVATION).to_base_env()


def test_a_horizon_needs_reset_support_which_a_program_has_not(idle):
    """ValueError "Setting episode horizon requires reset() support".

    Row: horizon with ExternalEnv
    """
    base = idle().to_base_env()
    require_reset_support(base, None)
    with pytest.raises(ValueError, match=r"Setting episode horizon requires reset\(\) support"):
        require_reset_support(base, 200)


def test_a_poll_is_five_dicts_and_the_logged_actions_by_env_id_and_agent_id(idle):
    """Missing agent keys are filled: reward 0.0, terminated False, truncated False, info {}.

    Row: poll / send_actions
    """
    env = idle()
    base = env.to_base_env()
    env.start_episode("e")
    env.log_action("e", obs(0), 4)
    seen, rewards, terminateds, truncateds, infos, logged = base.poll()
    assert seen["e"][DEFAULT_AGENT].tolist() == obs(0)
    assert rewards == {"e": {DEFAULT_AGENT: 0.0}}
    assert terminateds == {"e": {DEFAULT_AGENT: False, "__all__": False}}
    assert truncateds == terminateds
    assert infos == {"e": {DEFAULT_AGENT: {}}}
    assert logged == {"e": {DEFAULT_AGENT: LoggedAction(4)}}
    base.send_actions({"e": {DEFAULT_AGENT: 9}})  # the program logged its own action: ignored
    env.end_episode("e", truncated=True)
    seen, rewards, terminateds, truncateds, infos, logged = base.poll()
    assert (seen, rewards, logged) == ({"e": {}}, {"e": {DEFAULT_AGENT: 0.0}}, {})
    assert terminateds == {"e": {DEFAULT_AGENT: False, "__all__": False}}
    assert truncateds == {"e": {DEFAULT_AGENT: True, "__all__": True}}


def test_gymnasium_spaces_and_values_of_the_caller_are_taken():
    """Spaces of gymnasium are converted; the worker gets a copy, of the space's dtype."""
    shared = np.zeros(2)

    class Loop(ExternalEnv):
        def run(self) -> None:
            self.start_episode("e")
            self.log_action("e", shared, 1)
            shared[:] = 9
            self.end_episode("e", shared)

    space = gym.spaces.Box(-10, 10, (2,), np.float32)
    worker = Worker(Loop(gym.spaces.Discrete(3), space).to_base_env(), number_of)
    (seen,) = worker.run().values()
    assert seen.steps[0][0] == [0.0, 0.0]
    assert seen.final_obs == [9.0, 9.0]


# --- no transition is lost --------------------------------------------------------------------


@pytest.fixture(params=[None, 1e-5], ids=["default", "10us"])
def switch_interval(request) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(request.param or before)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switch_interval")
@pytest.mark.parametrize(("threads", "episodes"), [(8, 500), (32, 200)])
def test_no_transition_is_lost_between_many_threads(threads, episodes):
    """Every step, reward, final observation and end of every episode is delivered exactly once."""

    def play(env: ExternalEnv, who: int) -> None:
        for i in range(episodes):
            name = env.start_episode(f"{who}-{i}")
            if i % 2:
                assert env.get_action(name, obs(i % 100, who)) == i % 100
            else:
                env.log_action(name, obs(i % 100, who), i % 100)
            env.log_returns(name, float(i))
            env.end_episode(name, obs(i, who), truncated=i % 3 == 0)

    def body(env: ExternalEnv) -> None:
        players = [in_thread(lambda who=who: play(env, who)) for who in range(threads)]
        for thread, result in players:
            thread.join()
            assert result == [None]

    seen = served(body)
    assert len(seen) == threads * episodes
    for name, episode in seen.items():
        who, i = map(int, name.split("-"))
        source = "on_policy" if i % 2 else "logged"
        assert episode.steps == [[obs(i % 100, who), i % 100, float(i), {}, source]]
        assert episode.final_obs == obs(i, who)
        assert episode.ended == ("truncated" if i % 3 == 0 else "terminated")
