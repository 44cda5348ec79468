"""Retention and erasure: whole episodes leave the shards, and everything else stays as it was.

Also of `storage.maintenance.episodes`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from storage.experience.episode import Part
from storage.journal.records import ShardRecord
from storage.maintenance import merging, plans
from storage.maintenance.compaction import plan_compaction
from storage.maintenance.episodes import StoredEpisodes
from storage.maintenance.plans import Applied, Discard, MaintenancePlan, apply, load, save
from storage.maintenance.removal import Requests, plan_erasure, plan_retention, read_requests
from storage.objects.opening import objects_at
from storage.shards.replacements import REPLACED, Replacements, replaced_shards
from storage.shards.shard import read_shard
from storage.verify.audit import JournalAccount, Trained, verify
from tests.storage.maintenance.test_compaction import (
    DAY,
    Killed,
    Mortal,
    MortalFolder,
    MortalMemory,
    check_each_row_once,
    compact,
    reader_of,
    shard_files,
    verified,
    write_each,
)
from tests.storage.reading.test_shard_reader import COLLECTOR, part, read_all, rows_of, stream_of
from tests.storage.verify.test_audit import weights_under

KEY = b"k" * 32
ALICE = json.dumps({"user": "alice"})
NOW = 1e9


def log(root: Any, *, tags: str = ALICE, per_shard: int = 4) -> list[Part]:
    """Twelve episodes of one part and one of two parts, five apart; e11 continues e2.

    e0, e1 and e5 are alice's, a second apart; e20 has its parts in different shards.
    """
    mine = {0, 1, 5}
    parts = []
    for at in range(14):
        more: dict[str, Any] = {"tags": tags if at in mine else '{"user":"bob"}'}
        if at == 11:
            more["continues"] = "e2"
        if at in (3, 13):
            first = at == 3
            parts.append(
                part(at, 3, episode=20, t0=0 if first else 3, ended=None if first else "truncated")
            )
            parts[-1] = replace(parts[-1], episode_ordinal=3)
        else:
            parts.append(part(at, 3, final=at % 2 == 0, **more))
    write_each(root, [parts[at : at + per_shard] for at in range(0, len(parts), per_shard)])
    return parts


def names_of(parts: list[Part], gone: set[str]) -> list[Part]:
    return [one for one in parts if one.episode_id not in gone]


def erasure(root: Any, *ids: str, **tags: str) -> MaintenancePlan:
    requests = Requests(tuple(ids), tuple(tags.items()))
    return plan_erasure(root, None, requests.marks(KEY), KEY).plan


def run(root: Any, plan: MaintenancePlan, now: float = NOW) -> Applied:
    return apply(
        root, load(root, save(root, plan), plan.command), by="me", why="asked", clock=lambda: now
    )


def test_erased_episodes_are_gone_from_every_file(tmp_path: Path) -> None:
    """Nothing of alice's is left, in replaced shards neither; all other rows are as they were; the
    account knows the difference."""
    parts = log(tmp_path)
    compact(tmp_path, aim_bytes=30_000)
    before = pa.concat_tables(map(read_shard, shard_files(tmp_path)))
    assert replaced_shards(tmp_path)
    plan = erasure(tmp_path, user="alice")
    assert sum(isinstance(step, Discard) for step in plan.steps) == 2
    assert (
        b"alice" not in (tmp_path / "maintenance" / save(tmp_path, plan) / "plan.json").read_bytes()
    )
    applied = run(tmp_path, plan)
    assert applied.removed == 9
    rest = names_of(parts, {"e0", "e1", "e5"})
    check_each_row_once(tmp_path, rest)
    kept = before.filter(
        pa.array([name not in ("e0", "e1", "e5") for name in before["eps_id"].to_pylist()])
    )
    assert pa.concat_tables(map(read_shard, shard_files(tmp_path))).equals(kept)
    for path in (tmp_path / "shards").glob("*/*"):
        with pq.ParquetFile(path, read_dictionary=["tags", "eps_id"]) as file:
            for name in ("tags", "eps_id"):
                texts = file.read(columns=[name]).column(0)
                assert not {"e0", ALICE} & {
                    t for c in texts.chunks for t in c.dictionary.to_pylist()
                }
    assert run(tmp_path, plan) == Applied()


def removed_rows(root: Any) -> int:
    """How many rows were removed, by the records that came into effect."""
    objects = objects_at(root)
    records = Replacements.of(objects).removed(
        lambda stream, name: objects.status(f"shards/{stream}/{name}") is not None
    )
    return sum(record.removed_rows for record, _ in records)


@pytest.mark.parametrize(
    ("kind", "command", "anew"), [("folder", "erase", False), ("memory", "retain", True)]
)
def test_a_removal_that_is_killed_at_any_step_is_finished_by_the_next(
    kind: str, command: str, anew: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every kill no row is doubled, and the account adds up; the same plan, or a new one,
    finishes."""
    rename = os.rename

    def renamed(before: Any, after: Any) -> None:
        Mortal.count()
        rename(before, after)

    for steps in itertools.count():
        root = MortalMemory() if kind == "memory" else MortalFolder(tmp_path / str(steps))
        parts = log(root, per_shard=2)
        rest = names_of(parts, {"e0", "e1", "e5"})
        plan = erasure(root, user="alice") if command == "erase" else retention(root, "e0", "e5")
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            patch.setattr(plans.os, "rename", renamed)
            Mortal.live(steps)
            run(root, plan)
            break
        Mortal.live(10**9)
        assert set(rows_of(rest)) <= set(read_all(reader_of(root))) <= set(rows_of(parts))
        run(root, retention(root, "e0", "e5") if anew else plan)
        check_each_row_once(root, rest)
        assert removed_rows(root) == 9
        assert bool(replaced_shards(root)) is (command == "retain")
        run(root, plan_compaction(root, None, now=NOW + 2 * DAY), NOW + 2 * DAY)
        check_each_row_once(root, rest)
    Mortal.live(10**9)
    assert steps > 10


