"""Damage in a spool's files: what is lost is counted, kept and no more than the damaged events."""

from __future__ import annotations

import copy
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from ingest.delivery.spool import Spool
from ingest.protocol import messages as wire
from ingest.protocol.errors import ClientError, Refusal
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.ingest.delivery.test_spool import NOBODY, OBS, SHORT, dead, spooling
from tests.ingest.scripted_collector import Gate, Record, ScriptedCollector

INSTANCE = "instance-1"
LATE = wire.LogReturns(episode_id="whole", reward=0.5, step=0, reward_id="click")


def spool_in(directory: Path) -> Spool:
    spool = Spool(directory, 1_000_000, sync=False, address=NOBODY, policy=lambda _: None)  # type: ignore[arg-type, return-value]  # no drafts here
    spool._piece_bytes = 1_000
    return spool


def episode(name: str, start: int, steps: int) -> list[wire.Event]:
    events: list[wire.Event] = [wire.Start(episode_id=name, start=start, tags={"name": name})]
    for t in range(steps):
        obs, action = bytes(t + 4), bytes(1)
        events.append(wire.LogAction(episode_id=name, seq=len(events), obs=obs, action=action))
        events.append(wire.LogReturns(episode_id=name, seq=len(events), reward=float(t)))
    return [*events, wire.End(episode_id=name, seq=len(events))]


@dataclass
class Delivery:
    """A collector's state, and what it refused."""

    collector: ScriptedCollector
    instances: dict[str, set[int]] = field(default_factory=lambda: {INSTANCE: set()})
    episodes: dict[str, Record] = field(default_factory=dict)
    late: list[wire.LogReturns] = field(default_factory=list)
    abandoned: set[str] = field(default_factory=set)
    refused: Counter[str] = field(default_factory=Counter)

    def after(self) -> Delivery:
        """A copy, for events that come later."""
        other = Delivery(self.collector)
        for name in ("instances", "episodes", "late", "abandoned"):
            setattr(other, name, copy.deepcopy(getattr(self, name)))
        return other

    def judge(self, event: wire.Event, owner: str | None) -> str | None:
        """Give the collector an event of an instance; return the code of a refusal."""
        self.collector.instances, self.collector.episodes = self.instances, self.episodes
        self.collector.late = self.late
        try:
            if event.episode_id in self.abandoned and not self.has(event):
                raise Refusal("abandoned", "its time is over")
            if not (
                isinstance(event, wire.LogReturns) and event.step is not None and self.has(event)
            ):
                self.collector._apply(owner or INSTANCE, copy.copy(event))
        except Refusal as refusal:
            self.refused[refusal.code] += 1
            return refusal.code
        return None

    def has(self, event: wire.Event) -> bool:
        if isinstance(event, wire.LogReturns) and event.step is not None:
            return event in self.late
        record = self.episodes[event.episode_id]
        return isinstance(event, wire.Start) or (event.seq or 0) <= len(record.events)

    def go_on(self, spool: Spool, events: list[tuple[wire.Event, str | None]]) -> None:
        """Deliver events as the sender does, with episodes that continue in new ones."""
        for event, owner in events:
            if self.judge(event, owner) != "abandoned":
                continue
            name, segment = event.episode_id, spool.segment_of(event)
            segment.translate(event)
            if event.episode_id == name and isinstance(event, wire.LogAction):
                started = spool.go_on(event, 100)
                if started is not None:
                    assert self.judge(*started) is None
                    segment.translate(event)
            if event.episode_id != name:
                self.refused["abandoned"] -= 1
                self.judge(event, owner)
        spool.done([event for event, _ in events])


def written(directory: Path, collector: ScriptedCollector) -> tuple[Delivery, list[wire.Event]]:
    """A segment of several pieces, partly delivered; the collector's state, and all events.

    The episode `moved` is abandoned before its second action, and goes on in a new one.
    """
    spool, delivery = spool_in(directory), Delivery(collector)
    kept = episode("kept", 5, 0)  # not delivered: the first piece stays
    early = [*episode("done", 0, 0), *episode("moved", 1, 2)[:3]]
    later = [*episode("moved", 1, 2)[3:], *episode("whole", 3, 2)]
    everything = copy.deepcopy([*kept, *early, *later, LATE, *episode("last", 4, 1)])
    spool.append([*kept, *early], left=False)
    spool.note_instance(INSTANCE)
    delivery.go_on(spool, [(event, None) for event in early])
    delivery.abandoned.add("moved")
    for at in range(0, len(later), 3):
        spool.append(later[at : at + 3], left=False)
    assert spool.own is not None
    (spool.own.folder / "reserve").unlink()
    delivery.go_on(spool, [(event, None) for event in later[:2]])
    spool.append([copy.copy(LATE)], left=False)
    spool.append(episode("last", 4, 1), left=False)
    assert not +delivery.refused
    spool.close()
    return delivery, everything


