"""Every row is delivered once or excluded by name; `caught_up` never waits for lost rows.

Each law is a function that a planted broken build has to fail.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.experience.interfaces import ReaderError
from storage.reading import loading, prefetch
from storage.reading.exclusion import Excluded, LeftOut, ReaderStats
from storage.reading.listing import RootListing, ShardFile
from storage.reading.prefetch import Prefetcher
from storage.reading.retries import Retries
from storage.reading.shard_reader import ShardReader
from storage.shards.names import ShardDamaged
from tests.faults.mutants import Patch
from tests.storage.reading.bad_shards import BAD, rewrite
from tests.storage.reading.memory_source import MemorySource
from tests.storage.reading.test_shard_reader import (
    LONG,
    flipped,
    ids,
    part,
    put,
    rows_of,
    stream_of,
    write,
)


class FailingSource(MemorySource):
    """Reading one shard fails with an error of the system, so many times."""

    def __init__(self, number: int, times: int) -> None:
        super().__init__()
        self.number, self.times, self.failed = number, times, 0
        self.failing: ShardFile | None = None

    def read(self, shard: ShardFile) -> bytes:
        if shard == self.failing and self.failed < self.times:
            self.failed += 1
            raise OSError(self.number, "planted", shard.place)
        return super().read(shard)


def drained(reader: ShardReader) -> list[tuple[str, int, int]]:
    """The rows that a follower returns until it is caught up."""
    found: list[tuple[str, int, int]] = []
    while not reader.caught_up():
        batch = reader.next(0.05)
        found += ids(batch) if batch.count else []
    return found


def _note(reader: ShardReader, found: list[tuple[str, int, int]]) -> None:
    for batch in reader:
        found += ids(batch)


def damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(flipped(content, len(content) // 2))


# --- laws ------------------------------------------------------------------------------------


def transient(root: Path) -> None:
    """A follower reads the rest, names the shard that it retries, and returns its rows once."""
    source, parts = FailingSource(errno.EIO, 4), [part(i, 2) for i in range(3)]
    shards = [put(source, root, [p]) for p in parts]
    source.failing = shards[1]
    with ShardReader(source=source, follow=True, eager=True, poll_interval=0.05) as reader:
        assert drained(reader) == rows_of([parts[0], parts[2]])
        assert list(reader.stats.retrying) == [shards[1].place]
        assert reader.stats.excluded_shards == {}
        assert ids(reader.next(LONG)) == rows_of([parts[1]])
        assert drained(reader) == []
        assert (reader.stats.retrying, reader.stats.excluded) == ({}, {})
        assert source.failed == 4


def gives_up(root: Path) -> None:
    """A reader that ends returns the rest, and then raises an error that names the file."""
    source, parts = FailingSource(errno.ESTALE, 10**9), [part(i, 2) for i in range(3)]
    shards = [put(source, root, [p]) for p in parts]
    source.failing = shards[0]
    found: list[tuple[str, int, int]] = []
    with (
        ShardReader(source=source, batch_size=1, retry_for=0.3) as reader,
        pytest.raises(ReaderError, match=r"gave up after 0\.3 s.*0{12}-0{12}"),
    ):
        _note(reader, found)
    assert found == rows_of(parts[1:])
    assert 2 < source.failed < 50  # with back-off


def damaged(root: Path) -> None:
    """One flipped byte: the shard is named, its rows counted as its footer says, one line logged,
    nothing of it read; a follower is caught up all the same."""
    parts = [part(i, 2 + i) for i in range(3)]
    infos = [write(root, [p]) for p in parts]
    content = infos[1].path.read_bytes()
    infos[1].path.write_bytes(flipped(content, 100))
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("headrace.reader").addHandler(handler)
    try:
        with ShardReader(root, follow=True, eager=True) as reader:
            assert drained(reader) == rows_of([parts[0], parts[2]])
            assert reader.stats.excluded == {"damaged": 3}
            assert list(reader.stats.excluded_shards) == [str(infos[1].path)]
            assert [str(infos[1].path) in text for text in messages] == [True]
            assert reader.ledger == {stream_of(): [[0, 0], [2, 2]]}
    finally:
        logging.getLogger("headrace.reader").removeHandler(handler)


def content(root: Path) -> None:
    """A reward that is NaN, under a true digest: left out by name, as "content"."""
    bad = rewrite(
        write(root, [part(0, 3), part(1, 2), part(2, 3)]).path, BAD["a reward that is NaN"][0]
    )
    good = part(3, 1)
    write(root, [good])
    with ShardReader(root, follow=True, eager=True) as reader:
        assert drained(reader) == rows_of([good])
        assert reader.stats.excluded == {"content": 8}
        assert list(reader.stats.excluded_shards) == [str(bad)]


def caught_up(root: Path) -> None:
    """Never while readable rows have not been returned, with or without an event."""
    with ShardReader(root, follow=True, eager=True, poll_interval=600.0) as reader:
        assert drained(reader) == []
        for number in range(20):
            write(root, [part(number, 2)])
            assert not reader.caught_up()
            assert ids(reader.next(LONG)) == rows_of([part(number, 2)])
        assert reader.caught_up()


LAWS: dict[str, Callable[[Path], None]] = {
    law.__name__: law for law in (transient, gives_up, damaged, content, caught_up)
}


@pytest.mark.parametrize("law", LAWS)
def test_the_law_holds(tmp_path: Path, law: str) -> None:
    """See the law."""
    LAWS[law](tmp_path)


# --- planted broken builds -------------------------------------------------------------------


def every_error_is_final(patch: Patch) -> None:
    """An unreadable shard is dropped for the reader's lifetime."""
    read = patch.original(Prefetcher, "_read")

    def broken(self: Any, shard: ShardFile, following: ShardFile | None) -> Any:
        found = read(self, shard, following)
        if found is None:
            self._retries.settle(shard)
            return Excluded(shard, "damaged", f"{shard.place}: dropped")
        return found

    patch.replace(Prefetcher, "_read", broken)


