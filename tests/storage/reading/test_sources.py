"""Where shards come from: scans are the truth, events are hints."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from storage.reading.sources import DirectorySource

STREAM = "aaaaaaaaaaaa-bbbbbbbbbbbb"
LONG = 120.0  # s; the duration of a wait that nothing interrupts


def shard_name(first: int, last: int) -> str:
    return f"{first:012}-{last:012}-{'0' * 16}.parquet"


def place(root: Path, name: str, stream: str = STREAM, content: bytes = b"x") -> Path:
    """Put a file as the writer does: a dot-file, then a rename."""
    folder = root / "shards" / stream
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}.tmp"
    temporary.write_bytes(content)
    os.rename(temporary, folder / name)
    return folder / name


def test_a_scan_lists_shards_by_stream_and_ordinal_and_nothing_else(tmp_path):
    """Dot-files, strange names and files beside the streams are not shards."""
    place(tmp_path, shard_name(10, 19))
    place(tmp_path, shard_name(0, 9))
    place(tmp_path, shard_name(0, 4), stream="0-older")
    folder = tmp_path / "shards" / STREAM
    (folder / f".{shard_name(20, 29)}").write_bytes(b"half")
    (folder / "readme.parquet").write_bytes(b"")
    (tmp_path / "shards" / shard_name(0, 1)).write_bytes(b"")
    with DirectorySource(tmp_path) as source:
        found = source.scan()
    assert [(s.stream, s.first, s.last) for s in found] == [
        ("0-older", 0, 4),
        (STREAM, 0, 9),
        (STREAM, 10, 19),
    ]
    assert found[1].name == shard_name(0, 9)
    assert found[1].schema_id == "bbbbbbbbbbbb"


def test_a_root_that_is_not_there_yet_has_no_shards(tmp_path):
    """A learner may start before its collector; once the folder exists it is watched."""
    with DirectorySource(tmp_path / "later", follow=True) as source:
        assert source.scan() == []
        place(tmp_path / "later", shard_name(0, 0))
        assert len(source.scan()) == 1
        place(tmp_path / "later", shard_name(1, 1))
        assert source.wait(LONG)


def test_several_roots_are_read_as_one_and_a_root_given_twice_counts_once(tmp_path):
    """The same shard under two roots is listed once."""
    for name in ("a", "b"):
        place(tmp_path / name, shard_name(0, 9))
    place(tmp_path / "b", shard_name(10, 19))
    with DirectorySource([tmp_path / "a", tmp_path / "b", str(tmp_path / "a")]) as source:
        assert [s.first for s in source.scan()] == [0, 10]
    with pytest.raises(ValueError, match="roots"):
        DirectorySource([])


def test_what_happens_after_a_scan_began_ends_the_wait(tmp_path):
    """Watch before scan: a rename into the tree, in a stream that is new too, cuts the wait."""
    (tmp_path / "shards").mkdir()
    with DirectorySource(tmp_path, follow=True) as source:
        source.scan()
        begin = time.monotonic()
        place(tmp_path, shard_name(0, 0), stream="new-stream")
        assert source.wait(LONG)
        assert time.monotonic() - begin < LONG / 2
        assert len(source.scan()) == 1


def test_without_events_a_wait_ends_by_itself(tmp_path):
    """Polling works even if events never arrive."""
    with DirectorySource(tmp_path) as source:
        source.scan()
        place(tmp_path, shard_name(0, 0))
        assert not source.wait(0.01)
        assert len(source.scan()) == 1


@pytest.mark.parametrize("finish", ["wake", "close"])
def test_another_thread_can_end_a_wait(tmp_path, finish):
    """Closing a reader does not wait for the poll interval."""
    source = DirectorySource(tmp_path, follow=True)
    source.scan()
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (source.wait(LONG), ended.set()))
    thread.start()
    getattr(source, finish)()
    assert ended.wait(LONG / 2)
    thread.join()
    source.close()
    assert source.wait(LONG) is True


def test_reading_gives_the_bytes_and_a_vanished_file_says_so(tmp_path):
    """A file that compaction removed after the scan is FileNotFoundError, not damage."""
    path = place(tmp_path, shard_name(0, 0), content=b"bytes")
    with DirectorySource(tmp_path) as source:
        (shard,) = source.scan()
        assert source.read(shard) == b"bytes"
        path.unlink()
        with pytest.raises(FileNotFoundError):
            source.read(shard)
