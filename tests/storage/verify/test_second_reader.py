"""fastparquet is compared with our reader: the same values, or a finding that names them.

Also of `storage.verify.second_reader_main`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from storage.experience.episode import Part
from storage.shards.arrow_arrays import decode_column
from storage.shards.digests import digest_of
from storage.shards.shard import ShardWriter, read_shard
from storage.spaces.descriptors import BOX_DTYPES, Box, Discrete, Tuple, canonical_json, widest
from storage.verify import second_reader
from storage.verify.audit import Trained, VerifyReport, verify
from storage.verify.column_values import ColumnValues, of_items, of_numbers
from storage.verify.second_reader import SecondReader
from tests.storage.reading.bad_shards import pairs
from tests.storage.shards.test_shard_portability import PAIRS, parts_of

STREAM = "c-s"


def shard(root: Path, pair: str, **options: Any) -> Path:
    """A shard of two row groups or more; a root of its own verifies it."""
    return written(root, pair, dense(pair), **options)


def dense(pair: str) -> list[Part]:
    """The parts with the ordinals 0, 1 and 2, each the first of its episode."""
    return [replace(part, ordinal=at, episode_ordinal=at) for at, part in enumerate(parts_of(pair))]


def written(root: Path, pair: str, parts: list[Part], **options: Any) -> Path:
    writer = ShardWriter(root / "shards", **{"row_group_bytes": 500, **options})
    return writer.write(STREAM, canonical_json(*PAIRS[pair][:2]), parts).path


def rewritten(path: Path, table: pa.Table, **options: Any) -> Path:
    """The table in the place of a shard, as another writer would write it, under a fitting name."""
    pq.write_table(table, path, write_page_checksum=True, **options)
    digest = digest_of(path.read_bytes())
    return path.rename(path.with_name(f"{path.name[:26]}{digest[:16]}.parquet"))


def verified(root: Path, second: SecondReader) -> VerifyReport:
    return verify(root, None, Trained(), second=second)


def found(report: VerifyReport) -> list[tuple[str, str]]:
    return [(finding.kind, finding.text) for finding in report.findings]


@pytest.fixture(scope="module")
def second() -> Iterator[SecondReader]:
    with SecondReader() as running:
        yield running


class Planted(SecondReader):
    """A second reader whose process first runs `source`, which breaks something in it."""

    source: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        lines = (
            f"{cls.source}\nfrom {second_reader.__name__}_main import read_shards\nread_shards()"
        )
        cls.program = ("-P", "-c", lines)


class KilledInTheMiddle(Planted):
    source = """
import fastparquet, os, signal
whole = fastparquet.ParquetFile.iter_row_groups
def cut(file, *a, **k):
    for number, frame in enumerate(whole(file, *a, **k)):
        if number and file.key_value_metadata["headrace.ranges"] == "[[1,1]]":
            os.kill(os.getpid(), signal.SIGKILL)
        yield frame
fastparquet.ParquetFile.iter_row_groups = cut
"""


class ReadsNothing(Planted):
    source = """
import fastparquet
def refuse(*a, **k):
    raise RuntimeError("no such page")
fastparquet.ParquetFile.iter_row_groups = refuse
"""


class LosesRows(Planted):
    source = """
import fastparquet
whole = fastparquet.ParquetFile.iter_row_groups
fastparquet.ParquetFile.iter_row_groups = lambda *a, **k: list(whole(*a, **k))[:-1]
"""


class LosesColumn(Planted):
    source = """
import fastparquet
whole = fastparquet.ParquetFile.iter_row_groups
fastparquet.ParquetFile.iter_row_groups = (
    lambda *a, **k: (frame.drop(columns=["rewards"]) for frame in whole(*a, **k)))
