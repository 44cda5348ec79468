"""What a client spools outlives its process, and is delivered once."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ingest.client.async_client import AsyncPolicyClient
from ingest.client.policy_client import PolicyClient
from ingest.delivery import spool_frames
from ingest.delivery.declarations import ClientPolicy, Declarations, Draft
from ingest.delivery.outbox import Outbox
from ingest.delivery.spool import Spool, SpoolSegment
from ingest.protocol import messages as wire
from ingest.protocol.errors import BufferFull, CollectorUnavailable, IngestError, Refusal
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.spaces.descriptors import parse_space
from storage.system.files import FileLock
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.faults.disk import Disk
from tests.ingest.scripted_collector import Gate, ScriptedCollector, cut_after, cut_before, pass_by

OBS = [0.0, 0.5, 1.0, -0.5]
SHORT = [0.5, -1.0]
NOBODY = "http://127.0.0.1:9"
ROOT = Path(__file__).parents[3]


def spooling(address: str, directory: Path, **options: Any) -> PolicyClient:
    """A client whose calls wait for 20 s for a slow disk, unless `max_wait` is given. A forked
    child makes its own SharedSpool, with the queue's `patience`."""
    client = PolicyClient(address, on_full="spool", spool_dir=directory, **options)
    assert client._outbox.spool is not None
    client._outbox.patience = client._outbox.spool.max_wait = options.get("max_wait", 20.0)
    return client


