"""`headrace retain` and `erase`, beside a collector and without one.

Also of `ingest.erasure.command`, `ingest.erasure.journal` and `storage.declarations.tombstones`.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from headrace.cli.maintaining import _queued, _replaced_by_proofs
from ingest.access.key_files import create_token
from ingest.backup import _adopted
from ingest.verification import verified
from storage.maintenance.search import search
from storage.reading.shard_reader import ShardReader
from tests.collector_process import CollectorProcess, declare
from tests.headrace.command import answer, headrace, process, refused

STEPS = 3
ALICE = "Zo\u00eb Alicia"


def steps(name: str, count: int, tags: dict[str, str], *, end: bool) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"type": "start", "episode_id": name, "tags": tags}]
    for _ in range(count):
        act = {"obs": [1.0, 2.0, 3.0, 4.0], "action": 1, "info": {"name": tags["user"]}}
        events += [{"type": "log_action", "episode_id": name, **act}]
    return events + ([{"type": "end", "episode_id": name}] if end else [])


def start(name: str, user: str = "carol") -> list[dict[str, Any]]:
    return steps(name, 0, {"user": user}, end=False)


def log(collector: CollectorProcess, *episodes: tuple[str, str, bool]) -> None:
    """Log some episodes (id, user, whether it ends) in one request, which is one journal row."""
    events = [
        e for name, user, end in episodes for e in steps(name, STEPS, {"user": user}, end=end)
    ]
    status, reply = collector.post("/v1/events", {"events": events})[:2]
    assert (status, reply.get("refused")) == (200, None), reply


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[CollectorProcess]:
    root = tmp_path / "root"
    declare(root, seal_seconds=0.01)
    with CollectorProcess(root) as collector:
        yield collector


def shards(root: Path) -> list[Path]:
    return sorted(root.glob("shards/*/*"))


def ids(root: Path) -> set[str]:
    with ShardReader(root, batch_size=10, columns=["eps_id"], training_disabled=True) as reader:
        return {name for rows in reader for name in rows["eps_id"].tolist()}


def erased(root: Path, *words: str, status: int = 0) -> dict[str, Any]:
    result = headrace("erase", "--root", root, *words, "--json")
    assert result.returncode == status, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_person_is_erased_without_a_collector(collector: CollectorProcess) -> None:
    """Sealed long ago, in a row of the journal that others need, open, also without a step, or as
    what continues it: all of it is gone, from free pages too; the rest, and the account, are as
    they were; what comes late is refused by name."""
    root = collector.root
    log(collector, (f"{ALICE} 0", ALICE, True), ("b0", "bob", True))
    collector.empty(60.0)
    log(collector, (f"{ALICE} 1", ALICE, True), ("b1", "bob", False), (f"{ALICE} 2", ALICE, False))
    act = {"obs": [1.0, 2.0, 3.0, 4.0], "action": 1}
    path = f"/v1/episodes/{quote(f'{ALICE} 2')}/log_action"
    assert collector.post(path, act, **{"Idempotency-Key": "k"})[0] == 200
    others = [("sequel 0", f"{ALICE} 0"), ("sequel 1", "sequel 0"), ("sequel 2", "sequel 1")]
    chain = [{**event, "continues": before} for name, before in others for event in start(name)]
    assert collector.post("/v1/events", {"events": [*chain, *start(f"{ALICE} 3", ALICE)]})[0] == 200
    assert collector.stop() == 0
    before = verified(root)
    assert (before.findings, before.acknowledged) == ((), 5 * STEPS + 1)
    proof = erased(root, "--proof", "--tag", f"user={ALICE}", status=1)["proof"]
    assert {Path(place).parts[0] for place in proof["found"]} == {"journal", "shards"}
    plan = erased(root, "--tag", f"user={ALICE}", "--tag", "user=nobody")
    assert (plan["rows"], plan["episodes"], plan["unmatched"]) == (2 * STEPS, 2, [2])
    assert search(root / "maintenance", [ALICE, "nobody"]).is_clear
    other = headrace("compact", "--root", root, "--apply", plan["plan"])
    assert refused(other, "expected one of compact, got one of erase")
    for also in (("--tag", f"user={ALICE}", "--also", root / "none"), ("--where", "true")):
        assert refused(headrace("erase", "--root", root, "--proof", *also), "--", "expected")
    (root.parent / "requests").write_text(f"{ALICE} 0\r\n", encoding="utf-8-sig")
    assert erased(root, "--requests", str(root.parent / "requests"))["rows"] == STEPS
    (root.parent / "requests").write_text(f"{ALICE} 0\n", encoding="utf-16")
    assert refused(
        headrace("erase", "--root", root, "--requests", root.parent / "requests"), "UTF-8"
    )
    words = ("--tag", f"user={ALICE}", "--apply", plan["plan"], "--why")
    assert refused(headrace("erase", "--root", root, *words, f"for {ALICE}"), "--why: expected")
    done = erased(root, *words, "asked")
    assert done["applied"]["removed"] == 3 * STEPS + 1
    assert done["applied"]["ended"] == 1 + len(others) + 1
    assert done["proof"]["clear"], done["proof"]
    assert ids(root) == {"b0"}
    report = verified(root)
    assert (report.findings, report.acknowledged, report.erased) == (
        (),
        5 * STEPS + 1,
        3 * STEPS + 1,
    )
    assert report.in_journal == STEPS
    shown = headrace("verify", "--root", root)
    assert (shown.returncode, f"erased {3 * STEPS + 1}" in shown.stdout) == (0, True)
    again = erased(root, "--tag", f"user={ALICE}", "--apply", plan["plan"])
    assert (again["applied"]["removed"], again["applied"]["repeated"]) == (0, True)
    again = erased(root, "--tag", "user=nobody", "--tag", "user=none", "--apply", "new", status=1)
    assert not again["applied"]["repeated"]
    collector.restart()
    for name in (f"{ALICE} {number}" for number in range(4)):
        path = f"/v1/episodes/{quote(name)}/log_returns"
        status, reply = collector.post(path, {"reward": 1.0})
        assert (status, reply["error"]["code"]) == (409, "completed")
        assert f"Episode {name} was erased" in reply["error"]["message"]
        for more in ({"episode_id": name}, {"episode_id": "new", "continues": name}):
            status, reply = collector.post("/v1/episodes", more)
            assert (status, reply["error"]["code"]) == (409, "completed")
    assert search(root, ["sequel"]).is_clear
    assert (
        collector.post("/v1/events", {"events": steps("b1", 1, {"user": "bob"}, end=True)[1:]})[0]
        == 200
    )
    assert collector.stop() == 0
    report = verified(root)
    assert (report.findings, report.in_shards) == ((), 2 * STEPS + 1)
    assert ids(root) == {"b0", "b1"}
    assert search(root, [ALICE]).is_clear


def test_an_older_journal_brings_nobody_back(collector: CollectorProcess) -> None:
    """It is refused though all later shards are gone; adopting it erases what it held, also if it
    is killed in between, and the account adds up."""
    root = collector.root
    log(collector, ("b0", "bob", True))
    collector.empty(60.0)
    log(collector, ("b1", "bob", False), (f"{ALICE} 0", ALICE, False))
    assert collector.stop() == 0
    shutil.copytree(root / "journal", root.parent / "older")
    collector.restart()
    late = steps(f"{ALICE} 0", 1, {"user": ALICE}, end=True)[1:]
    assert collector.post("/v1/events", {"events": late})[0] == 200
    log(collector, (f"{ALICE} 1", ALICE, True))
    assert collector.stop() == 0
    assert erased(root, "--tag", f"user={ALICE}", "--apply", "new")["proof"]["clear"]
    shutil.rmtree(root / "journal")
    shutil.move(root.parent / "older", root / "journal")
    assert refused(headrace("verify", "--root", root), "headrace adopt")
    _adopted(root, root / "journal")  # as killed before it erases
    assert not search(root, [ALICE]).is_clear
    assert "Adopted nothing" in headrace("adopt", "--root", root).stdout
    assert search(root, [ALICE]).is_clear
    assert ids(root) == {"b0", "b1"}
    report = verified(root)
    assert (report.findings, report.erased) == ((), 3 * STEPS + 1)


def keep_logging(collector: CollectorProcess, stop: threading.Event, bearer: dict[str, str]) -> int:
    """Log episodes of another user until told to stop; return how many were acknowledged."""
    count = 0
    while not stop.is_set():
        events = {"events": steps(f"c{count}", STEPS, {"user": "carol"}, end=True)}
        status, reply = collector.post("/v1/events", events, **bearer)
        assert status in (200, 429), reply
        count += status == 200
    return count


def test_a_running_collector_erases_when_it_may_be_asked(tmp_path: Path) -> None:
    """With a token of scope erase; without one it refuses, and nothing is changed. Other events are
    accepted meanwhile and afterwards."""
    root = tmp_path / "root"
    declare(root, seal_seconds=0.01)
    tokens = {
        name: create_token(root, name, scopes)[1]
        for name, scopes in (("log", ["log"]), ("admin", ["admin"]), ("eraser", ["admin", "erase"]))
    }
    with CollectorProcess(root) as collector:
        bearer = {"Authorization": f"Bearer {tokens['log']}"}
        events = [
            *steps("a0", STEPS, {"user": ALICE}, end=True),
            *steps("b1", STEPS, {"user": "bob"}, end=False),
            *steps("a2", STEPS, {"user": ALICE}, end=False),
        ]
        assert collector.post("/v1/events", {"events": events}, **bearer)[0] == 200
        tag = ("--tag", f"user={ALICE}", "--apply", "new")
        result = headrace("erase", "--root", root, *tag, "--token", tokens["admin"])
        assert refused(result, "scope")
        stop = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(keep_logging, collector, stop, bearer)
            try:
                done = erased(root, *tag, "--token", tokens["eraser"])
            finally:
                stop.set()
            others = beside.result()
        assert (done["applied"]["removed"], done["proof"]["clear"]) == (2 * STEPS, True)
        late = {"events": steps("b1", 2, {"user": "bob"}, end=True)[1:]}
        status, reply = collector.post("/v1/events", late, **bearer)[:2]
        assert (status, reply["accepted"]) == (200, 3)
        report = verified(root, token=tokens["admin"])
        assert (report.findings, report.erased) == ((), 2 * STEPS)
        assert collector.stop() == 0
    report = verified(root)
    assert (report.findings, report.acknowledged) == ((), (3 + others) * STEPS + 2)
    assert ids(root) == {"b1", *(f"c{number}" for number in range(others))}
    assert others > 3


def test_an_import_leaves_an_erased_person_out(collector: CollectorProcess, tmp_path: Path) -> None:
    """A file that holds the person again brings the other rows only, whole or row by row."""
    root = collector.root
    log(collector, ("a0", ALICE, True), ("b0", "bob", True))
    assert collector.stop() == 0
    assert erased(root, "--tag", f"user={ALICE}", "--apply", "new")["proof"]["clear"]
    collector.restart()
    file = tmp_path / "log.csv"
    lines = [f"{user},{n}.5,{n % 2},1" for n in range(4) for user in ("bob", ALICE, "carol")]
    file.write_text("\n".join(["user,x,arm,paid", *lines]) + "\n", encoding="utf-8")
    words = ("--observation", "x", "--action", "arm", "--reward", "paid", "--tag", "user=user")
    declare(root, "box:1", "discrete:2", seal_seconds=0.01)
    assert collector.stop() == 0
    collector.restart()
    done = answer(headrace("import", file, *words, "--address", collector.address, "--json"))
    assert (done["steps"], done["rows_left_out"]) == (8, 4)
    assert collector.stop() == 0
    report = verified(root)
    assert (report.findings, report.in_shards) == ((), STEPS + 8)
    assert search(root, [ALICE]).is_clear


def test_a_queue_of_requests_is_replaced_by_proofs(collector: CollectorProcess) -> None:
    """Each request's proof is there before the request is gone; an empty queue is nothing yet."""
    root, queue = collector.root, collector.root.parent / "queue"
    log(collector, ("a", "alice", True), ("b", "bob", True))
    assert collector.stop() == 0
    queue.mkdir()
    words = ("erase", "--root", root, "--queue", queue, "--json")
    assert refused(headrace(*words), "expected --apply new")
    assert refused(headrace(*words, "--apply", "new"), "no request", status=7)
    (queue / "7.txt").write_text("tag:user=alice\n")
    (queue / "8.txt").write_text("nobody\n")
    done = answer(headrace(*words, "--apply", "new"))
    assert (done["episodes"], done["proof"]["clear"], ids(root)) == (1, True, {"b"})
    proofs = [queue / "done" / f"{name}.txt.proof.json" for name in (7, 8)]
    assert (sorted(queue.rglob("*.*")), done["done"]) == (proofs, [*map(str, proofs)])
    assert "alice" not in proofs[0].read_text()
    first = proofs[0].read_bytes()
    (queue / "7.txt").write_text("nobody else\n")
    again = answer(headrace(*words, "--apply", "new"))
    assert again["done"] == [str(queue / "done" / "7.txt.2.proof.json")]
    assert proofs[0].read_bytes() == first, "each request has its own proof"