"""


class NeverAnswers(Planted):
    source = "import sys; sys.stdin.buffer.read()"


class SaysNonsense(Planted):
    source = "import os; os.write(1, b'a warning\\n' * 20)"


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_sound_shard_is_the_same_for_both(
    tmp_path: Path, pair: str, compression: Any, second: SecondReader
) -> None:
    """For every kind of space, both readers return the same values, nulls included."""
    rows = len(read_shard(shard(tmp_path, pair, compression=compression)))
    report = verified(tmp_path, second)
    assert found(report) == []
    assert report.second_reader is not None
    assert (report.second_reader.shards, report.second_reader.rows) == (1, rows)
    assert report.second_reader.reader.startswith("fastparquet 20")


def test_single_numbers_of_every_dtype_are_the_same(
    tmp_path: Path, second: SecondReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the largest ones, and as final observations, which are null in most rows."""
    dtypes = [np.dtype(name) for name in BOX_DTYPES]
    largest = [widest(dtype, 1) if dtype.kind in "biu" else dtype.type(0.1) for dtype in dtypes]
    space = Tuple(tuple(Box((), dtype) for dtype in dtypes))
    monkeypatch.setitem(PAIRS, "single", (space, Discrete(1), lambda i: largest, lambda i: 0))
    shard(tmp_path, "single")
    assert found(verified(tmp_path, second)) == []


def test_odd_numbers_are_the_same_too(tmp_path: Path, second: SecondReader) -> None:
    """Minus zero, the smallest and the largest, in plain columns and in vectors."""
    path = shard(tmp_path, "vector")
    table = read_shard(path)
    odd = np.array([-0.0, 5e-324, -5e-324, np.finfo(np.float64).max, 1e-45, 1.0])
    single = np.array([-0.0, 1e-45, -1e-45, np.finfo(np.float32).max, 1e-30, 1.0], np.float32)
    rewards, obs = table.schema.get_field_index("rewards"), table.schema.get_field_index("obs")
    vectors = pa.array(np.repeat(single, 4))
    table = table.set_column(rewards, table.schema.field(rewards), pa.array(odd))
    table = table.set_column(obs, table.schema.field(obs), pairs(vectors, range(0, 28, 4)))
    rewritten(path, table, use_dictionary=False)
    assert found(verified(tmp_path, second)) == []


@pytest.mark.parametrize("column", ["rewards", "obs", "eps_id", "final_obs", "agents", "infos"])
def test_a_broken_decoding_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, second: SecondReader
) -> None:
    """The second reader detects one wrong value of our reader in one column."""
    shard(tmp_path, "vector")

    def broken(table: pa.Table, name: str) -> Any:
        values = decode_column(table, name).copy()
        if name == column and len(values):
            values[-1] = "x" if values.dtype == object else values[-1] + 1
        return values

    monkeypatch.setattr(second_reader, "decode_column", broken)
    (finding,) = found(verified(tmp_path, second))
    assert finding[0] == "differs"
    assert finding[1].startswith(f"{column}: 1 of ")
    assert " here, " in finding[1]


def test_a_shard_that_only_our_reader_can_read_is_found(tmp_path: Path) -> None:
    """The finding has the error of the second reader."""
    path = shard(tmp_path, "vector")
    with ReadsNothing() as second:
        (finding,) = verified(tmp_path, second).findings
    assert (finding.kind, finding.where) == ("unreadable", f"shards/{STREAM}/{path.name}")
    assert finding.text.startswith(f"{second.name} cannot read it: ")
    assert "no such page" in finding.text


def test_values_that_the_two_decode_differently_are_found(
    tmp_path: Path, second: SecondReader
) -> None:
    """Run lengths of booleans: fastparquet decodes them wrongly, and says nothing."""
    path = shard(tmp_path, "vector")
    encoding = {"terminateds": "RLE"}
    rewritten(path, read_shard(path), use_dictionary=False, column_encoding=encoding)
    (finding,) = found(verified(tmp_path, second))
    text = "terminateds: 1 of 6 values from row 0 differ, the first in row 5: True here, False by "
    assert finding == ("differs", text + second.name)


def test_a_column_that_only_our_decoding_fails_on_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: SecondReader
) -> None:
    """An error of our decoding alone is a finding, whatever its type."""
    shard(tmp_path, "image")

    def broken(table: pa.Table, name: str) -> Any:
        return decode_column(table, name) if name != "obs" else [][0]

    monkeypatch.setattr(second_reader, "decode_column", broken)
    (finding,) = found(verified(tmp_path, second))
    assert finding[0] == "differs"
    assert finding[1].startswith("obs: cannot be decoded here (IndexError: ")