def every_error_ends_reading(patch: Patch) -> None:
    patch.replace(prefetch, "TRANSIENT", (ZeroDivisionError,))  # type: ignore[arg-type]


def never_gives_up(patch: Patch) -> None:
    patch.replace(Retries, "given_up", lambda self: "gave up after 0.3 s" if self._trials else "")


def no_back_off(patch: Patch) -> None:
    patch.replace(Retries, "waits", lambda self, key: False)
    patch.replace(Retries, "next_due", lambda self: 0.0 if self._trials else None)


def tells_nothing_of_retries(patch: Patch) -> None:
    patch.replace(Retries, "_tell", lambda self: None)


def no_digest(patch: Patch) -> None:
    patch.replace(loading, "check_digest", lambda shard, content: None)


def counts_nothing(patch: Patch) -> None:
    patch.replace(ReaderStats, "exclude", lambda self, reason, rows: None)


def logs_nothing(patch: Patch) -> None:
    patch.replace(LeftOut, "add", _silent(patch.original(LeftOut, "add")))


def _silent(add: Callable[..., Any]) -> Callable[..., Any]:
    def broken(self: Any, found: Any, unread: Any) -> None:
        logger = logging.getLogger("headrace.reader")
        logger.disabled = True
        add(self, found, unread)
        logger.disabled = False

    return broken


def names_nothing(patch: Patch) -> None:
    add = patch.original(LeftOut, "add")

    def broken(self: Any, found: Any, unread: Any) -> None:
        add(self, found, unread)
        self._stats.excluded_shards.clear()

    patch.replace(LeftOut, "add", broken)


def no_content_check(patch: Patch) -> None:
    patch.replace(loading, "check_column", lambda *given: None)


def bad_content_ends_reading(patch: Patch) -> None:
    load = patch.original(loading.ShardLoader, "load")

    def broken(self: Any, *given: Any) -> Any:
        try:
            return load(self, *given)
        except ShardDamaged as error:
            if error.reason == "content":
                raise RuntimeError(str(error)) from error
            raise

    patch.replace(loading.ShardLoader, "load", broken)


def caught_up_by_what_is_known(patch: Patch) -> None:
    """Shards without an event do not count, because no scan is made."""
    patch.replace(Prefetcher, "idle", lambda self: not (self._busy or self._channel.filled))


def waits_for_bad_shards(patch: Patch) -> None:
    """A shard that is left out always counts as readable."""
    patch.replace(Prefetcher, "idle", lambda self: not (self._bad or self._retries))