def retention(root: Any, *ids: str) -> MaintenancePlan:
    """As `retain --where` would plan it for e0, e1 and e5, without SQL."""
    found = StoredEpisodes.of(root, None)
    return MaintenancePlan("retain", found.steps(found.named({*ids, "e1"})))


def test_old_episodes_leave_whole(tmp_path: Path) -> None:
    """An episode is as old as its latest step, with those that continue it; one without an end in
    a shard stays; a shard without rows disappears."""
    parts = log(tmp_path)
    days = 1e-6 * 4.5e6 / DAY  # until e5, in days: episode n begins n seconds after the epoch
    plan = plan_retention(tmp_path, None, keep_days=0.0 + days, now=2 * days * DAY)
    applied = run(tmp_path, plan)
    gone = {"e0", "e1", "e4"}  # e2 is continued by e11, part 3 belongs to e20
    assert applied.removed == 9
    check_each_row_once(tmp_path, names_of(parts, gone))
    assert len(replaced_shards(tmp_path)) == 2
    assert plan_retention(tmp_path, None, keep_days=1.0, now=5.0).steps == ()
    later = plan_retention(tmp_path, None, keep_days=1.0, now=11 * DAY)
    assert run(tmp_path, later).removed == 3 * 11
    assert (shard_files(tmp_path), verified(tmp_path).findings) == ([], ())


