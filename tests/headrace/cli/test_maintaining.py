"""`headrace compact`, beside its collector, and the account that `verify` gives afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingest.verification import verified
from storage.reading.shard_reader import ShardReader
from storage.shards.shard import read_shard
from tests.collector_process import CollectorProcess, declare
from tests.headrace.command import answer, headrace, process, refused
from tests.storage.verify.test_audit import batch

STEPS = 3


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[CollectorProcess]:
    declare(tmp_path, seal_seconds=0.01)
    with CollectorProcess(tmp_path) as collector:
        yield collector
        if collector.process.poll() is None:
            assert collector.stop() == 0


def log(collector: CollectorProcess, name: str, episodes: int = 8) -> None:
    """Log episodes, each in a shard of its own."""
    for number in range(episodes):
        before = len(shards(collector.root))
        body = batch(f"{name}-{number}", STEPS, end=True)
        assert collector.post("/v1/events", body)[0] == 200
        collector.empty(60.0)
        assert len(shards(collector.root)) == before + 1


def shards(root: Path) -> list[Path]:
    return sorted(root.glob("shards/*/*.parquet"))


def episodes(root: Path) -> list[str]:
    with ShardReader(root, batch_size=10, columns=["eps_id"], training_disabled=True) as reader:
        return sorted(name for rows in reader for name in rows["eps_id"].tolist())


def test_a_plan_is_printed_and_applied_beside_the_collector(collector: CollectorProcess) -> None:
    """The plan changes no shard; its digest applies it; `verify` agrees before, between and after,
    asked of the running collector and of its journal."""
    root = collector.root
    log(collector, "a")
    plan = answer(headrace("compact", "--root", root, "--json"))
    assert len(shards(root)) == 8
    (merge,) = plan["merges"]
    assert (merge["shards"], merge["rows"], plan["deletes"]) == (8, 8 * STEPS, 0)
    text = headrace("compact", "--root", root).stdout
    assert f"headrace compact --root {root} --apply {plan['plan']}" in text
    log(collector, "b", 2)  # the plan does not know these
    done = process(
        *("compact", "--root", root, "--apply", plan["plan"], "--why", "small files", "--json")
    )
    (made,) = answer(done)["applied"]["made"]
    assert (made["old"], made["why"], made["ordinals"]) == (8, "small files", [[0, 7]])
    (place,) = (root / "maintenance" / plan["plan"]).glob("*/*.json")
    record = json.loads(place.read_text())
    assert record["by"].count("@") == 1
    assert len(shards(root)) == 3
    report = verified(root)
    assert (report.findings, report.in_shards) == ((), 10 * STEPS)
    log(collector, "c", 16)
    again = headrace("compact", "--root", root, "--apply", "new")
    assert "Joined 19 shards to 1 shard; deleted 0 shards" in again.stdout
    again = headrace("compact", "--root", root, "--apply", "new", "--grace-hours", 0)
    assert "Joined 0 shards to 0 shards; deleted 27 shards" in again.stdout
    assert verified(root).findings == ()
    assert collector.stop() == 0
    report = verified(root)
    assert (report.findings, report.in_shards) == ((), 26 * STEPS)
    assert headrace("verify", "--root", root).returncode == 0
    assert len(episodes(root)) == 26 * STEPS
    assert "Nothing to do" in headrace("compact", "--root", root, "--grace-hours", 24).stdout


def test_what_is_no_plan_is_refused_by_name(collector: CollectorProcess) -> None:
    """A digest of no plan, and a plan whose shard is gone."""
    root = collector.root
    log(collector, "a", 3)
    assert refused(headrace("compact", "--root", root, "--apply", "0" * 16), "digest of a plan")
    plan = answer(headrace("compact", "--root", root, "--json"))["plan"]
    shards(root)[1].unlink()
    assert refused(headrace("compact", "--root", root, "--apply", plan), "is stale", "is gone")
    assert len(shards(root)) == 2


@pytest.mark.parametrize("grace", [24, 0])
def test_a_journal_that_is_older_than_compacted_shards_gives_no_ordinal_twice(
    collector: CollectorProcess, grace: int
) -> None:
    """Part of a compacted shard is later than the restored journal: those steps are added to it."""
    root = collector.root
    log(collector, "a", 5)
    assert collector.stop() == 0
    backup = root.parent / f"{root.name}-backup"
    shutil.copytree(root / "journal", backup)
    collector.restart()
    log(collector, "b", 6)
    assert collector.stop() == 0
    for _ in range(2):
        headrace("compact", "--root", root, "--apply", "new", "--grace-hours", grace)
    assert len(shards(root)) == 1
    shutil.rmtree(root / "journal")
    shutil.move(backup, root / "journal")
    assert refused(headrace("verify", "--root", root), "headrace adopt")
    done = answer(headrace("adopt", "--root", root, "--json"))["adopted"]
    assert (done["steps"], done["kept_back"], done["written"]) == (6 * STEPS, 0, 0)
    assert "Adopted nothing" in headrace("adopt", "--root", root).stdout
    report = verified(root)
    assert (report.findings, report.acknowledged) == ((), 11 * STEPS)
    collector.restart()
    log(collector, "c", 2)
    assert verified(root).findings == ()
    assert collector.stop() == 0
    report = verified(root)
    assert (report.findings, report.acknowledged) == ((), 13 * STEPS)
    assert len(episodes(root)) == 13 * STEPS
    stored = [
        (path.parent.name, ordinal)
        for path in shards(root)
        for ordinal in set(read_shard(path)["ordinal"].to_pylist())
    ]
    assert len(stored) == len(set(stored)) == 13
