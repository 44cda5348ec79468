"""DuckDB as an import's engine: it reads JSON lines, sorts out of core, and runs the user's SQL.

It guesses no types and judges no cell. JSON values are taken as text, so that a number of 64 bits
keeps its digits. Rows of other files are kept in a table of a temporary database, with the types
that their files have; a column that has several becomes text.

A statement of the user's sees only that table, as the view `source`. Every result is put into an
order that depends on its rows alone, because a second run has to send the same requests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingest.columns.arrow_kinds import is_bytes
from ingest.importing.cells import RAW, texts_of
from ingest.protocol.errors import ImportFailed

BATCH_ROWS = 65_536
MEMORY = "150MB"
"""The memory limit of DuckDB, which spills to the temporary folder."""
SAMPLE_ROWS = 20_000
"""The rows of JSON lines whose keys are the columns that a message names."""
LINE, BAD, _PLACE = "\x00line", "\x00bad", "\x00place"
FILE, ROW = "file", "row"
"""Columns of `source` with a row's file, and its number there."""
_FULL = ("No space left on device", "max_temp_directory_size", "failed to offload")
LARGEST_LINE = 16_000_000
"""The most bytes of a line of JSON."""


@contextmanager
def connected(database: Path | None = None) -> Iterator[Any]:
    """A DuckDB connection that installs and loads nothing, with times in UTC."""
    import duckdb  # noqa: PLC0415 - the extra `import`; not every import needs it

    config: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "python_enable_replacements": False,
        "memory_limit": MEMORY,
        "threads": 2,
    }
    if database is not None:
        config["temp_directory"] = str(database.parent)
    with failures(), closing(duckdb.connect(str(database or ":memory:"), config=config)) as opened:
        opened.execute("SET TimeZone = 'UTC'")
        yield opened


@contextmanager
def failures(what: str = "") -> Iterator[None]:
    """Convert DuckDB's errors to ImportFailed, in whose text `what` comes first."""
    import duckdb  # noqa: PLC0415 - the extra `import`; not every import needs it

    try:
        yield
    except duckdb.Error as error:
        text = _reason(error)
        if any(words in text for words in _FULL):
            text = f"the disk of the temporary files is full; TMPDIR names another folder ({text})"
        raise ImportFailed(what + text) from error


class Workspace:
    """A temporary folder with the databases of an import; a context manager that removes it."""

    def __init__(self) -> None:
        self._stack, self._databases = ExitStack(), 0

    def __enter__(self) -> Workspace:
        folder = tempfile.TemporaryDirectory(prefix="headrace-import-")
        self._folder = Path(self._stack.enter_context(folder))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def connection(self) -> Any:
        """A connection to a new database."""
        self._databases += 1
        path = self._folder / f"{self._databases}.duckdb"
        return self._stack.enter_context(connected(path))


def _reason(error: Exception) -> str:
    """A message of DuckDB's without the hints that follow its first paragraph."""
    return str(error).partition("\n\n")[0][:600]


def name_sql(name: str) -> str:
    """A name as an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'


def text_sql(text: str) -> str:
    """A text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def batches_of(connection: Any, query: str) -> Iterator[Any]:
    """The record batches of a query's result, as it is computed."""
    with failures():
        yield from connection.sql(query).to_arrow_reader(BATCH_ROWS)


# --- JSON lines ------------------------------------------------------------------------------


def json_names(path: Path) -> list[str]:
    """The keys of a file's first objects, in the order in which they occur."""
    with connected() as connection:
        rows = f"SELECT json FROM {_objects(path)} LIMIT {SAMPLE_ROWS}"
        keys = f"SELECT json_keys(json) AS names, min(n) AS n FROM ({_numbered(rows)})"
        query = f"{keys} WHERE json_type(json) = 'OBJECT' GROUP BY names ORDER BY n"
        found = connection.execute(query).fetchall()
    return list(dict.fromkeys(name for names, _ in found for name in names))


def json_rows(path: Path, columns: Sequence[str], names: Sequence[str]) -> Iterator[Any]:
    """Batches of JSON lines: LINE from 1, whether it is BAD, no object, and the columns as text.

    A column `RAW + NAME` is NAME as JSON. A name with dots that is no key is a path into objects.
    """
    own = [name.removeprefix(RAW) for name in columns]
    paths = f"[{', '.join(text_sql(_pointer(name, names)) for name in own)}]::VARCHAR[]"
    cells = [
        f"raw[{at}] AS c{at}"
        if name.startswith(RAW)
        else f"CASE WHEN kinds[{at}] = 'DOUBLE' AND regexp_full_match(cells[{at}], '-?[0-9]{{1,15}}"
        f"\\.0') THEN cells[{at}][:-3] ELSE cells[{at}] END AS c{at}"
        for at, name in enumerate(columns, 1)
    ]
    lines = _numbered(f"SELECT json FROM {_objects(path)}")
    parsed = (
        f"SELECT n, json IS NULL OR json_type(json) <> 'OBJECT' AS bad, "
        f"json_extract_string(json, {paths}) AS cells, json_type(json, {paths}) AS kinds, "
        f"json_extract(json, {paths}) AS raw FROM ({lines})"
    )
    query = f"SELECT {', '.join(['n', 'bad', *cells])} FROM ({parsed})"
    with connected() as connection:
        for batch in batches_of(connection, query):
            yield batch.rename_columns([LINE, BAD, *columns])