@pytest.fixture
def collector() -> Iterator[ScriptedCollector]:
    with ScriptedCollector() as running:
        yield running


def delivered(
    directory: Path, before: Delivery
) -> tuple[Delivery, list[tuple[wire.Event, str | None]], int]:
    """Take the segment up in another process: the collector's state, what it was sent, and the
    number of unreadable events."""
    spool, delivery = spool_in(directory), before.after()
    spool.taken_up += spool.find()
    sent: list[tuple[wire.Event, str | None]] = []
    while found := spool.read(5):
        sent += copy.deepcopy(found)
        delivery.go_on(spool, found)
    assert spool.waiting == spool.unread == 0
    spool.close()
    assert not list(directory.glob("segment-*"))
    return delivery, sent, spool.unreadable


def key(event: wire.Event) -> bytes:
    return wire.encode(event, wire.MSGPACK)


def continued(delivery: Delivery) -> list[wire.Event]:
    """The starts of episodes that continue others."""
    return [one.start for one in delivery.episodes.values() if one.start.continues is not None]


def flips(piece: Path, stride: int) -> Iterator[bytes]:
    """The file with one flipped bit, for every byte or some."""
    sound = piece.read_bytes()
    for place in range(0, len(sound), stride):
        flipped = bytearray(sound)
        flipped[place] ^= 1 << place % 8
        yield bytes(flipped)


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.long)])
def test_a_flipped_bit_loses_one_event_at_most(
    collector: ScriptedCollector, tmp_path: Path, stride: int
) -> None:
    """With a bit flipped anywhere in a segment, each event that waited is delivered once and
    unchanged, or it is the one that is counted. Its episode stops there, and is not ended; the
    others are complete. Judged events that are sent again are known to the collector."""
    before, events = written(tmp_path / "spool", collector)
    shutil.copytree(tmp_path / "spool", tmp_path / "sound")
    truth, sent, unreadable = delivered(tmp_path / "sound", before)
    assert (unreadable, +truth.refused, truth.late) == (0, Counter(), [LATE])
    waiting = {key(event) for event, _ in sent if event not in continued(truth)}
    stored = [event for record in truth.episodes.values() for event in record.events]
    known = {key(event) for event in (*events, *continued(truth), *stored)}
    counts: Counter[int] = Counter()
    for piece in sorted(tmp_path.glob("spool/segment-*/0*")):
        for flipped in flips(piece, stride):
            folder = tmp_path / "flipped"
            shutil.copytree(tmp_path / "spool", folder)
            (folder / piece.relative_to(tmp_path / "spool")).write_bytes(flipped)
            found, sent, unreadable = delivered(folder, before)
            came = [key(event) for event, _ in sent]
            lost = waiting.difference(came)
            counts[unreadable] += 1
            assert unreadable == len(lost) <= 1
            assert len(set(came)) == len(came)
            assert known.issuperset(came)
            assert {owner for _, owner in sent} == {INSTANCE}
            assert found.refused.keys() <= {"gap", "not_found"}
            assert found.late == ([] if key(LATE) in lost else [LATE])
            touched = {msgspec.msgpack.decode(one)["episode_id"] for one in lost - {key(LATE)}}
            for name, record in truth.episodes.items():
                if name not in touched:
                    assert found.episodes[name] == record
                elif name in found.episodes:
                    assert not found.episodes[name].ended
                    delivered_before = found.episodes[name].events
                    assert record.events[: len(delivered_before)] == delivered_before
            assert [path.read_bytes() for path in folder.glob("damaged-*")] in ([], [flipped])
            assert not unreadable or list(folder.glob("damaged-*"))
            shutil.rmtree(folder)
    assert min(counts[0], counts[1]) > 100


