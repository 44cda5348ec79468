"""What a client spools outlives its process, and is delivered once."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import re
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

from ingest.client import spool
from ingest.client.async_client import AsyncPolicyClient
from ingest.client.declarations import ClientPolicy, Declarations, Draft
from ingest.client.event_queue import Outbox
from ingest.client.policy_client import PolicyClient
from ingest.client.spool import Spool, SpoolSegment
from ingest.protocol import messages as wire
from ingest.protocol.errors import BufferFull, CollectorUnavailable, IngestError
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.spaces.descriptors import parse_space
from storage.system.files import FileLock
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.ingest.scripted_collector import Gate, ScriptedCollector, cut_after, cut_before

OBS = [0.0, 0.5, 1.0, -0.5]
SHORT = [0.5, -1.0]
NOBODY = "http://127.0.0.1:9"
ROOT = Path(__file__).parents[3]


def spooling(address: str, directory: Path, **options: Any) -> PolicyClient:
    """A client whose calls wait for a busy machine's disk, unless `max_wait` is given; in a forked
    child too, whose writer is a new one."""
    client = PolicyClient(address, on_full="spool", spool_dir=directory, **options)
    assert client._outbox._writer is not None
    client._outbox.patience = client._outbox._writer.max_wait = options.get("max_wait", 20.0)
    return client


def killed(address: str, directory: Path, prefix: str, episodes: int, **options: Any) -> int:
    """A process that spooled episodes, and was killed; the events that waited then."""
    module = ["-m", "tests.ingest.client.spooling_client"]
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
    """Let go of a client as its killed process would: nothing is sent, the spool stays."""
    client._outbox.closed = True
    client._transport.closing.set()
    client._outbox.wake()
    if client._sender._thread is not None:
        client._sender._thread.join(60)
    client._outbox.close_spool()
    client._outbox.reset()


@pytest.fixture
def collector() -> Iterator[ScriptedCollector]:
    with ScriptedCollector() as running:
        yield running


def test_what_a_killed_process_logged_is_delivered_by_the_next(tmp_path: Path) -> None:
    """SIGKILL while the collector was absent, with a queue that holds a tenth of it: each step is
    stored once, and nothing is left on disk. Only the next process ever reaches the collector."""
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
    """The collector answers and is cut off at any moment; it tells repeated events by the instance
    and the numbers that the segment keeps."""
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


def test_a_segment_is_held_by_one_process(collector: ScriptedCollector, tmp_path: Path) -> None:
    """While its owner lives nobody else takes it up."""
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
    """Only the collector that was sent a segment's events can tell which of them it has."""
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


def test_a_full_queue_goes_to_disk_and_keeps_its_order(
    collector: ScriptedCollector, tmp_path: Path
) -> None:
    """Episodes that run on while the queue is full arrive in order once there is an answer; no call
    raises."""
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
    """The same without a kill: what did not fit into memory follows what did, and calls go on."""
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
    """What may have been applied is never sent anew: its number says that it is there."""
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
    """A journal that was set aside knows no instance: nothing goes out under another one."""
    client = spooling(collector.address, tmp_path, linger=0.0)
    client.log_step(SHORT, 1, 1.0)
    client.flush(60)
    collector.faults.extend([cut_after] * 100)
    client.log_step(SHORT, 1, 2.0)
    dead(client)
    collector.faults.clear()
    collector.instances.clear()
    told: list[Any] = []
    with (
        caplog.at_level(logging.WARNING),
        spooling(collector.address, tmp_path, on_error=told.append) as client,
    ):
        client.flush(60)
        assert client.stats.refused["unknown_instance"] == 1
        assert client.stats.spooled == 0
    assert told[0].code == "unknown_instance"
    assert len(collector.instances) <= 1
    assert not list(tmp_path.glob("segment-*"))


