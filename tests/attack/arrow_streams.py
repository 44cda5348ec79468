"""Arrow streams for the bulk import: flipped bytes, bombs, unexpected columns."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from ingest.protocol.messages import ARROW
from tests.attack.attacked_collector import Case, arena
from tests.faults.scenario import Scenario, Trial, Verdict


def stream(table: pa.Table, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    chosen = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, table.schema, options=chosen) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def steps(name: str, rows: int = 20, **columns: Any) -> pa.Table:
    """A valid table, except for `columns`; None omits a column."""
    obs = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4 * rows, np.float32)), 4)
    given = {
        "eps_id": [name] * rows,
        "obs": obs,
        "actions": [0] * rows,
        "rewards": [0.5] * rows,
        **columns,
    }
    return pa.table({key: value for key, value in given.items() if value is not None})


def of_columns() -> Iterator[tuple[str, bytes]]:
    """(name, stream): columns with a hostile type, number or content."""
    odd: dict[str, Any] = {
        "nulls": pa.nulls(20),
        "a billion nulls": pa.nulls(1),
        "structs": pa.array([{"a": 1}] * 20),
        "maps": pa.array([[("a", 1)]] * 20, pa.map_(pa.string(), pa.int64())),
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([20], pa.int32()), pa.array(["x"])),
        "views": pa.array(["x" * 40] * 20, pa.string_view()),
        "decimals": pa.array([1] * 20, pa.decimal128(38, 0)),
        "times": pa.array([2**62] * 20, pa.timestamp("ns")),
        "lists of lists": pa.array([[[0.5]]] * 20),
        "strings": pa.array(["../../x\n"] * 20),
        "bytes": pa.array([b"\xff" * 16] * 20),
        "long strings": pa.array(["x" * 100_000] * 20),
        "NaN": pa.array([float("nan")] * 20),
        "infinity": pa.array([float("-inf")] * 20),
        "2^63": pa.array([2**63] * 20, pa.uint64()),
        "a dictionary": pa.array(["a", "b"] * 10).dictionary_encode(),
        "a dictionary bomb": pa.DictionaryArray.from_arrays(
            pa.array(np.zeros(20, np.int8)), pa.array(["x" * 1_000_000])
        ),
        "JSON with NaN": pa.array(['{"a": NaN}'] * 20),
        "JSON with half a surrogate": pa.array(['{"a": "\\ud800"}'] * 20),
        "JSON with a half as key": pa.array(['{"\\ud800": "a"}'] * 20),
        "deep JSON": pa.array(['{"a":' + "[" * 5_000 + "]" * 5_000 + "}"] * 20),
        "JSON of 400 digits": pa.array(['{"a": ' + "9" * 5_000 + "}"] * 20),
        "no JSON": pa.array(["{"] * 20),
    }
    names = "eps_id obs actions rewards infos tags ts t policy_id final_obs action_logp continues"
    for column in [*names.split(), "agent_id", "pass_prob", "ended", "unknown", ""]:
        for label, values in odd.items():
            if len(values) == 20:
                table = steps(f"a-{column}-{label}", **{column: values})
                yield f"{column} = {label}", stream(table)
    for column in ("eps_id", "obs", "actions", "rewards"):
        yield f"no {column}", stream(steps("x", **{column: None}))


def of_streams(chance: random.Random, flips: int) -> Iterator[tuple[str, bytes]]:
    """(name, stream): malformed streams."""
    whole = stream(steps("flipped", 200))
    yield "nothing", b""
    yield "noise", chance.randbytes(10_000)
    yield "no columns", stream(pa.table({}))
    yield "no rows", stream(steps("x", 0))
    yield "a file", b"ARROW1\0\0" + whole
    for kind in ("zstd", "lz4"):
        table = steps("bomb", 20, infos=["x" * 1_000_000] * 20)
        yield kind, stream(table, compression=kind)
    yield "a billion rows of nothing", stream(pa.table({"eps_id": pa.nulls(10**9)}))
    wide = pa.FixedSizeListArray.from_arrays(pa.nulls(10**9), 10**7)
    yield "lists of nothing", stream(pa.table({"obs": wide}))
    yield "many columns", stream(pa.table({f"c{n}": [1] for n in range(5_000)}))
    yield (
        "the same column twice",
        stream(pa.Table.from_arrays([pa.array(["x"])] * 2, names=["eps_id", "eps_id"])),
    )
    for number in range(flips):
        damaged = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            # Half of them near the front, where lengths and types are.
            damaged[chance.randrange(len(whole) if number % 2 else 700)] = chance.randrange(256)
        yield f"flip {number}", bytes(damaged)
    for size in sorted(chance.sample(range(len(whole)), 20)):
        yield f"cut at {size}", whole[:size]


def cases(seed: int, flips: int) -> list[Case]:
    """Every case, with a correct checksum, so that Arrow has to detect the error."""
    found: list[Case] = []
    for label, body in [*of_columns(), *of_streams(random.Random(seed), flips)]:
        headers = {"content-type": ARROW, "headrace-crc32": f"{zlib.crc32(body):08x}"}
        found.append(Case(label, "POST", "/v1/steps", body, headers))
    for crc in ("", "0", "zzzzzzzz", "x" * 1_000):
        headers = {"content-type": ARROW, "headrace-crc32": crc}
        found.append(Case(f"checksum {crc:.10}", "POST", "/v1/steps", b"x", headers))
    return found


def run(trial: Trial) -> Verdict:
    with arena(trial) as place:
        every = cases(trial.seed, trial.size)
        place.random.shuffle(every)
        place.rounds(every, trial)
    return place.verdict


SCENARIO = Scenario(
    name="arrow_streams",
    law="a hostile Arrow stream is refused before it grows; nobody else notices",
    unit="flips",
    quick=100,
    long=5_000,
    planted=20,
    run=run,
)