def _objects(path: Path) -> str:
    size = f"maximum_object_size = {LARGEST_LINE}"
    return f"read_ndjson_objects({text_sql(str(path))}, ignore_errors = true, {size})"


def _numbered(rows: str) -> str:
    return f"SELECT row_number() OVER () AS n, json FROM ({rows})"


def _pointer(name: str, names: Sequence[str]) -> str:
    parts = [name] if name in names else name.split(".")
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in parts)


# --- rows that are kept ----------------------------------------------------------------------


class KeptRows:
    """The rows of an import in a table of a temporary database; they are added in their order.

    `columns` are those given, and others that the rows have. They are called `c0`, `c1`, ... in the
    table, because names of SQL do not distinguish cases; `place` counts the rows.
    """

    def __init__(self, connection: Any, columns: Sequence[str] = ()) -> None:
        self.connection, self.columns, self.rows = connection, list[str](), 0
        self._kinds: list[Any] = []
        connection.execute("CREATE TABLE rows (place BIGINT)")
        self._require(columns)

    def _require(self, columns: Sequence[str]) -> None:
        """Add those of the columns that the table lacks, with nulls."""
        for name in columns:
            if name not in self.columns:
                self.connection.execute(f"ALTER TABLE rows ADD c{len(self.columns)} INTEGER")
                self.columns.append(name)
                self._kinds.append(None)

    def add(self, table: Any) -> None:
        """Add a pyarrow.Table; columns that it lacks are null, also in the rows before."""
        self._require(table.column_names)
        arrays = [pa.array(np.arange(self.rows, self.rows + len(table)))]
        for at, name in enumerate(self.columns):
            there = name in table.column_names
            column = _storable(table[name].combine_chunks()) if there else pa.nulls(len(table))
            if not pa.types.is_null(column.type):
                column = self._as_kept(at, column)
            arrays.append(column)
        self.rows += len(table)
        names = ["place", *(f"c{at}" for at in range(len(self.columns)))]
        self.connection.register("batch", pa.table(arrays, names))
        with failures():
            self.connection.execute("INSERT INTO rows SELECT * FROM batch")
        self.connection.unregister("batch")

    def _as_kept(self, at: int, column: Any) -> Any:
        """A column in the type of the table's; if they differ, both become text, or bytes."""
        known, new = self._kinds[at], column.type
        if known is None:
            self._kinds[at] = new
            self._alter(at, pa.table({"c": column.slice(0, 0)}))
        elif known != new:
            bytes_too = is_bytes(known) or is_bytes(new)
            self._kinds[at] = kind = pa.binary() if bytes_too else pa.string()
            if known != kind:
                using = f" USING encode(c{at}::VARCHAR)" if bytes_too else ""
                name = "BLOB" if bytes_too else "VARCHAR"
                self.connection.execute(f"ALTER TABLE rows ALTER c{at} TYPE {name}{using}")
            return column if new == kind else texts_of(column).cast(kind)
        return column

    def _alter(self, at: int, empty: Any) -> None:
        """Give a column, which has only nulls, the type of another."""
        self.connection.register("empty", empty)
        kind = self.connection.sql("SELECT c FROM empty").types[0]
        self.connection.unregister("empty")
        self.connection.execute(f"ALTER TABLE rows ALTER c{at} TYPE {kind}")

    def select(self, columns: Sequence[str], then: str = "ORDER BY rows.place") -> Iterator[Any]:
        """Tables with some of the columns, of all rows; `then` follows `FROM rows` in SQL."""
        cells = (f", rows.{self.column(name)} AS v{at}" for at, name in enumerate(columns))
        query = f"SELECT rows.place{''.join(cells)} FROM rows {then}"
        for batch in batches_of(self.connection, query):
            table = pa.Table.from_batches([batch])
            yield table.rename_columns([_PLACE, *columns]).select(list(columns))

    def column(self, name: str) -> str:
        return f"c{self.columns.index(name)}"

    def by(self, key: str, columns: Sequence[str]) -> Iterator[Any]:
        """Tables of rows in the order of the last row of their key; rows of a key are adjacent."""
        k = self.column(key)
        last = f"SELECT {k} AS key, max(place) AS last FROM rows WHERE {k} IS NOT NULL GROUP BY {k}"
        order = "ORDER BY coalesce(last, rows.place), rows.place"
        yield from self.select(columns, f"LEFT JOIN ({last}) ON rows.{k} = key {order}")

    def drop_repeated(self, keys: Sequence[str]) -> int:
        """Keep only the first row of each key; return how many others there were."""
        names = ", ".join(map(self.column, keys))
        whole = " AND ".join(f"{self.column(key)} IS NOT NULL" for key in keys)
        firsts = f"SELECT min(place) FROM rows WHERE {whole} GROUP BY {names}"
        query = f"DELETE FROM rows WHERE {whole} AND place NOT IN ({firsts})"
        with failures():
            ((count,),) = self.connection.execute(query).fetchall()
        return int(count)

    # --- the user's statement ------------------------------------------------------------------

    def show(self, types: Mapping[str, str]) -> None:
        """Show the rows as the view `source`, and lock everything else away.

        `types`: column -> the type of SQL that its cells are cast to.
        """
        cells = (
            f"{self._typed(name, types.get(name))} AS {name_sql(name)}"
            for name in self.columns
            if name  # an index without a name has none in SQL either
        )
        with failures("sql: "):
            self.connection.execute(f"CREATE VIEW source AS SELECT {', '.join(cells)} FROM rows")
            for setting in ("enable_external_access = false", "lock_configuration = true"):
                self.connection.execute(f"SET {setting}")

    def replace(self, sql: str, order: Sequence[str]) -> None:
        """Replace the rows by the result of a statement over `source`.

        The result is ordered by the columns of `order` that it has, then by all others. Raises
        ImportFailed for anything but one SELECT, and for one that reads anything else.
        """
        with failures("sql: "):
            self._replace(sql, order)

    def _replace(self, sql: str, order: Sequence[str]) -> None:
        connection = self.connection
        found = connection.extract_statements(sql)
        if len(found) != 1 or found[0].type.name != "SELECT":
            kinds = ", ".join(one.type.name for one in found) or "none"
            raise ImportFailed(f"sql: expected one SELECT statement, got {kinds}")
        found = f"(\n{sql}\n)"
        columns = list(connection.sql(f"SELECT * FROM {found}").columns)
        by = [name for name in order if name in columns]
        by += [name for name in columns if name not in by]
        ordered = ", ".join(f"{name_sql(name)} NULLS LAST" for name in by)
        names = ", ".join(f"{name_sql(name)} AS c{at}" for at, name in enumerate(columns))
        numbered = f"SELECT row_number() OVER (ORDER BY {ordered}) - 1 AS place, * FROM {found}"
        result = f"SELECT place, {names} FROM ({numbered}) ORDER BY place"
        for statement in (
            f"CREATE TABLE result AS {result}",
            "DROP VIEW source",
            "DROP TABLE rows",
            "ALTER TABLE result RENAME TO rows",
        ):
            connection.execute(statement)
        self.columns = columns
        ((self.rows,),) = connection.execute("SELECT count(*) FROM rows").fetchall()

    def _typed(self, name: str, kind: str | None) -> str:
        return self.column(name) if kind is None else f"CAST({self.column(name)} AS {kind})"


