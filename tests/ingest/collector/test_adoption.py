"""A journal that is older than its shards: each acknowledged step is in exactly one place."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ingest import verification as audit
from ingest.backup import adopt_root
from ingest.collector.adoption import CAUSE, Adopted
from storage.errors import JournalBehind, JournalLocked
from storage.shards.names import ShardDamaged
from storage.shards.shard import read_shard
from storage.shards.unrecorded_shards import later_shards
from storage.verify.audit import VerifyReport
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.faults.restore import SCENARIO
from tests.faults.scenario import Trial


def test_random_restored_histories_give_no_step_twice(tmp_path: Path) -> None:
    """Episodes that were open, waiting, planned or cut in the backup are neither doubled nor
    lost.
    """
    verdict = SCENARIO.run(Trial(seed=1, folder=tmp_path, size=120))
    assert verdict.ok, verdict.faults


def events(name: str, *, first: int = 0, steps: int = 0, end: bool = False) -> dict[str, Any]:
    """A request that starts an episode at step 0, logs `steps` steps from `first` on, and may end
    it.
    """
    step = {"type": "log_action", "episode_id": name, "obs": [0.5] * 4, "action": 1}
    batch: list[dict[str, Any]] = [] if first else [{"type": "start", "episode_id": name}]
    batch += [{**step, "reward": float(t), "seq": t + 1} for t in range(first, first + steps)]
    batch += [{"type": "end", "episode_id": name, "seq": first + steps + 1}] if end else []
    return {"events": batch}


def log(collector: CollectorProcess, name: str, **how: Any) -> list[str]:
    """Send a request; return the codes of its refusals."""
    status, answer = collector.post("/v1/events", events(name, **how))
    assert status == 200, answer
    return [item["error"]["code"] for item in answer.get("refused", [])]


def put_back(root: Path, backup: Path) -> None:
    shutil.rmtree(root / "journal")
    shutil.copytree(backup, root / "journal")


def stored(root: Path) -> Counter[tuple[str, int]]:
    return Counter((row["eps_id"], row["t"]) for row in shard_rows(root))


def steps(name: str, count: int) -> dict[tuple[str, int], int]:
    return {(name, t): 1 for t in range(count)}


def verified(root: Path) -> VerifyReport:
    """Verify as `headrace verify` does; a running collector is asked."""
    report = audit.verified(root)
    assert report.ok, report.findings
    return report


def adopted(root: Path) -> Adopted:
    done = adopt_root(root)
    assert done is not None
    return done


def test_a_copied_journal_that_is_put_back_doubles_nothing(tmp_path: Path) -> None:
    """A real collector is killed and its journal copied; it runs on, is killed again, and gets the
    copy back, twice. A start and `verify` are refused until `adopt` has run.

    `verify` finds every acknowledged step in one place afterwards and at the end.
    """
    root, backup, text = tmp_path / "root", tmp_path / "backup", tmp_path / "log"
    declare(root, seal_seconds=0.4, part_steps=3, episode_timeout=600.0)
    with CollectorProcess(root, log=text) as collector:
        log(collector, "recorded", steps=2, end=True)
        collector.settle(2)
        log(collector, "waits", steps=2, end=True)
        log(collector, "ends", steps=2)
        log(collector, "long", steps=5)  # a part of 3, and 2 open steps
        log(collector, "quiet", steps=2)
        log(collector, "ahead", steps=1)
        with pytest.raises(JournalLocked):
            adopt_root(root)
        collector.kill()
        shutil.copytree(root / "journal", backup)
        assert adopt_root(root) is None
        collector.restart()
        assert log(collector, "ends", first=2, steps=1, end=True) == []
        assert log(collector, "long", first=5, steps=4) == []
        assert log(collector, "ahead", first=1, steps=1) == []
        log(collector, "new", steps=2, end=True)
        collector.settle(2 + 2 + 3 + 6 + 2)
        collector.kill()
        before = stored(root)
        assert before == (
            steps("recorded", 2) | steps("waits", 2) | steps("ends", 3) | steps("long", 6)
        ) | steps("new", 2)
        rest = steps("quiet", 2) | steps("ahead", 1)
        for again in range(2):
            put_back(root, backup)
            with pytest.raises(RuntimeError, match="did not start"):
                collector.restart()
            assert "`headrace adopt`" in text.read_text()
            with pytest.raises(JournalBehind, match="the journal is older than its shards"):
                verified(root)
            done = adopted(root)
            assert (done.kept_back, done.written) == ((12, 0) if again else (9, 3))
            assert done.closed == 4
            assert stored(root) == before | rest
            assert verified(root).acknowledged == before.total() + 3
            assert adopt_root(root) is None
        collector.restart()
        assert log(collector, "ends", first=3, steps=1, end=True) == ["broken"] * 2
        assert log(collector, "waits", first=3, steps=1) == ["completed"]
        assert set(log(collector, "new", steps=2, end=True)) == {"completed"}
        _, reply = collector.post("/v1/events", events("long", first=9, steps=1))
        assert CAUSE in reply["refused"][0]["error"]["message"]
        assert log(collector, "ahead", first=2, steps=1) == ["broken"]
        assert log(collector, "next", steps=2, end=True) == []
        collector.settle(before.total() + 5)
        assert collector.stop() == 0
    assert stored(root) == before | rest | steps("next", 2)
    report = verified(root)
    assert report.acknowledged == report.in_shards == before.total() + 5
    assert report.earlier == 0


def test_tracks_of_a_restored_journal_are_known_by_episode_and_agent(tmp_path: Path) -> None:
    """Two agents of one episode with equal ordinals: nothing is doubled, and both have ended."""
    root, backup = tmp_path / "root", tmp_path / "backup"
    declare(root, seal_seconds=0.2)

    def send(collector: CollectorProcess, *events: dict[str, Any]) -> list[str]:
        batch = [{"episode_id": "e", **event} for event in events]
        status, answer = collector.post("/v1/events", {"events": batch})
        assert status == 200, answer
        return [item["error"]["code"] for item in answer.get("refused", [])]

    def act(agent: str, seq: int) -> dict[str, Any]:
        step = {"type": "log_action", "obs": [0.5] * 4, "action": 1, "reward": float(seq)}
        return {**step, "seq": seq, "agent_id": agent, "env_t": seq}

    agents = ("agent0", "b")
    with CollectorProcess(root) as collector:
        for agent in agents:
            assert send(collector, {"type": "start", "agent_id": agent}, act(agent, 1)) == []
        collector.kill()
        shutil.copytree(root / "journal", backup)
        collector.restart()
        for agent in agents:
            end = {"type": "end", "seq": 3, "agent_id": agent, "agents": 2}
            assert send(collector, act(agent, 2), end) == []
        collector.settle(4)
        collector.kill()
        before = Counter((row["agent_id"], row["t"]) for row in shard_rows(root))
        put_back(root, backup)
        adopted(root)
        collector.restart()
        for agent in agents:
            assert send(collector, act(agent, 4)) == ["broken"]
        assert collector.stop() == 0
    assert before == Counter((a, t) for a in agents for t in (0, 1))
    assert Counter((row["agent_id"], row["t"]) for row in shard_rows(root)) == before
    assert verified(root).acknowledged == 4


def test_shards_of_an_earlier_journal_are_left_alone(tmp_path: Path) -> None:
    """Shards of an earlier journal are left alone: only steps received since the backup are taken
    up."""
    declare(tmp_path, seal_seconds=0.01)
    with CollectorProcess(tmp_path) as collector:
        log(collector, "old", steps=2, end=True)
        collector.settle(2)
        assert collector.stop() == 0
    (path,) = (tmp_path / "shards").glob("*/*.parquet")
    latest = max(read_shard(path, columns=["received_ts"])["received_ts"].to_pylist())
    assert later_shards(tmp_path / "shards", {}, latest + 10**9) == ([], {})
    found, ends = later_shards(tmp_path / "shards", {}, latest)
    assert [part.episode_id for shard in found for part in shard.parts] == ["old"]
    assert ends == {path.parent.name: 1}
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ShardDamaged):
        read_shard(path, verify="digest")
    found, ends = later_shards(tmp_path / "shards", {path.parent.name: 0}, latest)
    assert (found, ends) == ([], {path.parent.name: 1})  # counted, so that no ordinal is reused