def test_damage_over_several_frames_loses_the_events_in_it(
    collector: ScriptedCollector, tmp_path: Path
) -> None:
    """The numbers of the frames around it tell how many. Judged events may be counted too, if the
    note that they were is damaged with them."""
    before, _ = written(tmp_path / "spool", collector)
    shutil.copytree(tmp_path / "spool", tmp_path / "sound")
    truth, sent, _ = delivered(tmp_path / "sound", before)
    waiting = {key(event) for event, _ in sent if event not in continued(truth)}
    most = 0
    *pieces, _ = sorted(tmp_path.glob("spool/segment-*/0*"))
    for piece in pieces:
        sound = piece.read_bytes()
        for place in range(0, len(sound) - 256, 64):
            folder = tmp_path / "damaged"
            shutil.copytree(tmp_path / "spool", folder)
            damaged = sound[:place] + b"\xaa" * 256 + sound[place + 256 :]
            (folder / piece.relative_to(tmp_path / "spool")).write_bytes(damaged)
            found, sent, unreadable = delivered(folder, before)
            lost = waiting.difference(key(event) for event, _ in sent)
            most = max(most, len(lost))
            assert len(lost) <= unreadable <= len(lost) + 3
            assert {owner for _, owner in sent} == {INSTANCE}
            assert found.refused.keys() <= {"gap", "not_found", "abandoned"}
            shutil.rmtree(folder)
    assert most > 2


def only_piece(directory: Path) -> Path:
    (piece,) = directory.glob("segment-*/0*")
    return piece


def damage(piece: Path, text: bytes, nth: int = 0, count: int = 1) -> None:
    """Flip a bit of the nth place in a file that has the text, and of those after it."""
    content = bytearray(piece.read_bytes())
    at = -1
    for number in range(nth + count):
        at = content.index(text, at + 1)
        if number >= nth:
            content[at] ^= 1
    piece.write_bytes(content)


def test_nothing_is_sent_if_the_instance_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both copies of the note are damaged: under another instance, an event that had arrived would
    be stored twice. The events are counted, the file is kept, and later starts leave it alone."""
    spool = spool_in(tmp_path)
    spool.append(episode("e", 0, 1), left=False)
    spool.note_instance(INSTANCE)
    spool.append(episode("f", 1, 0), left=False)
    spool.close()
    piece = only_piece(tmp_path)
    damage(piece, INSTANCE.encode(), count=2)
    damaged = piece.read_bytes()
    spool = spool_in(tmp_path)
    assert (spool.find(), spool.unreadable) == ([], 6)
    assert "6 events left out: the notes" in caplog.text
    (kept,) = tmp_path.glob("damaged-*")
    assert kept.read_bytes() == damaged
    assert f"kept as {kept}" in caplog.text
    assert (spool_in(tmp_path).find(), list(tmp_path.glob("segment-*"))) == ([], [])


def test_a_lost_event_of_many_is_counted_and_the_rest_delivered(
    collector: ScriptedCollector, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bit of one action flips among a hundred episodes: the others are whole, its own is not
    ended, and the end that follows is refused. The damaged file stays, for no later process."""
    client = spooling(NOBODY, tmp_path)
    names = [client.log_step(SHORT, 1, float(n)) for n in range(100)]
    dead(client)
    piece = only_piece(tmp_path)
    damage(piece, names[50].encode(), nth=1)
    damaged = piece.read_bytes()
    refusals: list[Refusal] = []
    with spooling(collector.address, tmp_path, on_error=refusals.append) as client:
        client.flush(60)
        stats = client.stats
        assert stats.refused == {"unreadable": 1, "gap": 1}
        assert (stats.waiting, stats.acknowledged) == (0, 298)
    assert [refusal.episode_id for refusal in refusals] == [names[50]]
    for n, name in enumerate(names):
        whole = collector.episodes[name].rewards == [float(n)] and collector.episodes[name].ended
        assert whole == (n != 50)
    (kept,) = tmp_path.glob("damaged-*")
    assert kept.read_bytes() == damaged
    assert "1 event cannot be read: damaged" in caplog.text
    assert f"kept as {kept}" in caplog.text
    with spooling(collector.address, tmp_path) as client:
        client.flush(60)
        assert client.stats.refused == {}
    assert kept.exists()
    assert not list(tmp_path.glob("segment-*"))


