"""Our sources keep the promises of `ShardSource`, and a store in memory is written and read.

Also of `storage.reading.objects_source` and `storage.objects.ranged`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from storage.conformance import ConformanceError
from storage.errors import ObjectNotFound
from storage.objects.interface import Objects
from storage.objects.memory import MemoryObjects
from storage.objects.ranged import RangedFile
from storage.reading.conformance import ShardSourceConformance
from storage.reading.listing import ShardFile
from storage.reading.objects_source import ObjectsSource
from storage.reading.shard_reader import ShardReader
from storage.reading.sources import DirectorySource, ShardSource
from storage.shards.names import ShardDamaged, next_ordinals
from storage.shards.shard import ShardWriter, find_shard, shard_metadata
from storage.shards.unrecorded_shards import later_shards
from storage.verify.inventory import list_streams
from tests.storage.shards.test_shard import CANONICAL, STREAM, make_part, parts_of


class TestDirectorySource(ShardSourceConformance):
    @pytest.fixture(autouse=True)
    def _in_a_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "root"

    def source(self) -> ShardSource:
        return DirectorySource(self.folder)

    def put(self, stream: str, name: str, content: bytes) -> None:
        path = self.folder / "shards" / stream / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f".{name}").write_bytes(content)
        os.rename(path.with_name(f".{name}"), path)

    def remove(self, stream: str, name: str) -> None:
        (self.folder / "shards" / stream / name).unlink()


class TestObjectsSource(ShardSourceConformance):
    @pytest.fixture(autouse=True)
    def _in_memory(self) -> None:
        self.objects: Objects = MemoryObjects()

    def source(self) -> ShardSource:
        return ObjectsSource(self.objects)

    def put(self, stream: str, name: str, content: bytes) -> None:
        self.objects.put_if_absent(f"shards/{stream}/{name}", content)

    def remove(self, stream: str, name: str) -> None:
        self.objects.delete(f"shards/{stream}/{name}")


class Forgetful(ObjectsSource):
    """Trusts that shards come in the order of their names."""

    def changes(self, *, thorough: bool, afresh: bool = False) -> list[ShardFile]:
        return super().changes(thorough=False, afresh=afresh)


def test_a_source_that_misses_an_earlier_name_is_found() -> None:
    class Suite(TestObjectsSource):
        def source(self) -> ShardSource:
            return Forgetful(self.objects)

    suite = Suite()
    suite.objects = MemoryObjects()
    with pytest.raises(ConformanceError, match="shard 5 is listed"):
        suite.test_new_shards_are_listed_without_the_others()


# --- shards in any store ------------------------------------------------------------------------


def test_shards_are_written_to_a_store_and_read_from_it() -> None:
    """Writing, finding, listing, reading and following need no folder."""
    objects = MemoryObjects()
    shards = objects.under("shards")
    writer = ShardWriter(shards)
    info = writer.write(STREAM, CANONICAL, parts_of(4))
    assert writer.adopt(STREAM, 0, 3) == info == find_shard(shards, STREAM, 0, 3)
    assert next_ordinals(shards, STREAM.partition("-")[0]) == {STREAM: 4}
    found, ends = later_shards(shards, {STREAM: 0}, 0)
    assert ([len(one.parts) for one in found], ends) == ([4], {STREAM: 4})
    (listed,) = list_streams(objects, {}).streams
    assert (listed.rows, listed.parts, listed.unreadable) == (12, 4, 0)
    with ShardReader(objects, follow=True, eager=True, poll_interval=0.01) as reader:
        assert reader.next(timeout=60.0).count == 12
        writer.write(STREAM, CANONICAL, [make_part(4), make_part(5)])
        assert reader.next(timeout=60.0).count == 6
    with ShardReader(objects) as reader:
        assert sum(rows.count for rows in reader) == 18


def test_roots_of_several_kinds_are_read_together(tmp_path: Path) -> None:
    """A shard is read from the root that has it, by its place."""
    other = f"{'f' * 12}-{STREAM.partition('-')[2]}"
    objects = MemoryObjects()
    ShardWriter(tmp_path / "shards").write(STREAM, CANONICAL, parts_of(4))
    ShardWriter(objects.under("shards")).write(other, CANONICAL, parts_of(2))
    with ShardReader([tmp_path, objects]) as reader:
        streams = {name for batch in reader for name in batch["stream"].tolist()}
        assert (streams, reader.stats.rows) == ({STREAM, other}, 18)


def test_a_damaged_shard_in_a_store_is_left_out() -> None:
    """As one in a folder: its bytes do not match its name."""
    objects = MemoryObjects()
    ShardWriter(objects.under("shards")).write(STREAM, CANONICAL, parts_of(4))
    (name,) = objects.names(f"shards/{STREAM}/")
    objects.replace(name, objects.read(name)[:-1] + b"x")
    assert find_shard(objects.under("shards"), STREAM, 0, 3) is None
    with ShardReader(objects) as reader:
        assert [rows.count for rows in reader] == []
        assert len(reader.stats.excluded_shards) == 1


def test_a_shard_that_is_no_object_is_damage() -> None:
    objects = MemoryObjects()
    name = f"{0:012}-{0:012}-{'0' * 16}.parquet"
    objects.put_if_absent(f"shards/{STREAM}/{name}", {"x": b"1"})
    shard = ShardFile(STREAM, 0, 0, "0" * 16, f"{objects}/shards/{STREAM}/{name}")
    with pytest.raises(ShardDamaged, match="expected an object"):
        ObjectsSource(objects).read(shard)


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """A footer costs a part of the bytes; positions are those of a file."""

    class Counted(MemoryObjects):
        def read(self, name: str, **given: int) -> bytes:  # type: ignore[override]
            data = super().read(name, **given)  # type: ignore[arg-type]
            sizes.append(len(data))
            return data

    sizes: list[int] = []
    path = ShardWriter(tmp_path).write(STREAM, CANONICAL, parts_of(2000)).path
    objects = Counted()
    objects.replace("a", path.read_bytes())
    assert pq.read_metadata(RangedFile(objects, "a")).num_rows == 6000
    assert shard_metadata(path).rows == 6000
    assert 0 < sum(sizes) < len(path.read_bytes()) / 2
    with path.open("rb") as file, RangedFile(objects, "a") as ranged:
        for offset, whence, size in ((4, 0, 10), (-7, 2, 100), (0, 0, -1), (-3, 1, 2), (5, 0, 0)):
            assert ranged.seek(offset, whence) == file.seek(offset, whence)
            assert ranged.read(size) == file.read(size)
            assert ranged.tell() == file.tell()
    with pytest.raises(ObjectNotFound):
        RangedFile(objects, "b")