def looks_only_where_events_told(patch: Patch) -> None:
    new = patch.original(RootListing, "new")

    def broken(self: Any, *, thorough: bool, errors: Any) -> Any:
        return new(self, thorough=False, errors=errors)

    patch.replace(RootListing, "new", broken)
    patch.replace(RootListing, "note_event", lambda self, path: None)


PLANTED: dict[Callable[[Patch], None], str] = {
    every_error_is_final: "transient",
    every_error_ends_reading: "transient",
    tells_nothing_of_retries: "transient",
    never_gives_up: "gives_up",
    no_back_off: "gives_up",
    no_digest: "damaged",
    counts_nothing: "damaged",
    logs_nothing: "damaged",
    names_nothing: "damaged",
    waits_for_bad_shards: "damaged",
    no_content_check: "content",
    bad_content_ends_reading: "content",
    caught_up_by_what_is_known: "caught_up",
    looks_only_where_events_told: "caught_up",
}


_FAILED: type[BaseException] = pytest.fail.Exception


class Unending(Exception):
    """A law did not finish."""


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_broken_build_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[Patch], None]
) -> None:
    """Each planted broken build fails the property that it breaks, or never finishes."""
    patch = Patch()
    turns = [0]
    idle = ShardReader.caught_up

    def bounded(self: ShardReader) -> bool:
        turns[0] += 1
        if turns[0] > 100:
            raise Unending
        return idle(self)

    monkeypatch.setattr(ShardReader, "caught_up", bounded)
    monkeypatch.setattr(f"{__name__}.LONG", 1.0)
    try:
        plant(patch)
        with pytest.raises(
            (AssertionError, Unending, OSError, RuntimeError, pytest.fail.Exception)
        ):
            LAWS[PLANTED[plant]](tmp_path)
    finally:
        patch.undo()


# --- what a shard that is left out may become ------------------------------------------------


def test_a_shard_that_is_whole_again_is_read_and_no_longer_left_out(tmp_path: Path) -> None:
    """A shard that is copied in place is damaged at first, and whole once it is closed."""
    info = write(tmp_path / "aside", [part(0, 3)])
    whole = info.path.read_bytes()
    place = tmp_path / "shards" / info.stream / info.path.name
    place.parent.mkdir(parents=True)
    with ShardReader(tmp_path, follow=True, eager=True, poll_interval=0.05) as reader:
        assert drained(reader) == []
        with place.open("wb") as file:
            file.write(whole[:50])
            file.flush()
            while not reader.stats.excluded_shards:
                reader.next(0.05)
            assert reader.stats.excluded == {}  # no footer: their number is unknown
            file.write(whole[50:])
        assert ids(reader.next(LONG)) == rows_of([part(0, 3)])
        assert (reader.stats.excluded, reader.stats.excluded_shards) == ({}, {})


def test_what_another_shard_brings_is_not_left_out(tmp_path: Path) -> None:
    """Compaction writes the parts of a damaged shard anew, from a copy."""
    parts = [part(0, 2), part(1, 3)]
    damage(write(tmp_path, parts[1:]).path)
    with ShardReader(tmp_path, follow=True, eager=True) as reader:
        assert drained(reader) == []
        assert reader.stats.spoiled == 1
        write(tmp_path, parts)
        assert ids(reader.next(LONG)) == rows_of(parts)
        assert (reader.stats.excluded, reader.stats.excluded_shards) == ({}, {})


def test_a_shard_that_is_gone_before_it_was_read_is_left_out_as_vanished(tmp_path: Path) -> None:
    """A shard that vanished before it was read is named, unless another one has its parts, as
    after a compaction. How many rows it had is unknown: its name says nothing of rows."""
    source = FailingSource(errno.EIO, 10**9)
    source.failing = put(source, tmp_path, [part(0, 4)])
    with ShardReader(source=source, follow=True, eager=True, poll_interval=0.05) as reader:
        assert drained(reader) == []
        source.remove(source.failing)
        while not reader.stats.excluded_shards:
            reader.next(0.05)
        assert list(reader.stats.excluded_shards) == [source.failing.place]
        assert (reader.stats.excluded, reader.stats.retrying) == ({}, {})
        put(source, tmp_path, [part(0, 4), part(1, 1)])
        assert ids(reader.next(LONG)) == rows_of([part(0, 4), part(1, 1)])
        assert reader.stats.excluded_shards == {}


