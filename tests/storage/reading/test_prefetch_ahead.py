"""A large shard is fetched while the previous one is decoded: same rows, same exclusions."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.reading import prefetch
from storage.reading.shard_reader import ShardReader
from tests.storage.reading.test_shard_reader import part, read_all, rows_of, write


@pytest.fixture(autouse=True)
def _every_shard_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "LARGE", 0)


def test_what_is_fetched_ahead_comes_in_order(tmp_path: Path) -> None:
    """Each shard once, also where another pass follows."""
    parts = [part(i, 2 + i % 3) for i in range(9)]
    for one in parts:
        write(tmp_path, [one])
    assert read_all(ShardReader(tmp_path, batch_size=4)) == rows_of(parts)


def test_changed_bytes_that_are_fetched_ahead_are_never_decoded(tmp_path: Path) -> None:
    """The digest is compared in either thread: the shard is left out as damaged, by name, with its
    rows, and those beside it are read."""
    parts = [part(i, 3) for i in range(5)]
    paths = [write(tmp_path, [one]).path for one in parts]
    content = bytearray(paths[2].read_bytes())
    content[40] ^= 1  # in a page: the footer tells how many rows are lost
    paths[2].write_bytes(content)
    reader = ShardReader(tmp_path)
    assert read_all(reader) == rows_of(parts[:2] + parts[3:])
    assert list(reader.stats.excluded_shards) == [str(paths[2])]
    assert dict(reader.stats.excluded) == {"damaged": 3}


def test_a_reader_closed_in_the_middle_leaves_no_thread(tmp_path: Path) -> None:
    """The fetching thread ends with the decoding one, and a position resumes exactly."""
    parts = [part(i, 4) for i in range(8)]
    for one in parts:
        write(tmp_path, [one])
    with ShardReader(tmp_path, batch_size=4, prefetch=1) as reader:
        assert reader.next().count == 4
        state = reader.state_dict()
        thread = reader._prefetcher._ahead._thread if reader._prefetcher else None
    if thread is not None:
        thread.join(60.0)
        assert not thread.is_alive()
    assert read_all(ShardReader(tmp_path, state=state)) == rows_of(parts[1:])
