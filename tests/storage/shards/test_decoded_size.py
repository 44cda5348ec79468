"""The memory for reading a shard is known before a page is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.shards import decoded_size
from storage.shards.decoded_size import check_size
from storage.shards.names import ShardDamaged
from tests.storage.reading.test_shard_reader import part, write

ROWS = 305


def check(path: Path, names: Sequence[str] | None = None) -> None:
    with pq.ParquetFile(path) as file:
        columns = file.schema_arrow.names if names is None else names
        check_size(path.stat().st_size, file.metadata, file.schema_arrow, columns)


def sizes(path: Path) -> tuple[int, int]:
    """(bytes of the decompressed pages, bytes of the file)."""
    return pq.read_metadata(path).row_group(0).total_byte_size, path.stat().st_size


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write(tmp_path, [part(0, 300, infos={3: '{"a":1}'}), part(1, 5)]).path


def test_pages_and_values_of_the_columns_to_be_read_count(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """305 rewards of 8 bytes, and all pages, because Arrow may keep them."""
    pages, _ = sizes(shard)
    monkeypatch.setattr(decoded_size, "MOST_GROUP_BYTES", pages + 8 * ROWS)
    check(shard, ["rewards"])
    check(shard, [])
    with pytest.raises(ShardDamaged, match="row group 0: expected at most"):
        check(shard, ["rewards", "t"])
    with pytest.raises(ShardDamaged, match="row group 0"):
        check(shard)


def test_a_small_file_of_many_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal values take no room in a file: 3 M rewards, in some kB."""
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 3_000_000, pa.int32()), pa.array([0.0]))
    column = pa.chunked_array([values.cast(pa.float64())])
    path = tmp_path / "many.parquet"
    pq.write_table(pa.table({"rewards": column}), path, row_group_size=3_000_000)
    assert path.stat().st_size < 100_000
    check(path)
    monkeypatch.setattr(decoded_size, "MOST_GROUP_BYTES", 20_000_000)
    with pytest.raises(ShardDamaged, match="it decodes to 24"):
        check(path)


def test_the_numbers_in_lists_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal numbers take no room in a list either: 3 M of them, in lists of 1,000."""
    values = pa.ListArray.from_arrays(
        pa.array(range(0, 3_000_001, 1_000), pa.int32()), pa.array(np.zeros(3_000_000, np.float32))
    )
    path = tmp_path / "lists.parquet"
    pq.write_table(pa.table({"obs": values}), path)
    assert path.stat().st_size < 100_000
    check(path)
    monkeypatch.setattr(decoded_size, "MOST_GROUP_BYTES", 12_000_000)
    with pytest.raises(ShardDamaged, match="it decodes to 12"):
        check(path)


def test_row_groups_add_up_to_the_limit_of_a_shard(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is the larger of a number of bytes and a multiple of the file's size."""
    monkeypatch.setattr(decoded_size, "MOST_SHARD_BYTES", 1_000)
    check(shard)
    monkeypatch.setattr(decoded_size, "MOST_EXPANSION", 1)
    pages, stored = sizes(shard)
    assert pages > stored
    with pytest.raises(ShardDamaged, match=f"expected at most {stored} bytes, it decodes to"):
        check(shard)
