"""The digest of an import's first rows depends on their values alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.bulk_import.repeats import digest_rows

COLUMNS = {
    "eps_id": pa.array(["a", "a", "", "c", "d", "a", "a"]),
    "tags": pa.array(["x", None, "y", "x", None, None, ""]),
    "continues": pa.nulls(7),
    "infos": pa.array([None, "{}", None, "{}", "{}", None, "{}"], pa.large_string()),
    "truncateds": pa.array([True, False, None, True, False, True, True]),
    "rewards": pa.array([0.5, None, 2.0, 3.0, 4.0, 5.0, 6.0]),
    "obs": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(14, dtype=np.float32)), 2),
    "obs.b": pa.array([[1], [], [2, 3], [4], [], [5], [6]], pa.list_(pa.uint8())),
    "actions": pa.array([b"a", b"", b"bc", b"d", b"e", b"f", b"g"]),
}
TABLE = pa.table(COLUMNS)


@given(rows=st.integers(0, 7), cuts=st.lists(st.integers(0, 7), max_size=4))
def test_chunks_and_later_rows_do_not_matter(rows: int, cuts: list[int]) -> None:
    edges = sorted({0, 7, *cuts})
    pieces = [TABLE.slice(a, b - a) for a, b in pairwise(edges)]
    alone = pa.Table.from_pylist(TABLE.slice(0, rows).to_pylist(), TABLE.schema)
    assert digest_rows(pa.concat_tables(pieces), rows) == digest_rows(alone, rows)
    assert digest_rows(TABLE.select(TABLE.column_names[::-1]), rows) == digest_rows(alone, rows)


def test_odd_bytes_behind_the_offsets_are_nobodys() -> None:
    """Arrow accepts buffers that are longer than their content by any number of bytes."""
    offsets = pa.py_buffer(np.array([0, 1, 3], np.int32).tobytes() + b"?")
    odd = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"abc")])
    plain = pa.table({"tags": ["a", "bc"]})
    assert digest_rows(pa.table({"tags": odd}), 2) == digest_rows(plain, 2)


def test_a_column_may_be_there_twice() -> None:
    """The import is refused for that, but not by the digest."""
    twice = pa.table([COLUMNS["eps_id"], COLUMNS["tags"]], names=["eps_id", "eps_id"])
    assert digest_rows(twice, 7) != digest_rows(TABLE.select(["eps_id"]), 7)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("row", [0, 1, 4])
def test_every_value_counts(name: str, row: int) -> None:
    values = TABLE[name].to_pylist()
    values[row], values[row + 1] = values[row + 1], values[row]
    at = TABLE.column_names.index(name)
    changed = TABLE.set_column(at, name, pa.array(values, COLUMNS[name].type))
    same = values[row] == values[row + 1]
    assert (digest_rows(changed, 7) == digest_rows(TABLE, 7)) == same
    assert digest_rows(changed, 7, {name.partition(".")[0]}) == digest_rows(
        TABLE, 7, {name.partition(".")[0]}
    )


@pytest.mark.parametrize("name", COLUMNS)
def test_every_column_s_name_counts(name: str) -> None:
    """The same values in another column are other content."""
    renamed = TABLE.rename_columns([f"{n}_" if n == name else n for n in TABLE.column_names])
    assert digest_rows(renamed, 7) != digest_rows(TABLE, 7)


def test_the_digests_of_release_0_1_0_are_found() -> None:
    """Imports that it stored are repeated: these values are its own."""
    assert digest_rows(TABLE, 7).hex() == "539d27345ccf9d037aed4f1315754bc2"
    assert digest_rows(TABLE, 3, {"obs", "tags"}).hex() == "c8ec3939a83459f3cfa71bb5aba4c3f8"
