"""A shard with a matching digest and invalid content is excluded by name.

Also of `storage.shards.content`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from storage.experience.interfaces import ReaderError
from storage.reading.loading import DEFAULT_COLUMNS
from storage.reading.shard_reader import ShardReader
from storage.shards.names import ShardDamaged, ShardName
from storage.shards.shard import ShardWriter
from storage.spaces.descriptors import Box, canonical_json, schema_id
from storage.verify.shard_check import check_shard
from tests.storage.reading.bad_shards import BAD, at_row, pairs, put, rewrite
from tests.storage.reading.test_shard_reader import COLLECTOR, OBS, part, read_all, rows_of, write

PARTS = [part(0, 3), part(1, 2, ended=None, final=True), part(2, 3)]
GOOD = part(3, 2)
CONTRADICTORY = {
    "rows too few",
    "a footer of other ranges",
    "a footer of more rows",
    "a footer of another stream",
    "a footer without ranges",
    "a footer that is no JSON",
}
"""The damage after which a footer states no number of rows that can be believed."""


@pytest.mark.parametrize("what", BAD)
def test_a_shard_of_wrong_content_is_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """A shard of wrong content is named in the statistics and in one line of the log, and counted
    as "content" if its footer fits its name; the other shard is read. `verify` says the same."""
    change, reason = BAD[what]
    bad = rewrite(write(tmp_path, PARTS).path, change)
    write(tmp_path, [GOOD])
    reader = ShardReader(tmp_path)
    with caplog.at_level(logging.WARNING, "headrace.reader"):
        assert read_all(reader) == rows_of([GOOD])
    assert list(reader.stats.excluded_shards) == [str(bad)]
    assert reason in reader.stats.excluded_shards[str(bad)]
    assert reader.stats.excluded == ({} if what in CONTRADICTORY else {"content": 8})
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("left out as content: ")
    assert str(bad) in message
    name = ShardName.parse(bad.name)
    assert name is not None
    with pytest.raises(ShardDamaged, match=re.escape(reason)):
        check_shard(bad, name)


@pytest.mark.parametrize("use_dictionary", [False, True])
@pytest.mark.parametrize("column", ["eps_id", "tags", "training_enabled"])
def test_a_change_inside_a_part_is_found_at_any_row_group(
    tmp_path: Path, column: str, use_dictionary: bool
) -> None:
    """Parts run over row groups, each with a dictionary of its own: none where nothing changes."""
    values = {"eps_id": "x", "tags": '{"a":"b"}', "training_enabled": False}
    options = {"row_group_size": 2, "use_dictionary": use_dictionary}
    for row in (2, 6):  # the first row of a row group, in the middle of a part
        root = tmp_path / str(row)
        sound = rewrite(write(root, PARTS).path, lambda table: table, **options)
        assert read_all(ShardReader(root, training_disabled=True)) == rows_of(PARTS)
        rewrite(sound, at_row(column, row, values[column]), **options)
        reader = ShardReader(root, training_disabled=True, columns=["obs", column])
        assert read_all(reader) == []
        assert [f"{column}: expected one value" in t for t in _reasons(reader)] == [True]


def _reasons(reader: ShardReader) -> list[str]:
    return list(reader.stats.excluded_shards.values())


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("part", -1, "0 or more"),
        ("env_t", -4, "an integer of 0.."),
        ("agents", 0, "1 or more"),
        ("continues", "x", "one value in each part"),
        (
            "action_dist_inputs",
            [0.0, np.nan],
            "finite numbers, or minus",
        ),
        (
            "action_dist_inputs",
            [np.inf, 0.0],
            "finite numbers, or minus",
        ),
    ],
)
def test_a_column_is_checked_where_it_is_asked_for(
    tmp_path: Path, column: str, value: object, expected: str
) -> None:
    """A reader checks the columns that it was asked for; `verify` checks all of them."""
    all_rows = put(column, [-1] * 8) if column == "part" else at_row(column, 1, value)
    bad = rewrite(write(tmp_path, PARTS).path, all_rows)
    name = ShardName.parse(bad.name)
    assert name is not None
    with pytest.raises(ShardDamaged, match=f"{column}: expected {expected}"):
        check_shard(bad, name)
    reader = ShardReader(tmp_path, columns=[*DEFAULT_COLUMNS, column])
    assert read_all(reader) == []
    assert expected in reader.stats.excluded_shards[str(bad)]


def test_what_is_masked_out_is_no_damage(tmp_path: Path) -> None:
    """A collector accepts minus infinity in a decision's inputs, and any time."""
    masked = at_row("action_dist_inputs", 1, [0.0, -np.inf])
    path = rewrite(write(tmp_path, PARTS).path, masked)
    path = rewrite(path, at_row("ts", 1, -1))
    name = ShardName.parse(path.name)
    assert name is not None
    check_shard(path, name)
    reader = ShardReader(tmp_path, columns=[*DEFAULT_COLUMNS, "action_dist_inputs", "ts"])
    assert len(read_all(reader)) == 8
    assert reader.stats.excluded == {}


