"""A source that breaks off, or changes while it is imported, stores no row that comes again."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from ingest.importing.importing import import_table
from ingest.importing.inference import infer_spaces
from ingest.importing.options import ImportOptions
from ingest.importing.sources import open_source
from ingest.protocol.errors import ImportFailed
from tests.collector_process import CollectorProcess, declare, shard_rows

COUNT = 3_000
TABLE = pa.table(
    {
        "x": [n / 4 for n in range(COUNT)],
        "a": [n % 2 for n in range(COUNT)],
        "r": [float(n) for n in range(COUNT)],
        "unused": [f"{n * 7919 % 1000}" for n in range(COUNT)],
    }
)
MEANING: dict[str, Any] = {"observation": ["x"], "action": "a", "reward": "r"}


@pytest.fixture
def collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CollectorProcess]:
    """A collector; imports read in small blocks and send in small requests."""
    monkeypatch.setattr("ingest.importing.readers.BLOCK_BYTES", 20_000)
    monkeypatch.setattr("ingest.importing.readers.BLOCK_ROWS", 500)
    monkeypatch.setattr("ingest.importing.sources.BLOCK_ROWS", 2_000)
    monkeypatch.setattr("ingest.importing.posting.ROWS", 500)
    declare(tmp_path / "root", "box:1", "discrete:2")
    with CollectorProcess(tmp_path / "root") as running:
        yield running


def rewards(collector: CollectorProcess) -> Counter[float]:
    assert collector.stop() == 0
    return Counter(row["rewards"] for row in shard_rows(collector.root))


def lines() -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in TABLE.to_pylist())


def csv() -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(TABLE, sink)
    return bytes(sink.getvalue())


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(data)
    return bytes(sink.getvalue())


def arrow(make: Any, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with make(sink, TABLE.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(TABLE, max_chunksize=COUNT // 5)
    return bytes(sink.getvalue())


def parquet(**options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(TABLE, sink, row_group_size=COUNT // 5, **options)
    return bytes(sink.getvalue())


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]


def in_page_of(data: bytes, group: int, column: int) -> bytes:
    """A Parquet file with a damaged byte in the middle of a column's values."""
    found = pq.ParquetFile(pa.BufferReader(data)).metadata.row_group(group).column(column)
    begin = found.dictionary_page_offset or found.data_page_offset
    return flipped(data, begin + found.total_compressed_size // 2)


def cut(share: float) -> Callable[[bytes], bytes]:
    return lambda data: data[: int(len(data) * share)]


PLAIN = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
BROKEN: dict[str, tuple[str, Callable[[], bytes], Callable[[bytes], bytes], str]] = {
    "lines": ("log.jsonl.gz", lambda: gzip.compress(lines()), cut(0.6), "Truncated"),
    "trailer": ("log.jsonl.gz", lambda: gzip.compress(lines()), lambda x: x[:-8], "Truncated"),
    "sum": ("log.jsonl.gz", lambda: gzip.compress(lines()), lambda x: flipped(x, -7), "check"),
    "second": (
        "log.csv.gz",
        lambda: gzip.compress(csv()[:9_000]) + gzip.compress(csv()[9_000:]),
        cut(0.9),
        "Truncated",
    ),
    "zstd": ("log.csv.zst", lambda: zstd(csv()), cut(0.6), "Truncated"),
    "footer": ("log.parquet", parquet, cut(0.6), "expected Parquet"),
    "page": ("log.parquet", lambda: parquet(**PLAIN), lambda x: in_page_of(x, 4, 2), "CRC"),
    "unused": ("log.parquet", lambda: parquet(**PLAIN), lambda x: in_page_of(x, 4, 3), "CRC"),
    "stream": ("log.arrows", lambda: arrow(pa.ipc.new_stream), cut(0.6), "Expected to be able"),
    "marker": ("log.arrows", lambda: arrow(pa.ipc.new_stream), lambda x: x[:-8], "end marker"),
    "packed": (
        "log.arrows.gz",
        lambda: gzip.compress(arrow(pa.ipc.new_stream)),
        lambda x: flipped(x, -7),
        "check",
    ),
    "more": ("log.arrows", lambda: arrow(pa.ipc.new_stream), lambda x: x + x, "end marker"),
    "file": (
        "log.arrow",
        lambda: arrow(pa.ipc.new_file, compression="zstd"),
        lambda x: x[:4_000] + bytes(500) + x[4_500:],
        "log.arrow",
    ),
}


@pytest.mark.parametrize("name", [None, "shop"])
@pytest.mark.parametrize("how", BROKEN)
def test_a_file_that_is_not_whole_stores_nothing(
    how: str, name: str | None, collector: CollectorProcess, tmp_path: Path
) -> None:
    """It is named; once it is repaired, the same import stores every row once."""
    file, make, damaged, expected = BROKEN[how]
    path, whole = tmp_path / file, make()
    given = {**MEANING, "name": name, "address": collector.address}
    path.write_bytes(damaged(whole))
    with pytest.raises(ImportFailed, match=expected) as failed:
        import_table(path, **given)
    assert str(path) in str(failed.value)
    assert collector.get("/readyz")[1]["steps"] == 0
    path.write_bytes(whole)
    assert import_table(path, **given).steps == COUNT
    assert import_table(path, **given).rows_known == COUNT
    assert rewards(collector) == Counter(TABLE["r"].to_pylist())


def test_a_folder_with_a_broken_file_stores_nothing(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    """All files are read to their ends before the first row of any is sent."""
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "1.parquet").write_bytes(parquet())
    (folder / "2.jsonl.gz").write_bytes(gzip.compress(lines())[:-1])
    with pytest.raises(ImportFailed, match=r"2\.jsonl\.gz.*Truncated"):
        import_table(folder, address=collector.address, **MEANING)
    assert not rewards(collector)


def test_no_spaces_are_declared_from_a_file_that_is_not_whole(tmp_path: Path) -> None:
    """A stream that lacks its end marker reads like a shorter one."""
    path = tmp_path / "log.arrows"
    path.write_bytes(arrow(pa.ipc.new_stream)[:-8])
    with pytest.raises(ImportFailed, match=r"log\.arrows.*end marker"):
        infer_spaces(ImportOptions(source=path, **MEANING))


Change = Callable[[Path], object]


def same_size(path: Path) -> None:
    """Another reward in the last row, with the times of before."""
    before, data = path.stat(), path.read_bytes()
    with path.open("r+b") as file:
        file.write(data[:-4] + b"7" + data[-3:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


CHANGES: dict[str, tuple[Change, str]] = {
    "content": (same_size, "has changed since"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() * 2), "has changed since"),
    "shorter": (lambda path: os.truncate(path, path.stat().st_size // 2), "has changed since"),
    "replaced": (replaced, "has changed since"),
    "removed": (Path.unlink, "cannot be read"),
}


@pytest.mark.parametrize("how", CHANGES)
def test_a_file_that_changes_between_passes_is_refused(how: str, tmp_path: Path) -> None:
    """No row of the later pass is used."""
    change, expected = CHANGES[how]
    path = tmp_path / "log.csv"
    path.write_bytes(csv())
    (unit,) = open_source(path, None)
    unit.digest()
    assert len(list(unit.blocks(["x"])))
    change(path)
    with pytest.raises(ImportFailed, match=rf"log\.csv.*{expected}"):
        next(iter(unit.blocks(["x"])))


@pytest.mark.parametrize("how", CHANGES)
def test_a_file_that_changes_while_it_is_sent_is_refused(
    how: str, collector: CollectorProcess, tmp_path: Path
) -> None:
    """No row is sent that was read after the change; the rows before it are known afterwards."""
    change, expected = CHANGES[how]
    path = tmp_path / "log.csv"
    path.write_bytes(csv())
    given = {**MEANING, "address": collector.address}
    changed: list[int] = []

    def on_progress(what: str, done: int, total: int | None) -> None:
        if done >= 1_000 and not changed:
            changed.append(done)
            change(path)

    with pytest.raises(ImportFailed, match=rf"log\.csv.*{expected}") as failed:
        import_table(path, on_progress=on_progress, **given)
    assert f"; {changed[0]:,} rows before that are stored: import it again as it was" in str(
        failed.value
    )
    path.write_bytes(csv())
    again = import_table(path, **given)
    assert (again.rows_known, again.steps) == (changed[0], COUNT - changed[0])
    assert rewards(collector) == Counter(TABLE["r"].to_pylist())


@pytest.mark.parametrize("name", [None, "shop"])
def test_a_text_that_grows_under_its_name_is_read_once(
    name: str | None, collector: CollectorProcess, tmp_path: Path
) -> None:
    """A program may append to its log during an import under a name, which needs one pass; under
    the digest of its content the import is refused."""
    path = tmp_path / "log.csv"
    path.write_bytes(csv())
    given = {**MEANING, "name": name, "address": collector.address}

    def on_progress(what: str, done: int, total: int | None) -> None:
        with path.open("ab") as file:
            file.write(b'9,1,0.5,"u"\n')

    if name is None:
        with pytest.raises(ImportFailed, match="has changed since"):
            import_table(path, on_progress=on_progress, **given)
        return
    first = import_table(path, on_progress=on_progress, **given)
    again = import_table(path, **given)
    assert first.steps >= COUNT
    assert again.rows_known == first.steps
    found = rewards(collector)
    assert found.total() == again.rows == len(path.read_bytes().splitlines()) - 1
    assert max(found[reward] for reward in TABLE["r"].to_pylist()) == 1


def broken_reader(after: int | None) -> pa.RecordBatchReader:
    """A reader of 500 rows a batch, which fails after some batches."""

    def batches() -> Iterator[pa.RecordBatch]:
        for at, batch in enumerate(TABLE.to_batches(500)):
            if at == after:
                raise ConnectionResetError("the line broke")
            yield batch

    return pa.RecordBatchReader.from_batches(TABLE.schema, batches())


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("episode", [None, "a"])
def test_a_reader_that_breaks_says_what_is_stored_and_how_to_go_on(
    episode: str | None, after: int, collector: CollectorProcess
) -> None:
    """Its end cannot be known before. Under its name, the whole source adds the rest."""
    given = {**MEANING, "name": "line", "episode": episode, "address": collector.address}
    with pytest.raises(ImportFailed, match="ConnectionResetError: the line broke") as failed:
        import_table(broken_reader(after), **given)
    before = 0 if episode else 500 * after
    if not before:  # episodes need all rows first
        assert str(failed.value).endswith("; nothing of it was stored")
    else:
        assert str(failed.value).endswith(
            "; 1,500 rows before that are stored: import all of it under the name 'line' again to "
            "add the rest"
        )
    report = import_table(broken_reader(None), **given)
    assert (report.rows_known, report.steps) == (before, COUNT - before)
    assert rewards(collector) == Counter(TABLE["r"].to_pylist())


@pytest.mark.parametrize("name", [None, "orders"])
def test_a_query_that_breaks_says_what_is_stored_and_how_to_go_on(
    name: str | None, collector: CollectorProcess, tmp_path: Path
) -> None:
    """A row in its middle makes the database fail; after it is mended, the same import goes on."""
    path = tmp_path / "orders.db"
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("create table orders (x real, a int, r real, n text)")
        rows = [(x, a, r, "1") for x, a, r in zip(*map(pa.Array.to_pylist, columns()), strict=True)]
        rows[2_100] = (*rows[2_100][:3], "not json")
        database.executemany("insert into orders values (?, ?, ?, ?)", rows)
    given = {**MEANING, "name": name, "address": collector.address}
    given["query"] = "select x, a, r * json(n) as r from orders order by rowid"
    how = "all of it under the name 'orders'" if name else "the same query"
    text = f"malformed JSON; 2,000 rows before that are stored: import {how} again to add the rest"
    with pytest.raises(ImportFailed, match=text):
        import_table(f"sqlite:///{path}", **given)
    stored = collector.get("/readyz")[1]["steps"]
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("update orders set n = '1'")
    report = import_table(f"sqlite:///{path}", **given)
    assert (report.rows_known, report.steps) == (stored, COUNT - stored)
    assert rewards(collector) == Counter(TABLE["r"].to_pylist())


def columns() -> list[pa.Array]:
    return [TABLE[name].combine_chunks() for name in ("x", "a", "r")]