def killed(address: str, directory: Path, prefix: str, episodes: int, **options: Any) -> int:
    """Spool episodes in a process, kill it, and return how many events were waiting."""
    module = ["-m", "tests.ingest.delivery.spooling_client"]
    arguments = [address, str(directory), str(episodes), prefix, json.dumps(options)]
    process = subprocess.Popen(
        [sys.executable, *module, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    with process.stdout as output:
        words = output.readline().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    return int(words[1])


def log_for_ever(client: PolicyClient) -> None:
    while True:
        client.log_step(SHORT, 1, 1.0)


def dead(client: PolicyClient) -> None:
    """Drop a client as if its process were killed: nothing more is sent, the spool stays."""
    client._outbox.closed = True
    client._transport.closing.set()
    client._outbox.wake()
    if client._sender._thread is not None:
        client._sender._thread.join(60)
    assert client._outbox.spool is not None
    client._outbox.spool.close()
    client._outbox.reset()


@pytest.fixture
def collector() -> Iterator[ScriptedCollector]:
    with ScriptedCollector() as running:
        yield running


def test_what_a_killed_process_logged_is_delivered_by_the_next(tmp_path: Path) -> None:
    """A process logs 182 events with a queue of 20, never reaches a collector, and is killed. The
    next process delivers all of them: each step is stored once, and the spool is empty."""
    assert killed(NOBODY, tmp_path / "spool", "e", 30, max_pending=20) == 30 * 6 + 2
    declare(tmp_path)
    with CollectorProcess(tmp_path) as running:
        with spooling(running.address, tmp_path / "spool", max_pending=20) as client:
            client.flush(60)
            stats = client.stats
            assert (stats.waiting, stats.spooled, stats.refused) == (0, 0, {})
            assert stats.acknowledged == 30 * 6 + 2
            assert running.get("/v1/episodes/e-open")[1]["state"] == "open"
        running.settle(60)
        running.stop()
    rows = [row for row in shard_rows(tmp_path) if row["eps_id"] != "e-open"]
    assert sorted(row["rewards"] for row in rows) == [float(n) for n in range(60)]
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["lock"]


def test_what_was_acknowledged_before_the_kill_is_not_doubled(tmp_path: Path) -> None:
    """A process is killed while it delivers. The next one repeats events under the instance and the
    numbers that the segment keeps, so that the collector stores each step once."""
    declare(tmp_path)
    with CollectorProcess(tmp_path) as running:
        for prefix in "ab":
            killed(running.address, tmp_path / "spool", prefix, 40, max_pending=20, linger=0.0)
            with spooling(running.address, tmp_path / "spool") as client:
                client.flush(60)
        running.settle(160)
        running.stop()
    counts = Counter((row["eps_id"], row["t"]) for row in shard_rows(tmp_path))
    assert set(counts.values()) == {1}
    assert len([name for name, _ in counts if not name.endswith("open")]) == 160


CUT = """
import sys, threading
from ingest.client.policy_client import PolicyClient
address, spool = sys.argv[1:]
options = {"on_full": "spool", "spool_dir": spool, "spool_sync": True, "max_wait": 20.0}
client = PolicyClient(address, **options)
client.log_step([0.5, -1.0], 1, 1.0)
client.flush(60)
print("acknowledged", flush=True)
threading.Event().wait()
"""


def test_a_power_cut_after_the_answer_leaves_the_instance_on_disk(
    collector: ScriptedCollector, tmp_path: Path
) -> None:
    """The note of the instance is synced before the first event is sent: after the cut, which
    leaves only what was synced, the next process repeats the events under the same instance."""
    disk = Disk.create(tmp_path / "volume")
    spool = disk.root / "spool"
    command = [sys.executable, "-c", CUT, collector.address, str(spool)]
    environment = {**os.environ, **disk.environment}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=environment)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == b"acknowledged\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    disk.cut(random.Random(1), "nothing")
    with spooling(collector.address, spool) as client:
        client.flush(60)
        assert client.stats.acknowledged == client.stats.duplicates == 3


def test_flush_raises_what_was_refused_of_this_process(
    collector: ScriptedCollector, tmp_path: Path
) -> None:
    """A refused reward or action of this process for an earlier one's episode is raised; refusals
    of the earlier process's events are only counted."""
    collector.judge = lambda event: (
        "window_closed" if isinstance(event, wire.LogReturns) and event.seq is None else None
    )
    earlier = spooling(NOBODY, tmp_path)
    earlier.start_episode("open")
    earlier.log_action("open", SHORT, 1)
    earlier.log_returns("open", 1.0, step=0, reward_id="theirs")
    dead(earlier)
    with spooling(collector.address, tmp_path) as client:
        client.flush(60)
        assert client.stats.refused == {"window_closed": 1}
    earlier = spooling(NOBODY, tmp_path)
    earlier.start_episode("next")
    earlier.log_action("next", SHORT, 1)
    dead(earlier)
    with spooling(collector.address, tmp_path) as client:
        client.log_returns("next", 1.0, step=0, reward_id="ours")
        with pytest.raises(Refusal, match="scripted window_closed"):
            client.flush(60, episode_id="next")
        assert client.stats.refused == {"window_closed": 1}
        client.start_episode("next")
        client.log_action("next", SHORT, 2)
        with pytest.raises(Refusal, match="other content"):
            client.flush(60)


def test_a_segment_is_held_by_one_process(collector: ScriptedCollector, tmp_path: Path) -> None:
    """Another client delivers a segment only once the process that wrote it has ended."""
    owner = spooling(NOBODY, tmp_path)
    owner.log_step(SHORT, 1, 1.0)
    with spooling(collector.address, tmp_path) as other:
        other.log_step(SHORT, 1, 2.0)
        other.flush(60)
    assert [record.rewards for record in collector.episodes.values()] == [[2.0]]
    dead(owner)
    with spooling(collector.address, tmp_path) as other:
        other.flush(60)
    assert [record.rewards for record in collector.episodes.values()] == [[2.0], [1.0]]


def test_what_another_collector_was_sent_is_left_alone(
    collector: ScriptedCollector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A segment that was partly sent to one collector is not sent to another, which cannot tell
    which events the first one has. A client of the first one delivers it."""
    with ScriptedCollector() as first:
        client = spooling(first.address, tmp_path, linger=0.0)
        client.log_step(SHORT, 1, 1.0)
        client.flush(60)
        first.faults.extend([cut_after] * 100)
        client.log_step(SHORT, 1, 2.0)
        dead(client)
        first.faults.clear()
        with spooling(collector.address, tmp_path) as client:
            client.flush(60)
        assert collector.episodes == {}
        assert f"left as it is: its events are for {first.address}" in caplog.text
        with spooling(first.address, tmp_path) as client:
            client.flush(60)
        assert len(first.episodes) == 2


def test_what_was_never_sent_belongs_to_the_next_collector(
    collector: ScriptedCollector, tmp_path: Path
) -> None:
    """A process at another address takes over a segment that was never sent, and is killed before
    an event arrives. The next one at that address delivers the segment."""
    client = spooling(NOBODY, tmp_path)
    client.log_step(SHORT, 1, 1.0)
    dead(client)
    reached = threading.Event()

    def cut(serve: Any) -> Any:
        reached.set()
        return cut_before(serve)

    collector.faults.extend([pass_by] + [cut] * 100)
    client = spooling(collector.address, tmp_path)
    client._sender.ensure_running()
    assert reached.wait(60)
    dead(client)
    collector.faults.clear()
    with spooling(collector.address, tmp_path) as client:
        client.flush(60)
    assert [record.rewards for record in collector.episodes.values()] == [[1.0]]
    assert not list(tmp_path.glob("segment-*"))


def test_a_full_queue_goes_to_disk_and_keeps_its_order(
    collector: ScriptedCollector, tmp_path: Path
) -> None:
    """Episodes go on while the collector is away and the queue is full: no call raises, and the
    next process delivers all events in order."""
    gone = ScriptedCollector()
    gone._server.server_close()
    client = spooling(gone.address, tmp_path, max_pending=4, max_wait=0.0)
    names = [client.start_episode(f"e{n}") for n in range(5)]
    for t in range(10):
        for name in names:
            client.log_action(name, SHORT, t % 3)
            client.log_returns(name, float(t))
    late = client.start_episode()
    client.log_returns(late, 1.0, step=0, reward_id="click")
    stats = client.stats
    assert stats.waiting == stats.spooled + stats.unwritten == 5 * 21 + 2
    assert client._outbox.oldest() > 0
    dead(client)
    with spooling(collector.address, tmp_path, max_pending=4, batch=3) as client:
        client.flush(60)
        assert client.stats.refused == {}
    for name in names:
        assert collector.episodes[name].rewards == [float(t) for t in range(10)]
    assert [event.reward_id for event in collector.late] == ["click"]


def test_one_process_reads_its_own_spool_back(collector: ScriptedCollector, tmp_path: Path) -> None:
    """A client with a queue of 4 spools what does not fit and delivers it itself, although 30% of
    its requests are cut."""
    collector.cut_at_random(1, 0.3)
    with spooling(collector.address, tmp_path, max_pending=4, batch=3, max_wait=0.0) as client:
        for n in range(60):
            name = client.start_episode(f"e{n}")
            client.log_action(name, SHORT, 1)
            client.log_returns(name, float(n))
            client.end_episode(name)
        client.flush(60)
        assert client.stats.acknowledged == 240
        assert client.stats.refused == {}
    assert [collector.episodes[f"e{n}"].rewards for n in range(60)] == [
        [float(n)] for n in range(60)
    ]
    assert not list(tmp_path.glob("segment-*"))


def test_a_batch_without_an_answer_is_sent_as_the_same_instance(
    collector: ScriptedCollector, tmp_path: Path
) -> None:
    """The next process repeats events that may have been applied under the same instance, so that
    the collector counts them as duplicates."""
    client = spooling(collector.address, tmp_path, linger=0.0)
    client.connect()
    client.log_step(SHORT, 1, 1.0)
    client.flush(60)
    reached = client.stats.acknowledged
    collector.faults.extend([cut_after] * 100)
    client.log_step(SHORT, 1, 2.0)
    while len(collector.episodes) < 2:
        client._outbox.wait_until(lambda: len(collector.episodes) == 2, 0.01)
    dead(client)
    collector.faults.clear()
    with spooling(collector.address, tmp_path) as client:
        client.flush(60)
        assert (reached, client.stats.acknowledged, client.stats.duplicates) == (3, 3, 3)
    assert {record.instance for record in collector.episodes.values()} == {"instance-1"}
    assert [record.rewards for record in collector.episodes.values()] == [[1.0], [2.0]]


def test_what_the_collector_has_forgotten_is_counted_by_reason(
    collector: ScriptedCollector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The collector has lost its instances, as with a new journal. Spooled events that it may have
    had are refused as `unknown_instance`, and not sent under another instance."""
    client = spooling(collector.address, tmp_path, linger=0.0)
    client.log_step(SHORT, 1, 1.0)
    client.flush(60)
    collector.faults.extend([cut_after] * 100)
    client.log_step(SHORT, 1, 2.0)
    dead(client)
    collector.faults.clear()
    collector.instances.clear()
    refusals: list[Any] = []
    with (
        caplog.at_level(logging.WARNING),
        spooling(collector.address, tmp_path, on_error=refusals.append) as client,
    ):
        client.flush(60)
        assert client.stats.refused["unknown_instance"] == 1
        assert client.stats.spooled == 0
    assert refusals[0].code == "unknown_instance"
    assert len(collector.instances) <= 1
    assert not list(tmp_path.glob("segment-*"))


def test_an_instance_that_is_forgotten_meanwhile_is_replaced_for_new_episodes(
    collector: ScriptedCollector, tmp_path: Path
) -> None:
    """The collector forgets the instance of a client that goes on logging. New episodes go out
    under a new instance, each once, and no segment is left."""
    with spooling(collector.address, tmp_path, linger=0.0) as client:
        client.log_step(SHORT, 1, 1.0)
        client.flush(60)
        collector.instances.clear()
        client.log_step(SHORT, 1, 2.0)
        client.flush(60)
        client.log_step(SHORT, 1, 3.0)
        client.flush(60)
    assert [record.rewards for record in collector.episodes.values()] == [[1.0], [2.0], [3.0]]
    assert not list(tmp_path.glob("segment-*"))


def test_episodes_that_were_closed_meanwhile_go_on_in_new_ones(tmp_path: Path) -> None:
    """The collector abandons episodes whose later steps wait on disk. These steps are stored once
    each, in new episodes that name the abandoned ones in `continues`."""
    declare(tmp_path)
    with CollectorProcess(tmp_path) as running:
        client = spooling(running.address, tmp_path / "spool", linger=0.0)
        names = [client.start_episode(tags={"n": str(n)}) for n in range(3)]
        for name in names:
            client.log_action(name, OBS, 0)
            client.log_returns(name, 1.0)
        client.flush(60)
        running.kill()
        for name in names:
            client.log_returns(name, 0.5)
            client.log_action(name, OBS, 1)
            client.log_returns(name, 2.0)
            client.log_action(name, OBS, 0)
            client.log_returns(name, 3.0)
        client.end_episode(names[0])
        dead(client)
        running.restart()
        running.turn_clock()
        for name in names:
            running.await_abandoned(name)
        for _ in range(2):
            with spooling(running.address, tmp_path / "spool") as client:
                client.flush(60)
                counted = client.stats.refused
        assert counted == {}
        running.turn_clock()
        running.settle(9)
        running.stop()
    rows = shard_rows(tmp_path)
    assert Counter(row["rewards"] for row in rows) == {1.0: 3, 2.0: 3, 3.0: 3}
    going_on = {row["eps_id"]: row["continues"] for row in rows if row["eps_id"] not in names}
    assert sorted(going_on.values()) == sorted(names)
    assert {row["rewards"] for row in rows if row["eps_id"] in going_on} == {2.0, 3.0}


def test_an_open_episode_of_this_process_goes_on_too(tmp_path: Path) -> None:
    """The collector abandons an episode to which the process still logs. Its later steps go to a
    new episode that continues it; no call raises and no event is refused."""
    declare(tmp_path)
    with CollectorProcess(tmp_path) as running:
        with spooling(running.address, tmp_path / "spool", linger=0.0) as client:
            name = client.start_episode()
            client.log_action(name, OBS, 0)
            client.flush(60)
            running.turn_clock()
            running.await_abandoned(name)
            client.log_action(name, OBS, 1)
            client.log_returns(name, 2.0)
            client.flush(60)
            client.log_action(name, OBS, 1)
            client.log_returns(name, 3.0)
            client.end_episode(name)
            client.flush(60)
            assert client.stats.refused == {}
        running.settle(3)
        running.stop()
    rows = shard_rows(tmp_path)
    assert sorted((row["rewards"], row["continues"] == name) for row in rows) == [
        (0.0, False),
        (2.0, True),
        (3.0, True),
    ]


def test_an_episode_goes_on_as_it_began(tmp_path: Path) -> None:
    """An episode is abandoned twice and goes on in two new ones, the last of them sent by another
    process. Both have its policy, tags and `training_enabled`, and rewards with `step=` reach their
    steps."""
    for policy_id in ("default", "other"):
        declare(tmp_path, reward_window=1.0, policy_id=policy_id)
    with CollectorProcess(tmp_path) as running:
        options: dict[str, Any] = {"policy_id": "other", "linger": 0.0, "spool_bytes": 8_000}
        client = spooling(running.address, tmp_path / "spool", **options)
        name = client.start_episode(tags={"tenant": "acme"}, training_enabled=False)
        assert client._outbox.spool is not None
        on_disk = client._outbox.spool.files
        for t in range(9):
            if t == 3:
                client.flush(60)
                running.turn_clock()
                running.await_abandoned(name)
            if t == 6:
                client.flush(60)
                running.kill()
            client.log_action(name, OBS, 0, action_prob=0.5, ts=1_000 + t)
            client.log_returns(name, float(t), {"t": t})
            if t == 5:
                client.log_returns(name, 0.5, step=4)
        client.log_returns(name, 0.25, step=7)
        client.log_returns(name, 0.125, step=8)
        assert on_disk.own is not None
        new = on_disk.own.moved[name].new
        dead(client)
        running.restart()
        running.turn_clock()
        running.await_abandoned(new)
        with spooling(running.address, tmp_path / "spool") as client:
            client.flush(60)
            assert client.stats.refused == {}
        running.turn_clock()
        running.settle(9)
        running.stop()
    rows = sorted(shard_rows(tmp_path), key=lambda row: row["ts"])
    assert [row["rewards"] for row in rows] == [0.0, 1.0, 2.0, 3.0, 4.5, 5.0, 6.0, 7.25, 8.125]
    assert [row["t"] for row in rows] == [0, 1, 2] * 3
    assert [json.loads(row["infos"]) for row in rows] == [{"t": t} for t in range(9)]
    assert [row["continues"] for row in rows[3::3]] == [name, rows[3]["eps_id"]]
    same = {(row["policy_id"], row["tags"], row["training_enabled"]) for row in rows}
    assert same == {("other", '{"tenant":"acme"}', False)}


def test_remote_actions_follow_what_is_spooled(
    collector: ScriptedCollector, tmp_path: Path
) -> None:
    """get_action waits until the spooled events of its episode are delivered. A reward that is
    logged after it and never sent is delivered by the next process."""
    client = spooling(collector.address, tmp_path, inference_mode="remote", max_pending=4)
    client.connect()
    gate = Gate()
    collector.faults.append(gate)
    name = client.start_episode()
    assert gate.reached.wait(60)
    for t in range(9):
        client.log_action(name, SHORT, t % 3)
    assert client._outbox.spool.files.own_unread  # type: ignore[union-attr]  # it has a spool
    gate.opened.set()
    assert client.get_action(name, SHORT) == 10 % 3
    collector.faults.extend([cut_before] * 1000)
    client.log_returns(name, 5.0)
    dead(client)
    collector.faults.clear()
    with spooling(collector.address, tmp_path) as client:
        client.flush(60)
        assert client.stats.refused == {}
    assert collector.episodes[name].rewards == [0.0] * 9 + [5.0]


def test_values_are_spooled_before_it_is_known_what_fits(
    collector: ScriptedCollector, tmp_path: Path
) -> None:
    """Values are spooled before the client knows the policy's spaces. The next process sends
    arrays, lists and numbers unchanged, and marks an episode with a value that does not fit as
    broken."""
    client = spooling(NOBODY, tmp_path, max_wait=0.0)
    array = np.array([1.5, 2.5])
    good = client.start_episode()
    client.log_action(good, array, np.int64(2))
    array[:] = 0.0
    client.log_action(good, [3, 4], 1)
    client.log_action(good, range(7, 9), 1)
    client.end_episode(good, (5.0, 6.0))
    bad = client.start_episode()
    client.log_action(bad, [1.0], 1)
    with pytest.raises(ValueError, match="cannot be"):
        client.log_action(bad, object(), 1)
    dead(client)
    with spooling(collector.address, tmp_path) as client:
        client.flush(60)
        assert client.stats.refused == {"invalid": 1}
    events = collector.episodes[good].events
    found = [np.frombuffer(event.obs, np.float32).tolist() for event in events]
    assert found == [[1.5, 2.5], [3.0, 4.0], [7.0, 8.0], [5.0, 6.0]]
    assert [event.action for event in events[:2]] == [
        int(action).to_bytes(8, "little") for action in (2, 1)
    ]
    assert [getattr(event, "broken", None) for event in collector.episodes[bad].events] == [
        "client_invalid"
    ]


def test_a_spool_is_bounded_in_bytes(tmp_path: Path) -> None:
    """When the spool has reached `spool_bytes`, calls raise BufferFull, which says how many bytes
    are on disk."""
    client = spooling(NOBODY, tmp_path, max_pending=4, spool_bytes=20_000, max_wait=2.0)
    for _ in range(20):
        client.log_step(SHORT, 1, 1.0)
    with pytest.raises(BufferFull, match=r"\((\d+) bytes on disk.*20000 bytes on disk") as caught:
        log_for_ever(client)
    taken = re.search(r"\d+(?= bytes on disk)", str(caught.value))
    assert taken is not None
    assert 15_000 < int(taken[0]) <= 20_000
    size = sum(path.stat().st_size for path in tmp_path.glob("segment-*/0*"))
    assert 15_000 < size <= 22_000
    dead(client)


def test_what_is_acknowledged_leaves_the_disk(collector: ScriptedCollector, tmp_path: Path) -> None:
    """Acknowledged events are removed from disk, so that a client that keeps logging stays below
    `spool_bytes`."""
    with spooling(collector.address, tmp_path, spool_bytes=40_000) as client:
        for _ in range(40):
            for _ in range(20):
                client.log_step(SHORT, 1, 1.0)
            client.flush(60)
            assert client.stats.spooled_bytes < 40_000


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_torn_end_is_left_out(
    collector: ScriptedCollector, tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A power cut can damage the end of a segment that was not synced: the log says so, and the
    rest is delivered."""
    client = spooling(NOBODY, tmp_path)
    for n in range(5):
        client.log_step(SHORT, 1, float(n))
    dead(client)
    (piece,) = tmp_path.glob("segment-*/0*")
    os.truncate(piece, piece.stat().st_size - cut)
    with spooling(collector.address, tmp_path) as client:
        client.flush(60)
    rewards = [record.rewards for record in collector.episodes.values()]
    assert rewards[:4] == [[0.0], [1.0], [2.0], [3.0]]
    assert "damaged bytes" in caplog.text


def test_zeros_at_the_end_of_a_segment_are_left_out(
    collector: ScriptedCollector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A power cut can extend a file by zeros that were never written: all events are delivered."""
    client = spooling(NOBODY, tmp_path)
    for n in range(5):
        client.log_step(SHORT, 1, float(n))
    dead(client)
    (piece,) = tmp_path.glob("segment-*/0*")
    os.truncate(piece, piece.stat().st_size + 200)
    with spooling(collector.address, tmp_path) as client:
        client.flush(60)
    rewards = [record.rewards for record in collector.episodes.values()]
    assert rewards == [[0.0], [1.0], [2.0], [3.0], [4.0]]
    assert "200 damaged bytes were skipped" in caplog.text
    assert not list(tmp_path.glob("segment-*"))


def test_what_cannot_be_read_is_counted_and_the_rest_goes_on(
    collector: ScriptedCollector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading one file of the spool fails with EIO (it is replaced by a link to `/proc/self/mem`).
    `flush` raises, later events are sent, and the next process delivers those of the file once it
    can be read."""
    client = spooling(collector.address, tmp_path, max_pending=4, batch=4)
    assert client._outbox.spool is not None
    kept = client._outbox.spool.files
    kept._piece_bytes = 400
    gate = Gate()
    collector.faults.append(gate)
    names = [client.log_step(SHORT, 1, float(n)) for n in range(20)]
    assert gate.reached.wait(60)
    assert kept.own is not None
    middle = kept.own._pieces[len(kept.own._pieces) // 2].path
    middle.rename(tmp_path / "aside")
    middle.symlink_to("/proc/self/mem")
    gate.opened.set()
    with pytest.raises(IngestError):
        client.flush(60)
    lost = client.stats.refused["unreadable"]
    assert 0 < lost == client.stats.spooled < 15
    assert caplog.text.count("cannot be read: [Errno 5]") == 1
    client.log_step(SHORT, 1, 20.0)
    client.flush(60)
    middle.unlink()
    (tmp_path / "aside").rename(middle)
    dead(client)
    with spooling(collector.address, tmp_path) as client:
        client.flush(60)
    assert set(names) <= set(collector.episodes)
    assert not list(tmp_path.glob("segment-*"))


def test_an_event_of_another_version_is_left_out(
    collector: ScriptedCollector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An event of an unknown type, as a later version may write, is skipped and named in the log;
    the other events are delivered."""
    client = spooling(NOBODY, tmp_path)
    client.log_step(SHORT, 1, 1.0)
    own = client._outbox.spool.files.own  # type: ignore[union-attr]  # it has one
    event = wire.LogReturns(episode_id="e", seq=1, reward=1.0)
    strange = (spool_frames.EVENT, msgspec.msgpack.encode({"type": "later", "x": 1}))
    own.append([strange], [event], left=True)  # type: ignore[union-attr]  # as above
    dead(client)
    with spooling(collector.address, tmp_path) as client:
        client.flush(60)
        assert client.stats.acknowledged == 3
    assert "event 3 was left out" in caplog.text
    assert not list(tmp_path.glob("segment-*"))


def test_a_forked_child_spools_for_itself(collector: ScriptedCollector, tmp_path: Path) -> None:
    """A forked child writes a segment of its own: each event of parent and child is delivered
    once."""
    client = spooling(NOBODY, tmp_path)
    client.log_step(SHORT, 1, 1.0)
    child = os.fork()
    if not child:
        try:
            client.log_step(SHORT, 1, 2.0)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    client.log_step(SHORT, 1, 3.0)
    dead(client)
    with spooling(collector.address, tmp_path) as client:
        client.flush(60)
    found = [record.rewards for record in collector.episodes.values()]
    assert sorted(found) == [[1.0], [2.0], [3.0]]


def test_pieces_are_read_across_their_borders(tmp_path: Path) -> None:
    """A segment of several files is read in order, each event once, also after some were
    acknowledged."""
    kept = Spool(tmp_path, 1_000_000, sync=True, address=NOBODY, policy=lambda _: None)  # type: ignore[arg-type, return-value]  # no drafts here
    kept._piece_bytes = 200
    events = [wire.LogReturns(episode_id="e", seq=n + 1, reward=float(n)) for n in range(50)]
    for event in events[:25]:
        assert kept.append([event], left=False)
    kept.done(events[:20:2])
    assert kept.own is not None
    for event in events[25:]:
        assert kept.append([event], left=True)
    folder = kept.own.folder
    read: list[Any] = []
    while found := kept.read(7):
        read += [event for event, _ in found]
    assert [event.seq for event in read] == list(range(26, 51))
    kept.close()
    segment = SpoolSegment.take_up(folder, 200, False)
    assert segment is not None
    assert segment.unread == 40
    again: list[Any] = []
    while some := segment.read(7, lambda _: None):  # type: ignore[arg-type, return-value]  # as above
        again += [event.seq for _, event in some]
    assert again == [n for n in range(1, 51) if not (n < 21 and n % 2 == 1)]
    segment.close()


def test_files_that_are_written_again_count_the_steps_as_before(tmp_path: Path) -> None:
    """Two of an episode's four steps were judged before its files went away. Who reads the new
    files has the rest, and knows which steps these are."""
    kept = Spool(tmp_path, 1_000_000, sync=True, address=NOBODY, policy=lambda _: None)  # type: ignore[arg-type, return-value]  # no drafts here
    kept.note_instance("instance-1")
    start = wire.Start(episode_id="e", start=0)
    steps = [wire.LogAction(episode_id="e", seq=n, obs=b"o", action=b"a") for n in range(1, 5)]
    assert kept.append([start, *steps], left=False)
    kept.done([start, *steps[:2]])
    assert kept.own is not None
    old = kept.own.folder
    shutil.rmtree(old)
    kept.replace_gone()
    folder, own = kept.own.folder, kept.own
    assert (folder == old, kept.unreadable, kept.stranded, own.waiting) == (False, 0, 0, 2)
    own.let_go()
    segment = SpoolSegment.take_up(folder, 8_000_000, False)
    assert segment is not None
    assert (segment.instance, segment.next_start, segment.lost) == ("instance-1", 1, 0)
    found = segment.read(10, lambda _: None)  # type: ignore[arg-type, return-value]  # as above
    assert [event.seq for _, event in found] == [3, 4]  # type: ignore[union-attr]  # no starts
    for one in (own, segment):
        assert [one._steps[number] for number in sorted(one._steps)] == [2, 3]
        assert one.begun["e"].steps == 4
    segment.close()


def test_an_asyncio_loop_with_a_spool_loses_nothing(tmp_path: Path) -> None:
    """50 episodes on one loop take remote actions while the collector is killed and restarted.
    Callers repeat a get_action without an answer; each step is stored once."""
    declare(tmp_path, action="discrete:1000")
    spec = PolicySpec(parse_space("box:4"), parse_space("discrete:1000"))
    store = WeightStore(tmp_path, "default")
    weights = Policy(spec, seed=1).get_weights()
    store.publish(store.add_candidate(weights, spec=spec.to_json(), metrics={}, lineage={}))
    acted: dict[str, list[int]] = {}
    with CollectorProcess(tmp_path) as running:

        async def play(client: AsyncPolicyClient) -> None:
            name = client.start_episode()
            acted[name] = []
            for _ in range(4):
                while True:
                    try:
                        acted[name].append(await client.get_action(name, OBS))
                        break
                    except CollectorUnavailable:
                        await asyncio.sleep(0)
                client.log_returns(name, 1.0)
            client.end_episode(name)

        async def main() -> None:
            options = {"on_full": "spool", "spool_dir": tmp_path / "spool", "max_pending": 20}
            async with AsyncPolicyClient(running.address, "remote", **options) as client:
                await client.connect()
                playing = [asyncio.create_task(play(client)) for _ in range(50)]
                while not any(acted.values()):
                    await asyncio.sleep(0)
                await asyncio.to_thread(running.kill)
                await asyncio.to_thread(running.restart)
                await asyncio.gather(*playing)
                await client.flush(60)
                assert client.stats.refused == {}

        asyncio.run(main())
        running.settle(200)
        running.stop()
    rows: dict[str, list[int]] = {}
    for row in sorted(shard_rows(tmp_path), key=lambda row: row["t"]):
        assert row["rewards"] == 1.0
        rows.setdefault(row["eps_id"], []).append(row["actions"])
    assert rows == acted
    assert not list((tmp_path / "spool").glob("*segment-*"))


def spool_in(directory: Path) -> Spool:
    return Spool(directory, 1_000_000, sync=False, address=NOBODY, policy=lambda _: None)  # type: ignore[arg-type, return-value]  # no drafts here


def draft() -> Draft:
    return Draft(Declarations(NOBODY, None, None).policy(None), False, SHORT)


def episode(name: str, steps: int) -> list[wire.Event]:
    pairs: list[wire.Event] = []
    for seq in range(1, 2 * steps, 2):
        pairs.append(wire.LogAction(episode_id=name, seq=seq, obs=b"", action=b""))
        pairs.append(wire.LogReturns(episode_id=name, seq=seq + 1, reward=1.0))
    start = wire.Start(episode_id=name, start=0)
    return [start, *pairs, wire.End(episode_id=name, seq=2 * steps + 1)]


def test_reads_of_this_process_and_of_earlier_ones_take_turns(tmp_path: Path) -> None:
    """Otherwise a process that logs more than it can send would leave an earlier process's episode
    half delivered: the collector would abandon it and refuse later rewards."""
    earlier = spool_in(tmp_path)
    for n in range(30):
        earlier.append(episode(f"earlier-{n}", 2), left=True)
    earlier.close()
    kept = spool_in(tmp_path)
    kept.taken_up = kept.find()
    for n in range(30):
        kept.append(episode(f"own-{n}", 2), left=True)
    reads = []
    while found := kept.read(12):
        reads.append({event.episode_id.split("-")[0] for event, _ in found})
    assert reads == [{"own"}, {"earlier"}] * 15
    kept.close()


def test_flow_control_waits_for_nothing_of_an_earlier_process(tmp_path: Path) -> None:
    """`drained(own=True)` returns once this process's events are delivered. Otherwise an action
    that waits for them would also wait for all events of earlier processes."""
    earlier = spool_in(tmp_path)
    earlier.append([event for n in range(300) for event in episode(f"earlier-{n}", 2)], left=True)
    earlier.close()
    box = Outbox(
        max_events=8, max_bytes=1_000_000, batch=8, on_full="spool", timeout=1.0, linger=0.0,
        spool=spool_in(tmp_path),
    )  # fmt: skip
    assert box.spool is not None
    box.spool.take_up()
    box.note_instance("instance")
    for n in range(3):
        box.put_all(episode(f"own-{n}", 1))
    found: list[bool] = []
    waiter = threading.Thread(
        target=lambda: found.append(box.drained(60.0, lambda: False, own=True))
    )
    waiter.start()
    while waiter.is_alive() and box.waiting:
        taken = box.take()
        assert taken is not None
        box.judged(taken[0])
        waiter.join(0.01)
    assert box.spool.files.unread > 100
    assert not any(box.carries(f"own-{n}") for n in range(3))
    assert not box.drained(0.0, lambda: False)
    waiter.join()
    assert found == [True]
    box.spool.close()


def test_a_flush_waits_for_what_is_being_read(tmp_path: Path) -> None:
    """`drained`, on which flush waits, is False while an event is read from disk into the queue."""
    earlier = spooling(NOBODY, tmp_path, max_wait=0.0)
    earlier._outbox.put_all([wire.Start(episode_id="e", start=0)])
    earlier._outbox.put(wire.LogAction(episode_id="e", seq=1, obs=draft(), action=b""), 300)
    assert earlier._outbox.spool is not None
    earlier._outbox.spool.close()
    answers: list[bool] = []

    def policy(_: str | None) -> ClientPolicy:
        answers.append(box.drained(0.0, lambda: False))
        return draft().policy

    box = Outbox(
        max_events=8, max_bytes=1_000_000, batch=8, on_full="spool", timeout=1.0, linger=0.0,
        spool=Spool(tmp_path, 1_000_000, sync=False, address=NOBODY, policy=policy),
    )  # fmt: skip
    assert box.spool is not None
    box.spool.take_up()
    assert box._read_spooled()
    assert answers == [False]
    assert box.waiting == 2
    box.spool.close()


def test_an_unexpected_error_in_a_read_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read fails with MemoryError after its first event: the next read returns all events."""
    spool, decoded = spool_in(tmp_path), SpoolSegment._decoded
    spool.append(episode("e", 2), left=True)
    errors = [MemoryError()]

    def planted(segment: SpoolSegment, kind: int, *given: Any) -> Any:
        if kind != spool_frames.START and errors:  # the first event behind the start
            raise errors.pop()
        return decoded(segment, kind, *given)

    monkeypatch.setattr(SpoolSegment, "_decoded", planted)
    with pytest.raises(MemoryError):
        spool.read(100)
    assert spool.unread == len(episode("e", 2))
    assert [event for event, _ in spool.read(100)] == episode("e", 2)


@pytest.mark.parametrize("steps", [1, 3, 20])
def test_a_read_ends_with_an_episode_or_a_step(tmp_path: Path, steps: int) -> None:
    """A read does not split a short episode, nor an action from the reward that follows it."""
    kept = spool_in(tmp_path)
    for n in range(8):
        kept.append(episode(f"e{n}", steps), left=True)
    reads = list(iter(lambda: [event for event, _ in kept.read(3)], []))
    assert sum(map(len, reads)) == 8 * (2 * steps + 2)
    assert max(map(len, reads)) <= 3 + 8 + 1
    assert not any(isinstance(read[-1], wire.LogAction) for read in reads)
    if steps < 20:
        assert {type(read[-1]) for read in reads} == {wire.End}
    kept.close()


@pytest.mark.parametrize("at", ["FileLock.acquire", "Path.write_bytes"])
def test_what_a_kill_within_the_making_of_a_segment_left_is_removed(
    tmp_path: Path, at: str
) -> None:
    """A process is killed while it makes a segment, before or after it locks the folder. A later
    process removes the folder, but not while the process lives and holds the lock."""
    program = f"""
import os, signal, sys
from pathlib import Path
from ingest.delivery.spool import FileLock, SpoolSegment
def stop(*_, **__):
    print("there", flush=True)
    sys.stdin.read()
{at} = stop
SpoolSegment.create(Path({str(tmp_path)!r}), 1000, False)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == b"there\n"
    if at == "Path.write_bytes":
        assert spool_in(tmp_path).find() == []
        assert len(list(tmp_path.glob("segment-*"))) == 1
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(list(tmp_path.glob("segment-*"))) == 1
    assert spool_in(tmp_path).find() == []
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("held", [True, False])
def test_a_folder_that_is_removed_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """Another process locks or removes a new folder that is not locked yet, because it looks like
    one that a killed process left."""
    acquire, others = FileLock.acquire, list[SpoolSegment]()

    def late(self: FileLock, **given: Any) -> bool:
        if not others:
            others.append(SpoolSegment(self.path.parent, FileLock(self.path), 1000, False))
            acquire(others[0]._lock)
            if not held:
                others[0].close()
        return acquire(self, **given)

    monkeypatch.setattr(FileLock, "acquire", late)
    segment = SpoolSegment.create(tmp_path, 1000, False)
    others[0].close()
    assert [path.name for path in tmp_path.iterdir()] == [segment.folder.name]
    assert segment.append([], [], left=False) == 0
    segment.close()


@pytest.mark.parametrize("left", [True, False], ids=["of-this-process", "of-an-earlier-one"])
def test_a_full_disk_is_emptied_by_what_is_sent(
    collector: ScriptedCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    """On a full disk a segment deletes its reserve file, so that the instance under which its
    events are sent can be written. Logging raises BufferFull until delivered events have made
    room."""
    write, is_full = os.write, threading.Event()

    def full(fd: int, data: bytes) -> int:
        there = list(tmp_path.glob("segment-*/reserve"))
        if is_full.is_set() and there and str(tmp_path) in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    gate = Gate()
    collector.faults.append(gate)
    client = spooling(collector.address if left else NOBODY, tmp_path, linger=0.0)
    client.log_step(SHORT, 1, 1.0)
    monkeypatch.setattr(os, "write", full)
    is_full.set()
    with pytest.raises(BufferFull, match="No space left"):
        client.log_step(SHORT, 1, 2.0)
    gate.opened.set()
    if not left:
        dead(client)
        client = spooling(collector.address, tmp_path)
    with client:
        client.flush(60)
        assert client.stats.acknowledged == 3
        assert not list(tmp_path.glob("segment-*/reserve"))
        is_full.clear()
        client.log_step(SHORT, 1, 3.0)
        client.flush(60)
    assert [record.rewards for record in collector.episodes.values()] == [[1.0], [3.0]]


def test_nothing_is_sent_while_its_instance_cannot_be_written(
    collector: ScriptedCollector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The sending thread waits while the disk is full and goes on once the instance is written; the
    log has one line for each."""
    is_full = threading.Event()

    def full(fd: int, data: bytes) -> int:
        if is_full.is_set() and str(tmp_path) in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    write = os.write
    gate = Gate()
    collector.faults.append(gate)
    client = spooling(collector.address, tmp_path, linger=0.0)
    client.log_step(SHORT, 1, 1.0)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "write", full)
        is_full.set()
        gate.opened.set()
        while "sending waits" not in caplog.text:
            client._outbox.wait_until(lambda: False, 0.01)
        assert collector.episodes == {}
        is_full.clear()
        client.flush(60)
    client.close()
    assert [record.message.count("written") for record in caplog.records] == [1, 1]
    assert [record.rewards for record in collector.episodes.values()] == [[1.0]]


def test_the_end_of_a_process_says_what_is_left_where(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that ends with undelivered events logs how many there are, and in which folder."""
    client = spooling(NOBODY, tmp_path, timeout=0.01)
    client.log_step(SHORT, 1, 1.0)
    client._sender.finish()
    assert f"3 events were not delivered, of which 3 are in {tmp_path}" in caplog.text
    dead(client)


def test_a_spool_needs_a_folder(tmp_path: Path) -> None:
    """`on_full="spool"` and `spool_dir` need each other; a folder that cannot be made raises at
    once."""
    for options in ({"on_full": "spool"}, {"spool_dir": tmp_path}):
        with pytest.raises(ValueError, match="spool_dir"):
            PolicyClient(NOBODY, **options)  # type: ignore[arg-type]  # that is the point
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        spooling(NOBODY, tmp_path / "file")