@pytest.mark.parametrize(
    ("planted", "text"),
    [(LosesRows, "6 rows here, "), (LosesColumn, "rewards: no such column in fastparquet")],
)
def test_what_only_one_of_them_finds_is_told(
    tmp_path: Path, planted: type[Planted], text: str
) -> None:
    """Rows or columns that only one of the two readers finds are a finding."""
    shard(tmp_path, "vector")
    with planted() as second:
        (finding,) = found(verified(tmp_path, second))
    assert finding[0] == "differs"
    assert finding[1].startswith(text)


def test_a_reader_that_is_killed_is_a_finding_and_the_next_shard_is_read(tmp_path: Path) -> None:
    """The finding names the shard and the signal; a new process reads the other shards."""
    canonical = canonical_json(*PAIRS["vector"][:2])
    for part in dense("vector"):
        ShardWriter(tmp_path / "shards", row_group_bytes=1).write(STREAM, canonical, [part])
    with KilledInTheMiddle() as second:
        report = verified(tmp_path, second)
    assert [finding.kind for finding in report.findings] == ["crashed"]
    assert "ended by signal 9" in report.findings[0].text
    assert report.second_reader is not None
    assert report.second_reader.shards == 3


def test_a_reader_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    """A second reader that hangs is killed; otherwise `verify` would never end."""
    shard(tmp_path, "vector")
    with NeverAnswers(seconds=0.2) as second:
        (finding,) = found(verified(tmp_path, second))
    assert finding[0] == "crashed"
    assert "was not done after 0.2 s" in finding[1]


def test_a_reader_that_says_something_else_is_ended(tmp_path: Path) -> None:
    """Other output of the process is not mistaken for its answer."""
    shard(tmp_path, "vector")
    with SaysNonsense() as second:
        (finding,) = found(verified(tmp_path, second))
    assert finding[0] == "crashed"


def test_a_damaged_shard_is_not_read_again(tmp_path: Path, second: SecondReader) -> None:
    """A damaged shard is a finding already, and could crash the second reader."""
    path = shard(tmp_path, "vector")
    path.write_bytes(path.read_bytes()[:-9])
    report = verified(tmp_path, second)
    assert [finding.kind for finding in report.findings] == ["damaged"]
    assert report.second_reader is not None
    assert report.second_reader.shards == 0


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (np.ones(2_000), "rewards: 2,000 of 2,000 values from row 0 differ, the first in row 0: "),
        (np.ones(2_500), "rewards: 2,000 rows from row 0 here, 2,500 by fastparquet"),
    ],
)
def test_counts_of_rows_are_all_written_alike(theirs: Any, text: str) -> None:
    """Each count of a disagreement has commas between its thousands."""
    table, values = pa.table({"rewards": np.zeros(2_000)}), of_numbers(theirs)
    reply = second_reader.ColumnReply(column="rewards", dtype=values.dtype)
    answers = [(reply, values.frames()), (second_reader.ColumnReply(end=True, first=1_000), [])]
    column, rows = second_reader._compared(table, iter(answers), "fastparquet")
    assert column.text.startswith(text)
    assert rows.text == "2,000 rows here, 1,000 by fastparquet"


def test_differing_rows_are_those_that_differ() -> None:
    """Rows differ by value, by size or by null, and are shown as people read them."""
    ours = of_numbers(np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], np.float32))
    theirs = of_numbers(np.array([[1.0, 2.0], [3.0, 9.0], [5.5, 6.0]], np.float32))
    assert ours.differing(theirs).tolist() == [1, 2]
    assert theirs.shown(1) == "[3.0, 9.0]"
    texts, others = of_items("str", [b"a", None, b"bc"]), of_items("str", [b"a", b"", b"b"])
    assert texts.differing(others).tolist() == [1, 2]
    assert [texts.shown(row) for row in range(3)] == ["'a'", "null", "'bc'"]
    again = ColumnValues.from_frames(texts.dtype, texts.frames())
    assert texts.differing(again).tolist() == []