def test_content_that_is_right_passes(tmp_path: Path) -> None:
    """Written by another tool, with dictionaries and other pages, the same table is the same."""
    path = write(tmp_path, PARTS).path
    again = rewrite(path, lambda table: table, use_dictionary=True, row_group_size=3)
    name = ShardName.parse(again.name)
    assert name is not None
    check_shard(again, name)
    reader = ShardReader(tmp_path)
    assert read_all(reader) == rows_of(PARTS)
    assert reader.stats.excluded == {}


@pytest.mark.parametrize("mode", ["transitions", "fragments", "episodes"])
@pytest.mark.parametrize("what", ["broken tags", "an action outside its space", "a gap in t"])
def test_the_verdict_does_not_depend_on_what_is_asked_for(
    tmp_path: Path, mode: str, what: str
) -> None:
    """Of the columns not requested, those that readers count and filter by are checked, too."""
    rewrite(write(tmp_path, PARTS).path, BAD[what][0])
    columns = ["actions", "rewards"] if mode != "episodes" else None
    reader = ShardReader(tmp_path, mode=mode, columns=columns)
    assert read_all(reader) == []
    assert set(reader.stats.excluded) == {"content"}


def test_a_column_that_no_shard_has_is_the_callers_error(tmp_path: Path) -> None:
    """Asking for a column that no shard has excludes no shard: the reader raises."""
    write(tmp_path, PARTS)
    with ShardReader(tmp_path, columns=["reward"]) as reader:
        with pytest.raises(ReaderError, match=r"got \['reward'\]"):
            reader.next()
        assert reader.stats.excluded == {}


@pytest.mark.parametrize(
    ("source", "value", "fine"),
    [("on_policy", 1.5, True), ("logged", 1.5, False), ("logged", 1.0, True)],
)
def test_only_a_policys_own_sample_may_leave_its_bounds(
    tmp_path: Path, source: str, value: float, fine: bool
) -> None:
    """An unclipped action that a policy of ours chose is stored as it was chosen."""
    action = Box((1,), low=-1.0, high=1.0)
    stream = f"{COLLECTOR}-{schema_id(OBS, action)}"
    one = part(0, 2)
    one = msgspec.structs.replace(
        one, schema_id=schema_id(OBS, action), actions=np.zeros(2, np.float32).tobytes()
    )
    written = ShardWriter(tmp_path / "shards").write(stream, canonical_json(OBS, action), [one])
    values = pairs(np.array([0.0, value], np.float32), [0, 1, 2])

    def change(table: pa.Table) -> pa.Table:
        return put("source", [source] * 2)(put("actions", values)(table))

    rewrite(written.path, change)
    with ShardReader(tmp_path) as reader:
        assert sum(batch.count for batch in reader) == (2 if fine else 0)


@pytest.fixture
def pool() -> Iterator[pa.MemoryPool]:
    """Arrow's memory, counted from here."""
    usual = pa.default_memory_pool()
    counted = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(counted)
    yield counted
    pa.set_memory_pool(usual)


def test_a_file_that_decodes_to_far_more_is_refused_before_it_is_decoded(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Some kB that decode to 280 MB."""
    rows = 700
    path = write(tmp_path, [part(0, rows)]).path
    text = '{"a":"' + "x" * 400_000 + '"}'
    options = {"compression": "zstd", "use_dictionary": False}
    bad = rewrite(path, put("infos", [text] * rows), **options)
    assert bad.stat().st_size < 442_000
    pool = request.getfixturevalue("pool")
    reader = ShardReader(tmp_path, columns=["infos"])
    assert read_all(reader) == []
    (reason,) = reader.stats.excluded_shards.values()
    assert "expected at most 256000000 bytes" in reason
    assert pool.max_memory() < 50_000_000
    assert reader.stats.excluded == {"content": rows}
