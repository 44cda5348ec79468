"""`backup` beside a collector and `restore`: what the journal acknowledged is there, once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ingest.backup import MARK, backup, restore
from ingest.verification import verified
from storage.errors import JournalBehind, NewerFormat
from storage.maintenance.compaction import plan_compaction
from storage.maintenance.plans import apply
from storage.reading.shard_reader import ShardReader
from tests.collector_process import CollectorProcess, declare
from tests.ingest.collector.test_adoption import log, steps, stored


def test_backups_of_a_running_collector_are_restored(tmp_path: Path) -> None:
    """A first backup and a second one that copies only what is new; maintenance in between.

    Each is restored to a folder of its own: `verify` accounts for every step that was acknowledged
    before; its collector goes on under a new id; a reader that knew the old reads only the rest.
    """
    root, target, again = tmp_path / "root", tmp_path / "backup", tmp_path / "again"
    declare(root, seal_seconds=0.1, episode_timeout=600.0)
    (root / "keys").mkdir(mode=0o700)
    (root / "keys" / "note.json").write_text("{}")
    (root / "keys" / "note.json").chmod(0o600)
    with CollectorProcess(root) as collector:
        for number in range(3):
            log(collector, f"a{number}", steps=2, end=True)
            collector.settle(2 * (number + 1))
        log(collector, "open", steps=2)
        first = backup(root, target)
        assert first.copied > 3
        assert restore(target, tmp_path / "first").adopted is not None
        apply(root, plan_compaction(root, None, grace_seconds=0.0), by="me", why="")
        log(collector, "b", steps=3, end=True)
        collector.settle(9)
        second = backup(root, target)
        assert second.removed == 3  # the joined shards
        assert 0 < second.copied < 6
        assert second.kept > 1
        log(collector, "late", steps=2, end=True)
        log(collector, "open", first=2, steps=1)
        collector.settle(11)
        done = restore(target, again)
        with ShardReader(root, batch_size=50, training_disabled=True) as reader:
            assert sum(batch.count for batch in reader) == 11
            position = reader.state_dict()
    before = steps("a0", 2) | steps("a1", 2) | steps("a2", 2)
    assert stored(tmp_path / "first") == before | steps("open", 2)
    assert stored(again) == before | steps("b", 3) | steps("open", 2)
    assert done.adopted is not None
    assert (done.adopted.written, done.adopted.closed) == (2, 1)
    for place, count in ((tmp_path / "first", 8), (again, 11)):
        report = verified(place)
        assert (report.findings, report.acknowledged) == ((), count)
        assert not (place / MARK).exists()
    assert (again / "keys").stat().st_mode & 0o777 == 0o700
    assert (again / "keys" / "note.json").stat().st_mode & 0o777 == 0o600
    with CollectorProcess(again) as collector:
        assert log(collector, "open", first=2, steps=1) == ["broken"]
        log(collector, "next", steps=2, end=True)
        collector.settle(13)
    with ShardReader(again, batch_size=50, training_disabled=True) as reader:
        reader.load_state_dict(position)
        found = sorted(name for batch in reader for name in batch["eps_id"].tolist())
    assert found == ["next", "next", "open", "open"]  # no ordinal was given again


def test_an_interrupted_backup_is_the_earlier_one(tmp_path: Path) -> None:
    """Until the mark names the new journal, restoring gives the earlier one, with later shards.

    An interrupted restore is finished by the same command.
    """
    root, target, there = tmp_path / "root", tmp_path / "backup", tmp_path / "there"
    declare(root, seal_seconds=0.05)
    with CollectorProcess(root) as collector:
        log(collector, "a", steps=2, end=True)
        collector.settle(2)
        backup(root, target)
        mark = (target / MARK).read_bytes()
        journal = next(target.glob("journal-*"))
        shutil.copytree(journal, tmp_path / "kept")
        log(collector, "b", steps=2, end=True)
        collector.settle(4)
    half = target / "shards" / ".erased-since.parquet.tmp"
    half.write_bytes(b"as killed while it was copied")
    # a shard, the counts of dropped steps, and the history of rewards
    assert backup(root, target).copied == 3
    assert not half.exists()
    shutil.copytree(tmp_path / "kept", journal)
    (target / MARK).write_bytes(mark)  # as killed before it was replaced
    there.mkdir()
    shutil.copytree(target / "shards", there / "shards")
    shutil.copytree(journal, there / "journal-restored")
    (there / MARK).write_bytes(mark)  # as killed before `adopt`
    done = restore(target, there).adopted
    assert done is not None
    assert (done.shards, done.kept_back) == (1, 0)
    assert stored(there) == steps("a", 2) | steps("b", 2)
    assert verified(there).findings == ()


def test_a_whole_copy_with_an_older_journal_is_behind(tmp_path: Path) -> None:
    """A journal that is put back by hand from a backup is refused, as `verify` says."""
    root, target = tmp_path / "root", tmp_path / "backup"
    declare(root, seal_seconds=0.05)
    with CollectorProcess(root) as collector:
        log(collector, "a", steps=2, end=True)
        collector.settle(2)
        backup(root, target)
        log(collector, "b", steps=2, end=True)
        collector.settle(4)
    shutil.rmtree(root / "journal")
    shutil.copytree(next(target.glob("journal-*")), root / "journal")
    with pytest.raises(JournalBehind):
        verified(root)


def test_a_file_that_is_replaced_while_it_is_copied_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the later content has the same size."""
    root, target, copyfile = tmp_path / "root", tmp_path / "target", shutil.copyfile
    declare(root)
    file = root / "policies" / "note.json"
    file.write_text("1")
    os.utime(file, (0, 0))

    def replaced(source: Path, to: Path, **given: bool) -> Path:
        made = copyfile(source, to, **given)
        if source == file:
            (root / "new").write_text("2")
            (root / "new").replace(file)
        return made

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", replaced)
        backup(root, target)
    backup(root, target)
    assert (target / "policies" / "note.json").read_text() == "2"


def test_what_is_no_backup_or_no_place_for_one_is_refused(tmp_path: Path) -> None:
    """Nothing is overwritten, removed or copied into itself; a plan that is applied excludes it."""
    root, other = tmp_path / "root", tmp_path / "other"
    declare(root)
    other.mkdir()
    (other / "precious").write_text("1")
    with pytest.raises(ValueError, match="expected a folder outside of"):
        backup(root, root / "backup")
    with pytest.raises(ValueError, match="expected a new or empty folder, or an earlier backup"):
        backup(root, other)
    with pytest.raises(ValueError, match="expected a finished backup"):
        restore(other, tmp_path / "new")
    done = backup(root, tmp_path / "target")  # a root without a journal, too
    assert done.copied
    with pytest.raises(ValueError, match="expected a new or empty folder"):
        restore(tmp_path / "target", other)
    assert os.listdir(other) == ["precious"]
    assert restore(tmp_path / "target", tmp_path / "new").adopted is None
    assert (tmp_path / "new" / "policies" / "default.json").exists()
    backup(tmp_path / "new", tmp_path / "second")
    with pytest.raises(ValueError, match="expected a new or empty folder"):
        restore(tmp_path / "target", tmp_path / "second")
    with pytest.raises(ValueError, match=f"got {tmp_path / 'target'}, of {root}"):
        backup(tmp_path / "new", tmp_path / "target")
    root.rename(tmp_path / "moved")
    assert backup(tmp_path / "moved", tmp_path / "target").kept
    (tmp_path / "target" / MARK).write_text('{"format": 2}')
    with pytest.raises(NewerFormat, match="later release"):
        restore(tmp_path / "target", tmp_path / "newer")
