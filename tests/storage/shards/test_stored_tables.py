"""Shards of format 1, which release 0.1.0 wrote, are the same as those of today in every use."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from storage.declarations.tombstones import episode_mark
from storage.experience.sample_batch import SampleBatch, concat_samples
from storage.maintenance.compaction import plan_compaction
from storage.maintenance.episodes import StoredEpisodes, ids_where
from storage.maintenance.plans import apply
from storage.maintenance.removal import plan_erasure
from storage.reading.shard_reader import ShardReader
from storage.shards.arrow_arrays import decode_column
from storage.shards.digests import digest_of
from storage.shards.names import ShardDamaged, ShardName
from storage.shards.shard import ShardWriter, read_shard, shard_metadata
from storage.spaces.descriptors import canonical_json
from storage.verify.audit import Trained, verify
from storage.verify.second_reader import SecondReader
from storage.verify.shard_check import check_shard
from tests.storage.shards.test_shard_portability import PAIRS, parts_of

FIXTURE = Path(__file__).parents[2] / "fixtures" / "0.1.0" / "shards.tgz"


def first(root: Path) -> dict[str, Path]:
    """Unpack the shards of release 0.1.0 into a root: pair of spaces -> shard.

    Each has the parts of `parts_of`, with the ordinals 0 to 2.
    """
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(root, filter="data")
    return {path.parent.name.removeprefix("c-"): path for path in root.glob("shards/*/*.parquet")}


def now(root: Path, pair: str, begin: int) -> Path:
    """The same parts as today's writer stores them, with ordinals from `begin` on."""
    parts = [
        replace(part, ordinal=at, episode_ordinal=at, episode_id=f"{part.episode_id}-{at}")
        if begin
        else replace(part, ordinal=at, episode_ordinal=at)
        for at, part in enumerate(parts_of(pair), begin)
    ]
    canonical = canonical_json(*PAIRS[pair][:2])
    return ShardWriter(root / "shards").write(f"c-{pair}", canonical, parts).path


@pytest.fixture(scope="module")
def second() -> Iterator[SecondReader]:
    with SecondReader() as running:
        yield running


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair != "candidates"])
def test_a_shard_of_the_first_format_has_the_rows_of_one_of_today(
    tmp_path: Path, pair: str, second: SecondReader
) -> None:
    """Values, nulls, names, types and footer; the bytes were SHA-256, and are BLAKE3."""
    old = first(tmp_path)[pair]
    assert shard_metadata(old).format_version == 1
    assert second.compare(old) == []
    new = now(tmp_path / "new", pair, 0)
    assert [len(digest_of(path.read_bytes())) for path in (old, new)] == [64, 64]
    table, expected = (read_shard(path, verify="digest") for path in (old, new))
    assert table.schema.equals(expected.schema)
    assert table.equals(expected)


@pytest.mark.parametrize("command", ["compact", "erase"])
def test_formats_are_mixed_in_one_stream(tmp_path: Path, command: str) -> None:
    """Both are read, and searched by SQL; what maintenance writes is of today's format."""
    old = first(tmp_path / "all")["nested"]
    place = tmp_path / "shards" / old.parent.name / old.name
    place.parent.mkdir(parents=True)
    old.rename(place)
    tables = [read_shard(path) for path in (place, now(tmp_path, "nested", 3))]
    whole = pa.concat_tables(tables)
    columns = ["obs", "actions", "new_obs", "eps_id", "action_dist_inputs"]

    def read() -> SampleBatch:
        with ShardReader(tmp_path, columns=columns, training_disabled=True) as reader:
            return concat_samples(list(reader))

    rows = read()
    assert rows.count == len(whole)
    assert rows["obs.half"].dtype == np.float16
    assert rows["obs.half"].tolist() == decode_column(whole, "obs.half").tolist()
    where = "obs__pair__1[2] = 12 AND eps_id IN (SELECT eps_id FROM steps)"
    found = ids_where(tmp_path, StoredEpisodes.of(tmp_path, None), where)
    assert found == {"\N{SNOWMAN}-1", "\N{SNOWMAN}-1-4"}
    plan = plan_compaction(tmp_path, None)
    if command == "erase":
        plan = plan_erasure(tmp_path, None, [episode_mark(b"k", "\N{SNOWMAN}-1")], b"k").plan
        whole = whole.filter(
            pc.is_in(whole["eps_id"], pa.array(["\N{SNOWMAN}-0", "\N{SNOWMAN}-0-3"]))
        )
    apply(tmp_path, plan, by="me", why="test")
    paths = sorted(place.parent.glob("*.parquet"))
    assert len(paths) == {"compact": 1, "erase": 2}[command]
    assert {shard_metadata(path).format_version for path in paths} == {2}
    assert pa.concat_tables(read_shard(path) for path in paths).equals(whole)
    assert read()["obs.half"].tolist() == decode_column(whole, "obs.half").tolist()
    assert verify(tmp_path, None, Trained()).ok


@pytest.mark.parametrize(
    ("name", "row", "data", "message"),
    [
        ("obs.half", 1, b"abc", "obs.half: expected whole numbers of float16"),
        ("final_obs.half", 5, b"ab", "final_obs.half: expected 2 numbers in each row, got 1"),
        ("final_obs.pair.0", 5, bytes(16), "final_obs.pair.0: expected one int64 in each row"),
    ],
)
def test_bytes_that_fit_no_number_are_damage(
    tmp_path: Path, name: str, row: int, data: bytes, message: str
) -> None:
    """What the conversion cannot read is named, as damage, by `verify` too."""
    path = first(tmp_path)["nested"]
    table = pq.read_table(path)
    values = table.column(name).to_pylist()
    values[row] = data
    at = table.schema.get_field_index(name)
    table = table.set_column(at, table.schema.field(at), pa.array(values, pa.binary()))
    pq.write_table(table, path, use_dictionary=False)
    digest = digest_of(path.read_bytes())[:16]
    path = path.rename(path.with_name(f"{path.name[:26]}{digest}.parquet"))
    with pytest.raises(ShardDamaged, match=message):
        check_shard(path, ShardName(0, 2, digest))
