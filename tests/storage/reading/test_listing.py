"""A listing's cost is proportional to new shards, and it misses none; any path may be listed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.experience.interfaces import ReaderError
from storage.reading import listing
from storage.reading.listing import ListedPath, RootListing, ShardFile
from storage.reading.shard_reader import ShardReader
from storage.reading.sources import DirectorySource
from tests.storage.reading.test_shard_reader import part, read_all, rows_of, write

STREAM = "aaaaaaaaaaaa-bbbbbbbbbbbb"


def name(number: int) -> str:
    return f"{number:012}-{number:012}-{'0' * 16}.parquet"


def place(folder: Path, number: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    hidden = folder / f".{number}.tmp"
    hidden.touch()
    os.rename(hidden, folder / name(number))
    return folder / name(number)


def firsts(found: list[ShardFile]) -> list[int]:
    return sorted(shard.first for shard in found)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.integers(0, 1)),
        st.tuples(st.just("told"), st.integers(0, 1)),
        st.tuples(st.just("remove"), st.integers(0, 9)),
        st.tuples(st.just("look"), st.booleans()),
    ),
    max_size=20,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS)
def test_each_shard_is_found_whatever_the_events_told(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int]]
) -> None:
    """Shards come and go in two streams, with and without events, faster than the clock's
    resolution; a thorough look then names every existing one."""
    shards = tmp_path_factory.mktemp("root") / "shards"
    looked = RootListing(ListedPath(shards), 2.0)
    there: dict[int, Path] = {}
    known: set[int] = set()
    for number, (what, which) in enumerate(operations):
        if what == "remove" and there:
            there.pop(sorted(there)[which % len(there)]).unlink()
        elif what in ("place", "told"):
            path = there[number] = place(shards / f"{STREAM}{which}", number)
            shard = looked.note_event(str(path)) if what == "told" else None
            assert (shard is not None) == (what == "told")
            known |= {number} if shard is not None else set()
        elif what == "look":
            known |= set(firsts(looked.new(thorough=bool(which), errors={})))
    errors: dict[str, OSError] = {}
    known |= set(firsts(looked.new(thorough=True, errors=errors)))
    assert set(there) <= known
    assert errors == {}


def test_what_did_not_change_is_not_listed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder whose `stat` has been the same for longer than a tick is asked, not listed; a new
    name, a longer time and a thorough look at a young listing list it."""
    listed: list[str] = []
    clock = [1_000.0]
    real = os.scandir
    monkeypatch.setattr(listing.os, "scandir", lambda path: listed.append(str(path)) or real(path))
    monkeypatch.setattr(listing.time, "monotonic", lambda: clock[0])
    folder = tmp_path / STREAM
    place(folder, 1)
    looked = RootListing(ListedPath(tmp_path), 2.0)

    def lists(*, thorough: bool = False) -> int:
        listed.clear()
        looked.new(thorough=thorough, errors={})
        return listed.count(str(folder))

    assert lists() == 1
    assert lists(thorough=True) == 1  # another name may have come within the tick
    clock[0] += listing.MOST_INTERVAL
    assert lists() == 1
    assert [lists(), lists(thorough=True)] == [0, 0]
    place(folder, 2)
    clock[0] += listing.MOST_INTERVAL
    assert [lists(), lists()] == [1, 0]
    clock[0] += listing.GRANULARITY
    assert [lists(), lists(thorough=True)] == [1, 0]
    clock[0] += listing.FORCED_INTERVAL
    assert [lists(), lists()] == [1, 0]


def test_while_events_tell_all_listings_become_rare_and_a_burst_pays_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new name without an event starts the listings again."""
    listed: list[str] = []
    clock = [1_000.0]
    real = os.scandir
    monkeypatch.setattr(listing.os, "scandir", lambda path: listed.append(str(path)) or real(path))
    monkeypatch.setattr(listing.time, "monotonic", lambda: clock[0])
    folder = tmp_path / STREAM
    place(folder, 0)
    looked = RootListing(ListedPath(tmp_path), 2.0)
    looked.new(thorough=False, errors={})

    def lists(numbers: range, *, events: bool) -> int:
        listed.clear()
        for number in numbers:
            path = place(folder, number)
            if events:
                looked.note_event(str(path))
            if len(numbers) < listing.BURST:
                clock[0] += 2.0
                looked.new(thorough=False, errors={})
        looked.new(thorough=False, errors={})
        return listed.count(str(folder))

    assert lists(range(1, 31), events=True) < 6  # in 60 s
    assert lists(range(100, 100 + listing.BURST), events=True) == 1
    lists(range(200, 220), events=False)
    assert lists(range(300, 305), events=False) == 5


@pytest.mark.parametrize("given", ["root", "shards", "stream", "shard", "relative"])
def test_any_path_that_holds_shards_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """A root, its shards/, a stream's folder, a shard."""
    parts = [part(0, 2), part(1, 3)]
    first, second = (write(tmp_path, [p]).path for p in parts)
    monkeypatch.chdir(first.parent)
    path = {
        "root": tmp_path,
        "shards": tmp_path / "shards",
        "stream": first.parent,
        "shard": second,
        "relative": Path(second.name),
    }[given]
    expected = parts[1:] if given in ("shard", "relative") else parts
    reader = ShardReader(path)
    assert read_all(reader) == rows_of(expected)
    assert ShardReader(path).save("mine") == tmp_path / "readers" / "mine.json"
    with ShardReader(path, follow=True, eager=True) as follower:
        rows = 0
        while not follower.caught_up():
            rows += follower.next(0.1).count
        assert rows == len(rows_of(expected))


@pytest.mark.parametrize("given", ["missing", "missing/shards", "file", "others"])
def test_what_holds_no_shards_is_refused(tmp_path: Path, given: str) -> None:
    """A path without shards is an error that says what was expected there, and not an empty
    result."""
    (tmp_path / "file").touch()
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "notes.txt").touch()
    with (
        ShardReader(tmp_path / given) as reader,
        pytest.raises(ReaderError, match="expected a root"),
    ):
        reader.next()


@pytest.mark.parametrize("given", ["", "shards", "shards/stream"])
def test_a_follower_waits_for_what_is_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    """A follower of a missing path logs once that it waits, and reads the shards once they come."""
    root = tmp_path / "later"
    expected = [part(0, 2)]
    given = given.replace("stream", write(tmp_path / "aside", expected).stream)
    with ShardReader(root / given, follow=True, eager=True, poll_interval=0.05) as reader:
        assert reader.next(0.2).count == 0
        assert reader.caught_up()
        assert sum("waiting for it" in r.getMessage() for r in caplog.records) == 1
        write(root, expected)
        assert reader.next(30.0).count == 2


def test_a_new_empty_root_is_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A reader of a new, empty root ends, and reports that nothing was read."""
    assert read_all(ShardReader(tmp_path)) == []
    assert "no shard was read" in caplog.text


def test_changes_afresh_are_all_that_is_there(tmp_path: Path) -> None:
    """A reader that resumes from a position lists everything again."""
    folder = tmp_path / "shards" / STREAM
    place(folder, 1)
    with DirectorySource(tmp_path) as source:
        assert firsts(source.changes(thorough=False)) == [1]
        assert firsts(source.changes(thorough=True)) == []
        place(folder, 2)
        assert firsts(source.changes(thorough=True)) == [2]
        assert firsts(source.changes(thorough=False, afresh=True)) == [1, 2]
