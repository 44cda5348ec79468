"""Local mode: the client acts with published weights, and stores what it did.

Also of `ingest.client.local_actions`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from ingest.client import local_inference
from ingest.client.async_client import AsyncPolicyClient
from ingest.client.local_inference import LocalPolicy
from ingest.client.policy_client import PolicyClient
from ingest.delivery.transport import Answer, Transport
from ingest.protocol.errors import ClientError, CollectorUnavailable, Refusal
from ingest.protocol.weights import Published
from policy.inference.action_rule import GREEDY, ActionRule
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.spaces.descriptors import Discrete, parse_space
from storage.weights.manifest import Live
from tests.collector_process import CollectorProcess, declare, shard_rows

SPEC = PolicySpec(parse_space("box:4"), parse_space("discrete:2"))
OBS = np.array([0.1, -0.2, 0.3, 0.4], np.float32)


def publish(root: Path, seed: int, spec: PolicySpec = SPEC) -> Live:
    store = WeightStore(root, "default")
    weights = Policy(spec, seed=seed).get_weights()
    digest = store.add_candidate(weights, spec=spec.to_json(), metrics={"seed": seed}, lineage={})
    return store.publish(digest)


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[CollectorProcess]:
    declare(tmp_path)
    with CollectorProcess(tmp_path) as process:
        yield process


def wait_for(client: PolicyClient, version: int) -> None:
    policy = client._actor.policy("default")
    while policy.version != version:
        assert policy.wait_newer(policy.version, 10.0)


def test_without_a_version_get_action_says_so(collector: CollectorProcess) -> None:
    """The episode is unchanged, and goes on once a version is published."""
    with PolicyClient(collector.address) as client:
        episode = client.start_episode()
        with pytest.raises(Refusal, match="no published version"):
            client.get_action(episode, OBS)
        publish(collector.root, 1)
        assert client.get_action(episode, OBS) in (0, 1)
        client.end_episode(episode)


def test_only_one_action_waits_for_weights_of_a_collector_that_hangs(tmp_path: Path) -> None:
    """With a policy file a service that starts during an outage waits once; a thread goes on."""
    declare(tmp_path, "box:4", "discrete:2")
    with socket.create_server(("127.0.0.1", 0)) as hanging:  # connections, but no answers
        address = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        given = tmp_path / "policies" / "default.json"
        client = PolicyClient(address, policy_file=given, timeout=0.5)
        name = client.start_episode()
        with pytest.raises(CollectorUnavailable):
            client.get_action(name, OBS)
        client._transport.timeout = 1_000.0  # a call that waits would reach the test's limit
        for _ in range(3):
            with pytest.raises(CollectorUnavailable):
                client.get_action(name, OBS)
            client.log_action(name, OBS, 1, action_prob=0.5)
        client._sender.retire()
        client._transport.close()


def test_a_client_that_starts_before_its_collector_acts_when_it_comes(tmp_path: Path) -> None:
    """The weights come in the background: no call has to wait for the collector again."""
    declare(tmp_path, "box:4", "discrete:2")
    publish(tmp_path, 1)
    with CollectorProcess(tmp_path) as earlier:
        port = int(earlier.address.rpartition(":")[2])
    given = tmp_path / "policies" / "default.json"
    with PolicyClient(earlier.address, policy_file=given) as client:
        name = client.start_episode()
        with pytest.raises(CollectorUnavailable, match="no collector is listening"):
            client.get_action(name, OBS)
        with CollectorProcess(tmp_path, port=port):
            assert client._actor.policy("default").wait_newer(-1, 60.0)
            assert client.get_action(name, OBS) in (0, 1)
            client.flush(60)


def test_steps_store_what_acted(collector: CollectorProcess) -> None:
    """Version, log-probability and distribution inputs are those of the weights that acted."""
    for seed in (1, 2):
        publish(collector.root, seed)
    with PolicyClient(collector.address) as client:
        episode = client.start_episode()
        actions = []
        for t in range(20):
            actions.append(client.get_action(episode, OBS * t))
            client.log_returns(episode, float(t))
        client.end_episode(episode, OBS)
    collector.settle(20)
    assert collector.stop() == 0
    rows = shard_rows(collector.root)
    _, weights = WeightStore(collector.root, "default").load(2)
    acted = NumpyPolicy(SPEC, weights)
    flat = np.stack([OBS * t for t in range(20)])
    assert [row["actions"] for row in rows] == actions
    assert {row["policy_version"] for row in rows} == {2}
    assert {row["source"] for row in rows} == {"on_policy"}
    assert [row["rewards"] for row in rows] == [float(t) for t in range(20)]
    logp = acted.logp(flat, np.array(actions))
    np.testing.assert_allclose([row["action_logp"] for row in rows], logp, atol=1e-6)
    inputs = np.stack([row["action_dist_inputs"] for row in rows])
    np.testing.assert_allclose(inputs, acted.dist_inputs(flat), atol=1e-6)


@pytest.mark.parametrize(
    ("action", "rule"),
    [
        ("discrete:3", ActionRule("epsilon_greedy", epsilon=0.5)),
        ("discrete:3", ActionRule("sample", temperature=0.1)),
        ("box:2", GREEDY),
    ],
)
def test_local_and_remote_steps_store_the_rules_propensity(
    tmp_path: Path, action: str, rule: ActionRule
) -> None:
    """One call for one episode or several stores the rule's probability of the action; the mean of
    a distribution has none.
    """
    declare(tmp_path, action=action)
    spec = PolicySpec(SPEC.observation, parse_space(action), action_rule=rule)
    publish(tmp_path, 5, spec)
    with CollectorProcess(tmp_path) as process:
        for mode in ("local", "remote"):
            with PolicyClient(process.address, mode) as client:
                episodes = [client.start_episode() for _ in range(3)]
                for t in range(10):
                    observations = {name: OBS * (t + i) for i, name in enumerate(episodes)}
                    if t % 2:
                        client.get_action(episodes, observations)
                    else:
                        for name, observation in observations.items():
                            client.get_action(name, observation)
                for name in episodes:
                    client.end_episode(name)
        process.settle(60)
        assert process.stop() == 0
    rows = shard_rows(tmp_path)
    assert len(rows) == 60
    assert {row["source"] for row in rows} == {"on_policy"}
    _, weights = WeightStore(tmp_path, "default").load(1)
    flat = np.stack([row["obs"] for row in rows])
    actions = np.stack([row["actions"] for row in rows])
    logp = NumpyPolicy(spec, weights).logp(flat, actions)
    assert np.isnan(logp).all() == (rule == GREEDY)
    np.testing.assert_allclose([row["action_logp"] for row in rows], logp, atol=1e-5)


def test_a_new_version_arrives_by_itself(collector: CollectorProcess) -> None:
    """The long poll brings each version; the new number of a rollback counts as newer.

    Row: local inference thread
    """
    publish(collector.root, 1)
    with PolicyClient(collector.address) as client:
        episode = client.start_episode()
        client.get_action(episode, OBS)
        for version in (2, 3):
            publish(collector.root, version)
            wait_for(client, version)
        WeightStore(collector.root, "default").rollback(1)
        wait_for(client, 4)
        client.get_action(episode, OBS)
        client.end_episode(episode)
    assert collector.stop() == 0
    assert [row["policy_version"] for row in shard_rows(collector.root)] == [1, 4]


@pytest.mark.parametrize("kind", [PolicyClient, AsyncPolicyClient])
def test_a_client_that_is_dropped_stops_asking(
    collector: CollectorProcess, kind: type[PolicyClient]
) -> None:
    """Without close, its thread ends with its current request, and its connections are closed.

    Row: local inference thread
    """
    publish(collector.root, 1)
    clients = [kind(collector.address)]
    episode = clients[0].start_episode()

    async def act() -> None:
        action = clients[0].get_action(episode, OBS)
        if isinstance(clients[0], AsyncPolicyClient):
            await action

    asyncio.run(act())
    clients[0].end_episode(episode)
    threads = clients[0]._actor.policy("default")._thread, clients[0]._sender._thread
    client, transport = weakref.ref(clients[0]), weakref.ref(clients[0]._transport)
    clients.clear()
    gc.collect()
    assert client() is None
    publish(collector.root, 2)  # the answer to the current request
    for thread in threads:
        assert thread is not None
        thread.join(60)
        assert not thread.is_alive()
    gc.collect()
    assert transport() is None


def test_a_closed_client_asks_for_no_policy_in_the_background(collector: CollectorProcess) -> None:
    """Also not for one whose first action came after the end."""
    publish(collector.root, 1)
    client = PolicyClient(collector.address)
    episode = client.start_episode()
    client.close()
    with pytest.raises(ClientError, match="the client is closed"):
        client.get_action(episode, OBS)
    assert client._actor.policy("default")._thread is None


def drops_at(point: int, collector: CollectorProcess) -> bool:
    """Drop a client at the `point`-th line of its thread; False if it has fewer lines."""
    clients, left, acted = [PolicyClient(collector.address)], point, threading.Event()

    def trace(frame: FrameType, kind: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != local_inference.__file__:
            return None
        if kind == "line" and acted.is_set():
            left -= 1
            if not left:
                clients.clear()
        return trace

    threading.settrace(trace)
    clients[0].get_action(clients[0].start_episode(), OBS)
    threading.settrace(None)  # type: ignore[arg-type]  # as documented
    policy, client = clients[0]._actor.policy("default"), weakref.ref(clients[0])
    acted.set()
    for seed in (1, 2):  # two requests: one turn of the thread, and the end of the next
        version = publish(collector.root, seed).version
        while clients and policy.version != version:
            policy.wait_newer(policy.version, 0.1)
    if clients:
        clients.pop().close()
        return False
    publish(collector.root, 3)  # the answer to a request that was sent after the drop
    assert policy._thread is not None
    policy._thread.join(60)
    assert not policy._thread.is_alive()
    assert client() is None
    return True


def test_a_client_may_be_dropped_at_any_point_of_the_thread_that_asks(
    collector: CollectorProcess,
) -> None:
    """The garbage collector may run its finalizer in that thread: it ends, and waits for nothing.

    Row: local inference thread
    """
    publish(collector.root, 1)
    point = next(point for point in itertools.count(1) if not drops_at(point, collector))
    assert point > 20


def test_without_an_interval_only_the_caller_refreshes(collector: CollectorProcess) -> None:
    """With update_interval=None, new weights arrive only by update_policy_weights.

    Row: update_interval
    """
    publish(collector.root, 1)
    with PolicyClient(collector.address, update_interval=None) as client:
        episode = client.start_episode()
        client.get_action(episode, OBS)
        publish(collector.root, 2)
        client.get_action(episode, OBS)
        assert client._actor.policy("default").version == 1
        assert client.update_policy_weights() == 2
        client.end_episode(episode)


def test_a_version_of_other_spaces_does_not_act_in_an_episode(collector: CollectorProcess) -> None:
    """The numbers of its actions would mean other choices than in training."""
    publish(collector.root, 1)
    with PolicyClient(collector.address, update_interval=None, long_poll=False) as client:
        episode = client.start_episode()
        assert client.get_action(episode, OBS) in (0, 1)
        client.flush()
        assert collector.stop() == 0
        other = PolicySpec(SPEC.observation, Discrete.of(["left", "right"]))
        declared = PolicyDeclaration(observation=other.observation, action=other.action)
        save_declaration(collector.root, declared)
        publish(collector.root, 2, other)
        collector.restart()
        assert client.update_policy_weights() == 2
        with pytest.raises(Refusal, match="no longer declared with the spaces") as caught:
            client.get_action(episode, OBS)
        assert caught.value.code == "no_version"
        client.log_action(episode, OBS, 1)
        client.end_episode(episode)
        client.log_step(OBS, 1, 1.0)
        client.flush()
        client.connect()
        assert client.get_action(client.start_episode(), OBS) in ("left", "right")


def test_an_interval_of_zero_asks_before_every_action(collector: CollectorProcess) -> None:
    """With update_interval=0, the next action uses the weights published before it.

    Row: update_interval
    """
    publish(collector.root, 1)
    with PolicyClient(collector.address, update_interval=0, long_poll=False) as client:
        episode = client.start_episode()
        for version in (2, 3):
            client.get_action(episode, OBS)
            publish(collector.root, version)
            client.get_action(episode, OBS)
            assert client._actor.policy("default").version == version
        client.end_episode(episode)


@pytest.mark.parametrize("long_poll", [True, False])
def test_no_action_waits_for_newer_weights(collector: CollectorProcess, long_poll: bool) -> None:
    """The old weights act while the collector is frozen; newer ones arrive once it answers.

    Row: update_interval
    """
    publish(collector.root, 1)
    options = {"update_interval": 0.001, "long_poll": long_poll, "timeout": 120.0}
    with PolicyClient(collector.address, **options) as client, ThreadPoolExecutor(1) as thread:
        episode = client.start_episode()
        client.get_action(episode, OBS)
        policy = client._actor.policy("default")
        policy._renew()  # like a forked child, which has no thread for the long poll
        os.kill(collector.serving_pid(), signal.SIGSTOP)
        try:
            for _ in range(3):
                threading.Event().wait(0.002)
                thread.submit(client.get_action, episode, OBS).result(60)  # of 120
        finally:
            os.kill(collector.serving_pid(), signal.SIGCONT)
        publish(collector.root, 2)
        while policy.version != 2:
            client.get_action(episode, OBS)
        client.end_episode(episode)


def test_a_first_fetch_that_fails_is_not_repeated_by_those_who_waited_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads that act at once without weights wait for one `timeout` together, not for one
    each.
    """
    at_once = SimpleNamespace(monotonic=lambda: 0.0)  # also for a thread that is late to wait
    monkeypatch.setattr(local_inference, "time", at_once)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections and never answers
        transport = Transport(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.25)
        policy = LocalPolicy(transport, "default", 10.0, long_poll=False)
        ready = threading.Barrier(8)

        def act() -> None:
            ready.wait()
            with pytest.raises(CollectorUnavailable):
                policy.act(OBS)

        with ThreadPoolExecutor(8) as threads:
            for done in [threads.submit(act) for _ in range(8)]:
                done.result()
        silent.settimeout(0)
        asked = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                asked += 1
        assert asked == 1
        transport.close()


