"""A program that logs faster than its collector takes it, with the client of RLlib's name."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest

import headrace
from headrace.compat.rllib import PolicyClient
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.spaces.descriptors import Box, Discrete
from tests.collector_process import CollectorProcess, shard_rows
from tests.ingest.client.test_policy_client import hold_flight
from tests.ingest.scripted_collector import ScriptedCollector

EPISODES, ROOM = 60, 20


def log(client: headrace.PolicyClient, name: str) -> None:
    for number in range(EPISODES):
        episode = client.start_episode(f"{name}-{number}")
        client.log_action(episode, [0.0, 1.0], 1)
        client.end_episode(episode)


def test_calls_wait_for_a_collector_and_close_delivers_all(tmp_path: Path) -> None:
    """`headrace.PolicyClient` raises, and its error names the other ways."""
    save_declaration(tmp_path, PolicyDeclaration(observation=Box((2,)), action=Discrete(2)))
    with CollectorProcess(tmp_path) as collector:
        plain = headrace.PolicyClient(collector.address, max_pending=ROOM)
        client = PolicyClient(collector.address, max_pending=ROOM)
        for one in (plain, client):
            one.connect()
        os.kill(collector.process.pid, signal.SIGSTOP)
        with pytest.raises(headrace.BufferFull, match="on_full='block' waits for it"):
            log(plain, "plain")
        thread = Thread(target=log, args=(client, "waiting"))
        thread.start()
        while client.stats.waiting < ROOM:
            thread.join(0.01)
        assert thread.is_alive()
        os.kill(collector.process.pid, signal.SIGCONT)
        thread.join()
        client.close()
        assert client.stats.waiting == 0
        plain.close()
        assert collector.stop() == 0
    stored = {row["eps_id"] for row in shard_rows(tmp_path)}
    assert {f"waiting-{number}" for number in range(EPISODES)} <= stored


def test_close_raises_a_refusal_and_stops_nevertheless() -> None:
    """As that of `headrace.PolicyClient`."""
    with ScriptedCollector() as collector, ThreadPoolExecutor() as pool:
        client = PolicyClient(collector.address, timeout=30.0)
        episode = client.start_episode()
        client.flush()
        gate = hold_flight(collector, client)
        collector.judge = lambda event: "invalid" if event.episode_id == episode else None
        client.log_action(episode, [0.0, 1.0], 1)
        closing = pool.submit(client.close)
        while not closing.running():
            pass
        gate.opened.set()
        with pytest.raises(headrace.Refusal, match="scripted invalid"):
            closing.result()
        with pytest.raises(headrace.ClientError, match="closed"):
            client.start_episode()