def test_an_instance_that_is_forgotten_meanwhile_is_replaced_for_new_episodes(
    collector: ScriptedCollector, tmp_path: Path
) -> None:
    """What was never sent is numbered under the next one, in a segment of its own."""
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
    """Abandoned by the collector while their steps waited on disk: the rest is an episode that
    continues them, with their tags; each step is stored once."""
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
    """Its caller notices nothing; the reward of a step that is closed is counted as refused."""
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
    """In a new episode, and in the one after that, from a process too that never saw its start:
    with its policy, tags and `training_enabled`. A reward for a step by its number reaches it."""
    for policy_id in ("default", "other"):
        declare(tmp_path, reward_window=1.0, policy_id=policy_id)
    with CollectorProcess(tmp_path) as running:
        options: dict[str, Any] = {"policy_id": "other", "linger": 0.0, "spool_bytes": 8_000}
        client = spooling(running.address, tmp_path / "spool", **options)
        name = client.start_episode(tags={"tenant": "acme"}, training_enabled=False)
        on_disk = client._outbox.spool
        assert on_disk is not None
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
    """A get_action waits for its episode's events that are on disk alone, and its own is durable
    when it returns; what follows it is delivered by the next process."""
    client = spooling(collector.address, tmp_path, inference_mode="remote", max_pending=4)
    client.connect()
    gate = Gate()
    collector.faults.append(gate)
    name = client.start_episode()
    assert gate.reached.wait(60)
    for t in range(9):
        client.log_action(name, SHORT, t % 3)
    assert client._outbox.spool.own_unread  # type: ignore[union-attr]  # it has a spool
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
    """Arrays, lists and numbers come out as they went in; what does not fit breaks its episode in
    the next process, as it would have here."""
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
    """At its bound calls raise BufferFull, which says where; nothing is torn."""
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
    """A client that never stops logging needs no more room than what waits."""
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
    """A cut of the power takes the end of a segment that was not synced; the rest is delivered."""
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


