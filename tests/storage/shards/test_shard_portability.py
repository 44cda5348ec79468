"""A shard is plain Parquet: four other readers see in it what Arrow sees."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.experience.episode import Part
from storage.shards.schema import stored_names
from storage.shards.shard import ShardWriter, decode_column, read_shard, shard_metadata
from storage.spaces.codec import Codec
from storage.spaces.descriptors import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
    canonical_json,
    schema_id,
)

NESTED = Dict(
    (
        ("camera", Box((2, 3), np.dtype("uint8"))),
        ("note", Text(8)),
        ("pair", Tuple((Discrete(3), Box((3,)), Box((), np.dtype("float64"))))),
        ("half", Box((2,), np.dtype("float16"))),
        ("depth", Box((1025,), np.dtype("float16"))),
        ("action_mask", MultiBinary((6,))),
    )
)
PAIRS: dict[str, tuple[Space, Space, Callable[[int], Any], Callable[[int], Any]]] = {
    "vector": (Box((4,)), Discrete(2), lambda i: np.arange(4) + i / 7, lambda i: i % 2),
    "matrix": (
        Box((2, 2), np.dtype("float64")),
        MultiDiscrete((3, 4)),
        lambda i: np.full((2, 2), i / 3),
        lambda i: [i % 3, i % 4],
    ),
    "image": (
        Box((3, 2, 2), np.dtype("uint8")),
        Box((2,)),
        # zeros at the end: what fixed-length byte arrays lose in one of these tools
        lambda i: np.array([i, *[7] * 5, *[0] * 6]).reshape(3, 2, 2),
        lambda i: [i / 9, -i],
    ),
    "scalar": (
        Box((), np.dtype("uint64")),
        Box((), np.dtype("bool")),
        lambda i: 2**63 + i,
        lambda i: i % 2 == 0,
    ),
    "text": (Text(20), MultiBinary((3,)), lambda i: f"\N{SNOWMAN} {i}", lambda i: [0, i % 2, 1]),
    "candidates": (
        Dict({"action_mask": MultiBinary((5,)), "candidates": Box((5, 2), ragged=True)}),
        Discrete(5),
        lambda i: {
            "action_mask": np.arange(5) <= i % 5,
            "candidates": np.where(np.arange(5)[:, None] < i % 5, [[0.0, i]], 0),
        },
        lambda i: 0,
    ),
    "empty": (Box((0,)), Discrete(1), lambda i: [], lambda i: 0),
    "nested": (
        NESTED,
        Tuple((Discrete(2), Text(4))),
        lambda i: {
            "camera": np.full((2, 3), i),
            "note": "" if i == 1 else f"n{i}",
            "pair": (i % 3, np.arange(3) + i, i / 2),
            "half": [i / 2, -1],
            "depth": np.full(1025, i + 0.5),
            "action_mask": [1, 0, 0, 1, i % 2, 1],
        },
        lambda i: (i % 2, "ab"),
    ),
}


def parts_of(pair: str) -> list[Part]:
    """Three parts of two episodes: null and known logp, infos, final observations, endings."""
    observation, action, obs, act = PAIRS[pair]
    codecs = Codec(observation), Codec(action)
    parts = []
    for ordinal, steps in enumerate((2, 3, 1)):
        rows = range(ordinal * 10, ordinal * 10 + steps)
        values = [
            [codec.encode(make(i)) for i in rows]
            for codec, make in zip(codecs, (obs, act), strict=True)
        ]
        lengths = [
            b"" if codec.itemsize is not None else np.array([*map(len, v)], "<u4").tobytes()
            for codec, v in zip(codecs, values, strict=True)
        ]
        parts.append(
            Part(
                episode_id=f"\N{SNOWMAN}-{min(ordinal, 1)}",
                part=max(0, ordinal - 1),
                t0=0,
                steps=steps,
                schema_id=schema_id(observation, action),
                obs=b"".join(values[0]),
                obs_lengths=lengths[0],
                actions=b"".join(values[1]),
                actions_lengths=lengths[1],
                rewards=np.linspace(-1, 1 / 3, steps).tobytes(),
                action_logp=np.where(np.arange(steps) % 2 == 0, -0.1, np.nan).tobytes(),
                policy_version=np.arange(-1, steps - 1).tobytes(),
                source=bytes([ordinal] * steps),
                pass_prob=np.full(steps, 0.5).tobytes(),
                ts=(np.arange(steps) + 1_700_000_000_000_000).tobytes(),
                received_ts=(np.arange(steps) + 1_700_000_000_000_001).tobytes(),
                dist_inputs=np.arange(2 * steps, dtype="<f4").tobytes() if ordinal == 1 else b"",
                dist_lengths=np.full(steps, 8, "<u4").tobytes() if ordinal == 1 else b"",
                infos={0: '{"click":"\N{SNOWMAN}"}'} if ordinal else {},
                final_obs=codecs[0].encode(obs(99)) if ordinal == 2 else None,
                ended=(None, None, "terminated")[ordinal],
                training_enabled=ordinal != 0,
                continues="before" if ordinal else None,
                tags='{"tenant":"x"}',
                ordinal=ordinal + 3,
                episode_ordinal=min(ordinal, 1) + 3,
                env_t=(2 * np.arange(steps) + 7).tobytes() if ordinal == 2 else b"",
                agents=3 if ordinal == 2 else -1,
            )
        )
    return parts


def plain(value: Any) -> Any:
    """A value as JSON would have it, whatever tool gave it; null and NaN are one."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if isinstance(value, (list, tuple, np.ndarray, pl.Series)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if value is None or value is pd.NA or (isinstance(value, float) and value != value):
        return None
    return value


