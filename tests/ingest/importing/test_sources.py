"""Sources with the same rows give the same import, with no row twice."""

from __future__ import annotations

import gc
import gzip
import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import sqlalchemy

from ingest.importing.categories import spelled_as
from ingest.importing.importing import import_table
from ingest.importing.options import ImportOptions
from ingest.importing.report import ImportReport
from ingest.importing.sources import array_of, open_source, require_columns
from ingest.protocol.errors import ImportFailed
from storage.spaces.descriptors import Box, Discrete
from tests.collector_process import CollectorProcess, declare, shard_rows

ROWS = [{"x": n / 4, "a": n % 3, "r": float(n), "e": n // 2, "c": "ab"[n % 2]} for n in range(12)]
TABLE = pa.Table.from_pylist(ROWS)
MEANING: dict[str, Any] = {"observation": ["x", "c:categories"], "action": "a", "reward": "r"}


def zstd(path: Path, data: bytes) -> None:
    with pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(data)


def arrow(path: Path, make: Any) -> bytes:
    with make(str(path), TABLE.schema) as writer:
        writer.write_table(TABLE)
    return path.read_bytes()


def csv(path: Path) -> bytes:
    pyarrow.csv.write_csv(TABLE, str(path))
    return path.read_bytes()


WRITE: dict[str, Callable[[Path], object]] = {
    "log.csv": csv,
    "log.csv.gz": lambda path: path.write_bytes(gzip.compress(csv(path.with_suffix("")))),
    "log.csv.zst": lambda path: zstd(path, csv(path.with_suffix(""))),
    "log.tsv": lambda path: path.write_bytes(csv(path).replace(b",", b"\t")),
    "log.jsonl": lambda path: pl.from_arrow(TABLE).write_ndjson(path),
    "log.ndjson.gz": lambda path: path.write_bytes(
        gzip.compress(pl.from_arrow(TABLE).write_ndjson().encode())
    ),
    "log.parquet": lambda path: pq.write_table(TABLE, path, row_group_size=5),
    "log.arrow": lambda path: arrow(path, pa.ipc.new_file),
    "log.arrows": lambda path: arrow(path, pa.ipc.new_stream),
    "log.arrows.zst": lambda path: zstd(path, arrow(path.with_suffix(""), pa.ipc.new_stream)),
    "log.feather": lambda path: pl.from_arrow(TABLE).write_ipc(path),
}


def check(source: Any, tmp_path: Path, **more: Any) -> ImportReport:
    """The result of an import without a collector."""
    meaning = {**MEANING, "address": "http://127.0.0.1:9", "timeout": 0.1}
    meaning["categories"] = tmp_path / "codes.json"
    return import_table(source, check=True, **{**meaning, **more})


def understood(report: ImportReport) -> tuple[Any, ...]:
    found = report.understood
    return report.steps, report.bad, found["spaces"], found["rewards"], found["returns"]


BOOLEANS = pd.DataFrame({"b": [True, False] * 3, "a": [0, 1, 1] * 2, "r": [0.5] * 6})
BOOLEAN_FILES: dict[str, Callable[[Path], object]] = {
    "b.csv": lambda path: BOOLEANS.to_csv(path, index=False),
    "lower.csv": lambda path: BOOLEANS.replace({True: "true", False: "false"}).to_csv(path),
    "b.jsonl": lambda path: BOOLEANS.to_json(path, orient="records", lines=True),
    "b.parquet": BOOLEANS.to_parquet,
}


@pytest.mark.parametrize("as_what", ["b", "b:categories"])
def test_booleans_are_the_same_in_every_kind_of_file(as_what: str, tmp_path: Path) -> None:
    """They are 1 and 0, or the names true and false, whatever wrote them."""
    given = {"observation": [as_what], "action": "b", "categories": None}
    expected = understood(check(BOOLEANS, tmp_path, **given))
    space = Discrete.of(["false", "true"]) if "categories" in as_what else Box((1,))
    spaces = expected[2]
    assert (spaces["observation"], spaces["action"]) == (space.to_json(), Discrete(2).to_json())
    for name, save in BOOLEAN_FILES.items():
        save(tmp_path / name)
        assert understood(check(tmp_path / name, tmp_path, **given)) == expected


@pytest.mark.parametrize("names", [["false", "true"], ["True", "False"]])
def test_booleans_are_found_in_either_spelling(names: list[str], tmp_path: Path) -> None:
    """By the names that a policy declares, and by a file of codes."""
    kept = tmp_path / "codes.json"
    kept.write_text(json.dumps({"b": names}))
    given = {"observation": ["b:categories"], "action": "a", "reward": "r", "categories": str(kept)}
    for space in (f"discrete:{json.dumps(names)}", "discrete:2"):
        root = tmp_path / space[:11]
        declare(root, space, "discrete:2")
        with CollectorProcess(root) as collector:
            for name, save in BOOLEAN_FILES.items():
                save(tmp_path / name)
                report = import_table(tmp_path / name, address=collector.address, **given)
                assert (report.steps, report.bad_counts) == (6, {})
            assert collector.stop() == 0
        found = Counter(row["obs"] for row in shard_rows(root))
        assert found == {0: 12, 1: 12}


def test_names_in_both_spellings_stay_apart() -> None:
    """A name that is declared as it is written is that name; what could be both is neither."""
    read = spelled_as(["true", "True", "no"], pa.array(["True", "true", "TRUE", "no", None]))
    assert read.to_pylist() == ["True", "true", "TRUE", "no", None]


@pytest.mark.parametrize("name", WRITE)
def test_every_kind_of_file_holds_the_same_rows(name: str, tmp_path: Path) -> None:
    """Spaces, steps and rewards are those of the table, by rows and by episodes."""
    WRITE[name](tmp_path / name)
    for more in ({}, {"episode": "e"}):
        expected = understood(check(TABLE, tmp_path, **more))
        assert expected[0] == len(ROWS)
        assert understood(check(tmp_path / name, tmp_path, **more)) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda: pd.DataFrame(ROWS),
        lambda: pd.DataFrame(ROWS).astype({"c": "category"}),
        lambda: pl.DataFrame(ROWS),
        lambda: pl.DataFrame(ROWS).with_columns(pl.col("c").cast(pl.Categorical)),
        lambda: pl.DataFrame(ROWS).with_columns(pl.col("c").cast(pl.Enum(["a", "b"]))),
        lambda: TABLE.to_batches()[0],
        lambda: TABLE.to_reader(),
        lambda: TABLE.set_column(4, "c", TABLE["c"].dictionary_encode()),
    ],
)
def test_tables_in_memory_hold_the_same_rows(make: Any, tmp_path: Path) -> None:
    """pandas, polars, pyarrow; a reader is read once, and has to be named."""
    expected = understood(check(TABLE, tmp_path, episode="e"))
    assert understood(check(make(), tmp_path, episode="e", name="mine")) == expected


