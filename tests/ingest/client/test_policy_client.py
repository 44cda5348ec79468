"""PolicyClient against a collector that fails on command.

Also of `ingest.client.calls`, `ingest.delivery.events` and `ingest.client.open_episodes`.
"""

from __future__ import annotations

import gc
import math
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingest.client.policy_client import PolicyClient
from ingest.protocol import messages as wire
from ingest.protocol.errors import BufferFull, ClientError, CollectorUnavailable, Refusal
from storage.spaces.codec import Codec
from tests.ingest.scripted_collector import (
    ACTION,
    OBSERVATION,
    Gate,
    ScriptedCollector,
    answering,
    cut_after,
    cut_before,
)

ROOT = Path(__file__).parents[3]
OBS = [0.5, -1.0]


@pytest.fixture
def collector() -> Iterator[ScriptedCollector]:
    with ScriptedCollector() as running:
        yield running


@pytest.fixture
def client(collector: ScriptedCollector) -> Iterator[PolicyClient]:
    made = PolicyClient(collector.address, "remote", timeout=60.0, max_wait=60.0)
    made.connect()
    yield made
    made.close()


def hold_flight(collector: ScriptedCollector, client: PolicyClient) -> Gate:
    """Put an event of another episode in flight and hold it there until the gate opens."""
    client.start_episode()
    client.flush()
    gate = Gate()
    collector.faults.append(gate)
    client.start_episode()
    assert gate.reached.wait(60)
    return gate


# --- the five calls --------------------------------------------------------------------------


