"""A damaged footer costs the rows of its shard, is named, and ends no reader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

from storage.reading.shard_reader import ShardReader
from tests.storage.reading.memory_source import MemorySource
from tests.storage.reading.test_shard_reader import part, read_all, rows_of, stream_of, write
from tests.storage.shards.test_footers import Damage, changed, every, in_name

BAD = [part(1, 3)]
SOUND = [part(0, 2), part(2, 2)]


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    return write(tmp_path, BAD).path.read_bytes()


def _read_beside(tmp_path: Path, content: bytes, damages: Iterable[Damage]) -> set[int]:
    """Read a root of two sound shards and the damaged one; the numbers of rows stated for it."""
    sound = [write(tmp_path / str(p.ordinal), [p]).path for p in SOUND]
    name = write(tmp_path / "named", BAD).path.name
    stated = set()
    for damage in damages:
        source = MemorySource()
        for path in sound:
            source.put(stream_of(), path.name, path.read_bytes())
        bad = source.put(stream_of(), name, changed(content, damage))
        reader = ShardReader(source=source)
        assert read_all(reader) == rows_of(SOUND)
        assert list(reader.stats.excluded_shards) == [bad.place]
        assert reader.stats.excluded in ({}, {"damaged": 3})
        stated.add(reader.stats.excluded.get("damaged", 0))
    return stated


def test_a_damaged_footer_ends_no_reader(tmp_path: Path, content: bytes) -> None:
    """A column's name that is no UTF-8, and 100 cases drawn from each byte x 0x00, 0x80, 0xff."""
    drawn = Random(1).sample(every(content), 100)
    assert _read_beside(tmp_path, content, [in_name(content, "obs"), *drawn]) == {0, 3}


@pytest.mark.long
def test_no_byte_of_a_footer_ends_a_reader(tmp_path: Path, content: bytes) -> None:
    """The whole product."""
    assert _read_beside(tmp_path, content, every(content)) == {0, 3}