def by_pandas(path: Path) -> dict[str, list[Any]]:
    frame = pd.read_parquet(path, engine="pyarrow")
    return {name: plain(list(frame[name])) for name in frame.columns}


def by_polars(path: Path) -> dict[str, list[Any]]:
    frame = pl.read_parquet(path)
    return {name: plain(frame[name].to_list()) for name in frame.columns}


def by_duckdb(path: Path) -> dict[str, list[Any]]:
    with duckdb.connect() as connection:
        result = connection.execute("select * from read_parquet(?)", [str(path)])
        names = [column[0] for column in result.description or []]
        rows = result.fetchall()
    return {name: plain([row[i] for row in rows]) for i, name in enumerate(names)}


FASTPARQUET = """
import json, sys
import fastparquet, numpy, pandas

def plain(value):
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (list, numpy.ndarray)):
        return [plain(item) for item in value]
    if isinstance(value, numpy.generic):
        return plain(value.item())
    if value is None or value is pandas.NA or value != value:
        return None
    return value

for line in sys.stdin:
    frame = fastparquet.ParquetFile(line[:-1]).to_pandas()
    columns = {name: [plain(v) for v in frame[name]] for name in frame.columns}
    print(json.dumps(columns), flush=True)
"""


class _Fastparquet:
    """A process that reads with fastparquet, which can crash instead of raising; the next read then
    starts another process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def read(self, path: Path) -> dict[str, list[Any]]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", FASTPARQUET],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(path, file=stdin, flush=True)
        line = stdout.readline()
        if not line:
            self.close()
        found: dict[str, list[Any]] = json.loads(line)
        return found

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.communicate()


_fastparquet = _Fastparquet()


@pytest.fixture(scope="module", autouse=True)
def fastparquet_ends() -> Iterator[None]:
    yield
    _fastparquet.close()


def by_fastparquet(path: Path) -> dict[str, list[Any]]:
    return _fastparquet.read(path)


TOOLS = {f.__name__[3:]: f for f in (by_pandas, by_polars, by_duckdb, by_fastparquet)}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize("pair", PAIRS)
def test_another_tool_reads_equal_values(
    tmp_path: Path, pair: str, compression: Any, tool: str
) -> None:
    """Every column of a shard has the same values in every tool, nulls included."""
    writer = ShardWriter(tmp_path, compression=compression, row_group_bytes=500)
    canonical = canonical_json(*PAIRS[pair][:2])
    path = writer.write("s", canonical, parts_of(pair)).path
    table, columns = read_shard(path, verify="digest"), shard_metadata(path).columns
    names = stored_names(table.column_names, columns)
    expected = dict(zip(names, (plain(one.to_pylist()) for one in table.columns), strict=True))
    found = TOOLS[tool](path)
    assert list(found) == names
    assert not any("." in name for name in names)
    for name, values in expected.items():
        if tool == "pandas" and name == "final_obs":  # integers with nulls are floats there
            values = [float(one) if type(one) is int else one for one in values]
        assert found[name] == values, name
    fields = pq.ParquetFile(path).schema_arrow
    assert not any(field.metadata for field in fields)  # no ids: tables of Iceberg map by name
    assert not any(pa.types.is_fixed_size_list(field.type) for field in fields)


def test_the_values_that_the_tools_agree_on_are_not_trivial(tmp_path: Path) -> None:
    """The comparison above covers nulls, text beyond ASCII, vectors and bytes."""
    canonical = canonical_json(*PAIRS["nested"][:2])
    path = ShardWriter(tmp_path).write("s", canonical, parts_of("nested")).path
    rows = by_polars(path)
    assert rows["eps_id"] == ["\N{SNOWMAN}-0"] * 2 + ["\N{SNOWMAN}-1"] * 4
    assert rows["action_logp"] == [-0.1, None, -0.1, None, -0.1, -0.1]
    assert rows["obs__note"][:3] == ["n0", "", "n10"]
    assert rows["final_obs__camera"] == [None] * 5 + ["63" * 6]
    assert rows["obs__half"][2] == [5.0, -1.0]
    assert rows["obs__pair__1"][2] == [10.0, 11.0, 12.0]
    assert rows["final_obs__pair__2"] == [None] * 5 + [49.5]
    assert rows["infos"][2] == '{"click":"\N{SNOWMAN}"}'
    assert rows["ended"] == [None] * 5 + ["terminated"]
    assert rows["env_t"] == [None] * 5 + [7]
    assert rows["agents"] == [None] * 5 + [3]


def test_lists_of_candidates_are_as_long_as_they_are(tmp_path: Path) -> None:
    """Rows beyond the candidates of a decision are neither in the encoding nor in the file."""
    canonical = canonical_json(*PAIRS["candidates"][:2])
    path = ShardWriter(tmp_path).write("s", canonical, parts_of("candidates")).path
    rows = by_duckdb(path)["obs__candidates"]
    assert rows == [[], [0, 1], [], [0, 11] * 1, [0, 12] * 2, []]
    group = pq.ParquetFile(path).metadata.row_group(0)
    chunks = [group.column(at) for at in range(group.num_columns)]
    coded = {c.path_in_schema for c in chunks if c.has_dictionary_page}
    assert "obs__action_mask.list.element" in coded  # half the bytes and time of plain numbers
    assert "obs__candidates.list.element" not in coded
    table = read_shard(path)
    whole = decode_column(table, "obs.candidates")
    assert whole.shape == (6, 5, 2)
    assert whole[4].tolist() == [[0, 12], [0, 12], [0, 0], [0, 0], [0, 0]]
    assert decode_column(table, "final_obs.candidates")[5].tolist() == [[0, 99]] * 4 + [[0, 0]]


def test_bytes_decode_by_what_the_footer_says(tmp_path: Path) -> None:
    """Another tool needs only the footer's dtype and shape to decode bytes."""
    canonical = canonical_json(*PAIRS["nested"][:2])
    path = ShardWriter(tmp_path).write("s", canonical, parts_of("nested")).path
    columns = shard_metadata(path).columns
    frame = pd.read_parquet(path)
    for name, expected in (
        ("obs.camera", np.full((2, 3), 11, np.uint8)),
        ("obs.depth", np.full((1025,), 11.5, np.float16)),
    ):
        spec = columns[name]
        value = np.frombuffer(frame[spec.stored][3], spec.dtype).reshape(spec.shape)
        assert (value == expected).all()
        assert value.dtype == expected.dtype
