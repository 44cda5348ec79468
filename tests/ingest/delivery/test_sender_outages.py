"""PolicyClient in a service whose collector is absent, frozen, or behind a full queue."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ingest.client.policy_client import PolicyClient
from ingest.protocol import messages as wire
from ingest.protocol.errors import BufferFull, Refusal
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.ingest.scripted_collector import Gate, ScriptedCollector

OBS = [0.0, 0.5, 1.0, -0.5]
SHORT = [0.5, -1.0]
PATIENT = 120.0  # seconds: a call that waited for an answer would take this long
AGENTS = {"left": "default", "right": "default"}


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    root = tmp_path_factory.mktemp("outages")
    declare(root)
    with CollectorProcess(root) as running:
        yield running


def absent(collector: CollectorProcess) -> str:
    return "http://127.0.0.1:9"


def frozen(collector: CollectorProcess) -> str:
    os.kill(collector.serving_pid(), signal.SIGSTOP)
    return collector.address


@pytest.fixture
def thawed(collector: CollectorProcess) -> Iterator[None]:
    yield
    os.kill(collector.serving_pid(), signal.SIGCONT)


def log_everything(client: PolicyClient) -> list[str]:
    """Make every logging call, for one agent and for several, with and without a given id."""
    names = [client.start_episode(), client.start_episode(f"own-{time.time_ns()}")]
    for name in names:
        client.log_action(name, OBS, 1, action_prob=0.5)
        client.log_returns(name, 1.0, {"why": "click"})
        client.log_returns(name, 0.5, step=0)
        client.end_episode(name, OBS)
    names.append(client.log_step(OBS, 1, 1.0))
    whole = client.start_episode(f"whole-{time.time_ns()}", policy_id=AGENTS)
    both = dict.fromkeys(AGENTS, OBS)
    client.log_action(whole, both, dict.fromkeys(AGENTS, 1))
    client.log_returns(whole, dict.fromkeys(AGENTS, 1.0))
    client.end_episode(whole, both)
    return [*names, whole]


@pytest.mark.parametrize("down", [absent, frozen])
@pytest.mark.usefixtures("thawed")
def test_no_logging_call_waits_for_a_collector_that_is_down(
    collector: CollectorProcess, down: Callable[[CollectorProcess], str]
) -> None:
    """All calls together take less than one time-out of the client, so none waited for the
    collector. Their events are delivered once it is back."""
    client = PolicyClient(down(collector), timeout=PATIENT)
    begin = time.monotonic()
    log_everything(client)
    assert time.monotonic() - begin < PATIENT
    assert client.stats.waiting == 21
    assert client.stats.oldest_waiting > 0
    if down is absent:
        with pytest.raises(TimeoutError):
            client.close(0.0)
    else:
        os.kill(collector.serving_pid(), signal.SIGCONT)
        client.close(PATIENT)
        assert client.stats.waiting == 0


@pytest.mark.usefixtures("thawed")
def test_a_frozen_collector_gets_everything_once_when_it_goes_on(
    collector: CollectorProcess,
) -> None:
    """Events logged while it was frozen, before its first answer, are stored once."""
    before = collector.get("/readyz")[1]["steps"]
    frozen(collector)
    with PolicyClient(collector.address, timeout=PATIENT) as client:
        log_everything(client)
        os.kill(collector.serving_pid(), signal.SIGCONT)
        client.flush(PATIENT)
        assert client.stats.refused == {}
        assert client.stats.duplicates == 0
    assert collector.get("/readyz")[1]["steps"] - before == 5


def test_a_full_queue_holds_no_call_longer_than_max_wait() -> None:
    """Only `"block"` waits for the client's time-out."""
    client = PolicyClient("http://127.0.0.1:9", max_pending=3, timeout=PATIENT)
    begin, name = time.monotonic(), client.start_episode()
    client.log_action(name, SHORT, 1)
    client.log_action(name, SHORT, 1)
    for call in (client.start_episode, lambda: client.log_action(name, SHORT, 1)):
        with pytest.raises(BufferFull, match="at most 3 events"):
            call()
    assert time.monotonic() - begin < PATIENT
    with pytest.raises(TimeoutError):
        client.close(0.0)


