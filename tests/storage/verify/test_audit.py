"""`headrace verify`: every planted inconsistency is found, and nothing else is.

Also of `ingest.collector.journal_report` and `storage.verify.quarantine`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingest.collector.address_file import ADDRESS, LiveAddress, say_address
from ingest.verification import journal_account, stamps, verified
from storage.errors import JournalLocked
from storage.journal.database import DATABASE, checksum
from storage.journal.sqlite_journal import SqliteJournal
from storage.shards.digests import digest_of
from storage.shards.shard import read_shard
from storage.system.files import FileLock
from storage.verify.audit import VerifyReport
from storage.verify.inventory import list_streams
from storage.weights.store import WeightFolder
from tests.collector_process import CollectorProcess, declare
from tests.headrace.command import headrace, process

EPISODES, STEPS, OPEN_STEPS = 4, 3, 2
T = "hr_a_token"


def weights_under(root: Path) -> WeightFolder:
    """A store that takes any weights: what these tests are about is their lineage."""
    return WeightFolder(root, "default", check=lambda candidate, weights: None)


def batch(name: str, steps: int, *, end: bool) -> dict[str, object]:
    """The events of one episode, started by no client instance."""
    step = {"type": "log_action", "episode_id": name, "obs": [0.5] * 4, "action": 1, "reward": 1.0}
    events: list[dict[str, object]] = [{"type": "start", "episode_id": name}]
    events += [dict(step) for _ in range(steps)]
    events += [{"type": "end", "episode_id": name}] if end else []
    return {"events": events}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two shards, an episode that is open, and a version that is live."""
    root = tmp_path_factory.mktemp("whole") / "root"
    declare(root, seal_seconds=60.0)  # whole runs: a loaded machine would make more shards
    for run in range(2):
        with CollectorProcess(root) as collector:  # stopping it seals what has ended
            for number in range(EPISODES):
                status, _ = collector.post("/v1/events", batch(f"{run}-{number}", STEPS, end=True))
                assert status == 200
            if run:
                collector.post("/v1/events", batch("open", OPEN_STEPS, end=False))
            assert collector.stop() == 0
    (stream,) = (path.name for path in (root / "shards").iterdir())
    store = weights_under(root)
    weights = {"pi.0.weight": np.ones((2, 4), np.float32)}
    store.publish(store.add_candidate(weights, spec={}, metrics={}, lineage={stream: [[0, 7]]}))
    declare(root, seal_seconds=0.01)
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    copy = tmp_path / "root"
    shutil.copytree(whole, copy)
    return copy


def shards(root: Path) -> list[Path]:
    return sorted((root / "shards").glob("*/*.parquet"))


def kinds(report: VerifyReport) -> list[str]:
    return sorted({finding.kind for finding in report.findings})


def rewritten(path: Path, table: pa.Table) -> Path:
    """The table in the place of a shard, under the name that fits its bytes."""
    pq.write_table(table, path, write_page_checksum=True)
    digest = digest_of(path.read_bytes())
    return path.rename(path.with_name(f"{path.name[:26]}{digest[:16]}.parquet"))


@pytest.mark.parametrize("lock", ["there", "left out"])
def test_a_whole_root_is_in_order(root: Path, lock: str) -> None:
    """Acknowledged == rows in shards + steps in the journal, and nothing is changed or made."""
    if lock == "left out":  # one that we made might be a file that the collector may not open
        (root / "journal" / "lock").unlink()
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    report = verified(root)
    assert report.findings == ()
    assert report.notes == ()
    assert report.acknowledged == 2 * EPISODES * STEPS + OPEN_STEPS
    assert (report.in_shards, report.in_journal) == (2 * EPISODES * STEPS, OPEN_STEPS)
    assert len(shards(root)) >= 2
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert after == before


def test_a_deleted_shard_is_missing(root: Path) -> None:
    """A deleted shard is named by its record, its steps are lost, and the live version's lineage
    has a gap."""
    gone = shards(root)[0]
    gone.unlink()
    report = verified(root)
    assert kinds(report) == ["count", "missing", "weights"]
    assert gone.name in report.findings[0].where
    assert any(finding.text.endswith("lost") for finding in report.findings)


def test_counts_of_steps_are_all_written_alike(tmp_path: Path) -> None:
    """Each count of a finding has commas between its thousands."""
    declare(tmp_path, seal_seconds=0.01)
    for number in range(2):
        with CollectorProcess(tmp_path) as collector:
            collector.post("/v1/events", batch(f"{number}", 1_100, end=True))
            if number:
                collector.post("/v1/events", batch("open", 1_050, end=False))
            assert collector.stop() == 0
    shards(tmp_path)[0].unlink()
    (text,) = (one.text for one in verified(tmp_path).findings if one.kind == "count")
    assert text == (
        "expected 3,250 acknowledged steps, found 1,100 in shards and 1,050 in the journal: "
        "1,100 lost"
    )


