"""`ls` reads the same from a footer whether it parses the bytes itself or uses Arrow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.objects.folder import FolderObjects
from storage.shards.schema import ShardMetadata
from storage.shards.shard import ShardWriter
from storage.spaces.descriptors import canonical_json
from storage.verify import inventory
from storage.verify.inventory import list_streams
from tests.storage.reading.bad_shards import footer, rewrite
from tests.storage.reading.test_shard_reader import ACTION, OBS, part, stream_of

PARTS = [part(0, 300), part(1, 5), part(2, 70)]

Summary = tuple[ShardMetadata, int, list[int]]


def _written(root: Path, row_group_bytes: int) -> Path:
    writer = ShardWriter(root / "shards", row_group_bytes=row_group_bytes)
    return writer.write(stream_of(), canonical_json(OBS, ACTION), PARTS).path


def _quick(path: Path, monkeypatch: pytest.MonkeyPatch) -> Summary:
    """Fails where Arrow is asked."""
    with monkeypatch.context() as patch:
        patch.setattr(inventory, "pq", None)
        return inventory.summary(FolderObjects(path.parent), path.name)


def by_arrow(path: Path) -> Summary:
    return inventory._by_arrow(FolderObjects(path.parent), path.name)


@pytest.mark.parametrize("row_group_bytes", [2_000, 8_000_000])
def test_our_own_footers_need_no_arrow(
    tmp_path: Path, row_group_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metadata, size and the times of each row group are those that Arrow gives."""
    path = _written(tmp_path, row_group_bytes)
    found = _quick(path, monkeypatch)
    assert found == by_arrow(path)
    groups = pq.read_metadata(path).num_row_groups
    assert (groups > 1, len(found[2])) == (row_group_bytes == 2_000, 2 * groups)


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table,  # as another writer makes it
        footer(spaces=lambda text: text + " " * 70_000),  # longer than what is read at first
        footer(rows="7"),
    ],
)
def test_any_other_footer_is_read_by_arrow(
    tmp_path: Path, change: Callable[[pa.Table], pa.Table]
) -> None:
    """Our reader of footers and Arrow's give the same, whoever wrote the file."""
    path = rewrite(_written(tmp_path, 8_000_000), change, compression="zstd")
    (listed,) = list_streams(tmp_path, {}).streams
    metadata, _, times = by_arrow(path)
    assert (listed.rows, listed.spaces) == (metadata.rows, metadata.spaces)
    assert (listed.first_ts, listed.last_ts) == (min(times), max(times))


def test_what_is_cut_or_no_shard_is_unreadable(tmp_path: Path) -> None:
    """A file without a whole footer of ours is only counted, as unreadable."""
    path = _written(tmp_path, 8_000_000)
    content = path.read_bytes()
    for changed in (content[:-1], content[:-300], content[-200:], b"", b"PAR1"):
        path.write_bytes(changed)
        (listed,) = list_streams(tmp_path, {}).streams
        assert (listed.shards, listed.rows, listed.unreadable) == (0, 0, 1)
