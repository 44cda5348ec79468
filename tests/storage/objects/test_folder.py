"""What a local folder adds: odd files, unfinished groups, and a lock between processes.

Also of `storage.objects.interface`.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from storage.errors import ObjectExists, ObjectUnusable
from storage.objects import folder
from storage.objects.folder import FolderObjects
from storage.system.files import FileLock


def test_sockets_devices_fifos_and_folders_are_no_objects(tmp_path: Path) -> None:
    """None of them keeps a reader waiting, as a plain open of a FIFO would."""
    objects = FolderObjects(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name in ("fifo", "folder", "device", "socket"):
            with pytest.raises(ObjectUnusable, match="expected a regular file"):
                objects.read(name)


def test_a_fifo_among_appended_objects_keeps_nobody_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "names")
    FolderObjects(tmp_path).append("names", b"1")
    assert (tmp_path / "names").read_bytes() == b"1"
    assert (tmp_path / "names.damaged").exists()


def test_links_count_and_odd_entries_stop_no_listing(tmp_path: Path) -> None:
    """A link to a folder is a folder; links in a circle and unfinished files harm nothing."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / ".real.abc.tmp").mkdir()
    assert FolderObjects(tmp_path).names() == ["circle", "link/", "real/"]


def test_unfinished_groups_of_dead_writers_are_removed(tmp_path: Path) -> None:
    """After an hour; those of living ones stay."""
    objects = FolderObjects(tmp_path)
    objects.put_if_absent("g/1", {"x": b"1"})
    for name, age in ((".2.old.tmp", 3700), (".2.new.tmp", 0)):
        (tmp_path / "g" / name).mkdir()
        then = (tmp_path / "g" / name).stat().st_mtime - age
        os.utime(tmp_path / "g" / name, (then, then))
    objects.put_if_absent("g/2", {"x": b"1"})
    assert sorted(os.listdir(tmp_path / "g")) == [".2.new.tmp", "1", "2"]


def test_a_folder_that_cannot_be_made_is_not_taken_for_one_that_is_there(tmp_path: Path) -> None:
    """Otherwise an object that does not exist would be reported as stored."""
    (tmp_path / "candidates").write_text("")
    for content in (b"1", {"a": b"1"}):
        with pytest.raises(OSError, match="candidates") as error:
            FolderObjects(tmp_path).put_if_absent("candidates/one", content)
        assert not isinstance(error.value, ObjectExists)


def test_a_lock_that_is_held_for_long_is_an_error_that_names_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is stopped meanwhile blocks others, which get an error."""
    monkeypatch.setattr(folder, "LOCK_SECONDS", 0.0)
    objects = FolderObjects(tmp_path)
    lock = FileLock(tmp_path / "lock")
    lock.acquire()
    text = f"process {lock.holder()} holds .*lock: it is writing"
    with pytest.raises(BlockingIOError, match=text):
        objects.replace_if_unchanged("a", b"1", None)
    lock.release()
    objects.replace_if_unchanged("a", b"1", None)


def test_a_link_that_leads_nowhere_takes_its_name(tmp_path: Path) -> None:
    """It is no object, and not nothing either."""
    (tmp_path / "a").symlink_to("nowhere")
    objects = FolderObjects(tmp_path)
    status = objects.status("a")
    assert status is not None
    assert not status.is_object
    with pytest.raises(ObjectUnusable, match="a link that leads nowhere"):
        objects.read("a")
    with pytest.raises(ObjectExists):
        objects.put_if_absent("a", b"1")


def test_a_root_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    """With `make=False`, and for what need not be durable."""
    gone = tmp_path / "gone"
    with pytest.raises(FileNotFoundError):
        FolderObjects(gone / "shards", make=False).staging("stream/1")
    with pytest.raises(FileNotFoundError):
        FolderObjects(gone).replace("dropped/a.json", b"1", durable=False)
    assert not gone.exists()


def test_two_processes_may_write_the_first_objects_of_a_folder_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one makes the folder after this one has found that there is none."""
    write = folder.replace_file

    def overtaken(path: Path, data: bytes, *, durable: bool) -> None:
        try:
            write(path, data, durable=durable)
        except FileNotFoundError:
            path.parent.mkdir()
            raise

    monkeypatch.setattr(folder, "replace_file", overtaken)
    objects = FolderObjects(tmp_path)
    objects.replace("dropped/a.json", b"1", durable=False)
    assert objects.read("dropped/a.json") == b"1"


def test_another_lock_of_the_thread_lets_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may hold its own lock while it publishes: that of the weights still excludes it."""
    monkeypatch.setattr(folder, "LOCK_SECONDS", 0.0)
    store, publisher = FolderObjects(tmp_path), FolderObjects(tmp_path)
    with store.exclusive("jobs/lock"):
        store.replace_if_unchanged("weights/live", b"1", None)
        with publisher.exclusive("weights/lock"), pytest.raises(BlockingIOError):
            store.replace_if_unchanged("weights/live", b"2", b"1")
    assert store.read("weights/live") == b"1"
