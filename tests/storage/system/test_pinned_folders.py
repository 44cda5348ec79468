"""Folders that were moved in use: nothing else at their path is mistaken for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage.errors import FolderMoved
from storage.journal.sqlite_journal import SqliteJournal
from storage.shards.names import ShardWriteError
from storage.shards.shard import ShardWriter
from storage.shards.writer_process import WriterProcess
from storage.system.pinned_folders import Anchor
from tests.storage.shards.test_shard import CANONICAL, STREAM, parts_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


def test_a_folder_in_its_place_is_fine(folder: Path) -> None:
    """Changes inside a folder, or a link to it, have no effect."""
    link = folder.with_name("link")
    link.symlink_to(folder)
    anchor = Anchor(folder, link)
    (folder / "file").touch()
    anchor.require()
    anchor.close()
    anchor.close()


def test_a_folder_that_is_gone_replaced_or_behind_another_link_is_told(folder: Path) -> None:
    """Even one that is made anew at once, which a file system likes to give the same number."""
    anchor = Anchor(folder)
    folder.rmdir()
    with pytest.raises(FolderMoved, match=r"root is not there any more"):
        anchor.require()
    folder.mkdir()
    with pytest.raises(FolderMoved, match=r"root is not the folder that was opened"):
        anchor.require()
    folder.rmdir()
    folder.touch()
    with pytest.raises(FolderMoved):
        anchor.require()
    anchor.close()


def test_a_file_is_looked_for_in_what_was_opened(folder: Path) -> None:
    """A file at the path of a folder that was moved is not in it; one that moved with it is."""
    (folder / "s").mkdir()
    anchor = Anchor(folder.parent, folder)
    (folder / "s" / "before").touch()
    folder.rename(folder.with_name("elsewhere"))
    (folder / "s").mkdir(parents=True)
    (folder / "s" / "after").touch()
    assert anchor.has(folder / "s" / "before")
    assert not anchor.has(folder / "s" / "after")
    assert not anchor.has(Path("/somewhere/else"))
    anchor.close()


def test_no_folder_is_no_anchor(tmp_path: Path) -> None:
    """There is nothing to hold, and what was held until then is let go."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        Anchor(tmp_path, tmp_path / "none")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_shard_of_a_moved_root_is_not_believed(folder: Path) -> None:
    """The writer reports this instead of writing a shard, and does not recreate the folder."""
    with WriterProcess(folder / "shards", sources=[folder]) as writer:
        writer.write(STREAM, CANONICAL, parts_of(2))
        folder.rename(folder.with_name("elsewhere"))
        with pytest.raises(FolderMoved, match="root"):
            writer.write(STREAM, CANONICAL, parts_of(3))
        (folder / "shards").mkdir(parents=True)
        with pytest.raises(FolderMoved, match="root"):
            writer.write(STREAM, CANONICAL, parts_of(3))
    assert not list(folder.rglob("*.parquet"))


def test_a_folder_that_was_there_is_not_made_anew(tmp_path: Path) -> None:
    """With `make=False` a missing shards folder is an error, and only streams are made in it."""
    gone = tmp_path / "shards"
    with pytest.raises(ShardWriteError, match="No such file"):
        ShardWriter(gone, make=False).write(STREAM, CANONICAL, parts_of(2))
    assert not gone.exists()
    gone.mkdir()
    assert ShardWriter(gone, make=False).write(STREAM, CANONICAL, parts_of(2)).path.exists()


def test_a_moved_journal_leaves_the_log_at_its_old_path_alone(folder: Path) -> None:
    """Closing would remove `-wal` by its path, which by now is another journal's."""
    moved = SqliteJournal.open(folder)
    moved.commit([(1, b"mine")])
    folder.rename(folder.with_name("elsewhere"))
    other = SqliteJournal.open(folder)
    other.commit([(1, b"other")])
    moved.close()
    moved.close()
    assert (folder / "journal.db-wal").stat().st_size > 0
    assert (folder.with_name("elsewhere") / "journal.db-wal").stat().st_size > 0
    other.close()
    assert not (folder / "journal.db-wal").exists()