def test_what_cannot_be_read_is_counted_and_the_rest_goes_on(
    collector: ScriptedCollector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A read of a piece of the spool fails with EIO (as of `/proc/self/mem`): its events stay where
    they are, `flush` says so once, and the thread that sends goes on. Another process has them."""
    client = spooling(collector.address, tmp_path, max_pending=4, batch=4)
    kept = client._outbox.spool
    assert kept is not None
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
    """What passes its checksum and cannot be read is named in the log; the rest goes on."""
    client = spooling(NOBODY, tmp_path)
    client.log_step(SHORT, 1, 1.0)
    own = client._outbox.spool.own  # type: ignore[union-attr]  # it has one
    event = wire.LogReturns(episode_id="e", seq=1, reward=1.0)
    strange = spool._frame(spool._EVENT, msgspec.msgpack.encode({"type": "later", "x": 1}))
    own.append(strange, [event], left=True)  # type: ignore[union-attr]  # as above
    dead(client)
    with spooling(collector.address, tmp_path) as client:
        client.flush(60)
        assert client.stats.acknowledged == 3
    assert "event 3 was left out" in caplog.text
    assert not list(tmp_path.glob("segment-*"))


def test_a_forked_child_spools_for_itself(collector: ScriptedCollector, tmp_path: Path) -> None:
    """It leaves its parent's segment alone."""
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
    """Each event once and in order, whatever was judged in between."""
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


def test_an_asyncio_loop_with_a_spool_loses_nothing(tmp_path: Path) -> None:
    """Fifty episodes at once whose actions are the collector's; it is killed in between. An action
    that had no answer is asked for again, and each step is stored once."""
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
    """A process that logs more than it can send would else leave an earlier one's episode halfway:
    the collector abandons it, and refuses the rewards of its steps."""
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
    """An action that must follow its window's delivery would else wait for all that others left."""
    earlier = spool_in(tmp_path)
    earlier.append([event for n in range(300) for event in episode(f"earlier-{n}", 2)], left=True)
    earlier.close()
    box = Outbox(
        max_events=8, max_bytes=1_000_000, batch=8, on_full="spool", timeout=1.0, linger=0.0,
        spool=spool_in(tmp_path),
    )  # fmt: skip
    assert box.spool is not None
    box.take_up(box.spool.find())
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
    assert box.spool.unread > 100
    assert not any(box.carries(f"own-{n}") for n in range(3))
    assert not box.drained(0.0, lambda: False)
    waiter.join()
    assert found == [True]
    box.close_spool()


def test_a_flush_waits_for_what_is_being_read(tmp_path: Path) -> None:
    """The last event on disk is on its way into the queue: it has not been sent."""
    earlier = spooling(NOBODY, tmp_path, max_wait=0.0)
    earlier._outbox.put_all([wire.Start(episode_id="e", start=0)])
    earlier._outbox.put(wire.LogAction(episode_id="e", seq=1, obs=draft(), action=b""), 300)
    earlier._outbox.close_spool()
    answers: list[bool] = []

    def policy(_: str | None) -> ClientPolicy:
        answers.append(box.drained(0.0, lambda: False))
        return draft().policy

    box = Outbox(
        max_events=8, max_bytes=1_000_000, batch=8, on_full="spool", timeout=1.0, linger=0.0,
        spool=Spool(tmp_path, 1_000_000, sync=False, address=NOBODY, policy=policy),
    )  # fmt: skip
    assert box.spool is not None
    box.take_up(box.spool.find())
    assert box._read_spooled()
    assert answers == [False]
    assert box.waiting == 2
    box.close_spool()


def test_an_unexpected_error_in_a_read_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was read before it is read again."""
    spool, decoded = spool_in(tmp_path), SpoolSegment._decoded
    spool.append(episode("e", 2), left=True)
    errors = [MemoryError()]

    def planted(segment: SpoolSegment, kind: int, *given: Any) -> Any:
        if kind != 2 and errors:  # the first event behind the start
            raise errors.pop()
        return decoded(segment, kind, *given)

    monkeypatch.setattr(SpoolSegment, "_decoded", planted)
    with pytest.raises(MemoryError):
        spool.read(100)
    assert spool.unread == len(episode("e", 2))
    assert [event for event, _ in spool.read(100)] == episode("e", 2)


@pytest.mark.parametrize("steps", [1, 3, 20])
def test_a_read_ends_with_an_episode_or_a_step(tmp_path: Path, steps: int) -> None:
    """A short episode is not sent in two halves, and no step without the reward that is there."""
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


@pytest.mark.parametrize("at", ["acquire", "rename"])
def test_what_a_kill_within_the_making_of_a_segment_left_is_removed(
    tmp_path: Path, at: str
) -> None:
    """SIGKILL before or after its lock. While its process lives, the folder stays."""
    program = f"""
import os, signal, sys
from pathlib import Path
from ingest.client.spool import FileLock, SpoolSegment
def stop(*_, **__):
    print("there", flush=True)
    sys.stdin.read()
{"FileLock.acquire" if at == "acquire" else "Path.rename"} = stop
SpoolSegment.create(Path({str(tmp_path)!r}), 1000, False)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == b"there\n"
    if at == "rename":
        assert spool_in(tmp_path).find() == []
        assert len(list(tmp_path.glob("new-segment-*"))) == 1
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(list(tmp_path.glob("new-segment-*"))) == 1
    assert spool_in(tmp_path).find() == []
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_folder_that_is_swept_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process sees it before it is locked, and takes it for one that was left."""
    acquire, swept = FileLock.acquire, []

    def late(self: FileLock, **given: Any) -> bool:
        if self.path.parent.name.startswith("new-") and not swept:
            swept.append(self.path)
            SpoolSegment.sweep(tmp_path)
        return acquire(self, **given)

    monkeypatch.setattr(FileLock, "acquire", late)
    segment = SpoolSegment.create(tmp_path, 1000, False)
    assert segment.folder.exists()
    assert not swept[0].parent.exists()
    segment.close()


@pytest.mark.parametrize("left", [True, False], ids=["of-this-process", "of-an-earlier-one"])
def test_a_full_disk_is_emptied_by_what_is_sent(
    collector: ScriptedCollector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    """Nothing fits any more, not even under which instance events are sent: a segment gives up what
    it holds in reserve for that. Until it can be written nothing is sent."""
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
    """The thread that sends goes on once the disk takes it; the log has a line for each."""
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
    """What is in the spool is not lost with the process."""
    client = spooling(NOBODY, tmp_path, timeout=0.01)
    client.log_step(SHORT, 1, 1.0)
    client._sender.finish()
    assert f"3 events were not delivered, of which 3 are in {tmp_path}" in caplog.text
    dead(client)


def test_a_spool_needs_a_folder(tmp_path: Path) -> None:
    """The option and the folder come together; a folder that cannot be made says so at once."""
    for options in ({"on_full": "spool"}, {"spool_dir": tmp_path}):
        with pytest.raises(ValueError, match="spool_dir"):
            PolicyClient(NOBODY, **options)  # type: ignore[arg-type]  # that is the point
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        spooling(NOBODY, tmp_path / "file")