def test_get_action_waits_for_the_declaration_and_for_what_was_logged(
    collector: CollectorProcess,
) -> None:
    """Remote actions wait, within the time-out, until the collector has answered. Events logged
    before a refused action travel with it or before it, and none is lost."""
    with PolicyClient(collector.address, "remote", max_wait=0.0) as client:
        name = client.start_episode()
        client.log_action(name, OBS, 1)
        with pytest.raises(Refusal) as caught:
            client.get_action(name, OBS)
        assert caught.value.code == "no_version"
        client.flush()
        assert (client.stats.waiting, client.stats.acknowledged) == (0, 2)


# --- dropping --------------------------------------------------------------------------------


def hold(collector: ScriptedCollector, client: PolicyClient) -> Gate:
    """Make the sender wait for an answer."""
    client.connect()
    client.log_step(SHORT, 1, 1.0)
    client.flush()
    gate = Gate()
    collector.faults.append(gate)
    client.start_episode("held")
    assert gate.reached.wait(60)
    return gate


def test_a_full_queue_refuses_new_episodes_and_keeps_a_share_for_open_ones() -> None:
    """Every call on a refused episode is counted and has no effect; open episodes go on."""
    with (
        ScriptedCollector() as collector,
        PolicyClient(collector.address, on_full="drop", max_pending=8, max_wait=0.0) as client,
    ):
        gate = hold(collector, client)
        kept = client.start_episode()
        for action in (0, 1, 2, 0):
            client.log_action(kept, SHORT, action)
        refused = client.start_episode()
        client.log_action(refused, SHORT, 1)
        client.log_returns(refused, 1.0)
        client.log_action(kept, SHORT, 2)
        client.end_episode(refused, SHORT)
        client.log_step(SHORT, 1, 1.0)
        client.end_episode(kept)
        stats = client.stats
        assert (stats.dropped_episodes, stats.dropped_steps) == (2, 2)
        gate.opened.set()
        client.flush()
        later = client.log_step(SHORT, 1, 1.0)
        client.flush()
        assert client.stats.refused == {}
        assert (refused in collector.episodes, later in collector.episodes) == (False, True)
        assert len(collector.episodes[kept].events) == 6
        bodies = [wire.decode(b, wire.MSGPACK, wire.Batch) for b in collector.bodies("/v1/events")]
    assert bodies[-1].dropped == wire.Dropped(episodes=2, steps=2)
    assert bodies[0].dropped is None


def test_what_was_dropped_is_told_when_nothing_follows() -> None:
    """The count is sent once the collector answers again, and by a flush, even if no event
    waits.
    """
    with (
        ScriptedCollector() as collector,
        PolicyClient(collector.address, on_full="drop", max_pending=4, max_wait=0.0) as client,
    ):

        def reports() -> list[wire.Dropped | None]:
            bodies = collector.bodies("/v1/events")
            return [wire.decode(body, wire.MSGPACK, wire.Batch).dropped for body in bodies]

        gate = hold(collector, client)
        client.start_episode("fits")
        client.log_action("fits", SHORT, 1)
        client.start_episode("refused")
        client.log_action("refused", SHORT, 1)
        gate.opened.set()
        client.flush(60)
        assert reports()[-1] == wire.Dropped(episodes=1, steps=1)
        client.log_action("refused", SHORT, 1)
        client.flush(60)
        assert reports()[-1] == wire.Dropped(episodes=1, steps=2)
        count = len(reports())
        client.flush(60)
        assert len(reports()) == count


