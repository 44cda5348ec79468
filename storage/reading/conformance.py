"""What every `ShardSource` has to pass: a source of one's own inherits the suite.

class TestMySource(ShardSourceConformance):
    def source(self) -> ShardSource: ...
    def put(self, stream: str, name: str, content: bytes) -> None: ...
    def remove(self, stream: str, name: str) -> None: ...
"""

from __future__ import annotations

import threading

from storage.conformance import expect, expect_error
from storage.reading.listing import ShardFile
from storage.reading.sources import GrowingSource, ShardSource
from storage.shards.names import ShardName

STREAM, OLDER = "aaaaaaaaaaaa-bbbbbbbbbbbb", "0older-bbbbbbbbbbbb"
LONG = 600.0
"""Seconds of a wait that is to be ended; only a broken source reaches it."""


class ShardSourceConformance:
    """Checks of the promises of `ShardSource`; each raises ConformanceError.

    Each call of `source` gives a source of the same place, which is empty when a test begins.
    """

    def source(self) -> ShardSource:
        """A source of the place that `put` puts shards into."""
        raise NotImplementedError

    def put(self, stream: str, name: str, content: bytes) -> None:
        """Put a shard into the place, whole."""
        raise NotImplementedError

    def remove(self, stream: str, name: str) -> None:
        """Remove a shard from the place."""
        raise NotImplementedError

    def test_a_scan_lists_shards_by_stream_and_ordinal_and_nothing_else(self) -> None:
        """Other names are no shards; a place that is not there yet has none."""
        source = self.source()
        expect("an empty place has no shards", source.scan(), [])
        for stream, first in ((STREAM, 10), (STREAM, 0), (OLDER, 5)):
            self.put(stream, _name(first), b"content")
        self.put(STREAM, "readme.parquet", b"content")
        found = source.scan()
        wanted = [(OLDER, 5), (STREAM, 0), (STREAM, 10)]
        expect("shards are listed in order", [(one.stream, one.first) for one in found], wanted)
        expect("a shard has its name", found[0].name, _name(5))
        source.close()

    def test_a_shard_is_read_whole(self) -> None:
        """Its bytes are what was put; a removed one is FileNotFoundError."""
        source = self.source()
        content = bytes(range(256)) * 1000
        self.put(STREAM, _name(0), content)
        (shard,) = source.scan()
        expect("the bytes are those of the shard", source.read(shard), content)
        self.remove(STREAM, _name(0))
        text = "a removed shard is not found"
        expect_error(text, FileNotFoundError, lambda: source.read(shard))
        expect("it is not listed any more", source.scan(), [])
        source.close()

    def test_a_wait_ends(self) -> None:
        """By `wake` from another thread, and for good by `close`."""
        source = self.source()
        source.scan()
        waker = threading.Thread(target=source.wake)
        waker.start()
        source.wait(LONG)
        waker.join()
        source.close()
        source.wait(LONG)
        source.close()

    def test_new_shards_are_listed_without_the_others(self) -> None:
        """Only of a `GrowingSource`: also one before a known one, and all of them if asked afresh.

        A shard may be listed again, and none may be missing.
        """
        source = self.source()
        if not isinstance(source, GrowingSource):
            return
        self.put(STREAM, _name(10), b"content")
        first = _firsts(source.changes(thorough=True, afresh=True))
        expect("the first listing has what is there", first, {10})
        for number in (20, 5):
            self.put(STREAM, _name(number), b"content")
            later = _firsts(source.changes(thorough=True))
            expect(f"shard {number} is listed", number in later)
        afresh = _firsts(source.changes(thorough=True, afresh=True))
        expect("a fresh listing has all", afresh, {5, 10, 20})
        source.close()


def _name(first: int) -> str:
    return str(ShardName(first, first + 4, "0" * 16))


def _firsts(shards: list[ShardFile]) -> set[int]:
    return {shard.first for shard in shards}