def _storable(column: Any) -> Any:
    """A column in a type that DuckDB returns unchanged; others as text."""
    kind, types = column.type, pa.types
    if types.is_float16(kind):
        return column.cast(pa.float32())
    if types.is_decimal(kind) and kind.precision > 38:
        return texts_of(column)
    if types.is_time(kind) or types.is_duration(kind) or types.is_interval(kind):
        return texts_of(column)
    if types.is_date64(kind):
        return column.cast(pa.timestamp("ms"))
    return column


def cut_by(tables: Iterator[Any], key: str) -> Iterator[Any]:
    """Cut tables only where the key changes: each has all rows of its keys."""
    held: list[Any] = []
    last: Any = None
    for table in tables:
        keys = table[key].combine_chunks().fill_null("")
        differs = pc.not_equal(keys.slice(1), keys.slice(0, max(0, len(keys) - 1)))
        places = np.flatnonzero(differs.to_numpy(zero_copy_only=False)) + 1
        first = keys[0].as_py()
        if held and first != last:
            yield pa.concat_tables(held).combine_chunks()
            held = []
        if len(places):
            yield pa.concat_tables([*held, table.slice(0, places[-1])]).combine_chunks()
            held, table = [], table.slice(places[-1])
        held.append(table)
        last = keys[len(keys) - 1].as_py()
    if held:
        yield pa.concat_tables(held).combine_chunks()