def test_a_reader_needs_a_name(tmp_path: Path) -> None:
    """A reader needs a name, since its content is not known before it is read."""
    with pytest.raises(ImportFailed, match="name: expected one"):
        check(TABLE.to_reader(), tmp_path)


@pytest.mark.parametrize("scheme", ["sqlite", "adbc+sqlite"])
def test_a_query_is_a_source(scheme: str, tmp_path: Path) -> None:
    """A query runs by SQLAlchemy or an ADBC driver; errors name the database and no parameter."""
    with sqlite3.connect(tmp_path / "shop.db") as database:
        database.execute("CREATE TABLE log (x REAL, a INTEGER, r REAL, e INTEGER, c TEXT)")
        rows = [tuple(row.values()) for row in ROWS]
        database.executemany("INSERT INTO log VALUES (?, ?, ?, ?, ?)", rows)
    database.close()
    url = f"{scheme}:///{tmp_path}/shop.db"
    for more in ({}, {"episode": "e"}):
        expected = understood(check(TABLE, tmp_path, **more))
        found = check(url, tmp_path, query="SELECT * FROM log ORDER BY rowid", **more)
        assert understood(found) == expected
    with pytest.raises(ImportFailed, match=r"shop\.db: .*no such table: logs"):
        check(url + "?timeout=3" * (scheme == "sqlite"), tmp_path, query="SELECT * FROM logs")
    with pytest.raises(ImportFailed, match="expected a query"):
        check(url, tmp_path)
    none = url.replace(scheme, "adbc+nobody")
    with pytest.raises(ImportFailed, match="needs adbc_driver_nobody, a driver"):
        check(none, tmp_path, query="SELECT 1")