def test_an_episode_arrives_as_it_was_logged(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """Values travel in canonical bytes, events in order, the start with its attributes.

    Row: log_action(episode_id, obs, action)
    """
    name = client.start_episode(training_enabled=False, tags={"user": "u1"}, continues="before")
    client.log_action(name, OBS, 2, action_prob=0.25)
    client.log_returns(name, 1.5)
    client.log_action(name, np.array(OBS), np.int64(1), action_logp=-0.5, policy_version=4)
    client.end_episode(name, [1, 2], truncated=True)
    client.flush()
    record = collector.episodes[name]
    first, second, end = record.events
    assert record.start.tags == {"user": "u1"}
    assert (record.start.training_enabled, record.start.continues) == (False, "before")
    assert first.obs == Codec(OBSERVATION).encode(OBS)
    assert first.action == Codec(ACTION).encode(2)
    assert (first.action_prob, first.action_logp) == (0.25, None)
    assert (second.action_prob, second.action_logp, second.policy_version) == (None, -0.5, 4)
    assert (end.obs, end.truncated) == (Codec(OBSERVATION).encode([1, 2]), True)
    assert record.rewards == [1.5, 0.0]


def test_inference_mode_must_be_known() -> None:
    """The error has the text that RLlib's PolicyClient gives.

    Row: PolicyClient(address, inference_mode="local", update_interval=10.0, session)
    """
    with pytest.raises(ValueError, match="inference_mode must be either 'local' or 'remote'"):
        PolicyClient("http://localhost:1", "lokal")


def test_update_policy_weights_answers_the_live_version(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """A remote client holds no weights: the call returns the collector's live version, or None.

    Row: update_policy_weights()
    """
    assert client.update_policy_weights() == 3
    collector.version = None
    assert client.update_policy_weights() is None


def test_an_unknown_and_an_ended_episode_are_told_apart(client: PolicyClient) -> None:
    """Every call on an unknown or ended id raises, with the two texts of RLlib's PolicyClient.

    Row: unknown id
    """
    name = client.start_episode()
    client.end_episode(name)
    step = r" It is not open in this client: name a step \(step=0 for the first\)\."
    for call, more in (
        (lambda known: client.log_action(known, OBS, 1), ""),
        (lambda known: client.log_returns(known, 1.0), step),
        (lambda known: client.end_episode(known), ""),
        (lambda known: client.get_action(known, OBS), ""),
    ):
        with pytest.raises(ValueError, match=rf"^Episode nobody not found\.{more}$"):
            call("nobody")
        with pytest.raises(ValueError, match=rf"^Episode {name} has already completed\.$"):
            call(name)


def test_a_reward_before_any_action_is_an_error(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """A reward without an action raises; after that the episode can go on.

    Row: log_returns(episode_id, reward, info=None, multiagent_done_dict=None)
    """
    name = client.start_episode()
    with pytest.raises(ValueError, match=f"Episode {name}: a reward came before any action"):
        client.log_returns(name, 1.0)
    client.log_action(name, OBS, 0)
    client.log_returns(name, 2.0)
    client.flush()
    assert collector.episodes[name].rewards == [2.0]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (((1.0,), 0, {}), "obs"),
        ((("a", "b"), 0, {}), "obs"),
        (((math.nan, 0.0), 0, {}), "obs"),
        (((11.0, 0.0), 0, {}), "obs"),
        ((OBS, 3, {}), "action"),
        ((OBS, 0.5, {}), "action"),
        ((OBS, 0, {"action_prob": 0.0}), "action_prob"),
        ((OBS, 0, {"action_prob": 1.1}), "action_prob"),
        ((OBS, 0, {"action_prob": math.nan}), "action_prob"),
        ((OBS, 0, {"action_prob": "1"}), "action_prob"),
        ((OBS, 0, {"action_logp": math.inf}), "action_logp"),
        ((OBS, 0, {"action_logp": -1.0, "action_prob": 0.5}), "both"),
    ],
)
def test_a_bad_value_raises_in_the_call_and_changes_nothing(
    collector: ScriptedCollector, client: PolicyClient, values: Any, text: str
) -> None:
    """The error names the episode and the field; the next good call is the episode's first
    event."""
    observation, action, keywords = values
    name = client.start_episode()
    with pytest.raises(ValueError, match=f"Episode {name}: .*{text}"):
        client.log_action(name, observation, action, **keywords)
    client.log_action(name, OBS, 1)
    client.flush()
    assert [event.seq for event in collector.episodes[name].events] == [1]


@pytest.mark.parametrize("reward", [math.nan, math.inf, "1", None, [1.0, 2.0]])
def test_a_bad_reward_raises_in_the_call(client: PolicyClient, reward: Any) -> None:
    """A reward is one finite number."""
    name = client.start_episode()
    client.log_action(name, OBS, 1)
    with pytest.raises(ValueError, match=f"Episode {name}: reward: expected"):
        client.log_returns(name, reward)


def test_a_sum_of_rewards_must_stay_finite(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """When the sum of two finite rewards is infinite, the second raises and the first stays."""
    gate = hold_flight(collector, client)
    name = client.start_episode()
    client.log_action(name, OBS, 1)
    client.log_returns(name, 1.5e308)
    with pytest.raises(ValueError, match="finite sum"):
        client.log_returns(name, 1.5e308)
    gate.opened.set()
    client.flush()
    assert collector.episodes[name].rewards == [1.5e308]


def test_log_step_is_one_episode_of_one_step(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """log_step queues three events together: start, action with its reward, end."""
    name = client.log_step(OBS, 1, 1.0, action_prob=0.5, info={"k": 1}, final_obs=[0, 0])
    other = client.log_step(OBS, 1, 0.0, terminated=False, episode_id="mine")
    client.flush()
    step, end = collector.episodes[name].events
    assert (step.seq, step.reward, step.info, end.truncated) == (1, 1.0, {"k": 1}, False)
    assert end.obs == Codec(OBSERVATION).encode([0, 0])
    assert other == "mine"
    assert collector.episodes["mine"].events[-1].truncated
    with pytest.raises(ValueError, match=r"Episode mine has already completed\."):
        client.log_returns("mine", 1.0)


def test_rewards_reach_the_last_action_whatever_was_sent_when(collector: ScriptedCollector) -> None:
    """A step's reward is the sum, from left to right, of the rewards logged between its action
    and the next. Its info is the union of theirs, where a later value of a key wins. How the
    events are split into batches makes no difference.

    Row: log_returns(episode_id, reward, info=None, multiagent_done_dict=None)
    """
    amount = st.floats(-1e6, 1e6)
    info = st.none() | st.dictionaries(st.sampled_from("abc"), st.integers(0, 9), max_size=2)
    script = st.lists(
        st.sampled_from(["act", "flush"]) | st.tuples(amount, info), min_size=1, max_size=12
    )

    @settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
    @given(script)
    def law(calls: list[Any]) -> None:
        name = client.start_episode()
        client.log_action(name, OBS, 0)
        rewards, infos = [0.0], [{}]
        for call in calls:
            if call == "act":
                client.log_action(name, OBS, 1)
                rewards.append(0.0)
                infos.append({})
            elif call == "flush":
                client.flush()
            else:
                given_info = None if call[1] is None else dict(call[1])
                client.log_returns(name, call[0], given_info)
                assert given_info == call[1]
                rewards[-1] += call[0]
                infos[-1] = infos[-1] | (call[1] or {})
        client.end_episode(name)
        client.flush()
        assert collector.episodes[name].rewards == rewards
        assert collector.episodes[name].infos == infos

    with PolicyClient(collector.address, linger=0.0) as client:
        law()


def test_a_reward_joins_an_action_that_is_still_queued(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """A reward whose action is still queued becomes part of that event. Once the action was sent,
    the reward is an event of its own."""
    gate = hold_flight(collector, client)
    name = client.start_episode()
    client.log_action(name, OBS, 1)
    client.log_returns(name, 1.0, {"a": 1})
    client.log_returns(name, 2.0, {"b": np.float32(0.5), 3: np.arange(2)})
    gate.opened.set()
    client.flush()
    client.log_returns(name, 4.0)
    client.flush()
    first, second = collector.episodes[name].events
    assert (first.reward, first.info) == (3.0, {"a": 1, "b": 0.5, "3": [0, 1]})
    assert isinstance(second, wire.LogReturns)


def test_the_callers_info_is_taken_as_it_is_now(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """The caller may change `info` after the call, and later steps do not inherit it. A value that
    is not JSON, or nested too deeply, raises in the call."""
    name = client.start_episode()
    client.log_action(name, OBS, 1)
    info = {"clicks": [1]}
    client.log_returns(name, 0.0, info)
    info["clicks"].append(2)
    client.log_action(name, OBS, 1)
    with pytest.raises(ValueError, match=f"Episode {name}: info: expected JSON values"):
        client.log_returns(name, 0.0, {"x": object()})
    with pytest.raises(ValueError, match=r"info: expected a mapping, got \['x'\]"):
        client.log_returns(name, 0.0, ["x"])  # type: ignore[arg-type]
    deep: list[Any] = []
    for _ in range(40):
        deep = [deep]
    with pytest.raises(ValueError, match="lists and objects nested at most 32 deep"):
        client.log_returns(name, 0.0, {"x": deep})
    client.flush()
    assert info == {"clicks": [1, 2]}
    assert collector.episodes[name].infos == [{"clicks": [1]}, {}]


def test_a_late_reward_names_its_step(collector: ScriptedCollector, client: PolicyClient) -> None:
    """A late reward has a `reward_id` (generated if not given) and no `seq`, and its episode may be
    that of another client."""
    client.log_returns("elsewhere", 1.0, step=4, reward_id="click-77")
    client.log_returns("elsewhere", 2.0, step=4)
    client.flush()
    first, second = collector.late
    assert (first.episode_id, first.step, first.reward_id, first.seq) == (
        "elsewhere",
        4,
        "click-77",
        None,
    )
    assert second.reward_id not in (None, "click-77")
    with pytest.raises(ValueError, match="step: expected one with a reward_id, got none"):
        client.log_returns("elsewhere", 1.0, reward_id="click-78")


def test_a_policy_is_chosen_by_name(collector: ScriptedCollector) -> None:
    """With several policies, start_episode requires a policy_id; the error lists the policies."""
    collector.policies = ["a", "b"]
    with PolicyClient(collector.address) as client:
        client.connect()
        with pytest.raises(ValueError, match=r"expected one of \['a', 'b'\], got None"):
            client.start_episode()
        name = client.start_episode(policy_id="b")
        collector.policies = ["a", "b", "c"]
        later = client.start_episode(policy_id="c")
        client.flush()
    assert collector.episodes[name].start.policy_id == "b"
    assert collector.episodes[later].start.policy_id == "c"


def test_an_added_policy_does_not_stop_programs_that_name_none(
    collector: ScriptedCollector,
) -> None:
    """Of several policies, `default` is the one of episodes without a policy, as over HTTP."""
    collector.policies = ["added", "default"]
    with PolicyClient(collector.address) as client:
        client.connect()
        name = client.start_episode()
        client.flush()
    assert collector.episodes[name].start.policy_id == "default"


@pytest.mark.parametrize("bad", ["", "x" * 257, "\ud800", 7])
def test_an_id_must_be_one_that_can_be_sent(client: PolicyClient, bad: Any) -> None:
    """A bad id raises in the call, before it can make the collector refuse a batch."""
    with pytest.raises(ValueError, match="episode_id: expected a string"):
        client.start_episode(bad)


@pytest.mark.parametrize("bad", ["user7", ["user7"], {"user": 7}, {"user": "\ud800"}])
def test_tags_must_be_strings_by_name(client: PolicyClient, bad: Any) -> None:
    """The call says what was expected, and no episode begins."""
    with pytest.raises(ValueError, match=r"^tags: expected "):
        client.start_episode("tagged", tags=bad)
    client.start_episode("tagged")


# --- own ids ---------------------------------------------------------------------------------


def test_a_taken_id_raises_in_the_call(collector: ScriptedCollector, client: PolicyClient) -> None:
    """start_episode raises for an id that is active or ended, in this client or in another one.

    Row: start_episode(episode_id=None, training_enabled=True)
    """
    client.start_episode("mine")
    with pytest.raises(ValueError, match=r"^Episode mine is already started$"):
        client.start_episode("mine")
    with PolicyClient(collector.address, max_wait=10.0) as other:
        with pytest.raises(ValueError, match=r"^Episode mine is already started$"):
            other.start_episode("mine")
        client.end_episode("mine")
        client.flush()
        with pytest.raises(ValueError, match=r"^Episode mine has already completed\.$"):
            other.start_episode("mine")
    with pytest.raises(ValueError, match=r"^Episode mine has already completed\.$"):
        client.start_episode("mine")


def test_a_lost_answer_to_a_start_is_no_error(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """The client repeats the same bytes; their start number shows that they are a repetition.

    Row: start_episode(episode_id=None, training_enabled=True)
    """
    client.start_episode()
    client.flush()
    collector.faults.extend([cut_after, answering(503, "draining")])
    before = len(collector.bodies("/v1/events"))
    client.start_episode("mine")
    bodies = collector.bodies("/v1/events")[before:]
    assert len(bodies) == 3
    assert len(set(bodies)) == 1


def test_a_taken_id_that_is_told_late_is_raised_by_the_next_call(
    collector: ScriptedCollector,
) -> None:
    """start_episode waits for at most max_wait. A refusal that comes later is raised by flush and
    by the next call on the episode.

    Row: start_episode(episode_id=None, training_enabled=True)
    """
    with PolicyClient(collector.address, max_wait=0.0) as client:
        gate = hold_flight(collector, client)
        collector.judge = lambda event: "already_started" if event.episode_id == "mine" else None
        client.start_episode("mine")
        gate.opened.set()
        with pytest.raises(Refusal, match="scripted already_started"):
            client.flush()
        with pytest.raises(Refusal, match="scripted already_started"):
            client.log_action("mine", OBS, 1)


# --- delivery --------------------------------------------------------------------------------


def test_a_batch_is_repeated_with_identical_bytes(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """After a connection reset (before or after the events were applied), 429, 502, 503 or 507 the
    client repeats the same bytes until they are acknowledged. No event is applied twice."""
    client.start_episode()
    client.flush()
    collector.faults.extend(
        [
            cut_before,
            cut_after,
            answering(429, "busy", Retry_After="0"),
            answering(503, "draining"),
            answering(507, "disk_full"),
            answering(502, "whatever"),
        ]
    )
    before = len(collector.bodies("/v1/events"))
    name = client.start_episode()
    client.log_action(name, OBS, 1)
    client.flush()
    bodies = collector.bodies("/v1/events")[before:]
    assert len(set(bodies[:7])) == 1
    assert len(collector.episodes[name].events) == 1
    assert client.stats.retries == 6
    assert client.stats.refused == {}


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_or_doubled_when_connections_reset_at_random(
    collector: ScriptedCollector, seed: int
) -> None:
    """Four threads share a client and 30% of its requests are cut: each step arrives once, in
    order."""

    def run(thread: int) -> list[str]:
        names = []
        for number in range(6):
            name = client.start_episode(f"own-{thread}-{number}" if number % 3 == 0 else None)
            for step in range(5):
                if (step + thread) % 4 == 0:
                    client.get_action(name, OBS)
                else:
                    client.log_action(name, [step, thread], step % 3)
                client.log_returns(name, float(step))
            client.end_episode(name)
            names.append(name)
        return names

    collector.cut_at_random(seed, 0.3)
    with (
        PolicyClient(collector.address, "remote", batch=7, linger=0.0) as client,
        ThreadPoolExecutor(4) as pool,
    ):
        names = [name for found in pool.map(run, range(4)) for name in found]
    assert sorted(collector.episodes) == sorted(names)
    for name in names:
        record = collector.episodes[name]
        assert record.ended
        assert record.rewards == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert [event.seq for event in record.events] == list(range(1, len(record.events) + 1))
    assert client.stats.refused == {}
    assert client.stats.waiting == 0


def test_a_closing_collector_is_waited_for(collector: ScriptedCollector) -> None:
    """Events that are logged while the collector is away are delivered once it is back."""
    client = PolicyClient(collector.address)
    collector.chance = lambda: cut_before if not back.is_set() else lambda serve: serve()
    back = threading.Event()
    back.set()
    name = client.start_episode()
    client.flush()
    back.clear()
    client.log_action(name, OBS, 1)
    with pytest.raises(TimeoutError, match="1 event still waits for http"):
        client.flush(0.2)
    back.set()
    client.close()
    assert len(collector.episodes[name].events) == 1


def test_connect_says_that_nobody_is_there(unused_address: str) -> None:
    """`connect` and `get_action` raise an error with the address; logged events stay queued."""
    client = PolicyClient(unused_address, timeout=1.0)
    name = client.start_episode()
    for call in (client.connect, lambda: client.get_action(name, OBS)):
        with pytest.raises(CollectorUnavailable, match=unused_address):
            call()
    with pytest.raises(TimeoutError, match=r"1 event still waits.*Connection refused"):
        client.close()


@pytest.fixture
def unused_address() -> str:
    with ScriptedCollector() as gone:
        return gone.address


def test_only_one_get_action_waits_for_a_collector_that_is_away(unused_address: str) -> None:
    """A service that starts during an outage waits once; later calls raise at once, so that it can
    act by its own rule until the collector answers."""
    client = PolicyClient(unused_address, "remote")
    name = client.start_episode()
    client._policies._timeout = 0.5
    with pytest.raises(CollectorUnavailable, match=r"no answer within 0\.5 s"):
        client.get_action(name, OBS)
    client._policies._timeout = 1_000.0  # a call that waits would reach the test's limit
    with pytest.raises(CollectorUnavailable, match=r"no answer yet: .*no collector is listening"):
        client.get_action(name, OBS)
    client.log_action(name, OBS, 1, action_prob=0.5)
    with ScriptedCollector(port=int(unused_address.rpartition(":")[2])) as collector:
        client.connect(60)
        assert client.get_action(name, OBS) == 2
        assert not client._policies._has_waited, "the next policy is waited for"
        client.close()
        assert len(collector.episodes[name].events) == 2


def test_something_else_than_a_collector_is_named(collector: ScriptedCollector) -> None:
    """A server without /v1/spec is not a collector.

    Row: command set
    """
    with (
        PolicyClient(f"{collector.address}/elsewhere", timeout=60.0) as client,
        pytest.raises(Refusal, match="there is nothing at /elsewhere/v1/spec"),
    ):
        client.connect()


def test_sync_waits_for_each_event(collector: ScriptedCollector) -> None:
    """With `sync`, a call returns once its event is acknowledged, and raises if it was refused."""
    with PolicyClient(collector.address, sync=True) as client:
        name = client.start_episode()
        assert name in collector.episodes
        client.log_action(name, OBS, 1)
        assert len(collector.episodes[name].events) == 1
        collector.judge = lambda event: "invalid"
        with pytest.raises(Refusal, match="scripted invalid"):
            client.log_action(name, OBS, 1)


# --- refusals --------------------------------------------------------------------------------


def test_a_refused_event_is_raised_by_the_next_call_on_its_episode(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """The refusal is raised by flush, too, and counted in `stats`; other episodes go on."""
    bad, good = client.start_episode(), client.start_episode()
    client.flush()
    gate = hold_flight(collector, client)
    collector.judge = lambda event: "invalid" if event.episode_id == bad else None
    client.log_action(bad, OBS, 1)
    client.log_action(good, OBS, 1)
    gate.opened.set()
    with pytest.raises(Refusal, match=r"^scripted invalid$"):
        client.flush()
    client.flush()
    for _ in range(2):
        with pytest.raises(ValueError, match="scripted invalid"):
            client.log_action(bad, OBS, 1)
    client.log_action(good, OBS, 1)
    client.flush()
    assert len(collector.episodes[good].events) == 2
    assert sum(client.stats.refused.values()) >= 1


def test_a_refusal_that_nobody_waits_for_is_logged(
    collector: ScriptedCollector, client: PolicyClient, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal is logged once for each reason; a client with `on_error` calls that instead."""
    refusals: list[Refusal] = []
    other = PolicyClient(collector.address, on_error=refusals.append, timeout=60.0)
    collector.judge = lambda event: "invalid"
    for one in (client, other):
        for _ in range(2):
            one.log_step(OBS, 1, 1.0)
        assert one._outbox.drained(60.0, lambda: False)
    for one in (client, other):
        with pytest.raises(Refusal):
            one.flush()
    other.close()
    assert caplog.text.count("was refused: scripted invalid") == 1
    assert refusals


def test_a_refusal_during_a_flush_that_raises_something_else_is_logged(
    collector: ScriptedCollector, client: PolicyClient, caplog: pytest.LogCaptureFixture
) -> None:
    """A flush that raises TimeoutError does not report the refusal, and it may be the last flush:
    so the refusal is logged."""
    bad, good = client.start_episode(), client.start_episode()
    gate = hold_flight(collector, client)
    collector.judge = lambda event: "invalid" if event.episode_id == bad else "busy"
    client.log_action(bad, OBS, 1)
    client.log_action(good, OBS, 1)
    opening = threading.Timer(0.05, gate.opened.set)
    opening.start()
    with pytest.raises(TimeoutError):
        client.flush(timeout=1.0)
    opening.join()
    collector.judge = lambda event: "invalid" if event.episode_id == bad else None
    with pytest.raises(Refusal, match="scripted invalid"):
        client.flush()
    assert caplog.text.count("was refused: scripted invalid") == 1


def test_a_late_reward_that_is_refused_leaves_the_episode(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """`window_closed` is raised by flush and once by the next call; after that the episode goes
    on."""
    name = client.start_episode()
    client.log_action(name, OBS, 1)
    client.flush()
    collector.judge = lambda event: "window_closed" if getattr(event, "step", None) == 0 else None
    client.log_returns(name, 1.0, step=0, reward_id="a")
    with pytest.raises(Refusal, match=r"^reward 'a' of step 0: ") as caught:
        client.flush()
    assert caught.value.code == "window_closed"
    assert (caught.value.step, caught.value.reward_id) == (0, "a")
    with pytest.raises(Refusal):
        client.log_action(name, OBS, 1)
    client.log_action(name, OBS, 1)
    client.flush()
    assert len(collector.episodes[name].events) == 2
    for reward_id in ("b", "c"):
        client.log_returns(name, 1.0, step=0, reward_id=reward_id)
    both = "^2 events were refused since the last flush, first: reward 'b' of step 0: scripted"
    with pytest.raises(Refusal, match=both) as caught:
        client.flush()
    assert (caught.value.step, caught.value.reward_id) == (None, None)


@pytest.mark.parametrize("status_code", [(413, "too_large"), (422, "invalid"), (400, "malformed")])
def test_one_bad_event_does_not_take_its_batch_along(
    collector: ScriptedCollector, client: PolicyClient, status_code: tuple[int, str]
) -> None:
    """A batch that is refused as a whole is split in halves until the bad episode is alone; the
    other 19 episodes arrive."""
    gate = hold_flight(collector, client)
    names = [client.log_step(OBS, 1, 1.0) for _ in range(20)]

    def refuse(batch: Any) -> None:
        if any(event.episode_id == names[7] for event in batch.events):
            raise Refusal(status_code[1], "scripted")

    collector.batch_judge = refuse
    gate.opened.set()
    with pytest.raises(Refusal, match="scripted"):
        client.flush()
    assert names[7] not in collector.episodes
    arrived = [name for name in names if name in collector.episodes]
    assert len(arrived) == 19
    assert all(collector.episodes[name].ended for name in arrived)
    assert client.stats.refused == {status_code[1]: 3}


def test_a_start_that_finds_no_room_is_sent_again(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """One start of a batch is refused as `busy`: the client sends that episode again, and the other
    one arrives, too."""
    client.flush()
    gate = hold_flight(collector, client)
    first, second = client.log_step(OBS, 1, 1.0), client.log_step(OBS, 2, 2.0)
    refusals = iter([True])

    def busy(event: Any) -> str | None:
        starting = isinstance(event, wire.Start) and event.episode_id == first
        return "busy" if starting and next(refusals, False) else None

    collector.judge = busy
    gate.opened.set()
    client.flush()
    assert collector.episodes[first].ended
    assert collector.episodes[second].ended
    assert client.stats.refused == {}


def test_a_wrong_token_is_raised_and_nothing_dropped(collector: ScriptedCollector) -> None:
    """flush raises the 401, which only a person can mend. The events stay queued, and are sent once
    the token is accepted."""
    with PolicyClient(collector.address, token="secret") as client:
        name = client.start_episode()
        client.flush()
        collector.chance = lambda: answering(401, "unauthorized")
        client.log_action(name, OBS, 1)
        with pytest.raises(Refusal, match="scripted unauthorized"):
            client.flush(60)
        collector.chance = lambda: lambda serve: serve()
        gate = threading.Event()
        while client.stats.waiting:
            gate.wait(0.02)
    assert len(collector.episodes[name].events) == 1
    assert {headers["authorization"] for _, headers, _ in collector.requests} == {"Bearer secret"}


# --- forgotten instances ---------------------------------------------------------------------


def test_a_forgotten_instance_is_replaced_for_new_episodes(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """The collector has forgotten the client's instance. New starts, refused on their first try, go
    out under a new instance; an episode that was acknowledged before goes on under the old one."""
    old = client.start_episode()
    client.log_action(old, OBS, 1)
    client.flush()
    collector.instances.clear()
    new = [client.start_episode() for _ in range(3)]
    for name in (old, *new):
        client.log_action(name, OBS, 2)
    client.flush()
    client.end_episode(old)
    for name in new:
        client.end_episode(name)
    client.flush()
    assert collector.episodes[old].instance == "instance-1"
    assert len(collector.episodes[old].events) == 3
    assert {collector.episodes[name].instance for name in new} == {"instance-2"}
    assert collector.instances == {"instance-2": {0, 1, 2}}
    assert all(collector.episodes[name].ended for name in new)
    assert client.stats.refused == {}


def test_a_start_that_may_have_been_applied_is_never_repeated_elsewhere(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """The answer to a batch was lost, and then the collector forgot the instance. The batch may
    have been applied, so its start is reported as refused and not repeated under a new instance."""
    client.start_episode()
    client.flush()

    def forget(serve: Any) -> Any:
        cut: Exception | None = None
        try:
            cut_after(serve)
        except Exception as error:
            cut = error
        collector.instances.clear()
        collector.episodes.clear()
        assert cut is not None
        raise cut

    collector.faults.append(forget)
    lost = client.log_step(OBS, 1, 1.0)
    with pytest.raises(Refusal) as caught:
        client.flush()
    assert caught.value.code == "unknown_instance"
    assert client.stats.refused["unknown_instance"] == 1
    assert lost not in collector.episodes
    later = client.log_step(OBS, 1, 1.0)
    client.flush()
    assert list(collector.episodes) == [later]


def test_own_ids_survive_a_forgotten_instance(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """A start with the caller's own id may be repeated under a new instance: the id prevents a
    second episode."""
    client.start_episode("one")
    collector.instances.clear()
    client.start_episode("two")
    client.log_action("one", OBS, 1)
    client.log_action("two", OBS, 1)
    client.flush()
    assert [record.instance for record in collector.episodes.values()] == [
        "instance-1",
        "instance-2",
    ]
    assert [len(record.events) for record in collector.episodes.values()] == [1, 1]


# --- get_action ------------------------------------------------------------------------------


def test_get_action_carries_what_is_pending_of_its_episode(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """One request carries the queued events of the episode and the observation; events of other
    episodes stay queued."""
    gate = hold_flight(collector, client)
    other = client.start_episode()
    name = client.start_episode()
    client.log_action(name, OBS, 1)
    action = client.get_action(name, OBS)
    assert action == 2  # the scripted collector derives it from seq
    assert other not in collector.episodes
    client.log_returns(name, 1.0)
    assert client.get_action(name, OBS) == 4 % 3
    client.end_episode(name)
    gate.opened.set()
    client.flush()
    batches = [
        wire.decode(body, wire.MSGPACK, wire.ActionBatch)
        for body in collector.bodies("/v1/actions")
    ]
    assert [[type(event).__name__ for event in batch.events] for batch in batches] == [
        ["Start", "LogAction"],
        ["LogReturns"],
    ]
    assert collector.episodes[name].rewards == [0.0, 1.0, 0.0]
    assert collector.episodes[name].ended


def test_get_action_waits_for_events_of_its_episode_in_flight(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """Otherwise its observation could overtake an action that is still in flight."""
    name = client.start_episode()
    client.flush()
    gate = Gate()
    collector.faults.append(gate)
    client.log_action(name, OBS, 1)
    assert gate.reached.wait(60)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.get_action, name, OBS)
        with pytest.raises(TimeoutError):
            asked.result(0.1)
        gate.opened.set()
        assert asked.result(60) == 2


def test_get_action_for_many_episodes_is_one_request(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """get_action takes a list of ids with a mapping of observations, and returns a mapping of
    actions.

    Row: get_action(episode_id, obs)
    """
    names = [client.start_episode() for _ in range(5)]
    client.log_action(names[1], OBS, 1)
    actions = client.get_action(names, dict.fromkeys(names, OBS))
    assert actions == {name: 2 if name == names[1] else 1 for name in names}
    assert len(collector.bodies("/v1/actions")) == 1
    with pytest.raises(ValueError, match="a mapping from the given ids"):
        client.get_action(names, {names[0]: OBS})


def test_a_lost_answer_to_get_action_is_asked_for_again(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """The client repeats the same bytes, for which the collector returns the decision it made."""
    name = client.start_episode()
    client.flush()
    collector.faults.extend([cut_after, cut_before])
    assert client.get_action(name, OBS) == 1
    assert len(set(collector.bodies("/v1/actions"))) == 1
    assert len(collector.episodes[name].events) == 1


def test_get_action_without_an_answer_may_be_called_again(
    collector: ScriptedCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a get_action without an answer only the same observation is accepted, because the
    collector may have decided. Queued events are kept.

    Row: action wait 300 s, log_action ack wait 60 s
    """
    with PolicyClient(collector.address, "remote") as client:
        name = client.start_episode()
        client.flush()
        collector.chance = lambda: cut_after
        client.log_action(name, OBS, 1)
        with monkeypatch.context() as impatient:
            impatient.setattr(client._remote, "_timeout", 1.0)
            while len(collector.episodes[name].events) < 2:  # a busy machine takes longer
                with pytest.raises(CollectorUnavailable):
                    client.get_action(name, OBS)
        with pytest.raises(ClientError, match="the same observation"):
            client.log_action(name, OBS, 1)
        with pytest.raises(ClientError, match="the same observation"):
            client.get_action(name, [0.0, 0.0])
        collector.chance = lambda: lambda serve: serve()
        assert client.get_action(name, OBS) == 2
        client.log_action(name, OBS, 0)
    assert [type(event).__name__ for event in collector.episodes[name].events] == [
        "LogAction",
        "GetAction",
        "LogAction",
    ]


def test_without_a_published_version_get_action_says_so(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """get_action raises `no_version` and leaves the episode unchanged; its queued events arrive."""
    collector.version = None
    name = client.start_episode()
    client.log_action(name, OBS, 1)
    with pytest.raises(Refusal, match="publish one") as caught:
        client.get_action(name, OBS)
    assert caught.value.code == "no_version"
    collector.version = 1
    assert client.get_action(name, OBS) == 2
    assert client.stats.waiting == 0


def test_a_get_action_to_be_repeated_is_repeated(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """A collector that still loads its weights refuses with `busy`, and the client asks again."""
    busy = iter([False, True, True])

    def judge(event: Any) -> str | None:
        return "busy" if isinstance(event, wire.GetAction) and next(busy, False) else None

    collector.judge = judge
    name = client.start_episode()
    assert [client.get_action(name, OBS) for _ in range(2)] == [1, 2]
    assert next(busy, None) is None
    client.end_episode(name)
    client.flush()
    assert len(collector.episodes[name].events) == 3


def test_get_action_finds_a_forgotten_instance(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """The collector has forgotten the client's instance: get_action sends the episode's start again
    under a new instance, and returns an action."""
    client.start_episode()
    client.flush()
    collector.instances.clear()
    gate = hold_flight_of(collector, client)
    name = client.start_episode()
    assert client.get_action(name, OBS) == 1
    gate.opened.set()
    client.flush()
    assert collector.episodes[name].instance == "instance-2"
    assert client.stats.refused == {}


def hold_flight_of(collector: ScriptedCollector, client: PolicyClient) -> Gate:
    gate = Gate()
    collector.faults.append(gate)
    client.start_episode()
    assert gate.reached.wait(60)
    return gate


# --- bounds, threads, ends -------------------------------------------------------------------


def test_a_full_queue_raises_at_once_when_told_to(collector: ScriptedCollector) -> None:
    """BufferFull says how many events wait; once there is room, the episode goes on."""
    with PolicyClient(collector.address, on_full="raise", max_pending=4) as client:
        gate = hold_flight(collector, client)
        name = client.start_episode()
        client.log_action(name, OBS, 0)
        with pytest.raises(BufferFull, match=r"3 events .* waiting for the collector"):
            client.log_step(OBS, 1, 1.0)
        client.log_action(name, OBS, 1)
        with pytest.raises(BufferFull, match="at most 4 events"):
            client.log_action(name, OBS, 2)
        gate.opened.set()
        client.flush()
        client.log_action(name, OBS, 2)
    assert [event.action[0] for event in collector.episodes[name].events] == [0, 1, 2]


def test_a_reward_of_a_step_that_is_not_logged_is_not_the_earlier_ones(
    collector: ScriptedCollector,
) -> None:
    """After a log_action that failed (queue full, or bad value), log_returns raises the same error
    until log_action succeeds. A reward with `step=` is accepted all the same."""
    with PolicyClient(collector.address, max_pending=4, max_wait=0.05) as client:
        client.connect(60)
        gate = hold_flight(collector, client)
        name = client.start_episode()
        client.log_action(name, OBS, 0)
        client.log_action(name, OBS, 1)
        client.log_returns(name, 1.0)
        for call in (
            lambda: client.log_action(name, OBS, 2),
            lambda: client.log_returns(name, 2.0),
            lambda: client.log_returns(name, 2.0, {"more": 1}),
        ):
            with pytest.raises(BufferFull, match="at most 4 events"):
                call()
        gate.opened.set()
        client.flush()
        with pytest.raises(BufferFull, match=r"action of this step is not logged .* repeat"):
            client.log_returns(name, 2.0)
        client.log_returns(name, 0.5, step=1)
        with pytest.raises(ValueError, match="action: expected"):
            client.log_action(name, OBS, 9)
        with pytest.raises(ValueError, match=r"is not logged \(Episode .* action: expected"):
            client.log_returns(name, 2.0)
        client.log_action(name, OBS, 2)
        client.log_returns(name, 2.0)
        client.flush()
    assert collector.episodes[name].rewards[:2] == [0.0, 1.0]
    assert collector.episodes[name].rewards[-1] == 2.0


def test_a_full_queue_blocks_until_there_is_room(collector: ScriptedCollector) -> None:
    """The call waits for at most the client's `timeout`, and then raises BufferFull."""
    with PolicyClient(collector.address, max_pending=3, timeout=1.0) as client:
        gate = hold_flight(collector, client)
        name = client.start_episode()
        client.log_action(name, OBS, 0)
        with pytest.raises(BufferFull):
            client.log_action(name, OBS, 1)
        client._outbox.patience = 60.0
        gate.opened.set()
        client.log_action(name, OBS, 1)
        client.flush(60)
    assert len(collector.episodes[name].events) == 2


def test_a_full_queue_is_counted_in_bytes_too(collector: ScriptedCollector) -> None:
    """`max_pending_bytes` bounds the queue, so that large observations do not fill the memory."""
    with PolicyClient(collector.address, on_full="raise", max_pending_bytes=1_000) as client:
        gate = hold_flight(collector, client)
        client.start_episode()
        client.start_episode()
        with pytest.raises(BufferFull, match="1000 bytes"):
            client.start_episode()
        gate.opened.set()


def test_an_event_that_no_request_can_carry_raises_in_the_call(
    collector: ScriptedCollector,
) -> None:
    """The client knows the collector's `max_body`: an event above it raises before it is queued,
    and batches stay below it."""
    collector.limits["max_body"] = 2_000
    with PolicyClient(collector.address, max_wait=30.0) as client:
        name = client.start_episode()
        client.log_action(name, OBS, 1)
        with pytest.raises(ValueError, match="an event of at most 1800 bytes"):
            client.log_returns(name, 1.0, {"text": "x" * 2_000})
        for _ in range(30):
            client.log_action(name, OBS, 1)
        client.flush()
    assert len(collector.episodes[name].events) == 31
    assert max(map(len, collector.bodies("/v1/events"))) <= 2_000


def test_batches_gather_while_one_is_in_flight(
    collector: ScriptedCollector, client: PolicyClient
) -> None:
    """Events logged while a batch is in flight go out in batches that are as full as possible, and
    no one-step episode is split."""
    gate = hold_flight(collector, client)
    for _ in range(700):
        client.log_step(OBS, 1, 1.0)
    before = len(collector.bodies("/v1/events"))
    gate.opened.set()
    client.flush()
    batches = [
        wire.decode(body, wire.MSGPACK, wire.Batch).events
        for body in collector.bodies("/v1/events")[before:]
    ]
    assert [len(batch) for batch in batches] == [999, 999, 102]
    assert all(isinstance(batch[0], wire.Start) for batch in batches)


def test_a_given_session_is_used_for_everything(collector: ScriptedCollector) -> None:
    """Every request has the session's headers, and closing the client leaves the session open.

    Row: PolicyClient(address, inference_mode="local", update_interval=10.0, session)
    """
    with requests.Session() as session:
        session.headers["x-team"] = "ads"
        with PolicyClient(collector.address, "remote", session=session) as client:
            name = client.start_episode("mine")
            collector.faults.append(cut_after)
            client.get_action(name, OBS)
            client.end_episode(name)
        session.get(f"{collector.address}/v1/spec", timeout=60)
    assert {headers["x-team"] for _, headers, _ in collector.requests} == {"ads"}
    assert collector.episodes[name].ended


def test_a_client_that_is_dropped_still_delivers(collector: ScriptedCollector) -> None:
    """Without close, the queued events are delivered, and then the client's thread ends.

    Row: local inference thread
    """
    client = PolicyClient(collector.address)
    gate = hold_flight(collector, client)
    name = client.log_step(OBS, 1, 1.0)
    thread = client._sender._thread
    del client
    gc.collect()
    gate.opened.set()
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
    assert collector.episodes[name].ended


def test_a_closed_client_says_so(collector: ScriptedCollector) -> None:
    """close may be called twice; each later call raises ClientError."""
    client = PolicyClient(collector.address)
    name = client.start_episode()
    client.close()
    client.close()
    with pytest.raises(ClientError, match="the client is closed"):
        client.log_action(name, OBS, 1)


def run_program(collector: ScriptedCollector, body: str) -> str:
    """Run a program that logs to the collector, as a user's process would."""
    code = "import os, sys\nfrom headrace import PolicyClient\n"
    code += f"client = PolicyClient({collector.address!r})\n" + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_a_program_that_ends_without_close_delivers_everything(
    collector: ScriptedCollector,
) -> None:
    """The process delivers its queue before it ends, although the first requests fail."""
    collector.faults.extend([cut_before, cut_after, answering(503, "draining")])
    run_program(collector, "for i in range(2500): client.log_step([0, 0], i % 3, 1.0)")
    assert len(collector.episodes) == 2500
    assert all(record.ended for record in collector.episodes.values())


def test_the_threads_of_a_client_import_nothing(collector: ScriptedCollector) -> None:
    """A child that is forked while a thread imports a module has that module half initialised for
    good. Without `encodings.idna`, for one, it could never connect."""
    run_program(
        collector,
        """
        import tempfile
        folder = tempfile.mkdtemp()
        spool = PolicyClient(client._transport.address, on_full="spool", spool_dir=folder)
        before = set(sys.modules)
        for one in (client, spool):
            one.log_step([0, 0], 1, 1.0)
            one.flush(60)
        assert set(sys.modules) == before, set(sys.modules) - before
        """,
    )
    assert len(collector.episodes) == 2


def test_a_forked_child_logs_as_a_client_of_its_own(collector: ScriptedCollector) -> None:
    """The child inherits neither queue nor episodes nor connections: each event of both arrives
    once."""
    run_program(
        collector,
        """
        parent = client.start_episode("parent")
        client.flush()
        for _ in range(50): client.log_action(parent, [0, 0], 0)
        pid = os.fork()
        if pid == 0:
            try:
                client.log_action(parent, [0, 0], 1)
            except ValueError as error:
                assert str(error) == "Episode parent not found.", error
            child = client.start_episode("child")
            for _ in range(50): client.log_action(child, [0, 0], 2)
            client.end_episode(child)
            sys.exit(0)
        for _ in range(50): client.log_action(parent, [0, 0], 0)
        client.end_episode(parent)
        assert os.waitpid(pid, 0)[1] == 0
        """,
    )
    assert [len(record.events) for record in collector.episodes.values()] == [101, 51]
    assert len({record.instance for record in collector.episodes.values()}) == 2
    actions = {event.action[0] for event in collector.episodes["parent"].events[:-1]}
    assert actions == {0}


def test_a_multiprocessing_child_delivers_at_its_end(collector: ScriptedCollector) -> None:
    """A multiprocessing child runs no atexit handlers, and delivers its events all the same."""
    run_program(
        collector,
        """
        import multiprocessing
        def work():
            for _ in range(200): client.log_step([0, 0], 1, 1.0)
        if __name__ == "__main__":
            client.log_step([0, 0], 1, 1.0)
            process = multiprocessing.get_context("fork").Process(target=work)
            process.start()
            process.join()
            assert process.exitcode == 0
        """,
    )
    assert len(collector.episodes) == 201


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_pending": 0}, "max_pending: expected a number >= 3, got 0"),
        ({"max_pending_bytes": -5}, "max_pending_bytes: expected a number >= 1, got -5"),
        ({"batch": "many"}, "batch: expected a number >= 3, got 'many'"),
        ({"timeout": 0}, "timeout: expected a number > 0, got 0"),
        ({"max_wait": "10ms"}, "max_wait: expected a number >= 0, got '10ms'"),
        ({"linger": float("nan")}, "linger: expected a number >= 0, got nan"),
        ({"on_error": 5}, "on_error: expected a function of one Refusal, got 5"),
    ],
)
def test_an_option_that_does_not_fit_is_named(options: dict[str, Any], text: str) -> None:
    """The constructor raises ValueError, with the option, the expected value and the given one."""
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        PolicyClient("http://127.0.0.1:9", **options)
