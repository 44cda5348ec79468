"""An Arrow stream is as large as it looks, or it is refused before it is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ingest.bulk_import.arrow_stream import MAX_ROWS, read_table
from ingest.protocol.errors import Refusal


def stream(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    chosen = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, table.schema, options=chosen) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def column(values: Any, name: str = "eps_id", **options: Any) -> bytes:
    return stream(pa.table({name: values}), **options)


LAWFUL: dict[str, bytes] = {
    "strings": column(["a", "b"]),
    "a dictionary of strings": column(pa.array(["a", "b"] * 50).dictionary_encode()),
    "numbers in lists": column(pa.array([[1.0, 2.0]], pa.list_(pa.float32(), 2)), "obs"),
    "nulls": column(pa.nulls(3)),
    "bytes": column([b"\x00" * 16], "obs.image"),
}

HUGE = pa.DictionaryArray.from_arrays(
    pa.array(np.zeros(500_000, np.int8)), pa.array(["x" * 1_000_000])
)
EMPTY = pa.list_(pa.float32(), 0)
EMPTY_LISTS = pa.Array.from_buffers(
    pa.list_(EMPTY, 10**7),
    1,
    [None],
    children=[pa.Array.from_buffers(EMPTY, 10**7, [None], children=[pa.array([], pa.float32())])],
)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "zstd": (column(["a"], compression="zstd"), "unsupported_media"),
    "lz4 in a dictionary": (
        column(pa.array(["a" * 99]).dictionary_encode(), compression="lz4"),
        "unsupported_media",
    ),
    "a repeated string": (column(HUGE), "too_large"),
    "rows of nothing": (column(pa.nulls(MAX_ROWS + 1)), "too_large"),
    "lists of nothing": (
        column(pa.FixedSizeListArray.from_arrays(pa.nulls(10**8), 10**8), "obs"),
        "invalid",
    ),
    "lists of empty lists": (column(EMPTY_LISTS, "obs"), "invalid"),
    "lists of names": (column([["a"]]), "invalid"),
    "views": (column(pa.array(["a" * 99], pa.string_view())), "invalid"),
    "structs": (column([{"a": 1}], "obs"), "invalid"),
    "times": (column(pa.array([1], pa.timestamp("ns")), "ts"), "invalid"),
    "noise": (b"noise" * 99, "malformed"),
    "nothing": (b"", "malformed"),
    "half of it": (column(["a"] * 99)[:-200], "malformed"),
}


@pytest.mark.parametrize("name", LAWFUL)
def test_columns_of_values_are_read(name: str) -> None:
    assert read_table(LAWFUL[name]).num_columns == 1


def test_dictionaries_are_read_as_what_they_stand_for() -> None:
    """A null among their values is a null."""
    words = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, None]), pa.array(["a", None, "b"]))
    assert read_table(column(words))["eps_id"].to_pylist() == ["a", None, "b", None]


@pytest.mark.parametrize("name", HOSTILE)
def test_what_could_grow_is_refused(name: str) -> None:
    """Each is small as a body, but would take gigabytes or load another library once it is read."""
    body, code = HOSTILE[name]
    with pytest.raises(Refusal) as refused:
        read_table(body)
    assert refused.value.code == code


def test_no_column_brings_pandas_into_the_collector(tmp_path: Path) -> None:
    """The process that acknowledges loads no pandas, whatever type a client sends."""
    for number, body in enumerate([*LAWFUL.values(), *(body for body, _ in HOSTILE.values())]):
        (tmp_path / f"{number}").write_bytes(body)
    code = (
        "import pathlib, sys\n"
        "from ingest.bulk_import.arrow_stream import read_table, Refusal\n"
        "for path in pathlib.Path(sys.argv[1]).iterdir():\n"
        "    try:\n"
        "        [column.to_pylist() for column in read_table(path.read_bytes()).columns]\n"
        "    except Refusal:\n"
        "        pass\n"
        "print('pandas' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")