def test_an_episode_with_a_lost_event_is_not_stored_as_a_whole_one(tmp_path: Path) -> None:
    """It keeps the steps before the lost action; the collector refuses what follows, and abandons
    it. The episodes around it are stored as they were logged."""
    declare(tmp_path)
    client = spooling(NOBODY, tmp_path / "spool")
    names = [client.start_episode(f"e{n}") for n in range(3)]
    for t in range(3):
        for name in names:
            client.log_action(name, OBS, 1)
            client.log_returns(name, float(t))
    for name in names:
        client.end_episode(name)
    dead(client)
    damage(only_piece(tmp_path / "spool"), names[1].encode(), nth=3)
    with CollectorProcess(tmp_path) as running:
        with spooling(running.address, tmp_path / "spool") as client:
            client.flush(60)
            assert client.stats.refused == {"unreadable": 1, "gap": 4}
        running.turn_clock()
        running.await_abandoned(names[1])
        running.settle(7)
        running.stop()
    rows = sorted(shard_rows(tmp_path), key=lambda row: (row["eps_id"], row["t"]))
    rewards = [(row["eps_id"], row["rewards"]) for row in rows]
    assert rewards == [
        (n, t) for n, steps in zip(names, (3, 1, 3), strict=True) for t in range(steps)
    ]
    ends = {row["eps_id"]: row["ended"] for row in rows}
    assert ends == {"e0": "terminated", "e1": "abandoned", "e2": "terminated"}


def test_flush_raises_for_a_lost_event_of_this_process(
    collector: ScriptedCollector, tmp_path: Path
) -> None:
    """A bit flips in an event that its own process has not read back yet: the others go out."""
    with spooling(collector.address, tmp_path, max_pending=4, batch=4) as client:
        gate = Gate()
        collector.faults.append(gate)
        names = [client.log_step(SHORT, 1, float(n)) for n in range(20)]
        assert gate.reached.wait(60)
        damage(only_piece(tmp_path), names[15].encode(), nth=2)
        gate.opened.set()
        with pytest.raises(ClientError, match="1 event cannot be read; the files are kept"):
            client.flush(60)
        assert client.stats.refused == {"unreadable": 1}
        client.flush(60)
    ended = [collector.episodes[name].ended for name in names]
    assert ended == [name != names[15] for name in names]
    assert len(list(tmp_path.glob("damaged-*"))) == 1
    assert not list(tmp_path.glob("segment-*"))


@pytest.mark.parametrize("lost", ["start", "action"])
def test_an_episode_with_a_lost_event_goes_on_only_as_it_was(
    collector: ScriptedCollector, tmp_path: Path, lost: str
) -> None:
    """Its episode was abandoned. Without its start, the tags and policy of a new episode would be
    wrong, so there is none. Without an action the steps are not numbered: a reward for step 2 would
    reach another one, so it is refused with the abandoned episode."""
    events = episode("e", 0, 3)
    events.insert(-1, wire.LogReturns(episode_id="e", reward=5.0, step=2, reward_id="click"))
    spool, delivery = spool_in(tmp_path), Delivery(collector)
    spool.append(events, left=False)
    spool.note_instance(INSTANCE)
    delivery.go_on(spool, [(event, None) for event in events[:3]])
    delivery.abandoned.add("e")
    spool.close()
    damage(only_piece(tmp_path), b"\xa1e", nth={"start": 0, "action": 2}[lost])
    found, _, unreadable = delivered(tmp_path, delivery)
    assert unreadable == 0  # it was judged
    new = [record for name, record in found.episodes.items() if name != "e"]
    assert [record.rewards for record in new] == ([] if lost == "start" else [[1.0, 2.0]])
    assert found.refused == {"abandoned": 6 if lost == "start" else 1}


def test_a_file_without_an_intact_frame_is_kept(tmp_path: Path) -> None:
    """Nothing of it can be delivered, and nobody knows what it was."""
    spool = spool_in(tmp_path)
    spool.append(episode("e", 0, 0), left=False)
    spool.close()
    piece = only_piece(tmp_path)
    piece.write_bytes(b"of another program\n" * 20)
    assert spool_in(tmp_path).find() == []
    assert [path.stat().st_size for path in tmp_path.glob("damaged-*")] == [380]
    assert not piece.parent.exists()


def test_a_damaged_file_that_cannot_be_renamed_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its segment stays with it, and the next start tries again."""
    spool = spool_in(tmp_path)
    spool.append(events := episode("e", 0, 0), left=True)
    spool.note_instance(INSTANCE)
    spool.close()
    piece = only_piece(tmp_path)
    damage(piece, b"\xa1e")
    in_the_way = tmp_path / f"damaged-{piece.parent.name}-{piece.name}"
    in_the_way.mkdir()
    spool = spool_in(tmp_path)
    spool.taken_up += spool.find()
    assert [event for event, _ in spool.read(9)] == events[1:]
    spool.done([event for event, _, _ in list(spool._places.values())])
    assert piece.exists()
    assert "Is a directory" in caplog.text
    in_the_way.rmdir()
    assert (spool_in(tmp_path).find(), spool_in(tmp_path).unreadable) == ([], 0)
    assert in_the_way.is_file()
    assert not piece.parent.exists()
