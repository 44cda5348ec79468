"""The request size is learned once, and a cut of the queue splits no short episode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ingest.client.policy_client import PolicyClient
from ingest.delivery.batches import BATCH_BYTES, LEAST_BYTES, PATIENCE, BatchSize, whole_runs
from ingest.protocol.errors import Refusal
from ingest.protocol.messages import Event, LogAction, LogReturns, Start
from tests.collector_process import CollectorProcess, declare
from tests.ingest.raw_http import HOST, exchange
from tests.ingest.scripted_collector import Gate, ScriptedCollector

OBS = [0.5, -1.0]


def step(name: str, seq: int) -> LogAction:
    return LogAction(episode_id=name, seq=seq, obs=b"o", action=b"a")


def test_a_refusal_halves_and_success_grows() -> None:
    """A refusal halves the size at once; success raises it slowly, up to the collector's limit."""
    size = BatchSize(1_000_000)
    size.refused(900_000)
    assert size.nbytes == 450_000
    for _ in range(PATIENCE - 1):
        size.passed()
    assert size.nbytes == 450_000
    size.passed()
    assert size.nbytes == 900_000
    size.bound(500_000)
    assert size.nbytes == 500_000
    for _ in range(2 * PATIENCE):
        size.passed()
    assert size.nbytes == 500_000
    size.refused(1)
    assert size.nbytes == LEAST_BYTES


def test_what_a_proxy_refuses_is_not_tried_again() -> None:
    """A proxy's limit, unknown to the collector, costs a few refusals, not one for every batch."""
    limit, refused = 40_000, 0
    with ScriptedCollector() as collector:

        def proxy(batch: Any) -> None:
            nonlocal refused
            if len(collector.bodies("/v1/events")[-1]) > limit:
                refused += 1
                raise Refusal("too_large", "the proxy's limit")

        collector.batch_judge = proxy
        with PolicyClient(collector.address, "remote", timeout=30.0) as client:
            name = client.start_episode()
            client.flush()
            gate = Gate()
            collector.faults.append(gate)
            client.start_episode()
            assert gate.reached.wait(60)
            for _ in range(200):
                client.log_action(name, OBS, 1)
                client.log_returns(name, 1.0, {"text": "x" * 5_000})
            gate.opened.set()
            client.flush()
        assert len(collector.episodes[name].events) == 200
        assert client.stats.refused == {}
    batches = [len(body) for body in collector.bodies("/v1/events")]
    assert 1 <= refused <= 12
    assert sum(size <= limit for size in batches) > 2 * refused


def test_random_pixels_pass_at_the_default_settings(tmp_path: Path) -> None:
    """Random pixels are not mistaken for a body of many lists, and each body has the intended
    size.
    """
    frames = np.random.default_rng(7).integers(0, 256, (16, 84, 84, 4), np.uint8)
    declare(tmp_path, observation="box:84x84x4:uint8:0:255")
    with CollectorProcess(tmp_path) as collector:
        with PolicyClient(collector.address, "remote", timeout=60.0) as client:
            episode = client.start_episode()
            for step in range(150):
                client.log_action(episode, frames[step % 16], step & 1)
            client.end_episode(episode)
            client.flush()
            stats = client.stats
        heard = exchange(collector.port, b"GET /metrics HTTP/1.0\r\n" + HOST + b"\r\n", answers=0)
        assert b'headrace_refused_requests_total{code="too_large"}' not in heard.data
        collector.settle(150)
    assert (stats.acknowledged, stats.refused) == (152, {})
    assert stats.batches >= 150 * frames[0].nbytes // BATCH_BYTES


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 60))
def test_whole_runs_cuts_before_a_start_or_where_it_must(lengths: list[int], size: int) -> None:
    """The cut is at most `size` and never empty. It splits no episode of up to 8 events unless that
    episode's start is the first event of the batch."""
    queue: list[Event | None] = []
    for number, length in enumerate(lengths):
        queue.append(Start(episode_id=str(number)))
        queue += [step(str(number), seq) for seq in range(1, length)]
    cut = whole_runs(queue, min(size, len(queue)))
    assert 1 <= cut <= size
    if cut < len(queue):
        after = queue[cut]
        assert after is not None
        begin = next(i for i, e in enumerate(queue) if e and e.episode_id == after.episode_id)
        torn = begin < cut
        assert not torn or begin == 0 or lengths[int(after.episode_id)] > 8


def test_whole_runs_keeps_the_rewards_of_a_step_with_it() -> None:
    """A step that is sealed before its reward arrives would never get it."""
    queue: list[Event | None] = [Start(episode_id="e")]
    for seq in range(1, 40, 2):
        queue += [step("e", seq), LogReturns(episode_id="e", seq=seq + 1, reward=1.0)]
    assert [whole_runs(queue, size) for size in (20, 21, 22, 23)] == [19, 21, 21, 23]