def test_the_oldest_episodes_leave_for_a_size(tmp_path: Path) -> None:
    """As many as it takes, by their share of the files."""
    parts = log(tmp_path)
    total = sum(path.stat().st_size for path in shard_files(tmp_path))
    assert plan_retention(tmp_path, None, max_bytes=total).steps == ()
    assert run(tmp_path, plan_retention(tmp_path, None, max_bytes=total // 2)).removed == 24
    check_each_row_once(tmp_path, [one for one in parts if one.ordinal in (2, 3, 10, 11, 12, 13)])


def test_sql_names_the_columns_of_shards(tmp_path: Path) -> None:
    """Whole episodes with a step for which the condition holds; errors say what DuckDB says."""
    parts = log(tmp_path)
    plan = plan_retention(tmp_path, None, where="t >= 3 OR tags LIKE '%alice%'")
    assert run(tmp_path, plan).removed == 15
    check_each_row_once(tmp_path, names_of(parts, {"e0", "e1", "e5", "e20"}))
    with pytest.raises(ValueError, match=r"--where: .*no_such"):
        plan_retention(tmp_path, None, where="no_such = 1")
    with pytest.raises(ValueError, match="--where: "):
        plan_retention(tmp_path, None, where="1); DROP TABLE steps; --")


def test_names_are_found_in_both_forms_of_unicode(tmp_path: Path) -> None:
    """A request may spell an accent in another way than the log."""
    log(tmp_path, tags=json.dumps({"user": "Zoe\u0308"}))
    assert run(tmp_path, erasure(tmp_path, user="Zo\u00eb")).removed == 9


def test_what_cannot_be_erased_is_refused(tmp_path: Path) -> None:
    """Everything needs a word; a damaged shard is named; nothing is changed."""
    log(tmp_path)
    everything = Requests(tags=(("user", "alice"), ("user", "bob")), episodes=("e20",))
    with pytest.raises(ValueError, match=r"all 42 rows .*--yes-all"):
        plan_erasure(tmp_path, None, everything.marks(KEY), KEY)
    assert plan_erasure(tmp_path, None, everything.marks(KEY), KEY, all_rows=True).rows == 42
    assert erasure(tmp_path, user="carol").steps == ()
    path = shard_files(tmp_path)[1]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=rf"1 shard cannot be searched, such as .*{path.name}"):
        erasure(tmp_path, user="alice")
    assert read_requests(["e1\n", "\n", "tag:user=a=b\n"], "f").tags == (("user", "a=b"),)
    with pytest.raises(ValueError, match="f, line 2: expected key=value"):
        read_requests(["e1", "tag:user"], "f")


def test_a_full_disk_leaves_a_removal_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an error, with no incomplete file; the same plan goes on once there is space."""
    parts = log(tmp_path)
    plan = erasure(tmp_path, user="alice")
    write, shards = merging.parquet_writer, list[Path]()

    def full(path: Path, *given: Any) -> Any:
        shards.append(path)
        if len(shards) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *given)

    monkeypatch.setattr(merging, "parquet_writer", full)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, plan)
    assert not list(tmp_path.rglob("*.tmp"))
    assert verified(tmp_path).findings == ()
    assert run(tmp_path, plan).removed == 3
    check_each_row_once(tmp_path, names_of(parts, {"e0", "e1", "e5"}))


def test_versions_that_were_trained_on_the_rows_are_named(tmp_path: Path) -> None:
    """Those whose lineage has an erased ordinal, and no others; a damaged one hides none."""
    log(tmp_path)
    store = weights_under(tmp_path)
    for ranges in ([[2, 4]], [[4, 6]], [[6, 9]]):
        weights = {"pi.0.weight": np.full((2, 4), ranges[0][0], np.float32)}
        lineage = {stream_of(): ranges}
        store.publish(store.add_candidate(weights, spec={}, metrics={}, lineage=lineage))
    marks = [*Requests(tags=(("user", "alice"), ("user", "nobody"))).marks(KEY)]
    found = plan_erasure(tmp_path, None, marks, KEY)
    assert (found.trained, len(found.unmatched)) == ({"default": [2]}, 1)
    manifest = tmp_path / "weights" / "default" / "versions" / "1" / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(b"{")
    assert plan_erasure(tmp_path, None, marks, KEY).trained == found.trained
    manifest.write_bytes(whole)
    run(tmp_path, found.plan)
    assert verified(tmp_path).findings == ()


def test_a_plan_follows_a_shard_that_was_compacted_meanwhile(tmp_path: Path) -> None:
    """Ordinals are erased where they are now."""
    parts = log(tmp_path)
    plan = erasure(tmp_path, "e5", "e20")
    compact(tmp_path)
    assert run(tmp_path, plan).removed == 9
    check_each_row_once(tmp_path, names_of(parts, {"e5", "e20"}))


def test_a_damaged_replaced_shard_is_given_up_for_an_erasure(tmp_path: Path) -> None:
    """It cannot be searched, and no command moves it away. Its rows are in another shard."""
    parts = log(tmp_path)
    compact(tmp_path)
    path = next(tmp_path.rglob(f"*{REPLACED}"))
    path.write_bytes(path.read_bytes()[:-9])
    marks = [*Requests(("e13", "e20")).marks(KEY)]
    with pytest.raises(ValueError, match=rf"1 shard cannot be .*{path.name}.* and replaced ones"):
        plan_erasure(tmp_path, None, marks, KEY)
    run(tmp_path, plan_erasure(tmp_path, None, marks, KEY, with_damaged=True).plan)
    check_each_row_once(tmp_path, names_of(parts, {"e20"}))
    assert not path.exists()


@pytest.mark.parametrize("suffix", ["", REPLACED])
@pytest.mark.parametrize("compacted", [False, True])
def test_a_file_that_a_backup_brings_back_is_found(
    tmp_path: Path, suffix: str, compacted: bool
) -> None:
    """Under its old name, which readers find, and as a replaced one; the next erasure ends it."""
    log(tmp_path)
    path = shard_files(tmp_path)[0]
    backup = path.read_bytes()
    if compacted:
        compact(tmp_path)
    plan = erasure(tmp_path, user="alice")
    run(tmp_path, plan)
    path.with_name(path.name + suffix).write_bytes(backup)
    assert [(one.kind, Path(one.where).name) for one in verified(tmp_path).findings] == [
        ("erased", path.name + suffix)
    ]
    run(tmp_path, erasure(tmp_path, user="alice"))
    assert verified(tmp_path).findings == ()
    assert not path.exists()


def test_a_record_of_rows_that_are_still_there_is_found(tmp_path: Path) -> None:
    """A tombstone without its rows is no erasure."""
    log(tmp_path)
    files = {path: path.read_bytes() for path in shard_files(tmp_path)}
    run(tmp_path, erasure(tmp_path, user="alice"))
    (tmp_path / "maintenance").rename(tmp_path / "kept")
    for path in shard_files(tmp_path):
        path.unlink()
    for path, data in files.items():
        path.write_bytes(data)
    records = (tmp_path / "kept").glob("*/*/*.json")
    for one in records:  # as if the shards had been restored from a backup, under other names
        document = json.loads(one.read_bytes()) | {"old": ["another"], "new": ""}
        place = tmp_path / "maintenance" / "p" / document["stream"] / one.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(document))
    assert {found.kind for found in verified(tmp_path).findings} == {"erased"}


def test_quarantine_is_counted_and_searched(tmp_path: Path) -> None:
    """A compacted shard that was set aside counts by its record. Erasure has to read every shard,
    or is told to give damaged ones up. It deletes those in quarantine whole, and counts the rows.
    """
    log(tmp_path)
    names = [path.name for path in shard_files(tmp_path)]
    account = JournalAccount(
        collector_id=COLLECTOR,
        accepted=42,
        records=tuple(
            ShardRecord(n, stream_of(), *ends, name, "0" * 64, rows, 1)
            for n, (name, ends, rows) in enumerate(
                zip(names, [(0, 3), (4, 7), (8, 11), (12, 13)], [12, 12, 12, 6], strict=True)
            )
        ),
        plans={},
        next_ordinals={stream_of(): 14},
        waiting_steps=0,
        open_steps=0,
        open_episodes={},
    )
    compact(tmp_path)
    (only,) = shard_files(tmp_path)
    whole = only.read_bytes()
    only.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert verify(tmp_path, account, Trained.of(tmp_path), quarantine=True).quarantined
    report = verify(tmp_path, account, Trained.of(tmp_path))
    assert (report.findings, report.in_quarantine) == ((), 42)
    marks = [*Requests(("e0",)).marks(KEY)]
    with pytest.raises(ValueError, match=f"1 shard cannot be .*, such as quarantine/.*{only.name}"):
        plan_erasure(tmp_path, account, marks, KEY)
    given_up = plan_erasure(tmp_path, account, marks, KEY, with_damaged=True).plan.steps
    assert {step.rows for step in given_up if isinstance(step, Discard)} == {0, 42}
    aside = tmp_path / "quarantine" / stream_of() / only.name
    aside.write_bytes(whole)  # mended
    aside.with_name(f"{only.name}.sha256").write_text(hashlib.sha256(whole).hexdigest() + "  x\n")
    plan = plan_erasure(tmp_path, account, marks, KEY).plan
    assert {step.rows for step in plan.steps if isinstance(step, Discard)} == {0, 42}
    assert run(tmp_path, plan).removed == 42
    report = verify(tmp_path, account, Trained.of(tmp_path))
    assert (report.findings, report.erased) == ((), 42)


def test_shards_are_joined_over_what_was_removed(tmp_path: Path) -> None:
    """A gap that a record explains keeps no neighbours apart."""
    parts = log(tmp_path)
    run(tmp_path, retention(tmp_path, "e4", "e8"))  # the first parts of two shards, and e1
    (made,) = compact(tmp_path).made
    assert made.ordinals == ((0, 0), (2, 3), (5, 7), (9, 13))
    check_each_row_once(tmp_path, names_of(parts, {"e1", "e4", "e8"}))
