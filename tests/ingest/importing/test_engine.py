"""The engine: rows of several types are kept exactly, and a statement reads nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ingest.importing.engine import KeptRows, Workspace
from ingest.protocol.errors import ImportFailed


def kept(tables: list[Any]) -> list[Any]:
    """The cells of a column that was kept from several tables."""
    with Workspace() as space:
        rows = KeptRows(space.connection(), ["a"])
        for table in tables:
            rows.add(table)
        return [cell for table in rows.select(["a"]) for cell in table["a"].to_pylist()]


def test_cells_of_several_types_are_texts_or_bytes() -> None:
    """Numbers beside texts are texts, and everything beside bytes is bytes; none is rounded."""
    odd, big = pa.table({"a": [b"\xff"]}), 2**53 + 1
    assert kept([pa.table({"a": [1]}), pa.table({"a": ["x"]}), pa.table({"a": [None]})]) == [
        *("1", "x", None)
    ]
    assert kept([pa.table({"a": [big]}), pa.table({"a": [0.5]})]) == [str(big), "0.5"]
    assert kept([pa.table({"a": ["x"]}), odd]) == [b"x", b"\xff"]
    assert kept([odd, pa.table({"a": [1]})]) == [b"\xff", b"1"]


def test_numbers_times_and_lists_keep_their_type() -> None:
    """Nothing is changed on the way through the database."""
    for array in (
        pa.array([2**64 - 1, 0], pa.uint64()),
        pa.array([2**62, None], pa.timestamp("ns")),
        pa.array([[1.5, None], None], pa.list_(pa.float64())),
        pa.array([[1.5, 2.0], [0.0, 1.0]], pa.list_(pa.float32(), 2)),
        pa.array([{"u": 1}, None], pa.struct({"u": pa.int32()})),
        pa.array([True, None]),
    ):
        assert kept([pa.table({"a": pa.nulls(1)}), pa.table({"a": array})])[1:] == array.to_pylist()


def run(sql: str, table: Any, **types: str) -> list[dict[str, Any]]:
    with Workspace() as space:
        rows = KeptRows(space.connection(), table.column_names)
        rows.add(table)
        rows.show(types)
        rows.replace(sql, ["e", "t"])
        found = [one for part in rows.select(rows.columns) for one in part.to_pylist()]
        assert rows.rows == len(found)
        return found


def test_a_result_has_the_same_order_in_every_run() -> None:
    """By the columns of the order that it has, then by all others, whatever the statement's is."""
    table = pa.table({"e": ["b", "a", "b", None], "x": [1, 2, 0, 9], "t": [1, 0, 0, 5]})
    for clause in ("", "ORDER BY random()"):
        found = run(f"SELECT x, e, t FROM source {clause} -- a comment", table)
        assert [row["x"] for row in found] == [2, 0, 1, 9]


def test_cells_are_cast_only_by_hand() -> None:
    """A cell that is none of the type fails the statement, with its text."""
    table = pa.table({"n": ["1", "0.7"]})
    assert [row["n"] for row in run("SELECT n FROM source", table)] == ["0.7", "1"]
    assert [row["n"] for row in run("SELECT n FROM source", table, n="DOUBLE")] == [0.7, 1.0]
    with pytest.raises(ImportFailed, match=r"0\.7"):
        run("SELECT n FROM source", pa.table({"n": ["1", "0.7x"]}), n="DOUBLE")


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT 1; SELECT 2", "expected one SELECT statement, got SELECT, SELECT"),
        ("COPY source TO '{folder}/out.csv'", "expected one SELECT statement, got COPY"),
        ("", "expected one SELECT statement, got none"),
        ("SELECT * FROM read_text('{folder}/secret')", "disabled"),
        ("SELECT * FROM '{folder}/secret.csv'", "disabled|does not exist"),
        ("SELECT * FROM table_in_python", "does not exist"),
        ("SELECT missing FROM source", "sql: .*missing"),
        ("SELECT * FROM source) UNION (SELECT 1", "syntax"),
    ],
)
def test_a_statement_reads_only_the_source(sql: str, expected: str, tmp_path: Path) -> None:
    """One SELECT; no file, no object of Python, no extension."""
    table_in_python = pa.table({"a": [1]})
    (tmp_path / "secret").write_text("a\n1\n")
    (tmp_path / "secret.csv").write_text("a\n1\n")
    with pytest.raises(ImportFailed, match=expected):
        run(sql.format(folder=tmp_path), table_in_python)
    assert not (tmp_path / "out.csv").exists()


def test_a_full_disk_is_named() -> None:
    """Rows that do not fit into the memory need space for temporary files."""
    table = pa.table({"e": [f"{n * 7919 % 600_000:030}" for n in range(600_000)]})
    with Workspace() as space:
        connection = space.connection()
        rows = KeptRows(connection)
        rows.add(table)
        connection.execute("SET memory_limit = '32MB'; SET max_temp_directory_size = '1MB'")
        with pytest.raises(ImportFailed, match="temporary files is full; TMPDIR names another"):
            list(rows.by("e", ["e"]))