def test_an_open_episode_that_does_not_fit_is_cut_at_its_last_step() -> None:
    """The cut episode ends as broken with the reason `client_dropped`."""
    with ScriptedCollector() as collector:
        with PolicyClient(collector.address, on_full="drop", max_pending=6) as client:
            gate = hold(collector, client)
            name = client.start_episode()
            for _ in range(9):
                client.log_action(name, SHORT, 1)
                client.log_returns(name, 1.0)
            client.end_episode(name)
            with pytest.raises(Refusal, match="already completed"):
                client.log_action(name, SHORT, 1)
            assert (client.stats.dropped_episodes, client.stats.dropped_steps) == (1, 5)
            gate.opened.set()
            client.flush()
            assert (client.stats.waiting, client.stats.acknowledged) == (0, 9)  # all but that
        events = collector.episodes[name].events
        assert collector.episodes[name].rewards == [1.0] * 4
        assert [getattr(e, "broken", None) for e in events[4:]] == ["client_dropped"]


@pytest.mark.usefixtures("thawed")
def test_several_agents_are_dropped_together(collector: CollectorProcess) -> None:
    """A new episode is refused at its first call; an open one is cut for all agents."""
    options: dict[str, Any] = {"on_full": "drop", "max_pending": 9}
    with PolicyClient(collector.address, **options) as client:
        client.connect()
        frozen(collector)
        both, ones = dict.fromkeys(AGENTS, OBS), dict.fromkeys(AGENTS, 1)
        whole = client.start_episode(policy_id=AGENTS)
        client.log_action(whole, both, ones)
        client.log_action(whole, both, ones)
        new = client.start_episode(policy_id=AGENTS)
        for name in (new, whole, whole, whole, new):
            client.log_action(name, both, ones)
            client.log_returns(name, dict.fromkeys(AGENTS, 1.0))
        for name in (new, whole):
            client.end_episode(name)
        assert (client.stats.dropped_episodes, client.stats.dropped_steps) == (2, 4 + 2 * 2)
        assert client._outbox.dropped.names == set()
        os.kill(collector.serving_pid(), signal.SIGCONT)
        client.flush()
        assert client.stats.refused == {}
    state = collector.get(f"/v1/episodes/{whole}")[1]
    assert state["state"] == "broken"
    assert collector.get(f"/v1/episodes/{new}")[0] == 404


def test_the_collector_breaks_a_cut_episode_and_counts_what_was_dropped(tmp_path: Path) -> None:
    """The episode is stored as broken with its earlier steps; totals that are sent again count
    once.
    """
    declare(tmp_path)
    with CollectorProcess(tmp_path) as running:
        options: dict[str, Any] = {"on_full": "drop", "max_pending": 6}
        with PolicyClient(running.address, **options) as client:
            client.connect()
            os.kill(running.serving_pid(), signal.SIGSTOP)
            name = client.start_episode()
            for _ in range(8):
                client.log_action(name, OBS, 1)
            client.end_episode(name)
            client.start_episode()
            os.kill(running.serving_pid(), signal.SIGCONT)
            client.flush()
            client.log_step(OBS, 1, 1.0)
            client.flush()
            assert client.stats.refused == {}
        instance = running.post("/v1/instances", {})[1]["instance"]
        end = {"type": "end", "episode_id": "cut", "seq": 1, "broken": "client_dropped"}
        start = {"type": "start", "episode_id": "cut", "start": 0}
        for _ in range(2):
            batch = {"instance": instance, "events": [start, end], "dropped": {"steps": 7}}
            assert "refused" not in running.post("/v1/events", batch)[1]
        bad = {"instance": instance, "events": [end | {"broken": "because"}]}
        assert running.post("/v1/events", bad)[0] == 422
        text = running._pool.request("GET", running.address + "/metrics").data.decode()
        running.settle(6)
        running.stop()
    assert 'headrace_client_dropped_total{what="steps"} 10.0' in text
    assert 'headrace_client_dropped_total{what="episodes"} 2.0' in text
    assert 'headrace_episodes_ended_total{ending="broken"} 2.0' in text
    rows = [row for row in shard_rows(tmp_path) if row["eps_id"] == name]
    assert [row["t"] for row in rows] == list(range(5))
    assert rows[-1]["ended"] == "broken"