def test_a_list_of_episodes_gets_a_dict_of_actions(collector: CollectorProcess) -> None:
    """Ids and a mapping of observations give a mapping of actions.

    Row: get_action(episode_id, obs)
    """
    publish(collector.root, 1)
    with PolicyClient(collector.address) as client:
        names = [client.start_episode() for _ in range(3)]
        actions = client.get_action(names, dict.fromkeys(names, OBS))
        assert set(actions) == set(names)
        for name in names:
            client.end_episode(name)


def test_a_list_is_decided_as_a_whole_or_not_at_all(collector: CollectorProcess) -> None:
    """One bad observation records nothing for any episode; an id named twice acts once."""
    publish(collector.root, 1)
    with PolicyClient(collector.address) as client:
        first, second = client.start_episode(), client.start_episode()
        with pytest.raises(ValueError, match=second):
            client.get_action([first, second], {first: OBS, second: [0.0]})
        client.get_action([first, first, second], {first: OBS, second: OBS})
        client.flush()
        for name in (first, second):
            assert collector.get(f"/v1/episodes/{name}")[1]["steps"] == 1
            client.end_episode(name)


def test_damaged_and_older_weights_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last good weights stay after a flipped byte, a lower generation or an unreadable message.

    Row: local inference thread
    """
    for seed in (1, 2):
        publish(tmp_path, seed)
    store = WeightStore(tmp_path, "default")
    transport = Transport("http://127.0.0.1:9")
    policy = LocalPolicy(transport, "default", None)

    def take(version: int, generation: int, change: bool = False) -> None:
        manifest, weights = store.read(version)
        if change:
            weights = weights[:-1] + bytes([weights[-1] ^ 1])
        body = msgspec.msgpack.encode(Published(manifest.to_json(), generation, weights))
        policy._take(Answer(200, {"etag": f'"{generation}"'}, body))

    take(2, 5)
    take(1, 6, change=True)
    assert (policy.version, policy.refused) == (2, 1)
    assert policy._etag == '"5"'  # equal weights, as after a restart
    take(2, 5)  # the same again, as after a collector's restart, is no older one
    assert policy.refused_older == 0
    take(1, 4)
    assert (policy.version, policy.refused, policy.refused_older) == (2, 1, 1)
    assert (
        "refused version 1 of generation 4, because version 2 of generation 5 is in use"
        in caplog.text
    )
    policy._take(Answer(200, {}, b"\x00nonsense"))
    assert (policy.version, policy.refused) == (2, 2)
    take(1, 6)
    assert policy.version == 1
    stats = {"n": 1, "mean": {}, "s": [0.0] * 4}  # a TypeError for any reader of its mean
    manifest, weights = store.read(2)
    odd = {**manifest.to_json(), "spec": {**SPEC.to_json(), "observation_filter": "MeanStdFilter"}}
    odd["filter_state"] = {"kind": "MeanStdFilter", "clip": None, "stats": stats}
    policy._take(Answer(200, {}, msgspec.msgpack.encode(Published(odd, 7, weights))))
    assert (policy.version, policy.refused) == (1, 3)
    transport.close()


def test_a_held_version_stops_its_clients_until_a_newer_one(tmp_path: Path) -> None:
    """With steps_per_version a version acts for about that many steps, and its parts do not
    wait.
    """
    quota = 40
    declare(tmp_path, steps_per_version=quota, seal_seconds=3600.0, part_seconds=3600.0)
    publish(tmp_path, 1)
    with CollectorProcess(tmp_path) as collector:
        stop = threading.Event()

        def publisher() -> None:
            """Publishes the next version once the shards hold the share of all earlier ones."""
            version = 1
            while not stop.wait(0.02):
                if len(shard_rows(tmp_path)) >= quota * version:
                    version += 1
                    publish(tmp_path, version)

        thread = threading.Thread(target=publisher)
        thread.start()
        try:
            with PolicyClient(collector.address) as client:
                episode = client.start_episode()
                for _ in range(4 * quota):
                    client.get_action(episode, OBS)
                client.end_episode(episode)
                assert client._actor.holds >= 2
                assert client._actor.holds_given_up == 0
        finally:
            stop.set()
            thread.join()
        assert collector.stop() == 0
    versions = [row["policy_version"] for row in shard_rows(tmp_path)]
    assert len(versions) == 4 * quota
    for version in (1, 2, 3):
        acted = sum(known <= version for known in versions)
        assert quota * version <= acted <= quota * version + 1 + quota // 8