def test_a_request_that_is_written_while_others_are_erased_stays(tmp_path: Path) -> None:
    """It may name a person who was not erased; one that is gone was another run's."""
    queue = tmp_path / "queue"
    queue.mkdir()
    for name in "abc":
        (queue / f"{name}.txt").write_text("tag:user=alice\n")
    found = _queued(queue, tmp_path / "root", "new")
    (queue / "a.txt").write_text("tag:user=alice\ntag:user=bob\n")
    (queue / "b.txt").unlink()
    done = _replaced_by_proofs(found, {"proof": {"clear": True}})
    assert [Path(one).name for one in done] == ["b.txt.proof.json", "c.txt.proof.json"]
    assert [one.name for one in queue.glob("*.txt")] == ["a.txt"]


def test_retention_is_planned_and_applied(collector: CollectorProcess) -> None:
    """Whole episodes leave; `verify` counts them; without a choice nothing is planned."""
    root = collector.root
    log(collector, ("a", "alice", True), ("b", "bob", True))
    collector.empty(60.0)
    log(collector, ("c", "carol", True))
    collector.empty(60.0)
    assert refused(headrace("retain", "--root", root), "expected --keep")
    assert refused(headrace("retain", "--root", root, "--keep", "400"), "expected days")
    assert "Nothing to do" in headrace("retain", "--root", root, "--keep", "1d").stdout
    capped = ("--max-bytes", 0, "--cap-bytes", 1)
    assert answer(headrace("retain", "--root", root, *capped, "--json"))["rows"] == 0
    plan = answer(headrace("retain", "--root", root, "--where", "tags LIKE '%bob%'", "--json"))
    assert (plan["rows"], plan["rewritten_shards"], plan["whole_shards"]) == (STEPS, 1, 0)
    done = process("retain", "--root", root, "--apply", plan["plan"], "--json")
    assert answer(done)["applied"]["removed"] == STEPS
    assert ids(root) == {"a", "c"}
    report = verified(root)
    assert (report.findings, report.retained_out) == ((), STEPS)
    assert sum(path.name.endswith(".replaced") for path in shards(root)) == 1
    text = headrace("retain", "--root", root, "--max-bytes", 0, "--apply", "new").stdout
    assert "Removed 6 rows" in text
    assert collector.stop() == 0
    report = verified(root)
    assert (report.findings, report.acknowledged, report.in_shards) == ((), 3 * STEPS, 0)