def flip_a_byte(path: Path, share: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(share * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def double(path: Path) -> None:
    """Another whole file with the same ordinals."""
    rewritten(path.with_name(path.name[:26] + "0" * 16 + ".parquet"), read_shard(path))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_flipped_byte_is_damage(root: Path, share: float) -> None:
    """A flipped byte is found in a data page, the footer or the magic number."""
    path = shards(root)[0]
    flip_a_byte(path, share)
    report = verified(root)
    assert kinds(report) == ["count", "damaged", "weights"]
    assert report.quarantined == ()
    assert path.exists()


def test_quarantine_moves_what_is_damaged_and_nothing_else(root: Path) -> None:
    """Readers no longer see the file; its rows are accounted for; a note names trained versions."""
    path, *others = shards(root)
    path.write_bytes(path.read_bytes()[:-9])
    report = verified(root, quarantine=True)
    (moved,) = report.quarantined
    assert (root / moved).name == path.name
    assert shards(root) == others
    report = verified(root)
    assert (kinds(report), report.in_quarantine > 0) == ([], True)
    assert any("was trained on" in n and n.endswith("are in quarantine") for n in report.notes)
    assert report.acknowledged == report.in_shards + report.in_journal + report.in_quarantine


@pytest.mark.parametrize("noted", ["noted", "by a person"])
def test_what_is_set_aside_keeps_its_rows_place_only_as_it_was(root: Path, noted: str) -> None:
    """Quarantined rows that were lost later are no longer counted."""
    path = shards(root)[0]
    flip_a_byte(path)
    (moved,) = verified(root, quarantine=True).quarantined
    aside, note = root / moved, root / f"{moved}.sha256"
    assert note.read_text() == f"{hashlib.sha256(aside.read_bytes()).hexdigest()}  {aside.name}\n"
    if noted != "noted":
        note.unlink()
    assert kinds(verified(root)) == []
    aside.write_bytes(b"" if noted != "noted" else aside.read_bytes()[:-1])
    report = verified(root)
    assert (kinds(report), report.in_quarantine) == (["count", "damaged", "weights"], 0)
    assert any(found.where == moved for found in report.findings)


def test_a_doubled_shard_is_found(root: Path) -> None:
    """A copy under another shard's name: readers would return its rows twice."""
    first, second = shards(root)[:2]
    copy = first.with_name(second.name[:26] + first.name[26:])
    shutil.copyfile(first, copy)
    assert kinds(verified(root)) == ["damaged"]
    copy.unlink()
    stray = first.with_name("backup of " + first.name)
    shutil.copyfile(first, stray)
    (finding,) = verified(root).findings
    assert (finding.kind, stray.name in finding.where) == ("stray", True)


def test_the_same_ordinals_in_two_whole_shards_are_doubled(root: Path) -> None:
    """Two files of one range, both whole by themselves: the sum and the records tell."""
    double(shards(root)[0])
    report = verified(root)
    assert kinds(report) == ["count", "doubled", "unrecorded"]
    assert any("doubled" in finding.text for finding in report.findings)


def test_removed_rows_are_found(root: Path) -> None:
    """A shard rewritten without one row, under a matching name: it is not the recorded one."""
    path = shards(root)[0]
    table = read_shard(path)
    rewritten(path, table.slice(0, len(table) - 1))
    report = verified(root)
    assert {"damaged", "missing", "count"} <= set(kinds(report))


def test_a_gap_inside_a_part_is_found(root: Path) -> None:
    """Rows, footer and digest agree, and yet one step is stored twice and another is missing."""
    path = shards(root)[0]
    table = read_shard(path)
    t = table["t"].to_numpy().copy()
    t[1] = t[0]
    rewritten(
        path,
        table.set_column(table.schema.get_field_index("t"), table.schema.field("t"), pa.array(t)),
    )
    found = [finding.text for finding in verified(root).findings if finding.kind == "damaged"]
    assert found == ["ordinal 0: expected each step once, without gaps"]


def test_lost_rows_of_the_journal_are_found(root: Path) -> None:
    """A row that disappears with an open episode's steps: acknowledged, and nowhere."""
    database = sqlite3.connect(root / "journal" / "journal.db")
    with database:
        database.execute("DELETE FROM rows")
    database.close()
    assert {"journal", "count"} & set(kinds(verified(root)))


STATE = ("totals", "done", "counters", "finished:", "idem:", "inst:")


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root whose journal has every kind of state, written in several turns."""
    root = tmp_path_factory.mktemp("stateful") / "root"
    declare(root, seal_seconds=0.01)
    step = {"obs": [0.5] * 4, "action": 1}
    for run in range(2):
        with CollectorProcess(root) as collector:
            for _ in range(2):
                _, started = collector.post("/v1/instances")
                name = f"{started['instance']}"
                first = {"type": "start", "episode_id": name, "start": 0}
                events = [first, {"type": "log_action", "episode_id": name, "seq": 1, **step}]
                events.append({"type": "end", "episode_id": name, "seq": 2})
                collector.post("/v1/events", {"instance": name, "events": events})
                key = {"idempotency-key": "k"}
                collector.post("/v1/episodes", {"episode_id": f"keyed {name}"}, **key)
                collector.post(f"/v1/episodes/keyed {name}/log_action".replace(" ", "%20"), step)
            collector.settle(2 * (run + 1))
            assert collector.stop() == 0
    return root


@pytest.mark.parametrize("name", STATE)
def test_journal_state_that_is_gone_is_found(stateful: Path, tmp_path: Path, name: str) -> None:
    """Lost ids, keys and instances are detected, also live and after later work."""
    assert verified(stateful).findings == ()
    root = tmp_path / "root"
    shutil.copytree(stateful, root)
    with contextlib.closing(sqlite3.connect(root / "journal" / "journal.db")) as database:
        found = database.execute(
            "DELETE FROM state WHERE key = (SELECT min(key) FROM state WHERE key LIKE ?)",
            (f"{name}%",),
        )
        assert found.rowcount == 1
        database.commit()
    assert kinds(verified(root)) == ["journal"]
    if name not in ("finished:", "inst:"):
        return
    with CollectorProcess(root) as collector:
        collector.post("/v1/events", batch("later", STEPS, end=True))
        assert kinds(verified(root)) == ["journal"]
        assert collector.stop() == 0
    assert kinds(verified(root)) == ["journal"]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with an open episode of five steps, of which two parts are in a shard."""
    root = tmp_path_factory.mktemp("cut") / "root"
    declare(root, seal_seconds=0.01, part_steps=2)
    with CollectorProcess(root) as collector:
        collector.post("/v1/events", batch("long", 5, end=False))
        collector.settle(2)
        assert collector.stop() == 0
    assert verified(root).findings == ()
    return root


def counted(root: Path, change: Callable[[dict[str, int]], None]) -> None:
    """Change how many entries the journal's state is said to have."""
    with contextlib.closing(sqlite3.connect(root / "journal" / "journal.db")) as database:
        (blob,) = database.execute("SELECT value FROM state WHERE key = 'totals'").fetchone()
        totals = json.loads(blob)
        change(totals["kept"])
        data = json.dumps(totals).encode()
        sealed = (data, checksum("totals", data))
        database.execute("UPDATE state SET value = ?, checksum = ? WHERE key = 'totals'", sealed)
        database.commit()


def test_the_cut_of_an_open_episode_that_is_gone_is_told_at_the_start(
    cut: Path, tmp_path: Path
) -> None:
    """Steps that may be sealed twice because this entry is missing are reported."""
    root = tmp_path / "root"
    shutil.copytree(cut, root)
    with contextlib.closing(sqlite3.connect(root / "journal" / "journal.db")) as database:
        assert database.execute("DELETE FROM state WHERE key LIKE 'carry:%'").rowcount == 1
        database.commit()
    assert "journal" in kinds(verified(root))
    for _ in range(2):  # for good, whatever is recorded since
        with CollectorProcess(root) as collector:
            account = journal_account(root)
            assert account is not None
            assert account.damage == (
                "1 cuts of open episodes are missing: their steps may be sealed again, or lost",
            )
            assert collector.stop() == 0


def test_a_cut_is_counted_as_long_as_its_episode_is_open(cut: Path, tmp_path: Path) -> None:
    """The episode's end removes the entry, and nothing is reported."""
    root = tmp_path / "root"
    shutil.copytree(cut, root)
    with CollectorProcess(root) as collector:
        end = {"type": "end", "episode_id": "long"}
        assert collector.post("/v1/events", {"events": [end]})[0] == 200
        collector.settle(5)
        assert collector.stop() == 0
    assert verified(root).findings == ()
    seen: list[int] = []
    counted(root, lambda kept: seen.append(kept["carry:"]))
    assert seen == [0]


def test_damage_that_a_start_has_dealt_with_is_still_told(root: Path) -> None:
    """Acknowledged rows are lost, although the journal that continues is sound."""
    database = root / "journal" / "journal.db"
    database.write_bytes(b"nothing" * 100)
    SqliteJournal.open(root / "journal").close()
    report = verified(root)
    assert [finding.kind for finding in report.findings] == ["journal"]
    assert report.findings[0].text.startswith("damaged-1: up to")


def test_a_running_collector_tells_of_past_and_present_damage(root: Path) -> None:
    """Damage set aside by an earlier start does not hide damage found by the present one."""
    past = root / "journal" / "damaged-1"
    past.mkdir()
    (past / "report.json").write_text('{"missing_rows": 3, "reason": "a flipped bit"}')
    database = sqlite3.connect(root / "journal" / "journal.db")
    with database:
        database.execute("UPDATE rows SET checksum = x'00'")
    database.close()
    with CollectorProcess(root):
        account = journal_account(root)
        assert account is not None
        assert account.live
        damage = "; ".join(account.damage)
    assert "damaged-1: up to 3" in damage
    assert "do not match their checksum" in damage


@pytest.mark.parametrize("live", [False, True])
def test_a_damaged_record_of_a_shard_is_found(root: Path, live: bool) -> None:
    """It stops neither the account nor the collector that gives it."""
    with contextlib.closing(sqlite3.connect(root / "journal" / "journal.db")) as database:
        assert database.execute("UPDATE shards SET rows = rows + 1 WHERE plan_id = 0").rowcount == 1
        database.commit()
    with CollectorProcess(root) if live else contextlib.nullcontext() as collector:
        account = journal_account(root)
        assert account is not None
        assert account.damage == ("records of shards that do not match their checksum: 1",)
        assert account.records
        assert 0 not in [record.plan_id for record in account.records]
        report = verified(root)
        assert {"journal", "unrecorded"} <= set(kinds(report))
        if collector is not None:
            status, _ = collector.post("/v1/events", batch("after", STEPS, end=True))
            assert status == 200
            assert collector.stop() == 0


def test_a_forgotten_record_is_found(root: Path) -> None:
    """A shard that the journal does not know was not written by it."""
    database = sqlite3.connect(root / "journal" / "journal.db")
    with database:
        database.execute("DELETE FROM shards WHERE plan_id = (SELECT max(plan_id) FROM shards)")
    database.close()
    assert kinds(verified(root)) == ["unrecorded"]


def test_ordinals_that_were_given_and_written_nowhere_are_a_hole(root: Path) -> None:
    """The stream's counter is ahead of its records and plans."""
    database = sqlite3.connect(root / "journal" / "journal.db")
    with database:
        ((stream, end, _),) = database.execute("SELECT * FROM streams").fetchall()
        sealed = (end + 2, checksum(stream, end + 2))
        database.execute("UPDATE streams SET next = ?, checksum = ?", sealed)
    database.close()
    (finding,) = verified(root).findings
    assert (finding.kind, finding.text) == ("hole", f"ordinals {end}-{end + 1} are in no shard")


def test_a_plan_whose_shard_is_written_and_not_recorded_counts_once(root: Path) -> None:
    """Killed between the two steps of sealing: the file is there, and so are the journal's rows."""
    with CollectorProcess(root) as collector:
        collector.post("/v1/events", batch("last", STEPS, end=True))
        collector.kill()
    report = verified(root)
    assert report.findings == ()
    assert report.acknowledged is not None
    assert report.acknowledged == (2 * EPISODES + 1) * STEPS + OPEN_STEPS
    assert report.in_shards + report.in_journal == report.acknowledged


def test_weights_that_are_missing_or_damaged_are_found(root: Path) -> None:
    """Every version, and what the pointer names."""
    version = root / "weights" / "default" / "versions" / "1"
    data = version / "weights.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"!")
    assert kinds(verified(root)) == ["weights"]
    data.unlink()
    assert kinds(verified(root)) == ["weights"]
    shutil.rmtree(version)
    (finding,) = verified(root).findings
    assert finding.text == "version 1 is live, but not there"


def test_versions_that_a_backup_took_away_are_named(root: Path) -> None:
    """Versions that a restored backup lacks are named, also once a later one is live, since shards
    have steps acted by them."""
    copy, weights = root.parent / "copy", root / "weights"
    shutil.copytree(weights, copy)
    store = weights_under(root)
    for lineage in ({"a": [[0, 0]]}, {"a": [[0, 1]]}):
        store.publish(candidate(root, lineage))
    shutil.rmtree(weights)
    copy.rename(weights)
    assert "version 3 and generation 3 were given" in "; ".join(verified(root).notes)
    store.publish(candidate(root, {"a": [[0, 2]]}))
    (note,) = [note for note in verified(root).notes if "versions" in note]
    assert "versions 2-3 were published and are missing here" in note


def candidate(root: Path, lineage: dict[str, list[list[int]]]) -> str:
    weights = {"pi.0.weight": np.zeros((2, 4), np.float32)}
    store = weights_under(root)
    return store.add_candidate(weights, spec={}, metrics={}, lineage=lineage)


def publish(root: Path, lineage: dict[str, list[list[int]]]) -> None:
    """Make a version live that was trained on these ordinals."""
    weights_under(root).publish(candidate(root, lineage))


def test_versions_of_which_none_is_live_any_more_are_found(root: Path) -> None:
    """A version that followed another one says that one was live; a lone first one may wait."""
    live = root / "weights" / "default" / "live.json"
    copy = live.with_name("live.copy.json")
    pointer = live.read_bytes()
    live.unlink()
    copy.unlink()
    report = verified(root)
    assert report.findings == ()
    assert "none was live yet" in "; ".join(report.notes)
    live.write_bytes(pointer)
    publish(root, {})
    assert verified(root).findings == ()
    live.unlink()
    copy.unlink()
    (finding,) = verified(root).findings
    assert (finding.kind, finding.where) == ("weights", "weights/default/live.json")
    assert finding.text == "expected a file that names the live one of versions 1-2, got no file"


@pytest.mark.parametrize("name", ["live.json", "live.copy.json"])
def test_a_damaged_pointer_is_found_and_the_rest_is_held_against_its_copy(
    root: Path, name: str
) -> None:
    path = root / "weights" / "default" / name
    path.write_bytes(path.read_bytes()[:-9])
    (finding,) = verified(root).findings
    assert (finding.kind, finding.where) == ("weights", f"weights/default/{name}")
    assert "a trainer, publish, rollback and resume write it anew" in finding.text
    publish(root, {})
    assert verified(root).findings == ()


def test_a_canary_is_looked_at_as_what_is_live_is(root: Path) -> None:
    """A canary's files and the rows it was trained on must exist, as for the live version."""
    (stream,) = (path.name for path in (root / "shards").iterdir())
    store = weights_under(root)
    number = store.promote(candidate(root, {stream: [[0, 99]]}))
    store.set_live(1, canary=(number, 0.5))
    (finding,) = verified(root).findings
    assert (finding.kind, "version 2 was trained on ordinals" in finding.text) == ("weights", True)
    shutil.rmtree(root / "weights" / "default" / "versions" / "2")
    (finding,) = verified(root).findings
    assert finding.text == "version 2 is the canary, but not there"


@pytest.mark.parametrize("schema", ["its own", "another"])
@pytest.mark.parametrize("journal", ["there", "lost"])
def test_a_lineage_of_ordinals_that_never_were_is_found(
    root: Path, schema: str, journal: str
) -> None:
    """The live version was trained on rows that collectors of this root have counted."""
    (stream,) = (path.name for path in (root / "shards").iterdir())
    named = stream if schema == "its own" else f"{stream.rpartition('-')[0]}-0123456789ab"
    publish(root, {named: [[900, 901]]})
    if journal == "lost":
        shutil.rmtree(root / "journal")
    (finding,) = verified(root).findings
    assert (finding.kind, f"ordinals 900-901 of {named}" in finding.text) == ("weights", True)


def lineage_texts(root: Path) -> tuple[list[str], str]:
    """(findings, notes)."""
    report = verified(root)
    return [finding.text for finding in report.findings], "; ".join(report.notes)


def test_a_lineage_of_parts_that_wait_for_their_shard_is_noted(root: Path) -> None:
    """A trainer in the collector's process reads parts once they are durable. Ordinals behind
    those are a finding, of a collector that runs too."""
    declare(root, seal_seconds=3600.0)
    (stream,) = (path.name for path in (root / "shards").iterdir())
    first = 2 * EPISODES
    waits = f"was trained on ordinals {first}-{first + 1} of {stream}, which are in the journal"
    beyond = f"was trained on ordinals {first + 2} of {stream}, which are in no whole shard"
    with CollectorProcess(root) as collector:
        for name in ("w-0", "w-1"):
            assert collector.post("/v1/events", batch(name, STEPS, end=True))[0] == 200
        publish(root, {stream: [[0, first + 1]]})
        findings, notes = lineage_texts(root)
        assert (findings, waits in notes) == ([], True)
        publish(root, {stream: [[0, first + 2]]})
        findings, notes = lineage_texts(root)
        assert (findings, waits in notes) == ([f"version 3 {beyond}"], True)
        collector.kill()
    findings, notes = lineage_texts(root)
    assert (findings, waits in notes) == ([f"version 3 {beyond}"], True)
    publish(root, {stream: [[0, first + 1]]})
    assert lineage_texts(root)[0] == []
    declare(root)
    with CollectorProcess(root) as collector:
        pause = threading.Event()
        while (ledger := collector.get("/v1/ledger")[1])["waiting_steps"] or ledger["plans"]:
            pause.wait(0.02)
        assert collector.stop() == 0
    assert lineage_texts(root) == ([], "")


def test_a_lineage_of_parts_that_are_planned_and_not_written_is_noted(root: Path) -> None:
    """Killed between plan and shard; the writer that is stopped writes none before."""
    (stream,) = (path.name for path in (root / "shards").iterdir())
    with CollectorProcess(root) as collector:
        stopped = os.pidfd_open(collector.started_writer())
        signal.pidfd_send_signal(stopped, signal.SIGSTOP)
        assert collector.post("/v1/events", batch("planned", STEPS, end=True))[0] == 200
        pause = threading.Event()
        while not collector.get("/v1/ledger")[1]["plans"]:
            pause.wait(0.02)
        publish(root, {stream: [[0, 2 * EPISODES]]})
        findings, notes = lineage_texts(root)
        assert (findings, "which are in the journal" in notes) == ([], True)
        collector.kill()
    with os.fdopen(stopped), contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(stopped, signal.SIGKILL)  # it may not have asked to die, yet
    findings, notes = lineage_texts(root)
    assert (findings, "which are in the journal" in notes) == ([], True)


@pytest.mark.parametrize("journal", ["there", "lost"])
def test_a_lineage_over_another_root_is_noted_and_no_finding(root: Path, journal: str) -> None:
    """A trainer may read several roots, and anybody who may publish may say so."""
    publish(root, {"feedfeedfeed-0123456789ab": [[0, 1]]})
    if journal == "lost":
        shutil.rmtree(root / "journal")
    report = verified(root)
    assert report.findings == ()
    note = "ordinals 0-1 of feedfeedfeed-0123456789ab, which this root never had"
    assert note in "; ".join(report.notes)


def test_a_stream_whose_shards_are_all_gone_is_still_ours(root: Path) -> None:
    """A stream whose shards are all in the quarantine is known by them, also without a journal."""
    (stream,) = (path.name for path in (root / "shards").iterdir())
    shutil.move(root / "shards" / stream, root / "quarantine" / stream)
    shutil.rmtree(root / "journal")
    assert kinds(verified(root)) == ["weights"]


def test_leftovers_are_noted_and_no_finding(root: Path) -> None:
    """A half-written dot-file is what a killed writer leaves: reported, harmless."""
    left = shards(root)[0].with_name(".000000000099-000000000099-1.tmp")
    left.write_bytes(b"half")
    report = verified(root)
    assert report.findings == ()
    assert left.name in report.notes[0]


def test_shards_without_a_journal_are_checked_by_themselves(root: Path) -> None:
    """A copy of the shards alone: digests, footers and holes; counts are unknown."""
    shutil.rmtree(root / "journal")
    report = verified(root)
    assert (report.findings, report.acknowledged) == ((), None)
    shards(root)[0].unlink()
    assert kinds(verified(root)) == ["hole", "weights"]


def test_a_journal_whose_database_is_gone_is_found(root: Path) -> None:
    """The remaining files show that there was a database, so that its steps are not taken for
    stored."""
    for path in (root / "journal").glob(f"{DATABASE}*"):
        path.unlink()
    (finding,) = verified(root).findings
    assert (finding.kind, finding.where) == ("journal", "journal/high-water")
    assert "got none: what it held is lost" in finding.text


@pytest.fixture
def running(root: Path) -> Iterator[CollectorProcess]:
    with CollectorProcess(root) as collector:
        yield collector


def test_a_running_collector_is_asked_while_it_works(running: CollectorProcess) -> None:
    """Every step acknowledged by then is in one place, whatever the collector does meanwhile."""
    stop, before = threading.Event(), 0

    def log() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            running.post("/v1/events", batch(f"live-{number}", STEPS, end=number % 3 > 0))

    thread = threading.Thread(target=log)
    thread.start()
    try:
        for _ in range(5):
            report = verified(running.root)
            assert report.findings == ()
            assert report.acknowledged == report.in_shards + report.in_journal
            assert report.acknowledged > before
            before = report.acknowledged
            account = journal_account(running.root)
            assert account is not None
            listed = list_streams(running.root, {}, account)
            places = [one.rows for one in listed.streams] + [account.open_steps]
            assert sum(places) + (listed.being_written or 0) == account.accepted
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def passed_on(
    collector: CollectorProcess, meanwhile: Mapping[str, Callable[[], None]]
) -> Iterator[None]:
    """A proxy in front of a collector that runs a function once before it forwards a path."""
    left = dict(meanwhile)

    class PassOn(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            left.pop(self.path.partition("?")[0], lambda: None)()
            status, document = collector.get(self.path)
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Nothing."""

    file = collector.root / "journal" / ADDRESS
    with ThreadingHTTPServer(("127.0.0.1", 0), PassOn) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:  # written in place: the lock that proves the collector alive stays on it
            file.write_text(
                file.read_text().replace(f":{collector.port}", f":{server.server_port}")
            )
            yield
        finally:
            server.shutdown()
            thread.join()
    assert left == {}


def test_what_is_sealed_and_trained_on_while_a_collector_is_asked_is_newer(
    running: CollectorProcess,
) -> None:
    """Shards and versions that are made between the collector's ledger and the records are not
    reported as missing."""
    (stream,) = (path.name for path in (running.root / "shards").iterdir())

    def work() -> None:
        running.post("/v1/events", batch("meanwhile", STEPS, end=True))
        running.settle((2 * EPISODES + 1) * STEPS)
        publish(running.root, {stream: [[0, 2 * EPISODES]]})

    with passed_on(running, {"/v1/ledger/records": work}):
        report = verified(running.root)
    assert report.findings == ()
    newer, unserved = sorted(report.notes)
    assert newer == "1 shard is newer than the account, and whole"
    assert "serves nothing" in unserved  # weights without a spec, which no collector accepts
    assert report.in_journal == OPEN_STEPS


@pytest.mark.parametrize("plant", [Path.unlink, flip_a_byte, double])
def test_what_happens_under_a_running_collector_is_found(
    running: CollectorProcess, plant: Callable[[Path], None]
) -> None:
    """A shard that is gone, or changed, or there twice, without a restart."""
    assert verified(running.root).findings == ()
    plant(shards(running.root)[0])
    account = journal_account(running.root)
    assert account is not None
    assert account.live
    found = kinds(verified(running.root))
    expected = {Path.unlink: "missing", flip_a_byte: "damaged", double: "doubled"}[plant]
    assert expected in found


def test_a_file_beyond_a_running_collectors_account_is_looked_at(
    running: CollectorProcess,
) -> None:
    """A shard's copy under ordinals that were never given is damage, not a later shard."""
    first = shards(running.root)[0]
    copy = first.with_name("000000000900-000000000900" + first.name[25:])
    shutil.copyfile(first, copy)
    report = verified(running.root)
    assert [(found.kind, copy.name in found.where) for found in report.findings] == [
        ("damaged", True)
    ]


def test_whoever_has_the_lock_is_named_if_it_can_be_asked(root: Path) -> None:
    """The journal of a process that has the lock is not read; the error names that process."""
    journal = SqliteJournal.open(root / "journal")
    (root / "journal" / "address").unlink(missing_ok=True)
    with pytest.raises(JournalLocked, match=f"process {os.getpid()}"):
        journal_account(root)
    journal.close()


def test_a_stopped_collector_that_answers_nothing_is_named(
    running: CollectorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that is stopped by SIGSTOP is reported in plain words after some time without a
    byte."""
    monkeypatch.setattr("ingest.verification.LEDGER_SECONDS", 0.2)
    running.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(JournalLocked) as stopped:
            journal_account(running.root)
    finally:
        running.process.send_signal(signal.SIGCONT)
    assert f"process {running.process.pid} holds the journal" in str(stopped.value)
    assert str(stopped.value).endswith(f"{running.address}: no answer came in time")


def test_a_dead_collectors_address_is_not_asked(root: Path) -> None:
    """Another process at that address gets no connection and no token, also during an audit."""
    with CollectorProcess(root) as collector:
        port = collector.port
        collector.kill()
    lock = FileLock(root / "journal" / "lock")
    with socket.create_server(("127.0.0.1", port)) as stranger, lock:
        stranger.setblocking(False)
        with pytest.raises(JournalLocked, match="cannot be verified"):
            journal_account(root, token=T)
        with pytest.raises(BlockingIOError):
            stranger.accept()


def test_an_address_holds_as_long_as_its_collector(tmp_path: Path) -> None:
    """A lock that others may take, or another network, proves nothing about the address."""
    path = tmp_path / ADDRESS
    path.write_text("http://127.0.0.1:1\n")
    assert LiveAddress.of(tmp_path) is None
    lock = say_address(tmp_path, "http://127.0.0.1:2")
    assert lock is not None
    live = LiveAddress.of(tmp_path)
    assert live is not None
    with contextlib.closing(live):
        assert (live.address, live.holds()) == ("http://127.0.0.1:2", True)
        path.chmod(0o644)
        assert LiveAddress.of(tmp_path) is None
        path.chmod(0o600)
        whole = path.read_text()
        path.write_text("http://127.0.0.1:2\nanother 1\n")
        assert LiveAddress.of(tmp_path) is None
        path.write_text(whole)
        lock.release()
        assert not live.holds()
    assert LiveAddress.of(tmp_path) is None


def test_no_token_travels_in_clear_text(root: Path) -> None:
    """No token is sent to an address that is neither loopback nor TLS."""
    with FileLock(root / "journal" / "lock"):
        lock = say_address(root / "journal", "http://192.0.2.1:9")
        assert lock is not None
        with pytest.raises(JournalLocked, match="clear text"):
            journal_account(root, token=T)
        lock.release()


def test_only_quarantine_keeps_a_collector_out(root: Path) -> None:
    """While shards are audited a collector may start, unless shards may be moved."""

    def start(what: str, done: int, total: int | None) -> None:
        SqliteJournal.open(root / "journal").close()

    assert verified(root, on_progress=start).findings == ()
    with pytest.raises(JournalLocked, match=f"process {os.getpid()}"):
        verified(root, quarantine=True, on_progress=start)


def test_what_is_found_while_a_collector_starts_is_looked_at_again(root: Path) -> None:
    """A finding may be later work than the account; only one that persists is reported."""
    path = shards(root)[0]
    away = path.rename(root / path.name)
    assert kinds(verified(root)) == ["count", "missing", "weights"]
    with contextlib.ExitStack() as stack:

        def start(what: str, done: int, total: int | None) -> None:
            if not path.exists():
                away.rename(path)
                collector = stack.enter_context(CollectorProcess(root))
                collector.post("/v1/events", batch("meanwhile", STEPS, end=False))

        report = verified(root, on_progress=start)
        assert report.findings == ()
        assert report.in_journal == OPEN_STEPS + STEPS


FLAPPING = """
import pathlib, sys
path = pathlib.Path(sys.argv[1])
print("ready", flush=True)
while True:
    path.touch()
    path.unlink()
"""


def test_a_file_that_comes_and_goes_is_no_error(tmp_path: Path) -> None:
    """A collector that ends removes its write-ahead log during the audit."""
    path = tmp_path / f"{DATABASE}-wal"
    command = [sys.executable, "-c", FLAPPING, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as flapping:
        try:
            assert flapping.stdout is not None
            flapping.stdout.readline()
            seen = {len(stamps(tmp_path)) for _ in range(20_000)}
        finally:
            flapping.kill()
    assert seen == {0, 1}


def test_the_command_answers_with_its_status(root: Path) -> None:
    """0 and a sentence when all is well; 1 and the list when not; one JSON line on request."""
    good = process("verify", "--root", root)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.endswith("Every step is accounted for exactly once.\n")
    gone = shards(root)[0]
    gone.unlink()
    bad = headrace("verify", "--root", root)
    assert bad.returncode == 1
    assert f"missing: shards/{gone.parent.name}/{gone.name}" in bad.stdout
    listed = headrace("verify", "--root", root, "--json")
    (line,) = listed.stdout.splitlines()
    assert json.loads(line)["ok"] is False
    assert listed.returncode == 1


def test_without_a_journal_the_command_claims_nothing_about_missing_steps(root: Path) -> None:
    """A copy of the shards alone may lack steps that were acknowledged."""
    shutil.rmtree(root / "journal")
    bare = headrace("verify", "--root", root)
    assert bare.returncode == 0
    assert bare.stdout.endswith("it is unknown whether steps are missing.\n")


def test_the_command_asks_a_running_collector(running: CollectorProcess) -> None:
    """Status 0; damaged shards are not moved under it."""
    result = headrace("verify", "--root", running.root)
    assert (result.returncode, result.stderr) == (0, "")
    refused = headrace("verify", "--root", running.root, "--quarantine")
    assert refused.returncode == 2
    assert "a root that nothing else uses" in refused.stderr
    assert "Traceback" not in refused.stderr