def test_a_query_releases_its_database_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its last row, when it is left early, when it fails, and when it was never read."""
    monkeypatch.setattr("ingest.importing.sources.BLOCK_ROWS", 8)  # two rows at a time
    url = f"sqlite:///{tmp_path}/shop.db"
    query = "SELECT column1 AS x FROM (VALUES (1), (2), (3), (4), (-9223372036854775808), (6))"
    released: list[object] = []

    def note(engine: object) -> None:
        released.append(engine)

    sqlalchemy.event.listen(sqlalchemy.Engine, "engine_disposed", note)
    try:
        (unit,) = open_source(url, query)
        assert sum(len(block.numbers) for block in unit.blocks(["x"])) == 6
        assert len(released) == 1
        (unit,) = open_source(url, query)
        blocks = unit.blocks(["x"])
        assert next(blocks).numbers.tolist() == [1, 2]
        blocks.close()
        assert len(released) == 2
        (unit,) = open_source(url, query.replace("SELECT column1", "SELECT abs(column1)"))
        with pytest.raises(ImportFailed, match="integer overflow"):
            list(unit.blocks(["x"]))
        assert len(released) == 3
        (unit,) = open_source(url, query)
        with pytest.raises(ImportFailed, match="no column 'y'"):
            require_columns(unit, ["y"])
        del unit
        gc.collect()
        assert len(released) == 4
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "engine_disposed", note)


def test_a_folder_is_its_files_and_their_partitions(tmp_path: Path) -> None:
    """`name=value` in a path is a column; hidden and unrelated files are skipped."""
    folder = tmp_path / "logs"
    for country, part in (("DE", TABLE.slice(0, 4)), ("F%2FR", TABLE.slice(4))):
        (folder / f"country={country}").mkdir(parents=True)
        pq.write_table(part, folder / f"country={country}" / "part.parquet")
    (folder / "_SUCCESS").touch()
    (folder / "readme.txt").write_text("no rows")
    more = {"observation": ["x"], "tags": {"land": "country"}}
    assert understood(check(folder, tmp_path, **more))[0] == len(ROWS)
    units = open_source(folder, None)
    assert [unit.label for unit in units] == [
        "country=DE/part.parquet",
        "country=F%2FR/part.parquet",
    ]
    (block,) = units[1].blocks(["country", "r"])
    assert set(block.table["country"].to_pylist()) == {"F/R"}
    assert len({unit.digest() for unit in units}) == 2
    matching = open_source(str(folder / "country=*"), None)
    assert [(unit.label, unit.digest()) for unit in matching] == [
        (unit.label, unit.digest()) for unit in units
    ]
    assert len(open_source(str(folder / "**" / "part.*"), None)) == 2
    pq.write_table(TABLE.drop_columns("c"), folder / "z.parquet")
    with pytest.raises(ImportFailed, match=r"z\.parquet: no column 'c'.*--sql 'SELECT \* FROM"):
        check(folder, tmp_path)
    assert understood(check(folder, tmp_path, sql="SELECT * FROM source", missing="drop"))[0] == 12


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    """A folder without files, an object that is not a table, a missing column."""
    with pytest.raises(ImportFailed, match="expected files of"):
        check(tmp_path, tmp_path)
    with pytest.raises(ImportFailed, match=r"expected files of .* that match"):
        check(f"{tmp_path}/*.csv", tmp_path)
    with pytest.raises(ImportFailed, match="got list"):
        check([1, 2], tmp_path)
    with pytest.raises(ImportFailed, match="no column 'z'; it has x, a, r, e, c"):
        require_columns(open_source(TABLE, None)[0], ["z"])
    twice = TABLE.append_column("x", TABLE["x"])
    for table in (twice, twice.to_reader()):
        with pytest.raises(ImportFailed, match=r"table: expected unique column names, got \['x'\]"):
            check(table, tmp_path, name="mine")
    with pytest.raises(ImportFailed, match="expected plain columns"):
        check(pd.Series([1.0]), tmp_path)
    with pytest.raises(ImportFailed, match="query: expected a database's URL as the source, got"):
        check(tmp_path / "log.csv", tmp_path, query="SELECT 1")
    (tmp_path / "log.csv").write_bytes("x,a,r\n".encode("utf-16"))
    with pytest.raises(ImportFailed, match=r"log\.csv: expected CSV in UTF-8"):
        check(tmp_path / "log.csv", tmp_path)
    (tmp_path / "log.parquet.gz").write_bytes(b"x")
    with pytest.raises(ImportFailed, match=r"expected Parquet without"):
        check(tmp_path / "log.parquet.gz", tmp_path)


def test_cells_of_a_query_keep_their_digits() -> None:
    """Of several types they are texts or bytes; NaN is null in a list's JSON."""
    assert array_of(["a", b"b", 1, None]).to_pylist() == [b"a", b"b", b"1", None]
    assert array_of(["a", [1.0, float("nan")], True]).to_pylist() == ["a", "[1.0, null]", "true"]
    assert array_of([2**53 + 1, 0.5]).to_pylist() == [str(2**53 + 1), "0.5"]
    assert array_of([1, 0.5]).to_pylist() == [1.0, 0.5]


def test_a_table_is_named_by_its_rows_however_they_lie_in_chunks() -> None:
    """Two frames of the same rows are one import."""
    chunks = pa.concat_tables([TABLE.slice(0, 5), TABLE.slice(5)])
    names = {open_source(table, None)[0].digest() for table in (TABLE, chunks)}
    other = open_source(TABLE.slice(1), None)[0].digest()
    assert len(names) == 1
    assert other not in names
    assert ImportOptions(source=TABLE, **MEANING).columns == ["x", "c", "a", "r"]