@pytest.mark.parametrize("follow", [True, False])
def test_a_position_waits_for_what_cannot_be_read_for_now(tmp_path: Path, follow: bool) -> None:
    """The rows of a position are not lost while their shard cannot be read; they are returned in
    order once it can."""
    source, parts = FailingSource(errno.EIO, 3), [part(0, 4), part(1, 4)]
    shards = [put(source, tmp_path, [p]) for p in parts]
    options: dict[str, Any] = {"source": source, "batch_size": 3}
    with ShardReader(**options) as reader:
        before, state = ids(reader.next()), reader.state_dict()
    source.closed = source._closed = False
    source.failing = shards[0]
    found = []
    with ShardReader(**options, follow=follow, state=state, poll_interval=0.05) as reader:
        assert reader.next(0.0).count == 0
        assert reader.state_dict() == state
        while len(found) < 3:
            batch = reader.next(0.05)
            found += ids(batch) if batch.count else []
        assert reader.stats.lost == 0
    assert before + found == rows_of(parts)[:6]
    assert source.failed == 3


def test_rows_of_a_position_that_are_lost_are_named(tmp_path: Path) -> None:
    """Rows of a position that can never be read are counted as lost, with the damaged shard's name
    or as vanished."""
    info = write(tmp_path, [part(0, 4)])
    with ShardReader(tmp_path, batch_size=3) as reader:
        reader.next()
        state = reader.state_dict()
    damage(info.path)
    with ShardReader(tmp_path, batch_size=3, state=state) as reader:
        assert list(reader) == []
        assert (reader.stats.lost, reader.stats.excluded) == (1, {"damaged": 1})
        assert list(reader.stats.excluded_shards) == [str(info.path)]
    info.path.unlink()
    with ShardReader(tmp_path, batch_size=3, state=state) as reader:
        assert list(reader) == []
        assert (reader.stats.lost, reader.stats.excluded) == (1, {"vanished": 1})


def test_lack_of_memory_is_no_damage(tmp_path: Path) -> None:
    """A MemoryError, which may also come from Arrow, does not count as damage: the shard is read
    again."""

    class Starved(FailingSource):
        def read(self, shard: ShardFile) -> bytes:
            if self.failed < self.times:
                self.failed += 1
                raise MemoryError
            return super().read(shard)

    source = Starved(0, 2)
    put(source, tmp_path, [part(0, 2)])
    with ShardReader(source=source) as reader:
        assert [ids(batch) for batch in reader] == [rows_of([part(0, 2)])]
        assert reader.stats.excluded == {}


def test_shares_bring_each_row_once(tmp_path: Path) -> None:
    """Each episode belongs to one share, whatever its parts and streams; a single share is
    everything."""
    parts = [part(i, 2, episode=i - i % 3, t0=2 * (i % 3)) for i in range(30)]
    for first in range(0, 30, 4):
        write(tmp_path, parts[first : first + 4])
    write(tmp_path, [part(0, 3)], collector="b" * 12)
    everything = sorted(rows_of(parts) + rows_of([part(0, 3)], stream_of(collector="b" * 12)))
    for count in (1, 2, 3):
        shares = []
        for index in range(count):
            with ShardReader(tmp_path) as reader:
                reader.share(index, count)
                shares.append([row for batch in reader for row in ids(batch)])
                assert reader.stats.excluded == {}
        assert sorted(row for share in shares for row in share) == everything
        episodes = [{(s, o - o % 3) for s, o, _ in share} for share in shares]
        assert sum(map(len, episodes)) == len(set().union(*episodes)) == 11
        assert min(map(len, shares)) > 0
    with ShardReader(tmp_path) as reader:
        with pytest.raises(ReaderError, match="expected an index below 2, got 2"):
            reader.share(2, 2)
        reader.next()
        with pytest.raises(ReaderError, match="has not read yet"):
            reader.share(0, 2)


def test_the_numbers_of_a_batch_are_those_at_rest(tmp_path: Path) -> None:
    """Checks do not change the data."""
    write(tmp_path, [part(0, 3, final=True), part(1, 2)])
    with ShardReader(tmp_path) as reader:
        batch = reader.next()
    assert batch["rewards"].tolist() == [0.0, 1.0, 2.0, 0.0, 1.0]
    assert np.isnan(batch["action_logp"]).all()
